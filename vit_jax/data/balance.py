"""Weights of the loss for classes of different sizes."""

import numpy as np

from vit_jax.data.subsets import Source, class_labels


def class_weights(source: Source) -> tuple[float, ...]:
  """Return n / (K n_c) for each class c, to weight the loss of its examples.

  n is the number of examples, n_c that of class c, and K the number of classes
  with examples. Classes without get 1. The mean weight of the examples is 1.
  """
  labels = class_labels(source)
  num_classes = getattr(source, 'num_classes', None) or 0
  counts = np.bincount(labels, minlength=num_classes)
  present = np.count_nonzero(counts)
  return tuple(
    len(labels) / (present * int(count)) if count else 1.0 for count in counts
  )

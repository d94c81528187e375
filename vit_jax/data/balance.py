"""Weights of the loss for classes of different sizes; moments of numbers."""

import numpy as np

from vit_jax.data import subsets
from vit_jax.data.subsets import Source, class_labels
from vit_jax.types import UserError


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


def positive_weights(source: Source) -> tuple[float, ...]:
  """Return negatives / positives of each label; 1 without positives.

  Missing labels, NaN, do not count. These weights of the loss of positives make
  both parts of each label equally important.
  """
  labels = subsets.labels(source)
  positive, known = np.nansum(labels, 0), np.sum(~np.isnan(labels), 0)
  return tuple(
    float((n - x) / x) if x else 1.0 for x, n in zip(positive, known)
  )


def moments(source: Source) -> tuple[tuple[float, float], ...]:
  """Return (mean, standard deviation) of each number, without NaN."""
  columns = subsets.labels(source).T.astype(np.float64)
  known = [column[~np.isnan(column)] for column in columns]
  names = getattr(source, 'class_names', None) or range(len(known))
  for name, numbers in zip(names, known):
    if len({*numbers}) < 2:
      raise UserError(
        f'{name} has {len({*numbers})} different numbers in {len(columns[0])} '
        'training images. Expected two or more. Leave it out.'
      )
  return tuple((float(x.mean()), float(x.std())) for x in known)

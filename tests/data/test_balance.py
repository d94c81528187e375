"""Weights of classes of different sizes."""

import numpy as np

from vit_jax.data import balance

COUNTS = (50, 7, 1, 0, 3)  # of each class; one is empty
LABELS = np.repeat(np.arange(5), COUNTS)


class Labelled:
  """A source of which only the labels are read."""

  num_classes = 5

  def __len__(self):
    return len(LABELS)

  def labels(self):
    return LABELS.astype(np.int32)


def test_class_weights():
  weights = balance.class_weights(Labelled())
  n, k = len(LABELS), 4
  expected = [n / (k * c) if c else 1 for c in COUNTS]
  np.testing.assert_allclose(weights, expected)
  np.testing.assert_allclose(np.mean(np.take(weights, LABELS)), 1)

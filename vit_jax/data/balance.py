"""Imbalanced classes: visit each class equally often, or weight the loss."""

import numpy as np

from vit_jax.data import pipeline


class BalancedOrder:
  """Order of training that visits each class equally often.

  Each K consecutive positions visit each of the K classes once, in an order
  that depends on (seed, position // K). A class visits all of its examples
  before it visits one again, in an order that depends on (seed, class, round).
  So rare examples repeat, frequent ones take turns, and no state is kept: a run
  resumes exactly, on any number of hosts. Classes without examples are left
  out.

  Args:
    labels: int [n], of all examples.
    seed: of the order.

  Raises:
    ValueError: labels that are not one class per example.
  """

  def __init__(self, labels: np.ndarray, seed: int) -> None:
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.dtype.kind not in 'iu':
      raise ValueError(
        f'balanced=True needs one class per example; the labels are '
        f'{labels.dtype} {labels.shape}. Set balanced=False.'
      )
    by_label = np.argsort(labels, kind='stable')
    starts = np.flatnonzero(np.diff(labels[by_label])) + 1
    self._members = np.split(by_label, starts)
    self._seed = seed
    # The last shuffle of each class: (round, indices).
    self._shuffles = [(-1, members) for members in self._members]
    self._order = (-1, np.arange(len(self._members)))

  def __call__(self, position: int) -> tuple[int, int]:
    """Return (round of the class, index of the example) of a position."""
    visit, place = divmod(position, len(self._members))
    kept, order = self._order
    if kept != visit:
      order = self._shuffled(len(self._members), visit)
      self._order = visit, order
    label = order[place]
    members = self._members[label]
    round_, place = divmod(visit, len(members))
    kept, shuffle = self._shuffles[label]
    if kept != round_:
      shuffle = members[self._shuffled(len(members), round_, int(label))]
      self._shuffles[label] = round_, shuffle
    return round_, int(shuffle[place])

  def _shuffled(self, count, *key):
    seeds = np.random.SeedSequence([self._seed, *key])
    return np.random.default_rng(seeds).permutation(count)


def class_weights(source: 'pipeline.Source') -> tuple[float, ...]:
  """Return n / (K n_c) for each class c, to weight the loss of its examples.

  n is the number of examples, n_c that of class c, and K the number of classes
  that have examples. The mean weight of the examples is 1. Classes without
  examples get 1.

  Args:
    source: with int labels, see pipeline.py.

  Raises:
    ValueError: labels that are not one class per example.
  """
  labels = np.asarray(pipeline.labels(source))
  if labels.ndim != 1:
    raise ValueError(
      f'class weights need one class per example; the labels are '
      f'{labels.dtype} {labels.shape}.'
    )
  num_classes = getattr(source, 'num_classes', None) or int(labels.max()) + 1
  counts = np.bincount(labels, minlength=num_classes)
  present = np.count_nonzero(counts)
  return tuple(
    len(labels) / (present * int(count)) if count else 1.0 for count in counts
  )

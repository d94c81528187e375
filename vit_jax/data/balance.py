"""Imbalanced classes and unequal examples: orders of training, and weights.

See order.py for what an order is.
"""

import dataclasses
import difflib
import io
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from etils import epath

from vit_jax.data import fingerprints, order, pipeline
from vit_jax.domains import NonNegative, Range, checked


@checked
@dataclasses.dataclass(frozen=True)
class Balanced:
  """Each class equally often, or in other proportions: see BalancedOrder.

  Attributes:
    power: a class of n examples is visited in proportion to n ** power. 0: each
      class equally often; 0.5: by the square root; 1: as in the data.
    weights: of classes, one for each or {name: weight}, by which these
      proportions are multiplied. Classes without a name in it have weight 1.

  Raises:
    ValueError: (in `bind`) the source has other labels than one class per
      example; weights that do not fit its classes.
  """

  power: Annotated[float, Range(-10, 10)] = 0.0
  weights: Mapping[str, NonNegative] | Sequence[NonNegative] | None = None

  def bind(self, source: pipeline.Source, seed: int) -> order.Visits:
    weights = None
    if self.weights is not None:
      weights = _weights_of_classes(self.weights, source)
    labels = pipeline.labels(source)
    return BalancedOrder(labels, seed, power=self.power, weights=weights)


def _weights_of_classes(weights, source):
  """Return the weight of each class of a source: float64 [K]."""
  names = getattr(source, 'class_names', None)
  count = getattr(source, 'num_classes', None)
  if not isinstance(weights, Mapping):
    if count is not None and len(weights) != count:
      raise ValueError(
        f'Balanced: weights has {len(weights)} numbers, but the source has '
        f'{count} classes. Give one number for each class, or {{name: weight}}.'
      )
    return np.array(weights, np.float64)
  if names is None:
    raise ValueError(
      'Balanced: weights has names of classes, but the source has no '
      'class_names. Give one number for each class, in the order of the labels.'
    )
  for name in weights:
    if name not in names:
      near = difflib.get_close_matches(str(name), map(str, names), n=1)
      hint = f' Did you mean {near[0]!r}?' if near else ''
      raise ValueError(
        f'Balanced: weights has {name!r}, which is none of the {len(names)} '
        f'classes of the source.{hint}'
      )
  return np.array([weights.get(name, 1.0) for name in names], np.float64)


class BalancedOrder:
  """Visits of classes in turn, equally often or in other proportions.

  By default each K consecutive positions visit each of the K classes once, in
  an order that depends on (seed, position // K). A class visits all of its
  examples before it visits one again, in an order that depends on (seed, class,
  round). So rare examples repeat, frequent ones take turns. Classes without
  examples are left out. For other proportions see `order.Turns`.

  Args:
    labels: int [n], of all examples.
    seed: of the order.
    power, weights: see Balanced; weights float [K], None: all 1.

  Raises:
    ValueError: labels that are not one class per example; no weight for a
      class; weights that are negative, not finite, or 0 for all examples.
  """

  def __init__(
    self,
    labels: np.ndarray,
    seed: int,
    *,
    power: float = 0.0,
    weights: np.ndarray | None = None,
  ) -> None:
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.dtype.kind not in 'iu':
      raise ValueError(
        f'Balanced needs one class per example; the labels are {labels.dtype} '
        f'{labels.shape}. Use another order, such as Shuffled or Weighted.'
      )
    by_label = np.argsort(labels, kind='stable')
    classes, starts = np.unique(labels[by_label], return_index=True)
    members = np.split(by_label, starts[1:])
    shares = np.array([len(x) for x in members], np.float64) ** power
    if weights is not None:
      weights = np.asarray(weights, np.float64)
      order.check_weights('Balanced: weights', weights)
      if classes[-1] >= len(weights):
        raise ValueError(
          f'Balanced: weights has {len(weights)} numbers, but there are '
          f'examples of class {classes[-1]}. Give one number for each class.'
        )
      shares *= weights[classes]
      if not shares.any():
        raise ValueError(
          'Balanced: weights is 0 for every class that has examples. At least '
          'one of them must be above 0.'
        )
    self._members = [x for x, share in zip(members, shares) if share]
    self._turns = order.Turns(shares[shares > 0].tolist(), seed)
    self._seed = seed
    # The last shuffle of each class: (round, indices).
    self._shuffles = [(-1, members) for members in self._members]

  def __call__(self, position: int) -> tuple[int, int]:
    """Return (round of the class, index of the example) of a position."""
    label, turn = self._turns(position)
    members = self._members[label]
    round_, place = divmod(turn, len(members))
    kept, shuffle = self._shuffles[label]
    if kept != round_:
      places = order.shuffled(len(members), self._seed, round_, label)
      shuffle = members[places]
      self._shuffles[label] = round_, shuffle
    return round_, int(shuffle[place])


@checked
@dataclasses.dataclass(frozen=True)
class Weighted:
  """Independent draws of examples in proportion to weights, with replacement.

  Attributes:
    weights: one for each example, 0 or more: a .npy file, or numbers. An
      example of weight 0 is never drawn.

  Raises:
    ValueError: (in `bind`) a file that cannot be read; another number of
      weights than of examples; weights that are negative, not finite, or all 0.
  """

  weights: Any

  def bind(self, source: pipeline.Source, seed: int) -> order.Visits:
    weights = self._load()
    if len(weights) != len(source):
      raise ValueError(
        f'{self._name()} has {len(weights)} numbers, but the source has '
        f'{len(source)} examples. Expected one weight for each example.'
      )
    return WeightedOrder(weights, seed, what=self._name())

  def fingerprint(self) -> dict[str, Any]:
    """Return the number of the weights and their hash."""
    weights = self._load()
    digest = fingerprints.digest([weights.astype('<f8').tobytes()])
    kind = f'{type(self).__module__}.{type(self).__qualname__}'
    return {'kind': kind, 'num_examples': len(weights), 'weights': digest}

  def _name(self):
    is_path = isinstance(self.weights, str | os.PathLike)
    return (
      f'Weighted: weights={self.weights!r}'
      if is_path
      else ('Weighted: weights')
    )

  def _load(self):
    """Return the weights: float64 [n]."""
    weights = self.weights
    try:
      if isinstance(weights, str | os.PathLike):
        content = io.BytesIO(epath.Path(weights).read_bytes())
        weights = np.load(content, allow_pickle=False)
      weights = np.asarray(weights, np.float64)
    except Exception as error:  # each file system raises its own types
      raise ValueError(
        f'{self._name()} cannot be read: {type(error).__name__}: {error}. '
        'Expected one number for each example, in a .npy file or a list.'
      ) from error
    if weights.ndim != 1:
      raise ValueError(
        f'{self._name()} has shape {weights.shape}. Expected [n], one weight '
        'for each of n examples.'
      )
    return weights


class WeightedOrder:
  """Visits of examples that are drawn in proportion to weights.

  The draw at a position depends on (seed, position). Each position is a visit
  of its own.

  Args:
    weights: float [n], of the examples.
    seed: of the order.
    what: name of the weights, for messages.

  Raises:
    ValueError: weights that are negative, not finite, or all 0.
  """

  def __init__(
    self, weights: np.ndarray, seed: int, *, what: str = 'weights'
  ) -> None:
    weights = np.asarray(weights, np.float64)
    order.check_weights(what, weights)
    self._bounds, self._seed = np.cumsum(weights / weights.max()), seed
    self._last = int(np.flatnonzero(weights)[-1])

  def __call__(self, position: int) -> tuple[int, int]:
    """Return (position, index of the example) of a position."""
    # The pipeline has 0 in the last word of its counters.
    counter = np.array([0, 0, position, 1], np.uint64)
    key = np.array([self._seed, 0], np.uint64)
    draw = np.random.Philox(key=key, counter=counter).random_raw() >> 11
    at = draw * 2.0**-53 * self._bounds[-1]
    index = int(np.searchsorted(self._bounds, at, side='right'))
    return position, min(index, self._last)  # `at` may be rounded up


def class_weights(source: pipeline.Source) -> tuple[float, ...]:
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

"""The orders in which training visits examples.

An order is any object with

  order.bind(source, seed)   a function visits(position) -> (visit, index)

`index` is the example at a position of training, 0, 1, 2, ... The augmentation
is drawn from (seed, visit, index). The pair (visit, index) depends only on
(seed, position), and occurs at no other position. `visits` must be picklable.
An epoch always has as many positions as the source has examples.
"""

import dataclasses
import functools
from collections.abc import Callable, Sized
from typing import Annotated, Any, Protocol

import numpy as np

from vit_jax.data.subsets import Source, class_labels, ranks
from vit_jax.types import Expect

Visits = Callable[[int], tuple[int, int]]  # position -> (visit, index)

_MOST_PERMUTED = 2**20  # examples; 4 MB, made in 15 ms


class Order(Protocol):
  def bind(self, source: Any, seed: int, /) -> Visits: ...


@dataclasses.dataclass(frozen=True)
class Shuffled:
  """Each example once in an epoch; each epoch has another order."""

  def bind(self, source: Sized, seed: int) -> Visits:
    return functools.partial(_shuffled, len(source), seed)


def _shuffled(count, seed, position):
  epoch, place = divmod(position, count)
  if count <= _MOST_PERMUTED:
    return epoch, int(_permutation(count, seed, epoch)[place])
  from grain.experimental import index_shuffle

  # One place at a time, without memory; slower for small sets.
  return epoch, index_shuffle(
    place, max_index=count - 1, seed=_seed(seed, epoch), rounds=4
  )


# Threads read neighbouring positions, which may be of two epochs.
@functools.lru_cache(maxsize=4)
def _permutation(count, *key):
  """Return a permutation of 0 to count - 1 that depends on the key."""
  return np.random.default_rng(key).permutation(count).astype(np.uint32)


@functools.lru_cache(maxsize=4)
def _seed(*key):
  """Return a seed of 32 bits that depends on the key."""
  return int(np.random.SeedSequence(key).generate_state(1)[0])


@dataclasses.dataclass(frozen=True)
class Repeated:
  """Repeated augmentation: each example several times in a row.

  The repeats of an example differ in their augmentation. An epoch visits
  1 / times of the examples, as in DeiT; the next ones visit the others. If
  batch_size is a multiple of `times`, all repeats are in the same batch.
  """

  times: Annotated[int, Expect(lambda n: 1 <= n <= 2**16, '1 to 65536')] = 3
  order: Order = Shuffled()

  def bind(self, source: Sized, seed: int) -> Visits:
    visits = self.order.bind(source, seed)
    return functools.partial(_repeated, visits, self.times)


def _repeated(visits, times, position):
  turn, repeat = divmod(position, times)
  visit, index = visits(turn)
  return visit * times + repeat, index


@dataclasses.dataclass(frozen=True)
class Balanced:
  """Each class equally often, or in proportion to a power of its size.

  Classes take turns in blocks, in an order that depends on (seed, block): with
  power=0, each K consecutive positions visit each of the K classes once, except
  empty ones. A class visits all of its examples before it repeats one.

  Attributes:
    power: a class of n examples is visited in proportion to n ** power. 0: each
      class equally often; 0.5: by the square root; 1: as in the data. The
      proportions are rounded to 1/4096, or 1/16 of the mean of a class.
  """

  power: Annotated[float, Expect(lambda x: -10 <= x <= 10, '-10 to 10')] = 0.0

  def bind(self, source: Source, seed: int) -> Visits:
    labels = class_labels(source)
    by_class = np.argsort(labels, kind='stable')
    starts = np.unique(labels[by_class], return_index=True)[1]
    members = np.split(by_class, starts[1:])
    shares = np.array([len(x) for x in members], np.float64) ** self.power
    parts = max(4096, 16 * len(members))
    turns = np.maximum(1, np.round(parts * shares / shares.sum())).astype(int)
    return _Turns(members, turns // np.gcd.reduce(turns), seed)


@dataclasses.dataclass(eq=False)
class _Turns:
  """Visits of classes that take turns."""

  members: list[np.ndarray]  # for each class the indices of its examples
  turns: np.ndarray  # int [K], visits of each class in a block of positions
  seed: int

  def __post_init__(self) -> None:
    self.classes = np.repeat(np.arange(len(self.turns)), self.turns)
    # The last round of each class: (number, indices).
    self._rounds: list[Any] = [(-1, None)] * len(self.turns)

  def __call__(self, position: int) -> tuple[int, int]:
    """Return (round of the class, index of the example) of a position."""
    block, place = divmod(position, len(self.classes))
    classes, order = _block(self, block)
    label = int(classes[place])
    turn = block * int(self.turns[label]) + int(order[place])
    round_, place = divmod(turn, len(self.members[label]))
    kept, indices = self._rounds[label]
    if kept != round_:
      rng = np.random.default_rng([self.seed, round_, label])
      indices = rng.permutation(self.members[label])
      self._rounds[label] = round_, indices
    return round_, int(indices[place])


@functools.lru_cache(maxsize=4)
def _block(visits, number):
  """Return the classes of a block of positions, and how often each was seen."""
  rng = np.random.default_rng([visits.seed, number])
  classes = rng.permutation(visits.classes)
  return classes, ranks(classes)

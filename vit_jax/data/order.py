"""The orders in which training visits examples.

An order is any object with

  order.bind(source, seed)   a function visits(position) -> (visit, index)

`index` is that of the example at a position of training, 0, 1, 2, ... The pair
(visit, index) does not occur at another position: the augmentation is drawn
from it. Both are functions of (seed, position) only, without state, so that a
run resumes exactly, on any number of hosts and worker processes. `visits` must
be picklable. Whatever the order, an epoch is as many positions as the source
has examples.

This module has the orders that need no more than the number of examples, and
the visits of all; sampling.py has the orders by class and by weight, mixture.py
that of a mixture.

The order of an epoch is the permutation of `grain.experimental.index_shuffle`.
That finds one place at a time: it encrypts numbers of at least 16 bits, again
and again until the result is an index of the set. For each of 10 examples this
takes 6,500 repetitions. For sets of up to 2**16 examples this module encrypts
all numbers of 16 bits at once and keeps the order of the whole epoch. It is the
same order, so that older checkpoints resume exactly.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence, Sized
from fractions import Fraction
from typing import Annotated, Any, Protocol

import numpy as np

from vit_jax.config.domains import Range, checked

Visits = Callable[[int], tuple[int, int]]  # position -> (visit, index)

_SMALL = 2**16  # The cipher has 16 bits for sets of up to this many examples.


class Order(Protocol):
  """The interface of an order; see the module docstring."""

  def bind(self, source: Any, seed: int, /) -> Visits: ...


@checked
@dataclasses.dataclass(frozen=True)
class Shuffled:
  """Each example once in an epoch; each epoch has another order."""

  def bind(self, source: Sized, seed: int) -> Visits:
    return EpochOrder(len(source), seed)


@checked
@dataclasses.dataclass(frozen=True)
class Repeated:
  """Repeated augmentation: each example several times in a row.

  The repeats of an example differ in their augmentation. An epoch visits
  1 / times of the examples, as in DeiT; the next ones visit the others. If
  batch_size is a multiple of `times`, all repeats are in the same batch.

  Attributes:
    times: number of consecutive positions of an example.
    order: of the examples.
  """

  times: Annotated[int, Range(1, 2**16)] = 3
  order: Order = Shuffled()

  def bind(self, source: Sized, seed: int) -> Visits:
    visits = self.order.bind(source, seed)
    return functools.partial(_repeated, visits, self.times)


def _repeated(visits, times, position):
  turn, repeat = divmod(position, times)
  visit, index = visits(turn)
  return visit * times + repeat, index


class EpochOrder:
  """Visits of each example once in an epoch.

  Args:
    count: number of examples.
    seed: of the order; each epoch has another one.
  """

  def __init__(self, count: int, seed: int) -> None:
    self._count, self._seed = count, seed

  def __call__(self, position: int) -> tuple[int, int]:
    """Return (epoch, index of the example) of a position."""
    epoch, place = divmod(position, self._count)
    return epoch, index_at(place, self._count, _epoch_seed(self._seed, epoch))


@functools.lru_cache(maxsize=16)
def _epoch_seed(seed, epoch):
  return int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0])


class Turns:
  """Parts, such as classes, that take turns in proportion to their weights.

  Positions come in blocks, whose order depends on (seed, block). At the end of
  each block every part has had its exact number of turns up to rounding, and
  these errors do not add up. If small integers have the proportions of the
  weights, as 3 and 1 have those of 0.75 and 0.25, the numbers are exact after
  each 3 + 1 positions.

  Args:
    weights: of the parts, 0 or more, not all 0.
    seed: of the order.
  """

  def __init__(self, weights: Sequence[float], seed: int) -> None:
    whole = np.array(_integers(weights), np.int64)
    self._whole = whole // np.gcd.reduce(whole)
    self._period = int(self._whole.sum())  # of the exact proportions
    least = max(len(whole), 16)
    some = range(least, 2 * least)
    divisors = (length for length in some if self._period % length == 0)
    # The length of a block: short, and exact at the end of each period.
    short = self._period <= least
    self.length = self._period if short else next(divisors, least)
    self._seed = seed
    # A tree whose leaves are the parts: (left children, parents) by level.
    padding = 2 ** (len(whole) - 1).bit_length() - len(whole)
    children, self._levels = np.pad(self._whole, (0, padding)), []
    while len(children) > 1:
      parents = children[::2] + children[1::2]
      self._levels.append((children[::2], np.maximum(parents, 1)))
      children = parents
    # The last blocks. Threads read neighbours at the same time.
    self._blocks = [(-1, whole, whole)] * 4

  def __call__(self, position: int) -> tuple[int, int]:
    """Return (part, number of its turns before) of a position."""
    block, place = divmod(position, self.length)
    slot = block % len(self._blocks)
    kept, parts, turns = self._blocks[slot]
    if kept != block:
      _, parts, turns = self._blocks[slot] = self._make(block)
    return int(parts[place]), int(turns[place])

  def _make(self, block):
    before, after = map(self._turns, (block, block + 1))
    parts = np.repeat(np.arange(len(before)), after - before)
    starts = np.cumsum(after - before) - after
    in_turn = np.arange(self.length) - starts[parts]
    parts = parts[shuffled(self.length, self._seed, block)]
    turns = np.zeros_like(parts)
    turns[np.argsort(parts, kind='stable')] = in_turn  # of each part, ascending
    return block, parts, turns

  def _turns(self, blocks):
    """Return the number of turns of each part in the first blocks: int64 [K].

    Each parent divides its turns between its children. So the numbers add up
    exactly and never decrease.
    """
    periods, rest = divmod(blocks * self.length, self._period)
    whole = periods * self._whole
    if not rest:
      return whole
    turns = np.array([rest])
    for left, parents in reversed(self._levels):
      some = _part_of(turns, left, parents)
      turns = np.stack([some, turns - some], axis=1).reshape(-1)
    return whole + turns[: len(whole)]


def _part_of(count, weight, total):
  """Return count * weight // total, where the product may exceed 64 bits.

  Args:
    count: int64 [n], below 2**50.
    weight, total: int64 [n], 0 <= weight <= total < 2**62, total > 0.
  """
  found = (count.astype(np.float64) * weight / total).astype(np.int64)
  # `found` is wrong by 1 at most. The rest is small, so that it is exact,
  # whatever overflows on the way.
  rest = count * weight - found * total
  return found + (rest >= total) - (rest < 0)


def _integers(weights):
  """Return integers in proportion to weights, exactly if small ones are."""
  largest, common = max(weights), 1
  ratios = [float(x) / largest for x in weights]
  exact = [Fraction(x).limit_denominator(10**6) for x in ratios]
  for ratio, fraction in zip(ratios, exact):
    common = math.lcm(common, fraction.denominator)
    if common > 2**40 or not math.isclose(ratio, fraction, rel_tol=1e-12):
      return [math.ceil(x * 2**40) for x in ratios]
  return [int(x * common) for x in exact]


class BalancedOrder:
  """Visits of classes in turn, equally often or in other proportions.

  By default each K consecutive positions visit each of the K classes once, in
  an order that depends on (seed, position // K). A class visits all of its
  examples before it visits one again, in an order that depends on (seed, class,
  round). So rare examples repeat, frequent ones take turns. Classes without
  examples are left out. For other proportions see `Turns`.

  Args:
    labels: int [n], of all examples.
    seed: of the order.
    power, weights: see sampling.Balanced; weights float [K], None: all 1.

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
      check_weights('Balanced: weights', weights)
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
    self._turns = Turns(shares[shares > 0].tolist(), seed)
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
      places = shuffled(len(members), self._seed, round_, label)
      shuffle = members[places]
      self._shuffles[label] = round_, shuffle
    return round_, int(shuffle[place])


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
    check_weights(what, weights)
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


def check_weights(what: str, weights: np.ndarray) -> None:
  """Raise ValueError unless weights are finite, 0 or more, and not all 0.

  Args:
    what: name of the weights, for the message.
    weights: float [n].
  """
  wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
  if len(wrong):
    more = f' (and {len(wrong) - 1} more)' if len(wrong) > 1 else ''
    raise ValueError(
      f'{what}: number {wrong[0]} is {weights[wrong[0]]}{more}. Weights must '
      'be finite and at least 0.'
    )
  if not np.any(weights):
    raise ValueError(
      f'{what}: all are 0, so that nothing is left to train on. At least one '
      'must be above 0.'
    )


def shuffled(count: int, *key: int) -> np.ndarray:
  """Return a permutation of 0 to count - 1 that depends on the key: int [n]."""
  return np.random.default_rng(np.random.SeedSequence(key)).permutation(count)


def index_at(place: int, count: int, seed: int) -> int:
  """Return the index of the example at a place of an epoch.

  Args:
    place: 0 to count - 1.
    count: number of examples.
    seed: of the epoch, 0 to 2**32 - 1.
  """
  if count <= _SMALL:
    return int(_order(count, seed)[place])
  from grain.experimental import index_shuffle

  return index_shuffle(place, max_index=count - 1, seed=seed, rounds=4)


@functools.lru_cache(maxsize=16)
def _order(count, seed):
  """Return the index at each place of an epoch: uint16 [count]."""
  if count == 1:
    return np.zeros(1, np.uint16)
  encrypted = _encrypt_all(seed)
  order = encrypted[:count]
  # Take 1, 2, 4, ... steps at a time towards an index; an index stays.
  step = np.where(np.arange(_SMALL) < count, np.arange(_SMALL), encrypted)
  while order.max() >= count:
    order, step = step[order], step[step]
  return order.astype(np.uint16)


def _encrypt_all(seed):
  """Return the ciphers of 0 to 2**16 - 1: int64 [2**16].

  The cipher is Grain's variant of Simon: two halves of 8 bits and 4 rounds.
  """
  left, right = np.divmod(np.arange(_SMALL), 256)
  for even, odd in np.reshape(_round_keys(seed), (2, 2)):
    left = left ^ _MIX[right] ^ even
    right = right ^ _MIX[left] ^ odd
  return 256 * left + right


def _rotate(byte, bits):
  return (byte << bits | byte >> 8 - bits) & 255


_BYTES = np.arange(256)
_MIX = _rotate(_BYTES, 1) & _BYTES ^ _rotate(_BYTES, 2)


def _round_keys(seed):
  """Return four keys of 8 bits: C++'s std::seed_seq{seed}.generate."""
  keys, mask = [0x8B8B8B8B] * 4, 2**32 - 1
  for k in range(4):
    mixed = keys[k] ^ keys[(k + 1) % 4] ^ keys[k - 1]
    mixed = 1664525 * (mixed ^ mixed >> 27) & mask
    keys[(k + 1) % 4] = keys[(k + 1) % 4] + mixed & mask
    mixed += (1, 1 + seed, 2, 3)[k]
    keys[(k + 2) % 4] = keys[(k + 2) % 4] + mixed & mask
    keys[k] = mixed & mask
  for k in range(4):
    mixed = keys[k] + keys[(k + 1) % 4] + keys[k - 1] & mask
    mixed = 1566083941 * (mixed ^ mixed >> 27) & mask
    keys[(k + 1) % 4] ^= mixed
    mixed = mixed - k & mask
    keys[(k + 2) % 4] ^= mixed
    keys[k] = mixed
  return np.array(keys) & 255

"""The orders in which training visits examples.

The order of an epoch is the permutation of `grain.experimental.index_shuffle`.
That finds one place at a time: it encrypts numbers of at least 16 bits, again
and again until the result is an index of the set. For each of 10 examples this
takes 6,500 repetitions. For sets of up to 2**16 examples this module encrypts
all numbers of 16 bits at once and keeps the order of the whole epoch. It is the
same order, so that older checkpoints resume exactly.
"""

import functools

import numpy as np

_SMALL = 2**16  # The cipher has 16 bits for sets of up to this many examples.


class EpochOrder:
  """Order of training that visits each example once in an epoch.

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

"""The order in which an epoch visits the examples of a set.

The order is the permutation of `grain.experimental.index_shuffle`. That finds
one place at a time: it encrypts numbers of at least 16 bits, again and again
until the result is an index of the set. For each of 10 examples this takes
6,500 repetitions. For sets of up to 2**16 examples this module encrypts all
numbers of 16 bits at once and keeps the order of the whole epoch. It is the
same order, so that older checkpoints resume exactly.
"""

import functools

import numpy as np

_SMALL = 2**16  # The cipher has 16 bits for sets of up to this many examples.


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

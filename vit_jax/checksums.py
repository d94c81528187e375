"""Checksums of arrays, computed where the arrays are.

The checksum of an array is a number of 32 bits that depends on the values and
on their places, not on how the array is sharded. So a checkpoint that was
written on one mesh is verified on any other, and each host gets the same
numbers. Two functions compute it: `of_device` for arrays on devices, of one
host or many, without a copy to the host; `of_host` for numpy arrays.

An error within one element always changes the checksum. Other errors leave it
as it was with a probability of 2^-32.

Orbax and TensorStore have none that would serve: Orbax (0.12) adds zarr3's
codec crc32c to the index of a shard, not to its chunks, and has no option for
more; OCDBT has checksums of its B-tree and its manifest, not of the values.
"""

import json
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Odd numbers: the product with them is a bijection of 32-bit words.
_GOLDEN = 0x9E3779B9
_MIX = 0x85EBCA6B
_ROWS = 1 << 16  # words that `of_host` hashes at once: they fit the cache


@jax.jit
def of_device(array: jax.Array) -> jax.Array:
  """Return the checksum, uint32 [], of an array of any shape and sharding."""
  words = _device_words(array)  # [..., n]
  sums = jnp.sum(_terms(words, jnp.arange), -1, dtype=jnp.uint32)
  rows = jnp.zeros(sums.shape, jnp.uint32)
  stride = 1
  for axis in reversed(range(sums.ndim)):
    index = jax.lax.broadcasted_iota(jnp.uint32, sums.shape, axis)
    rows += index * np.uint32(stride % 2**32)
    stride *= sums.shape[axis]
  return jnp.sum(_mixed(sums, rows), dtype=jnp.uint32)


def of_host(array: np.ndarray) -> int:
  """Return the checksum of a numpy array, equal to that of `of_device`."""
  array = np.ascontiguousarray(np.atleast_1d(array))
  words = array.view(f'uint{8 * min(4, array.itemsize)}')
  words = words.reshape(-1, words.shape[-1]) if words.size else words
  total, step = 0, max(1, _ROWS // max(1, words.shape[-1]))
  for first in range(0, len(words) if words.size else 0, step):
    block = words[first : first + step].astype(np.uint32)
    sums = _terms(block, np.arange).sum(-1, dtype=np.uint32)
    rows = np.arange(first, first + len(block)).astype(np.uint32)
    total += int(_mixed(sums, rows).sum(dtype=np.uint32))
  return total % 2**32


def of_json(value: Any) -> int:
  """Return the checksum of JSON values, whatever the order of their keys."""
  return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def _device_words(array):
  """Return the bits of an array as unsigned integers, [..., n]."""
  if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
    array = jax.random.key_data(array)
  if array.dtype == bool:
    array = array.astype(jnp.uint8)
  array = jnp.atleast_1d(array)
  bits = jnp.dtype(f'uint{8 * min(4, array.dtype.itemsize)}')
  words = jax.lax.bitcast_convert_type(array, bits)
  if words.ndim > array.ndim:  # two words for each element of 8 bytes
    words = words.reshape(*array.shape[:-1], -1)
  return words.astype(jnp.uint32)


def _terms(words, arange):
  """Return the terms of the sums over the last axis.

  For each place, a term is a bijection of the word: a change of one word
  changes its term.
  """
  places = arange(words.shape[-1]).astype(np.uint32) * np.uint32(_GOLDEN)
  shape = (1,) * (words.ndim - 1) + (-1,)
  terms = (words ^ places.reshape(shape)) * np.uint32(_MIX)
  return terms ^ (terms >> np.uint32(15))


def _mixed(sums, rows):
  """Return a bijection of each sum that depends on the index of its row."""
  mixed = (sums ^ (rows * np.uint32(_MIX))) * np.uint32(_GOLDEN)
  mixed ^= mixed >> np.uint32(16)
  return mixed * np.uint32(_MIX)

"""Checksums of the arrays in a checkpoint.

The checksum of an array is a 32-bit number that depends on the values and their
places, not on the sharding. A checkpoint that was written on one mesh can be
verified on any other, and all hosts get the same number. A change within one
element always changes the checksum; other changes go unnoticed with probability
2^-32.

Orbax and TensorStore store no checksum of the values: zarr3's crc32c covers the
index of a shard, and OCDBT's covers its B-tree.
"""

import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.parallel.sharding import in_host_memory
from vit_jax.types import Array

# Odd numbers: multiplication by one is a bijection of 32-bit words.
_GOLDEN, _MIX = np.uint32(0x9E3779B9), np.uint32(0x85EBCA6B)


def of_arrays(arrays: Mapping[str, Array]) -> dict[str, int]:
  """Return {name: checksum}, computed where the arrays are.

  Arrays on the CPU of a single host are hashed by NumPy, which needs no
  compilation. One program computes all others.
  """
  arrays = {k: _without_keys(x) for k, x in arrays.items()}
  on_host = {k: x for k, x in arrays.items() if in_host_memory(x)}
  on_device = {k: x for k, x in arrays.items() if k not in on_host}
  found = {k: _checksum(jax.device_get(x), np) for k, x in on_host.items()}
  if on_device:
    found |= jax.device_get(_of_devices(on_device))
  return {name: int(found[name]) for name in arrays}


def of_json(value: Any) -> int:
  """Return the checksum of JSON values, whatever the order of their keys."""
  return zlib.crc32(json.dumps(value, sort_keys=True).encode())


@jax.jit
def _of_devices(arrays):
  # One program: independent programs on several CPU devices can deadlock.
  return {name: _checksum(x, jnp) for name, x in arrays.items()}


def _checksum(array, xp):
  """Return the checksum of an array, uint32; xp is jax.numpy or numpy."""
  words = xp.atleast_1d(_bits(array, xp)).astype(xp.uint32)
  for axis, size in enumerate(words.shape):
    stride = np.uint32(
      math.prod(words.shape[axis + 1 :]) * int(_GOLDEN) % 2**32
    )
    places = xp.arange(size, dtype=xp.uint32) * stride
    shape = [1] * words.ndim
    shape[axis] = size
    words = words + places.reshape(shape)
  # A term is a bijection of its word.
  terms = (words ^ (words >> 16)) * _MIX
  terms = (terms ^ (terms >> 13)) * _GOLDEN
  return xp.sum(terms ^ (terms >> 16), dtype=xp.uint32)


def _bits(array, xp):
  """Return the bits of the elements as unsigned integers."""
  if array.dtype == bool:
    return array
  kind = jnp.dtype(f'uint{8 * array.dtype.itemsize}')
  if xp is np:
    return np.asarray(array).view(kind)
  return jax.lax.bitcast_convert_type(array, kind)


def _without_keys(array):
  """Return the integers of an array of keys; any other array as it is."""
  if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
    return jax.random.key_data(array)
  return array

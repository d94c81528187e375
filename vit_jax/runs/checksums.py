"""Checksums of the arrays in a checkpoint, computed where the arrays are.

The checksum of an array is a number of 32 bits that depends on the values and
on their places, not on how the array is sharded. So a checkpoint that was
written on one mesh is verified on any other, and each host gets the same
numbers. Two functions compute it: `of_device` for arrays on devices, of one
host or many, without a copy to the host; `of_host` for numpy arrays, and for
those on the CPU of a single host, where it is as fast and not compiled.

An error within one element always changes the checksum. Other errors leave it
as it was with a probability of 2^-32.

Orbax and TensorStore have none that would serve: Orbax (0.12) adds zarr3's
codec crc32c to the index of a shard, not to its chunks, and has no option for
more; OCDBT has checksums of its B-tree and its manifest, not of the values.
"""

import dataclasses
import functools
import json
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from vit_jax.parallel.sharding import in_host_memory
from vit_jax.runs.files import read_json

# Odd numbers: the product with them is a bijection of 32-bit words.
_GOLDEN = 0x9E3779B9
_MIX = 0x85EBCA6B
_FILE = 'metadata'  # As Orbax names JSON.
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


@jax.jit
def _of_devices(arrays):
  """Return the checksums of a tree of arrays, by one program.

  Programs for several devices that do not depend on one another can wait for
  each other for ever on CPUs, and each costs a start.
  """
  return jax.tree.map(of_device, arrays)


def _of_all(items):
  """Return {item: {path: checksum}} of {item: {path: array}}."""
  found: dict[str, dict[str, Any]] = {name: {} for name in items}
  on_devices: dict[str, dict[str, jax.Array]] = {name: {} for name in items}
  for name, item in items.items():
    for path, array in item.items():
      if in_host_memory(array):
        found[name][path] = of_host(jax.device_get(_without_keys(array)))
      else:
        on_devices[name][path] = array
  for name, sums in _of_devices(on_devices).items():
    found[name] |= sums
  return found


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
  plain = json.loads(json.dumps(value))  # Keys are strings, as in the file.
  return zlib.crc32(json.dumps(plain, sort_keys=True).encode())


def as_stored(leaf: Any) -> jax.ShapeDtypeStruct:
  """Return the shape and dtype of an array in a checkpoint: ints for keys."""
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    return _stored_key(leaf.shape, leaf.dtype)
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


@functools.cache  # Each call of eval_shape stays in a cache of jax.
def _stored_key(shape, dtype):
  return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))


@dataclasses.dataclass(frozen=True)
class Checksums:
  """Shapes, dtypes and checksums of everything in a checkpoint.

  Attributes:
    arrays: {item: {path: (dtype, shape, checksum)}}.
    data, metrics: checksums of JSON values; 0 where there are none.
  """

  arrays: Mapping[str, Mapping[str, Any]]
  data: int = 0
  metrics: int = 0

  @classmethod
  def of(
    cls,
    items: Mapping[str, Mapping[str, Any]],
    data: Mapping[str, Any],
    metrics: Mapping[str, float] | None,
  ) -> 'Checksums':
    """Return those of {item: {path: array}}, still being computed."""
    found = _of_all(items)
    arrays = {
      name: {
        path: (stored.dtype.name, stored.shape, found[name][path])
        for path, array in item.items()
        for stored in [as_stored(array)]
      }
      for name, item in items.items()
    }
    return cls(arrays, of_json(data), of_json(metrics) if metrics else 0)

  @classmethod
  def read(cls, checkpoint: epath.Path) -> 'Checksums | None':
    """Return those of a checkpoint; None if it was written without them.

    Raises:
      ValueError: the file is damaged.
    """
    if not (checkpoint / 'checksums').exists():
      return None
    content = read_json(checkpoint / 'checksums' / _FILE)
    own = content.pop('checksums', None)
    if own != of_json(content):
      raise ValueError('its checksums differ from their own checksum')
    return cls(**content)

  def write(self, folder: epath.Path) -> None:
    """Wait for the checksums, and write them to a file."""
    found = jax.device_get(self.arrays)
    arrays = {
      name: {path: (*x[:2], int(x[2])) for path, x in item.items()}
      for name, item in found.items()
    }
    content = dataclasses.asdict(dataclasses.replace(self, arrays=arrays))
    content['checksums'] = of_json(content)
    (folder / _FILE).write_text(json.dumps(content))

  def shapes(self) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """Return {item: {path: shape and dtype}}."""
    return {
      name: {
        path: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
        for path, (dtype, shape, _) in item.items()
      }
      for name, item in self.arrays.items()
    }

  def difference(self, items: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what differs in {item: {path: array}}, as text; '' if nothing."""
    found = jax.device_get(_of_all(items))
    bad = [
      f'{name}/{path}'
      for name, item in found.items()
      for path in sorted({*item, *self.arrays.get(name, {})})
      if path not in item
      or path not in self.arrays.get(name, {})
      or int(item[path]) != self.arrays[name][path][2]
    ]
    if not bad:
      return ''
    more = f' and {len(bad) - 1} more arrays' * (len(bad) > 1)
    return f'{bad[0]}{more} differ{"" if more else "s"} from the checksum'


class Handler(ocp.AsyncCheckpointHandler):
  """Orbax's item 'checksums', written when the checksums are computed."""

  async def async_save(self, directory: epath.Path, args: 'SaveArgs') -> list:
    return [_Write(directory, args.checksums)]

  def save(self, directory: epath.Path, args: 'SaveArgs') -> None:
    _Write(directory, args.checksums).result()

  def restore(self, directory: epath.Path, args: Any = None) -> Any:
    raise NotImplementedError('Use Checksums.read.')


@ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)
@dataclasses.dataclass
class SaveArgs(ocp.args.CheckpointArgs):
  """Content of the item 'checksums'."""

  checksums: Checksums


@dataclasses.dataclass(frozen=True)
class _Write:
  """The future that Orbax's thread waits for: it writes the file itself."""

  directory: epath.Path
  checksums: Checksums

  def result(self, timeout: float | None = None) -> None:
    del timeout
    if jax.process_index() == 0:
      self.checksums.write(self.directory)


def _without_keys(array):
  """Return the integers of an array of keys; any other array as it is."""
  if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
    return jax.random.key_data(array)
  return array


def _device_words(array):
  """Return the bits of an array as unsigned integers, [..., n]."""
  array = _without_keys(array)
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

"""Arrays on disk: .npz, safetensors and JSON. Nothing read can execute code.

What a file is shows in its content, whatever it is called. Floats of every
width come back as float32, which is what parameters are kept in.
"""

import math
import os
import pathlib
import struct
import uuid
import zipfile

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from vit_jax.weights.fetch import fetch
from vit_jax.weights.index import read_json, shards

__all__ = [
  'fetch',
  'kind',
  'read_json',
  'read_npz',
  'read_safetensors',
  'refuse_pickle',
  'write_npz',
  'write_safetensors',
]

READABLE = '.npz and .safetensors files (or the index of sharded ones)'
_BLOCK = 1 << 24  # bytes read at once
_TENSORFLOW = struct.pack('<Q', 0xDB4775248B80FB57)  # ends its .index files
_KNOWN = {  # first bytes of what is not read, and what that is
  b'\x89HDF': 'an HDF5 file (Keras)',
  b'\x93NUMPY': 'a single array (.npy)',
  b'\x1f\x8b': 'compressed with gzip; unpack it first',
  b'version https://git-lfs': 'a pointer of git LFS; run git lfs pull',
  b'<': 'a web page or XML; was the download refused?',
}


def kind(path):
  """'npz' or 'safetensors', by content; a safetensors index is the latter.

  Raises:
    ValueError: empty, a pickle (.pth, .bin, .pt, .pkl), or not known.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise ValueError(f'{path} is no file; read are {READABLE}.')
  size = path.stat().st_size
  if not size:
    raise ValueError(f'{path} is empty: 0 bytes.')
  with path.open('rb') as f:
    head = f.read(64)
    f.seek(max(size - len(_TENSORFLOW), 0))
    tail = f.read()
  refuse_pickle(path, head)
  if head[:4] in (b'PK\x03\x04', b'PK\x05\x06'):
    return 'npz'
  if head[8:9] == b'{' and struct.unpack('<Q', head[:8])[0] < 1 << 40:
    return 'safetensors'
  if head.lstrip()[:1] == b'{' and 'weight_map' in read_json(path):
    return 'safetensors'
  if tail == _TENSORFLOW or '.data-0000' in path.name:
    what = 'a TensorFlow checkpoint'
  else:
    found = (text for start, text in _KNOWN.items() if head.startswith(start))
    what = next(found, f'of a format not known here (it begins {head[:8]!r})')
  raise ValueError(f'{path} is {what}. Read are {READABLE}.')


def refuse_pickle(path, head):
  """Raises ValueError if a file, which begins with head, is a pickle."""
  if head[:4] == b'PK\x03\x04':  # torch.save writes a zip with a pickle in it
    try:
      with zipfile.ZipFile(path) as file:
        pickled = any(n.endswith('.pkl') for n in file.namelist())
    except zipfile.BadZipFile:
      pickled = b'.pkl' in head
  else:  # or, before PyTorch 1.6, the pickle alone
    pickled = head[:1] == b'\x80' and head[1:2] in (b'\1\2\3\4\5')
    pickled = pickled and head[8:9] != b'{'
  if pickled:
    raise ValueError(
      f'{path} is a pickle (as torch.save writes .pth, .pt and .bin), which '
      'can execute anything when read, so none is read here. In torch, save '
      'the weights as safetensors: safetensors.torch.save_file('
      "model.state_dict(), 'model.safetensors')."
    )


def read_npz(path):
  """{name: array} of an .npz, each member read once.

  float16, float64 and bfloat16 (also as the 2 raw bytes, '|V2', that numpy
  stores) come as float32.

  Raises:
    ValueError: no zip, truncated or corrupt; a member that is no array, is
      pickled, or whose header promises another number of bytes than it has.
  """
  arrays = {}
  with _open(path) as f:
    try:
      with zipfile.ZipFile(f) as file:
        members = file.infolist()
        _check_members(members, os.fstat(f.fileno()).st_size)
        for member in members:
          with file.open(member) as stream:
            name = member.filename.removesuffix('.npy')
            arrays[name] = _to_float32(_read_member(stream, member))
    except MemoryError:
      raise
    except ValueError as e:
      raise ValueError(f'{path}: {e}') from e
    except Exception as e:  # whatever broken bytes make of zlib and numpy
      raise ValueError(
        f'{path} cannot be read as .npz: {e or type(e).__name__}. It is '
        'truncated or corrupt; copy or download it again.'
      ) from e
  return arrays


def write_npz(path, arrays):
  """Writes {name: array} as np.savez does; the file appears when complete."""

  def write(part):
    with part.open('wb') as f, zipfile.ZipFile(f, 'w') as file:
      for name, array in arrays.items():
        member = zipfile.ZipInfo(f'{name}.npy')  # of 1980: equal files
        with file.open(member, 'w', force_zip64=True) as stream:
          array = np.asanyarray(array)
          np.lib.format.write_array(stream, array, allow_pickle=False)

  _write(path, write)


def read_safetensors(path):
  """{name: array} of a safetensors file, or of an index and its shards.

  Raises:
    ValueError: truncated or corrupt; a shard that is missing, lies elsewhere,
      or does not hold what the index says.
  """
  path = pathlib.Path(path)
  with _open(path) as f:
    head = f.read(9)
  if head[8:9] != b'{' and head.lstrip()[:1] == b'{':
    return _read_shards(path)
  try:
    with safetensors.safe_open(path, framework='np') as file:
      return {n: _to_float32(file.get_tensor(n)) for n in file.keys()}  # noqa: SIM118
  except (safetensors.SafetensorError, ValueError, TypeError, OSError) as e:
    raise ValueError(
      f'{path} cannot be read as safetensors: {e}. It is truncated or corrupt; '
      'copy or download it again.'
    ) from e


def write_safetensors(path, arrays, metadata=None):
  """Writes {name: array}, metadata {str: str}; appears when complete."""
  arrays = {k: np.asarray(v, order='C') for k, v in arrays.items()}

  def write(part):
    if '://' in os.fspath(part):  # the library writes local files only
      part.write_bytes(safetensors.numpy.save(arrays, metadata))
    else:
      safetensors.numpy.save_file(arrays, part, metadata)

  _write(path, write)


def _read_shards(path):
  arrays = {}
  for shard, said in shards(path).items():
    if not (path.parent / shard).is_file():
      raise ValueError(f'{path} names {shard}, which is not beside it.')
    found = read_safetensors(path.parent / shard)
    if said != found.keys():
      missing, more = sorted(said - found.keys()), sorted(found.keys() - said)
      raise ValueError(
        f'{path} and {shard} disagree: missing {missing}, too many {more}.'
      )
    arrays |= found
  return arrays


def _check_members(members, size):
  names = [m.filename for m in members]
  if not members:
    raise ValueError('It holds no arrays.')
  if no_array := [n for n in names if not n.endswith('.npy')]:
    raise ValueError(f'It holds {no_array[0]!r}, which is no array (.npy).')
  if len(set(names)) != len(names):
    raise ValueError('It has several arrays of one name.')
  # An archive whose members overlap unpacks to far more than its own size.
  if sum(m.compress_size for m in members) > size:
    raise ValueError('Its members are longer than the file: truncated?')


def _read_member(stream, member):
  """One array; memory is taken only for bytes that can be there."""
  name = member.filename
  version = np.lib.format.read_magic(stream)
  read = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
  }.get(version)
  if read is None:
    raise ValueError(f'{name} is of the unknown version {version} of .npy.')
  shape, fortran, dtype = read(stream)
  if dtype.hasobject:
    raise ValueError(
      f'{name} is pickled (dtype object), which can execute anything when '
      'read. Store plain numbers in its place, or leave it out.'
    )
  size = math.prod(shape) * dtype.itemsize
  # Deflate packs at most 1032 to 1.
  there = min(member.file_size - stream.tell(), 1100 * member.compress_size)
  if min(shape, default=0) < 0 or size > there:
    raise ValueError(
      f'{name} promises {shape} {dtype}, {size} bytes, but has {max(there, 0)}.'
    )
  data = np.empty(size, np.uint8)
  at = 0
  while block := stream.read(_BLOCK):  # to the end, where its CRC is checked
    if at + len(block) > size:
      raise ValueError(f'{name} has more than the {size} bytes it promises.')
    data[at : at + len(block)] = np.frombuffer(block, np.uint8)
    at += len(block)
  if at < size:
    raise ValueError(f'{name} has {at} bytes, not {size}: truncated.')
  return data.view(dtype).reshape(shape, order='F' if fortran else 'C')


def _to_float32(array):
  if array.dtype == np.dtype('V2'):  # numpy's way to store a bfloat16
    array = array.view(ml_dtypes.bfloat16)
  if array.dtype.kind == 'f' or array.dtype == ml_dtypes.bfloat16:
    return np.asarray(array, np.float32)
  return array


def _open(path):
  try:
    return pathlib.Path(path).open('rb')
  except OSError as e:
    raise ValueError(f'{path} cannot be opened: {e.strerror}.') from e


def _write(path, write):
  """write(another path), which is renamed when done; either may be remote."""
  path = path if isinstance(path, os.PathLike) else pathlib.Path(path)
  part = path.parent / f'.{path.name}.{uuid.uuid4().hex}.part'
  try:
    write(part)
    part.replace(path)
  except BaseException:
    part.unlink(missing_ok=True)
    raise

"""Files of arrays: .npz, safetensors and JSON, local or remote.

Nothing that is read can execute code. Names, shapes and types are read first
(`stored`), values only of the arrays that a model needs; so a broken or hostile
file gives one ValueError, without more memory than twice its bytes and the
model. The format of a file is determined from its content, not its name. Floats
of every width are returned as float32, which is how parameters are kept.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import io
import json
import math
import os
import pathlib
import shutil
import struct
import sys
import time
import typing
import urllib.parse
import zipfile
from collections.abc import Callable, Iterable
from typing import Any, Literal

import fsspec
import fsspec.callbacks
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from vit_jax.runs.files import (
  LARGEST_JSON,
  PACKAGES,
  PathLike,
  is_local,
  read_json,
  replacing,
)
from vit_jax.types import FlatParams

# (URL, bytes so far, total bytes or None)
Progress = Callable[[str, int, int | None], None]

READABLE = '.npz and .safetensors files (or the index of sharded ones)'
# Public buckets are on the web as well. The variable is that of Google's own
# libraries, for an emulator.
_GCS = 'https://storage.googleapis.com'
_GCS_VARIABLE = 'STORAGE_EMULATOR_HOST'
_INDEX = '.safetensors.index.json'
_BLOCK = 1 << 22  # bytes read at once, also of directories and headers
_HEADER = 1 << 10  # bytes of an array's header in .npz; numpy writes 118
# Arrays may take this many times the bytes of their file, or this many bytes.
_RATIO = 50
_ALWAYS = 1 << 28
# Downloads: bytes of a file whose size the server does not say; bytes/s.
_UNSIZED = 1 << 31
_SLOWEST = 1000
_DTYPES = {  # of safetensors
  **{'F64': 'f8', 'F32': 'f4', 'F16': 'f2', 'BF16': ml_dtypes.bfloat16},
  **{'I64': 'i8', 'I32': 'i4', 'I16': 'i2', 'I8': 'i1', 'BOOL': '?'},
  **{'U64': 'u8', 'U32': 'u4', 'U16': 'u2', 'U8': 'u1', 'C64': 'c8'},
}
_UNREADABLE = safetensors.SafetensorError, ValueError, TypeError, OSError
_TENSORFLOW = struct.pack('<Q', 0xDB4775248B80FB57)  # ends its .index files
_KNOWN = {  # first bytes of files that are not supported
  b'\x89HDF': 'an HDF5 file (Keras)',
  b'\x93NUMPY': 'a single array (.npy)',
  b'\x1f\x8b': 'compressed with gzip; unpack it first',
  b'version https://git-lfs': 'a git LFS pointer; run git lfs pull',
  b'<': 'a web page or XML; was the download refused?',
}
# Names that file systems use for the version of a file.
_VERSION = (
  *('size', 'etag', 'md5hash', 'generation', 'blob_id', 'content-md5'),
  *('last-modified', 'lastmodified', 'mtime', 'updated', 'created'),
)


def kind(path: PathLike) -> str:
  """Return 'npz' or 'safetensors', also for an index of safetensors files.

  Raises:
    ValueError: the file is missing, empty, a pickle (.pth, .bin, .pt, .pkl) or
      of an unknown format.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise ValueError(f'{path} is not a file. Supported formats: {READABLE}.')
  size = path.stat().st_size
  if not size:
    raise ValueError(f'{path} is empty (0 bytes).')
  with path.open('rb') as f:
    head = f.read(64)
    f.seek(max(size - len(_TENSORFLOW), 0))
    tail = f.read()
  _refuse_pickle(path, head)
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
    what = next(found, f'of an unknown format (it begins {head[:8]!r})')
  raise ValueError(f'{path} is {what}. Supported formats: {READABLE}.')


def _refuse_pickle(path, head):
  if head[:4] == b'PK\x03\x04':  # torch.save writes a zip with a pickle in it
    try:
      with _zip(path) as (file, _):
        pickled = any(n.endswith('.pkl') for n in file.namelist())
    except ValueError:
      pickled = b'.pkl' in head
  else:  # or, before PyTorch 1.6, the pickle alone
    pickled = head[:1] == b'\x80' and head[1:2] in (b'\1\2\3\4\5')
    pickled = pickled and head[8:9] != b'{'
  if pickled:
    raise ValueError(
      f'{path} is a pickle (torch.save writes them as .pth, .pt and .bin). '
      'Reading a pickle can execute any code, so it is refused. In PyTorch, '
      'save the weights as safetensors: safetensors.torch.save_file('
      "model.state_dict(), 'model.safetensors')."
    )


@dataclasses.dataclass(frozen=True)
class Stored:
  """Arrays in a file, of which only names, shapes and types have been read.

  Attributes:
    blanks: {name: zeros in the shape and type that `read` returns}. These take
      no memory, so a whole model can be checked on them.
    size: bytes of the file, or of all shards.
    values: function (names) -> {name: array}.
    path: of the file, for messages.
    is_npz: whether it is an .npz file.
  """

  blanks: dict[str, np.ndarray]
  size: int
  values: Callable[[Iterable[str]], dict[str, np.ndarray]]
  path: PathLike = ''
  is_npz: bool = False

  def check_size(self, names: Iterable[str] | None = None) -> None:
    """Raise ValueError if these arrays take far more than the file's bytes."""
    names = self.blanks.keys() if names is None else names
    needed = sum(self.blanks[name].nbytes for name in names)
    if needed > max(_ALWAYS, _RATIO * self.size):
      raise ValueError(
        f'{self.path}: its arrays take {needed / 1e9:.1f} GB, '
        f'{needed // self.size:,} times as much as the file. At most {_RATIO} '
        'times as much is unpacked. If you trust the file, save its arrays '
        'without compression (numpy.savez).'
      )

  def read(self, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """Return the arrays of these names, or all; the others stay blank.

    Raises:
      ValueError: the values are truncated or corrupt; or as of `check_size`.
    """
    self.check_size(names)
    names = self.blanks.keys() if names is None else set(names)
    return self.blanks | self.values([x for x in self.blanks if x in names])


def blank(shape: Iterable[int], dtype: Any) -> np.ndarray:
  """Return zeros that take no memory, float32 for floats of any width."""
  dtype = np.dtype(dtype)
  dtype = np.dtype(np.float32) if is_float(dtype) else dtype
  return np.broadcast_to(np.zeros((), dtype), tuple(shape))


def is_float(dtype: Any) -> bool:
  """Return whether arrays of this type are converted to float32."""
  dtype = np.dtype(dtype)
  # numpy stores a bfloat16 as its 2 raw bytes, '|V2'.
  return dtype.kind == 'f' or dtype in (ml_dtypes.bfloat16, np.dtype('V2'))


def stored(path: PathLike) -> Stored:
  """Return the arrays of a file of any supported format, not unpacked yet.

  Raises:
    ValueError: as of `kind`, `stored_npz` or `stored_safetensors`.
  """
  is_npz = kind(path) == 'npz'
  return stored_npz(path) if is_npz else stored_safetensors(path)


def read_npz(path: PathLike) -> dict[str, np.ndarray]:
  """Return {name: array} of an .npz file; see `stored_npz`."""
  return stored_npz(path).read()


def read_safetensors(path: PathLike) -> dict[str, np.ndarray]:
  """Return {name: array} of safetensors; see `stored_safetensors`."""
  return stored_safetensors(path).read()


def stored_npz(path: PathLike) -> Stored:
  """Return the arrays of an .npz file, of which only headers are unpacked.

  float16, float64 and bfloat16 (also as the 2 raw bytes, '|V2', that numpy
  stores) are returned as float32.

  Raises:
    ValueError: the file is not a zip, truncated or corrupt; its members
      overlap; a member is not an array, is pickled, or has a header that does
      not fit its size.
  """
  with _zip(path) as (file, size):
    members = file.infolist()
    _check_members(members, size)
    blanks, of_name = {}, {}
    for member in members:
      name = member.filename.removesuffix('.npy')
      with file.open(member) as stream:
        shape, _, dtype, _ = _read_header(stream, member)
      blanks[name], of_name[name] = blank(shape, dtype), member

  def values(names):
    out = {}
    with _zip(path) as (file, _):
      for name in names:
        with file.open(of_name[name]) as stream:
          out[name] = to_float32(_read_member(stream, of_name[name]))
    return out

  return Stored(blanks, size, values, path, is_npz=True)


@contextlib.contextmanager
def _zip(path):
  """Yield (ZipFile, size in bytes); any error is one ValueError."""
  with _open(path) as f:
    try:
      with zipfile.ZipFile(_Bounded(f)) as file:
        yield file, os.fstat(f.fileno()).st_size
    except _Refused as e:
      raise ValueError(f'{path}: {e}') from e
    except Exception as e:  # whatever zlib and numpy raise on broken bytes
      raise ValueError(
        f'{path} cannot be read as .npz: {e or type(e).__name__}. It is '
        'truncated or corrupt; copy or download it again.'
      ) from e


class _Refused(ValueError):
  """An error with a message of our own, unlike those of zipfile and numpy."""


class _Bounded:
  """A file of which zipfile cannot read more than a _BLOCK at once.

  It reads the directory of an archive as a whole, and takes ten times as much
  memory.
  """

  def __init__(self, file: Any) -> None:
    self._file = file
    self.seek, self.tell, self.close = file.seek, file.tell, file.close

  def read(self, count: int = -1) -> bytes:
    if count > _BLOCK:
      raise _Refused(
        f'Its directory has {count} bytes; expected at most {_BLOCK}. It is '
        'truncated or corrupt.'
      )
    return self._file.read(count)

  def seekable(self) -> bool:
    return True


def _check_members(members, size):
  names = [m.filename for m in members]
  if not members:
    raise _Refused('It holds no arrays.')
  if no_array := [n for n in names if not n.endswith('.npy')]:
    raise _Refused(
      f'It holds {no_array[0][:80]!r}, which is not an array (.npy).'
    )
  if len(set(names)) != len(names):
    raise _Refused('It has several arrays of one name.')
  # Members that overlap unpack to far more than the file's size.
  end = size
  for member in sorted(members, key=lambda m: m.header_offset, reverse=True):
    if member.header_offset + 30 + member.compress_size > end:
      raise _Refused('Its members overlap or are longer than the file.')
    end = member.header_offset
  for member in members:
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
      raise _Refused(
        f'{member.filename} is compressed by method {member.compress_type}; '
        'expected deflate (numpy.savez_compressed) or none (numpy.savez).'
      )


def _read_header(stream, member):
  """Return (shape, is Fortran order, dtype, bytes of values) of a member."""
  name = member.filename
  version = np.lib.format.read_magic(stream)
  read = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
  }.get(version)
  if read is None:
    raise _Refused(f'{name} has the unknown .npy version {version}.')
  lengths = stream.read(2 * version[0])
  length = int.from_bytes(lengths, 'little')
  if length > _HEADER:
    raise _Refused(
      f'{name} has a header of {length} bytes; expected at most {_HEADER}. The '
      'file is corrupt; copy or download it again.'
    )
  shape, fortran, dtype = read(io.BytesIO(lengths + stream.read(length)))
  if dtype.hasobject:
    raise _Refused(
      f'{name} is pickled (dtype object), so reading it can execute any code. '
      'Store plain numbers instead, or leave it out.'
    )
  if dtype.names or dtype.subdtype or not dtype.itemsize:
    raise _Refused(f'{name} has the type {dtype!s:.80}; expected numbers.')
  size = math.prod(shape) * dtype.itemsize
  # Deflate packs at most 1032 to 1.
  there = min(member.file_size - stream.tell(), 1100 * member.compress_size)
  if min(shape, default=0) < 0 or size > there:
    raise _Refused(
      f'{name} promises {shape} {dtype}, {size} bytes, but has {max(there, 0)}.'
    )
  return shape, fortran, dtype, size


def _read_member(stream, member):
  """Return one array, without allocating more than the member can hold."""
  name = member.filename
  shape, fortran, dtype, size = _read_header(stream, member)
  data = np.empty(size, np.uint8)
  at = 0
  while block := stream.read(_BLOCK):  # to the end, where its CRC is checked
    if at + len(block) > size:
      raise _Refused(f'{name} has more than the {size} bytes it promises.')
    data[at : at + len(block)] = np.frombuffer(block, np.uint8)
    at += len(block)
  if at < size:
    raise _Refused(f'{name} has {at} bytes, not {size}: truncated.')
  return data.view(dtype).reshape(shape, order='F' if fortran else 'C')


def write_npz(path: PathLike, arrays: FlatParams) -> None:
  """Write {name: array} like np.savez; equal arrays give equal bytes."""
  with (
    replacing(path) as partial,
    partial.open('wb') as f,
    zipfile.ZipFile(f, 'w') as file,
  ):
    for name, array in arrays.items():
      member = zipfile.ZipInfo(f'{name}.npy')  # dated 1980
      with file.open(member, 'w', force_zip64=True) as stream:
        array = np.asanyarray(array)
        np.lib.format.write_array(stream, array, allow_pickle=False)


def stored_safetensors(path: PathLike) -> Stored:
  """Return the arrays of a safetensors file, or of an index and its shards.

  Only headers are read.

  Raises:
    ValueError: truncated or corrupt; a shard is missing, lies in another
      folder, or does not hold the arrays that the index lists.
  """
  path = pathlib.Path(path)
  with _open(path) as f:
    head = f.read(9)
    size = os.fstat(f.fileno()).st_size
  if head[8:9] != b'{' and head.lstrip()[:1] == b'{':
    return _stored_shards(path)
  length = int.from_bytes(head[:8], 'little')
  try:
    if _BLOCK < length <= size:
      raise ValueError(f'a header of {length} bytes; at most {_BLOCK}')
    with safetensors.safe_open(path, framework='np') as file:
      blanks = {n: _blank(n, file.get_slice(n)) for n in file.keys()}  # noqa: SIM118
  except _UNREADABLE as e:
    raise _not_safetensors(path, e) from e

  def values(names):
    try:
      with safetensors.safe_open(path, framework='np') as file:
        return {name: to_float32(file.get_tensor(name)) for name in names}
    except _UNREADABLE as e:
      raise _not_safetensors(path, e) from e

  return Stored(blanks, size, values, path)


def _blank(name, part):
  kind = part.get_dtype()
  if kind not in _DTYPES:
    raise ValueError(f'{name} has the unsupported type {kind}')
  return blank(part.get_shape(), _DTYPES[kind])


def _not_safetensors(path, error):
  return ValueError(
    f'{path} cannot be read as safetensors: {error}. It is truncated or '
    'corrupt; copy or download it again.'
  )


def _stored_shards(path):
  blanks, shards, size = {}, [], 0
  for shard, listed in _shards(path).items():
    if not (path.parent / shard).is_file():
      raise ValueError(f'{path} names {shard}, which is not in its folder.')
    if kind(path.parent / shard) != 'safetensors' or shard == path.name:
      raise ValueError(f'{path} names {shard}, which is not safetensors.')
    found = stored_safetensors(path.parent / shard)
    if listed != found.blanks.keys():
      raise ValueError(
        f'{path} and {shard} disagree: '
        f'missing {sorted(listed - found.blanks.keys())[:9]}, '
        f'unexpected {sorted(found.blanks.keys() - listed)[:9]}.'
      )
    blanks |= found.blanks
    shards.append(found)
    size += found.size

  def values(names):
    out = {}
    for shard in shards:
      out |= shard.values([name for name in names if name in shard.blanks])
    return out

  return Stored(blanks, size, values, path)


def _shards(path):
  """Return {file name: names of its arrays} of an index."""
  index = read_json(path).get('weight_map')
  if not isinstance(index, dict) or not index:
    raise ValueError(f"{path} has no 'weight_map', so it is not an index.")
  out = {}
  for array, name in index.items():
    plain = isinstance(name, str) and name not in ('', '.', '..')
    if not plain or set(name) & set('/\\\0'):
      raise ValueError(
        f'{path} names the file {name!r}. An index may only name files in its '
        'own folder.'
      )
    out.setdefault(name, set()).add(array)
  return out


def write_safetensors(
  path: PathLike, arrays: FlatParams, metadata: dict[str, str] | None = None
) -> None:
  """Write {name: array} and the metadata {str: str}."""
  arrays = {k: np.asarray(v, order='C') for k, v in arrays.items()}
  with replacing(path) as partial:
    if is_local(partial):
      safetensors.numpy.save_file(arrays, partial, metadata)
    else:  # the library writes local files only
      partial.write_bytes(safetensors.numpy.save(arrays, metadata))


def to_float32(array: np.ndarray) -> np.ndarray:
  """Return float32 for floats of any width, other arrays as they are."""
  if array.dtype == np.dtype('V2'):
    array = array.view(ml_dtypes.bfloat16)
  return np.asarray(array, np.float32) if is_float(array.dtype) else array


def _open(path):
  try:
    return pathlib.Path(path).open('rb')
  except OSError as e:
    raise ValueError(f'{path} cannot be opened: {e.strerror}.') from e


@typing.overload
def fetch(
  path: PathLike,
  *,
  missing_ok: Literal[False] = False,
  cache_dir: PathLike | None = None,
  progress: Progress | None = None,
) -> pathlib.Path: ...


@typing.overload
def fetch(
  path: PathLike,
  *,
  missing_ok: bool,
  cache_dir: PathLike | None = None,
  progress: Progress | None = None,
) -> pathlib.Path | None: ...


def fetch(
  path: PathLike,
  *,
  missing_ok: bool = False,
  cache_dir: PathLike | None = None,
  progress: Progress | None = None,
) -> pathlib.Path | None:
  """Return the local path of a file that may be remote.

  A remote file is downloaded once, and again when its size, time or version
  changes. Without a connection the cached copy is used. Files of one remote
  folder are in one local folder. An index of safetensors brings its shards.

  fsspec does the transfer but not the caching: its file cache leaves a
  truncated file behind a broken connection and then serves it as complete, has
  no progress, and cannot check for changes and work offline at the same time.

  Args:
    path: a local path (returned unchanged) or the URL of a file.
    missing_ok: whether to return None if there is no such file.
    cache_dir: by default $VIT_JAX_CACHE or ~/.cache/vit_jax.
    progress: called with (URL, bytes so far, total bytes or None); by default
      a line on stderr every 10 seconds.

  Raises:
    ValueError: the file does not exist; the download fails, or is larger than
      the server has said, or than 2 GB if it has not said a size (nothing is
      kept); the package for the protocol is not installed.
  """
  url = os.fspath(path)
  if is_local(url):
    return _local(pathlib.Path(url).expanduser(), missing_ok)
  if url.startswith('file://'):
    local = pathlib.Path(urllib.parse.unquote(url[len('file://') :]))
    return _local(local, missing_ok)
  base, mark, query = url.partition('?')
  folder, name = base.rsplit('/', 1)
  if name in ('', '.', '..'):
    raise ValueError(f'{url} does not end in the name of a file.')
  cache = cache_dir or os.environ.get('VIT_JAX_CACHE') or '~/.cache/vit_jax'
  key = hashlib.sha256((folder + mark + query).encode()).hexdigest()[:16]
  local = pathlib.Path(cache).expanduser() / key / name
  if not _refresh(url, local, progress or _Progress(), missing_ok):
    return None
  if name.endswith(_INDEX):
    for shard in _shards(local):
      other = f'{folder}/{shard}{mark}{query}'
      fetch(other, cache_dir=cache_dir, progress=progress)
  return local


def _local(path, missing_ok):
  if path.exists():
    return path
  if missing_ok:
    return None
  folder = path.parent
  if not folder.is_dir():
    raise ValueError(f'{path} does not exist, and neither does {folder}.')
  names = sorted(p.name for p in folder.iterdir())
  near = difflib.get_close_matches(path.name, names, n=5, cutoff=0.4)
  shown = ', '.join(near or names[:8]) or 'nothing'
  raise ValueError(f'{path} does not exist. {folder} contains: {shown}.')


def _refresh(url, local, progress, missing_ok):
  """Download `url` unless `local` is up to date; return False if missing."""
  note = local.parent / f'.{local.name}.json'  # the version of the local file
  try:
    fs, remote = _file_system(url)
    info = fs.info(remote)
  except ValueError:
    raise
  except Exception as e:  # every file system has its own errors
    # fsspec raises FileNotFoundError also if the server cannot be reached.
    missing = isinstance(e, FileNotFoundError)
    missing &= not isinstance(e.__cause__, OSError | TimeoutError)
    if missing and missing_ok:
      return False
    if not missing and local.exists():
      print(f'{url}: {_text(e)}; using the cached copy.', file=sys.stderr)
      return True
    raise ValueError(f'{url} cannot be read: {_text(e)}.{_hint(url)}') from e
  if info.get('type') == 'directory':
    raise ValueError(f'{url} is a folder; name a file in it.')
  version = json.dumps(
    {k: str(v) for k, v in sorted(info.items()) if k.lower() in _VERSION}
  )
  if local.exists() and note.exists() and note.read_text() == version != '{}':
    return True
  try:
    local.parent.mkdir(parents=True, exist_ok=True)
    size = info.get('size')
    limit = _limit(local, size)
    with replacing(local) as partial:
      callback = _Callback(url, progress, limit)
      fs.get_file(remote, str(partial), callback=callback)
      have = partial.stat().length
      if size is not None and have != size:
        raise OSError(f'received {have} of {size} bytes')
      note.unlink(missing_ok=True)  # it describes the old file
    note.write_text(version)
  except Exception as e:
    raise ValueError(f'{url} could not be downloaded: {_text(e)}.') from e
  return True


def _limit(local, size):
  """Return the bytes that may be downloaded of a file of the given size.

  A server may say another size than it sends, or send without end.
  """
  free = shutil.disk_usage(local.parent).free
  if size is not None and size > free:
    raise _Refused(
      f'it has {size / 1e9:,.1f} GB, and {local.parent} {free / 1e9:,.1f} GB '
      'free; set VIT_JAX_CACHE to another folder'
    )
  limit = min(_UNSIZED, free // 2) if size is None else size
  return min(limit, LARGEST_JSON) if local.suffix == '.json' else limit


def _file_system(url):
  protocol = url.partition('://')[0]
  options = {}
  try:
    if protocol in ('http', 'https'):
      import aiohttp

      # The default limit of five minutes for a whole file is too short.
      timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
      options['client_kwargs'] = {'timeout': timeout, 'trust_env': True}
    return fsspec.core.url_to_fs(url, **options)
  except ImportError as e:
    if protocol in ('gs', 'gcs'):
      path = urllib.parse.quote(url.partition('://')[2])
      host = os.environ.get(_GCS_VARIABLE) or _GCS
      return _file_system(f'{host.rstrip("/")}/{path}')
    _, install = PACKAGES.get(protocol, ('', str(e)))
    raise ValueError(f'{url}: {protocol}:// needs a package: {install}') from e
  except ValueError as e:
    raise ValueError(
      f'{url}: {protocol}:// is not known. Supported: {", ".join(PACKAGES)}.'
    ) from e


def _hint(url):
  if not url.startswith(('gs://', 'gcs://')) or sys.modules.get('gcsfs'):
    return ''
  _, install = PACKAGES['gs']
  return f' If the bucket is not public, log in and run {install}.'


def _text(error):
  if isinstance(error, _Refused):
    return str(error)
  return f'{type(error).__name__} {error}'.strip()


class _Callback(fsspec.callbacks.Callback):
  """fsspec's callback that calls `progress`, and ends endless downloads."""

  def __init__(self, url: str, progress: Progress, limit: int) -> None:
    super().__init__()
    self._url, self._progress, self._limit = url, progress, limit
    self._start = time.monotonic()

  def call(self, *args, **kwargs):
    if self.value > self._limit:
      raise _Refused(
        f'it has sent more than the {self._limit:,} bytes that are expected; '
        'download the file by other means and give its local path'
      )
    seconds = time.monotonic() - self._start
    if seconds > 60 and self.value < _SLOWEST * seconds:
      raise _Refused(f'it sends less than {_SLOWEST:,} bytes per second')
    self._progress(self._url, self.value, self.size)


class _Progress:
  """A line on stderr every 10 seconds: 'NAME: 12 of 340 MB, 5.6 MB/s'."""

  def __init__(self) -> None:
    self._start = self._said = time.monotonic()

  def __call__(self, url: str, done: int, total: int | None) -> None:
    now = time.monotonic()
    if now - self._said < 10:
      return
    self._said = now
    of = f' of {total / 1e6:,.0f}' if total else ''
    speed = done / 1e6 / (now - self._start)
    name = url.rsplit('/', 1)[-1]
    print(
      f'{name}: {done / 1e6:,.0f}{of} MB, {speed:.1f} MB/s', file=sys.stderr
    )

"""Files of arrays: .npz, safetensors and JSON, local or remote.

Nothing that is read can execute code, and a broken or hostile file gives one
ValueError without taking more memory than it has bytes. The format of a file
is determined from its content, not its name. Floats of every width are
returned as float32, which is how parameters are kept.
"""

import difflib
import hashlib
import json
import math
import os
import pathlib
import struct
import sys
import time
import typing
import urllib.parse
import zipfile
from collections.abc import Callable
from typing import Any, Literal

import fsspec
import fsspec.callbacks
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from vit_jax.files import PACKAGES, PathLike, replacing
from vit_jax.types import FlatParams

# (URL, bytes so far, total bytes or None)
Progress = Callable[[str, int, int | None], None]

READABLE = '.npz and .safetensors files (or the index of sharded ones)'
# Public buckets are on the web as well. The variable is that of Google's own
# libraries, for an emulator.
_GCS = 'https://storage.googleapis.com'
_GCS_VARIABLE = 'STORAGE_EMULATOR_HOST'
_INDEX = '.safetensors.index.json'
_BLOCK = 1 << 24  # bytes read at once
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
      with zipfile.ZipFile(path) as file:
        pickled = any(n.endswith('.pkl') for n in file.namelist())
    except zipfile.BadZipFile:
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


def read_json(path: PathLike) -> dict[str, Any]:
  """Return the dict in a JSON file.

  Raises:
    ValueError: it is not a JSON object; says in which line and column.
  """
  try:
    found = json.loads(pathlib.Path(path).read_bytes())
  except OSError as e:
    raise ValueError(f'{path} cannot be opened: {e.strerror}.') from e
  except (ValueError, RecursionError) as e:  # invalid UTF-8 is a ValueError too
    raise ValueError(f'{path} is not valid JSON: {e}.') from e
  if not isinstance(found, dict):
    what = type(found).__name__
    raise ValueError(f'{path}: expected {{...}}, found a {what}.')
  return found


def read_npz(path: PathLike) -> dict[str, np.ndarray]:
  """Return {name: array} of an .npz file.

  float16, float64 and bfloat16 (also as the 2 raw bytes, '|V2', that numpy
  stores) are returned as float32.

  Raises:
    ValueError: the file is not a zip, truncated or corrupt; a member is not an
      array, is pickled, or has a header that does not fit its size.
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
    except _Refused as e:
      raise ValueError(f'{path}: {e}') from e
    except Exception as e:  # whatever zlib and numpy raise on broken bytes
      raise ValueError(
        f'{path} cannot be read as .npz: {e or type(e).__name__}. It is '
        'truncated or corrupt; copy or download it again.'
      ) from e
  return arrays


class _Refused(ValueError):
  """An error with a message of our own, unlike those of zipfile and numpy."""


def _check_members(members, size):
  names = [m.filename for m in members]
  if not members:
    raise _Refused('It holds no arrays.')
  if no_array := [n for n in names if not n.endswith('.npy')]:
    raise _Refused(f'It holds {no_array[0]!r}, which is not an array (.npy).')
  if len(set(names)) != len(names):
    raise _Refused('It has several arrays of one name.')
  # An archive whose members overlap unpacks to far more than its own size.
  if sum(m.compress_size for m in members) > size:
    raise _Refused('Its members are longer than the file: truncated?')


def _read_member(stream, member):
  """Return one array, without allocating more than the member can hold."""
  name = member.filename
  version = np.lib.format.read_magic(stream)
  read = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
  }.get(version)
  if read is None:
    raise _Refused(f'{name} has the unknown .npy version {version}.')
  shape, fortran, dtype = read(stream)
  if dtype.hasobject:
    raise _Refused(
      f'{name} is pickled (dtype object), so reading it can execute any code. '
      'Store plain numbers instead, or leave it out.'
    )
  size = math.prod(shape) * dtype.itemsize
  # Deflate packs at most 1032 to 1.
  there = min(member.file_size - stream.tell(), 1100 * member.compress_size)
  if min(shape, default=0) < 0 or size > there:
    raise _Refused(
      f'{name} promises {shape} {dtype}, {size} bytes, but has {max(there, 0)}.'
    )
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


def read_safetensors(path: PathLike) -> dict[str, np.ndarray]:
  """Return {name: array} of a safetensors file, or of an index and its shards.

  Raises:
    ValueError: truncated or corrupt; a shard is missing, lies in another
      folder, or does not hold the arrays that the index lists.
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


def _read_shards(path):
  arrays = {}
  for shard, listed in _shards(path).items():
    if not (path.parent / shard).is_file():
      raise ValueError(f'{path} names {shard}, which is not in its folder.')
    found = read_safetensors(path.parent / shard)
    if listed != found.keys():
      raise ValueError(
        f'{path} and {shard} disagree: missing {sorted(listed - found.keys())}'
        f', unexpected {sorted(found.keys() - listed)}.'
      )
    arrays |= found
  return arrays


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
    if '://' in os.fspath(partial):  # the library writes local files only
      partial.write_bytes(safetensors.numpy.save(arrays, metadata))
    else:
      safetensors.numpy.save_file(arrays, partial, metadata)


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
    ValueError: the file does not exist; the download fails, of which nothing
      is kept; the package for the protocol is not installed.
  """
  url = os.fspath(path)
  if '://' not in url:
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
    with replacing(local) as partial:
      fs.get_file(remote, str(partial), callback=_Callback(url, progress))
      size, have = info.get('size'), partial.stat().length
      if size is not None and have != size:
        raise OSError(f'received {have} of {size} bytes')
      note.unlink(missing_ok=True)  # it describes the old file
    note.write_text(version)
  except Exception as e:
    raise ValueError(f'{url} could not be downloaded: {_text(e)}.') from e
  return True


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
  return f'{type(error).__name__} {error}'.strip()


class _Callback(fsspec.callbacks.Callback):
  """fsspec's callback that calls `progress`."""

  def __init__(self, url: str, progress: Progress) -> None:
    super().__init__()
    self._url, self._progress = url, progress

  def call(self, *args, **kwargs):
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

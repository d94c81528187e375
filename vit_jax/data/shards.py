"""Files of many examples, local or remote: named, read in parts, indexed.

Names are paths or URLs (see image_files.py) with globs and braces:

  /data/*.tar    gs://bucket/train-{0000..0147}.tar    /data/{a,b}.tar
"""

import collections
import concurrent.futures
import glob
import hashlib
import io
import itertools
import json
import os
import posixpath
import re
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging
from etils import epath

from vit_jax.data import image_files, splits, tables
from vit_jax.runs.files import PathLike, replacing

Names = PathLike | Sequence[PathLike]  # of files
Arrays = dict[str, np.ndarray]

_OPEN = 256  # local files that a process keeps open
_THREADS = 32  # requests to a file system at a time
_SCANS = 16  # shards that are indexed at a time
_MOST_ERRORS = 10  # shards with errors before indexing ends
_BLOCK = 2**23  # bytes of one request while a remote shard is indexed
_VERSION = 1  # of what an index contains


def expand(
  names: Names, *, endings: Sequence[str], split: str | None = None
) -> list[str]:
  """Return the files that the names match, each once.

  The split of a file is the folder that it is in, or the beginning of its name,
  if that is a name of splits: train/0.tar, train-00000-of-00010.parquet.

  Args:
    names: one name or several. Braces keep their order, globs are sorted.
      A folder stands for all visible files below it with one of the endings.
    endings: such as ('.tar',).
    split: leaves out the files of other splits.

  Raises:
    ValueError: a name that matches nothing, or a pattern over http; no file of
      the split.
  """
  if isinstance(names, str) or not isinstance(names, Sequence):
    names = [names]
  if not names:
    raise ValueError('no files are named. Expected at least one.')
  found: dict[str, None] = {}
  for name in names:
    if name is None:
      raise ValueError('the name of the files is None. Set it to their path.')
    for pattern in braces(os.fspath(name)):
      found |= dict.fromkeys(_matches(pattern, endings))
  if split is None:
    return list(found)
  known = {name: split_of(name) for name in found}
  kept = [name for name in found if known[name] == split]
  if not kept:
    has = sorted({str(x) for x in known.values()} - {'None'})
    raise ValueError(
      f'no file of {tables.shorten(list(found), 3)} is of the split {split!r}.'
      f' Their splits are {has}. A split is the folder of a file, or the'
      ' beginning of its name, as in train-00000.tar.'
    )
  return kept


def split_of(name: str) -> str | None:
  """Return the split that the name of a file says, or None."""
  *_, folder, base = ['', '', *name.split('/')]
  start = re.match(r'[A-Za-z]+', base)
  for word in (start[0] if start else '', folder):
    if word.lower() in splits.NAMES:
      return word
  return None


def check_one_split(names: Sequence[str], split: str | None) -> None:
  """Raise ValueError if the files are of several splits and none is chosen."""
  found = sorted({str(split_of(name)) for name in names})
  if split is None and len(found) > 1:
    raise ValueError(
      f'the files, from {names[0]} to {names[-1]}, are of the splits {found}.'
      f' Choose one, e.g. split={found[-1]!r}, or name its files.'
    )


def braces(pattern: str) -> list[str]:
  """Return the names in 'a-{08..11}.tar' or '{a,b}.tar', in this order."""
  match = re.search(r'\{([^{}]*)\}', pattern)
  if match is None:
    return [pattern]
  inner = match[1]
  if numbers := re.fullmatch(r'(\d+)\.\.(\d+)', inner):
    first, last = (int(x) for x in numbers.groups())
    width = len(numbers[1]) if numbers[1].startswith('0') else 0
    step = 1 if first <= last else -1
    parts = [f'{i:0{width}d}' for i in range(first, last + step, step)]
  elif ',' in inner:
    parts = inner.split(',')
  else:
    raise ValueError(
      f'{pattern}: {match[0]} is not a range such as {{000..147}}, nor a list'
      ' such as {a,b}.'
    )
  ends = pattern[: match.start()], pattern[match.end() :]
  found = (braces(f'{ends[0]}{part}{ends[1]}') for part in parts)
  return list(dict.fromkeys(itertools.chain.from_iterable(found)))


def _matches(pattern, endings):
  """Return the files of a pattern without braces; a plain name is itself."""
  fs, path = image_files.file_system(pattern)
  if pattern.lower().endswith(tuple(endings)) and not glob.has_magic(path):
    return [pattern]  # without a request for each of thousands
  is_there = os.path.lexists if fs is None else fs.exists
  is_folder = os.path.isdir if fs is None else fs.isdir
  has_magic = glob.has_magic(path)
  if has_magic and pattern.startswith(('http:', 'https:')):
    raise ValueError(
      f'{pattern}: files cannot be listed over http. Name them, for example'
      ' with {0000..0147}.'
    )
  try:
    if has_magic and not is_there(path):
      if fs is None:
        found = sorted(glob.glob(path, recursive=True))
      else:
        found = sorted(fs.glob(path))
    elif is_folder(path):
      found = [os.path.join(path, x) for x in image_files.walk(fs, path)]
      found = sorted(x for x in found if x.lower().endswith(tuple(endings)))
    else:
      return [pattern]
  except Exception as error:  # each file system raises its own types
    raise ValueError(f'cannot list {pattern}: {error}') from error
  if not found:
    raise ValueError(
      f'{pattern} matches no files. Expected files that end in'
      f' {", ".join(endings)}.'
    )
  return found if fs is None else [fs.unstrip_protocol(x) for x in found]


class Shards(Sequence[str]):
  """Files by number, read in parts by several threads.

  Args:
    names: paths or URLs of single files.

  Raises:
    ValueError: files that do not exist or cannot be accessed.
  """

  def __init__(self, names: Sequence[str]) -> None:
    self._names = [_absolute(name) for name in names]
    self._stats = _stats(self._names)
    self.sizes: list[int] = [size for size, _ in self._stats]
    self.reached = [0] * len(names)  # bytes that are indexed
    self.indexed = False
    self._start()

  def __len__(self) -> int:
    return len(self._names)

  def __getitem__(self, index: Any) -> Any:
    """Return the name of a file."""
    return self._names[index]

  def is_remote(self, shard: int) -> bool:
    """Return whether a file is not on a local disk."""
    return '://' in self._names[shard]

  def stamp(self, shard: int) -> list[Any]:
    """Return values that differ after the file was changed."""
    return [self._names[shard], *self._stats[shard]]

  def read(self, shard: int, offset: int, size: int) -> bytes:
    """Return bytes of a file. Raises OSError if it does not have them all."""
    data = self.read_at_most(shard, offset, size)
    if len(data) < size:
      raise OSError(
        f'{self._names[shard]} is truncated, or has changed since it was'
        f' indexed: {size} bytes at byte {offset} cannot be read.'
      )
    return data

  def read_at_most(self, shard: int, offset: int, size: int) -> bytes:
    """Return bytes of a file, fewer at its end."""
    end = min(offset + size, self.sizes[shard])
    if end <= offset:
      return b''
    if not self.is_remote(shard):
      return self._file(shard).read(offset, end - offset)
    if shard not in self._remote:
      self._remote[shard] = image_files.file_system(self._names[shard])
    fs, path = self._remote[shard]
    try:
      data = fs.cat_file(path, start=offset, end=end)
    except Exception as error:  # each file system raises its own types
      raise OSError(
        f'cannot read {self._names[shard]} at byte {offset}:'
        f' {type(error).__name__}: {error}'
      ) from error
    if len(data) > end - offset:
      raise OSError(
        f'{self._names[shard]}: the server returns the whole file instead of a'
        ' part of it. Copy the file, or use a server that knows byte ranges.'
      )
    return data

  def fingerprint(self) -> str:
    """Return a hash of the names, without folders, and the sizes."""
    return hashlib.sha256(
      json.dumps(
        [(os.path.basename(x), n) for x, n in zip(self._names, self.sizes)]
      ).encode()
    ).hexdigest()[:16]

  def _file(self, shard):
    """Return an open file. One that is no longer kept closes after its use."""
    with self._lock:
      if shard not in self._open:
        file = _File(self._names[shard])
        if file.stat != self._stats[shard]:
          raise OSError(
            f'{file.name} has changed since the start. Start again.'
          )
        self._open[shard] = file
        if len(self._open) > _OPEN:
          self._open.popitem(last=False)
      return self._open[shard]

  def __getstate__(self) -> dict[str, Any]:
    """Return names, sizes and times; files stay behind."""
    own = ('_open', '_lock', '_remote')
    return {k: v for k, v in vars(self).items() if k not in own}

  def __setstate__(self, state: Mapping[str, Any]) -> None:
    vars(self).update(state)
    self._start()

  def _start(self):
    self._lock = threading.Lock()
    self._open: collections.OrderedDict[int, _File] = collections.OrderedDict()
    self._remote: dict[int, tuple[Any, str]] = {}


class _File:
  """An open local file. The last thread that uses it closes it."""

  _close = staticmethod(os.close)  # `os` is gone when the interpreter ends

  def __init__(self, name: str) -> None:
    self.name = name
    self._number = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    self.stat = _local_stat(self._number)

  def read(self, offset, size):
    parts = []
    while size and (part := os.pread(self._number, size, offset)):
      parts.append(part)
      offset, size = offset + len(part), size - len(part)
    return parts[0] if len(parts) == 1 else b''.join(parts)

  def __del__(self) -> None:
    if hasattr(self, '_number'):
      self._close(self._number)


def _absolute(name):
  fs, path = image_files.file_system(name)
  if fs is None:
    return os.path.abspath(path)
  return name if '::' in name else fs.unstrip_protocol(path)


def _stats(names):
  """Return (size, what else identifies the content) of each file."""
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    found = list(pool.map(_stat, names))
  if bad := [(n, x) for n, x in zip(names, found) if isinstance(x, Exception)]:
    listed = '; '.join(f'{name} ({error})' for name, error in bad[:3])
    more = f'; and {len(bad) - 3} more' if len(bad) > 3 else ''
    raise ValueError(
      f'{len(bad)} of {len(names)} files cannot be opened: {listed}{more}.'
      ' Check the names.'
    )
  return found


def _local_stat(number):
  info = os.fstat(number)
  return info.st_size, info.st_mtime_ns


def _stat(name):
  fs, path = image_files.file_system(name)
  try:
    if fs is None:
      with open(path, 'rb') as file:
        return _local_stat(file.fileno())
    about = fs.info(path)
    if about.get('type') == 'directory':
      return IsADirectoryError('it is a folder')
    # Each file system has some of these; a file that changes changes them.
    keys = ('etag', 'crc32c', 'md5hash', 'mtime', 'updated', 'created')
    keys += ('lastmodified', 'last_modified')
    marks = {k: str(v) for k, v in about.items() if k.lower() in keys}
    if about.get('size') is None:
      return OSError('its size is unknown: the server does not report it')
    return int(about['size']), sorted(marks.items())
  except OSError as error:
    return OSError(error.strerror or f'{type(error).__name__}: {error}')
  except Exception as error:  # each file system raises its own types
    return error


class Ahead:
  """Reads of a shard that are cheap from front to back, also if it is remote.

  Args:
    shards: files.
    shard: the one that is read.
  """

  def __init__(self, shards: Shards, shard: int) -> None:
    self._shards, self._shard = shards, shard
    self._ahead = _BLOCK if shards.is_remote(shard) else 0
    self._start, self._block = 0, b''

  def __call__(self, offset: int, size: int) -> bytes:
    """Return bytes of the shard, fewer at its end."""
    if self._shards.indexed:
      raise OSError('indexing was stopped.')
    self._shards.reached[self._shard] = offset
    if not self._ahead:
      return self._shards.read_at_most(self._shard, offset, size)
    at = offset - self._start
    if not 0 <= at <= at + size <= len(self._block):
      length = max(size, self._ahead)
      self._start, at = offset, 0
      self._block = self._shards.read_at_most(self._shard, offset, length)
    return self._block[at : at + size]


class Texts(Sequence[str]):
  """Many texts in two arrays: a tenth of the memory of a list.

  Args:
    data: uint8 [bytes], all texts as UTF-8.
    ends: int64 [n], where each one ends in `data`.
  """

  def __init__(self, data: np.ndarray, ends: np.ndarray) -> None:
    self.data, self.ends = data, ends

  @classmethod
  def of(cls, texts: Iterable[str]) -> 'Texts':
    """Return the texts of an iterable."""
    encoded = [x.encode('utf-8', 'surrogateescape') for x in texts]
    ends = np.cumsum([len(x) for x in encoded], dtype=np.int64)
    return cls(np.frombuffer(b''.join(encoded), np.uint8), ends)

  def __len__(self) -> int:
    return len(self.ends)

  def __getitem__(self, index: Any) -> Any:
    index = range(len(self))[index]
    start = self.ends[index - 1] if index else 0
    data = self.data[start : self.ends[index]].tobytes()
    return data.decode('utf-8', 'surrogateescape')

  def __iter__(self) -> Iterator[str]:
    start, data = 0, self.data.tobytes()
    for end in self.ends.tolist():
      yield data[start:end].decode('utf-8', 'surrogateescape')
      start = end


# Indices, kept from one start to the next.


def cache_folder(chosen: PathLike | None) -> epath.Path | None:
  """Return the folder of the indices; None if `chosen` is ''."""
  if chosen == '':
    return None
  if chosen is not None:
    return epath.Path(os.fspath(chosen)).expanduser()
  home = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
  return epath.Path(home).expanduser() / 'vit_jax' / 'index'


def index(
  shards: Shards,
  scan: Callable[[int], Arrays],
  *,
  kind: str,
  cache_dir: PathLike | None = None,
) -> list[Arrays]:
  """Return scan(shard) of each shard, computed once and then read from a cache.

  Shards are scanned by threads, with progress on stderr. Each result is written
  when it is there, so that an interrupted scan resumes.

  Args:
    shards: files.
    scan: returns the arrays of the index of a shard. Raises ValueError for a
      shard that cannot be read.
    kind: what `scan` depends on besides the content of the file.
    cache_dir: folder of the indices, see `cache_folder`.

  Raises:
    ValueError: the first errors of `scan`, and how many more there are.
  """
  folder = cache_folder(cache_dir)
  paths = [
    folder and folder / _cache_name(kind, shards.stamp(i))
    for i in range(len(shards))
  ]

  def scan_and_keep(shard):
    found = scan(shard)
    if path := paths[shard]:
      _write_arrays(path, found)
    return found

  errors: dict[int, Exception] = {}
  with concurrent.futures.ThreadPoolExecutor(_SCANS) as pool:
    results: list[Any] = list(pool.map(_read_arrays, paths))
    missing = [i for i, found in enumerate(results) if found is None]
    futures = {pool.submit(scan_and_keep, i): i for i in missing}

    def collect(future):
      try:
        results[futures[future]] = future.result()
      except (ValueError, OSError) as error:
        errors[futures[future]] = error
        if len(errors) > _MOST_ERRORS:
          raise

    try:
      _with_progress(futures, shards, collect)
    except (ValueError, OSError):
      pass  # one of `errors`
    finally:
      shards.indexed = True  # scans that still run, after Ctrl-C, end
      pool.shutdown(cancel_futures=True)
  if errors:
    first = errors[min(errors)]
    more = f' (Errors in {len(errors) - 1} more shards.)' * (len(errors) > 1)
    raise ValueError(f'{first}{more}') from first
  return results


def _with_progress(futures, shards, collect):
  """Call `collect` with futures that are done; report what has been read."""
  if not futures:
    return
  from vit_jax.runs import terminal  # worker processes do without jax

  def advance():
    """Yield once for each MB that is read."""
    waiting, shown = {*futures}, 0
    while waiting:
      done, waiting = concurrent.futures.wait(
        waiting, 0.5, concurrent.futures.FIRST_COMPLETED
      )
      for future in done:
        shards.reached[futures[future]] = shards.sizes[futures[future]]
        collect(future)
      read = sum(shards.reached[i] for i in futures.values()) // 2**20
      yield from range(shown, read)
      shown = max(shown, read)

  total = sum(shards.sizes[i] for i in futures.values()) // 2**20
  unit = f'MB of {len(futures)} tar files indexed'
  for _ in terminal.track(advance(), total, unit=unit):
    pass


def _cache_name(kind, stamp):
  text = json.dumps([_VERSION, kind, *stamp])
  stem = re.sub(r'[^\w.-]+', '_', posixpath.basename(stamp[0]))[-60:]
  return f'{stem}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.npz'


def _read_arrays(path):
  """Return the arrays of a file; None if there is none, or a damaged one."""
  if path is None:
    return None
  try:
    with path.open('rb') as file:
      data = io.BytesIO(file.read())
    with np.load(data, allow_pickle=False) as found:
      return dict(found)
  except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
    return None


_warned: set[str] = set()  # folders that cannot be written


def _write_arrays(path, arrays):
  folder = os.fspath(path.parent)
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial, partial.open('wb') as file:
      np.savez(file, **arrays)
  except Exception as error:  # each file system raises its own types
    if folder not in _warned:
      logging.warning(
        f'The index of shards is not kept for the next start: {error}. Set'
        ' cache_dir to a folder that can be written, or to an empty string.'
      )
    _warned.add(folder)

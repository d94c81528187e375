"""Members of tar files, found by reading headers only, or as a stream.

Tar files in tar files, as ImageNet has them, act as folders: the member b.jpg
of a/n01.tar has the path a/n01/b.jpg. Long names (GNU, pax) are understood, and
so are tar files that were concatenated. Hidden members (their name, or that of
a folder, begins with a dot) are left out.
"""

import bz2
import gzip
import io
import lzma
import posixpath
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from vit_jax.data import image_files

ENDINGS = ('.tar',)

_COMPRESSED = {  # magic number: ending, program
  b'\x1f\x8b': ('gz', 'gunzip'),
  b'BZh': ('bz2', 'bunzip2'),
  b'\xfd7zXZ': ('xz', 'unxz'),
  b'\x28\xb5\x2f\xfd': ('zst', 'unzstd'),
}
_OPENERS: dict[str, Callable[..., Any]] = {
  'gz': gzip.open,
  'bz2': bz2.open,
  'xz': lzma.open,
}
_BLOCK = tarfile.BLOCKSIZE
_SKIP = 2**16  # bytes read at a time after the end of an archive
_DEEPEST = 8  # tar files in each other
_UNKNOWN = sys.maxsize  # size of a stream

Read = Callable[[int, int], bytes]  # (offset, size) -> bytes, fewer at the end


class Member(NamedTuple):
  """A regular file in a tar file.

  Attributes:
    path: in the tar file, without a leading '/' or './'.
    offset: of its first byte in the outermost file.
    size: in bytes.
    modified: seconds since 1970, when it was written before it was packed.
  """

  path: str
  offset: int
  size: int
  modified: int


def members(read: Read, size: int, name: str) -> Iterator[Member]:
  """Yield the members of a tar file of which only the headers are read.

  Links to members are members, too.

  Args:
    read: returns a part of the file.
    size: of the file, in bytes.
    name: of the file, for error messages.

  Raises:
    ValueError: it is not a tar file, or compressed, truncated or damaged. The
      message contains the name and the offset in bytes.
  """
  if found := compression(read(0, 8)):
    ending, program = found
    raise ValueError(
      f'{name} is compressed ({ending}), so its members cannot be read at'
      f' random. Unpack it with\n  {program} --keep {name}\nor convert it with'
      f'\n  python -m vit_jax.tools.prepare {name} DEST'
    )
  links: list[tuple[str, str]] = []
  yield from _members(read, 0, size, name, '', links)
  if not links:
    return
  targets = {target for _, target in links}
  again = _members(read, 0, size, name, '', [])
  known = {x.path: x for x in again if x.path in targets}
  for path, target in links:
    if target in known:
      yield known[target]._replace(path=path)
    elif image_files.is_image(path):
      raise ValueError(
        f'{name}: the member {path!r} is a link to {target!r}, which is not a'
        ' file of the archive. Pack it again with tar --dereference'
        ' --hard-dereference.'
      )


def stream(file: Any, name: str) -> Iterator[tuple[str, bytes]]:
  """Yield (path, content) of the members of a tar file, read front to back.

  The file may be compressed (gz, bz2, xz), and may be a pipe. Links are left
  out, because their targets are not kept.

  Args:
    file: binary file, open for reading.
    name: of the file, for error messages.

  Raises:
    ValueError: as of `members`; a compression that cannot be read.
  """
  file = io.BufferedReader(file) if not hasattr(file, 'peek') else file
  if found := compression(file.peek(8)[:8]):
    ending, program = found
    if ending not in _OPENERS:
      raise ValueError(
        f'{name} is compressed ({ending}), which cannot be read. Unpack it with'
        f'\n  {program} --keep {name}'
      )
    file = _OPENERS[ending](file, 'rb')
  read = _Forward(file, name)
  for member in _members(read, 0, _UNKNOWN, name, '', []):
    data = read(member.offset, member.size)
    if len(data) < member.size:
      raise _truncated(name, member.offset + len(data), member.path)
    yield member.path, data


def compression(start: bytes) -> tuple[str, str] | None:
  """Return ('gz', 'gunzip') from the first bytes of a compressed file."""
  return next((v for k, v in _COMPRESSED.items() if start.startswith(k)), None)


def _members(read, begin, end, name, folder, links, depth=0):
  """Yield the members of the archives in [begin, end) of a file.

  Links are appended to `links` as (path, path of the target).
  """
  if depth > _DEEPEST:
    raise ValueError(
      f'{name}: {folder}.tar is in more than {_DEEPEST} tar files. Unpack some.'
    )
  at = begin
  while at == begin or (at < end and read(at, 1)):
    window = _Window(read, at, end)
    tar = _open(window, name, at)
    while (info := _next(tar, window, name)) is not None:
      tar.members.clear()  # a million of them would take a GB
      path = _path(folder, info.name)
      if path is None or info.issparse():
        continue
      offset = at + info.offset_data
      if info.islnk() or info.issym():
        base = posixpath.dirname(info.name) if info.issym() else ''
        target = _path(folder, posixpath.join(base, info.linkname))
        links.append((path, target))
      elif not info.isreg():
        continue
      elif info.size < 0:
        raise _damaged(name, at + info.offset)
      elif offset + info.size > end:
        raise _truncated(name, end, path)
      elif path.endswith(ENDINGS):
        inner, inner_end = path.removesuffix('.tar'), offset + info.size
        yield from _members(
          read, offset, inner_end, name, inner, links, depth + 1
        )
      else:
        yield Member(path, offset, info.size, _seconds(info.mtime))
    at = _next_archive(read, at + tar.offset, end, name)


def _open(window, name, at):
  try:
    return tarfile.open(fileobj=window, mode='r:')
  except (tarfile.TarError, ValueError) as error:
    if window.is_at_end() and window.position:
      raise _truncated(name, window.reached()) from error
    raise ValueError(
      f'{name} has no tar archive at byte {at}: {error}. It is damaged, or not'
      ' a tar file. Copy it again.'
    ) from error


def _next(tar, window, name):
  try:
    return tar.next()
  except (tarfile.TarError, ValueError) as error:
    if window.is_at_end():
      raise _truncated(name, window.reached()) from error
    raise ValueError(
      f'{name} is damaged at byte {window.start + tar.offset}: {error}. Copy'
      ' it again.'
    ) from error


def _next_archive(read, at, end, name):
  """Return where the next of several concatenated archives begins, or the end.

  An archive ends with blocks of zeros. tarfile also stops at a broken header.
  """
  block = read(at, min(_BLOCK, end - at))
  if len(block) < _BLOCK:
    raise _truncated(name, at + len(block))
  if any(block):
    raise _damaged(name, at)
  while at < end and (data := read(at, min(_SKIP, end - at))):
    if rest := data.lstrip(b'\0'):
      return at + (len(data) - len(rest)) // _BLOCK * _BLOCK
    at += len(data)
  return end


def _damaged(name, at):
  return ValueError(
    f'{name} is damaged: byte {at} does not begin a member. Copy it again.'
  )


def _truncated(name, end, path=None):
  where = '' if path is None else f', in its member {path!r}'
  return ValueError(
    f'{name} is truncated: it ends at byte {end}{where}, before the end of the'
    ' archive (zeros). Copy it again. If its writer is known to leave out the'
    ' end, add it with\n  head -c 1024 /dev/zero >> FILE'
  )


def _seconds(time):
  """Return a time as an int; 0 if it is absurd."""
  return int(time) if 0 <= time < 2**40 else 0


def _path(folder, name):
  """Return the path of a member, or None if it is hidden or outside."""
  path = posixpath.normpath(posixpath.join(folder, name.lstrip('/')))
  hidden = path.startswith('.') or '/.' in path
  return None if hidden else path


class _Window:
  """A part of a file, as tarfile reads it.

  Args:
    read: returns a part of the whole file.
    start, end: of the part.
  """

  def __init__(self, read: Read, start: int, end: int) -> None:
    self._read, self.start, self._end = read, start, end
    self.position, self._is_at_end = 0, False

  def tell(self):
    return self.position

  def seek(self, position):
    self.position = position

  def read(self, size):
    at = self.start + self.position
    data = self._read(at, min(size, self._end - at)) if at < self._end else b''
    self.position += len(data)
    self._is_at_end = len(data) < size
    return data

  def reached(self):
    """Return the place in the whole file, at most the end."""
    return min(self.start + self.position, self._end)

  def is_at_end(self):
    """Return whether the last read was cut off."""
    return self._is_at_end


class _Forward:
  """Reads of a stream at offsets that increase.

  Args:
    file: binary file.
    name: of the file, for error messages.
  """

  def __init__(self, file: Any, name: str) -> None:
    self._file, self._name = file, name
    self._start, self._data = 0, bytearray()

  def __call__(self, offset: int, size: int) -> bytes:
    assert offset >= self._start
    self._drop(offset)
    while (missing := offset + size - self._start - len(self._data)) > 0:
      block = self._next(max(missing, _SKIP))
      if not block:
        break
      self._data += block
      self._drop(offset)
    return bytes(self._data[:size])

  def _drop(self, offset):
    """Forget what is before the offset."""
    count = min(offset - self._start, len(self._data))
    self._start += count
    del self._data[:count]

  def _next(self, size):
    # Bytes that are skipped are read in parts.
    at = self._start + len(self._data)
    try:
      return self._file.read(min(size, 2**20))
    except EOFError as error:
      raise ValueError(
        f'{self._name} is truncated: its compressed data ends after {at}'
        ' unpacked bytes. Copy it again.'
      ) from error
    except (OSError, zlib.error, lzma.LZMAError) as error:
      raise ValueError(
        f'{self._name} is damaged after {at} unpacked bytes: {error}. Copy it'
        ' again.'
      ) from error

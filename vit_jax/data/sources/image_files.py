"""Image files by path or URL (gs://, s3://): found, read, decoded."""

import collections
import concurrent.futures
import contextlib
import functools
import glob
import io
import os
import posixpath
import re
import sys
import unicodedata
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from etils import epath

from vit_jax.data import images, workers
from vit_jax.data.sources import columns
from vit_jax.data.sources.tables import some
from vit_jax.io import terminal
from vit_jax.types import PathLike, UserError

_ENDS = {'JPEG': b'\xff\xd9', 'PNG': b'IEND\xaeB`\x82'}
ENDINGS = images.ENDINGS
# Hidden files, and folders of thumbnails, metadata and deleted files.
_HIDDEN = re.compile(
  r'(^|/)(\.|@[^/]*/|(__MACOSX|lost\+found|System Volume Information|'
  r'\$RECYCLE\.BIN|#recycle|#snapshot)/)'
)
MAX_FILE_BYTES = 2**28
_USUAL = 2**20  # a buffer for the largest file takes 0.1 ms more


def is_image(path: str, decode: Any = images.Colours()) -> bool:
  """Return whether the path ends like an image, in lower or upper case."""
  return decode.takes(path)


def is_shown(path: str) -> bool:
  """Return whether a relative path, 'FOLDER/' or a file, is not skipped."""
  return not _HIDDEN.search(path)


def walk(folder: str) -> Iterator[str]:
  """Yield the paths of all shown files below a folder, relative to it."""
  if '://' in folder:  # one listing, which epath does not have
    fs, folder = fsspec.core.url_to_fs(folder)
    start = len(os.path.join(folder, ''))
    yield from (x[start:] for x in fs.find(folder) if is_shown(x[start:]))
    return
  tops, base = [folder], len(os.path.join(folder, ''))
  seen = {*map(str, epath.Path(os.path.realpath(folder)).parents)}
  for first in tops:  # each folder once; links last, so it keeps its own path
    for top, folders, names in os.walk(first, onerror=_refuse):
      is_new = (real := os.path.realpath(top)) not in seen
      folders[:] = sorted(x for x in folders if is_new and is_shown(f'{x}/'))
      start = os.path.join(top, '')[base:]
      yield from (start + x for x in names if is_new and x[0] != '.')
      tops += filter(os.path.islink, (os.path.join(top, x) for x in folders))
      seen.add(real)


def _refuse(error):
  """Raise an error of a folder that is there, but cannot be listed."""
  if not isinstance(error, FileNotFoundError):
    raise error


class Files:
  """The shown files below a folder, found by the texts of a table.

  A text is a path relative to the folder of the table or to `root`, or the end
  of a path. The ending of an image may be missing or in another case.
  """

  def __init__(self, root: str, table: PathLike) -> None:
    self.root, self._base = root, posixpath.dirname(table)
    self._top = root if '://' in root else os.path.abspath(root)
    start = posixpath.join(root, '')
    self._start = posixpath.join(self._base, '').removeprefix(start)
    self._paths = columns.binary(walk(root))

  @functools.cached_property
  def _stems(self):
    """The stems of the names of all paths, in their bytes."""
    end = '|'.join(map(re.escape, ENDINGS))
    names = pc.replace_substring_regex(self._paths, '^.*/', '')
    return pc.replace_substring_regex(names, f'(?i)({end})$', '')

  def find(self, texts: Sequence[str]) -> list[list[str]]:
    """Return the paths of the files that each text names."""
    names = [posixpath.basename(_stem(_end(x))) for x in texts]
    wanted = columns.binary(names)
    others = pc.match_substring_regex(self._paths, r'[^\x00-\x7f]')
    chosen = pc.or_(others, pc.is_in(self._stems, value_set=wanted))
    near = collections.defaultdict(list)
    for path in sorted(columns.Column(self._paths.filter(chosen))):
      near[posixpath.basename(_stem(path))].append(path)
    return [self._find(x, near.get(y, ())) for x, y in zip(texts, names)]

  def find_all(self, texts: Any) -> tuple[Any, dict[int, Any]]:
    """Return (paths, {row: (text, paths)} of texts without exactly one path).

    Texts and paths are Arrow arrays of bytes; a text without a file stays.
    """
    start = pa.scalar(os.fsencode(self._start), pa.binary())
    place = pc.index_in(
      pc.binary_join_element_wise(start, texts, b''), value_set=self._paths
    )
    if place.null_count:
      counts = self._stems.value_counts()
      single = counts.filter(pc.equal(counts.field('counts'), 1))
      is_single = pc.is_in(texts, value_set=single.field('values'))
      names = pc.if_else(is_single, texts, None)
      for known, x in (self._paths, texts), (self._stems, names):
        place = pc.coalesce(place, pc.index_in(x, value_set=known))
    paths = pc.coalesce(self._paths.take(place), texts)
    odd: dict[int, Any] = {}
    if others := np.flatnonzero(place.is_null()).tolist():
      files = list(columns.Column(paths))
      names = [files[i] for i in others]
      for i, name, found in zip(others, names, self.find(names)):
        files[i] = found[0] if found else name
        if len(found) != 1:
          odd[i] = name, found
      paths = columns.binary(files)
    return paths, odd

  def _find(self, text, paths):
    """Return those of the paths with the stem of a text that it names."""
    end = _end(text)
    for path in (self._start + end, end):
      if path in paths:
        return [path]
    folder, near = posixpath.dirname(_form(end)), []
    end = f'/{_form(end)}'
    for path in paths:
      whole = unicodedata.normalize('NFC', f'/{self._top}/{path}')
      if folder in whole:  # quick, if many files have the same name
        near += [(path, x) for x in {_form(whole), _stem(whole)}]
    found = [path for path, x in near if x.endswith(end)]
    for start in self._start, '':
      exact = f'/{self._top}/{start}{end[1:]}'
      if matches := [path for path, x in near if x == exact]:
        return matches
    path = os.path.join(self._base, text)  # also links and other folders
    is_other = '/' in text and not found and os.path.isfile(path)
    return [os.path.abspath(path)] if is_other else found


def _end(text):
  """Return a text of a table as the end of a path."""
  return re.sub(r'^(\.{0,2}/)+', '', text.replace('\\', '/'))


def _stem(path):
  """Return the path without the ending of an image, in NFC."""
  end = path.rfind('.') if is_image(path) else None
  return unicodedata.normalize('NFC', path[:end])


def _form(path):
  """Return the path in NFC, with the ending of an image in lower case."""
  start = _stem(path)
  return start + (posixpath.splitext(path)[1].lower() if is_image(path) else '')


def find(patterns: Iterable[str], decode: Any = images.Colours()) -> list[str]:
  """Return the sorted paths of the images that the patterns match.

  A named file may have any ending. Folders, at any depth, and local globs match
  the shown files that `decode` takes; a line on stderr counts the others.
  """
  found: set[str] = set()
  for pattern in patterns:
    path = epath.Path(pattern).expanduser()
    name = os.fspath(path)
    matches = [name] if path.exists() else glob.glob(name, recursive=True)
    files = {y for x in matches for y in _files(epath.Path(x))}
    start = {x: len(os.path.commonpath([x, name])) for x in files}
    files = {x for x in files if is_shown(x[start[x] :])}
    here = {x for x in files if is_image(x, decode) or x == name}
    if not here:
      raise UserError(
        f'{pattern}: no images found. Give files, folders that contain images'
        f' at any depth, or globs. The endings are {", ".join(decode.endings)}.'
      )
    if others := sorted(files - here):
      text = f'{pattern}: ignored files that are not images {some(others)}'
      print(terminal.printable(text), file=sys.stderr)
    found |= here
  return sorted(found)


def _files(path):
  """Return the paths of the files in a folder, or of the file."""
  inside = walk(os.fspath(path)) if path.is_dir() else ['']
  return [os.fspath(path / x) for x in inside]


@functools.cache  # of what raises nothing: evaluators read the same folder
def check(
  paths: tuple[tuple[str, ...], ...],
  remedy: str,
  decode: Any = images.Colours(),
) -> None:
  """Raise UnreadableError with the local files that are not whole images.

  `paths` has the files of each image, several for some rasters. Only headers
  are read, and the JPEGs and PNGs that do not end like one; of rasters all.
  """

  def error(files):
    if isinstance(decode, images.Colours) and _ends_well(*files):
      return None
    try:
      image = decode(read(files))
      if isinstance(image, images.Encoded):
        image.pixels()
    except (images.UnreadableError, OSError) as error:
      return f'{files[0]}: {error}'

  with concurrent.futures.ThreadPoolExecutor(2 * workers.cores()) as pool:
    errors = list(filter(None, pool.map(error, paths)))
  if errors:
    shown = '\n  '.join(errors[:10] + ['...'][: len(errors) // 11])
    text = f'{len(errors)} of {len(paths)} images cannot be read:\n  {shown}'
    raise images.UnreadableError(f'{text}\n{remedy}')


def _ends_well(path):
  """Return whether a file has the header, and the end, of a picture."""
  with contextlib.suppress(Exception):  # Pillow's readers raise many types
    with images.pillow().open(path, formats=images.FORMATS) as image:
      end = _ENDS.get(image.format, b'')
    with open(path, 'rb') as file:
      file.seek(-len(end), os.SEEK_END)
      return file.read() == end
  return False


def read(paths: Iterable[PathLike]) -> bytes:
  """Return the bytes of an image; of several files, of a zip with them."""
  parts = [*map(_read, paths)]
  if len(parts) == 1:
    return parts[0]
  with io.BytesIO() as file:
    with zipfile.ZipFile(file, 'w') as packed:
      for i, part in enumerate(parts):
        packed.writestr(zipfile.ZipInfo(f'{i}'), part)  # without a date
    return file.getvalue()


def _read(path):
  """Return the bytes of a file, at most MAX_FILE_BYTES."""
  with epath.Path(path).open('rb') as file:
    data = file.read(_USUAL)
    if len(data) == _USUAL:
      data += file.read(MAX_FILE_BYTES)
  if len(data) > MAX_FILE_BYTES:
    raise images.UnreadableError(f'More than {MAX_FILE_BYTES:,} bytes.')
  return data

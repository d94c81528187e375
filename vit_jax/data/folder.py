"""A folder of images, local or at a URL that epath opens (gs://, s3://)."""

import collections
import os
import pathlib
import posixpath
import re
import shlex
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from etils import epath

from vit_jax.data import image_files, tables
from vit_jax.data.image_files import is_image, some, walk
from vit_jax.types import MACHINE, PathLike, UserError

# Names of folders of splits, in lower case: 'train2017', 'seg_test', 'valset'.
_WORDS = (
  '(train|training|val|valid|validation|dev|tests?|testing|eval|pred|images|'
  'annotations)'
)
_AFFIX = r'([\W\d_]|sets?|images?|imgs?|pictures|photos|data|folder|seg|split)*'
_SPLIT = re.compile(_AFFIX + _WORDS + _AFFIX)
_PART = re.compile(rf'(?<![a-z]){_WORDS}(?![a-z])')  # of 'flowers_train'
_MOST_CHECKED = 50_000  # files, in a few seconds


class Folder:
  """Images in class folders, or listed in a CSV file.

    path/CLASS/**/IMAGE            Folder(path)
    path/SPLIT/CLASS/**/IMAGE      Folder(path, split='train')
    a CSV of path, label[, split]  Folder(path, csv='labels.csv')
    path/**/IMAGE                  Folder(path, classes=False)

  Images end in one of `image_files.ENDINGS`, in lower or upper case. Folders
  that begin with '.' or '@' or are __MACOSX, and files that begin with '.', are
  skipped. Files are sorted by path. Classes are sorted by name (as text:
  '10' < '2'), or have the order of `class_names`. They are the same for all
  splits that share a class. A folder without images is no class.

  source[i] is {'image': the bytes of the file, 'label': int}.

  Args:
    split: path of a sub-folder, or a value of the column 'split'.
    csv: path of the CSV, relative to `path`. The paths in it are relative to
      the CSV. With a header, the columns can have any order. Labels are names,
      or ints that index `class_names`.
    class_names: names of the classes in the order of their labels. Folders with
      these names are classes, even if they look like splits.
    channels, exif: how images are decoded, see pipeline.py.
    classes: whether folders are classes; if False, all labels are 0.

  Attributes:
    root: the folder that is searched for images; None: a CSV lists them.
  """

  def __init__(
    self,
    path: Annotated[PathLike, MACHINE],
    *,
    split: str | None = None,
    csv: Annotated[PathLike | None, MACHINE] = None,
    class_names: Sequence[str] | None = None,
    channels: Literal[1, 3] = 3,
    exif: bool = True,
    classes: bool = True,
  ) -> None:
    self.channels, self.exif = channels, exif
    root = epath.Path(path).expanduser()
    self.root = None if csv else os.fspath(root)
    self._base = (root / csv).parent if csv else root / (split or '')
    if csv:
      files, labels, names = _from_csv(root / csv, split, class_names)
    elif classes:
      files, labels, names = _from_folders(root, split, class_names)
    else:
      files, names = _images(self._base, nested=False), None
      labels = np.zeros(len(files), np.int32)
    # Bytes of equal length: 1.3M paths take 50 MB, a list 130 MB.
    self._files = np.array([os.fsencode(file) for file in files])
    self._labels = labels
    self.class_names: list[str] | None = names
    self.num_classes: int | None = None if names is None else len(names)

  def __len__(self) -> int:
    return len(self._labels)

  def __getitem__(self, index: int) -> dict[str, Any]:
    image = image_files.read(self._base / self.file_name(index))
    return {'image': image, 'label': int(self._labels[index])}

  def check_files(self, remedy: str) -> None:
    """Raise UnreadableError with visibly broken files, if they are local."""
    if '://' not in os.fspath(self._base) and len(self) <= _MOST_CHECKED:
      image_files.check(tuple(map(self.describe, range(len(self)))), remedy)

  def labels(self) -> np.ndarray:
    """Return the labels of all examples: int32 [n]."""
    return self._labels.copy()

  def file_name(self, index: int) -> str:
    """Return the path of the file, relative to the folder or the CSV."""
    return os.fsdecode(self._files[index])

  def describe(self, index: int) -> str:
    """Return the path of the file."""
    return str(self._base / self.file_name(index))


def _from_folders(root, split, names):
  """Return (paths relative to the root or split, labels, class names)."""
  base = root / (split or '')
  files = _images(base)
  found = classes_of(f'{base}', files, split or '', is_checked=names is None)
  if names is None:
    known, others = _in_splits(root, split, {*found})
    names = tables.ordered(f'{base}', known)
    if others:
      why = ' or their split has other classes' * bool(split)
      tables.say_once(
        f'{root}: folders that are not classes, as they have no images{why} '
        f'{some(sorted(others))}'
      )
  else:
    names = list(map(tables.clean, names))
  return files, tables.indices(f'{base}', found, names), names


def classes_of(
  where: str, files: Sequence[str], split: str = '', *, is_checked: bool = True
) -> list[str]:
  """Return the class of each file: the first folder of its relative path.

  Raises:
    UserError: if `is_checked`, and the classes look like splits, or sub-folders
      of the only class like classes.
  """
  below: dict[str, set[str]] = collections.defaultdict(set)  # with images
  for file in files:
    first, _, rest = file.partition('/')
    below[first].update([rest.partition('/')[0]] if '/' in rest else ())
  names = {first: tables.clean(first) for first in below}
  if is_checked:
    _check_classes(where, files, below, split)
  return [names[file.partition('/')[0]] for file in files]


def _check_classes(where, files, below, split):
  """Refuse splits as classes; `below` has the sub-folders of each class."""
  folders = sorted(below)
  deep = [x for x in folders if below[x]]
  splits = [x for x in deep if _SPLIT.fullmatch(x.lower())]
  parts = {x: y[1] for x in deep if (y := _PART.search(x.lower()))}
  if len({*parts.values()}) > 1:
    splits = list(parts)
  if splits:
    splits.sort(key=lambda x: 'train' not in x.lower())
    inside = sorted(set().union(*map(below.get, splits)))
    paths = [shlex.quote(posixpath.join(split, x)) for x in splits]
    flags = (
      '--config.data.source.split=',
      '--config.evals.test.data.source.split=',
    )
    flags = ' '.join(map(str.__add__, flags, paths))
    raise UserError(
      f'{where} has the folders {some(folders)}. Expected classes, but '
      f'{", ".join(splits)} look like splits with the classes {some(inside)}. '
      f'Choose one, e.g. split={splits[0]!r} ({flags}), or open its own path; '
      'unpack a tar file first. If they are classes, list them in class_names.'
    )
  if len(folders) == 1:
    parents = {posixpath.dirname(x) for x in files}
    common = posixpath.commonpath(parents)
    inside = {posixpath.relpath(x, common).split('/')[0] for x in parents}
    if len(inside - {'.'}) > 1:
      raise UserError(
        f'{where} has one class, {folders[0]!r}, with the sub-folders '
        f'{some(sorted(inside - {"."}))}. If these are the classes, use '
        f'{where}/{common}. If not, list the class in class_names.'
      )
  counts = collections.Counter(x for inside in below.values() for x in inside)
  if max(counts.values(), default=0) > max(1, len(folders) / 2):
    tables.say_once(
      f'{where}: the classes are the folders {some(folders)}. Their sub-folders'
      f' are not classes {some(sorted(counts))}'
    )


def _in_splits(root, split, found):
  """Return (classes, other folders) of all splits that share a class.

  `found` has the classes of this split.
  """
  tops, is_shown = [root], image_files.is_shown
  for _ in pathlib.PurePath(split or '').parts:
    tops = [x / y for x in tops for y in _folders(x) if is_shown(f'{y}/')]
  splits = [{tables.clean(y): x / y for y in _folders(x)} for x in tops]
  seen = set().union(*splits)
  classes = {*found}
  for each in splits * len(splits):  # any two may share a class
    if {*map(str.casefold, classes)} & {*map(str.casefold, each)}:
      classes |= {x for x in each if is_shown(f'{x}/')}
  for name in classes - found:
    paths = [x[name] for x in splits if name in x]
    if not any(is_image(y) for x in paths for y in walk(os.fspath(x))):
      classes.remove(name)
  return classes, seen - classes


def _folders(path):
  """Return the sorted names of the sub-folders without a dot and loops."""
  real = os.path.realpath
  here = epath.Path(real(path))
  found = (x for x in path.iterdir() if x.name[0] != '.' and x.is_dir())
  return sorted(x.name for x in found if not here.is_relative_to(real(x)))


def _images(base, nested=True):
  """Return the sorted paths of the images, relative to the folder."""
  files = walk(os.fspath(base))
  inside = (x for x in files if '/' in x or not nested)
  found = sorted(filter(is_image, inside))
  others = sorted({*files}.difference(found))
  where = ' in class sub-folders' if nested else ''
  if not found:
    raise UserError(
      f'{base} has no images{where}, and {len(others)} other files. Expected '
      f'{base}/{"CLASS/" if nested else ""}IMAGE with an ending of '
      f'{", ".join(image_files.ENDINGS)}.'
    )
  if others:
    tables.say_once(
      f'{base}: ignored files that are not images{where} {some(others)}'
    )
  return found


def _from_csv(path, split, names):
  """Return (paths relative to the folder of the CSV, labels, class names)."""
  table = tables.read(path)
  # All splits have the same classes.
  labels, names = tables.encode(f'{path}', table['label'], names)
  keep = np.full(len(labels), True)
  if split is not None:
    keep = np.array([x == split for x in table.get('split', [])])
    if not keep.any():
      raise UserError(
        f'{path} has no split {split!r}. Its column "split" has'
        f' {sorted({*table.get("split", [])})}.'
      )
  return np.array(table['path'])[keep].tolist(), labels[keep], names

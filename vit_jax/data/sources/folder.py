"""A folder of images, local or at a URL that epath opens (gs://, s3://)."""

import collections
import os
import pathlib
import posixpath
import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from etils import epath

from vit_jax.data import images
from vit_jax.data.sources import image_files, tables
from vit_jax.data.sources.columns import Column, binary
from vit_jax.data.sources.image_files import is_image, is_shown, walk
from vit_jax.data.sources.listed import Table
from vit_jax.data.sources.tables import some
from vit_jax.data.targets import Classes, Targets
from vit_jax.types import MACHINE, Decode, PathLike, UserError

# Names of splits, in lower case: 'train2017', 'seg_test', 'valset'.
_SPLIT = re.compile(
  r'(.*[\W\d_])?(train|training|val|valid|validation|dev|tests?|testing|eval|'
  r'pred)([\W\d_]|sets?|images?|imgs?|data|simple)*'
)
_CSV = '--config.data.source.csv'


class Folder(tables.Labelled):
  """Images in class folders, or listed in a table.

    path/CLASS/**/IMAGE         Folder(path)
    path/SPLIT/CLASS/**/IMAGE   Folder(path, split='train')
    a CSV, TSV or parquet file  Folder(path, csv='labels.csv')
    path/**/IMAGE               Folder(path, classes=False)

  Images end in one of `image_files.ENDINGS`, in lower or upper case. Files that
  begin with '.', and folders that begin with '.' or '@' or are __MACOSX, are
  skipped. Files are sorted by path. Classes have images in a split, and are
  sorted by name (as text: '10' < '2') over all splits that share one of them,
  so that the splits agree, or have the order of `class_names`.

  source[i] is {'image': the bytes of the file, 'label': int or float [K]}, and
  the other columns of the table.

  Args:
    csv: path of the table, relative to `path`, see docs/data.md.
    targets: kind of the labels in a table, see targets.py.
    split: path of a sub-folder, or a value of the column `split_key`.
    image_key: column of the images; default: see `listed.IMAGES`. For rasters
      'red+nir': a column for each channel.
    label_key: column of the label; default: see `listed.LABELS`.
    group_key: column that is not the label.
    class_names: names of classes in order of labels; they may look like splits.
    channels, exif: of `images.Colours`; or decode: another decoder.
    classes: whether folders are classes; if False, all labels are 0.
  """

  def __init__(
    self,
    path: Annotated[PathLike, MACHINE],
    *,
    csv: Annotated[PathLike | None, MACHINE] = None,
    targets: Targets = Classes(),
    split: str | None = None,
    split_key: str = 'split',
    image_key: str | None = None,
    label_key: str | None = None,
    group_key: str | None = None,
    class_names: Sequence[str] | None = None,
    channels: Literal[1, 3] = 3,
    exif: bool = True,
    decode: Decode | None = None,
    classes: bool = True,
  ) -> None:
    self.decode: Any = decode or images.Colours(channels, exif)
    self.targets = targets
    root = epath.Path(path).expanduser()
    # The folder that is searched for images; None: a table lists them.
    self.root = None if csv else os.fspath(root)
    self._base = root if csv else root / (split or '')
    self._columns: dict[str, Column] = {}
    self._missing: list[int] = []  # rows of the table without a file
    self._more: list[Any] = []  # files of other channels, in Arrow arrays
    self.where = f'{self._base}'
    if csv:
      first, *others = (image_key or '').split('+')
      keys = {'image': first or None, 'label': label_key, 'split': split_key}
      listed = Table(
        root / os.path.expanduser(csv),
        os.fspath(root),
        keys | {'group': group_key},
        targets=targets if classes else None,
        split=split,
        names=class_names,
      )
      self.where, self.used = listed.where, listed.used
      files, self._missing = listed.files, listed.missing
      self._more = [listed.channel(x, self.decode) for x in others]
      labels, names = listed.labels, listed.names
      self._columns = {k: x.numbers for k, x in listed.columns.items()}
      self._rows = listed.rows
    elif classes:
      files, labels, names = _from_folders(
        root, split, class_names, self.decode
      )
    else:
      files, names = _images(self._base, self.decode, nested=False), None
      labels = np.zeros(len(files), np.int32)
    if not csv:
      files = binary(files)
    self._files = files  # 1.3M paths take 50 MB, a list 130 MB
    super().__init__(labels, names)

  def __getitem__(self, index: int) -> dict[str, Any]:
    return {
      **{k: x[self._rows[index]] for k, x in self._columns.items()},
      'image': image_files.read(self._paths(index)),
      'label': self._label(index),
    }

  def check_files(self, remedy: str) -> None:
    """Raise UnreadableError with visibly broken files, if they are local."""
    if '://' not in os.fspath(self._base):
      is_large = len(self) > self.decode.most_checked
      checked = self._missing if is_large else range(len(self))
      paths = tuple(map(self._paths, checked))
      image_files.check(paths, remedy, self.decode)

  def column(self, name: str) -> Sequence[Any]:
    """Return the cells of a column of the table, numbers if all are."""
    tables.check(f'{self._base}', self._columns, 'group_key', name)
    return [*self._columns[name][self._rows]]

  def held(self, keep: Sequence[str] = ()) -> dict[str, list[Any]]:
    """Return the labels, files and columns of all examples."""
    kept = [self._columns[x][self._rows] for x in keep if x in self._columns]
    kept += map(Column, self._more)
    return super().held() | {'files': [Column(self._files)], 'kept': kept}

  def _paths(self, index):
    """Return the paths of the files of an image, several for some rasters."""
    names = [os.fsdecode(x[int(index)].as_py()) for x in self._more]
    more = (str(self._base / x) for x in names)
    return (*self.decode.paths(self.describe(index)), *more)

  def file_name(self, index: int) -> str:
    """Return the path of the file, relative to the folder."""
    return os.fsdecode(self._files[int(index)].as_py())

  def describe(self, index: int) -> str:
    """Return the path of the file."""
    return str(self._base / self.file_name(index))


def _from_folders(root, split, names, decode):
  """Return (paths relative to the root or split, labels, class names)."""
  next(iter(root.iterdir()), None)  # raises an error if the folder is missing
  base, split = root / (split or ''), split or ''
  files = _images(base, decode)
  found = list(map(class_of, files))
  if names is None:
    check_classes(f'{base}', files, split)
    names, others = _in_splits(root, split, {*found}, decode)
    if others:
      what = f'Folders without images of these classes {some(others)}'
      tables.say_once(f'{root}: the classes are {some(names)}. {what}')
  names = list(map(tables.clean, names))
  return files, tables.indices(f'{base}', found, names), names


def class_of(file: str) -> str:
  """Return the class of a relative path: the name of its first folder."""
  return tables.clean(file.partition('/')[0])


def check_classes(where: str, files: Iterable[str], split: str = '') -> None:
  """Refuse folders of images that look like splits or contain the classes."""
  parents = {x.rpartition('/')[0] for x in files}
  pairs = {tuple(x.split('/')[:2]) for x in parents}
  folders, deep = sorted({x[0] for x in pairs}), {x for x, *y in pairs if y}
  splits = [x for x in folders if x in deep and _SPLIT.fullmatch(x.lower())]
  splits.sort(key=lambda x: 'train' not in x.lower())
  if splits:
    paths = [posixpath.join(split, x) for x in splits]
    raise UserError(
      f'{where} has the folders {some(folders)}. Expected classes, but '
      f'{", ".join(splits)} look like splits. Choose one, e.g. split='
      f'{paths[0]!r} (--config.data.source.split={shlex.quote(paths[0])} '
      f'--config.evals.test.data.source.split={shlex.quote(paths[-1])}), or '
      'open its own path. If they are classes, list them in class_names.'
    )
  common = posixpath.commonpath(parents)
  inside = sorted({x[len(common) + 1 :].split('/')[0] for x in parents} - {''})
  if common and len(inside) > 1:
    raise UserError(
      f'{where} has one class, {common}, with the folders {some(inside)}. Use '
      f'{where}/{common} if these are the classes; else, set class_names.'
    )
  counts = collections.Counter(x[1] for x in pairs if x[1:])
  if max(counts.values(), default=0) > max(1, len(folders) / 2):
    what = f'not their sub-folders {some(sorted(counts))}'
    tables.say_once(f'{where}: the classes are {some(folders)}; {what}')


def _in_splits(root, split, found, decode):
  """Return the classes of all splits that share one, and other folders."""
  tops, folded = [root], {*map(str.casefold, found)}
  for _ in pathlib.PurePath(split).parts:
    tops = [x / y for x in tops for y in _folders(x) if is_shown(f'{y}/')]
  splits = [{tables.clean(y): f'{x / y}' for y in _folders(x)} for x in tops]
  shared = [x for x in splits if folded & {*map(str.casefold, x)}]
  names = {*found}
  for name, path in (pair for x in shared for pair in x.items()):
    if name not in names and is_shown(f'{name}/'):
      names |= {name} if any(is_image(x, decode) for x in walk(path)) else set()
  return sorted(names), sorted(set().union(*splits) - names)


def _folders(path):
  """Return the sorted names of the sub-folders, except links upwards."""
  real = os.path.realpath
  here = epath.Path(real(path))
  found = (x for x in path.iterdir() if x.name[0] != '.' and x.is_dir())
  return sorted(x.name for x in found if not here.is_relative_to(real(x)))


def _images(base, decode, nested=True):
  """Return the sorted paths of the images, relative to the folder."""
  files = {*walk(os.fspath(base))}
  found = [x for x in files if is_image(x, decode)]
  found = sorted(x for x in found if '/' in x or not nested)
  others = files.difference(y for x in found for y in decode.paths(x))
  check_images(f'{base}', found, others, nested, decode.endings)
  return found


def check_images(
  where: str,
  found: Collection[str],
  others: Iterable[str],
  nested: bool = True,
  endings: Collection[str] = image_files.ENDINGS,
) -> None:
  """Refuse no images, and those of a run; name the files that are ignored."""
  others, below = sorted(others), ' in class sub-folders' if nested else ''
  lists = [x for x in others if re.fullmatch(r'[^/]+\.(csv|tsv|parquet)', x)]
  table = f'. For a table, set {_CSV}={lists[0]}' if lists else ''
  if not found:
    raise UserError(
      f'{where} has no images{below}, and {len(others)} other files. Expected '
      f'{where}/{"CLASS/" if nested else ""}IMAGE with an ending of '
      f'{", ".join(endings)}{table}.'
    )
  if runs := [x for x in others if x.endswith('/resume.json')]:
    raise UserError(
      f'{where} contains the workdir of a run, {posixpath.dirname(runs[0])}. '
      'Move it to another place: its images are not examples.'
    )
  if others:
    text = f'ignored files that are not images{below} {some(others)}{table}'
    tables.say_once(f'{where}: {text}')

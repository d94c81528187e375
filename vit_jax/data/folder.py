"""A folder of images, local or at a URL that epath opens (gs://, s3://)."""

import functools
import os
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from etils import epath

from vit_jax.data import image_files, tables
from vit_jax.io import terminal
from vit_jax.types import MACHINE, PathLike, UserError

# Names of folders that are splits, not classes, in lower case.
_SPLITS = {'train', 'training', 'val', 'valid', 'validation', 'dev'}
_SPLITS |= {'test', 'testing', 'eval'}
_MOST_CHECKED = 50_000  # files, in a few seconds
_say_once = functools.cache(terminal.say)  # evaluators read the same folder


class Folder:
  """Images in class folders, or listed in a CSV file.

    path/CLASS/**/IMAGE            Folder(path)
    path/SPLIT/CLASS/**/IMAGE      Folder(path, split='train')
    a CSV of path, label[, split]  Folder(path, csv='labels.csv')
    path/**/IMAGE                  Folder(path, classes=False)

  Images end in jpg, jpeg, png, webp or bmp, in lower or upper case. Files are
  sorted by path. Classes are sorted by name (as text: '10' < '2') over all
  splits, so that the splits agree, or have the order of `class_names`.

  source[i] is {'image': the bytes of the file, 'label': int}.

  Args:
    split: name of a sub-folder, or a value of the column 'split'.
    csv: path of the CSV, relative to `path`. The paths in it are relative to
      the CSV. With a header, the columns can have any order. Labels are names,
      or ints that index `class_names`.
    class_names: names of the classes in the order of their labels.
    channels, exif: how images are decoded, see pipeline.py.
    classes: whether folders are classes; if False, all labels are 0.
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
  folders = _folders(root)
  classes = folders
  if split is not None:
    classes = sorted({x for one in folders for x in _folders(root / one)})
  elif folders and {x.lower() for x in folders} <= _SPLITS:
    raise UserError(
      f'{root} contains the folders {folders}, which look like splits. Choose'
      f' one, e.g. split={folders[0]!r}.'
    )
  base = root / (split or '')
  files = _images(base)
  found = [file.split('/', 1)[0] for file in files]
  names = classes if names is None else list(names)
  return files, tables.indices(f'{base}', found, names), names


def _folders(path):
  """Return the sorted names of the visible sub-folders, without loops."""
  real = os.path.realpath
  here = epath.Path(real(path))
  found = (x for x in path.iterdir() if x.is_dir() and x.name[0] != '.')
  return sorted(x.name for x in found if not here.is_relative_to(real(x)))


def _images(base, nested=True):
  """Return the sorted paths of the images, relative to the folder."""
  files = image_files.walk(os.fspath(base))
  inside = (x for x in files if '/' in x or not nested)
  found = sorted(filter(image_files.is_image, inside))
  others = sorted({*files}.difference(found))
  where = ' in class sub-folders' if nested else ''
  if not found:
    raise UserError(
      f'{base} has no images{where}, and {len(others)} other files. Expected '
      f'{base}/{"CLASS/" if nested else ""}IMAGE with an ending of '
      f'{", ".join(image_files.ENDINGS)}.'
    )
  if others:
    _say_once(
      f'{base}: ignored files that are not images{where} ({len(others)}): '
      f'{", ".join(others[:5])}{", ..." * (len(others) > 5)}'
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

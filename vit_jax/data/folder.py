"""A folder of images, local or on any file system that fsspec reaches."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import logging

from vit_jax.data import fingerprints, image_files, splits, tables
from vit_jax.runs.files import PathLike


class Folder:
  """Images in class folders, or listed in a CSV file.

    path/CLASS/**/IMAGE            Folder(path)
    path/SPLIT/CLASS/**/IMAGE      Folder(path, split='train')
    a CSV of path, label[, split]  Folder(path, csv='labels.csv')

  Images end in jpg, jpeg, png, webp or bmp, in lower or upper case. Hidden
  files are left out. Other files are counted in `.ignored` and logged.

  Files are sorted by path. Classes are sorted by name (as text: '10' < '2')
  over all splits, so that the splits agree, or have the order of `class_names`.

  source[i] is {'image': the bytes of the file, 'label': int}.

  Args:
    path: local, or a URL (see `image_files`). Object stores list some thousand
      files per request, so use a CSV for more than a million. http cannot list
      files and needs a CSV.
    split: a split, a slice of one ('train[:90%]'), or, without splits, a slice
      of all files ('[90%:]'). Slices are taken from the files in a fixed
      shuffled order: each contains all classes, and adjacent slices do not
      overlap.
    stratified: whether each slice has nearly the same fraction of every class,
      also of small ones. A class with one image is in the larger slice.
    csv: path of the CSV, relative to `path`. The paths in it are relative to
      the CSV. The header is optional; with one, the columns 'path', 'label' and
      'split' can have any order. Labels are names, or ints that index
      `class_names`; ints without `class_names` leave `num_classes` None.
    class_names: names of the classes in the order of their labels.
    channels: 1 or 3, to which the images are decoded.
    exif: apply the EXIF orientation; see `images.decode`.

  Raises:
    ValueError: nothing at `path`, an unknown split, no images, an invalid CSV.
  """

  def __init__(
    self,
    path: PathLike,
    *,
    split: str | None = None,
    stratified: bool = False,
    csv: PathLike | None = None,
    class_names: Sequence[str] | None = None,
    channels: int = 3,
    exif: bool = True,
  ) -> None:
    if path is None:
      raise ValueError(
        'Folder: path=None. Set it to the folder of images, in a config with'
        ' --config.data.source.path or --config.evals.NAME.data.source.path.'
      )
    self.channels: int = channels
    self.exif: bool = exif
    self.ignored = 0
    self._name = str(path)
    if csv is None and self._name.startswith(('http:', 'https:')):
      raise ValueError(
        f'{self._name}: folders cannot be listed over http. List the files in a'
        " CSV of path,label and pass csv='labels.csv'."
      )
    self._fs, root = image_files.file_system(self._name)
    self._root = os.path.abspath(root) if self._fs is None else root.rstrip('/')
    names = None if class_names is None else [str(x) for x in class_names]
    if csv is not None:
      files, labels, names, bounds = self._from_csv(str(csv), split, names)
    else:
      files, labels, names, bounds = self._from_folders(split, names)
    if bounds is not None:
      keep = splits.choose(files, bounds, labels if stratified else None)
      if not keep:
        raise ValueError(f'{self._name}: split {split!r} contains no images.')
      files, labels = [files[i] for i in keep], [labels[i] for i in keep]
    # Bytes of equal length: 1.3M paths take 50 MB, a list 130 MB.
    self._files = np.array([os.fsencode(file) for file in files])
    self._labels = np.asarray(labels, np.int32)
    self.class_names: list[str] | None = names
    self.num_classes: int | None = None if names is None else len(names)

  def __len__(self) -> int:
    return len(self._labels)

  def __getitem__(self, index: int) -> dict[str, Any]:
    index = int(index)
    data = image_files.read(self._fs, self._path(index))
    return {'image': data, 'label': int(self._labels[index])}

  def labels(self) -> np.ndarray:
    """Return the labels of all examples: int32 [n]."""
    return self._labels.copy()

  def file_name(self, index: int) -> str:
    """Return the path of the file, relative to the folder or the CSV."""
    return os.fsdecode(self._files[int(index)])

  def describe(self, index: int) -> str:
    """Return the path of the file."""
    path = self._path(int(index))
    return path if self._fs is None else self._fs.unstrip_protocol(path)

  def fingerprint(self) -> dict[str, Any]:
    """Return class sizes and hashes of names, labels and sizes of the files.

    Sizes of remote files are not counted: each would cost a request.
    """
    parts = (self._files.tobytes(), self._labels.astype('<i4').tobytes())
    found = {
      'kind': 'vit_jax.data.folder.Folder',
      'num_examples': len(self),
      'classes': tables.class_sizes(self._labels, self.class_names),
      'files': fingerprints.digest(parts),
    }
    if self._fs is None:
      sizes = fingerprints.sizes([self._path(i) for i in range(len(self))])
      found['sizes'] = fingerprints.digest([np.array(sizes, '<i8').tobytes()])
    return found

  def _path(self, index):
    return os.path.join(self._base, os.fsdecode(self._files[index]))

  def _from_folders(self, split, names):
    """Return (relative paths, labels, class names, bounds of the slice)."""
    folders = self._folders('')
    split, bounds = splits.parse(split, folders)
    if split is None:
      if folders and {x.lower() for x in folders} <= splits.NAMES:
        raise ValueError(
          f'{self._name} contains the folders {folders}, which look like'
          f' splits. Choose one, e.g. split={folders[0]!r}.'
        )
      classes = folders
    elif split in folders:
      classes = sorted({x for one in folders for x in self._folders(one)})
    else:
      raise ValueError(
        f'{self._name} has no folder for the split {split!r}. Its folders are'
        f' {tables.shorten(folders)}.'
      )
    self._base = os.path.join(self._root, split) if split else self._root
    files = self._images()
    found = [file.split('/', 1)[0] for file in files]
    if split is None and names is None and (empty := {*classes} - {*found}):
      logging.warning(
        f'Folder {self._base}: the class folders'
        f' {tables.shorten(sorted(empty))} have no images. They count as'
        ' classes. Remove them if they are none.'
      )
    names = classes if names is None else names
    labels = tables.index(f'{self._base} has folders', found, names)
    return files, labels, names, bounds

  def _folders(self, relative):
    """Return the sorted names of the visible sub-folders."""
    path = os.path.join(self._root, relative)
    try:
      if self._fs is None:
        names = [x.name for x in os.scandir(path) if x.is_dir()]
      else:
        listed = self._fs.ls(path, detail=True)
        paths = [x['name'] for x in listed if x['type'] == 'directory']
        names = [os.path.basename(x.rstrip('/')) for x in paths]
    except Exception as error:  # each file system raises its own types
      raise _not_listed(path, error) from error
    return sorted(x for x in names if not x.startswith('.'))

  def _images(self):
    """Return the sorted paths of the images below sub-folders of the base."""
    found, others = [], []
    try:
      for path in image_files.walk(self._fs, self._base):
        is_image = image_files.is_image(path) and '/' in path
        (found if is_image else others).append(path)
    except Exception as error:  # each file system raises its own types
      raise _not_listed(self._base, error) from error
    self.ignored = len(others)
    if not found:
      raise ValueError(
        f'{self._base} has no images in class sub-folders, but {len(others)}'
        f' other files: {tables.shorten(sorted(others))}. Expected'
        f' {self._base}/CLASS/IMAGE with an ending of'
        f' {", ".join(image_files.ENDINGS)}.'
      )
    if others:
      logging.warning(
        f'Folder {self._base}: {len(found)} images. Ignored {len(others)} files'
        f' that are not images or not in a class folder, such as {min(others)}'
      )
    return sorted(found)

  def _from_csv(self, csv, split, names):
    """Return (relative paths, labels, class names, bounds of the slice)."""
    path = os.path.join(self._root, csv)
    self._base = os.path.dirname(path)
    try:
      text = image_files.read(self._fs, path).decode('utf-8-sig')
    except Exception as error:  # each file system raises its own types
      raise ValueError(
        f'cannot read the table {path}: {type(error).__name__}: {error}'
      ) from error
    table = tables.read(path, text)
    known = sorted(set(table.get('split', ())))
    split, bounds = splits.parse(split, known)
    labels, names = tables.labels(path, table['label'], names)
    files = table['path']
    if split is not None:
      if split not in known:
        has = known or 'no column "split"'
        raise ValueError(
          f'{path} has no split {split!r}. It has {has}. Add a column "split"'
          ' with a header, or use one table for each split.'
        )
      keep = [i for i, found in enumerate(table['split']) if found == split]
      files, labels = [files[i] for i in keep], [labels[i] for i in keep]
    return files, labels, names, bounds


def _not_listed(path, error):
  return ValueError(
    f'cannot list the folder {path}: {type(error).__name__}: {error}. Check the'
    ' path and your permission to read it.'
  )

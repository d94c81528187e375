"""A folder of images, local or on any file system that fsspec reaches."""

import os
import re

import fsspec
import numpy as np
from absl import logging

from vit_jax.data import table

_SPLIT_NAMES = {'train', 'training', 'val', 'valid', 'validation', 'dev'}
_SPLIT_NAMES |= {'test', 'testing', 'eval'}


class Folder:
  """Images in class sub-folders, or named by a CSV; index-addressable.

  Layouts (endings jpg, jpeg, png, webp, bmp, in any case; hidden files are
  passed over; other files are counted in `.ignored` and reported):

    path/CLASS/**/IMAGE              Folder(path)
    path/SPLIT/CLASS/**/IMAGE        Folder(path, split='train')
    a table of path, label [, split] Folder(path, csv='labels.csv')

  Files are sorted by path. Classes are sorted by name (as text: '10' < '2')
  over all splits, so that train and val agree; `class_names` fixes their order
  instead. The CSV lies at `path`/`csv` and its paths are relative to itself. A
  header is optional; with one, the columns 'path', 'label' and 'split' may
  stand in any order. Labels are names, or ints: these index `class_names`, and
  without `class_names` leave `num_classes` None.

  `path` is local or an URL of an fsspec file system: 'gs://' with gcsfs
  installed, 's3://' with s3fs, 'memory://', and so on. An object store lists
  some thousand files a request, so name more than a million by a CSV; http
  cannot list at all and needs one.

  `split` takes a slice too: 'train[:90%]', or '[90%:]' where there are no
  splits. It is a slice of the files in a fixed shuffled order, so that each
  part has all classes; two slices at the same place never overlap.

  source[i] is {'image': the encoded bytes, 'label': int}.

  Raises:
    ValueError: nothing at `path`, an unknown split, no image, a bad table.
  """

  def __init__(
    self, path, *, split=None, csv=None, class_names=None, channels=3
  ):
    if path is None:
      raise ValueError(
        'Folder: the path is not set. Give the folder of images, in a config '
        'by --config.data.source.path=PATH (of an evaluator: '
        '--config.evals.NAME.data.source.path).'
      )
    self.channels = channels
    self.ignored = 0
    self._name = str(path)
    if csv is None and self._name.startswith(('http:', 'https:')):
      raise ValueError(
        f'{self._name}: folders cannot be listed over http. Name the files in'
        " a table of path,label and give Folder(..., csv='labels.csv')."
      )
    self._fs, self._root = _file_system(self._name)
    names = None if class_names is None else [str(x) for x in class_names]
    if csv is not None:
      files, labels, names = self._from_csv(str(csv), split, names)
    else:
      files, labels, names = self._from_folders(split, names)
    if self._bounds is not None:
      keep = table.select(files, self._bounds)
      files, labels = [files[i] for i in keep], [labels[i] for i in keep]
      if not keep:
        raise ValueError(f'{self._name}: split {split!r} selects no images.')
    self._files = _Strings(files)
    self._labels = np.asarray(labels, np.int32)
    self.class_names = names
    self.num_classes = None if names is None else len(names)

  def __len__(self):
    return len(self._labels)

  def __getitem__(self, index):
    index = int(index)
    path = self._path(index)
    if self._fs is None:
      with open(path, 'rb') as file:
        data = file.read()
    else:
      data = self._fs.cat_file(path)
    return {'image': data, 'label': int(self._labels[index])}

  def describe(self, index):
    """The path of the file."""
    path = self._path(int(index))
    return path if self._fs is None else self._fs.unstrip_protocol(path)

  def _path(self, index):
    return _join(self._base, self._files[index])

  def _from_folders(self, split, names):
    """(relative paths, labels, class names) from the layout of folders."""
    splits = self._directories('')
    split, self._bounds = table.parse_split(split, splits)
    if split is None:
      if splits and {x.lower() for x in splits} <= _SPLIT_NAMES:
        raise ValueError(
          f'{self._name} holds the folders {splits}, which look like splits;'
          f' choose one, as in split={splits[0]!r}.'
        )
      found = splits
      self._base = self._root
    else:
      if split not in splits:
        raise ValueError(
          f'{self._name} has no folder for the split {split!r}; its'
          f' folders are {table.shorten(splits)}.'
        )
      found = {x for one in splits for x in self._directories(one)}
      self._base = _join(self._root, split)
    files = self._list(self._base)
    names = sorted(found) if names is None else names
    label_of = {name: label for label, name in enumerate(names)}
    classes = [file.split('/', 1)[0] for file in files]
    unknown = sorted(set(classes) - set(label_of))
    if unknown:
      raise ValueError(
        f'{self._base} has folders that class_names does not list:'
        f' {table.shorten(unknown)}; class_names is {table.shorten(names)}.'
      )
    return files, [label_of[x] for x in classes], names

  def _directories(self, relative):
    """Sorted names of the sub-folders, hidden ones left out."""
    path = _join(self._root, relative)
    try:
      if self._fs is None:
        with os.scandir(path) as entries:
          names = [x.name for x in entries if x.is_dir()]
      else:
        listed = self._fs.ls(path, detail=True)
        paths = [x['name'] for x in listed if x['type'] == 'directory']
        names = [x.rstrip('/').rsplit('/', 1)[-1] for x in paths]
    except Exception as error:  # each file system raises its own types
      raise ValueError(
        f'cannot list the folder {path}: {type(error).__name__}: {error}.'
        ' Check the path and your rights to read it.'
      ) from error
    return sorted(x for x in names if not x.startswith('.'))

  def _list(self, base):
    """Sorted paths of the images below the sub-folders of `base`."""
    found = walk(base) if self._fs is None else self._find(base)
    images, others = [], []
    for path in found:
      is_image = path.lower().endswith(table.ENDINGS) and '/' in path
      (images if is_image else others).append(path)
    self.ignored = len(others)
    if not images:
      raise ValueError(
        f'{base} has no images in class sub-folders: {len(others)} other files'
        f' there, {table.shorten(sorted(others))}. Expected {base}/CLASS/IMAGE'
        f' with an ending of {", ".join(table.ENDINGS)}.'
      )
    if others:
      logging.warning(
        'Folder %s: %d images; ignored %d files that are no images or lie in'
        ' no class folder, such as %s',
        base,
        len(images),
        len(others),
        min(others),
      )
    return sorted(images)

  def _find(self, base):
    prefix = len(base.rstrip('/')) + 1
    relative = (path[prefix:] for path in self._fs.find(base))
    return [x for x in relative if not re.search(r'(^|/)\.', x)]

  def _from_csv(self, csv, split, names):
    """(paths relative to the CSV's folder, labels, class names)."""
    path = _join(self._root, csv)
    self._base = path.rsplit('/', 1)[0] if '/' in path else '.'
    try:
      if self._fs is None:
        with open(path, 'rb') as file:
          text = file.read().decode('utf-8-sig')
      else:
        text = self._fs.cat_file(path).decode('utf-8-sig')
    except Exception as error:  # each file system raises its own types
      raise ValueError(
        f'cannot read the table {path}: {type(error).__name__}: {error}'
      ) from error
    rows, columns = table.read_rows(path, text)
    splits = []
    if 'split' in columns:
      at = columns.index('split')
      splits = sorted({row[at] for row in rows})
    split, self._bounds = table.parse_split(split, splits)
    if split is not None:
      if 'split' not in columns:
        raise ValueError(
          f'{path} has no column "split", so split={split!r} cannot be chosen;'
          ' add the column with a header, or use one table for each split.'
        )
      if split not in splits:
        raise ValueError(f'{path} has no split {split!r}; there are {splits}.')
    labels, names = table.read_labels(
      path, [r[columns.index('label')] for r in rows], names
    )
    keep = [
      i for i, row in enumerate(rows) if split is None or row[at] == split
    ]
    at_path = columns.index('path')
    return [rows[i][at_path] for i in keep], [labels[i] for i in keep], names


def _file_system(path):
  """(fsspec file system, root); None as the file system if it is local."""
  if '://' not in path:
    return None, os.path.abspath(os.path.expanduser(path))
  try:
    fs, root = fsspec.core.url_to_fs(path)
  except (ImportError, ValueError) as error:
    raise ValueError(f'cannot open {path}: {error}') from error
  if 'file' in (fs.protocol if isinstance(fs.protocol, tuple) else ()):
    return None, root
  return fs, root.rstrip('/')


def walk(base):
  """Paths of all visible files below a local folder, relative to it."""
  folders = ['']
  while folders:
    folder = folders.pop()
    with os.scandir(os.path.join(base, folder)) as entries:
      for entry in entries:
        if entry.name.startswith('.'):
          continue
        path = f'{folder}/{entry.name}' if folder else entry.name
        if entry.is_dir():
          folders.append(path)
        else:
          yield path


def _join(base, relative):
  if os.path.isabs(relative):
    return relative
  return f'{base}/{relative}' if relative else base


class _Strings:
  """A list of strings in two arrays: 1.3M paths take 50 MB, not 130."""

  def __init__(self, strings):
    encoded = [os.fsencode(x) for x in strings]
    self._ends = np.cumsum([len(x) for x in encoded], dtype=np.int64)
    self._bytes = b''.join(encoded)

  def __getitem__(self, index):
    if not 0 <= index < len(self._ends):
      raise IndexError(f'index {index} of {len(self._ends)} files')
    start = self._ends[index - 1] if index else 0
    return os.fsdecode(self._bytes[start : self._ends[index]])

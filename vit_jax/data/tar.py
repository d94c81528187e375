"""Images in tar files, read at random without unpacking them."""

import itertools
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import fsspec
import numpy as np
from absl import logging

from vit_jax.config.domains import OneOf, checked
from vit_jax.data import (
  fingerprints,
  image_files,
  shards,
  splits,
  tables,
  tar_files,
)
from vit_jax.runs.files import PathLike


@checked
class Tar:
  """Images in tar files, one class for each folder or for each inner tar file.

    CLASS/**/IMAGE   folders; those that all images share are left out, such as
                     data/ of data/CLASS/IMAGE
    CLASS.tar        tar files with images in a tar file, as ImageNet has them
    IMAGE            several tar files, each is a class; or one tar file, and
                     the labels are in a table, `csv`

  The headers are read once and kept in a cache. Images are read at their places
  in the file. Files can be URLs (see `image_files`). Compressed tar files have
  no random access: unpack them, or read them with `stream`.

  Which members are images and how classes and examples are ordered is as in
  `Folder`: source[i] is that of a Folder of the unpacked files. Of members with
  the same path the last counts, and links to members are followed.

  source[i] is {'image': the bytes of the file, 'label': int}. `.ignored` is the
  number of members that are not images, or in no class.

  Args:
    files: names, globs, braces, or folders of tar files, see shards.py.
    split: a folder above the classes, a split of the table, a slice of one of
      them ('train[:90%]'), or a slice of all ('[90%:]'), as of `Folder`.
    stratified: whether each slice has nearly the same fraction of every class.
    csv: a table path,label[,split] as of `Folder`, whose path is relative to
      the folder of the tar file, or a dict {path: label}. A path in it is that
      of a member, or its last part if only one member has it. Members that are
      not in the table are ignored.
    class_names: names of the classes in the order of their labels, or a file
      with one name per line, or a JSON list.
    channels: 1 or 3, to which the images are decoded.
    exif: apply the EXIF orientation; see `images.decode`.
    cache_dir: folder of the indices of members; default: vit_jax/index in the
      user's cache folder. An empty string disables the cache.

  Raises:
    ValueError: no such file; a file that is not a tar file, or compressed,
      truncated or damaged (says at which byte); no images; no classes; an
      unknown split; an invalid table.
  """

  def __init__(
    self,
    files: PathLike | Sequence[PathLike],
    *,
    split: str | None = None,
    stratified: bool = False,
    csv: PathLike | Mapping[str, Any] | None = None,
    class_names: PathLike | Sequence[str] | None = None,
    channels: Annotated[int, OneOf(1, 3)] = 3,
    exif: bool = True,
    cache_dir: PathLike | None = None,
  ) -> None:
    self.channels: int = channels
    self.exif: bool = exif
    self._split, self._csv = split, csv
    names = shards.expand(files, endings=tar_files.ENDINGS)
    self._shards = shards.Shards(names)
    found = shards.index(
      self._shards, self._scan, kind='tar', cache_dir=cache_dir
    )
    paths = [[*shards.Texts(x['paths'], x['ends'])] for x in found]
    if len(found) > 1 and not any('/' in x for each in paths for x in each):
      stems = [os.path.basename(x).removesuffix('.tar') for x in names]
      paths = [
        [f'{stem}/{x}' for x in each] for stem, each in zip(stems, paths)
      ]
    self._name = names[0] if len(names) == 1 else f'{names[0]}, ...'
    members = [x for each in paths for x in each]
    self.ignored: int = sum(int(x['others']) for x in found)
    if not members:
      raise ValueError(
        f'{self._name} has no images, but {self.ignored} other members.'
        f' Images end in {", ".join(image_files.ENDINGS)}.'
      )
    known = tables.class_names(class_names)
    if self._csv is not None:
      kept, keys, labels, known, bounds = self._from_table(members, known)
    else:
      kept, keys, labels, known, bounds = self._from_folders(members, known)
    if bounds is not None:
      chosen = splits.choose(keys, bounds, labels if stratified else None)
      if not chosen:
        raise ValueError(
          f'{self._name}: split {self._split!r} contains no images.'
        )
      kept, labels = [kept[i] for i in chosen], [labels[i] for i in chosen]
    counts = [len(each) for each in paths]
    self._shard = np.repeat(np.arange(len(names), dtype=np.int32), counts)[kept]
    self._offset, self._size, self._modified = (
      np.concatenate([x[key] for x in found])[kept]
      for key in ('offsets', 'sizes', 'modified')
    )
    self._paths = shards.Texts.of(members[i] for i in kept)
    self._labels = np.asarray(labels, np.int32)
    self.class_names: list[str] | None = known
    self.num_classes: int | None = None if known is None else len(known)
    if self.ignored:
      logging.warning(
        f'Tar {self._name}: {len(kept)} images. Ignored {self.ignored} members'
        ' that are not images, in no class or not in the table.'
      )

  def __len__(self) -> int:
    return len(self._labels)

  def __getitem__(self, index: int) -> dict[str, Any]:
    index = range(len(self))[index]
    place = int(self._shard[index]), int(self._offset[index])
    data = self._shards.read(*place, int(self._size[index]))
    return {'image': data, 'label': int(self._labels[index])}

  def labels(self) -> np.ndarray:
    """Return the labels of all examples: int32 [n]."""
    return self._labels.copy()

  def file_name(self, index: int) -> str:
    """Return the path of the member; inner tar files are folders."""
    return self._paths[index]

  def describe(self, index: int) -> str:
    """Return the path of the tar file, that of the member, and its place."""
    name = self._shards[int(self._shard[index])]
    place = f'{int(self._size[index])} bytes at {int(self._offset[index])}'
    return f'{self.file_name(index)} in {name}, {place}'

  def fingerprint(self) -> dict[str, Any]:
    """Return class sizes and hashes of what the headers of the images say."""
    labels = self._labels.astype('<i4').tobytes()
    headers = np.stack([self._size, self._modified]).astype('<i8')
    return {
      'kind': 'vit_jax.data.tar.Tar',
      'num_examples': len(self),
      'classes': tables.class_sizes(self._labels, self.class_names),
      'files': fingerprints.digest([self._paths.data.tobytes(), labels]),
      'sizes': fingerprints.digest([headers.tobytes()]),
    }

  def _scan(self, shard):
    """Return the index of one tar file."""
    found, others = {}, 0
    members = tar_files.members(
      shards.Ahead(self._shards, shard),
      self._shards.sizes[shard],
      self._shards[shard],
    )
    for member in members:
      if image_files.is_image(member.path):
        found[member.path] = member
      else:
        others += 1
    texts = shards.Texts.of(found)
    numbers = [member[1:] for member in found.values()]
    offsets, sizes, modified = np.array(numbers, np.int64).reshape(-1, 3).T
    return {
      'paths': texts.data,
      'ends': texts.ends,
      'offsets': offsets,
      'sizes': sizes,
      'modified': modified,
      'others': np.array(others),
    }

  def _from_folders(self, paths, names):
    """Return (sorted indices, paths from the class on or None, labels, ...).

    That is, the class names and the bounds of the slice. The paths are those of
    a slice.
    """
    ends = [posixpath.dirname(x) for x in (min(paths), max(paths))]
    base = posixpath.join(posixpath.commonpath(ends), '')
    above, start = base.split('/')[:-1], len(base)
    tops = _folders(paths, start)
    is_flat = not any(tops)
    if is_flat and above and above[-1].lower() not in splits.NAMES:
      start -= len(above[-1]) + 1  # one class
      tops, is_flat = [above.pop()] * len(paths), False
    if is_flat:
      raise ValueError(
        f'{self._name} has {len(paths)} images, but no folders that would be'
        ' their classes. Set csv to a table of path,label. (For the validation'
        " images of ImageNet see 'imagenet:' in docs/data.md.)"
      )
    folders = sorted({*tops} - {''})
    split, bounds = splits.parse(self._split, folders)
    if split is None and {x.lower() for x in folders} <= splits.NAMES:
      raise ValueError(
        f'{self._name} contains the folders {folders}, which look like splits.'
        f' Choose one, e.g. split={folders[0]!r}.'
      )
    found, in_split = tops, split in folders
    if in_split:
      found = _folders(paths, [start + len(x) + 1 for x in tops])
      start += len(split) + 1
    elif split not in (None, *above):
      raise ValueError(
        f'{self._name} has no folder for the split {split!r}. Its folders are'
        f' {tables.shorten(folders)}.'
      )
    kept = [
      i
      for i, (top, name) in enumerate(zip(tops, found))
      if name and (not in_split or top == split)
    ]
    self.ignored += sum(not name for name in found)
    names = sorted({*found} - {''}) if names is None else names
    kept.sort(key=paths.__getitem__)
    classes = [found[i] for i in kept]
    labels = tables.index(f'{self._name} has folders', classes, names)
    keys = None if bounds is None else [paths[i][start:] for i in kept]
    return kept, keys, labels, names, bounds

  def _from_table(self, paths, names):
    """Return (indices, paths, labels, class names, bounds of the slice)."""
    if isinstance(self._csv, Mapping):
      where, (split, bounds) = 'csv', splits.parse(self._split)
      table = {
        'path': [*self._csv],
        'label': [str(label) for label in self._csv.values()],
      }
    else:
      where = os.path.expanduser(os.fspath(self._csv))
      if '://' not in where:
        where = posixpath.join(posixpath.dirname(self._shards[0]), where)
      table = _read_table(where)
      split, bounds = splits.parse(self._split, set(table.get('split', ())))
    labels, names = tables.labels(where, table['label'], names)
    wanted = table['path']
    if split is not None:
      known = sorted(set(table.get('split', ())))
      if split not in known:
        raise ValueError(
          f'{where} has no split {split!r}. It has'
          f' {known or "no column of splits"}.'
        )
      keep = [i for i, found in enumerate(table['split']) if found == split]
      wanted, labels = [wanted[i] for i in keep], [labels[i] for i in keep]
    kept = _find(paths, wanted, where, self._name)
    self.ignored += len(paths) - len({*kept})
    return kept, wanted, labels, names, bounds


def stream(name: PathLike) -> Iterator[tuple[str, bytes]]:
  """Yield (path, content) of all members of a tar file, front to back.

  The file may be compressed, and a URL. Tar files in it act as folders:
  n01440764.tar has the paths n01440764/IMAGE. Raises ValueError as `Tar`.
  """
  name = os.fspath(name)
  image_files.file_system(name)  # names the package that a URL needs
  try:
    opened = fsspec.open(name, 'rb').open()
  except Exception as error:  # each file system raises its own types
    raise ValueError(f'cannot open {name}: {error}') from error
  with opened as file:
    yield from tar_files.stream(file, name)


def _folders(paths, starts):
  """Return the folder that begins at a place of each path; '' for none."""
  starts = itertools.repeat(starts) if isinstance(starts, int) else starts
  same: dict[str, str] = {}  # a million paths share a thousand texts
  found = []
  for path, start in zip(paths, starts):
    end = path.find('/', start)
    name = path[start:end] if end >= 0 else ''
    found.append(same.setdefault(name, name))
  return found


def _read_table(path):
  try:
    text = image_files.read(*image_files.file_system(path)).decode('utf-8-sig')
  except Exception as error:  # each file system raises its own types
    raise ValueError(
      f'cannot read the table {path}: {type(error).__name__}: {error}'
    ) from error
  return tables.read(path, text)


def _find(paths, wanted, table, name):
  """Return the index in `paths` of each path of a table."""
  whole = {path: i for i, path in enumerate(paths)}
  last: dict[str, int | None] = {}
  for i, path in enumerate(paths):
    base = posixpath.basename(path)
    last[base] = None if base in last else i
  found = [whole.get(path, last.get(path)) for path in wanted]
  if missing := [path for path, i in zip(wanted, found) if i is None]:
    raise ValueError(
      f'{table} lists {len(missing)} images that {name} does not have, or has'
      f' in several folders: {tables.shorten(missing, 3)}. Expected paths such'
      f' as {paths[0]!r}.'
    )
  return found

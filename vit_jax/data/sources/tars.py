"""Tar files that are read once, front to back, such as those of ImageNet."""

import itertools
import os
import posixpath
import tarfile
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from vit_jax.data import images
from vit_jax.data.sources import image_files
from vit_jax.data.sources.folder import check_classes, check_images, class_of
from vit_jax.types import Decode, PathLike


class Tar:
  """Images of a tar file, which may be compressed.

    CLASS/**/IMAGE   as in a Folder, in the folder that all images share
    CLASS.tar        tar files with images, as ImageNet has them
    IMAGE            the classes are in `classes`

  Iteration yields (path, {'image': bytes, 'label': int}).

  Args:
    path: local path or URL of the file.
    classes: {file name: name of its class}.
    decode: what decodes the images, see `images.Colours`.
  """

  def __init__(
    self,
    path: PathLike,
    *,
    classes: Mapping[str, str] | None = None,
    decode: Decode = images.Colours(),
  ) -> None:
    self.decode = decode
    self._path, self._classes = epath.Path(path), classes
    if classes is not None:
      names = set(classes.values())
    else:
      with self._path.open('rb') as file, tarfile.open(fileobj=file) as tar:
        paths = {_path(x) for x in tar if not x.isdir()}
      # The headers of inner tar files are not read: each is a folder.
      parents = {posixpath.dirname(x) for x in paths if _is_shown(x, decode)}
      self._root = posixpath.commonpath(parents or {''}) + '/'
      paths = {x.removeprefix(self._root) for x in paths}
      found = {x for x in paths if '/' in x and _is_shown(x, decode)}
      check_images(f'{path}', found, paths - found)
      check_classes(f'{path}', found)
      names = set(map(class_of, found))
    self.class_names = sorted(names)  # ImageNet's WordNet ids: its labels

  def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
    labels = {name: i for i, name in enumerate(self.class_names)}
    with self._path.open('rb') as file, tarfile.open(None, 'r|*', file) as tar:
      for path, data in _images(tar, self.decode):
        if self._classes:
          name = self._classes[posixpath.basename(path)]
        else:
          name = class_of(path.removeprefix(self._root))
        if name in labels:
          yield path, {'image': data, 'label': labels[name]}


def imagenet(folder: PathLike, split: str) -> Tar:
  """Return a split of ImageNet 2012 from the tar files of image-net.org.

  `folder` has ILSVRC2012_img_{train,val}.tar; `split`: 'train' or 'validation'.
  """
  start = f'{os.fspath(folder)}/ILSVRC2012_img_'
  decode = images.Colours(exif=False)  # as TensorFlow
  if split == 'train':
    return Tar(f'{start}train.tar', decode=decode)
  from tensorflow_datasets.core import tfds_path

  wnids = tfds_path('datasets/imagenet2012/validation_labels.txt').read_text()
  files = (f'ILSVRC2012_val_{i:08d}.JPEG' for i in itertools.count(1))
  classes = dict(zip(files, wnids.split()))
  return Tar(f'{start}val.tar', classes=classes, decode=decode)


def _images(tar, decode, folder=''):
  """Yield (path, bytes) of the images in a tar file and its inner tar files."""
  for member in tar:
    path = posixpath.join(folder, _path(member))
    if not _is_shown(path, decode):
      continue
    if path.endswith('/'):
      with tarfile.open(fileobj=tar.extractfile(member), mode='r|') as inner:
        yield from _images(inner, decode, path)
    elif member.isfile():
      yield path, tar.extractfile(member).read()


def _path(member):
  """Return the path of a member; an inner tar file is the folder 'NAME/'."""
  path = posixpath.normpath(member.name).lstrip('/')
  is_tar = member.isfile() and path.endswith('.tar')
  return path.removesuffix('.tar') + '/' if is_tar else path


def _is_shown(path, decode):
  is_known = path.endswith('/') or decode.takes(path)
  return is_known and image_files.is_shown(path)

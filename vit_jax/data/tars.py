"""Tar files that are read once, front to back, such as those of ImageNet."""

import itertools
import os
import posixpath
import tarfile
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from vit_jax.data import image_files
from vit_jax.types import PathLike, UserError


class Tar:
  """Images of a tar file, which may be compressed.

    CLASS/IMAGE   in any folder
    CLASS.tar     tar files with images, as ImageNet has them
    IMAGE         the classes are in `classes`

  Iteration yields (path, {'image': bytes, 'label': int}).

  Args:
    path: local path or URL of the file.
    classes: {file name: name of its class}.
    exif: see pipeline.py.
  """

  def __init__(
    self,
    path: PathLike,
    *,
    classes: Mapping[str, str] | None = None,
    exif: bool = True,
  ) -> None:
    self.exif, self._path, self._classes = exif, epath.Path(path), classes
    if classes is not None:
      names = set(classes.values())
    else:
      with self._path.open('rb') as file, tarfile.open(fileobj=file) as tar:
        # The headers of inner tar files are not read: each is a folder.
        paths = [x.name.removesuffix('.tar') + '/' * _is_tar(x) for x in tar]
      names = {_parent(x) for x in paths if x.endswith('/') or _is_shown(x)}
      if len(names) < 2:
        raise UserError(
          f'{path} has no images in folders. Expected a folder, or an inner tar'
          ' file, for each class.'
        )
    self.class_names = sorted(names)  # ImageNet's WordNet ids: its labels

  def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
    labels = {name: i for i, name in enumerate(self.class_names)}
    classes = self._classes
    with self._path.open('rb') as file, tarfile.open(None, 'r|*', file) as tar:
      for path, data in _images(tar):
        name = classes[posixpath.basename(path)] if classes else _parent(path)
        yield path, {'image': data, 'label': labels[name]}


def imagenet(folder: PathLike, split: str) -> Tar:
  """Return a split of ImageNet 2012 from the tar files of image-net.org.

  `folder` contains ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar; `split`
  is 'train' or 'validation'.
  """
  start, exif = f'{os.fspath(folder)}/ILSVRC2012_img_', False  # as TensorFlow
  if split == 'train':
    return Tar(f'{start}train.tar', exif=exif)
  from tensorflow_datasets.core import tfds_path

  wnids = tfds_path('datasets/imagenet2012/validation_labels.txt').read_text()
  files = (f'ILSVRC2012_val_{i:08d}.JPEG' for i in itertools.count(1))
  classes = dict(zip(files, wnids.split()))
  return Tar(f'{start}val.tar', classes=classes, exif=exif)


def _images(tar, folder=''):
  """Yield (path, bytes) of the images in a tar file and its inner tar files."""
  for member in tar:
    path = posixpath.join(folder, member.name)
    if _is_tar(member):
      with tarfile.open(fileobj=tar.extractfile(member), mode='r|') as inner:
        yield from _images(inner, path.removesuffix('.tar'))
    elif member.isfile() and _is_shown(path):
      yield path, tar.extractfile(member).read()


def _parent(path):
  return posixpath.basename(posixpath.dirname(path))


def _is_tar(member):
  return member.isfile() and member.name.endswith('.tar')


def _is_shown(path):
  hidden = posixpath.basename(path).startswith('.')
  return image_files.is_image(path) and not hidden

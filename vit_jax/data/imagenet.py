"""The classes of ImageNet and its reassessed labels, ReaL."""

import dataclasses
import functools
import json as json_lib
import os
import re
from collections.abc import Sequence
from typing import Any

import fsspec
import numpy as np

from vit_jax.data import fingerprints, pipeline
from vit_jax.data.pipeline import Source
from vit_jax.data.tar import Tar
from vit_jax.runs.files import PathLike

NUM_CLASSES = 1000
NUM_VALIDATION = 50_000

_NUMBER = re.compile(r'ILSVRC2012_val_(\d{8})')


@functools.cache
def wnids() -> tuple[str, ...]:
  """Return the 1000 WordNet ids ('n01440764', ...) in the order of the classes.

  ImageNet's class folders have these names. As `class_names` of a Folder they
  give the right labels even if some folders are absent.
  """
  import tensorflow_datasets as tfds

  info = tfds.builder('imagenet2012').info
  return tuple(info.features['label'].names)


@dataclasses.dataclass(frozen=True)
class RealLabels:
  """Label function for the feature 'real_label' of TFDS's imagenet2012_real.

  It returns float32 [1000] with a 1 for each class of the image. Images without
  a class, which ReaL leaves out of the accuracy, have only zeros.
  """

  num_classes = NUM_CLASSES

  @property
  def class_names(self) -> list[str]:
    return list(wnids())

  def __call__(self, ids: Any) -> np.ndarray:
    ids = np.asarray(ids, np.int64)
    if not np.all((ids >= 0) & (ids < NUM_CLASSES)):
      raise ValueError(
        f'the class ids {ids.tolist()} must lie in [0, {NUM_CLASSES}).'
      )
    label = np.zeros(NUM_CLASSES, np.float32)
    label[ids] = 1
    return label


class Real:
  """A source with ImageNet's validation images and the labels of real.json.

  Entry i of the published file is the list of class ids of the image
  ILSVRC2012_val_{i + 1:08d}. Images are identified by this name, so `source`
  can have some of them, in any order: TFDS's 'imagenet2012' (shuffled), or a
  folder of the original files. For the labels see `RealLabels`.

  Args:
    source: has the images, and their names in source.file_name(i) or
      source.describe(i).
    json: path or URL of real.json.

  Raises:
    ValueError: the file is not a real.json; an image's name has no number.
  """

  num_classes = NUM_CLASSES

  def __init__(self, source: Source, *, json: PathLike) -> None:
    if json is None:
      raise ValueError(
        'Real: json=None. Set it to the path of real.json, in a config with'
        ' --config.evals.NAME.data.source.json=PATH.'
      )
    self._source, self._real = source, _read(str(json))
    self.channels: int = getattr(source, 'channels', 3)
    self.exif: bool = getattr(source, 'exif', True)
    self.class_names: Sequence[str] | None = getattr(
      source, 'class_names', None
    )
    self._label(0)  # raises if the source is not ImageNet's validation split

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> dict[str, Any]:
    return {**self._source[index], 'label': self._label(index)}

  def labels(self) -> np.ndarray:
    """Return the labels of all examples: float32 [n, 1000]."""
    return np.stack([self._label(i) for i in range(len(self))])

  def describe(self, index: int) -> str:
    """Return the description of the wrapped source."""
    return pipeline.describe(self._source, index)

  def fingerprint(self) -> dict[str, Any]:
    """Return that of the wrapped source, with a hash of the labels."""
    labels = fingerprints.digest([json_lib.dumps(self._real)])
    return fingerprints.described(self) | {'labels': labels}

  def _label(self, index):
    file_name = getattr(self._source, 'file_name', lambda index: None)
    name = file_name(index) or self.describe(index)
    number = int((_NUMBER.findall(name) or [0])[-1])
    if not 1 <= number <= NUM_VALIDATION:
      raise ValueError(
        f'example {index} is {name!r}. real.json needs the names'
        f' ILSVRC2012_val_00000001 to ...{NUM_VALIDATION:08d}. Use the'
        ' validation images of ImageNet 2012 under their original names.'
      )
    return RealLabels()(self._real[number - 1])


def _read(path):
  """Read and check the lists of real.json."""
  try:
    with fsspec.open(path, 'rb') as file:
      real = json_lib.load(file)
  except Exception as error:  # each file system raises its own types
    raise ValueError(
      f'cannot read {path}: {type(error).__name__}: {error}. Expected real.json'
      ' of github.com/google-research/reassessed-imagenet.'
    ) from error
  if not isinstance(real, list) or len(real) != NUM_VALIDATION:
    size = f' of {len(real)}' if isinstance(real, list | dict) else ''
    raise ValueError(
      f'{path} is a {type(real).__name__}{size}. Expected a list of'
      f' {NUM_VALIDATION} lists, one for each validation image.'
    )
  classes = range(NUM_CLASSES)
  for i, ids in enumerate(real):
    is_list = isinstance(ids, list)
    if not is_list or any(type(x) is not int or x not in classes for x in ids):
      raise ValueError(
        f'{path}: entry {i} is {ids!r}. Expected a list of class ids from 0 to'
        f' {NUM_CLASSES - 1}.'
      )
  return real


# The files that image-net.org distributes.

SPLITS = ('train', 'validation', 'val')


def downloads() -> str:
  """Return the folder where TFDS expects files that are downloaded by hand."""
  import tensorflow_datasets as tfds

  data = os.path.expanduser(tfds.core.constants.DATA_DIR)
  return os.path.join(data, 'downloads', 'manual')


def validation_labels() -> dict[str, str]:
  """Return the WordNet ids of the 50,000 validation images by file name."""
  import tensorflow_datasets as tfds

  path = 'datasets/imagenet2012/validation_labels.txt'
  found = tfds.core.tfds_path(path).read_text().split()
  return {
    f'ILSVRC2012_val_{i:08d}.JPEG': wnid for i, wnid in enumerate(found, 1)
  }


def archives(
  folder: PathLike,
  *,
  split: str,
  channels: int = 3,
  cache_dir: PathLike | None = None,
) -> Tar:
  """Return ImageNet 2012 from its own tar files, which are not unpacked.

  Args:
    folder: contains ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar; local
      or a URL.
    split: 'train' or 'validation' (or 'val').
    channels, cache_dir: of `Tar`.

  Raises:
    ValueError: another split; and those of `Tar`.
  """
  if split not in SPLITS:
    raise ValueError(
      f'split={split!r} of the tar files of ImageNet must be one of {SPLITS}.'
    )
  is_train = split == 'train'
  name = f'ILSVRC2012_img_{"train" if is_train else "val"}.tar'
  return Tar(
    os.path.join(folder, name),
    csv=None if is_train else validation_labels(),
    class_names=wnids(),
    channels=channels,
    exif=False,  # as TensorFlow decodes them
    cache_dir=cache_dir,
  )

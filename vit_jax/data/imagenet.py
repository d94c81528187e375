"""ImageNet's classes and its reassessed labels, "ReaL"."""

import dataclasses
import functools
import json as json_lib
import re

import fsspec
import numpy as np

NUM_CLASSES = 1000
NUM_VALIDATION = 50_000

_NUMBER = re.compile(r'ILSVRC2012_val_(\d{8})')


@functools.cache
def wnids():
  """The 1000 WordNet ids ('n01440764', ...) by class, in ImageNet's order.

  They are the names of the folders that ImageNet unpacks to; as a Folder's
  `class_names` they fix the labels where some folders are absent.
  """
  import tensorflow_datasets as tfds

  info = tfds.builder('imagenet2012').info
  return tuple(info.features['label'].names)


@dataclasses.dataclass(frozen=True)
class RealLabels:
  """The label_fn of TFDS's imagenet2012_real, for its feature 'real_label'.

  Class ids become 1 in a float32 vector [1000]. Images without any, which
  ReaL leaves out, have zeros only.
  """

  num_classes: int = NUM_CLASSES

  @property
  def class_names(self):
    return list(wnids())

  def __call__(self, ids):
    ids = np.asarray(ids, np.int64)
    label = np.zeros(self.num_classes, np.float32)
    if ids.size and not 0 <= ids.min() <= ids.max() < self.num_classes:
      raise ValueError(
        f'the class ids are {ids.tolist()}; each lies in [0,'
        f' {self.num_classes}).'
      )
    label[ids] = 1
    return label


class Real:
  """A source of ImageNet's validation images with the labels of real.json.

  The published file has a list of class ids for each of the 50,000 images, the
  one at i being of ILSVRC2012_val_{i + 1:08d}. Images are found by that name,
  so the source may have them in any order, or some of them: TFDS's
  'imagenet2012' (shuffled) and folders of the files as they are unpacked.

  source[i] is the original's with the label float32 [1000] of `RealLabels`.

  Args:
    source: has the images; names come from source.file_name(i), else from
      source.describe(i).
    json: path or URL of real.json.

  Raises:
    ValueError: the file cannot be read, is not 50,000 lists, or has ids
      beyond 0 to 999; a name has no number.
  """

  num_classes = NUM_CLASSES

  def __init__(self, source, *, json):
    if json is None:
      raise ValueError(
        'Real: the file is not set; give the path of real.json, in a config by'
        ' --config.evals.NAME.data.source.json=PATH.'
      )
    self._source = source
    self._real = _read(str(json))
    self._label_fn = RealLabels()
    self.channels = getattr(source, 'channels', 3)
    self.class_names = getattr(source, 'class_names', None)
    self._label(0)

  def __len__(self):
    return len(self._source)

  def __getitem__(self, index):
    return {**self._source[index], 'label': self._label(index)}

  def labels(self):
    """Labels of all examples, float32 [n, 1000]; no image is decoded."""
    return np.stack([self._label(i) for i in range(len(self))])

  def describe(self, index):
    """What the source says."""
    return self._source.describe(index)

  def _label(self, index):
    name = None
    if hasattr(self._source, 'file_name'):
      name = self._source.file_name(index)
    if name is None:
      name = self._source.describe(index)
    found = _NUMBER.findall(name)
    number = int(found[-1]) if found else 0
    if not 1 <= number <= NUM_VALIDATION:
      raise ValueError(
        f'example {index} is {name!r}; real.json needs images by their names,'
        f' ILSVRC2012_val_00000001 to ...{NUM_VALIDATION:08d}. Give the'
        ' validation images of ImageNet 2012, under the names they come with.'
      )
    return self._label_fn(self._real[number - 1])


def _read(path):
  """The lists of real.json, checked."""
  try:
    with fsspec.open(path, 'rb') as file:
      real = json_lib.load(file)
  except Exception as error:  # each file system raises its own types
    raise ValueError(
      f'cannot read {path}: {type(error).__name__}: {error}. It is the file'
      ' real.json of github.com/google-research/reassessed-imagenet.'
    ) from error
  if not isinstance(real, list) or len(real) != NUM_VALIDATION:
    what = type(real).__name__
    size = f' of {len(real)}' if isinstance(real, list | dict) else ''
    raise ValueError(
      f'{path} is a {what}{size}; expected a list of {NUM_VALIDATION} lists,'
      ' one for each validation image.'
    )
  for i, ids in enumerate(real):
    good = isinstance(ids, list) and all(
      type(x) is int and 0 <= x < NUM_CLASSES for x in ids
    )
    if not good:
      raise ValueError(
        f'{path}: entry {i} is {ids!r}; expected a list of class ids from 0 to'
        f' {NUM_CLASSES - 1}.'
      )
  return real

"""Sources without files: scikit-learn's scans of digits, and random images."""

import dataclasses
import functools
from typing import Any, Literal

import numpy as np

from vit_jax.data import images
from vit_jax.types import Count, Seed, Size, UserError

# The set lists one writer after the other, each with the same sequence of
# digits. These sequences start at 0, 130, 256, ..., 1029, 1157, 1287, ...
_FIRST_TEST_SCAN = 1029


@dataclasses.dataclass(kw_only=True, eq=False)
class Digits:
  """The 1,797 handwritten digits that scikit-learn ships: uint8 [8, 8, 1].

  Their levels 0 to 16 are scaled to 0 to 255. The splits share no writer:
  'train' is the first 1,029 scans (98 to 107 per class), 'test' the last 768.
  Both keep the order of the set.

  Attributes:
    split: 'train' or 'test'.
    examples_per_class: number of scans of each class, chosen at random; None
      keeps all. For the same seed a smaller subset is part of a larger one.
    seed: of the choice.
  """

  split: Literal['train', 'test']
  examples_per_class: Count | None = None
  seed: Seed = 0

  num_classes = 10

  def __post_init__(self) -> None:
    self.class_names = list('0123456789')
    scans, labels = _scans()
    rows = np.arange(len(labels))
    is_train = self.split == 'train'
    rows = rows[:_FIRST_TEST_SCAN] if is_train else rows[_FIRST_TEST_SCAN:]
    if self.examples_per_class is not None:
      rows = rows[_subset(labels[rows], self.examples_per_class, self.seed)]
    self._rows = rows  # of scikit-learn's set
    self._images, self._labels = scans[rows], labels[rows]

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: int) -> dict[str, Any]:
    index = range(len(self))[index]
    image = self._images[index].copy()  # the caller may modify it
    return {'image': image, 'label': int(self._labels[index])}

  def describe(self, index: int) -> str:
    """Return the split and the row in scikit-learn's set."""
    return f'digits {self.split}, scan {self._rows[index]} of load_digits()'


@dataclasses.dataclass(kw_only=True, eq=False)
class Synthetic:
  """Random uint8 images with labels, for benchmarks and tests.

  Image i is noise that depends on (seed, i). Its label is i % num_classes.

  Attributes:
    image_size: side in pixels, or (height, width).
    num_classes: number of classes.
    num_examples: length of the source; images are not stored.
    seed: of the noise.
    channels: number of channels.
    learnable: if True, half of the contrast of each image is a coarse pattern
      that depends on the label only, so that a model can learn the label.
  """

  image_size: Size
  num_classes: Count
  num_examples: Count
  seed: Seed = 0
  channels: Count = 3
  learnable: bool = False

  def __post_init__(self) -> None:
    self.shape = (*images.pair(self.image_size), self.channels)

  def __len__(self) -> int:
    return self.num_examples

  def __getitem__(self, index: int) -> dict[str, Any]:
    index = range(len(self))[index]
    label = index % self.num_classes
    rng = np.random.Generator(np.random.PCG64((self.seed, index)))
    image = rng.integers(0, 256, self.shape, np.uint8)
    if self.learnable:
      image = image // 2 + _pattern(label, self.shape) // 2
    return {'image': image, 'label': label}


@functools.lru_cache(maxsize=1)
def _scans():
  from sklearn import datasets  # takes a second, which Synthetic need not wait

  data = datasets.load_digits()
  scans = np.rint(data.images * (255 / 16)).astype(np.uint8)[..., None]
  return scans, data.target


def _subset(labels, count, seed):
  """Return the sorted indices of `count` random examples of each class."""
  least = np.bincount(labels).min()
  if count > least:
    raise UserError(
      f'examples_per_class={count}, but this split has {least} scans of one'
      ' digit. Use a smaller number.'
    )
  rng = np.random.default_rng(seed)
  of_class = [np.flatnonzero(labels == label) for label in range(10)]
  chosen = [rng.permutation(indices)[:count] for indices in of_class]
  return np.sort(np.concatenate(chosen))


@functools.lru_cache(maxsize=1024)
def _pattern(label, shape):
  """Return the 4x4 pattern of a class, enlarged to uint8 [H, W, C]."""
  rng = np.random.default_rng(label)
  coarse = rng.integers(0, 256, (4, 4, shape[2]), np.uint8)
  rows, columns = (np.arange(side) * 4 // side for side in shape[:2])
  return coarse[rows][:, columns]

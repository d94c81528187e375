"""Embedded data that needs no generation: real digit scans, random images."""

import functools

import numpy as np

from vit_jax.data import arguments

# The set is a concatenation of writers: the same sequence of digits starts
# again at 0, 130, 256, 386, 516, 646, 776, ..., 1029, 1157, 1287, 1415, ...
_FIRST_TEST_SCAN = 1029


class Digits:
  """The 1,797 handwritten digits that scikit-learn ships: uint8 [8, 8, 1].

  Their levels 0 to 16 become round(255 / 16 * level). The set lists one writer
  after the other, so the splits share no writer: 'train' is the first 1,029
  scans (98 to 107 a class), 'test' the last 768; both keep the set's order.

  Args:
    split: 'train' or 'test'.
    examples_per_class: keeps this many scans of each class, drawn by `seed`
      and listed in the set's order; None keeps all. Of one seed, the smaller
      subset is part of the larger one.
    seed: which subset; without effect when `examples_per_class` is None.
  """

  num_classes = 10

  def __init__(self, *, split, examples_per_class=None, seed=0):
    images, labels = _scans()
    parts = {
      'train': np.arange(_FIRST_TEST_SCAN),
      'test': np.arange(_FIRST_TEST_SCAN, len(labels)),
    }
    if split not in parts:
      raise ValueError(
        f'Digits has no split {split!r}; there are {", ".join(parts)}.'
      )
    indices = parts[split]
    if examples_per_class is not None:
      indices = _subset(indices, labels, examples_per_class, seed)
    self.class_names = list('0123456789')
    self.split = split
    self.examples_per_class = examples_per_class
    self.seed = seed
    self._indices = indices
    self._images = images[indices]
    self._labels = labels[indices]

  def __len__(self):
    return len(self._indices)

  def __getitem__(self, index):
    index = arguments.check_index(index, len(self))
    image = self._images[index].copy()  # the caller may write into it
    return {'image': image, 'label': int(self._labels[index])}

  def describe(self, index):
    """The split and the scan's row in scikit-learn's set."""
    return f'digits {self.split}, scan {self._indices[index]} of load_digits()'


class Synthetic:
  """Random uint8 images with labels: for benchmarks and tests.

  Image i is noise of (seed, i). Labels go round: index % num_classes. When
  `learnable`, half of each image's contrast is a coarse random pattern of its
  class, the same for every seed, so that a model can learn the label.

  Args:
    image_size: side in pixels, or (height, width).
    num_classes: labels run from 0 to num_classes - 1.
    num_examples: what `len` says. Any number: no image is stored.
    seed: another seed is other noise.
    channels: of the images.
    learnable: whether the image tells the label.
  """

  class_names = None

  def __init__(
    self,
    *,
    image_size,
    num_classes,
    num_examples,
    seed=0,
    channels=3,
    learnable=False,
  ):
    size = image_size
    if isinstance(image_size, (int, np.integer)):
      size = (image_size, image_size)
    if not isinstance(size, (tuple, list)) or len(size) != 2:
      raise ValueError(
        f'image_size is {image_size!r}; give an integer or (height, width).'
      )
    for name, value, least in (
      ('image_size', size[0], 1),
      ('image_size', size[1], 1),
      ('num_classes', num_classes, 1),
      ('num_examples', num_examples, 1),
      ('seed', seed, 0),
      ('channels', channels, 1),
    ):
      arguments.check_int(name, value, least)
    self.shape = (*size, channels)
    self.num_classes = num_classes
    self.num_examples = num_examples
    self.seed = seed
    self.learnable = learnable

  def __len__(self):
    return self.num_examples

  def __getitem__(self, index):
    index = arguments.check_index(index, self.num_examples)
    label = index % self.num_classes
    rng = np.random.Generator(np.random.PCG64((self.seed, index)))
    image = rng.integers(0, 256, self.shape, np.uint8)
    if self.learnable:
      image = image // 2 + _pattern(label, self.shape) // 2
    return {'image': image, 'label': label}

  def describe(self, index):
    """The arguments that example `index` is drawn from."""
    return f'synthetic image of seed {self.seed}, index {index}'


@functools.lru_cache(maxsize=1)
def _scans():
  # Here, as importing it takes a second that Synthetic need not wait for.
  from sklearn import datasets

  data = datasets.load_digits()
  images = np.rint(data.images * (255 / 16)).astype(np.uint8)[..., None]
  return images, data.target


def _subset(indices, labels, examples_per_class, seed):
  """Row numbers of a seeded choice with `examples_per_class` of each class."""
  arguments.check_int('examples_per_class', examples_per_class, 1)
  arguments.check_int('seed', seed, 0)
  rng = np.random.default_rng(seed)
  chosen = []
  for label in range(Digits.num_classes):
    of_class = indices[labels[indices] == label]
    if examples_per_class > len(of_class):
      raise ValueError(
        f'examples_per_class is {examples_per_class}, but this split has'
        f' {len(of_class)} scans of the digit {label}; ask for fewer.'
      )
    chosen.append(rng.permutation(of_class)[:examples_per_class])
  return np.sort(np.concatenate(chosen))


@functools.lru_cache(maxsize=1024)
def _pattern(label, shape):
  """A class's 4x4 pattern, enlarged to whole pixels: uint8 [H, W, C]."""
  height, width, channels = shape
  rng = np.random.default_rng(label)
  coarse = rng.integers(0, 256, (4, 4, channels), np.uint8)
  rows = np.arange(height) * 4 // height
  columns = np.arange(width) * 4 // width
  return coarse[rows][:, columns]

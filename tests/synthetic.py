"""A source of random images, whose labels a model can learn if asked."""

import dataclasses
import functools

import numpy as np

from vit_jax.data import images
from vit_jax.types import Size


@dataclasses.dataclass(kw_only=True, eq=False)
class Synthetic:
  """Image i is noise that depends on (seed, i), its label i % num_classes.

  If `learnable`, half of the contrast of each image is a coarse pattern that
  depends on the label only.
  """

  image_size: Size
  num_classes: int
  num_examples: int
  seed: int = 0
  channels: int = 3
  learnable: bool = False

  def __len__(self):
    return self.num_examples

  def __getitem__(self, index):
    index = range(len(self))[index]
    label = index % self.num_classes
    rng = np.random.Generator(np.random.PCG64((self.seed, index)))
    shape = (*images.pair(self.image_size), self.channels)
    image = rng.integers(0, 256, shape, np.uint8)
    if self.learnable:
      image = image // 2 + _pattern(label, shape) // 2
    return {'image': image, 'label': label}


@functools.lru_cache(maxsize=1024)
def _pattern(label, shape):
  """Return the 4x4 pattern of a class, enlarged to uint8 [H, W, C]."""
  rng = np.random.default_rng(label)
  coarse = rng.integers(0, 256, (4, 4, shape[2]), np.uint8)
  rows, columns = (np.arange(side) * 4 // side for side in shape[:2])
  return coarse[rows][:, columns]

"""Patches of all images in other places."""

import dataclasses

import numpy as np

from vit_jax.types import Count, Fraction, Seed


@dataclasses.dataclass(frozen=True)
class ShufflePatches:
  """Move patches of pixels, in all images to the same other places.

  A ViT with patches of this size has the same task, but other neighbours.

  Attributes:
    patch_size: side of a patch in pixels; it must divide the image size.
    fraction: fraction of the patches that change places.
    seed: seed for the choice of these patches and of their new places.
  """

  patch_size: Count
  fraction: Fraction = 1.0
  seed: Seed = 0

  def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    side, (height, _, channels) = self.patch_size, image.shape
    cells = image.reshape(height // side, side, -1, side, channels)
    cells = cells.swapaxes(1, 2).reshape(-1, side, side, channels)
    own = np.random.default_rng(self.seed)
    moved = own.permutation(len(cells))[: round(self.fraction * len(cells))]
    cells[moved] = cells[np.roll(moved, 1)]
    cells = cells.reshape(height // side, -1, side, side, channels)
    return cells.swapaxes(1, 2).reshape(image.shape)

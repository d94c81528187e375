"""Histograms of oriented gradients as images, for baselines without a model."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Hog:
  """Replace an image by its histograms of oriented gradients (HOG).

  By scikit-image, with 9 orientations and blocks of 2 x 2 cells of 10 px
  ("Histograms of Oriented Gradients for Human Detection", 2005). A readout of
  'pixels' then reads the histograms: uint8 [blocks, blocks, 36], 0 to 255 for 0
  to 0.5. Colour images have the gradient of the channel where it is largest.
  """

  def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    from skimage import feature  # of an extra

    sizes = {'pixels_per_cell': (10, 10), 'cells_per_block': (2, 2)}
    found = feature.hog(image, **sizes, feature_vector=False, channel_axis=-1)
    rows = found.reshape(*found.shape[:2], -1)
    return np.rint(510 * np.minimum(rows, 0.5)).astype(np.uint8)

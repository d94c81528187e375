"""Copies of evaluation images in a data set, found by a perceptual hash."""

import numpy as np

from vit_jax.data import images


def perceptual_hash(image: np.ndarray) -> np.uint64:
  """Return the hash of an image, uint8 [H, W, C]: `imagehash.phash`.

  Its 64 bits say which of the low frequencies of a thumbnail are above their
  median. Resizing, compression and changes of contrast keep nearly all of them;
  cropping, mirroring and rotating do not.
  """
  import imagehash  # of the extra 'prepare'

  picture = image[..., 0] if image.shape[2] == 1 else image
  bits = imagehash.phash(images.pillow().fromarray(picture)).hash
  return np.packbits(bits).view('>u8')[0].astype(np.uint64)


class Copies:
  """The evaluation images {name: hash} that copies are searched of.

  The hash of a copy differs in at most `max_distance` of its 64 bits.
  """

  def __init__(
    self, hashes: dict[str, np.uint64], max_distance: int = 6
  ) -> None:
    self._names, self._max_distance = list(hashes), max_distance
    self._hashes = np.array(list(hashes.values()), np.uint64)

  def find(self, image: np.ndarray) -> str | None:
    """Return the evaluation image that this is a copy of, or None."""
    distances = np.bitwise_count(self._hashes ^ perceptual_hash(image))
    nearest = distances.argmin()
    if distances[nearest] > self._max_distance:
      return None
    return f'{self._names[nearest]} (distance {distances[nearest]})'

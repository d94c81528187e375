"""Copies of evaluation images in a data set, found by a perceptual hash."""

from collections.abc import Iterable

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
  """Hashes of evaluation images, which copies are compared with.

  Args:
    examples: (name, hash) of each evaluation image.
    max_distance: number of bits, of 64, in which the hash of a copy may differ.
  """

  def __init__(
    self, examples: Iterable[tuple[str, np.uint64]], max_distance: int
  ) -> None:
    names, hashes = zip(*examples)
    self._names, self._hashes = names, np.array(hashes, np.uint64)
    self._max_distance = max_distance

  def find(self, image: np.ndarray) -> str | None:
    """Return the evaluation image that this is a copy of, or None."""
    differing = self._hashes ^ perceptual_hash(image)
    distances = np.bitwise_count(differing)
    nearest = distances.argmin()
    if distances[nearest] > self._max_distance:
      return None
    return f'{self._names[nearest]} (distance {distances[nearest]})'

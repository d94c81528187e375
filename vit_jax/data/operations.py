"""Operations on images that augmentation is composed of, without randomness.

An operation is f(image uint8 [H, W, C], argument) -> uint8 [H, W, C]. C is 1 or
3. The operations are Pillow's, as in timm and torchvision, except for the hue.
RandAugment and its relatives draw from `COLOR` and `GEOMETRY`. Operations on
colours do not change an image with one channel.

Geometric operations take the pixel (x, y) of the result from another place in
the image. Their other arguments are `interpolation`, 'nearest', 'bilinear' or
'bicubic', and `fill`, the level or the C levels of pixels from outside of the
image.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from vit_jax.data import images

Fill = int | Sequence[int]
Operation = Callable[..., np.ndarray]


def _enhanced(kind, image, factor):
  from PIL import ImageEnhance

  enhance = getattr(ImageEnhance, kind)
  return images.by_pillow(lambda x: enhance(x).enhance(factor), image)


# Colour.


def autocontrast(image: np.ndarray) -> np.ndarray:
  """Stretch each channel so that its levels range from 0 to 255."""
  from PIL import ImageOps

  return images.by_pillow(ImageOps.autocontrast, image)


def equalize(image: np.ndarray) -> np.ndarray:
  """Flatten the histogram of each channel."""
  from PIL import ImageOps

  return images.by_pillow(ImageOps.equalize, image)


def invert(image: np.ndarray) -> np.ndarray:
  """Return 255 - image."""
  return 255 - image


def posterize(image: np.ndarray, bits: int) -> np.ndarray:
  """Keep the upper `bits` of the 8 bits of each level, 0 to 8."""
  return image & np.uint8(0xFF & (0xFF00 >> bits))


def solarize(image: np.ndarray, threshold: float = 128) -> np.ndarray:
  """Invert levels from `threshold` up, 0 to 256."""
  return np.where(image < math.ceil(threshold), image, 255 - image)


def solarize_add(
  image: np.ndarray, addition: int, threshold: int = 128
) -> np.ndarray:
  """Add to levels below `threshold`."""
  addition = min(addition, 255)
  added = np.minimum(image, 255 - addition) + np.uint8(addition)
  return np.where(image < threshold, added, image)


def brightness(image: np.ndarray, factor: float) -> np.ndarray:
  """Scale the distance from black."""
  return _enhanced('Brightness', image, factor)


def contrast(
  image: np.ndarray, factor: float, mean: int | None = None
) -> np.ndarray:
  """Scale the distance from `mean`, by default the mean luma of the image."""
  if mean is None:
    return _enhanced('Contrast', image, factor)
  pillow = images.pillow()
  return images.by_pillow(
    lambda x: pillow.blend(x.point(lambda _: mean), x, factor), image
  )


def color(image: np.ndarray, factor: float) -> np.ndarray:
  """Scale the distance from the grey image of the same luma."""
  return _enhanced('Color', image, factor)


def sharpness(image: np.ndarray, factor: float) -> np.ndarray:
  """Scale the distance from a smoothed image; border pixels stay."""
  return _enhanced('Sharpness', image, factor)


def grey(image: np.ndarray) -> np.ndarray:
  """Set all channels to the luma."""
  return images.by_pillow(lambda x: x.convert('L').convert(x.mode), image)


def hue(image: np.ndarray, turn: float) -> np.ndarray:
  """Turn the hue by this fraction of the circle, computed in float32."""
  if image.shape[2] == 1:
    return image
  cv2 = images.opencv()
  hsv = cv2.cvtColor(image.astype(np.float32) / 255, cv2.COLOR_RGB2HSV)
  hsv[..., 0] = (hsv[..., 0] + 360 * turn) % 360
  return np.rint(255 * cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)).astype(np.uint8)


def blur(image: np.ndarray, radius: float) -> np.ndarray:
  """Blur by a Gaussian whose standard deviation is `radius` pixels."""
  from PIL import ImageFilter

  return images.by_pillow(
    lambda x: x.filter(ImageFilter.GaussianBlur(radius)), image
  )


# Geometry.


def rotate(
  image: np.ndarray,
  degrees: float,
  interpolation: str = 'nearest',
  fill: Fill = 0,
) -> np.ndarray:
  """Rotate counterclockwise about the centre."""
  kernel, fill = _kernel_and_fill(image, interpolation, fill)
  return images.by_pillow(
    lambda x: x.rotate(degrees, kernel, fillcolor=fill), image
  )


def affine(
  image: np.ndarray,
  matrix: tuple[float, ...],
  interpolation: str = 'nearest',
  fill: Fill = 0,
) -> np.ndarray:
  """Take the pixel (x, y) from (a x + b y + c, d x + e y + f)."""
  kernel, fill = _kernel_and_fill(image, interpolation, fill)
  kind = images.pillow().Transform.AFFINE
  return images.by_pillow(
    lambda x: x.transform(x.size, kind, matrix, kernel, fillcolor=fill), image
  )


def _kernel_and_fill(image, interpolation, fill):
  kernel = images.pillow().Resampling[interpolation.upper()]
  fill = levels(fill, image.shape[2])
  return kernel, fill[0] if len(fill) == 1 else fill


def erase(
  image: np.ndarray, box: images.Box, fill: Fill | np.ndarray = 0
) -> np.ndarray:
  """Return a copy with a box (y, x, height, width) filled.

  Args:
    image: uint8 [H, W, C].
    box: may extend beyond the image.
    fill: level, C levels, or an array [height, width, C].
  """
  y, x, height, width = box
  out = image.copy()
  if not isinstance(fill, np.ndarray):
    fill = np.array(levels(fill, image.shape[2]), np.uint8)
  out[max(y, 0) : max(y + height, 0), max(x, 0) : max(x + width, 0)] = fill
  return out


def levels(fill: Fill, channels: int) -> tuple[int, ...]:
  """Return a level for each channel; three become their luma for one channel.

  Raises:
    ValueError: `fill` has another number of levels.
  """
  if isinstance(fill, int | np.integer):
    return (int(fill),) * channels
  if len(fill) == 3 and channels == 1:
    return (round(0.299 * fill[0] + 0.587 * fill[1] + 0.114 * fill[2]),)
  if len(fill) != channels:
    raise ValueError(
      f'fill={fill!r} has {len(fill)} levels, but the image has {channels} '
      'channels. Use one level, or one for each channel.'
    )
  return tuple(fill)


COLOR: dict[str, Operation] = {
  'AutoContrast': autocontrast,
  'Equalize': equalize,
  'Invert': invert,
  'Posterize': posterize,
  'Solarize': solarize,
  'SolarizeAdd': solarize_add,
  'Color': color,
  'Contrast': contrast,
  'Brightness': brightness,
  'Sharpness': sharpness,
}
GEOMETRY: dict[str, Operation] = {
  'Rotate': rotate,
  'ShearX': lambda image, x, *how: affine(image, (1, x, 0, 0, 1, 0), *how),
  'ShearY': lambda image, x, *how: affine(image, (1, 0, 0, x, 1, 0), *how),
  'TranslateX': lambda image, x, *how: affine(image, (1, 0, x, 0, 1, 0), *how),
  'TranslateY': lambda image, x, *how: affine(image, (1, 0, 0, 0, 1, x), *how),
}

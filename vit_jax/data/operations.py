"""Operations on images that augmentation is composed of, without randomness.

An operation is f(image uint8 [H, W, C], argument) -> uint8 [H, W, C]. C is 1 or
3. The operations are Pillow's, as in timm and torchvision, except for the hue.
RandAugment and its relatives draw from `COLOR` and `GEOMETRY`. 'Color', `grey`
and `hue` do not change an image with one channel.

Geometric operations take the pixel (x, y) of the result from another place in
the image. Their other arguments are `interpolation`, 'nearest', 'bilinear' or
'bicubic', and `fill`, the level or the C levels of pixels from outside of the
image.
"""

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from vit_jax.data import images

Fill = int | Sequence[int]
Operation = Callable[..., np.ndarray]


# Colour.


def ops(name: str, image: np.ndarray) -> np.ndarray:
  """Apply `autocontrast` or `equalize` of PIL.ImageOps to each channel."""
  from PIL import ImageOps

  return images.by_pillow(getattr(ImageOps, name), image)


def enhance(kind: str, image: np.ndarray, factor: float) -> np.ndarray:
  """Return PIL.ImageEnhance's 'Color', 'Brightness' ..., with its factor."""
  from PIL import ImageEnhance

  enhancer = getattr(ImageEnhance, kind)
  return images.by_pillow(lambda x: enhancer(x).enhance(factor), image)


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


def contrast(image: np.ndarray, factor: float, mean: int) -> np.ndarray:
  """Scale the distance from `mean`; 'Contrast' takes the mean luma."""
  blend = images.pillow().blend
  return images.by_pillow(
    lambda x: blend(x.point(lambda _: mean), x, factor), image
  )


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
  """Return a level for each channel; three become their luma for one."""
  if isinstance(fill, int | np.integer):
    return (int(fill),) * channels
  if len(fill) == 3 and channels == 1:
    return (round(0.299 * fill[0] + 0.587 * fill[1] + 0.114 * fill[2]),)
  return tuple(fill)


ENHANCE = ('Color', 'Contrast', 'Brightness', 'Sharpness')
COLOR: dict[str, Operation] = {
  'AutoContrast': functools.partial(ops, 'autocontrast'),
  'Equalize': functools.partial(ops, 'equalize'),
  'Invert': invert,
  'Posterize': posterize,
  'Solarize': solarize,
  'SolarizeAdd': solarize_add,
  **{kind: functools.partial(enhance, kind) for kind in ENHANCE},
}
GEOMETRY: dict[str, Operation] = {
  'Rotate': rotate,
  'ShearX': lambda image, x, *how: affine(image, (1, x, 0, 0, 1, 0), *how),
  'ShearY': lambda image, x, *how: affine(image, (1, 0, 0, x, 1, 0), *how),
  'TranslateX': lambda image, x, *how: affine(image, (1, 0, x, 0, 1, 0), *how),
  'TranslateY': lambda image, x, *how: affine(image, (1, 0, 0, 0, 1, x), *how),
}

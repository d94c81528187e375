"""Operations on images that augmentation is composed of, without randomness.

An operation is f(image uint8 [H, W, C], argument) -> uint8 [H, W, C]. It equals
Pillow's to one grey level. `COLOR` and `GEOMETRY` have those that RandAugment
and its relatives draw from. C is 1 or 3; Color and hue leave one channel as it
is.

Geometric operations take the result's pixel (x, y) from another place in the
image. Their other arguments are `interpolation` and `fill`, the level or the C
levels of pixels from outside of the image. Interpolations: 'nearest',
'bilinear', and 'bicubic' with a = -1, as Pillow transforms images. Bilinear
levels of OpenCV 4 can differ by some more, as it has 32 places in a pixel.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from vit_jax.data import images

Fill = int | Sequence[int]

_LEVELS = np.arange(256)
_LUMA = np.array([[19595, 38470, 7471]], np.float32) / 2**16  # as in Pillow


def _look_up(image, table):
  """Return table[image]; the table has shape [256] or [256, C]."""
  table = np.asarray(table, np.uint8).reshape(1, 256, -1)
  return images.opencv().LUT(image, table).reshape(image.shape)


def _histograms(image):
  """Return the number of pixels of each channel and level: int [C, 256]."""
  count = images.opencv().calcHist
  each = [
    count([image], [channel], None, [256], [0, 256]).ravel()
    for channel in range(image.shape[2])
  ]
  return np.stack(each).astype(int)


# Colour.


def autocontrast(image: np.ndarray) -> np.ndarray:
  """Stretch each channel so that its levels range from 0 to 255."""
  table = np.tile(_LEVELS[:, None].astype(float), image.shape[2])
  for channel, counts in enumerate(_histograms(image)):
    low, high = np.flatnonzero(counts)[[0, -1]]
    if high > low:
      scale = 255 / (high - low)
      table[:, channel] = _LEVELS * scale - low * scale
  return _look_up(image, np.clip(table, 0, 255))


def equalize(image: np.ndarray) -> np.ndarray:
  """Flatten the histogram of each channel."""
  table = np.tile(_LEVELS[:, None], image.shape[2])
  for channel, counts in enumerate(_histograms(image)):
    step = (counts.sum() - counts[np.flatnonzero(counts)[-1]]) // 255
    if step:
      below = np.cumsum(counts) - counts
      table[:, channel] = np.minimum((below + step // 2) // step, 255)
  return _look_up(image, table)


def invert(image: np.ndarray) -> np.ndarray:
  """Return 255 - image."""
  return images.opencv().bitwise_not(image).reshape(image.shape)


def posterize(image: np.ndarray, bits: int) -> np.ndarray:
  """Keep the upper `bits` of the 8 bits of each level, 0 to 8."""
  return _look_up(image, _LEVELS & (0xFF00 >> bits))


def solarize(image: np.ndarray, threshold: float = 128) -> np.ndarray:
  """Invert levels from `threshold` up, 0 to 256."""
  return _look_up(image, np.where(threshold > _LEVELS, _LEVELS, 255 - _LEVELS))


def solarize_add(
  image: np.ndarray, addition: int, threshold: int = 128
) -> np.ndarray:
  """Add to levels below `threshold`."""
  added = np.clip(_LEVELS + addition, 0, 255)
  return _look_up(image, np.where(threshold > _LEVELS, added, _LEVELS))


def brightness(image: np.ndarray, factor: float) -> np.ndarray:
  """Scale the distance from black."""
  return _spread(image, 0, factor)


def contrast(
  image: np.ndarray, factor: float, mean: int | None = None
) -> np.ndarray:
  """Scale the distance from `mean`, by default the mean luma of the image."""
  if mean is None:
    mean = int(images.opencv().mean(_luma(image))[0] + 0.5)
  return _spread(image, mean, factor)


def color(image: np.ndarray, factor: float) -> np.ndarray:
  """Scale the distance from the grey image of the same luma."""
  return _blend(grey(image), image, factor) if image.shape[2] == 3 else image


def sharpness(image: np.ndarray, factor: float) -> np.ndarray:
  """Scale the distance from a smoothed image; border pixels stay."""
  if min(image.shape[:2]) < 3:
    return image
  kernel = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13
  smooth = image.copy()
  filtered = images.opencv().filter2D(image, -1, kernel).reshape(image.shape)
  smooth[1:-1, 1:-1] = filtered[1:-1, 1:-1]
  return _blend(smooth, image, factor)


def grey(image: np.ndarray) -> np.ndarray:
  """Set all channels to the luma."""
  cv2 = images.opencv()
  if image.shape[2] == 1:
    return image
  return cv2.cvtColor(_luma(image), cv2.COLOR_GRAY2RGB)


def hue(image: np.ndarray, turn: float) -> np.ndarray:
  """Turn the hue by this fraction of the circle, computed in float32."""
  if image.shape[2] == 1:
    return image
  cv2 = images.opencv()
  hsv = cv2.cvtColor(image.astype(np.float32) / 255, cv2.COLOR_RGB2HSV)
  hsv[..., 0] = (hsv[..., 0] + 360 * turn) % 360
  return np.rint(255 * cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)).astype(np.uint8)


def blur(image: np.ndarray, radius: float) -> np.ndarray:
  """Blur by a Gaussian whose standard deviation is `radius` pixels.

  As in Pillow it is made of three box filters, each of them rounded.
  """
  cv2, box = images.opencv(), _box(radius)
  out = image
  for kernel in (box[None], box[:, None]):
    for _ in range(3):
      out = cv2.filter2D(out, -1, kernel, borderType=cv2.BORDER_REPLICATE)
  return out.reshape(image.shape)


def _box(radius):
  """Return the weights of a box; three have the variance of a Gaussian.

  Its outer two pixels have a fractional weight.
  """
  variance = radius**2 / 3
  half = math.floor((math.sqrt(12 * variance + 1) - 1) / 2)
  outer = (2 * half + 1) * (half * (half + 1) - 3 * variance)
  outer /= 6 * (variance - (half + 1) ** 2)
  box = np.array([outer, *[1.0] * (2 * half + 1), outer])
  return box / box.sum()


def _luma(image):
  """Return [H, W]."""
  if image.shape[2] == 1:
    return image[..., 0]
  return images.opencv().transform(image, _LUMA)


def _spread(image, centre, factor):
  """Return centre + factor * (image - centre), rounded down."""
  table = centre + np.float32(factor) * (_LEVELS - centre).astype(np.float32)
  return _look_up(image, np.clip(table, 0, 255))


def _blend(start, end, factor):
  """Return start + factor * (end - start), rounded down."""
  # OpenCV rounds to the nearest; 1e-3 keeps integers what they are.
  out = images.opencv().addWeighted(start, 1 - factor, end, factor, 1e-3 - 0.5)
  return out.reshape(end.shape)


# Geometry.


def rotate(
  image: np.ndarray,
  degrees: float,
  interpolation: str = 'nearest',
  fill: Fill = 0,
) -> np.ndarray:
  """Rotate counterclockwise about the centre."""
  radians = math.radians(degrees)
  cos, sin = math.cos(radians), math.sin(radians)
  linear = np.array([[cos, -sin], [sin, cos]])
  centre = np.array([image.shape[1], image.shape[0]]) / 2
  return _affine(image, linear, centre - linear @ centre, interpolation, fill)


def shear_x(
  image: np.ndarray,
  factor: float,
  interpolation: str = 'nearest',
  fill: Fill = 0,
) -> np.ndarray:
  """Move the row at height y, from the top, to the left by factor * y."""
  return _affine(image, [[1, factor], [0, 1]], [0, 0], interpolation, fill)


def shear_y(
  image: np.ndarray,
  factor: float,
  interpolation: str = 'nearest',
  fill: Fill = 0,
) -> np.ndarray:
  """Move the column at x, from the left, up by factor * x."""
  return _affine(image, [[1, 0], [factor, 1]], [0, 0], interpolation, fill)


def translate_x(
  image: np.ndarray,
  pixels: float,
  interpolation: str = 'nearest',
  fill: Fill = 0,
) -> np.ndarray:
  """Move the image to the left."""
  return _affine(image, np.eye(2), [pixels, 0], interpolation, fill)


def translate_y(
  image: np.ndarray,
  pixels: float,
  interpolation: str = 'nearest',
  fill: Fill = 0,
) -> np.ndarray:
  """Move the image up."""
  return _affine(image, np.eye(2), [0, pixels], interpolation, fill)


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


def _affine(image, linear, offset, interpolation, fill):
  """Take the pixel p, as (x, y), from linear @ p + offset.

  The centre of the upper left pixel is at (0.5, 0.5), as in Pillow.
  """
  matrix = np.column_stack([linear, offset]).astype(float)
  fill = levels(fill, image.shape[2])
  if interpolation == 'bilinear':
    return _bilinear(image, matrix, fill)
  if interpolation == 'bicubic' and np.array_equal(matrix[1], [0, 1, 0]):
    return _bicubic_rows(image, matrix[0], fill)
  if interpolation == 'bicubic' and np.array_equal(matrix[0], [1, 0, 0]):
    flipped = _bicubic_rows(_transpose(image), matrix[1, [1, 0, 2]], fill)
    return _transpose(flipped)
  return _pillow(image, matrix, interpolation, fill)


def _pillow(image, matrix, interpolation, fill):
  """Transform by Pillow, for the kernels that OpenCV does not have.

  OpenCV's cubic kernel has a = -0.75, and its nearest neighbours are rounded.
  """
  from PIL import Image

  height, width, channels = image.shape
  out = Image.fromarray(image[..., 0] if channels == 1 else image).transform(
    (width, height),
    Image.Transform.AFFINE,
    tuple(matrix.ravel()),
    Image.Resampling[interpolation.upper()],
    fillcolor=fill[0] if channels == 1 else fill,
  )
  return np.asarray(out).reshape(image.shape)


def _bilinear(image, matrix, fill):
  cv2 = images.opencv()
  height, width = image.shape[:2]
  # The centre of OpenCV's upper left pixel is at (0, 0).
  shifted = matrix.copy()
  shifted[:, 2] += matrix[:, :2].sum(1) / 2 - 0.5
  out = cv2.warpAffine(
    image,
    shifted,
    (width, height),
    flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
    borderMode=cv2.BORDER_REPLICATE,
  )
  xs, ys = np.arange(width) + 0.5, np.arange(height)[:, None] + 0.5
  inside = np.ones((height, width), bool)
  for (a, b, c), same, size in zip(matrix, np.eye(2, 3), (width, height)):
    if (a, b, c) != tuple(same):
      at, start = a * xs, b * ys + c
      inside &= (at >= -start) & (at < size - start)
  return _filled(out.reshape(image.shape), inside, fill)


def _bicubic_rows(image, row, fill):
  """Take the pixel (x, y) from (x + b * y + c, y), for `row` = (1, b, c)."""
  cv2 = images.opencv()
  height, width, channels = image.shape
  ys = np.arange(height)[:, None] + 0.5
  offset = row[1] * ys + row[2]
  whole = np.floor(offset)
  # Four neighbours of each pixel; those of the row's ends repeat.
  places = np.empty((height, width + 3, 2), np.int16)
  columns = np.arange(-1, width + 2, dtype=np.int16)
  np.add(whole.astype(np.int16), columns, out=places[..., 0])
  places[..., 1] = np.arange(height)[:, None]
  taken = cv2.remap(
    image, places, None, cv2.INTER_NEAREST, borderMode=cv2.BORDER_REPLICATE
  ).astype(np.float32)
  distance = np.abs(offset - whole - [-1, 0, 1, 2])  # [H, 4]
  near = (distance - 2) * distance**2 + 1
  far = ((5 - distance) * distance - 8) * distance + 4
  weights = np.where(distance < 1, near, far).astype(np.float32)
  strides = taken.strides[0], 4 * channels, 4
  taps = np.lib.stride_tricks.as_strided(
    taken, (height, 4, width * channels), strides
  )
  out = np.einsum('yt,ytx->yx', weights, taps)
  out += 1e-3  # keeps integers what they are
  out = np.clip(out, 0, 255, out=out).astype(np.uint8).reshape(image.shape)
  xs = np.arange(width) + 0.5
  return _filled(out, (xs >= -offset) & (xs < width - offset), fill)


def _transpose(image):
  height, width, channels = image.shape
  return images.opencv().transpose(image).reshape(width, height, channels)


def _filled(image, inside, fill):
  """Return the image where `inside` [H, W], else the levels `fill`."""
  out = np.empty_like(image)
  out[:] = np.tile(np.array(fill, np.uint8), (image.shape[1], 1))
  cv2 = images.opencv()
  return cv2.copyTo(image, inside.view(np.uint8), out).reshape(image.shape)


Operation = Callable[..., np.ndarray]

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
  'ShearX': shear_x,
  'ShearY': shear_y,
  'TranslateX': translate_x,
  'TranslateY': translate_y,
}

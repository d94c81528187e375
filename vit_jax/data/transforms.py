"""Image transforms: called as t(image uint8 [H, W, C], rng), return the same.

`size` is an int (square) or (height, width), in pixels. The generator is the
example's own, so a transform may draw as much or as little as it likes.

Interpolations, all with half-pixel centres: 'nearest', 'bilinear', 'bicubic',
'area' (mean over the covered box when shrinking; bilinear when enlarging) and
'lanczos'. None but 'area' low-pass filters before it shrinks, unless
`antialias=True`, which stretches the kernel over the covered box as Pillow and
the antialiased resizes of other frameworks do. The cubic kernel has a = -0.75
without and -0.5 with antialiasing; lanczos has 4 and 3 lobes.
"""

import dataclasses
import math
import numbers

import numpy as np

from vit_jax.data import images

INTERPOLATIONS = ('nearest', 'bilinear', 'bicubic', 'area', 'lanczos')
_ANTIALIASED = ('bilinear', 'bicubic', 'lanczos')


def resize(image, size, *, interpolation='bilinear', antialias=False):
  """Resizes uint8 [H, W, C] to uint8 [size[0], size[1], C]."""
  height, width = size
  if image.shape[:2] == (height, width):
    return image
  if antialias:
    return _resize_antialiased(image, height, width, interpolation)
  cv2 = images.opencv()
  code = {
    'nearest': cv2.INTER_NEAREST_EXACT,
    'bilinear': cv2.INTER_LINEAR,
    'bicubic': cv2.INTER_CUBIC,
    'area': cv2.INTER_AREA,
    'lanczos': cv2.INTER_LANCZOS4,
  }[interpolation]
  shrinks = height <= image.shape[0] and width <= image.shape[1]
  if interpolation == 'area' and not shrinks:
    code = cv2.INTER_LINEAR  # INTER_AREA itself would enlarge in blocks
  out = cv2.resize(image, (width, height), interpolation=code)
  return out.reshape(height, width, image.shape[2])  # cv2 drops a C of 1


def _resize_antialiased(image, height, width, interpolation):
  from PIL import Image

  kind = getattr(Image.Resampling, interpolation.upper())
  channels = image.shape[2]
  if channels == 3:
    out = Image.fromarray(image).resize((width, height), kind)
    return np.array(out)
  planes = [
    np.array(Image.fromarray(image[..., c]).resize((width, height), kind))
    for c in range(channels)
  ]
  return np.stack(planes, axis=-1)


@dataclasses.dataclass(frozen=True)
class Resize:
  """Resizes to `size`; the aspect ratio is not kept."""

  size: int | tuple[int, int]
  interpolation: str = 'bilinear'
  antialias: bool = False

  def __post_init__(self):
    _set_size(self)
    _check_interpolation(self.interpolation, self.antialias)

  def __call__(self, image, rng):
    del rng
    return _resize_as(self, image, self.size)


@dataclasses.dataclass(frozen=True)
class ResizeSmall:
  """Resizes so that the smaller side is `size` pixels; keeps the aspect."""

  size: int
  interpolation: str = 'area'
  antialias: bool = False

  def __post_init__(self):
    if not _is_count(self.size):
      raise ValueError(
        f'ResizeSmall: size is {self.size!r}; it is one int of at least 1, the'
        ' length of the smaller side in pixels.'
      )
    _check_interpolation(self.interpolation, self.antialias)

  def __call__(self, image, rng):
    del rng
    height, width = image.shape[:2]
    factor = self.size / min(height, width)
    size = (round(height * factor), round(width * factor))
    return _resize_as(self, image, size)


@dataclasses.dataclass(frozen=True)
class InceptionCrop:
  """A crop of random area, aspect ratio and place, resized to `size`.

  `area` bounds the crop's share of the image, `ratio` its width / height.
  method='tf' follows TensorFlow's `sample_distorted_bounding_box`, which the
  ViT papers' code calls: the ratio is uniform, then the *height* is uniform
  among those which keep the area in bounds, so small crops are more frequent
  than with method='torch', torchvision's `RandomResizedCrop`: area uniform and
  log-ratio uniform. After 100 (torch: 10) misses the whole image is taken
  (torch: its centre, at the nearest ratio in bounds).
  """

  size: int | tuple[int, int]
  area: tuple[float, float] = (0.05, 1.0)
  ratio: tuple[float, float] = (3 / 4, 4 / 3)
  interpolation: str = 'bilinear'
  antialias: bool = False
  method: str = 'tf'

  def __post_init__(self):
    _set_size(self)
    _check_interpolation(self.interpolation, self.antialias)
    for name, top in (('area', 1.0), ('ratio', math.inf)):
      bounds = tuple(float(x) for x in getattr(self, name))
      object.__setattr__(self, name, bounds)
      if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1] <= top:
        raise ValueError(
          f'InceptionCrop: {name} is {bounds}; give (lowest, highest) with'
          f' 0 < lowest <= highest <= {top}.'
        )
    if self.method not in ('tf', 'torch'):
      raise ValueError(
        f"InceptionCrop: method is {self.method!r}; it can be 'tf' or 'torch'."
      )

  def __call__(self, image, rng):
    y, x, height, width = self.box(image.shape[0], image.shape[1], rng)
    crop = image[y : y + height, x : x + width]
    return _resize_as(self, crop, self.size)

  def box(self, height, width, rng):
    """The crop (y, x, height, width) of an image of that size, in pixels."""
    sample = _box_tf if self.method == 'tf' else _box_torch
    return sample(height, width, self.area, self.ratio, rng)


def _box_tf(height, width, area, ratio, rng):
  least, most = area[0] * height * width, area[1] * height * width
  for _ in range(100):
    aspect = rng.uniform(*ratio)
    # The tallest crop of this aspect that fits in the image and the area.
    tallest = min(round(math.sqrt(most / aspect)), height)
    if round(tallest * aspect) > width:
      tallest = int((width + 0.5 - 1e-7) / aspect)
    shortest = min(round(math.sqrt(least / aspect)), tallest)
    h = shortest + int(rng.integers(tallest - shortest + 1))
    w = round(h * aspect)
    # Rounding can miss the area by a hair: one pixel taller or shorter then.
    if h * w < least:
      h, w = h + 1, round((h + 1) * aspect)
    elif h * w > most:
      h, w = h - 1, round((h - 1) * aspect)
    if 0 < h <= height and 0 < w <= width and least <= h * w <= most:
      y, x = rng.integers(height - h + 1), rng.integers(width - w + 1)
      return int(y), int(x), h, w
  return 0, 0, height, width


def _box_torch(height, width, area, ratio, rng):
  for _ in range(10):
    target = rng.uniform(*area) * height * width
    aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
    w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
    if 0 < h <= height and 0 < w <= width:
      y, x = rng.integers(height - h + 1), rng.integers(width - w + 1)
      return int(y), int(x), h, w
  aspect = min(max(width / height, ratio[0]), ratio[1])
  h = min(height, max(1, round(width / aspect)))
  w = min(width, max(1, round(height * aspect)))
  return (height - h) // 2, (width - w) // 2, h, w


@dataclasses.dataclass(frozen=True)
class RandomCrop:
  """A crop of `size` at a uniformly random place."""

  size: int | tuple[int, int]

  def __post_init__(self):
    _set_size(self)

  def __call__(self, image, rng):
    y, x = _room(self, image)
    return _crop(self, image, rng.integers(y + 1), rng.integers(x + 1))


@dataclasses.dataclass(frozen=True)
class CentralCrop:
  """The crop of `size` at the centre (one pixel up, left if it is between)."""

  size: int | tuple[int, int]

  def __post_init__(self):
    _set_size(self)

  def __call__(self, image, rng):
    del rng
    y, x = _room(self, image)
    return _crop(self, image, y // 2, x // 2)


@dataclasses.dataclass(frozen=True)
class FlipLR:
  """Mirrors left and right with this probability."""

  probability: float = 0.5

  def __post_init__(self):
    if not 0 <= self.probability <= 1:
      raise ValueError(
        f'FlipLR: probability is {self.probability!r}; it lies in [0, 1].'
      )

  def __call__(self, image, rng):
    if rng.random() >= self.probability:
      return image
    # cv2.flip copies about ten times faster than numpy's negative stride.
    image = np.ascontiguousarray(image)
    return images.opencv().flip(image, 1).reshape(image.shape)


def _resize_as(transform, image, size):
  return resize(
    image,
    size,
    interpolation=transform.interpolation,
    antialias=transform.antialias,
  )


def _room(transform, image):
  """Rows and columns of the image beyond the crop; both at least 0."""
  room = tuple(have - want for have, want in zip(image.shape, transform.size))
  if min(room) < 0:
    raise ValueError(
      f'{type(transform).__name__}{transform.size} is larger than the image'
      f' {image.shape[:2]}; put a Resize or ResizeSmall before it.'
    )
  return room


def _crop(transform, image, y, x):
  height, width = transform.size
  return image[y : y + height, x : x + width]


def _is_count(value):
  return isinstance(value, numbers.Integral) and value >= 1


def _set_size(transform):
  """Replaces an int by (int, int), and lists (of a config) by tuples."""
  size = transform.size
  pair = (size, size) if isinstance(size, numbers.Integral) else size
  try:
    pair = tuple(pair)
  except TypeError:
    pair = ()
  if len(pair) != 2 or not all(map(_is_count, pair)):
    raise ValueError(
      f'{type(transform).__name__}: size is {size!r}; give an int or (height,'
      ' width), each at least 1 pixel.'
    )
  object.__setattr__(transform, 'size', pair)


def _check_interpolation(name, antialias):
  if name not in INTERPOLATIONS:
    raise ValueError(
      f'unknown interpolation {name!r}; there are {", ".join(INTERPOLATIONS)}.'
    )
  if antialias and name not in _ANTIALIASED:
    raise ValueError(
      f'interpolation {name!r} has no antialiased form; leave antialias False'
      f' or use one of {", ".join(_ANTIALIASED)}.'
    )

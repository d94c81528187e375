"""Image transforms: t(image [H, W, C], rng) -> [H, W, C], uint8 or float32.

`size` is an int (square) or (height, width), in pixels. A float is a multiple
of the image_size of the `Data` that the transform is part of.

Interpolations, all with half-pixel centres: 'nearest', 'bilinear', 'bicubic',
'area' and 'lanczos'. 'area' is the mean over the box of the image that a pixel
covers: it equals TensorFlow's 'area', rounded to the nearest integer. When
shrinking, only 'area' filters out high frequencies, unless antialias=True,
which stretches the kernel over the covered box as Pillow does. The cubic kernel
has a = -0.75 without and -0.5 with antialiasing; lanczos has 4 and 3 lobes.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from vit_jax.data import images
from vit_jax.types import (
  Count,
  Expect,
  Fraction,
  Natural,
  Positive,
  Share,
  Side,
  Size,
  UserError,
)

Interpolation = Literal['nearest', 'bilinear', 'bicubic', 'area', 'lanczos']

ORDERED = Expect(lambda x: x[0] <= x[1], '(lowest, highest)')

Bounds = Annotated[tuple[Share, Share], ORDERED]
Image = np.ndarray | images.Encoded
Transform = Callable[[Any, np.random.Generator], Any]

Sides = Size | Positive
ShortSide = Side | Positive


def apply(
  transforms: Sequence[Any], example: dict[str, Any], rng: np.random.Generator
) -> dict[str, Any]:
  """Return the example, whose image may be encoded, after all transforms."""
  for transform in (*transforms, None):
    takes_encoded = getattr(transform, 'takes_encoded', False)
    if isinstance(example['image'], images.Encoded) and not takes_encoded:
      example = example | {'image': example['image'].pixels()}
    if getattr(transform, 'takes_example', False):
      example = transform(example, rng)
    elif transform is not None:
      found = transform(example['image'], rng)
      found = found if isinstance(found, dict) else {'image': found}
      example = example | found
  return example


_CODES = {  # of OpenCV
  'nearest': 'INTER_NEAREST_EXACT',
  'bilinear': 'INTER_LINEAR',
  'bicubic': 'INTER_CUBIC',
  'area': 'INTER_AREA',
  'lanczos': 'INTER_LANCZOS4',
}
ANTIALIASED = ('bilinear', 'bicubic', 'lanczos')


def resize(
  image: np.ndarray,
  size: int | tuple[int, int],
  interpolation: Interpolation = 'bilinear',
  antialias: bool = False,
) -> np.ndarray:
  """Resize [H, W, C] to `size`, a side or (height, width)."""
  height, width = images.pair(size)
  if image.shape[:2] == (height, width):
    return image
  if antialias:
    if interpolation not in ANTIALIASED:
      raise UserError(
        f'interpolation={interpolation!r} has no antialias=True. Use one of'
        f' {", ".join(ANTIALIASED)}.'
      )
    kind = images.pillow().Resampling[interpolation.upper()]
    return images.by_pillow(lambda x: x.resize((width, height), kind), image)
  shrinks = height <= image.shape[0] and width <= image.shape[1]
  if interpolation == 'area' and not shrinks:
    return _enlarge_area(image, height, width)
  cv2 = images.opencv()
  code = getattr(cv2, _CODES[interpolation])
  most = 4 if interpolation == 'area' else 128
  return images.by_opencv(
    lambda x: cv2.resize(x, (width, height), interpolation=code), image, most
  )


def _enlarge_area(image, height, width):
  """Return the mean of the box of each pixel; one side or both enlarge.

  INTER_AREA is this mean only if both sides shrink or both enlarge, so they
  shrink first. Pixels are rounded once, at the end.
  """
  cv2 = images.opencv()
  how = {'interpolation': cv2.INTER_AREA}
  old = min(height, image.shape[0]), min(width, image.shape[1])
  # If a box starts at the edge of a pixel, rounding can make OpenCV take the
  # pixel before it. Boxes that are larger by 1e-9 start after the edge.
  fy, fx = height / old[0] * (1 - 1e-9), width / old[1] * (1 - 1e-9)

  def enlarge(x):
    return cv2.resize(
      cv2.resize(x, old[::-1], **how), None, fx=fx, fy=fy, **how
    )

  out = images.by_opencv(enlarge, image.astype(np.float32), 4)
  return np.rint(out).astype(np.uint8) if image.dtype == np.uint8 else out


class _Crop:
  """Base of crops: decodes only a box of an encoded image, and resizes it."""

  takes_encoded: ClassVar = True  # see pipeline.py
  interpolation: Interpolation = 'bilinear'
  antialias: bool = False
  size: Sides

  def __post_init__(self) -> None:
    if not isinstance(self.size, float):
      object.__setattr__(self, 'size', images.pair(self.size))

  def __call__(self, image: Image, rng: np.random.Generator) -> np.ndarray:
    y, x, height, width = box = self.box(image.shape, rng)
    if isinstance(image, images.Encoded):
      pixels = image.part(box)
    else:
      pixels = image[y : y + height, x : x + width]
    size = self._result((height, width))
    return resize(pixels, size, self.interpolation, self.antialias)

  def box(self, shape: Sequence[int], rng: np.random.Generator) -> images.Box:
    """Return the crop of an image (H, W, ...); default: the whole image."""
    return 0, 0, shape[0], shape[1]

  def _result(self, sides):
    """Return the size that a box with these sides is resized to."""
    return self.size

  def _placed(self, shape, place):
    """Return a box of `size`; `place` chooses among `room` + 1 offsets."""
    height, width = self.size
    room = shape[0] - height, shape[1] - width
    if min(room) < 0:
      raise UserError(
        f'{type(self).__name__}{self.size} is larger than the image'
        f' {shape[:2]}. Put a Resize or ResizeSmall before it.'
      )
    y, x = map(place, room)
    return int(y), int(x), height, width


@dataclasses.dataclass(frozen=True)
class Resize(_Crop):
  """Resize to `size`, without keeping the aspect ratio."""

  size: Sides
  interpolation: Interpolation = 'bilinear'
  antialias: bool = False


@dataclasses.dataclass(frozen=True)
class ResizeSmall(_Crop):
  """Resize the smaller side to `size` pixels, keeping the aspect ratio.

  The larger side is rounded to whole pixels, 'down' as by torchvision.
  """

  size: ShortSide
  interpolation: Interpolation = 'area'
  antialias: bool = False
  rounding: Literal['nearest', 'down'] = 'nearest'

  def __post_init__(self) -> None:
    pass  # `size` stays one side

  def _result(self, sides):
    if self.rounding == 'down':
      return tuple(self.size * side // min(sides) for side in sides)
    return tuple(round(side * (self.size / min(sides))) for side in sides)


@dataclasses.dataclass(frozen=True)
class InceptionCrop(_Crop):
  """A crop of random area, aspect ratio and position, resized to `size`.

  Attributes:
    area: bounds of the crop's fraction of the image area.
    ratio: bounds of the crop's width / height.
    method: 'tf' follows TensorFlow's `sample_distorted_bounding_box`, as the
      code of the ViT papers does: the ratio is uniform, then the *height* is
      uniform among those that keep the area in bounds. Small crops are more
      frequent than with 'torch', torchvision's `RandomResizedCrop`: uniform
      area and log-ratio. After 100 (torch: 10) failed attempts the crop is the
      whole image (torch: its centre, at the nearest ratio in bounds).
  """

  size: Sides
  area: Bounds = (0.05, 1.0)
  ratio: Annotated[tuple[Positive, Positive], ORDERED] = (3 / 4, 4 / 3)
  interpolation: Interpolation = 'bilinear'
  antialias: bool = False
  method: Literal['tf', 'torch'] = 'tf'

  def box(self, shape: Sequence[int], rng: np.random.Generator) -> images.Box:
    sample = {'tf': _box_tf, 'torch': _box_torch}[self.method]
    return sample(shape[0], shape[1], self.area, self.ratio, rng)


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
    # Rounding can miss the area narrowly: then one pixel taller or shorter.
    if h * w < least:
      h, w = h + 1, round((h + 1) * aspect)
    elif h * w > most:
      h, w = h - 1, round((h - 1) * aspect)
    if 0 < h <= height and 0 < w <= width and least <= h * w <= most:
      # TensorFlow never draws the last offset, unless it is the only one.
      y, x = (rng.integers(max(1, room)) for room in (height - h, width - w))
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
class RandomCrop(_Crop):
  """A crop of `size` at a uniformly random position."""

  size: Sides

  def box(self, shape: Sequence[int], rng: np.random.Generator) -> images.Box:
    return self._placed(shape, lambda room: rng.integers(room + 1))


@dataclasses.dataclass(frozen=True)
class CentralCrop(_Crop):
  """The crop of `size` at the centre.

  If the number of pixels around it is odd, half of it is rounded down as by
  TensorFlow code, or to the nearest even number as by torchvision.
  """

  size: Sides
  rounding: Literal['down', 'even'] = 'down'

  def box(self, shape: Sequence[int], rng: np.random.Generator) -> images.Box:
    half = {'down': lambda x: x // 2, 'even': lambda x: round(x / 2)}
    return self._placed(shape, half[self.rounding])


@dataclasses.dataclass(frozen=True)
class SimpleRandomCrop(RandomCrop):
  """The simple random crop of DeiT III, which keeps most of the image.

  The image is resized until it just covers `size`, without changing its aspect
  ratio, bicubic with antialiasing. Then `padding` pixels are added on each side
  by reflection, and it is cropped at a uniformly random position.
  """

  padding: Natural = 4

  def __call__(self, image: Image, rng: np.random.Generator) -> np.ndarray:
    height, width = image.shape[:2]
    rows, columns = images.pair(self.size)
    if rows * width >= columns * height:
      columns = rows * width // height
    else:
      rows = columns * height // width
    whole = Resize((rows, columns), 'bicubic', antialias=True)(image, rng)
    cv2, padding = images.opencv(), (self.padding,) * 4
    padded = images.by_opencv(
      lambda x: cv2.copyMakeBorder(x, *padding, cv2.BORDER_REFLECT_101), whole
    )
    return super().__call__(padded, rng)


@dataclasses.dataclass(frozen=True)
class MultiCrop:
  """Global and local crops of an image, as of DINO.

  {'image': uint8 [count, H, W, C], 'local': uint8 [local_count, h, w, C]}, the
  latter if there are any. Each is an InceptionCrop(method='torch').
  """

  size: Sides
  count: Count = 2
  area: Bounds = (0.4, 1.0)
  local_size: Sides = 96
  local_count: Natural = 8
  local_area: Bounds = (0.05, 0.4)
  interpolation: Interpolation = 'bicubic'
  antialias: bool = True

  def __call__(
    self, image: np.ndarray, rng: np.random.Generator
  ) -> dict[str, np.ndarray]:
    def cut(count, size, area):
      how = {'interpolation': self.interpolation, 'antialias': self.antialias}
      crop = InceptionCrop(size, area, method='torch', **how)
      return np.stack([crop(image, rng) for _ in range(count)])

    views = {'image': cut(self.count, self.size, self.area)}
    if self.local_count:
      views['local'] = cut(self.local_count, self.local_size, self.local_area)
    return views


@dataclasses.dataclass(frozen=True)
class KeepAspect(_Crop):
  """The last transform of images that keep their aspect ratio ("NaViT").

  {'image': uint8 [ph, max_patches * pw, C], 'grid': int32 [2]}: the image is
  resized to the largest grid (rows, columns) of its aspect ratio, rounded up to
  whole patches. These are side by side, row by row; zeros follow.

  Attributes:
    area: bounds of the fraction of the image that a random crop of the same
      aspect ratio keeps.
  """

  patch_size: Size
  max_patches: Count
  area: Bounds = (1.0, 1.0)
  interpolation: Interpolation = 'bilinear'
  antialias: bool = True

  def __post_init__(self) -> None:
    pass  # there is no `size`

  def of_predictions(self) -> 'KeepAspect':
    """Return the transform without random crops."""
    return dataclasses.replace(self, area=(1.0, 1.0))

  def box(self, shape: Sequence[int], rng: np.random.Generator) -> images.Box:
    ratio = shape[1] / shape[0]
    return _box_torch(shape[0], shape[1], self.area, (ratio, ratio), rng)

  def _result(self, sides):
    (ph, pw), most = images.pair(self.patch_size), self.max_patches
    height, width = sides[0] * pw, sides[1] * ph  # up to a factor, in patches
    # As an image grows, its grid changes where a side fills whole patches.
    grids = [(n, -(-n * width // height)) for n in range(1, most + 1)]
    grids += [(-(-n * height // width), n) for n in range(1, most + 1)]
    rows, columns = max(x for x in grids if math.prod(x) <= most)
    return rows * ph, columns * pw

  def __call__(self, image: Image, rng: np.random.Generator) -> Any:
    whole = super().__call__(image, rng)
    (ph, pw), (*sides, channels) = images.pair(self.patch_size), whole.shape
    patches = whole.reshape(sides[0] // ph, ph, -1, pw, channels)
    out = np.zeros((ph, self.max_patches * pw, channels), whole.dtype)
    row = patches.swapaxes(0, 1).reshape(ph, -1, channels)
    out[:, : row.shape[1]] = row
    return {'image': out, 'grid': np.array(patches.shape[:3:2], np.int32)}


@dataclasses.dataclass(frozen=True)
class FlipLR:
  """Flip left and right with this probability."""

  probability: Fraction = 0.5

  def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if rng.random() >= self.probability:
      return image
    # About ten times faster than copying numpy's negative stride.
    return images.by_opencv(lambda x: images.opencv().flip(x, 1), image)


def evaluation(
  convention: Literal['original', 'big_vision', 'timm'],
  size: Side,
  *,
  crop: Share | None = None,
) -> tuple[Transform, ...]:
  """Return the transforms of test images as a code base has them.

  Args:
    convention: 'original', the released code of the ViT paper, resizes to a
      square. 'big_vision' resizes the smaller side, by area, and crops the
      centre. 'timm' does so too, antialiased bicubic, rounded like torchvision.
    size: side of the images, in pixels.
    crop: fraction of the smaller side that the crop keeps. Default for
      'big_vision': 7/8, and 6/7 at 384 pixels; for 'timm': 0.9 for ViTs below
      384 pixels and 1 from there. 'original' has no crop.
  """
  if convention == 'original':
    if crop is not None:
      raise UserError(f"'original' has no crop={crop}. Remove it.")
    return (Resize(size),)
  if convention == 'big_vision':
    crop = crop or (6 / 7 if size == 384 else 7 / 8)
    return ResizeSmall(round(size / crop)), CentralCrop(size)
  crop = crop or (0.9 if size < 384 else 1.0)
  small = ResizeSmall(math.floor(size / crop), 'bicubic', True, 'down')
  return small, CentralCrop(size, 'even')


def antialiased(transforms: Sequence[Any]) -> Interpolation:
  """Return the first interpolation that can antialias, else 'bilinear'."""
  found = (getattr(x, 'interpolation', None) for x in transforms)
  return next((x for x in found if x in ANTIALIASED), 'bilinear')


def sized(
  transforms: Sequence[Any],
  image_size: int | tuple[int, int] | None,
  interpolation: Interpolation | None = None,
) -> tuple[Any, ...]:
  """Return transforms with sizes in pixels, and with `interpolation`."""

  def made(transform):
    if interpolation and 'interpolation' in vars(transform):
      transform = dataclasses.replace(transform, interpolation=interpolation)
    for name in ('size', 'local_size'):
      factor = getattr(transform, name, None)
      if not isinstance(factor, float):
        continue
      if image_size is None:
        raise UserError(f'{transform} needs image_size, or a size in pixels.')
      size = tuple(round(side * factor) for side in images.pair(image_size))
      new = max(size) if isinstance(transform, ResizeSmall) else size
      transform = dataclasses.replace(transform, **{name: new})
    return transform

  return tuple(map(made, transforms))


def scale(
  transforms: Sequence[Any], new: int | tuple[int, int], *, old: Sequence[int]
) -> tuple[Any, ...]:
  """Return transforms that make images of size `new` from those of size `old`.

  'Resize to 256, crop to 224' becomes 'resize to 439, crop to 384', so the
  same part of the image is used. A shorter side (ResizeSmall) grows with the
  larger side of the image, so that it can still be cropped. KeepAspect becomes
  a Resize to `new`.
  """
  old, new = old[:2], images.pair(new)

  def scaled(transform):
    if isinstance(transform, KeepAspect) and tuple(old) != new:
      return Resize(new, transform.interpolation, transform.antialias)
    size = getattr(transform, 'size', None)
    if size is None or tuple(old) == new:
      return transform
    if isinstance(size, int):
      size = round(size * max(new) / max(old))
    else:
      size = tuple(round(s * n / o) for s, n, o in zip(size, new, old))
    return dataclasses.replace(transform, size=size)

  return tuple(map(scaled, transforms))

"""Random augmentation: transforms t(image uint8 [H, W, C], rng), C is 1 or 3.

They keep the size of the image, and come after the crop and the flip of
transforms.py. Operations and their strengths have the same distribution as in
the named implementation. The operations are Pillow's, except for the hue, on
images of mode 'RGB' or 'L'. `fill` is the level, or one for each channel, of
pixels from outside of the image.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.random import Generator
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vit_jax.data import images
from vit_jax.data.transforms import ORDERED
from vit_jax.types import (
  Expect,
  Fraction,
  Natural,
  NonNegative,
  Positive,
  UserError,
)

Level = Annotated[int, Expect(lambda n: 0 <= n <= 255, 'in [0, 255]')]
Fill = Level | tuple[Level, Level, Level]
_Kernel = Literal['random', 'nearest', 'bilinear', 'bicubic']
_Picture = Image.Image


def _enhance(picture, factor, kind):
  return getattr(ImageEnhance, kind)(picture).enhance(factor)


def _solarize_add(picture, addition):
  """Add to levels below 128."""
  table = [min(x + addition, 255) if x < 128 else x for x in range(256)]
  return picture.point(table * len(picture.getbands()))


def hue(picture: _Picture, turn: float) -> _Picture:
  """Turn the hue by this fraction of the circle, computed in float32."""
  if picture.mode == 'L':
    return picture
  cv2 = images.opencv()
  hsv = cv2.cvtColor(np.asarray(picture, np.float32) / 255, cv2.COLOR_RGB2HSV)
  hsv[..., 0] = (hsv[..., 0] + 360 * turn) % 360
  levels = np.rint(255 * cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB))
  return Image.fromarray(levels.astype(np.uint8))


ENHANCE = ('Color', 'Contrast', 'Brightness', 'Sharpness')
COLOR: dict[str, Callable[..., _Picture]] = {
  'Identity': lambda picture, _: picture,
  'AutoContrast': lambda picture, _: ImageOps.autocontrast(picture),
  'Equalize': lambda picture, _: ImageOps.equalize(picture),
  'Invert': lambda picture, _: ImageOps.invert(picture),
  # Keeps so many bits of each level. Pillow 13 refuses 0, timm's strongest.
  'Posterize': lambda picture, bits: picture.point(
    lambda level: level & (256 - 2 ** (8 - bits))
  ),
  'Solarize': ImageOps.solarize,
  'SolarizeAdd': _solarize_add,
  **{kind: functools.partial(_enhance, kind=kind) for kind in ENHANCE},
}
# Pixel (x, y) of the result comes from (a x + b y + c, d x + e y + f).
_MATRICES: dict[str, Callable[[float], tuple[float, ...]]] = {
  'ShearX': lambda x: (1, x, 0, 0, 1, 0),
  'ShearY': lambda x: (1, 0, 0, x, 1, 0),
  'TranslateX': lambda x: (1, 0, x, 0, 1, 0),
  'TranslateY': lambda x: (1, 0, 0, 0, 1, x),
}
GEOMETRY = ('Rotate', *_MATRICES)


def operate(
  name: str, picture: _Picture, argument: Any, fill: Fill, kernel: str
) -> _Picture:
  """Apply one of COLOR or GEOMETRY."""
  if name in COLOR:
    return COLOR[name](picture, argument)
  how: dict[str, Any] = {
    'resample': Image.Resampling[kernel.upper()],
    'fillcolor': levels(fill, len(picture.getbands())),
  }
  if name == 'Rotate':
    return picture.rotate(argument, **how)
  matrix = _MATRICES[name](argument)
  return picture.transform(picture.size, Image.Transform.AFFINE, matrix, **how)


def levels(fill: Fill, channels: int) -> tuple[int, ...]:
  """Return a level for each channel; three become their luma for one."""
  red, green, blue = np.broadcast_to(fill, 3).tolist()
  if channels == 1:
    return (round(0.299 * red + 0.587 * green + 0.114 * blue),)
  return red, green, blue


def _sign(rng):
  return 1 if rng.random() < 0.5 else -1


def _signed(top):
  return lambda strength, rng: _sign(rng) * top * strength


def _around_1(width, least):
  return lambda strength, rng: max(1 + _sign(rng) * width * strength, least)


# Arguments of operations, as functions of the strength (1: magnitude 10, or the
# strongest bin of TrivialAugment) and of `rng` for random signs.
_Arguments = dict[str, Callable[[float, Generator], Any]]
_SHEAR = ('ShearX', 'ShearY')
_TRANSLATE = ('TranslateX', 'TranslateY')
_WITHOUT: _Arguments = dict.fromkeys(
  ('AutoContrast', 'Equalize', 'Invert'), lambda strength, rng: None
)
_BIG_VISION: _Arguments = {
  **_WITHOUT,
  'Rotate': _signed(30),
  # TensorFlow shifts by at most 7 bits.
  'Posterize': lambda strength, rng: min(max(int(strength * 4), 1), 8),
  'Solarize': lambda strength, rng: int(strength * 256),
  'SolarizeAdd': lambda strength, rng: int(strength * 110),
  **dict.fromkeys(ENHANCE, lambda strength, rng: 1.8 * strength + 0.1),
  **dict.fromkeys(_SHEAR, _signed(0.3)),
  **dict.fromkeys(_TRANSLATE, _signed(100)),
}
_TIMM: _Arguments = {
  **_BIG_VISION,
  'Posterize': lambda strength, rng: min(int(strength * 4), 8),
  'SolarizeAdd': lambda strength, rng: min(int(strength * 110), 128),
  **dict.fromkeys(_TRANSLATE, _signed(0.45)),  # of a side
}
_INCREASING: _Arguments = {
  **_TIMM,
  'Posterize': lambda strength, rng: max(4 - int(strength * 4), 0),
  'Solarize': lambda strength, rng: 256 - min(int(strength * 256), 256),
  **dict.fromkeys(ENHANCE, _around_1(0.9, 0.1)),
}
_TRIVIAL: _Arguments = {
  'Identity': lambda strength, rng: None,
  **dict.fromkeys(_SHEAR, _signed(0.99)),
  **dict.fromkeys(
    _TRANSLATE, lambda strength, rng: int(_sign(rng) * 32 * strength)
  ),
  'Rotate': _signed(135),
  **dict.fromkeys(ENHANCE, _around_1(0.99, 0)),
  'Posterize': lambda strength, rng: 8 - round(strength * 6),
  'Solarize': lambda strength, rng: 255 - 255 * strength,
  **{name: _WITHOUT[name] for name in ('AutoContrast', 'Equalize')},
}
_BINS = 31  # strengths of TrivialAugment


class _OfPictures:
  """A transform that is computed on Pillow images, by `_change`."""

  def __call__(self: Any, image: np.ndarray, rng: Generator) -> np.ndarray:
    if not images.is_picture(image):
      raise UserError(
        f'{type(self).__name__} is for levels 0 to 255 of 1 or 3 channels, and '
        f'these images are {image.dtype} with {image.shape[2]}. Use crops, '
        'FlipLR, RandomErasing, ChannelJitter and ChannelDrop.'
      )
    return images.by_pillow(lambda picture: self._change(picture, rng), image)


@dataclasses.dataclass(frozen=True)
class RandAugment(_OfPictures):
  """RandAugment as in big_vision and the code of AugReg.

  Each layer applies one of 16 operations. Not all are stronger at larger
  magnitudes: Posterize keeps 4 bits at 10, and all 8 at 20; Solarize changes
  nothing from 10 up, Color, Contrast, Brightness and Sharpness at 5. Shears
  leave the upper left corner in place, in big_vision the first pixel's centre.

  Attributes:
    magnitude: 10 is the top of the usual scale; AugReg has 15 and 20, too.
    faults: reproduce two faults that published models were trained with.
      Contrast scales the distance from H * W / 256, at most 255, instead of
      the mean luma. The threshold of Solarize is taken modulo 256, so it
      inverts the whole image at 10 and 20.
  """

  num_layers: Natural = 2
  magnitude: NonNegative = 10.0
  faults: bool = False
  fill: Fill = 128

  names: ClassVar[tuple[str, ...]] = (
    *(name for name in _BIG_VISION if name != 'SolarizeAdd'),
    *('Cutout', 'SolarizeAdd'),
  )

  def _change(self, picture, rng):
    for _ in range(self.num_layers):
      name = self.names[rng.integers(len(self.names))]
      picture = self.apply(name, picture, rng)
    return picture

  def apply(self, name: str, picture: _Picture, rng: Generator) -> _Picture:
    """Apply one of the operations in `names`, at this magnitude."""
    strength = self.magnitude / 10
    if name == 'Cutout':
      return self._cutout(picture, int(strength * 40), rng)
    argument = _BIG_VISION[name](strength, rng)
    if self.faults and name == 'Solarize':
      argument %= 256
    if self.faults and name == 'Contrast':
      mean = min(picture.width * picture.height // 256, 255)
      return Image.blend(picture.point(lambda _: mean), picture, argument)
    return operate(name, picture, argument, self.fill, 'nearest')

  def _cutout(self, picture, half, rng):
    """Fill a square around a random pixel."""
    y, x = int(rng.integers(picture.height)), int(rng.integers(picture.width))
    out = picture.copy()
    box = x - half, y - half, x + half, y + half
    out.paste(levels(self.fill, len(picture.getbands())), box)
    return out


@dataclasses.dataclass(frozen=True)
class TimmRandAugment(_OfPictures):
  """RandAugment as in timm, and so of DeiT; see `rand_augment` for its names.

  Each layer draws one of 15 operations and applies it with `probability`.

  Attributes:
    magnitude: mean of the magnitudes; 10 is the top of the usual scale.
    magnitude_std: standard deviation of the magnitudes, which are normal. Above
      100 they are uniform between 0 and `magnitude`.
    increasing: larger magnitudes are always stronger. False: as in RandAugment.
    max_magnitude: magnitudes are clipped to 0 and this.
    interpolation: method for Rotate, Shear and Translate; 'random' draws
      'bilinear' or 'bicubic' each time, as timm's training does by default.
    fill: timm's training has the mean of the data: ImageNet's (124, 116, 104).
  """

  magnitude: NonNegative = 9.0
  magnitude_std: NonNegative = 0.5
  increasing: bool = True
  num_layers: Natural = 2
  probability: Fraction = 0.5
  max_magnitude: Positive = 10.0
  interpolation: _Kernel = 'random'
  fill: Fill = 128

  names: ClassVar[tuple[str, ...]] = tuple(_TIMM)

  def _change(self, picture, rng):
    for _ in range(self.num_layers):
      name = self.names[rng.integers(len(self.names))]
      if rng.random() < self.probability:
        picture = self.apply(name, picture, rng)
    return picture

  def apply(self, name: str, picture: _Picture, rng: Generator) -> _Picture:
    """Apply one of the operations in `names`, at a random magnitude."""
    table = _INCREASING if self.increasing else _TIMM
    argument = table[name](self._magnitude(rng) / 10, rng)
    if name in _TRANSLATE:
      argument *= picture.size[_TRANSLATE.index(name)]
    kernel: str = self.interpolation
    if kernel == 'random' and name in GEOMETRY:
      kernel = ('bilinear', 'bicubic')[rng.integers(2)]
    return operate(name, picture, argument, self.fill, kernel)

  def _magnitude(self, rng):
    drawn = self.magnitude
    if self.magnitude_std > 100:
      drawn = rng.uniform(0, self.magnitude)
    elif self.magnitude_std:
      drawn = rng.normal(self.magnitude, self.magnitude_std)
    return min(max(drawn, 0), self.max_magnitude)


# Of timm's names: the field, and the type of its number.
_SECTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
  'm': ('magnitude', float),
  'mstd': ('magnitude_std', float),
  'mmax': ('max_magnitude', float),
  'n': ('num_layers', int),
  'p': ('probability', float),
  'inc': ('increasing', lambda text: float(text) > 0),
}


def rand_augment(policy: str, **fields: Any) -> TimmRandAugment:
  """Return the RandAugment that timm has under a name.

  Args:
    policy: such as 'rand-m9-mstd0.5-inc1' of DeiT. Sections that are left out
      have timm's defaults: magnitude 10, without deviation, not increasing, two
      layers, each with probability 0.5.
    **fields: other fields of TimmRandAugment: `interpolation`, `fill`.
  """
  section = rf'-({"|".join(_SECTIONS)})(\d*\.?\d+)'
  found = re.findall(section, policy)
  is_whole = re.fullmatch(f'rand({section})*', policy)
  if not is_whole or len(dict(found)) < len(found):
    raise UserError(
      f'policy={policy!r} is not a RandAugment of timm. Expected rand and '
      f'sections of {", ".join(_SECTIONS)}, each at most once and with a '
      "number, as in 'rand-m9-mstd0.5-inc1'."
    )
  plain = TimmRandAugment(10.0, 0.0, increasing=False, **fields)
  values = {_SECTIONS[k][0]: _SECTIONS[k][1](number) for k, number in found}
  return dataclasses.replace(plain, **values)


@dataclasses.dataclass(frozen=True)
class TrivialAugment(_OfPictures):
  """One of 14 operations at one of 31 strengths: "wide", as in torchvision."""

  fill: Fill = 0

  names: ClassVar[tuple[str, ...]] = tuple(_TRIVIAL)

  def _change(self, picture, rng):
    name = self.names[rng.integers(len(self.names))]
    strength = rng.integers(_BINS) / (_BINS - 1)
    return self.apply(name, picture, rng, strength)

  def apply(
    self, name: str, picture: _Picture, rng: Generator, strength: float
  ) -> _Picture:
    """Apply one of the operations in `names`, at a strength from 0 to 1."""
    argument = _TRIVIAL[name](strength, rng)
    return operate(name, picture, argument, self.fill, 'nearest')


@dataclasses.dataclass(frozen=True)
class ThreeAugment(_OfPictures):
  """3-Augment of DeiT III: grey, solarized or blurred, with equal probability.

  The blur's std is uniform from 0.1 to 2 px. ColorJitter() follows in DeiT III.
  """

  def _change(self, picture, rng):
    kind = rng.integers(3)
    if kind == 0:
      return picture.convert('L').convert(picture.mode)
    if kind == 1:
      return ImageOps.solarize(picture)
    return picture.filter(ImageFilter.GaussianBlur(rng.uniform(0.1, 2.0)))


@dataclasses.dataclass(frozen=True)
class ColorJitter(_OfPictures):
  """Changes of brightness, contrast, saturation and hue, in random order.

  The defaults are those of DeiT III.

  Attributes:
    brightness, contrast, saturation: x: the factor is uniform between
      max(0, 1 - x) and 1 + x.
    hue: x: it is turned by a uniform fraction of the circle from -x to x.
  """

  brightness: NonNegative = 0.3
  contrast: NonNegative = 0.3
  saturation: NonNegative = 0.3
  hue: Annotated[float, Expect(lambda x: 0 <= x <= 0.5, 'in [0, 0.5]')] = 0.0

  def _change(self, picture, rng):
    kinds = ('Brightness', 'Contrast', 'Color', 'Hue')
    widths = (self.brightness, self.contrast, self.saturation, self.hue)
    for i in rng.permutation(4):
      kind, width = kinds[i], widths[i]
      if width and kind == 'Hue':
        picture = hue(picture, rng.uniform(-width, width))
      elif width:
        factor = rng.uniform(max(1 - width, 0), 1 + width)
        picture = _enhance(picture, factor, kind)
    return picture


@dataclasses.dataclass(frozen=True)
class RandomErasing:
  """Random erasing as in timm: a box is replaced by normal noise.

  timm erases after normalization. Here it comes before, so noise is clipped to
  [0, 255]: with the default mean and deviation, about 4% of it.

  Attributes:
    probability: probability that an image is changed.
    area: bounds of the fraction of the image that is erased; uniform.
    ratio: bounds of the height / width of the box; log-uniform.
    mean, std: noise levels for each channel; default: ImageNet's. Rasters have
      noise of their own mean and deviation.
  """

  probability: Fraction = 0.25
  area: Annotated[tuple[Fraction, Fraction], ORDERED] = (0.02, 1 / 3)
  ratio: Annotated[tuple[Positive, Positive], ORDERED] = (0.3, 1 / 0.3)
  mean: Fill = (124, 116, 104)
  std: Fill = (58, 57, 57)

  def __call__(self, image: np.ndarray, rng: Generator) -> np.ndarray:
    if rng.random() >= self.probability:
      return image
    height, width, channels = image.shape
    for _ in range(10):  # until a box fits
      area = rng.uniform(*self.area) * height * width
      low, high = map(math.log, self.ratio)
      ratio = math.exp(rng.uniform(low, high))
      h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
      if h < height and w < width:
        y, x = rng.integers(height - h + 1), rng.integers(width - w + 1)
        noise = rng.standard_normal((h, w, channels), np.float32)
        if images.is_picture(image):
          fills = [levels(x, channels) for x in (self.mean, self.std)]
          mean, std = np.array(fills, np.float32)
          noise = np.clip(np.rint(mean + std * noise), 0, 255)
        else:  # a raster, whose values have no usual mean
          mean, std = _moments(image)
          noise = mean + std * noise
        image = image.copy()
        image[y : y + h, x : x + w] = noise
        break
    return image


@dataclasses.dataclass(frozen=True)
class ChannelJitter:
  """Random brightness and scale of each channel, of images of any kind.

  Attributes:
    scale: bound of the change of the factor of a channel from 1; uniform.
    shift: bound of what is added, in deviations of the channel; uniform.
  """

  scale: Fraction = 0.2
  shift: NonNegative = 0.2

  def __call__(self, image: np.ndarray, rng: Generator) -> np.ndarray:
    (_, std), channels = _moments(image), image.shape[2]
    factor = rng.uniform(1 - self.scale, 1 + self.scale, channels)
    changed = image * factor + std * rng.uniform(-1, 1, channels) * self.shift
    if image.dtype == np.uint8:
      changed = np.clip(np.rint(changed), 0, 255)
    return changed.astype(image.dtype)


@dataclasses.dataclass(frozen=True)
class ChannelDrop:
  """Channels are missing at random, but never all; LightlyTrain has the idea.

  Values of rasters become NaN, for the model the mean; levels become 0.
  """

  probability: Fraction = 0.1

  def __call__(self, image: np.ndarray, rng: Generator) -> np.ndarray:
    dropped: Any = rng.random(image.shape[2]) < self.probability
    dropped[rng.integers(len(dropped))] &= not dropped.all()
    image = image.copy()
    image[..., dropped] = 0 if image.dtype == np.uint8 else np.nan
    return image


def _moments(image):
  """Return (mean, standard deviation) of each channel, without NaN."""
  known = ~np.isnan(image)
  count = np.maximum(known.sum(axis=(0, 1)), 1)
  mean = np.sum(image, axis=(0, 1), where=known, dtype=np.float32) / count
  square = np.square(image - mean).sum(axis=(0, 1), where=known) / count
  return mean, np.sqrt(square)

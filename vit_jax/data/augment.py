"""Random augmentation: transforms t(image uint8 [H, W, C], rng).

They keep the size of the image, and come after the crop and the flip of
transforms.py. Operations and their strengths have the same distribution as in
the implementation that is named, but are drawn from `rng`.

  RandAugment       of big_vision and AugReg: 16 operations
  TimmRandAugment   of timm and DeiT: 15 operations, see `rand_augment`
  TrivialAugment    "wide", of torchvision: 14 operations
  ThreeAugment      of DeiT III: grey, solarized or blurred
  ColorJitter       of torchvision
  RandomErasing     of timm and DeiT

C is 1 or 3. Operations on colours leave an image with one channel as it is.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from vit_jax.data import operations
from vit_jax.data.transforms import check_bounds
from vit_jax.types import (
  Count,
  Expect,
  Fraction,
  Natural,
  NonNegative,
  Positive,
)

Level = Annotated[int, Expect(lambda n: 0 <= n <= 255, 'in [0, 255]')]
Fill = Level | tuple[Level, Level, Level]

_Kernel = Literal['nearest', 'bilinear', 'bicubic']
_RandomKernel = Literal['random', 'nearest', 'bilinear', 'bicubic']
_Arguments = dict[str, Callable[[float], Any] | None]

# Arguments of operations as functions of the strength; None: no argument. A
# strength of 1 is magnitude 10, or the strongest bin of TrivialAugment. The
# arguments of geometric operations have a random sign.
_SHEAR = ('ShearX', 'ShearY')
_TRANSLATE = ('TranslateX', 'TranslateY')
_ENHANCE = ('Color', 'Contrast', 'Brightness', 'Sharpness')
_WITHOUT: _Arguments = dict.fromkeys(('AutoContrast', 'Equalize', 'Invert'))
_BIG_VISION: _Arguments = {
  **_WITHOUT,
  'Rotate': lambda strength: 30 * strength,
  # TensorFlow shifts by at most 7 bits.
  'Posterize': lambda strength: min(max(int(strength * 4), 1), 8),
  'Solarize': lambda strength: int(strength * 256),
  **dict.fromkeys(_ENHANCE, lambda strength: 1.8 * strength + 0.1),
  **dict.fromkeys(_SHEAR, lambda strength: 0.3 * strength),
  **dict.fromkeys(_TRANSLATE, lambda strength: 100 * strength),
  'Cutout': lambda strength: int(strength * 40),
  'SolarizeAdd': lambda strength: int(strength * 110),
}
_TIMM: _Arguments = {
  **_WITHOUT,
  'Rotate': lambda strength: 30 * strength,
  'Posterize': lambda strength: min(int(strength * 4), 8),
  'Solarize': lambda strength: min(int(strength * 256), 256),
  'SolarizeAdd': lambda strength: min(int(strength * 110), 128),
  **dict.fromkeys(_ENHANCE, lambda strength: 1.8 * strength + 0.1),
  **dict.fromkeys(_SHEAR, lambda strength: 0.3 * strength),
  **dict.fromkeys(_TRANSLATE, lambda strength: strength),  # of `translate`
}
_INCREASING: _Arguments = {
  **_TIMM,
  'Posterize': lambda strength: max(4 - int(strength * 4), 0),
  'Solarize': lambda strength: 256 - min(int(strength * 256), 256),
  **dict.fromkeys(_ENHANCE, lambda strength: 0.9 * strength),  # around 1
}
_TRIVIAL: _Arguments = {
  'Identity': None,
  **dict.fromkeys(_SHEAR, lambda strength: 0.99 * strength),
  **dict.fromkeys(_TRANSLATE, lambda strength: 32 * strength),
  'Rotate': lambda strength: 135 * strength,
  **dict.fromkeys(_ENHANCE, lambda strength: 0.99 * strength),  # around 1
  'Posterize': lambda strength: 8 - round(strength * 6),
  'Solarize': lambda strength: 255 * (1 - strength),
  'AutoContrast': None,
  'Equalize': None,
}


def _arguments(table, name, strength):
  function = table[name]
  return () if function is None else (function(strength),)


def _sign(rng):
  return 1 if rng.random() < 0.5 else -1


@dataclasses.dataclass(frozen=True)
class RandAugment:
  """RandAugment as in big_vision and the code of AugReg.

  Each layer applies one of 16 operations, always. Magnitudes above 10
  extrapolate: (2, 15) and (2, 20) are AugReg's medium and strong levels. Not
  all operations are stronger at larger magnitudes: 4 bits are kept by
  Posterize at 10, and all 8 at 20; Solarize inverts the levels from 230 up at
  9, and none from 10 up; Color, Contrast, Brightness and Sharpness change
  nothing at 5. Magnitude 0 is not without effect.

  Shears leave the upper left corner of the image in place, in big_vision the
  centre of the first pixel, so the results differ by up to half a pixel times
  the shear.

  Attributes:
    num_layers: number of operations applied to an image.
    magnitude: of all operations; 10 is the top of the usual scale.
    faults: reproduce two faults with which published models were trained.
      Contrast scales the distance from H * W / 256, at most 255, instead of
      the distance from the mean luma. The threshold of Solarize is taken modulo
      256, so it inverts the whole image at 10 and 20, and levels from 128 up at
      15.
    fill: level, or one for each channel, of pixels from outside of the image.
  """

  num_layers: Natural = 2
  magnitude: NonNegative = 10.0
  faults: bool = False
  fill: Fill = 128

  names: ClassVar[tuple[str, ...]] = tuple(_BIG_VISION)

  def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    for _ in range(self.num_layers):
      name = self.names[rng.integers(len(self.names))]
      image = self.apply(name, image, rng)
    return image

  def apply(
    self, name: str, image: np.ndarray, rng: np.random.Generator
  ) -> np.ndarray:
    """Apply one of the operations in `names`, at this magnitude."""
    arguments = _arguments(_BIG_VISION, name, self.magnitude / 10)
    if name == 'Cutout':  # a square around a random pixel
      (half,) = arguments
      y, x = (int(rng.integers(side)) for side in image.shape[:2])
      box = y - half, x - half, 2 * half, 2 * half
      return operations.erase(image, box, self.fill)
    if name in operations.GEOMETRY:
      signed = _sign(rng) * arguments[0]
      return operations.GEOMETRY[name](image, signed, 'nearest', self.fill)
    if self.faults and name == 'Solarize':
      arguments = (arguments[0] % 256,)
    if self.faults and name == 'Contrast':
      mean = min(image.shape[0] * image.shape[1] // 256, 255)
      arguments = (*arguments, mean)
    return operations.COLOR[name](image, *arguments)


@dataclasses.dataclass(frozen=True)
class TimmRandAugment:
  """RandAugment as in timm, and so of DeiT; see `rand_augment` for its names.

  Each layer draws one of 15 operations and applies it with `probability`. Its
  magnitude is drawn from a normal distribution and clipped to
  [0, max_magnitude].

  Attributes:
    magnitude: mean of the magnitudes.
    magnitude_std: standard deviation of the magnitudes. Above 100 they are
      uniform between 0 and `magnitude`.
    increasing: larger magnitudes are stronger for all operations, as DeiT has
      it. If False, they are as in RandAugment.
    num_layers: number of draws for an image.
    probability: of applying an operation that was drawn.
    max_magnitude: largest magnitude; 10 is the top of the usual scale.
    translate: fraction of the side by which magnitude 10 moves the image.
    interpolation: of Rotate, Shear and Translate; 'random' draws 'bilinear' or
      'bicubic' each time. DeiT has 'bicubic', timm's training 'random' by
      default.
    fill: level, or one for each channel, of pixels from outside of the image.
      timm's training takes the mean by which images are normalized:
      (124, 116, 104) for ImageNet's, 128 for 0.5.
  """

  magnitude: NonNegative = 9.0
  magnitude_std: NonNegative = 0.5
  increasing: bool = True
  num_layers: Natural = 2
  probability: Fraction = 0.5
  max_magnitude: Positive = 10.0
  translate: Fraction = 0.45
  interpolation: _RandomKernel = 'random'
  fill: Fill = 128

  names: ClassVar[tuple[str, ...]] = tuple(_TIMM)

  def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    for _ in range(self.num_layers):
      name = self.names[rng.integers(len(self.names))]
      if rng.random() < self.probability:
        image = self.apply(name, image, rng)
    return image

  def apply(
    self, name: str, image: np.ndarray, rng: np.random.Generator
  ) -> np.ndarray:
    """Apply one of the operations in `names`, at a random magnitude."""
    table = _INCREASING if self.increasing else _TIMM
    arguments = _arguments(table, name, self._magnitude(rng) / 10)
    if name in operations.GEOMETRY:
      argument = _sign(rng) * arguments[0]
      if name in _TRANSLATE:
        side = image.shape[1 if name == 'TranslateX' else 0]
        argument *= self.translate * side
      kernel: str = self.interpolation
      if kernel == 'random':
        kernel = ('bilinear', 'bicubic')[rng.integers(2)]
      return operations.GEOMETRY[name](image, argument, kernel, self.fill)
    if self.increasing and name in _ENHANCE:
      arguments = (max(1 + _sign(rng) * arguments[0], 0.1),)
    return operations.COLOR[name](image, *arguments)

  def _magnitude(self, rng):
    drawn = self.magnitude
    if self.magnitude_std > _UNIFORM:
      drawn = rng.uniform(0, self.magnitude)
    elif self.magnitude_std:
      drawn = rng.normal(self.magnitude, self.magnitude_std)
    return min(max(drawn, 0), self.max_magnitude)


_UNIFORM = 100  # a standard deviation above stands for uniform magnitudes
_SECTIONS = {  # of timm's names, and the fields
  'm': 'magnitude',
  'mstd': 'magnitude_std',
  'mmax': 'max_magnitude',
  'n': 'num_layers',
  'p': 'probability',
  'inc': 'increasing',
}


def rand_augment(policy: str, **fields: Any) -> TimmRandAugment:
  """Return the RandAugment that timm has under a name.

  DeiT's name is 'rand-m9-mstd0.5-inc1'. Sections that the name does not contain
  are as in timm: magnitude 10, without deviation, not increasing, two layers,
  each applied with probability 0.5.

  Args:
    policy: 'rand', then sections joined by '-': m (magnitude), mstd (standard
      deviation; above 100: uniform), mmax (largest magnitude), n (number of
      layers), p (probability of each layer), inc (0 or 1), each followed by its
      number.
    **fields: other fields of TimmRandAugment, such as `interpolation`, `fill`.

  Raises:
    ValueError: the name has another form, or a field is given twice.
  """
  kind, *sections = policy.split('-')
  pattern = rf'({"|".join(_SECTIONS)})(\d*\.?\d+)'
  found = [re.fullmatch(pattern, section) for section in sections]
  named = {_SECTIONS[x[1]]: float(x[2]) for x in found if x}
  if kind != 'rand' or len(named) < len(sections):
    raise ValueError(
      f'policy={policy!r} is not a RandAugment of timm. Expected rand and '
      f'sections of {", ".join(_SECTIONS)}, each at most once and with a '
      "number, as in 'rand-m9-mstd0.5-inc1'."
    )
  if twice := sorted(named.keys() & fields.keys()):
    raise ValueError(
      f'policy={policy!r} contains {", ".join(twice)}, which is also given as '
      'a field. Leave one of them out.'
    )
  values: dict[str, Any] = (
    dict(magnitude=10, magnitude_std=0, increasing=0) | named
  )
  values['increasing'] = values['increasing'] > 0
  if 'num_layers' in values:
    values['num_layers'] = int(values['num_layers'])
  return TimmRandAugment(**values, **fields)


@dataclasses.dataclass(frozen=True)
class TrivialAugment:
  """TrivialAugment, "wide", as in torchvision.

  One of 14 operations, at one of `num_bins` equally spaced strengths.

  Attributes:
    num_bins: number of strengths, from none to the strongest.
    interpolation: of Rotate, Shear and Translate.
    fill: level, or one for each channel, of pixels from outside of the image.
  """

  num_bins: Annotated[int, Expect(lambda n: n >= 2, 'at least 2')] = 31
  interpolation: _Kernel = 'nearest'
  fill: Fill = 0

  names: ClassVar[tuple[str, ...]] = tuple(_TRIVIAL)

  def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    name = self.names[rng.integers(len(self.names))]
    strength = rng.integers(self.num_bins) / (self.num_bins - 1)
    return self.apply(name, image, rng, strength)

  def apply(
    self,
    name: str,
    image: np.ndarray,
    rng: np.random.Generator,
    strength: float,
  ) -> np.ndarray:
    """Apply one of the operations in `names`, at a strength from 0 to 1."""
    if name == 'Identity':
      return image
    arguments = _arguments(_TRIVIAL, name, strength)
    if name in operations.GEOMETRY:
      argument = _sign(rng) * arguments[0]
      if name in _TRANSLATE:
        argument = int(argument)
      return operations.GEOMETRY[name](
        image, argument, self.interpolation, self.fill
      )
    if name in _ENHANCE:
      arguments = (1 + _sign(rng) * arguments[0],)
    return operations.COLOR[name](image, *arguments)


@dataclasses.dataclass(frozen=True)
class ThreeAugment:
  """3-Augment of DeiT III: grey, solarized or blurred, with equal probability.

  DeiT III has ColorJitter() after it.

  Attributes:
    threshold: levels from it up are inverted by solarizing.
    radius: bounds of the standard deviation of the blur, in pixels; uniform.
  """

  threshold: Annotated[int, Expect(lambda n: 0 <= n <= 256, 'in [0, 256]')] = (
    128
  )
  radius: tuple[NonNegative, NonNegative] = (0.1, 2.0)

  def __post_init__(self) -> None:
    check_bounds(self, 'radius')

  def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    kind = rng.integers(3)
    if kind == 0:
      return operations.grey(image)
    if kind == 1:
      return operations.solarize(image, self.threshold)
    return operations.blur(image, rng.uniform(*self.radius))


@dataclasses.dataclass(frozen=True)
class ColorJitter:
  """Changes of brightness, contrast, saturation and hue, in random order.

  A factor of 1 changes nothing. The defaults are those of DeiT III.

  Attributes:
    brightness, contrast, saturation: x: the factor is uniform between
      max(0, 1 - x) and 1 + x.
    hue: x: the hue is turned by a uniform fraction of the circle between -x
      and x.
  """

  brightness: NonNegative = 0.3
  contrast: NonNegative = 0.3
  saturation: NonNegative = 0.3
  hue: Annotated[float, Expect(lambda x: 0 <= x <= 0.5, 'in [0, 0.5]')] = 0.0

  def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    changes: tuple[tuple[operations.Operation, float], ...] = (
      (operations.brightness, self.brightness),
      (operations.contrast, self.contrast),
      (operations.color, self.saturation),
    )
    for i in rng.permutation(4):
      if i < 3:
        operation, width = changes[i]
        if width:
          factor = rng.uniform(max(1 - width, 0), 1 + width)
          image = operation(image, factor)
      elif self.hue:
        image = operations.hue(image, rng.uniform(-self.hue, self.hue))
    return image


@dataclasses.dataclass(frozen=True)
class RandomErasing:
  """Random erasing as in timm: boxes are replaced by noise.

  timm erases after normalization. Here it comes before, so noise is clipped to
  [0, 255]: with the default mean and deviation, about 4% of it.

  Attributes:
    probability: that an image is changed.
    area: bounds of the fraction of the image that is erased; uniform.
    ratio: bounds of the height / width of a box; log-uniform.
    mode: 'pixel': normal noise for each pixel and channel. 'rand': one normal
      colour for each box. 'const': the mean.
    count: the number of boxes is uniform from 1 to it. They share the area.
    mean, std: of the noise, in levels, for each channel; the defaults are
      ImageNet's.
  """

  probability: Fraction = 0.25
  area: tuple[Fraction, Fraction] = (0.02, 1 / 3)
  ratio: tuple[Positive, Positive] = (0.3, 1 / 0.3)
  mode: Literal['pixel', 'rand', 'const'] = 'pixel'
  count: Count = 1
  mean: Fill = (124, 116, 104)
  std: Fill = (58, 57, 57)

  def __post_init__(self) -> None:
    check_bounds(self, 'area', 'ratio')

  def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if rng.random() >= self.probability:
      return image
    count = int(rng.integers(self.count)) + 1
    for _ in range(count):
      box = self._box(image.shape, count, rng)
      if box is not None:
        noise = self._noise((*box[2:], image.shape[2]), rng)
        image = operations.erase(image, box, noise)
    return image

  def _box(self, shape, count, rng):
    """Return a box (y, x, height, width) in the image; None if none fits."""
    height, width = shape[:2]
    for _ in range(10):
      area = rng.uniform(*self.area) * height * width / count
      ratio = math.exp(rng.uniform(*map(math.log, self.ratio)))
      h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
      if h < height and w < width:
        y, x = rng.integers(height - h + 1), rng.integers(width - w + 1)
        return int(y), int(x), h, w
    return None

  def _noise(self, shape, rng):
    channels = shape[-1]
    mean = np.array(operations.levels(self.mean, channels), np.float32)
    std = np.array(operations.levels(self.std, channels), np.float32)
    drawn = {'pixel': shape, 'rand': (1, 1, channels), 'const': ()}[self.mode]
    noise = rng.standard_normal(drawn, np.float32) if drawn else np.float32(0)
    return np.clip(np.rint(mean + std * noise), 0, 255).astype(np.uint8)

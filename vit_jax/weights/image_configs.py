"""Image preprocessing in the JSON of timm and Hugging Face, both ways.

An image is resized to `large`, a (height, width) or the shorter side; its
centre is cropped to the model's size; the model gets (x * factor - mean) / std.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.data.rasters import Raster
from vit_jax.data.transforms import CentralCrop, Resize, ResizeSmall
from vit_jax.models.dense import Normalize, Standardize
from vit_jax.types import Shape, Size, UserError
from vit_jax.weights.bundle import Weights

_ANTIALIASED = ('bilinear', 'bicubic', 'lanczos')
# timm's and Pillow's interpolations in our terms; 'random' is of training.
_INTERPOLATIONS = {x: x for x in (*_ANTIALIASED, 'nearest')}
_INTERPOLATIONS |= {'box': 'area', 'random': 'bilinear'}
# As in timm's pretrained_cfg.
IMAGENET = {'mean': (0.485, 0.456, 0.406), 'std': (0.229, 0.224, 0.225)}
OPENAI = {
  'mean': (0.48145466, 0.4578275, 0.40821073),
  'std': (0.26862954, 0.26130258, 0.27577711),
  'crop_pct': 1.0,
}


def choose(table: Mapping[Any, Any], name: Any, what: str) -> Any:
  """Return table[name]; raise ValueError if there is no such name."""
  if name not in table:
    raise UserError(
      f'The config has {what}={name!r}; supported: {", ".join(table)}.'
    )
  return table[name]


def use(
  image_shape: Shape,
  large: Size,
  interpolation: str,
  mean: Sequence[float],
  std: Sequence[float],
  *,
  factor: float | None = None,
  torchvision: bool = False,
) -> dict[str, Any]:
  """Return the arguments `preprocess` and `transforms` of Weights.

  Sides are rounded down. `torchvision` says whether offsets are rounded as it
  does. If there are as many means as other channels, their average is used. By
  default `factor` is 1 / 255 for 1 or 3 channels, and 1 for rasters.
  """
  height, width, channels = image_shape
  method = choose(_INTERPOLATIONS, interpolation, 'interpolation')
  smooth = method in _ANTIALIASED
  resize: Any = Resize(large, method, smooth)
  if isinstance(large, int):
    resize = ResizeSmall(large, method, smooth, 'down')
  crop = CentralCrop((height, width), 'even' if torchvision else 'down')

  is_raster = channels not in (1, 3)
  factor = factor or (1.0 if is_raster else 1 / 255)

  def scaled(values):
    if len(values) != channels:
      values = [sum(values) / len(values)] * channels
    return tuple(_round(value / factor) for value in values)

  mean, std = scaled(mean), scaled(std)
  preprocess: Any = Standardize(tuple(zip(mean, std)))
  if not is_raster:
    mean, std = (x[0] if len(set(x)) == 1 else x for x in (mean, std))
    preprocess = Normalize(mean, std)
  return {
    'preprocess': preprocess,
    'transforms': (resize,) if large == (height, width) else (resize, crop),
  }


def _round(value):
  return float(f'{value:.12g}')  # 0.5 * 255 must be 127.5


def describe(
  weights: Weights,
) -> tuple[Size, str, list[float], list[float]]:
  """Return (large, interpolation, mean, std), the inverse of `use`.

  Mean and std have one number per channel, for pixels in 0..1. Transforms that
  cannot be expressed like this are added to weights.notes; preprocessing that
  is not a Normalize raises UserError.
  """
  preprocess, channels = weights.preprocess, weights.image_shape[2]
  is_raster = weights.decode.dtype != 'uint8'
  if not isinstance(preprocess, Normalize | Standardize):
    raise UserError(
      f'Preprocessing is {preprocess}; the format has only a mean and a std. '
      'Use --format=vit_jax or stablehlo instead.'
    )
  if is_raster and channels in (1, 3):
    raise UserError(
      f'Images have {channels} channels in the values of their files, which '
      'readers of the format would take for levels 0 to 255.'
    )
  most = 1 if is_raster else 255
  mean, std = (
    [_round(value / most) for value in np.broadcast_to(x, channels).tolist()]
    for x in (preprocess.mean, preprocess.std)
  )
  if is_raster:
    weights.notes.append(
      '  mean and std are those of the values of the files, not of pixels in '
      '0..1'
    )
    if weights.decode != Raster(channels):
      weights.notes.append(
        f'  files will be read by Raster({channels}): the format cannot '
        f'express {weights.decode}'
      )
  size = weights.image_shape[:2]
  first: Any
  first, *rest = [*weights.transforms] or [Resize(size)]
  crops = [type(x) is CentralCrop and x.size == size for x in rest]
  keeps_aspect = type(first) is ResizeSmall and crops and size[0] == size[1]
  squashes = type(first) is Resize and (crops or first.size == size)
  if weights.keeps_aspect:
    first, squashes = Resize(size, first.interpolation, first.antialias), True
  if crops not in ([], [True]) or not (keeps_aspect or squashes):
    weights.notes.append(
      f'  images will be resized to {size[0]}x{size[1]}: the format cannot '
      f'express {weights.transforms}'
    )
    first = Resize(size)
  ours = first.interpolation
  theirs = 'bilinear' if ours == 'area' else ours
  if ours == 'area' or not (first.antialias or ours == 'nearest'):
    weights.notes.append(
      f"  images will be resized by antialiased {theirs}, as the format's "
      f'readers do; here it was {ours} without antialiasing. Predictions may '
      'change, the more so the larger the images are'
    )
  return first.size, theirs, mean, std

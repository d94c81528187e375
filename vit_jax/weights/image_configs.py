"""Image preprocessing in the JSON of timm and Hugging Face, both ways."""

from collections.abc import Mapping
from typing import Any

from vit_jax.data.transforms import CentralCrop, Resize, ResizeSmall
from vit_jax.models.layers import Normalize, as_pair
from vit_jax.types import UserError

# timm's and Pillow's interpolations in our terms; only 'area' does not need
# antialiasing.
INTERPOLATIONS = {
  'bilinear': {'interpolation': 'bilinear', 'antialias': True},
  'bicubic': {'interpolation': 'bicubic', 'antialias': True},
  'lanczos': {'interpolation': 'lanczos', 'antialias': True},
  'nearest': {'interpolation': 'nearest'},
  'box': {'interpolation': 'area'},
  'random': {'interpolation': 'bilinear', 'antialias': True},  # in training
}


def choose(table: Mapping[Any, Any], name: Any, what: str) -> Any:
  """Return table[name]; raise ValueError if there is no such name."""
  if name not in table:
    raise UserError(
      f'The config has {what}={name!r}; supported: {", ".join(table)}.'
    )
  return table[name]


def normalize(mean: Any, std: Any, factor: float, channels: int) -> Normalize:
  """Return the Normalize that equals (image * factor - mean) / std.

  If there are as many numbers as other channels, their average is used.
  """

  def adapted(values):
    if len(values) != channels:
      values = [sum(values) / len(values)]
    values = tuple(_round(value / factor) for value in values)
    return values[0] if len(set(values)) == 1 else values

  return Normalize(adapted(mean), adapted(std))


def mean_and_std(
  preprocess: Any, channels: int, factor: float
) -> tuple[list[float], list[float]]:
  """Return two lists with one number per channel; the inverse of `normalize`.

  Raises:
    ValueError: the model's preprocessing is not a Normalize.
  """
  if not isinstance(preprocess, Normalize):
    raise UserError(
      f'The preprocessing is {preprocess}; the format has only a mean and a '
      'std. Use --format=vit_jax or stablehlo instead.'
    )

  def listed(value):
    values = list(value) if isinstance(value, list | tuple) else [value]
    values = values * (channels if len(values) == 1 else 1)
    return [_round(v * factor) for v in values]

  return listed(preprocess.mean), listed(preprocess.std)


def _round(value):
  return float(f'{value:.12g}')  # 0.5 * 255 must be 127.5


def describe(weights: Any) -> tuple[tuple[int, int], bool, str]:
  """Return (large, keeps_aspect, interpolation) of the transforms.

  An image is resized to `large` (height, width), or its shorter side to
  that, and then cropped at its centre to the model's size. Whatever cannot be
  expressed like this is added to weights.notes.
  """
  image_size = tuple(weights.image_shape[:2])
  first, *rest = [*weights.transforms] or [Resize(image_size)]
  crops = len(rest) == 1 and (
    type(rest[0]) is CentralCrop and as_pair(rest[0].size) == image_size
  )
  keeps_aspect = (
    type(first) is ResizeSmall and crops and image_size[0] == image_size[1]
  )
  resizes = type(first) is Resize and (
    crops or (not rest and as_pair(first.size) == image_size)
  )
  if not keeps_aspect and not resizes:
    weights.notes.append(
      f'  images will be resized to {image_size[0]}x{image_size[1]}: the '
      f'format cannot express {weights.transforms}'
    )
    first = Resize(image_size)
  ours = first.interpolation
  theirs = 'bilinear' if ours == 'area' else ours
  if ours == 'area' or not (first.antialias or ours == 'nearest'):
    weights.notes.append(
      f"  images will be resized by antialiased {theirs}, as the format's "
      f'readers do; here it was {ours} without antialiasing'
    )
  return as_pair(first.size), keeps_aspect, theirs

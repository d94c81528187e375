"""Image preprocessing in the JSON of other formats, read and written.

These files come from others, so every value is checked before it is used.
"""

import math
from collections.abc import Mapping
from typing import Any

from vit_jax.data.transforms import CentralCrop, Resize, ResizeSmall
from vit_jax.models.layers import as_pair
from vit_jax.preprocess import Normalize

_LARGEST = 2**15  # side of an image; a mistake must not cost all memory
# timm's and Pillow's interpolations in our terms; only 'area' does not need
# antialiasing.
_METHODS = {
  'bilinear': {'interpolation': 'bilinear', 'antialias': True},
  'bicubic': {'interpolation': 'bicubic', 'antialias': True},
  'lanczos': {'interpolation': 'lanczos', 'antialias': True},
  'nearest': {'interpolation': 'nearest'},
  'box': {'interpolation': 'area'},
}


def item(config: Mapping[str, Any], key: str, kind: Any) -> Any:
  """Return config[key] or None; raise ValueError if it has another type."""
  if not isinstance(config, dict):
    raise ValueError(f'The config is {config!r:.80}, not a JSON object.')
  value = config.get(key)
  if value is not None and not isinstance(value, kind):
    raise ValueError(
      f'The config has {key}={value!r:.80}; expected a {kind.__name__}.'
    )
  return value


def choose(table: Mapping[Any, Any], name: Any, what: str) -> Any:
  """Return table[name]; raise ValueError if there is no such name."""
  if not isinstance(name, str) or name not in table:
    raise ValueError(
      f'The config has {what}={name!r:.80}; expected one of {", ".join(table)}.'
    )
  return table[name]


def size(value: Any, what: str) -> int:
  """Return `value` if it is a valid image size, else raise ValueError."""
  if type(value) is not int or not 0 < value <= _LARGEST:
    raise ValueError(
      f'The config has {what}={value!r:.80}; expected 1 to {_LARGEST}.'
    )
  return value


def sides(value: Any, what: str) -> tuple[int, int]:
  """Return (height, width) of one image size or two."""
  two = isinstance(value, list | tuple) and len(value) == 2
  height, width = value if two else (value, value)
  return size(height, what), size(width, what)


def activation(name: Any) -> str:
  """Return 'softmax' or 'sigmoid'; None means softmax."""
  table = {'softmax': 'softmax', 'sigmoid': 'sigmoid'}
  return choose(table, 'softmax' if name is None else name, 'activation')


def class_names(value: Any) -> list[str] | None:
  """Return a list of class names, or None."""
  if value is None:
    return None
  if isinstance(value, list | tuple) and all(isinstance(v, str) for v in value):
    return list(value)
  raise ValueError(
    f'The class names are {value!r:.80}; expected a list of str.'
  )


def interpolation(name: Any) -> dict[str, Any]:
  """Return arguments of our resizing transforms for another format's name."""
  # timm's 'random' is for training.
  name = 'bilinear' if name == 'random' else name
  return choose(_METHODS, name, 'interpolation')


def normalize(mean: Any, std: Any, factor: float, channels: int) -> Normalize:
  """Return the Normalize that equals (image * factor - mean) / std.

  If there are as many numbers as other channels, their average is used.
  """
  if type(factor) not in (int, float) or not 0 < factor < math.inf:
    raise ValueError(f'The config has rescale_factor={factor!r:.80}.')
  found = {}
  for name, values in (('mean', mean), ('std', std)):
    is_list = isinstance(values, list | tuple) and len(values) > 0
    if (
      not is_list
      or not all(isinstance(v, int | float) and v >= 0 for v in values)
      or (name == 'std' and 0 in values)
    ):
      raise ValueError(
        f'The config has {name}={values!r:.80}; expected numbers.'
      )
    if len(values) != channels:
      values = [sum(values) / len(values)]
    values = tuple(_round(v / factor) for v in values)
    found[name] = values[0] if len(set(values)) == 1 else values
  return Normalize(**found)


def mean_and_std(
  preprocess: Any, channels: int, factor: float
) -> tuple[list[float], list[float]]:
  """Return two lists with one number per channel; the inverse of `normalize`.

  Raises:
    ValueError: the model's preprocessing is not a Normalize.
  """
  if not isinstance(preprocess, Normalize):
    raise ValueError(
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

"""Preprocessing of pictures in the words of other formats, there and back.

Also: reading the JSON of others, in which nothing can be taken for granted.
"""

import math

from vit_jax.weights import grids
from vit_jax.weights.bundle import NORMALIZE, TRANSFORMS

_RESIZE, _SMALL, _CROP = (
  f'{TRANSFORMS}{name}' for name in ('Resize', 'ResizeSmall', 'CentralCrop')
)
_LARGEST = 2**15  # side of a picture; a mistake must not cost all memory
# Interpolations of timm and Pillow by ours, which are antialiased but 'area'.
_METHODS = {
  'bilinear': {'interpolation': 'bilinear', 'antialias': True},
  'bicubic': {'interpolation': 'bicubic', 'antialias': True},
  'lanczos': {'interpolation': 'lanczos', 'antialias': True},
  'nearest': {'interpolation': 'nearest'},
  'box': {'interpolation': 'area'},
}


def item(config, key, kind):
  """config[key], or None; a ValueError if it is of another kind."""
  if not isinstance(config, dict):
    raise ValueError(f'The config is {config!r:.80}, not a JSON object.')
  value = config.get(key)
  if value is not None and not isinstance(value, kind):
    raise ValueError(
      f'The config has {key}={value!r:.80}, which should be a {kind.__name__}.'
    )
  return value


def choose(table, name, what):
  """table[name]; a ValueError if there is no such name."""
  if not isinstance(name, str) or name not in table:
    raise ValueError(
      f'The config has {what}={name!r:.80}; there are {", ".join(table)} here.'
    )
  return table[name]


def number(value, what):
  """It, if it is a whole number that a size can be; else a ValueError."""
  if type(value) is not int or not 0 < value <= _LARGEST:
    raise ValueError(
      f'The config has {what}={value!r:.80}; expected 1 to {_LARGEST}.'
    )
  return value


def sides(value, what):
  """(height, width) of one number or of two; else a ValueError."""
  two = isinstance(value, list | tuple) and len(value) == 2
  return tuple(number(v, what) for v in (value if two else (value, value)))


def _are_numbers(values):
  """Whether it is a list of numbers above or equal 0, and not empty."""
  return (
    isinstance(values, list | tuple)
    and len(values) > 0
    and all(isinstance(v, int | float) and v >= 0 for v in values)
  )


def activation(name):
  """Of the outputs; softmax where it is not said."""
  table = {'softmax': 'softmax', 'sigmoid': 'sigmoid'}
  return choose(table, 'softmax' if name is None else name, 'activation')


def names(value):
  """A list of class names, or None."""
  if value is None:
    return None
  if isinstance(value, list | tuple) and all(isinstance(v, str) for v in value):
    return list(value)
  raise ValueError(f'The class names are {value!r:.80}, not a list of names.')


def resize(size, method):
  """Settings of Resize, for an interpolation of theirs."""
  return {'target': _RESIZE, 'size': list(sides(size, 'size'))} | _method(
    method
  )


def resize_small(size, method):
  """Settings of ResizeSmall."""
  return {'target': _SMALL, 'size': number(size, 'size')} | _method(method)


def crop(size):
  """Settings of CentralCrop."""
  return {'target': _CROP, 'size': list(sides(size, 'size'))}


def _method(method):
  # 'random' is one of timm's, for training.
  name = 'bilinear' if method == 'random' else method
  return choose(_METHODS, name, 'interpolation')


def normalize(mean, std, factor, channels):
  """Settings of Normalize that equal (image * factor - mean) / std.

  Where there are as many numbers as other channels, their average is taken.
  """
  if type(factor) not in (int, float) or not 0 < factor < math.inf:
    raise ValueError(f'The config has rescale_factor={factor!r:.80}.')
  found = {'target': NORMALIZE}
  for name, values in (('mean', mean), ('std', std)):
    if not _are_numbers(values) or (name == 'std' and 0 in values):
      raise ValueError(
        f'The config has {name}={values!r:.80}; expected numbers.'
      )
    if len(values) != channels:
      values = [sum(values) / len(values)]
    values = [_round(v / factor) for v in values]
    found[name] = values[0] if len(set(values)) == 1 else values
  return found


def mean_std(preprocess, channels, factor):
  """Two lists, one number per channel: inverse of `normalize`.

  Raises:
    ValueError: the model's preprocessing is not of that kind.
  """
  if preprocess['target'] != NORMALIZE:
    raise ValueError(
      f'The preprocessing is {preprocess["target"]}, and the format has a mean '
      'and a std only. Write npz or StableHLO.'
    )
  found = []
  for name in ('mean', 'std'):
    value = preprocess.get(name, 127.5)
    values = list(value) if isinstance(value, list | tuple) else [value]
    values = values * (channels if len(values) == 1 else 1)
    found.append([_round(v * factor) for v in values])
  return found


def _round(value):
  return float(f'{value:.12g}')  # 0.5 * 255 shall be 127.5


def describe(weights):
  """What is done to a picture: {'large', 'keeps_aspect', 'interpolation'}.

  A picture is resized to `large` (height, width), or its shorter side to
  that, and then the image is cut out of its centre. What is lost by saying it
  so is added to weights.notes.
  """
  size = weights.image_shape[:2]
  steps = list(weights.transforms)
  crops = (
    len(steps) == 2
    and steps[1]['target'] == _CROP
    and grids.pair(steps[1]['size']) == tuple(size)
  )
  first = steps[0] if steps else resize(size, 'bilinear')
  large = first.get('size')
  keeps_aspect = first['target'] == _SMALL and crops and size[0] == size[1]
  fits = large is not None and (
    crops or (len(steps) < 2 and grids.pair(large) == tuple(size))
  )
  if not keeps_aspect and not (first['target'] == _RESIZE and fits):
    weights.notes.append(
      f'  pictures will be resized to {size[0]}x{size[1]}, as the format '
      f'cannot say {steps}'
    )
    first, large = resize(size, 'bilinear'), size
  return {
    'large': grids.pair(large),
    'keeps_aspect': keeps_aspect,
    'interpolation': _theirs(first, weights.notes),
  }


def _theirs(step, notes):
  default = 'area' if step['target'] == _SMALL else 'bilinear'
  ours = step.get('interpolation', default)
  method = 'bilinear' if ours == 'area' else ours
  if ours == 'area' or not (step.get('antialias') or ours == 'nearest'):
    notes.append(
      f"  pictures will be resized by antialiased {method}, as the format's "
      f'readers do, where it was {ours} without'
    )
  return method

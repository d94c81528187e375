"""How PyTorch stores the layers that our models have, there and back.

A layout is a list of Parts, one for each array of ours. From it follow what
arrays a file must hold, and of what shape: whatever differs is one error.
Shapes: D width, h heads of width d, as in models/vit.py.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np

from vit_jax import tree


@dataclasses.dataclass(frozen=True)
class Part:
  """An array of ours, and where it is found.

  Attributes:
    theirs: name in the file.
    ours: path of ours.
    shape: of theirs.
    axes: that transpose theirs to ours, None for none.
    ours_shape: that the result is reshaped to, None for what it has.
    slot: (index, count), if theirs are `count` such arrays, along axis 0.
  """

  theirs: str
  ours: str
  shape: tuple[int, ...]
  axes: tuple[int, ...] | None = None
  ours_shape: tuple[int, ...] | None = None
  slot: tuple[int, int] = (0, 1)


def same(theirs, ours, *shape):
  """An array that is stored alike."""
  return [Part(theirs, ours, shape)]


def linear(theirs, ours, inputs, outputs, slot=(0, 1)):
  """A matrix and a bias; inputs and outputs are tuples of sizes."""
  n, m = math.prod(inputs), math.prod(outputs)
  shape = m * slot[1], n
  kernel = *inputs, *outputs
  return [
    Part(f'{theirs}.weight', f'{ours}/kernel', shape, (1, 0), kernel, slot),
    Part(f'{theirs}.bias', f'{ours}/bias', shape[:1], None, outputs, slot),
  ]


def conv(theirs, ours, size, inputs, outputs, *, bias=False):
  """A convolution of (height, width) pixels."""
  shape = outputs, inputs, *size
  parts = [Part(f'{theirs}.weight', f'{ours}/kernel', shape, (2, 3, 1, 0))]
  if bias:
    parts.append(Part(f'{theirs}.bias', f'{ours}/bias', (outputs,)))
  return parts


def norm(theirs, ours, width):
  """LayerNorm or GroupNorm."""
  return [
    Part(f'{theirs}.weight', f'{ours}/scale', (width,)),
    Part(f'{theirs}.bias', f'{ours}/bias', (width,)),
  ]


def mlp(theirs, ours, width, hidden):
  """The two layers fc1 and fc2."""
  return [
    *linear(f'{theirs}.fc1', f'{ours}/fc1', (width,), (hidden,)),
    *linear(f'{theirs}.fc2', f'{ours}/fc2', (hidden,), (width,)),
  ]


def to_ours(arrays: Mapping[str, np.ndarray], parts, *, what, why=''):
  """{path: float32 array} of ours.

  Args:
    arrays: all that the file holds, and nothing else.
    parts: of the model that it should hold.
    what: the model in words, for the error.
    why: to add to the error, where what is the matter is known.

  Raises:
    ValueError: there are more arrays, fewer, or of other shapes.
  """
  expected = {p.theirs: np.broadcast_to(0.0, p.shape) for p in parts}
  if lines := tree.diff(arrays, expected):
    raise ValueError(
      f'The file does not hold {what}{": " if why else ""}{why}. In the file '
      f'(-), needed (+):\n{lines}'
    )
  out = {}
  for part in parts:
    array = np.asarray(arrays[part.theirs], np.float32)
    index, count = part.slot
    rows = array.shape[0] // count if count > 1 else None
    if rows:
      array = array[index * rows : (index + 1) * rows]
    if part.axes:
      array = array.transpose(part.axes)
    shape = part.ours_shape or array.shape
    out[part.ours] = np.ascontiguousarray(array).reshape(shape)
  return out


def to_theirs(params: Mapping[str, np.ndarray], parts):
  """{name: float32 array} of theirs; inverse of `to_ours`.

  Raises:
    ValueError: the parameters are not those that the parts name.
  """
  check_all({part.ours for part in parts}, params)
  slots = {}
  for part in parts:
    array = np.asarray(params[part.ours], np.float32)
    if part.axes:
      shape = _one_slot(part)
      array = array.reshape([shape[axis] for axis in part.axes])
      array = array.transpose(np.argsort(part.axes))
    array = array.reshape(_one_slot(part))
    slots.setdefault(part.theirs, {})[part.slot[0]] = array
  out = {}
  for name, arrays in slots.items():
    array = np.concatenate([arrays[i] for i in sorted(arrays)])
    out[name] = np.ascontiguousarray(array)
  return out


def _one_slot(part):
  return part.shape[0] // part.slot[1], *part.shape[1:]


def check_all(written, params):
  """Raises ValueError unless parameters of ours are all written."""
  if wrong := sorted(written ^ params.keys()):
    raise ValueError(
      'The parameters do not fit the settings of the model; one of the two '
      f'has, and the other has not: {", ".join(wrong[:8])}.'
    )


def shape_of(arrays, pattern, ndim):
  """Shape of the first array of so many axes, not empty, whose name matches.

  Raises:
    ValueError: there is none.
  """
  for name in sorted(arrays):
    shape = arrays[name].shape
    if re.fullmatch(pattern, name) and len(shape) == ndim and 0 not in shape:
      return shape
  raise ValueError(
    f'The file has no array whose name is like {pattern!r}, with {ndim} axes; '
    f'it has {", ".join(sorted(arrays)[:8])}, .... Is it whole?'
  )


def count(arrays, pattern):
  """1 + the largest number that group 1 of a pattern finds in a name."""
  found = (re.match(pattern, name) for name in arrays)
  numbers = {int(m[1]) for m in found if m}
  # Nobody has more layers than arrays: such a number is one of the mistakes.
  return min(1 + max(numbers, default=-1), len(arrays))

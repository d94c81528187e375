"""Key maps: one table per format that is used to read and to write.

A row gives the name of an array in the file, our path of the same array, and
how the two layouts differ:

    Key('blocks.{i}.norm1.weight', 'block_{i}/norm1/scale')
    *linear('blocks.{i}.attn.qkv', 'block_{i}/attn/query|key|value')

`{x}` stands for one part of the name, the same on both sides; `{x+1}` for the
number that is one larger. Several of our paths, separated by '|' in the last
layer name, are concatenated along the first axis of one array in the file.
"""

import dataclasses
import functools
import re
from collections.abc import Callable

import numpy as np

from vit_jax import tree


def _same(array):
  return array


def _flat(array):
  return array.reshape(-1)


@dataclasses.dataclass(frozen=True)
class Key:
  """A row of a key map.

  Attributes:
    theirs: name in the file, with placeholders.
    ours: our path, with the same placeholders; or several with '|'.
    to_ours: array in the file -> our array; its axes may still be merged.
    to_theirs: our array -> array in the file.
    ndim: number of axes of the array in the file, None for any.
  """

  theirs: str
  ours: str
  to_ours: Callable = _same
  to_theirs: Callable = _same
  ndim: int | None = None

  @property
  def paths(self):
    """Our paths: 'a/b|c/kernel' -> ['a/b/kernel', 'a/c/kernel']."""
    parts = [part.split('|') for part in self.ours.split('/')]
    count = max(map(len, parts))
    return ['/'.join(p[i % len(p)] for p in parts) for i in range(count)]


def linear(theirs, ours, *, merge_inputs=False):
  """Return the rows of a matrix [out, in] and its bias, as PyTorch stores them.

  Our kernels may have several axes for the inputs (merge_inputs) or for the
  outputs: attention has [D, heads, head_dim] and [heads, head_dim, D].
  """

  def to_theirs(kernel):
    merged = (-1, kernel.shape[-1]) if merge_inputs else (kernel.shape[0], -1)
    return kernel.reshape(merged).T

  return [
    Key(f'{theirs}.weight', f'{ours}/kernel', np.transpose, to_theirs, ndim=2),
    Key(f'{theirs}.bias', f'{ours}/bias', to_theirs=_flat),
  ]


def conv(theirs, ours):
  """Return the rows of a convolution [out, in, height, width] and its bias."""
  return [
    Key(
      f'{theirs}.weight',
      f'{ours}/kernel',
      lambda x: x.transpose(2, 3, 1, 0),
      lambda x: x.transpose(3, 2, 0, 1),
      ndim=4,
    ),
    Key(f'{theirs}.bias', f'{ours}/bias'),
  ]


def norm(theirs, ours):
  """Return the rows of a LayerNorm or GroupNorm."""
  return [
    Key(f'{theirs}.weight', f'{ours}/scale'),
    Key(f'{theirs}.bias', f'{ours}/bias'),
  ]


def to_ours(arrays, keys):
  """Rename and convert the arrays of a file; the first row that matches counts.

  Returns:
    ({path: array}, {path: name in the file}). Axes that the file merges are
    still merged: `fit` splits them when the model is known.
  """
  params, names = {}, {}
  for name, array in arrays.items():
    for key in keys:
      if (values := _match(key.theirs, name)) is None:
        continue
      paths = [_fill(path, values) for path in key.paths]
      parts = [array] * len(paths)  # a wrong shape is reported by `fit`
      if len(paths) > 1 and array.ndim and not len(array) % len(paths):
        parts = np.split(array, len(paths))
      for path, part in zip(paths, parts):
        fits = key.ndim in (None, part.ndim)
        params[path] = key.to_ours(part) if fits else part
        names[path] = name
      break
  return params, names


def to_theirs(params, keys):
  """Return ({name: array} of a file, {path: array} that no row matches)."""
  rows = [(key, i, path) for key in keys for i, path in enumerate(key.paths)]
  parts, rest = {}, {}
  for path, array in params.items():
    for key, i, template in rows:
      if (values := _match(template, path)) is not None:
        name = _fill(key.theirs, values)
        parts.setdefault(name, {})[i] = key.to_theirs(array)
        break
    else:
      rest[path] = array
  out = {
    name: _concatenate([found[i] for i in sorted(found)])
    for name, found in parts.items()
  }
  return out, rest


def fit(params, names, shapes, arrays, keys, *, hint=''):
  """Return float32 parameters in a model's shapes, if a file is that model.

  Args:
    params, names: as `to_ours` returns them.
    shapes: {path: has a shape} of the model.
    arrays: {name: array}, everything in the file.
    keys: the key map.
    hint: text for the error where the reason is known.

  Raises:
    ValueError: lists all arrays that are missing, unexpected or of another
      shape.
  """
  zero = np.zeros((), np.float32)
  wanted = {path: np.broadcast_to(zero, s.shape) for path, s in shapes.items()}
  theirs, rest = to_theirs(wanted, keys)
  merged = to_ours(theirs, keys)[0] | rest
  wrong = {
    path
    for path in params.keys() | merged.keys()
    if path not in params
    or path not in merged
    or np.shape(params[path]) != merged[path].shape
  }
  extra = arrays.keys() - set(names.values())
  if wrong or extra:
    have = extra | {names[path] for path in wrong if path in names}
    need, rest = to_theirs({p: wanted[p] for p in wrong & wanted.keys()}, keys)
    lines = tree.diff({name: arrays[name] for name in have}, need | rest)
    raise ValueError(
      f'The file is not one whole model{hint}. In the file (-), needed (+):\n'
      f'{lines}'
    )
  return {
    path: np.asarray(params[path], np.float32).reshape(s.shape)
    for path, s in shapes.items()
  }


def _concatenate(arrays):
  if len(arrays) == 1:
    return arrays[0]
  if not any(any(array.strides) for array in arrays):
    rows = sum(map(len, arrays))  # the zeros of `fit`, which take no memory
    return np.broadcast_to(np.float32(0), (rows, *arrays[0].shape[1:]))
  return np.concatenate(arrays)


# Placeholders {i}, {s} and {u} stand for numbers, others for any text.
_PLACEHOLDER = re.compile(r'\{(\w)(\+1)?\}')


@functools.cache
def _pattern(template):
  texts = _PLACEHOLDER.split(template)[::3]
  names = _PLACEHOLDER.findall(template)
  groups = [
    rf'(?P<{n}>{r"[0-9]+" if n in "isu" else "[^/.]+"})' for n, _ in names
  ]
  pattern = ''.join(
    re.escape(text) + group for text, group in zip(texts, [*groups, ''])
  )
  return re.compile(pattern), {n for n, plus in names if plus}


def _match(template, name):
  """Return {placeholder: text} if the name fits the template, else None."""
  pattern, larger = _pattern(template)
  if not (found := pattern.fullmatch(name)):
    return None
  return {
    key: str(int(text) - 1) if key in larger else text
    for key, text in found.groupdict().items()
  }


def _fill(template, values):
  """Return the template with its placeholders filled in."""

  def fill(found):
    name, plus = found.groups()
    return str(int(values[name]) + 1) if plus else values[name]

  return _PLACEHOLDER.sub(fill, template)

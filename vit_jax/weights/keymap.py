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
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from vit_jax import tree
from vit_jax.types import FlatParams


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
  to_ours: Callable[..., Any] = _same
  to_theirs: Callable[..., Any] = _same
  ndim: int | None = None

  @property
  def paths(self) -> list[str]:
    """Our paths: 'a/b|c/kernel' -> ['a/b/kernel', 'a/c/kernel']."""
    parts = [part.split('|') for part in self.ours.split('/')]
    count = max(map(len, parts))
    return ['/'.join(p[i % len(p)] for p in parts) for i in range(count)]


def linear(theirs: str, ours: str, *, merge_inputs: bool = False) -> list[Key]:
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


def conv(theirs: str, ours: str) -> list[Key]:
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


def norm(theirs: str, ours: str) -> list[Key]:
  """Return the rows of a LayerNorm or GroupNorm."""
  return [
    Key(f'{theirs}.weight', f'{ours}/scale'),
    Key(f'{theirs}.bias', f'{ours}/bias'),
  ]


class KeyMap:
  """A table of Keys; the first row that matches a name counts."""

  def __init__(self, *keys: Key) -> None:
    self._keys = keys
    self._rows = [(k, i, path) for k in keys for i, path in enumerate(k.paths)]
    cached = functools.lru_cache(maxsize=10_000)
    self._find_ours, self._find_theirs = (
      cached(self._ours),
      cached(self._theirs),
    )

  def _ours(self, name):
    """Return (row, our paths) for a name in the file, or None."""
    for key in self._keys:
      if (values := _match(key.theirs, name)) is not None:
        return key, [_fill(path, values) for path in key.paths]
    return None

  def _theirs(self, path):
    """Return (row, number among its paths, name in the file), or None."""
    for key, i, template in self._rows:
      if (values := _match(template, path)) is not None:
        return key, i, _fill(key.theirs, values)
    return None

  def to_ours(
    self, arrays: FlatParams
  ) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Rename and convert the arrays of a file.

    Returns:
      ({path: array}, {path: name in the file}). Axes that the file merges are
      still merged: `fit` splits them when the model is known.
    """
    params, names = {}, {}
    for name, array in arrays.items():
      if not (found := self._find_ours(name)):
        continue
      key, paths = found
      parts = [array] * len(paths)  # a wrong shape is reported by `fit`
      if len(paths) > 1 and array.ndim and not len(array) % len(paths):
        parts = np.split(array, len(paths))
      for path, part in zip(paths, parts):
        fits = key.ndim in (None, part.ndim)
        params[path] = key.to_ours(part) if fits else part
        names[path] = name
    return params, names

  def to_theirs(self, params: FlatParams) -> dict[str, np.ndarray]:
    """Return {name: array} of a file.

    Raises:
      ValueError: the format has no name for some of the parameters.
    """
    out, rest = self._to_theirs(params)
    if rest:
      raise ValueError(f'The format has no name for {", ".join(sorted(rest))}.')
    return out

  def _to_theirs(self, params):
    parts, rest = {}, {}
    for path, array in params.items():
      if found := self._find_theirs(path):
        key, i, name = found
        parts.setdefault(name, {})[i] = key.to_theirs(array)
      else:
        rest[path] = array
    out = {
      name: _concatenate([found[i] for i in sorted(found)])
      for name, found in parts.items()
    }
    return out, rest

  def fit(
    self,
    params: FlatParams,
    names: Mapping[str, str],
    shapes: Mapping[str, Any],
    arrays: FlatParams,
    *,
    hint: str = '',
  ) -> dict[str, np.ndarray]:
    """Return float32 parameters in a model's shapes, if a file is that model.

    Args:
      params, names: as `to_ours` returns them.
      shapes: {path: has a shape} of the model.
      arrays: {name: array}, everything in the file.
      hint: text for the error where the reason is known.

    Raises:
      ValueError: lists all arrays that are missing, unexpected or of another
        shape.
    """
    zero = np.zeros((), np.float32)
    wanted = {p: np.broadcast_to(zero, s.shape) for p, s in shapes.items()}
    theirs, rest = self._to_theirs(wanted)
    merged = self.to_ours(theirs)[0] | rest
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
      need = {path: wanted[path] for path in wrong & wanted.keys()}
      theirs, rest = self._to_theirs(need)
      lines = tree.diff({name: arrays[name] for name in have}, theirs | rest)
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

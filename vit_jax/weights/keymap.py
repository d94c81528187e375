"""Key maps: one table per format, which is used to read and to write.

A row gives the name of an array in the file, our path of the same array, and
its kind: how the two layouts differ (KINDS).

    Key('blocks.{i}.norm1.weight', 'block_{i}/norm1/scale')
    *linear('blocks.{i}.attn.qkv', 'block_{i}/attn/query|key|value')

`{x}` stands for one part of the name, the same on both sides; `{i}`, `{s}` and
`{u}` for a number, and `{s+1}` for the number that is one larger. Several of
our paths, separated by '|', are concatenated along the first axis of one array
in the file.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax import tree
from vit_jax.types import FlatParams, UserError


def _same(array):
  return array


# Kind: number of axes in the file (None: any), array in the file -> our array
# (whose axes may still be merged), our array -> array in the file.
KINDS: dict[str, tuple[int | None, Any, Any]] = {
  'same': (None, _same, _same),
  'flat': (1, _same, np.ravel),
  # [out, in]. Our kernel may have several axes of outputs, [D, heads, head_dim]
  'linear': (2, np.transpose, lambda x: x.reshape(len(x), -1).T),
  # ... or of inputs, [heads, head_dim, D].
  'merged': (2, np.transpose, lambda x: x.reshape(-1, x.shape[-1]).T),
  # [out, in, height, width]; also of a dense layer that is a 1x1 convolution.
  'conv': (
    4,
    lambda x: x.transpose(2, 3, 1, 0),
    lambda x: _4d(x).transpose(3, 2, 0, 1),
  ),
  '1x1': (4, _same, lambda x: _4d(x)),
}


def _4d(kernel):
  return kernel.reshape((1,) * (4 - kernel.ndim) + kernel.shape)


class Key(NamedTuple):
  """Row of a key map.

  Attributes:
    theirs: name in the file, with placeholders.
    ours: our path, with the same placeholders; or several with '|'.
    kind: one of KINDS.
  """

  theirs: str
  ours: str
  kind: str = 'same'

  @property
  def paths(self) -> list[str]:
    """Our paths: 'a/b|c/kernel' -> ['a/b/kernel', 'a/c/kernel']."""
    parts = [part.split('|') for part in self.ours.split('/')]
    count = max(map(len, parts))
    return ['/'.join(p[i % len(p)] for p in parts) for i in range(count)]


def linear(theirs: str, ours: str, kind: str = 'linear') -> list[Key]:
  """Return the rows of a matrix [out, in] and its bias, as PyTorch has them."""
  return [
    Key(f'{theirs}.weight', f'{ours}/kernel', kind),
    Key(f'{theirs}.bias', f'{ours}/bias', 'flat'),
  ]


def conv(theirs: str, ours: str) -> list[Key]:
  """Return the rows of a convolution [out, in, height, width] and its bias."""
  return linear(theirs, ours, 'conv')


def norm(theirs: str, ours: str) -> list[Key]:
  """Return the rows of a LayerNorm or GroupNorm."""
  return [
    Key(f'{theirs}.weight', f'{ours}/scale'),
    Key(f'{theirs}.bias', f'{ours}/bias'),
  ]


class KeyMap:
  """Table of Keys; the first row that matches a name counts."""

  def __init__(self, *keys: Key) -> None:
    self._keys = keys

  def to_ours(self, arrays: FlatParams) -> dict[str, np.ndarray]:
    """Return {our path: array} of the arrays of a file that the map knows.

    Axes that the file merges are still merged: `fit` splits them, when the
    shapes of the model are known. Arrays of another kind stay as they are.
    """
    params = {}
    for name, array in arrays.items():
      found = ((key, _match(key.theirs, name)) for key in self._keys)
      key, values = next((x for x in found if x[1] is not None), (None, None))
      if key is None:
        continue
      ndim, convert, _ = KINDS[key.kind]
      parts = [array]
      if len(key.paths) > 1:
        parts = np.array_split(array, len(key.paths))
      for path, part in zip(key.paths, parts):
        fits = ndim in (None, part.ndim)
        params[_fill(path, values)] = convert(part) if fits else part
    return params

  def to_theirs(self, params: FlatParams) -> dict[str, np.ndarray]:
    """Return {name: array} of a file.

    Raises:
      ValueError: the format has no name for some of the parameters.
    """
    parts: dict[str, dict[int, np.ndarray]] = {}
    unknown = []
    rows = [(k, i, path) for k in self._keys for i, path in enumerate(k.paths)]
    for path, array in params.items():
      for key, i, template in rows:
        if (values := _match(template, path)) is not None:
          name = _fill(key.theirs, values)
          parts.setdefault(name, {})[i] = KINDS[key.kind][2](array)
          break
      else:
        unknown.append(path)
    if unknown:
      raise UserError(f'The format has no name for {", ".join(unknown)}.')
    return {
      name: _concatenate([found[i] for i in sorted(found)])
      for name, found in parts.items()
    }

  def fit(
    self, arrays: FlatParams, shapes: Mapping[str, Any]
  ) -> dict[str, np.ndarray]:
    """Return float32 parameters of a model, if a file is exactly that model.

    Args:
      arrays: {name: array}, everything in the file.
      shapes: {path: has a shape} of the model.

    Raises:
      ValueError: arrays are missing, unexpected or of another shape; the
        message is a diff.
    """
    blank = np.int8(0)
    blanks = {p: np.broadcast_to(blank, x.shape) for p, x in shapes.items()}
    lines = tree.diff(arrays, self.to_theirs(blanks)).splitlines()
    if lines:
      more = [f'and {len(lines) - 40} more'] if len(lines) > 40 else []
      text = '\n'.join(lines[:40] + more)
      raise UserError(
        f'The arrays are not those of one model. In the file (-), needed (+):\n'
        f'{text}'
      )
    params = self.to_ours(arrays)
    return {
      path: np.asarray(params[path], np.float32).reshape(x.shape)
      for path, x in shapes.items()
    }


_PLACEHOLDER = re.compile(r'\{(\w)(\+1)?\}')


@functools.cache
def _pattern(template):
  texts = _PLACEHOLDER.split(template)[::3]
  names = [name for name, _ in _PLACEHOLDER.findall(template)]
  groups = [f'(?P<{n}>{"[0-9]+" if n in "isu" else "[^/.]+"})' for n in names]
  return re.compile(
    ''.join(
      re.escape(text) + group for text, group in zip(texts, [*groups, ''])
    )
  )


@functools.lru_cache(2**16)
def _match(template, name):
  """Return {placeholder: text} if the name fits the template, else None."""
  if not (found := _pattern(template).fullmatch(name)):
    return None
  values = found.groupdict()
  for key, plus in _PLACEHOLDER.findall(template):
    if plus:
      values[key] = str(int(values[key]) - 1)
  return values


def _fill(template, values):
  """Return the template with its placeholders filled in."""

  def fill(found):
    name, plus = found.groups()
    return str(int(values[name]) + 1) if plus else values[name]

  return _PLACEHOLDER.sub(fill, template)


def _concatenate(arrays):
  return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]

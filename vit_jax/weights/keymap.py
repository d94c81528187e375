"""Key maps: one table per format, which is used to read and to write.

A row gives the name of an array in the file, our path of the same array, and
its kind: how the two layouts differ (KINDS).

    Key('blocks.{i}.norm1.weight', 'block_{i}/norm1/scale')
    *linear('blocks.{i}.attn.qkv', 'block_{i}/attn/query|key|value')

`{x}` stands for one part of the name, the same on both sides; `{i}`, `{s}` and
`{u}` for a number, and `{s+1}` for the number that is one larger. Several of
our paths, separated by '|', are concatenated in one array in the file. An array
of all layers, 'rope.freqs' for 'block_{i}/freqs', is taken apart along an axis.

Several rows may have the same path: files have one name or the other. A file is
written with the first one, or with those of another file (`having`).

    Key('blocks.{i}.gamma_{n}', 'block_{i}/ls{n}')
"""

import functools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax import tree
from vit_jax.types import FlatParams, UserError

HEAD = r'((\w+_)?heads?|classifier|fc|linear)\..*'  # under any name
# Our paths of one table for all tokens that a model has.
TABLE = (
  'cls_pos_embedding|dist_pos_embedding|registers_pos_embedding|pos_embedding'
)


def _same(array):
  return array


def _rows(array):
  return array.reshape(-1, array.shape[-1])


def _with_batch(array):
  return array.reshape(1, -1, array.shape[-1])


def _4d(kernel):
  return kernel.reshape((1,) * (4 - kernel.ndim) + kernel.shape)


def _side(kernel):
  """Return the side of square patches of RGB, from [out, numbers]."""
  return math.isqrt(kernel.shape[1] // 3)


# Kind: array in the file -> our array (whose axes may still be merged), our
# array -> array in the file; of several, see _AXES.
KINDS: dict[str, tuple[Any, Any]] = {
  'same': (_same, _same),
  'token': (_with_batch, np.ravel),  # [D]
  'tokens': (_with_batch, _rows),  # [n, D], the class token is the first
  # Positions [1, rows, D] or [rows, D] of tokens and patches together;
  # `architecture.read` finds the number of tokens.
  'table': (_same, _with_batch),
  'rows': (_same, _rows),
  'relative': (_same, _rows),  # BEiT's [., h]
  'layers1': (_same, _same),  # [., L, ...]
  'flat': (_same, np.ravel),
  # [out, in]. Our kernel may have several axes of outputs, [D, heads, head_dim]
  'linear': (np.transpose, lambda x: x.reshape(len(x), -1).T),
  # ... or of inputs, [heads, head_dim, D].
  'merged': (np.transpose, lambda x: _rows(x).T),
  # [out, in, height, width]; also of a dense layer that is a 1x1 convolution.
  'conv': (
    lambda x: x.transpose(2, 3, 1, 0) if x.ndim == 4 else x,
    lambda x: _4d(x).transpose(3, 2, 0, 1),
  ),
  '1x1': (_same, _4d),
  # Square patches of RGB, [out, side * side * 3] or [out, 3 * side * side].
  'hwc': (
    lambda x: x.T.reshape(_side(x), _side(x), 3, -1),
    lambda x: _rows(x).T,
  ),
  'chw': (
    lambda x: x.T.reshape(3, _side(x), _side(x), -1).transpose(1, 2, 0, 3),
    lambda x: _rows(x.transpose(2, 0, 1, 3)).T,
  ),
}
_AXES = {'table': 1, 'layers1': 1}  # along which parts are joined, else 0
_CUTS = {'relative': -3, 'tokens': 1}  # where parts differ in size


class Key(NamedTuple):
  """Row of a key map, see the docstring of this file."""

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


conv = functools.partial(linear, kind='conv')  # [out, in, height, width]


def norm(theirs: str, ours: str) -> list[Key]:
  """Return the rows of a LayerNorm or GroupNorm."""
  return [
    Key(f'{theirs}.weight', f'{ours}/scale'),
    Key(f'{theirs}.bias', f'{ours}/bias'),
  ]


def attention(theirs: str, ours: str) -> list[Key]:
  """Return the rows of PyTorch's MultiheadAttention."""
  qkv = f'{ours}/query|key|value'
  return [
    Key(f'{theirs}.in_proj_weight', f'{qkv}/kernel', 'linear'),
    Key(f'{theirs}.in_proj_bias', f'{qkv}/bias', 'flat'),
    *linear(f'{theirs}.out_proj', f'{ours}/out', 'merged'),
  ]


class KeyMap:
  """Table of Keys; the first row that matches a name counts."""

  def __init__(self, *keys: Key) -> None:
    self.keys = keys
    self._rows = [(k, i, x) for k in keys for i, x in enumerate(k.paths)]

  def having(self, names: Iterable[str]) -> 'KeyMap':
    """Return the map that writes these names rather than others."""
    names = list(names)

    def is_other(key):
      return not any(map(_pattern(key.theirs)[0].fullmatch, names))

    return KeyMap(*sorted(self.keys, key=is_other))

  def to_ours(self, arrays: FlatParams) -> dict[str, np.ndarray]:
    """Return {our path: array} of the arrays of a file that the map knows.

    Axes that the file merges are still merged, see `fit`; a table of positions
    is still whole, with the last of its paths.
    """
    params = {}
    for name, array in arrays.items():
      key, values, _ = _find(((k, 0, k.theirs) for k in self.keys), name)
      if key is None:
        continue
      if array.dtype.kind in 'biu':
        raise UserError(f'{name} has {array.dtype} numbers: dequantize them.')
      paths, axis = key.paths, _AXES.get(key.kind, 0)
      if key.kind in ('table', 'rows'):
        parts, paths = [array], paths[-1:]
      elif key.kind in _CUTS:
        parts = np.split(array, [_CUTS[key.kind]])
      elif key.kind == 'layers1':
        parts = list(np.moveaxis(array, axis, 0))
        paths = [paths[0].replace('{i}', f'{i}') for i in range(len(parts))]
      else:
        parts = np.array_split(array, len(paths)) if paths[1:] else [array]
      for path, part in zip(paths, parts):
        params[path.format(**values)] = KINDS[key.kind][0](part)
    return params

  def to_theirs(self, params: FlatParams) -> dict[str, np.ndarray]:
    """Return {name: array} of a file, if it has names for all parameters."""
    parts: dict[tuple[str, str], dict[int, np.ndarray]] = {}
    unknown = []
    for path, array in params.items():
      key, values, i = _find(self._rows, path)
      if key is None:
        unknown.append(path)
      else:
        name = key.theirs.format(**values), key.kind
        i = values['i'] if key.kind == 'layers1' else i
        parts.setdefault(name, {})[i] = KINDS[key.kind][1](array)
    if unknown:
      raise UserError(f'The format has no name for {", ".join(unknown[:9])}.')
    out = {}
    for (name, kind), found in parts.items():
      arrays = [found[i] for i in sorted(found)]
      join = np.stack if kind == 'layers1' else np.concatenate
      is_whole = kind != 'layers1' and len(arrays) == 1
      out[name] = arrays[0] if is_whole else join(arrays, _AXES.get(kind, 0))
    return out

  def fit(
    self, arrays: FlatParams, params: FlatParams, shapes: Mapping[str, Any]
  ) -> dict[str, np.ndarray]:
    """Return float32 parameters of a model, if a file is exactly that model.

    `arrays` is everything in the file, `params` is `to_ours` of it, with
    positions apart, and `shapes` {path: has a shape} of the model. Otherwise
    UserError lists missing, unexpected and other arrays.
    """
    blanks = {p: np.zeros(x.shape, np.int8) for p, x in shapes.items()}
    placed = {p: x for p, x in params.items() if p.endswith('pos_embedding')}
    found = {**arrays, **self.to_theirs(placed)}
    lines = tree.diff(found, self.to_theirs(blanks)).splitlines()
    if lines:
      lines[40:] = [f'and {len(lines) - 40} more'] if len(lines) > 40 else []
      head = 'The arrays do not fit one model. In the file (-), needed (+):'
      if any(re.match(f'- {HEAD}', line) for line in lines):
        lines.append('num_classes=N (tools: --set new_head=true) omits a head.')
      raise UserError('\n'.join([head, *lines]))
    return {
      path: np.asarray(params[path], np.float32).reshape(x.shape)
      for path, x in shapes.items()
    }


def _find(rows, name):
  """Return (key, values, i) of the first (key, i, template) that fits."""
  for key, i, template in rows:
    pattern, names = _pattern(template)
    if found := pattern.fullmatch(name):
      values = dict(zip(names, found.groups()))
      for x in [x for x in names if x[0] in 'isu']:
        number = int(values[x]) - x.endswith('+1')
        values |= {x[0]: number, f'{x[0]}+1': number + 1}
      return key, values, i
  return None, {}, 0


@functools.cache
def _pattern(template):
  """Return the regular expression of a template, and its placeholders."""
  *parts, end = re.split(r'\{(.*?)\}', template)
  names = parts[1::2]
  groups = ['([0-9]+)' if n[0] in 'isu' else '([^/.]+)' for n in names]
  text = ''.join(re.escape(t) + g for t, g in zip(parts[::2], groups))
  return re.compile(text + re.escape(end)), names

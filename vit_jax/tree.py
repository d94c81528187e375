"""Paths in pytrees: one convention for every rule in this code base.

A leaf's path joins its keys with '/': 'block_0/attn/query/kernel'. A rule is a
regular expression that must match the whole path (`re.fullmatch`).

Layers of one shape come in two forms: unrolled, 'block_0/...', 'block_1/...';
or scanned, 'blocks/...' with a leading layer dimension.
"""

import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from vit_jax.types import FlatParams, PyTree, UserError

_BLOCK = re.compile(r'(.*/|)block_(\d+)/(.*)')
_STACKED = re.compile(r'(.*/|)blocks/(.*)')
_path = functools.partial(jax.tree_util.keystr, simple=True, separator='/')


def flatten(tree: PyTree) -> dict[str, Any]:
  """Return {path: leaf} of any pytree, in its order."""
  return {_path(path): x for path, x in jax.tree.leaves_with_path(tree)}


def unflatten(flat: FlatParams) -> dict[str, Any]:
  """Return the nested dict of a {path: leaf}; inverse of `flatten`."""
  tree: dict[str, Any] = {}
  for path, leaf in flat.items():
    *parents, last = path.split('/')
    node = tree
    for key in parents:
      node = node.setdefault(key, {})
    node[last] = leaf
  return tree


def fingerprint(flat: FlatParams) -> str:
  """Return a hash of the paths, dtypes, shapes and values of arrays."""
  found = hashlib.sha256()
  for path, array in sorted(flat.items()):
    found.update(f'{path} {array.dtype} {array.shape}\n'.encode())
    found.update(np.ascontiguousarray(array).tobytes())
  return found.hexdigest()[:16]


def map_with_path(fn: Callable[..., Any], tree: PyTree) -> PyTree:
  """Apply fn(path, leaf) to every leaf."""
  return jax.tree.map_with_path(lambda path, x: fn(_path(path), x), tree)


def first_match(rules: Sequence[str], path: str) -> int | None:
  """Return the index of the first rule that matches the path, or None."""
  return next((i for i, r in enumerate(rules) if re.fullmatch(r, path)), None)


def check_rules_match(rules: Sequence[str], tree: PyTree, *, what: str) -> None:
  """Raise UserError if a rule matches no path and so would do nothing."""
  paths = list(flatten(tree))
  idle = [r for r in rules if not any(re.fullmatch(r, p) for p in paths)]
  if idle:
    raise UserError(
      f'{what}: {idle} match no parameter. Rules must match a whole path '
      f"(re.fullmatch; begin with '.*' to match an ending), as {paths[:40]}"
    )


def mask(rules: Sequence[str], tree: PyTree) -> PyTree:
  """Return a tree of bools: whether any rule matches the path of the leaf."""
  return map_with_path(
    lambda path, _: first_match(rules, path) is not None, tree
  )


def diff(expected: FlatParams, actual: FlatParams) -> str:
  """Return lines '- path shape' (expected) and '+ path shape' (actual)."""
  lines = []
  for path in sorted(expected.keys() | actual.keys()):
    want, have = (
      f'{path} {tuple(flat[path].shape)}' if path in flat else ''
      for flat in (expected, actual)
    )
    if want != have:
      lines += [f'- {want}'] * bool(want) + [f'+ {have}'] * bool(have)
  return '\n'.join(lines)


def stack_blocks(flat: FlatParams) -> dict[str, Any]:
  """Stack the 'block_i/x' entries of a {path: array} to one 'blocks/x' each."""
  stacks: dict[str, dict[int, Any]] = {}
  out: dict[str, Any] = {}
  for path, leaf in flat.items():
    if found := _BLOCK.fullmatch(path):
      prefix, index, rest = found.groups()
      stacks.setdefault(f'{prefix}blocks/{rest}', {})[int(index)] = leaf
    else:
      out[path] = leaf
  depth = max((len(layers) for layers in stacks.values()), default=0)
  for path, layers in stacks.items():
    if sorted(layers) != list(range(depth)):
      raise UserError(
        f'Cannot stack {path}: {depth} layers expected, found {sorted(layers)}.'
      )
    out[path] = np.stack([np.asarray(layers[i]) for i in range(depth)])
  return out


def unstack_blocks(flat: FlatParams) -> dict[str, Any]:
  """Split the 'blocks/x' entries of a {path: array} to 'block_i/x' each."""
  out = {}
  for path, leaf in flat.items():
    if found := _STACKED.fullmatch(path):
      prefix, rest = found.groups()
      for i, layer in enumerate(leaf):
        out[f'{prefix}block_{i}/{rest}'] = layer
    else:
      out[path] = leaf
  return out


def is_stacked(flat: Iterable[str]) -> bool:
  """Return whether any path of a {path: leaf} is of the scanned form."""
  return any(_STACKED.fullmatch(path) for path in flat)

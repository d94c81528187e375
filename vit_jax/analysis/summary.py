"""Table of a model's modules: shapes, parameters and FLOPs."""

import dataclasses
import math
import re
from typing import Any

import jax

from vit_jax.analysis import flops
from vit_jax.types import Model, Shape

_HEADINGS = ('module', 'weights', 'output', 'parameters', 'GFLOPs')


@dataclasses.dataclass
class Module:
  """A module of a model, with what is in it.

  Attributes:
    weights: shapes of its own parameters.
    output: shape of what it returns for one image; None if not one array.
    parameters, flops: of the module and all modules in it.
    children: {name: Module}, in the order in which they compute.
    order: position of its first operation; parameters outside of modules have
      none and come first.
  """

  weights: list[Any] = dataclasses.field(default_factory=list)
  output: tuple | None = None
  parameters: int = 0
  flops: int = 0
  children: dict[str, Any] = dataclasses.field(default_factory=dict)
  order: int = dataclasses.field(default=-1, compare=False)


def tree(model: Model, image_shape: Shape) -> Module:
  """Return the Module of a whole model; nothing is computed or allocated.

  Args:
    model: Flax module.
    image_shape: (H, W, C) of the image that it gets.
  """
  images = jax.ShapeDtypeStruct((1, *image_shape), 'float32')
  variables = jax.eval_shape(model.init, jax.random.key(0), images)
  root = Module()
  for path, leaf in _leaves(variables['params']):
    module, names = root, path[:-1] or path
    for name in names:
      module = module.children.setdefault(name, Module())
    module.weights.append(leaf.shape)
    for module in _along(root, names):
      module.parameters += math.prod(leaf.shape)
  for path, leaf in _leaves(_outputs(model, variables, images)):
    *names, method, _ = path
    *_, module = found = list(_along(root, names))
    if method == '__call__' and len(found) == len(names) + 1:
      module.output = leaf.shape[1:]
  scopes = flops.by_scope(model.apply, variables, images)
  for order, (scope, count) in enumerate(scopes.items()):
    for module in _along(root, scope):
      module.flops += count
      if module.order < 0:
        module.order = order
  _sort(root)
  return root


def _outputs(model, variables, images):
  """Return what each module returns, in shapes."""

  def run(variables, images):
    return model.apply(
      variables, images, capture_intermediates=True, mutable=['intermediates']
    )

  outputs = jax.eval_shape(run, variables, images)[1]['intermediates']
  # A projection returns its parts, too.
  return jax.tree.map(
    lambda x: getattr(x, 'result', x),
    outputs,
    is_leaf=lambda x: hasattr(x, 'result'),
  )


def _leaves(tree):
  """Yield (names, leaf) of a tree of dicts and tuples."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    yield tuple(getattr(x, 'key', getattr(x, 'idx', x)) for x in path), leaf


def _along(module, names):
  """Yield the module and those in it to which the names lead."""
  yield module
  for name in names:
    if name in module.children:
      module = module.children[name]
      yield module


def _sort(module):
  module.weights.sort(key=lambda shape: (-math.prod(shape), shape))
  pairs = sorted(module.children.items(), key=lambda pair: pair[1].order)
  module.children = dict(pairs)
  for child in module.children.values():
    _sort(child)


def table(model: Model, image_shape: Shape) -> str:
  """Return the table as text; equal modules in sequence share a row."""
  root = tree(model, image_shape)
  rows = [_HEADINGS, *_rows(root, ''), _row('total', root)]
  widths = [max(map(len, column)) for column in zip(*rows)]
  lines = []
  for row in rows:
    cells = [x.ljust(w) for x, w in zip(row[:3], widths)]
    cells += [x.rjust(w) for x, w in zip(row[3:], widths[3:])]
    lines.append('  '.join(cells).rstrip())
  rule = '-' * max(map(len, lines))
  return '\n'.join([lines[0], rule, *lines[1:-1], rule, lines[-1], '', _NOTE])


_NOTE = """\
For one image. A multiply-add is two FLOPs; only products and convolutions
count. A row with (N x) stands for N equal modules and describes one of them."""


def _rows(module, indent):
  for name, child in _grouped(module.children):
    yield _row(indent + name, child)
    yield from _rows(child, indent + '  ')


def _grouped(children):
  """Yield (name, Module), for equal ones in sequence once: 'block_0 (12 x)'."""
  groups = []
  for name, child in children.items():
    if groups and groups[-1][-1] == child and re.search(r'\d$', name):
      groups[-1][0] += 1
    else:
      groups.append([1, name, child])
  for times, name, child in groups:
    yield name + (f' ({times} x)' if times > 1 else ''), child


def _row(name, module):
  """Return the cells of a row."""
  weights = ', '.join(map(_shape, module.weights))
  output = '' if module.output is None else _shape(module.output)
  parameters = f'{module.parameters:,}' if module.parameters else ''
  billions = f'{module.flops / 1e9:,.3f}' if module.flops else ''
  return name, weights, output, parameters, billions


def _shape(sizes):
  return 'x'.join(map(str, sizes)) or '1'

"""Axes of kernels [*inputs, *outputs], for all that treats them as matrices."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from vit_jax.types import FlatParams, PathRule


class Kernel(NamedTuple):
  """Names of the axes in one layer; the mesh splits 'heads' and 'hidden'."""

  layers: PathRule  # without '/kernel'
  inputs: Sequence[str]
  outputs: Sequence[str]


Kernels = Sequence[Kernel]  # the first that matches counts
_ATTENTION, _MLP = '(.*/)?(attn|row|column)', '(.*/)?(mlp|.*_mixing)'
KERNELS = (
  Kernel(f'{_ATTENTION}/(query|key|value|gate)', ['in'], ['heads', 'head_dim']),
  Kernel(f'{_ATTENTION}/out', ['heads', 'head_dim'], ['out']),
  Kernel(f'{_MLP}/(fc1|gate)', ['in'], ['hidden']),
  Kernel(f'{_MLP}/fc2', ['hidden'], ['out']),
  Kernel('.*', [], ['out']),  # convolutions have several inputs
)


def find(path: str, more: Kernels = ()) -> Kernel:
  """Return the row of a kernel; those of `more` come first."""
  layer, rows = path.removesuffix('/kernel'), (*more, *KERNELS)
  return next(Kernel(*x) for x in rows if re.fullmatch(x[0], layer))


def sizes(params: FlatParams, path: str) -> dict[str, int]:
  """Return {axis: size} of a kernel; {} if some of its axes are merged."""
  axes, shape = [*find(path).inputs, *find(path).outputs], params[path].shape
  return dict(zip(axes, shape)) if len(axes) == len(shape) else {}

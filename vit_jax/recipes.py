"""Ready rules of what is split over which mesh axis, for `sharding.infer`.

    config.mesh = dict(data=1, fsdp=-1)
    config.sharding = dict(target='vit_jax.recipes.fsdp', axis='fsdp')

Rules hold for parameters, their average and the optimizer's state alike, since
the paths of all of them end in the parameter's. They know the names of the
layers here (attn, fc1, ...), but no model knows of them; a list of your own,
(path rule, spec), does as well.
"""

import dataclasses
import math
from typing import Any

from vit_jax import sharding, tree
from vit_jax.models.mesh import is_model_axis

# Megatron's split: a layer's heads, or its hidden units, are shared out, so
# that the two products of each branch need one sum over devices, at its end.
# Dimensions count from the end: scanned layers have one more in front.
_TENSOR = (  # path rule, dimensions of the parameter, which of them is split
  ('(.*/)?attn/(query|key|value)/kernel', 3, -2),  # [D, h, dh]
  ('(.*/)?attn/(query|key|value)/bias', 2, -2),  # [h, dh]
  ('(.*/)?attn/out/kernel', 3, -3),  # [h, dh, D]; its bias is added once
  ('(.*/)?(mlp|token_mixing|channel_mixing)/fc1/kernel', 2, -1),  # [D, M]
  ('(.*/)?(mlp|token_mixing|channel_mixing)/fc1/bias', 1, -1),  # [M]
  ('(.*/)?(mlp|token_mixing|channel_mixing)/fc2/kernel', 2, -2),  # [M, D]
)


def replicated():
  """Every device holds everything: data parallelism, which is the default."""
  return []


def fsdp(axis='fsdp', *, min_elements=2**14, beside=()):
  """Each array split along its largest dimension, whatever the model.

  Fully sharded data parallelism: devices along the axis work on examples of
  their own, and hold a share of parameters, gradients, optimizer state and
  average. An array stays whole if it is small, or if the axis divides none of
  its dimensions (a width of 1664 cannot be split 256-fold).

  Args:
    axis: a mesh axis, or several; where its name begins with 'fsdp', models
      see to it that parameters are gathered and not the batch.
    min_elements: below this many (in one layer) an array is small.
    beside: further rules, as of `tensor_parallel`; their dimensions are left
      to them.
  """
  return [('.*', Largest(axis, min_elements, tuple(beside)))]


def tensor_parallel(axis='model'):
  """Attention split by heads, MLPs by hidden units; the rest is replicated.

  Args:
    axis: a mesh axis, named 'model...': batches are not split over those.

  Raises:
    ValueError: an axis of another name.
  """
  if not is_model_axis(axis):
    raise ValueError(
      f'tensor_parallel: axis={axis!r}, but batches are split over every axis '
      "whose name does not begin with 'model'. Call it 'model', in mesh too."
    )
  return [(path, Split(axis, ndim, dim)) for path, ndim, dim in _TENSOR]


@dataclasses.dataclass(frozen=True)
class Split:
  """A spec: one dimension of a parameter of `ndim` dimensions is split.

  What an optimizer keeps in another shape (Adafactor: a row, a column) is left
  whole.
  """

  axis: Any
  ndim: int
  dim: int

  def __call__(self, path, shape, mesh):
    del mesh
    if len(shape) != self.ndim + _is_stacked(path):
      return ()
    spec = [None] * len(shape)
    spec[self.dim] = self.axis
    return spec


@dataclasses.dataclass(frozen=True)
class Largest:
  """A spec: the largest dimension that the axis divides and nothing else has.

  The layer dimension of scanned layers is never split: each step of the scan
  wants one layer from all devices.
  """

  axis: Any
  min_elements: int = 0
  beside: tuple = ()

  def __call__(self, path, shape, mesh):
    spec = [*sharding.find_spec(self.beside, path, shape, mesh)]
    spec += [None] * (len(shape) - len(spec))
    ways = sharding.axis_size(mesh, self.axis)
    first = int(_is_stacked(path))
    free = [
      dim
      for dim in range(first, len(shape))
      if spec[dim] is None and shape[dim] % ways == 0
    ]
    if free and math.prod(shape[first:]) >= self.min_elements:
      spec[max(free, key=lambda dim: shape[dim])] = self.axis
    return spec


def _is_stacked(path):
  return tree.is_stacked({path: None})

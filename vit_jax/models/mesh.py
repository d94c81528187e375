"""What a model knows of the mesh that it runs on (jax.set_mesh), if any.

Axes whose names begin with 'model' share their examples; the batch is split
over all others. Where the parameters are is none of a model's business.
"""

import math

import jax
from jax.sharding import PartitionSpec


def batch_axes(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> tuple:
  """Names of the axes that the batch is split over."""
  return tuple(a for a in mesh.axis_names if not is_model_axis(a))


def is_model_axis(name: str) -> bool:
  """Whether devices along this axis work on the same examples."""
  return name.startswith('model')


def keep_batch_split(x: jax.Array) -> jax.Array:
  """x: [B, ...], each device keeping the examples that are its own.

  Where parameters are split too, the compiler may otherwise choose to gather
  the whole batch rather than the parameters of one layer: FSDP's opposite.
  Without a mesh, or with a batch that its axes do not divide, nothing is asked.
  """
  mesh = jax.sharding.get_abstract_mesh()
  axes = batch_axes(mesh)
  ways = math.prod(mesh.shape[a] for a in axes)
  if ways == 1 or x.shape[0] % ways:
    return x
  return jax.lax.with_sharding_constraint(x, PartitionSpec(axes))

"""Axes of meshes, and functions that each device computes on its part.

Devices along axes whose names begin with 'model' share their examples. The
batch is sharded over all other axes, and parameters as well over those whose
names begin with 'fsdp'.
"""

import math
from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec


def batch_axes(
  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
) -> tuple[str, ...]:
  """Return the names of the axes that the batch is sharded over."""
  return tuple(a for a in mesh.axis_names if not is_model_axis(a))


def is_model_axis(name: str) -> bool:
  """Return whether devices along this axis work on the same examples."""
  return name.startswith('model')


def per_device(
  fn: Callable[..., jax.Array], *arrays: jax.Array, heads: int | None = None
) -> jax.Array:
  """Return fn(*arrays), computed by each device on its part of the arrays.

  The compiler cannot shard kernels. Within `with jax.set_mesh(mesh)`, examples
  are sharded over the batch axes, and heads over the others, if these divide
  them. Without a mesh, the arrays must be on one device.

  Args:
    fn: function of arrays [B, N, h, d], which returns one like the first.
    *arrays: [B, N, h, d], or [B, N, h * d] with `heads`; B and N may be 1.
    heads: h, if the arrays have no dimension for it.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.size <= 1:
    return fn(*arrays)
  of_heads = tuple(a for a in mesh.axis_names if is_model_axis(a))

  # A batch of one example, as at initialisation, is not sharded.
  def dividing(names, size):
    return names if size % math.prod(mesh.shape[n] for n in names) == 0 else ()

  def spec(x):
    batch, size = dividing(batch_axes(mesh), x.shape[0]), heads or x.shape[2]
    return PartitionSpec(batch, None, dividing(of_heads, size))

  specs = tuple(map(spec, arrays))
  # The check of replicated values (check_vma) does not support kernels.
  return jax.shard_map(fn, in_specs=specs, out_specs=specs[0], check_vma=False)(
    *arrays
  )

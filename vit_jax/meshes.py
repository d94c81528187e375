"""Names of mesh axes: what models and their sharding agree on."""

from jax.sharding import AbstractMesh, Mesh


def batch_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
  """Return the names of the axes of a mesh that the batch is sharded over."""
  return tuple(a for a in mesh.axis_names if not is_model_axis(a))


def is_model_axis(name: str) -> bool:
  """Return whether devices along this axis work on the same examples."""
  return name.startswith('model')

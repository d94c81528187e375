"""Where arrays live: a mesh, path rules, and batches laid over it.

The model and the train step know nothing of this file. With no rules at all
every parameter is replicated and the batch is split over all devices, which is
data parallelism; a rule such as ('.*/kernel', (None, 'data')) is all it takes
to shard further.
"""

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from vit_jax import tree
from vit_jax.build import ConfigError


def make_mesh(**axis_sizes):
  """Mesh over all devices of all hosts; one axis may be -1 (what is left).

  Without arguments: one axis, 'data'. Axes are of type Auto, so the compiler
  propagates shardings; raises ConfigError if sizes do not make up the devices.
  """
  axis_sizes = axis_sizes or {'data': -1}
  devices = jax.device_count()
  sizes = list(axis_sizes.values())
  known = int(np.prod([s for s in sizes if s != -1]))
  if sizes.count(-1) == 1 and known > 0 and devices % known == 0:
    sizes[sizes.index(-1)] = devices // known
  if int(np.prod(sizes)) != devices or min(sizes) < 1:
    raise ConfigError(
      f'mesh {axis_sizes} does not fit {devices} devices: the product of the '
      'sizes must be their number; one size may be -1.'
    )
  return jax.make_mesh(
    tuple(sizes), tuple(axis_sizes), axis_types=(AxisType.Auto,) * len(sizes)
  )


def infer(abstract_tree, rules, mesh):
  """NamedSharding for each leaf, of the first rule that matches its path.

  Args:
    abstract_tree: pytree of arrays or ShapeDtypeStructs.
    rules: ((path rule, spec), ...); spec is a sequence of axis names, tuples of
      them, or None, one per leading array dimension. No match: replicated.
    mesh: of `make_mesh`.

  Raises:
    ConfigError: a spec names an unknown axis, or does not divide a shape.
  """
  patterns = [pattern for pattern, _ in rules]

  def leaf_sharding(path, leaf):
    i = tree.first_match(patterns, path)
    spec = () if i is None else tuple(rules[i][1])
    for dim, axes in enumerate(spec):
      for axis in [axes] if isinstance(axes, str) else axes or ():
        if axis not in mesh.shape:
          raise ConfigError(
            f'sharding rule {rules[i]}: no mesh axis {axis!r}; there are '
            f'{list(mesh.shape)}.'
          )
      size = _axis_size(mesh, axes)
      if dim >= leaf.ndim or leaf.shape[dim] % size:
        raise ConfigError(
          f'sharding rule {rules[i]}: {path} of shape {tuple(leaf.shape)} '
          f'cannot be split {size}-fold along dimension {dim}.'
        )
    return NamedSharding(mesh, PartitionSpec(*spec))

  return tree.map_with_path(leaf_sharding, abstract_tree)


def replicated(mesh):
  """The sharding of an array of which every device holds a copy."""
  return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh):
  """Batches are split over all mesh axes but those named 'model*'.

  Tensor-parallel devices work on the same examples; all others on their own.
  """
  axes = tuple(a for a in mesh.axis_names if not a.startswith('model'))
  return NamedSharding(mesh, PartitionSpec(axes))


def check_batch_size(batch_size, mesh, *, parts=1, what='batch_size'):
  """Raises ConfigError unless all devices get equal shares of equal parts.

  Args:
    batch_size: global.
    mesh: of `make_mesh`.
    parts: micro-batches (accum_steps) that the batch is cut into.
    what: its name in the error.
  """
  ways = _axis_size(mesh, batch_sharding(mesh).spec[0]) * parts
  if not isinstance(batch_size, int) or batch_size < 1:
    raise ConfigError(f'{what}={batch_size!r} must be an integer of 1 or more.')
  if batch_size % ways:
    lower = batch_size // ways * ways
    cut = f' in {parts} micro-batches' if parts > 1 else ''
    raise ConfigError(
      f'{what}={batch_size} is global and must divide by {ways}: it is split '
      f'over {ways // parts} devices{cut}. Nearest: {lower or ways}, '
      f'{lower + ways}.'
    )


def annotate(abstract_tree, shardings):
  """ShapeDtypeStructs that know their sharding, as restoring needs them."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    abstract_tree,
    shardings,
  )


def this_process():
  """What tells the data pipeline which share of a batch is this host's."""
  return {
    'process_index': jax.process_index(),
    'process_count': jax.process_count(),
  }


def put_batch(batch, mesh):
  """Global arrays [B, ...] on the mesh of this host's numpy rows of a batch."""
  sharding = batch_sharding(mesh)
  # On several hosts jax takes this for an implicit transfer; it is not.
  with jax.transfer_guard_host_to_device('allow'):
    return jax.tree.map(
      lambda x: jax.make_array_from_process_local_data(sharding, x), batch
    )


def _axis_size(mesh, axes):
  if axes is None:
    return 1
  axes = (axes,) if isinstance(axes, str) else axes
  return int(np.prod([mesh.shape[axis] for axis in axes]))

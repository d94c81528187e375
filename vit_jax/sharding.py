"""Where arrays live: a mesh, path rules, and batches laid over it.

The model and the train step know nothing of this file; of the mesh, a model
knows which axes split the batch (models/mesh.py). With no rules at all
every parameter is replicated and the batch is split over all devices, which is
data parallelism; a rule such as ('.*/kernel', (None, 'data')) is all it takes
to shard further. recipes.py has ready ones.
"""

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from vit_jax import tree
from vit_jax.models.mesh import batch_axes, is_model_axis


def make_mesh(devices=None, /, **axis_sizes):
  """Mesh over all devices of all hosts; one axis may be -1 (what is left).

  Without sizes: one axis, 'data'. Axes are of type Auto, so the compiler
  propagates shardings; raises ValueError if sizes do not make up the devices.

  Args:
    devices: others to lay it over; they may be described, and not there.
    **axis_sizes: names and sizes of the axes.
  """
  devices = jax.devices() if devices is None else devices
  axis_sizes = axis_sizes or {'data': -1}
  sizes = list(axis_sizes.values())
  known = int(np.prod([s for s in sizes if s != -1]))
  if sizes.count(-1) == 1 and known > 0 and len(devices) % known == 0:
    sizes[sizes.index(-1)] = len(devices) // known
  if int(np.prod(sizes)) != len(devices) or min(sizes) < 1:
    raise ValueError(
      f'mesh {axis_sizes} does not fit {len(devices)} devices: the product of '
      'the sizes must be their number; one size may be -1.'
    )
  # jax.make_mesh refuses what divides an axis of a TPU torus: 2 x 32 on 4x4x4.
  array = mesh_utils.create_device_mesh(
    sizes, devices, allow_split_physical_axes=True
  )
  mesh = Mesh(array, tuple(axis_sizes), (AxisType.Auto,) * len(sizes))
  check_hosts(mesh.devices, mesh.axis_names)
  return mesh


def check_hosts(devices, axis_names):
  """Raises ValueError if devices of several hosts share their examples.

  Every host reads examples of its own; see `batch_sharding`.

  Args:
    devices: array with a dimension for each axis.
    axis_names: of a mesh.
  """
  shared = [i for i, name in enumerate(axis_names) if is_model_axis(name)]
  last = range(-len(shared), 0)
  groups = np.moveaxis(devices, shared, last)
  size = int(np.prod(groups.shape[groups.ndim - len(shared) :]))
  for group in groups.reshape(-1, size):
    hosts = {device.process_index for device in group}
    if len(hosts) > 1:
      sizes = dict(zip(axis_names, devices.shape, strict=True))
      raise ValueError(
        f'mesh {sizes}: {size} devices along axes named model... work on the '
        f'same examples, but are those of hosts {sorted(hosts)}, and each host '
        'reads its own. Make these axes smaller, at most the devices of a '
        'host, and the others larger.'
      )


def infer(abstract_tree, rules, mesh):
  """NamedSharding for each leaf, of the first rule that matches its path.

  Args:
    abstract_tree: pytree of arrays or ShapeDtypeStructs.
    rules: ((path rule, spec), ...); spec is a sequence of axis names, tuples of
      them, or None, one per leading array dimension; or a function of (path,
      shape, mesh) that returns one. No match: replicated.
    mesh: of `make_mesh`.

  Raises:
    ValueError: a spec names an unknown axis, or does not divide a shape.
  """
  return tree.map_with_path(
    lambda path, leaf: NamedSharding(
      mesh, PartitionSpec(*find_spec(rules, path, leaf.shape, mesh))
    ),
    abstract_tree,
  )


def find_spec(rules, path, shape, mesh):
  """The spec of one leaf, without trailing Nones; arguments as of `infer`."""
  i = tree.first_match([pattern for pattern, _ in rules], path)
  if i is None:
    return ()
  rule, spec = rules[i], rules[i][1]
  spec = tuple(spec(path, shape, mesh) if callable(spec) else spec)
  for dim, axes in enumerate(spec):
    size = axis_size(mesh, axes, where=f'sharding rule {rule}')
    if dim >= len(shape) or shape[dim] % size:
      raise ValueError(
        f'sharding rule {rule}: {path} of shape {tuple(shape)} cannot be split '
        f'{size}-fold along dimension {dim}. Let another rule match it before, '
        f'or set mesh sizes that divide it.'
      )
  while spec and spec[-1] is None:
    spec = spec[:-1]
  return spec


def axis_size(mesh, axes, *, where='sharding'):
  """How many ways an axis, or several together, split; 1 for None.

  Raises ValueError if the mesh has no such axis; `where` begins its text.
  """
  names = (axes,) if isinstance(axes, str) else axes or ()
  for name in names:
    if name not in mesh.shape:
      raise ValueError(
        f'{where}: no mesh axis {name!r}; there are {list(mesh.shape)}. Use '
        f'one of them, or add it: mesh={{..., {name!r}: SIZE}}.'
      )
  return int(np.prod([mesh.shape[name] for name in names]))


def replicated(mesh):
  """The sharding of an array of which every device holds a copy."""
  return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh):
  """Batches are split over all mesh axes but those named 'model*'.

  Tensor-parallel devices work on the same examples; all others on their own.
  """
  return NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))


def check_batch_size(batch_size, mesh, *, parts=1, what='batch_size'):
  """Raises ValueError unless all devices get equal shares of equal parts.

  Args:
    batch_size: global.
    mesh: of `make_mesh`.
    parts: micro-batches (accum_steps) that the batch is cut into.
    what: its name in the error.
  """
  ways = axis_size(mesh, batch_sharding(mesh).spec[0]) * parts
  if not isinstance(batch_size, int) or batch_size < 1:
    raise ValueError(f'{what}={batch_size!r} must be an integer of 1 or more.')
  if batch_size % ways:
    lower = batch_size // ways * ways
    cut = f' in {parts} micro-batches' if parts > 1 else ''
    raise ValueError(
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

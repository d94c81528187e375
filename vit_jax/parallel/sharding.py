"""Placement of arrays: a mesh, path rules, and batches laid over it.

The model and the train step do not depend on this file (a model only knows
which mesh axes split the batch, meshes.py). `rules_for` picks the recipe from
the sizes of three mesh axes:

  data   parameters are replicated, batches are split (the default)
  fsdp   parameters, their EMA, optimizer state and batches are split
  model  parameters are split by heads and hidden units, batches are not

A list of your own, ((path rule, spec), ...), replaces a recipe. Rules apply to
parameters, their EMA and the optimizer state alike, because all of these have
paths that end in the path of the parameter.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from vit_jax import tree
from vit_jax.kernels import KERNELS, Kernels
from vit_jax.meshes import batch_axes, is_model_axis
from vit_jax.types import Expect, PyTree, UserError

# One axis name, several, or None per leading array dimension; or a function of
# (path, shape, mesh) that returns them.
Spec = Sequence[Any] | Callable[..., Sequence[Any]]
Rules = Sequence[tuple[str, Spec]]  # (path rule, spec)
AxisSize = Annotated[
  int, Expect(lambda n: n >= 1 or n == -1, 'at least 1, or -1')
]


@dataclasses.dataclass(frozen=True)
class MeshSizes:
  """Sizes of the mesh axes, see above; one may be -1, all remaining devices.

  On several TPU slices, or machines of GPUs, 'data' spans them, and the other
  axes are within one: -1 for `fsdp` shards parameters within slices.
  Devices along 'model' work on the same examples and must belong to one host.
  """

  data: AxisSize = -1
  fsdp: AxisSize = 1
  model: AxisSize = 1

  def make(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return the mesh, with axes of size 1 only for 'data'; see `make_mesh`."""
    sizes = dataclasses.asdict(self)
    devices = jax.devices() if devices is None else devices
    if -1 in (self.fsdp, self.model) and self.data == -1:
      sizes['data'] = len({*map(slice_of, devices)})
    named = {k: v for k, v in sizes.items() if k == 'data' or v != 1}
    return make_mesh(devices, **named)


def make_mesh(
  devices: Sequence[jax.Device] | None = None, /, **axis_sizes: int
) -> Mesh:
  """Return a mesh over all devices of all hosts, by default of an axis 'data'.

  Devices may be described only. One size may be -1, all remaining devices.
  """
  devices = jax.devices() if devices is None else devices
  axis_sizes = axis_sizes or {'data': -1}
  try:
    sizes = np.empty(len(devices)).reshape(*axis_sizes.values()).shape
  except ValueError as error:
    raise UserError(
      f'mesh {axis_sizes} does not fit {len(devices)} devices. The product of '
      'the sizes must be the number of devices; one size may be -1.'
    ) from error
  array = _arrange(devices, dict(zip(axis_sizes, sizes)))
  mesh = Mesh(array, tuple(axis_sizes), (AxisType.Auto,) * len(sizes))
  _check_hosts(mesh.devices, mesh.axis_names)
  return mesh


def slice_of(device: Any) -> int:
  """Return the number of a TPU slice, or of the machine of a GPU."""
  return getattr(device, 'slice_index', None) or 0


def _arrange(devices, sizes):
  """Return devices by axis; 'data' spans slices, other axes are within one.

  The network between slices is slow; gradients alone pass it.
  """
  slices = collections.defaultdict(list)
  for device in devices:
    slices[slice_of(device)].append(device)
  count, data = len(slices), sizes.get('data', 1)
  if data % count:
    raise UserError(
      f'mesh {sizes} does not fit {count} slices of {len(devices) // count} '
      f"devices. 'data' spans slices, and the others are within one: use data="
      f'{count} or a multiple, such as --config.mesh.data={count} '
      '--config.mesh.fsdp=-1.'
    )
  within = sizes | {'data': data // count}
  # jax.make_mesh refuses what divides an axis of a TPU torus: 2 x 32 on 4x4x4.
  parts = [
    mesh_utils.create_device_mesh(
      [within[x] for x in sizes], part, allow_split_physical_axes=True
    )
    for _, part in sorted(slices.items())
  ]
  return np.concatenate(parts, axis=[*sizes].index('data') if count > 1 else 0)


def _check_hosts(devices, axis_names):
  """Raise UserError if devices of several hosts work on the same examples."""
  hosts = np.vectorize(lambda device: device.process_index)(devices)
  shared = tuple(i for i, x in enumerate(axis_names) if is_model_axis(x))
  if (hosts.max(shared) != hosts.min(shared)).any():
    raise UserError(
      f'mesh {dict(zip(axis_names, devices.shape, strict=True))}: devices '
      'along model axes work on the same examples, but belong to several '
      'hosts, which read different ones. Make these axes as large as a host.'
    )


def infer(abstract_tree: PyTree, rules: Rules | None, mesh: Mesh) -> PyTree:
  """Return the NamedSharding of each leaf, by its first rule or replicated.

  Rules of None are `rules_for(mesh)`.
  """
  rules = rules_for(mesh) if rules is None else rules

  def of_leaf(path, leaf):
    spec = PartitionSpec(*_find_spec(rules, path, leaf.shape, mesh))
    return NamedSharding(mesh, spec)

  return tree.map_with_path(of_leaf, abstract_tree)


def _find_spec(rules, path, shape, mesh):
  """Return the spec of one leaf, without trailing Nones."""
  i = tree.first_match([pattern for pattern, _ in rules], path)
  if i is None:
    return ()
  rule, spec = rules[i]
  spec = tuple(spec(path, shape, mesh) if callable(spec) else spec)
  for dim, axes in enumerate(spec):
    size = _axis_size(mesh, axes)
    if dim >= len(shape) or shape[dim] % size:
      raise UserError(
        f'sharding rule {rule}: {path} of shape {tuple(shape)} cannot be split '
        f'{size} ways along dimension {dim}. Use mesh sizes that divide it.'
      )
  while spec and spec[-1] is None:
    spec = spec[:-1]
  return spec


def _axis_size(mesh, axes):
  """Return how many ways an axis, or several together, split; 1 for None."""
  names = (axes,) if isinstance(axes, str) else axes or ()
  if missing := [name for name in names if name not in mesh.shape]:
    raise UserError(
      f'sharding: there is no mesh axis {missing[0]!r}; the mesh has '
      f'{list(mesh.shape)}. Set --config.mesh.{missing[0]}.'
    )
  return math.prod(mesh.shape[name] for name in names)


def replicated(mesh: Mesh) -> NamedSharding:
  """Return the sharding of an array that every device has a copy of."""
  return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Return the sharding of batches: over all axes not named 'model*'."""
  return NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))


def check_batch_size(
  batch_size: int, mesh: Mesh, *, parts: int = 1, what: str = 'batch_size'
) -> None:
  """Raise UserError unless `parts` micro-batches can be split equally."""
  ways = _axis_size(mesh, batch_sharding(mesh).spec[0]) * parts
  if batch_size % ways:
    cut = f' in {parts} micro-batches' if parts > 1 else ''
    raise UserError(
      f'{what}={batch_size} is global and must be a multiple of {ways}: it is '
      f'split over {ways // parts} devices{cut}.'
    )


def annotate(abstract_tree: PyTree, shardings: PyTree) -> PyTree:
  """Return ShapeDtypeStructs that know their sharding."""
  return jax.tree.map(
    lambda x, sharding: x.update(sharding=sharding), abstract_tree, shardings
  )


def this_process() -> dict[str, int]:
  """Return which part of each batch this host reads."""
  return {
    'process_index': jax.process_index(),
    'process_count': jax.process_count(),
  }


def reduce(fn: Callable[..., Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
  """Return {name: fn(array, numpy or jax.numpy)}, computed where they are."""
  is_here = jax.default_backend() == 'cpu' and jax.process_count() == 1
  if is_here or not any(isinstance(x, jax.Array) for x in arrays.values()):
    return {k: fn(jax.device_get(x), np) for k, x in arrays.items()}
  return jax.device_get(_reduce_on_devices(fn, dict(arrays)))


@functools.partial(jax.jit, static_argnums=0)
def _reduce_on_devices(fn, arrays):
  # One program: independent programs on several CPU devices can deadlock.
  return {name: fn(x, jnp) for name, x in arrays.items()}


def put_batch(batch: PyTree, mesh: Mesh) -> Any:
  """Return global arrays [B, ...] on the mesh, from the rows of this host."""
  # On several hosts JAX takes this for an implicit transfer, which it is not.
  with jax.transfer_guard_host_to_device('allow'):
    return jax.make_array_from_process_local_data(batch_sharding(mesh), batch)


def rules_for(mesh: Mesh) -> Rules:
  """Return FSDP over the axis 'fsdp', tensor parallelism over 'model'."""
  rules = tensor_parallel() if mesh.shape.get('model', 1) > 1 else []
  return fsdp(others=rules) if mesh.shape.get('fsdp', 1) > 1 else rules


def tensor_parallel(more: Kernels = ()) -> Rules:
  """Return rules that split attention by heads and MLPs by hidden units.

  This is Megatron's split: the two products of a branch need one sum over
  devices. `more` has rows for kernels that kernels.py does not have.
  """
  rules: list[Any] = []
  for layers, inputs, outputs in (*more, *KERNELS):
    axes = functools.partial(_split, (*inputs, *outputs))
    rules.append((f'{layers}/kernel', axes))
    rules.append((f'{layers}/bias', functools.partial(_split, outputs)))
  return rules


def _split(axes, path, shape, mesh):
  stacked = [None] * tree.is_stacked([path])
  of_layer = shape[len(stacked) :]
  if len(of_layer) != len(axes) or of_layer == (1,):
    return ()  # Adafactor keeps a row, a column, or one number
  return stacked + ['model' if x in ('heads', 'hidden') else None for x in axes]


def fsdp(*, min_elements: int = 2**14, others: Rules = ()) -> Rules:
  """Return rules that split each array over 'fsdp' in its largest dimension.

  An array stays whole if one layer of it has fewer than `min_elements`, or if
  the axis divides none of its dimensions (a width of 1664 cannot be split 256
  ways). The layer dimension of scanned layers is never split: each step of the
  scan needs one whole layer. Dimensions that `others` split are left to them.
  """
  return [('.*', functools.partial(_largest, min_elements, tuple(others)))]


def _largest(min_elements, others, path, shape, mesh):
  spec = [*_find_spec(others, path, shape, mesh)]
  spec += [None] * (len(shape) - len(spec))
  first = int(tree.is_stacked([path]))
  free = [
    dim
    for dim in range(first, len(shape))
    if spec[dim] is None and shape[dim] % _axis_size(mesh, 'fsdp') == 0
  ]
  if free and math.prod(shape[first:]) >= min_elements:
    spec[max(free, key=lambda dim: shape[dim])] = 'fsdp'
  return spec

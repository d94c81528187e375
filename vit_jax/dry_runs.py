"""Summaries of runs that stop before their first step."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from vit_jax import sharding, terminal, tree
from vit_jax.data.pipeline import Data
from vit_jax.durations import Timeline
from vit_jax.types import Model, Shape

GIB = 2**30


def report_training(
  model: Model,
  state: Any,
  step_fn: Any,
  data: Data,
  image_shape: Shape,
  mesh: Mesh,
  timeline: Timeline,
) -> None:
  """Compile the train step and print what would be trained.

  Args:
    model: Flax module.
    state: TrainState of ShapeDtypeStructs with shardings.
    step_fn: jitted train step.
    data: Data of the training.
    image_shape: (H, W, C) of its images.
    mesh: as returned by `sharding.make_mesh`.
    timeline: Timeline of the run.
  """
  split = sharding.batch_sharding(mesh)
  label = jnp.asarray(data.first_example()['label'])
  kind = jnp.float32 if label.ndim else jnp.int32
  shape = (data.batch_size,)
  batch = {
    'image': jax.ShapeDtypeStruct((*shape, *image_shape), jnp.uint8),
    'label': jax.ShapeDtypeStruct((*shape, *label.shape), kind),
  }
  batch = sharding.annotate(batch, jax.tree.map(lambda _: split, batch))
  with jax.set_mesh(mesh):
    compiled = step_fn.lower(state, batch).compile()
  params = jax.tree.leaves(state.params)
  on_a_device = sum(_bytes_on_a_device(x) for x in jax.tree.leaves(state))
  axes = ', '.join(f'{name} {size}' for name, size in mesh.shape.items())
  source = type(data.source).__name__
  rows = [
    ('model', type(model).__name__),
    ('parameters', f'{sum(math.prod(x.shape) for x in params):,}'),
    ('data', f'{len(data.source):,} examples of {source}'),
    ('classes', str(model.num_classes)),
    ('images', 'x'.join(map(str, image_shape))),
    ('batch size', str(data.batch_size)),
    ('steps', f'{timeline.total_steps:,}'),
    ('mesh', f'{axes} ({mesh.devices.flat[0].device_kind})'),
    ('state on a device', f'{on_a_device / GIB:.3f} GiB'),
    ('temporaries on a device', _temporaries(compiled)),
  ]
  for path, leaf in _largest(state.params):
    spec = tuple(leaf.sharding.spec) or 'replicated'
    rows.append((path, f'{tuple(leaf.shape)} {spec}'))
  table = terminal.table('dry run: nothing was trained', ['what', 'is'], rows)
  terminal.console().print(table)


def _temporaries(compiled):
  memory = compiled.memory_analysis()
  if memory is None:
    return 'not known for this device'
  return f'{memory.temp_size_in_bytes / GIB:.3f} GiB'


def _bytes_on_a_device(leaf):
  shape = leaf.sharding.shard_shape(leaf.shape)
  size = getattr(leaf.dtype, 'itemsize', 4)
  return math.prod(shape) * size


def _largest(params):
  flat = tree.flatten(params)
  ranked = sorted(flat, key=lambda path: -math.prod(flat[path].shape))
  return [(path, flat[path]) for path in ranked[:4]]

"""Summaries of runs that stop before their first step."""

import math
from typing import Any

import jax
from jax.sharding import Mesh

from vit_jax import tree
from vit_jax.data.pipeline import Data
from vit_jax.optim.durations import Timeline
from vit_jax.parallel import sharding
from vit_jax.runs import ahead, terminal
from vit_jax.runs.device_memory import GIB
from vit_jax.types import Model, Shape


def report_training(
  model: Model,
  state: Any,
  step_fn: Any,
  data: Data,
  image_shape: Shape,
  mesh: Mesh,
  timeline: Timeline,
  *teacher: Any,
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
    *teacher: parameters of the teacher, if there is one, as for `state`.
  """
  compiled = _compile(state, step_fn, data, image_shape, mesh, *teacher)
  params = jax.tree.leaves(state.params)
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
    ('state on a device', _size_on_a_device(state)),
    *(('teacher on a device', _size_on_a_device(each)) for each in teacher),
    ('temporaries on a device', _temporaries(compiled)),
  ]
  for path, leaf in _largest(state.params):
    spec = tuple(leaf.sharding.spec) or 'replicated'
    rows.append((path, f'{tuple(leaf.shape)} {spec}'))
  table = terminal.table('dry run: nothing was trained', ['what', 'is'], rows)
  terminal.console().print(table)


def explain_memory(
  model: Model,
  state: Any,
  step_fn: Any,
  data: Data,
  image_shape: Shape,
  mesh: Mesh,
  accum_steps: int,
  *teacher: Any,
) -> str:
  """Return what a training step needs on a device, and how to need less.

  Args:
    model, state, step_fn, data, image_shape, mesh: as in `report_training`.
    accum_steps: number of micro-batches of a step.
    *teacher: as in `report_training`.
  """
  ways = sharding.axis_size(mesh, sharding.batch_sharding(mesh).spec[0])
  temporaries = 'not estimated on several hosts'
  if jax.process_count() == 1:
    try:
      with terminal.waiting('estimating the memory of a step ...'):
        compiled = _compile(state, step_fn, data, image_shape, mesh, *teacher)
        temporaries = _temporaries(compiled)
    except (jax.errors.JaxRuntimeError, MemoryError):
      temporaries = 'too large to compile the step'
  per_device = data.batch_size // ways
  micro = f' in {accum_steps} micro-batches' if accum_steps > 1 else ''
  lines = [
    f'The batch of {data.batch_size} images is {per_device} per device{micro}. '
    f'A training step needs per device: state {_size_on_a_device(state)}, '
    + ''.join(f'teacher {_size_on_a_device(each)}, ' for each in teacher)
    + f'temporaries {temporaries}. To need less:'
  ]
  if smaller := per_device // accum_steps // 2 * accum_steps * ways:
    lines.append(
      f'--config.data.batch_size={smaller}: a smaller batch; other results'
    )
  if more := _next_divisor(per_device, accum_steps):
    lines.append(
      f'--config.accum_steps={more}: the same batch in {more} micro-batches'
    )
  if getattr(model, 'remat', '') != 'full':
    lines.append(
      '--config.model.remat=full: compute activations again in the backward '
      'pass, instead of keeping them'
    )
  return '\n  '.join(lines)


def _next_divisor(number, above):
  """Return the smallest divisor of `number` above another; None: no such."""
  return next(
    (x for x in range(above + 1, number + 1) if number % x == 0), None
  )


def _compile(state, step_fn, data, image_shape, mesh, *teacher):
  """Return the compiled train step."""
  label = data.first_example()['label']
  batch = ahead.batch_shapes(image_shape, label, data.batch_size, mesh)
  return ahead.compile_step(state, step_fn, batch, mesh, *teacher)


def _temporaries(compiled):
  memory = compiled.memory_analysis()
  if memory is None:
    return 'not known for this device'
  return f'{memory.temp_size_in_bytes / GIB:.3f} GiB'


def _size_on_a_device(state):
  size = sum(_bytes_on_a_device(x) for x in jax.tree.leaves(state))
  return f'{size / GIB:.3f} GiB'


def _bytes_on_a_device(leaf):
  shape = leaf.sharding.shard_shape(leaf.shape)
  size = getattr(leaf.dtype, 'itemsize', 4)
  return math.prod(shape) * size


def _largest(params):
  flat = tree.flatten(params)
  ranked = sorted(flat, key=lambda path: -math.prod(flat[path].shape))
  return [(path, flat[path]) for path in ranked[:4]]

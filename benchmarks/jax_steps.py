"""A batch and timing for the scripts of JAX models.

They need jax, flax and optax, and for --topology this package with its
dependencies and the compiler: the extra 'tpu' or 'cuda'.
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import timing
from jax.sharding import NamedSharding, PartitionSpec

NUM_CLASSES = 1000
TX = optax.chain(
  optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=0.1)
)


def parser(doc):
  """Return the ArgumentParser of a script."""
  made = timing.step_parser(doc)
  made.add_argument(
    '--topology',
    help='print Mcycles of a step there, such as v5e:2x2, or the least ms on '
    'GPUs, such as h100:1, and run nothing',
  )
  return made


def mesh(devices=None):
  """Return the mesh that batches are sharded over."""
  auto = (jax.sharding.AxisType.Auto,)
  return jax.sharding.Mesh(devices or jax.devices(), ('data',), axis_types=auto)


def find_devices(args):
  """Return the devices of this machine, or those of --topology."""
  if not args.topology:
    return jax.devices()
  from vit_jax.tools.compile import lowering

  jax.config.update('jax_platforms', 'cpu')  # the others are described
  return lowering.find_devices(args.topology)


def report(args, params, logits, state, train):
  """Print images per second, or with --topology the compiler's estimate.

  Args:
    args: of `parser`.
    params, state: () -> parameters, or the first state of a training.
    logits: (params, images uint8 [B, H, W, 3]) -> logits.
    train: (state, images, labels [B]) -> (state, loss).
  """

  def infer(params, images, labels):
    del labels
    return params, logits(params, images)

  init, step = (state, train) if args.mode == 'train' else (params, infer)
  batch, size = args.batch_size, args.image_size
  shapes = (
    jax.ShapeDtypeStruct((batch, size, size, 3), jnp.uint8),
    jax.ShapeDtypeStruct((batch,), jnp.int32),
  )
  devices = find_devices(args)
  over = mesh(devices)
  whole = NamedSharding(over, PartitionSpec())
  split = NamedSharding(over, PartitionSpec('data'))
  step = jax.jit(
    step,
    donate_argnums=0,
    in_shardings=(whole, split, split),
    out_shardings=(whole, split if args.mode == 'infer' else whole),
  )
  begin = time.perf_counter()
  with jax.set_mesh(over):
    lowered = step.lower(jax.eval_shape(init), *shapes)
  if args.topology:
    print(_estimate(devices[0], lowered))
    return
  compiled = lowered.compile()
  _note(args, compiled, time.perf_counter() - begin)
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, shapes[0].shape, np.uint8)
  labels = rng.integers(0, NUM_CLASSES, batch, np.int32)
  given = jax.device_put((images, labels), split)
  carry, result = jax.jit(init, out_shardings=whole)(), None

  def run():
    nonlocal carry, result
    carry, result = compiled(carry, *given)
    if jax.default_backend() == 'cpu':  # it would compute several at once
      wait()

  def wait():
    jax.block_until_ready((carry, result))

  timing.report(run, args.steps, batch, wait)


def _note(args, compiled, seconds):
  memory = compiled.memory_analysis()
  total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
  print(
    f'{args.model} {args.mode}, batch {args.batch_size}: compiled in '
    f'{seconds:.1f} s, {total / 2**30:.2f} GiB of each device',
    file=sys.stderr,
  )


def _estimate(device, lowered):
  """Return the least milliseconds of a step on a GPU, or Mcycles on a TPU."""
  from vit_jax.tools.compile import lowering, rows

  compiled = lowering.compile_for(device, lowered)
  row = {'device_kind': device.device_kind, 'head_dim': 64}
  row |= {'batch_size': 1, 'model_tflop': 0}
  found = rows.numbers(row, compiled, compiled.as_text())
  return found.get('roofline_ms') or found['megacycles']

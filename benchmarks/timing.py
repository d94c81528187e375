"""Arguments, a batch and timing for the scripts of JAX models.

They need jax, flax and optax, and for --topology this package with its
dependencies and libtpu.
"""

import argparse
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

NUM_CLASSES = 1000
TX = optax.chain(
  optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=0.1)
)


def parser(doc):
  """Return the ArgumentParser of a script."""
  made = argparse.ArgumentParser(
    description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  made.add_argument('model', help='such as B/16')
  made.add_argument('--mode', choices=('train', 'infer'), default='train')
  made.add_argument('--batch_size', type=int, default=8, help='of all devices')
  made.add_argument('--image_size', type=int, default=224)
  made.add_argument('--dtype', default='bfloat16', help='or float32')
  made.add_argument('--steps', type=int, default=30)
  made.add_argument(
    '--topology',
    help='print Mcycles of a step there, such as v5e:2x2, and run nothing',
  )
  return made


def mesh(devices=None):
  """Return the mesh that batches are sharded over."""
  auto = (jax.sharding.AxisType.Auto,)
  return jax.sharding.Mesh(devices or jax.devices(), ('data',), axis_types=auto)


def report(args, init, step):
  """Print images per second, or millions of cycles with --topology.

  Args:
    args: of `parser`.
    init: () -> carry, a tree of arrays.
    step: (carry, images uint8 [B, H, W, 3], labels [B]) -> (carry, result).
  """
  batch, size = args.batch_size, args.image_size
  shapes = (
    jax.ShapeDtypeStruct((batch, size, size, 3), jnp.uint8),
    jax.ShapeDtypeStruct((batch,), jnp.int32),
  )
  devices = jax.devices()
  if args.topology:
    from vit_jax.tools.compile.lowering import find_devices

    devices = find_devices(args.topology)
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
    compiled = step.lower(jax.eval_shape(init), *shapes).compile()
  _note(args, compiled, time.perf_counter() - begin)
  if args.topology:
    print(_megacycles(compiled, devices[0].device_kind))
    return
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, shapes[0].shape, np.uint8)
  labels = rng.integers(0, NUM_CLASSES, batch, np.int32)
  given = jax.device_put((images, labels), split)
  carry = jax.jit(init, out_shardings=whole)()
  for count in (5, args.steps):  # the first ones do not count
    begin = time.perf_counter()
    for _ in range(count):
      carry, result = compiled(carry, *given)
      if jax.default_backend() == 'cpu':  # it would compute several at once
        jax.block_until_ready(result)
    jax.block_until_ready((carry, result))
  print(args.steps * batch / (time.perf_counter() - begin))


def _note(args, compiled, seconds):
  memory = compiled.memory_analysis()
  total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
  print(
    f'{args.model} {args.mode}, batch {args.batch_size}: compiled in '
    f'{seconds:.1f} s, {total / 2**30:.2f} GiB of each device',
    file=sys.stderr,
  )


def _megacycles(compiled, device_kind):
  from vit_jax.tools.compile import hlo
  from vit_jax.tools.compile.rows import kernel_cycles

  found = hlo.costs(compiled.as_text())
  return (found.cycles + kernel_cycles(found, device_kind, 64)) / 1e6

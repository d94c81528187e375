"""Report versions, devices and memory, and check what the compiler computes.

  python -m vit_jax.tools.doctor [--quick]

Operations that models are trained with are computed on the local devices, in
real sizes, and compared with numpy in float64; collectives between devices with
their definition; a training step, compiled as one program, with the same
operations compiled one by one.

The exit status is 0; 1 if a result is wrong; 2 for wrong arguments.
"""

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from vit_jax.data import images
from vit_jax.models import names
from vit_jax.models.layers import Normalize
from vit_jax.objectives.classification import softmax_xent
from vit_jax.runs import canary
from vit_jax.runs.canary import Check
from vit_jax.step import TrainState, train_step
from vit_jax.tools import parsers
from vit_jax.tree import flatten

_PACKAGES = (
  *('vit_jax', 'jax', 'jaxlib', 'libtpu'),
  *('jax-cuda12-plugin', 'jax-cuda13-plugin'),
  *('flax', 'optax', 'orbax-checkpoint', 'grain', 'numpy'),
)


def report() -> dict[str, str]:
  """Return {name: text} of what this installation consists of."""
  devices = jax.devices()
  found = {
    'system': f'{platform.platform()}, {os.cpu_count()} CPU threads',
    'python': platform.python_version(),
  }
  for name in _PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[name] = importlib.metadata.version(name)
  found |= {
    'devices': f'{len(devices)} x {devices[0].device_kind} '
    f'({devices[0].platform}), {jax.process_count()} process(es)',
    'XLA_FLAGS': os.environ.get('XLA_FLAGS', 'not set'),
    'JPEG extension': 'in use'
    if images.decode_part is not None
    else 'not compiled: whole JPEGs are decoded, see docs/data.md',
    'memory': _gb(os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')),
  }
  stats = devices[0].memory_stats() or {}
  if limit := stats.get('bytes_limit'):
    found['memory of each device'] = f'{_gb(limit)} for JAX'
  folder = tempfile.gettempdir()
  found[f'disk of {folder}'] = f'{_gb(shutil.disk_usage(folder).free)} free'
  return found


def _gb(number):
  return f'{number / 1e9:.1f} GB'


def _softmax(np, x):
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def _attention(np, q, k, v):
  scores = np.einsum('bqhd,bnhd->bhqn', q, k) * q.shape[-1] ** -0.5
  return np.einsum('bhqn,bnhd->bqhd', _softmax(np, scores), v)


def _layer_norm(np, x, scale, bias):
  mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
  return (x - mean) / np.sqrt(var + 1e-6) * scale + bias


def _embed(np, x, kernel):
  size, channels, width = kernel.shape[1:]
  if np is jnp:
    return jax.lax.conv_general_dilated(
      x,
      kernel,
      window_strides=(size, size),
      padding='VALID',
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    )
  batch, side = x.shape[0], x.shape[1] // size
  x = x.reshape(batch, side, size, side, size, channels).swapaxes(2, 3)
  x = x.reshape(batch, side, side, size * size * channels)
  return x @ kernel.reshape(-1, width)


_CHECKS = (
  Check(
    'dense layer, 394 x 768 -> 3072',
    ((394, 768), (768, 3072), (1, 3072)),
    lambda np, x, kernel, bias: x @ kernel + bias,
  ),
  Check(
    'gradient of a kernel, 50,432 x 192',
    ((50_432, 192), (50_432, 192)),
    lambda np, x, dy: x.T @ dy,
  ),
  Check(
    'attention, 2 x 197 tokens x 12 heads',
    ((2, 197, 12, 64),) * 3,
    _attention,
  ),
  Check(
    'LayerNorm, 50,432 x 192', ((50_432, 192), (1, 192), (1, 192)), _layer_norm
  ),
  Check(
    'patch embedding, 4 x 224 px', ((4, 224, 224, 3), (16, 16, 3, 768)), _embed
  ),
)


def errors(quick: bool = False) -> Iterator[tuple[str, str, float, float]]:
  """Yield (name, dtype, error, bound) of each check."""
  for check in canary.QUICK + (() if quick else _CHECKS):
    dtypes = ('float32',) if check in canary.QUICK else ('float32', 'bfloat16')
    for dtype in dtypes:
      found = canary.run(dataclasses.replace(check, dtype=dtype))
      yield check.name, dtype, found, canary.bound(dtype)
  if quick:
    return
  if (count := jax.local_device_count()) > 1:
    name = f'collectives of {count} devices'
    bound = canary.BOUNDS['float32']
    yield name, 'float32', collectives_error(), bound
  # Errors add up over layers.
  bound = canary.bound('float32', slack=4)
  yield 'training step, ViT-S/16, 2 layers', 'float32', step_error(), bound


def collectives_error() -> float:
  """Return the error of what local devices exchange."""
  devices, axis = jax.local_devices(), 'device'
  x = np.random.default_rng(0).standard_normal((len(devices), 32, 384))
  x = x.astype(np.float32)

  def of_device(part):
    total = jax.lax.psum(part[0], axis)
    return total, jax.lax.all_gather(part[0], axis)

  spec = PartitionSpec(axis)
  total, gathered = jax.jit(
    jax.shard_map(
      of_device,
      mesh=Mesh(np.array(devices), (axis,)),
      in_specs=spec,
      out_specs=spec,
    )
  )(x)
  copies = (len(devices), 1)
  return max(
    canary.error(total, np.tile(x.sum(0), copies)),
    canary.error(gathered, np.concatenate([x] * len(devices))),
  )


def step_error() -> float:
  """Return the error of an update compiled whole, next to single operations."""
  model = names.create('ViT-S/16', num_classes=10).clone(depth=2)
  rng = np.random.default_rng(0)
  batch = {
    'image': jnp.asarray(rng.integers(0, 256, (2, 224, 224, 3), np.uint8)),
    'label': jnp.array([3, 1]),
  }
  shape = batch['image'].shape
  params = jax.jit(model.init)(jax.random.key(0), jnp.zeros(shape))['params']
  params = jax.tree.map(  # heads are initialised with zeros
    lambda x: x + 0.05 * rng.standard_normal(x.shape, np.float32), params
  )
  loss_fn = softmax_xent(model, preprocess=Normalize())
  tx = optax.sgd(1000.0)  # the updates exceed the parameters
  start = jnp.zeros((), jnp.int32)
  state = TrainState(start, params, tx.init(params), jax.random.key(0))

  def update(state):
    after, _ = train_step(state, batch, loss_fn=loss_fn, tx=tx)
    return jax.tree.map(jnp.subtract, after.params, state.params)

  found = flatten(jax.jit(update)(state))
  with jax.disable_jit():
    expected = flatten(update(state))
  # The gradient of the bias of keys is only rounding errors.
  paths = [path for path in found if not path.endswith('key/bias')]
  return max(canary.error(found[path], expected[path]) for path in paths)


def main(argv: Sequence[str] | None = None) -> None:
  """Run the command."""
  parser = parsers.parser(__doc__, 'tools.doctor [--quick]')
  parser.add_argument(
    '--quick', action='store_true', help='only the checks of each training run'
  )
  args = parser.parse_args(argv)
  for name, text in report().items():
    print(f'{name:<26} {text}')
  print(f'\n{"check":<44} {"dtype":<9} {"error":>8} {"bound":>8}')
  wrong = []
  for name, dtype, error, bound in errors(args.quick):
    result = 'ok' if error <= bound else 'WRONG'
    print(f'{name:<44} {dtype:<9} {error:>8.1e} {bound:>8.1e}  {result}')
    wrong += [name] if error > bound else []
  if wrong:
    sys.exit(f'\nWRONG: {"; ".join(wrong)}. {canary.remedy()}')
  print('\nAll results are right.')


if __name__ == '__main__':
  main()

"""Report versions and devices, and check that programs compute right values.

  python -m vit_jax.tools.doctor [--hosts]

First it names what keeps JAX from starting; --hosts, on all hosts of a job, in
one table, with who is missing after 30 seconds.

Products of real sizes are computed on the local devices and compared with numpy
in float64; a training step, compiled as one program for all local devices, with
the same operations compiled one by one for one device (20 CPU seconds).

The exit status is 0; 1 if something is wrong; 2 for wrong arguments.
"""

import dataclasses
import functools
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.data import images
from vit_jax.io import terminal
from vit_jax.models.dense import Normalize
from vit_jax.objectives.classification import softmax_xent
from vit_jax.parallel import sharding
from vit_jax.runs import canary, workdirs
from vit_jax.runs.canary import Check
from vit_jax.step import init_state, train_step
from vit_jax.tools import parsers, preflight
from vit_jax.tree import flatten
from vit_jax.zoo import names


def report() -> dict[str, str]:
  """Return {name: text}: versions, devices, options of this installation."""
  devices = jax.devices()
  found = {
    'system': f'{platform.platform()}, {os.cpu_count()} CPU threads',
    **{name: text for name, text in workdirs.versions().items() if text},
    'devices': f'{len(devices)} x {devices[0].device_kind} '
    f'({devices[0].platform}), {jax.process_count()} process(es)',
    'XLA_FLAGS': os.environ.get('XLA_FLAGS', 'not set'),
    'JPEG extension': 'in use'
    if images.decode_part is not None
    else 'not compiled: whole JPEGs are decoded, see docs/data.md',
  }
  if limit := (devices[0].memory_stats() or {}).get('bytes_limit'):
    found['memory of each device'] = f'{limit / 1e9:.1f} GB for JAX'
  return found


def _attention(np, q, k, v):
  scores = np.einsum('bqhd,bnhd->bhqn', q, k) * q.shape[-1] ** -0.5
  e = np.exp(scores - scores.max(-1, keepdims=True))
  return np.einsum('bhqn,bnhd->bqhd', e / e.sum(-1, keepdims=True), v)


_CHECKS = (
  Check(
    'gradient of a kernel, 50,432 x 192',
    ((50_432, 192), (50_432, 192)),
    lambda np, x, dy: x.T @ dy,
  ),
  Check('attention, 197 tokens', ((2, 197, 12, 64),) * 3, _attention),
)


def checks() -> Iterator[tuple[str, str, float, Callable[[], float]]]:
  """Yield (name, dtype, bound, function that returns the error) of each."""
  for check in (*canary.QUICK, *_CHECKS):
    for dtype in ('float32', 'bfloat16') if check in _CHECKS else ('float32',):
      run = functools.partial(canary.run, check, dtype)
      yield check.name, dtype, canary.bound(dtype), run
  name, bound = 'training step, ViT-S/16, 2 layers', 4 * canary.bound()
  yield name, 'float32', bound, step_error  # errors add up over layers


def step_error() -> float:
  """Return the error of an update on all devices, next to single operations."""
  model = names.create('ViT-S/16', num_classes=10).clone(depth=2)
  mesh = sharding.make_mesh(jax.local_devices())
  rng, shape = np.random.default_rng(0), (2 * mesh.size, 224, 224, 3)
  batch = {
    'image': rng.integers(0, 256, shape, np.uint8),
    'label': np.arange(shape[0]) % 10,
  }
  loss_fn = softmax_xent(model, preprocess=Normalize())
  tx = optax.sgd(1000.0)  # the updates exceed the parameters
  images = jax.ShapeDtypeStruct(shape, jnp.float32)
  fields = {'model': model, 'images': images, 'tx': lambda params: tx}
  state = jax.jit(functools.partial(init_state, **fields))(jax.random.key(0))
  noisy = jax.tree.map(  # heads are initialised with zeros
    lambda x: x + 0.05 * rng.standard_normal(x.shape, np.float32), state.params
  )
  state = dataclasses.replace(state, params=noisy)

  def update(state, batch):
    after, _ = train_step(state, batch, loss_fn=loss_fn, tx=tx)
    return jax.tree.map(jnp.subtract, after.params, state.params)

  everywhere = jax.device_put(state, sharding.replicated(mesh))
  found = flatten(jax.jit(update)(everywhere, sharding.put_batch(batch, mesh)))
  with jax.disable_jit():
    expected = flatten(update(state, jax.device_put(batch)))
  # The gradient of the bias of keys is only rounding errors.
  paths = [path for path in found if not path.endswith('key/bias')]
  return max(canary.error(found[path], expected[path]) for path in paths)


def main(argv: Sequence[str] | None = None) -> None:
  parser = parsers.parser(__doc__, 'tools.doctor')
  parser.add_argument('--hosts', action='store_true', help='one table of all')
  with terminal.one_message():
    if parser.parse_args(argv).hosts:
      sys.exit(preflight.call_hosts() or None)
  if faults := preflight.check()[1]:
    sys.exit('\n'.join(faults))
  for name, text in report().items():
    print(f'{name:<26} {text}')
  print(f'\n{"check":<44} {"dtype":<9} {"error":>8} {"bound":>8}')
  wrong = []
  for name, dtype, bound, run in checks():
    print(f'{name:<44} {dtype:<9}', end=' ', flush=True)  # before it is known
    error = run()
    result = 'ok' if error <= bound else 'WRONG'
    print(f'{error:>8.1e} {bound:>8.1e}  {result}')
    wrong += [name] if error > bound else []
  if wrong:
    sys.exit(f'\nWRONG: {"; ".join(wrong)}. {canary.REMEDY}')
  print('\nAll results are right.')


if __name__ == '__main__':
  main()

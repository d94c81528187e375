"""Damaged checkpoints, foreign files, full disks, vanished workdirs, lag."""

import pathlib
import random
import shutil
from collections.abc import Iterator

import numpy as np

from .harness import Case, fault
from .runs import CONFIG

# The cheapest run that has all kinds of checkpoint files.
SMALL = CONFIG.replace('every_steps=5, keep_last=2', 'every_steps=5')
SMALL = SMALL.replace('total_steps=40', 'total_steps=20')


@fault(times=300, in_ci=20)
def flipped_bits(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """A flipped bit in a file of the newest checkpoint."""
  good, expected, restore = _two_checkpoints(folder / 'good')
  files = [x for x in sorted((good / '2').rglob('*')) if x.is_file()]
  files = [x for x in files if x.stat().st_size]
  for number in range(times):
    rng = random.Random(number)
    file = files[number % len(files)].relative_to(good)
    bit = rng.randrange(8 * (good / file).stat().st_size)
    workdir = folder / str(number)
    shutil.copytree(good, workdir / 'checkpoints')
    _flip(workdir / 'checkpoints' / file, bit)
    yield Case(f'{file}, bit {bit}', _lost(restore, workdir, expected))
    shutil.rmtree(workdir)


def _two_checkpoints(workdir):
  """Return checkpoints 1 and 2, what they hold, and a function to restore."""
  import jax
  import jax.numpy as jnp
  import optax

  from vit_jax import sharding
  from vit_jax.checkpoint import Checkpointer
  from vit_jax.step import TrainState

  def state(step):
    rng = np.random.default_rng(step)
    params = {
      'kernel': jnp.asarray(rng.normal(size=(40, 30)), jnp.float32),
      'bias': jnp.asarray(rng.normal(size=7), jnp.bfloat16),
    }
    return TrainState(
      step=jnp.asarray(step, jnp.int32),
      params=params,
      opt_state=optax.adam(0.1).init(params),
      rng=jax.random.key(step),
      ema=jax.tree.map(lambda x: 2 * x, params),
    )

  def numpy(state):
    state = state.__class__(
      **{**state.__dict__, 'rng': jax.random.key_data(state.rng)}
    )
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]

  def restore(workdir):
    checkpointer = Checkpointer(workdir, best_metric='x', keep_last=2)
    state, data = checkpointer.restore(abstract)
    checkpointer.close()
    return numpy(state), data['position']

  checkpointer = Checkpointer(workdir, best_metric='x', keep_last=2)
  for step in (1, 2):
    position = {'position': 8 * step}
    checkpointer.save(step, state(step), position, metrics={'x': 0.5})
  checkpointer.close()
  shapes = jax.eval_shape(lambda: state(1))
  mesh = sharding.make_mesh()
  abstract = sharding.annotate(shapes, sharding.infer(shapes, (), mesh))
  expected = [(numpy(state(step)), 8 * step) for step in (1, 2)]
  return workdir / 'checkpoints', expected, restore


def _flip(file, bit):
  data = bytearray(file.read_bytes())
  data[bit // 8] ^= 1 << bit % 8
  file.write_bytes(bytes(data))


def _lost(restore, workdir, expected):
  """Return '' if one of the expected checkpoints is restored bit by bit."""
  try:
    found = restore(workdir)
  except Exception as error:
    return f'{type(error).__name__}: {" ".join(str(error).split()):.100}'
  if found not in expected:
    return 'wrong values without a word'
  names = {path.name for path in (workdir / 'checkpoints').iterdir()}
  return '' if names & {'2', 'damaged-2'} else f'deleted: {names}'

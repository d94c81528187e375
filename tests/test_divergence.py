"""NaN and Inf: found in the state before it is saved, and rolled back."""

import functools
import json
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from vit_jax.data.pipeline import Data
from vit_jax.objectives.classification import softmax_xent
from vit_jax.optim.durations import steps
from vit_jax.optim.optimizers import Optimizer
from vit_jax.optim.schedules import Schedule
from vit_jax.parallel.sharding import MeshSizes, put_batch
from vit_jax.preprocess import Normalize
from vit_jax.runs import divergence
from vit_jax.runs.checkpoint import Checkpointer, Checkpoints
from vit_jax.runs.divergence import NonFiniteError
from vit_jax.runs.metrics import read_records
from vit_jax.train import Evaluation, make_step, train


class Linear(nn.Module):
  """The smallest model that can be trained."""

  num_classes: int = 2

  @nn.compact
  def __call__(self, images, *, train=False):
    del train
    return nn.Dense(self.num_classes)(images.reshape(len(images), -1))


class Numbers:
  """Each image holds the four bytes of its index."""

  num_classes = 2
  channels = 1

  def __len__(self):
    return 10**6

  def __getitem__(self, index):
    image = np.array([index], np.uint32).view(np.uint8).reshape(2, 2, 1)
    return {'image': image, 'label': index % 2}


def nan_for(model, *, preprocess, images):
  """Objective with gradients of NaN for a batch with one of these images."""
  inner = softmax_xent(model, preprocess=preprocess)

  def loss_fn(params, batch, rng):
    loss, metrics = inner(params, batch, rng)
    bad = jnp.array(images, jnp.uint8)[:, None]  # [N, 1, 2, 2, 1]
    is_bad = (batch['image'][None] == bad).all((2, 3, 4)).any()
    return loss * jnp.where(is_bad, jnp.nan, 1.0), metrics

  return loss_fn


MESH = MeshSizes()
DATA = Data(Numbers(), batch_size=8)
OPTIMIZER = Optimizer(optax.adam)


def run(workdir, bad=(), **options):
  """Train with NaN in the batches with these numbers, counted from 0."""
  images = [first_image(number) for number in bad]
  options = {
    'total': 8,
    'checkpoint': Checkpoints(every=steps(3)),
    **options,
  }
  return train(
    workdir,
    model=Linear(),
    data=DATA,
    objective=functools.partial(nan_for, images=images or [first_image(999)]),
    optimizer=OPTIMIZER,
    schedule=Schedule(lr=0.1, decay='constant'),
    total=steps(options.pop('total')),
    log_every=steps(1),
    ema_decay=0.9,
    allow_changes=['objective', 'total_steps'],
    **options,
  )


@functools.cache
def first_image(number):
  batches = DATA.train_batches(start=number * DATA.batch_size)
  image = next(batches)['image'][0].tolist()
  batches.close()
  return image


def saved_data(workdir, step):
  file = workdir / 'checkpoints' / str(step) / 'data' / 'metadata'
  return json.loads(file.read_text())


def test_a_rollback_skips_the_batches_since_the_checkpoint(
  tmp_path, capsys, monkeypatch
):
  """Batch 5 is bad: back to step 3 without batches 4 and 5. So is batch 9."""
  held = []  # kernels in memory when a state is restored
  restore = Checkpointer.restore

  def counted(*args, **kwargs):
    held.append([x for x in jax.live_arrays() if x.shape == (4, 2)])
    return restore(*args, **kwargs)

  monkeypatch.setattr(Checkpointer, 'restore', counted)
  state = run(tmp_path, bad=[4, 8], on_nan='rollback')
  used = [0, 1, 2, 5, 6, 7, 9, 10]
  expected = trained_on(used)
  for name in ('params', 'opt_state', 'ema'):
    jax.tree.map(
      np.testing.assert_array_equal,
      getattr(state, name),
      getattr(expected, name),
    )
  assert held == [[], []]
  counts = {'rollbacks': 2, 'batches_skipped': 3}
  saved = saved_data(tmp_path, 8)
  assert saved.items() >= {'position': 11 * 8, **counts}.items()
  losses = [r for r in read_records(tmp_path) if 'train/loss' in r]
  assert [r['step'] for r in losses] == [*range(1, 9)]
  assert [r.get('batches_skipped', 0) for r in losses] == [0] * 3 + [2] * 3 + [
    3
  ] * 2
  said = capsys.readouterr().out
  assert 'grad_norm=nan in step 5' in said
  assert (
    f'rollback 1: resumed at step 3 of {tmp_path}; the next 2 batches are '
    'skipped, 2 in total'
  ) in said
  # The same command, later: nothing is forgotten.
  run(tmp_path, bad=[4, 8], total=9, on_nan='rollback')
  saved = saved_data(tmp_path, 9)
  assert saved.items() >= {'position': 12 * 8, **counts}.items()


def trained_on(numbers):
  """Return the state after training on these batches."""
  mesh = MESH.make()
  init, _, step_fn = make_step(
    Linear(),
    images=jax.ShapeDtypeStruct((1, 2, 2, 1), jnp.float32),
    loss_fn=nan_for(
      Linear(), preprocess=Normalize(), images=[first_image(999)]
    ),
    make_tx=functools.partial(OPTIMIZER, learning_rate=lambda _: 0.1),
    mesh=mesh,
    ema_decay=0.9,
  )
  state = init(jax.random.key(0))
  for number in numbers:
    batches = DATA.train_batches(start=number * DATA.batch_size)
    state, _ = step_fn(state, put_batch(next(batches), mesh))
    batches.close()
  return state


def test_it_gives_up_and_says_what_to_try(tmp_path, capsys):
  record = {'schedule': {'lr': 0.03, 'warmup_steps': 2}, 'optimizer': {}}
  with pytest.raises(NonFiniteError) as stopped:
    run(
      *(tmp_path, range(9)),
      on_nan='rollback',
      max_rollbacks=2,
      record=record,
    )
  said = capsys.readouterr().out
  assert said.count('grad_norm=nan in step 1') == 2
  assert 'rollback 2: initialised from scratch; the next 2 batches' in said
  assert str(stopped.value).splitlines() == [
    'grad_norm=nan in step 1 (of 8). The last finite step was 0. Earlier '
    'checkpoints are kept. Gave up after 2 rollbacks without a new one. None '
    'was written yet; the same command starts again at step 1 and fails '
    'again. Add one of these to it:',
    '  --config.schedule.lr=0.003 --allow_changes=schedule.lr  (now 0.03)',
    '  --config.schedule.warmup_steps=4 --allow_changes=schedule.warmup_steps'
    '  (now 2)',
    '  --config.optimizer.clip_norm=1 --allow_changes=optimizer.clip_norm'
    '  (now None)',
  ]
  assert stopped.value.step == 1


class Constants:
  """Evaluator that returns one value after the other."""

  def __init__(self, *values):
    self._values = iter(values)

  def run(self, params):
    del params
    return {'metric': next(self._values)}


def each_step(*values):
  """Options of a run that evaluates and saves after each step."""
  evaluator = Constants(*values)
  return {
    'evals': {'val': Evaluation(lambda model, **_: evaluator, every=steps(1))},
    'checkpoint': Checkpoints(every=steps(1), best_metric='val/metric'),
    'total': len(values),
  }


def test_a_state_with_nan_is_neither_evaluated_nor_saved(tmp_path):
  with pytest.raises(NonFiniteError, match='The newest, of step 1 in') as error:
    run(tmp_path, [1], **each_step(1.0, 1.0))
  assert '--config.on_nan=rollback  (skips the batches of steps 2 to 2)' in str(
    error.value
  )
  assert [x.name for x in (tmp_path / 'checkpoints').iterdir()] == ['1']
  records = read_records(tmp_path)
  assert [r['step'] for r in records if 'val/metric' in r] == [1]


def test_a_metric_of_nan_is_reported_and_never_the_best(tmp_path, capsys):
  run(tmp_path, **each_step(0.5, math.nan, 0.25, math.inf))
  kept = {x.name for x in (tmp_path / 'checkpoints').iterdir()}
  assert kept == {'1', '4'}  # the best and the newest
  said = capsys.readouterr().out
  for step, value in ((2, 'nan'), (4, 'inf')):
    assert f'Step {step}: evaluators returned val/metric={value}. ' in said


@pytest.mark.parametrize('by', ['NumPy', 'a program'])
def test_arrays_that_are_not_finite_are_named(by, monkeypatch):
  if by == 'a program':  # as on accelerators and on several hosts
    monkeypatch.setattr(divergence, 'in_host_memory', lambda _: False)
  mesh = MeshSizes(data=2, fsdp=4).make()
  rows, whole = (NamedSharding(mesh, PartitionSpec(*x)) for x in (['fsdp'], []))
  state = {
    'a': jax.device_put(jnp.ones(8).at[7].set(jnp.inf), rows),
    'b': jax.device_put(jnp.ones(8, jnp.bfloat16), rows),
    'count': jax.device_put(jnp.int32(3), whole),
    'rng': jax.device_put(jax.random.key(0), whole),
  }
  found = divergence.non_finite(state, mesh)
  assert found == 'NaN or Inf in 1 of 2 arrays (a)'
  assert not divergence.non_finite({'b': state['b']}, mesh)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'on_nan': 'ignore'}, "on_nan='ignore' must be one of 'stop', 'rollback'"),
    ({'max_rollbacks': 0}, 'max_rollbacks=0 must be an integer of at least 1'),
  ],
)
def test_options_that_are_refused(options, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    run(tmp_path / 'run', **options)
  assert not (tmp_path / 'run').exists()

"""Averages of the parameters: what evaluators see and checkpoints have."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import tree
from vit_jax.data.embedded.digits import Synthetic
from vit_jax.data.pipeline import Data
from vit_jax.objectives.classification import softmax_xent
from vit_jax.optim import averages
from vit_jax.optim.durations import epochs, steps
from vit_jax.optim.optimizers import (
  Optimizer,
  Schedule,
  schedule_free_adamw,
  sgd,
)
from vit_jax.runs import stored
from vit_jax.runs.metrics import read_records
from vit_jax.train import Checkpoints, Evaluation, train
from vit_jax.weights.surgery import InitFrom


def averaged(values, **options):
  """Return the EMA after each of the values, from a start at 100."""
  ema, found = 100.0, []
  for step, value in enumerate(values):
    weight = averages.ema_weight(jnp.int32(step), **options)
    ema = float(weight) * value + (1 - float(weight)) * ema
    found.append(ema)
  return found


def test_ema_weighs_its_start_by_default():
  assert averaged([1.0, 2.0], decay=0.75) == [75.25, 56.9375]
  # A number of Python, so that the compiled step is that of an EMA without
  # options.
  assert averages.ema_weight(jnp.int32(9), 0.75) == 0.25


def test_ema_starts_later():
  found = averaged([1.0, 2.0, 6.0], decay=0.75, start=2)
  np.testing.assert_allclose(found, [1, 2, 3], rtol=1e-6)


@pytest.mark.parametrize('start', [0, 2])
def test_a_debiased_ema_has_weights_that_add_to_one(start):
  values = np.random.default_rng(0).normal(size=12)
  found = averaged(values, decay=0.9, start=start, debias=True)
  np.testing.assert_allclose(found[:start], values[:start], rtol=1e-6)
  for n in range(1, len(values) - start + 1):
    weights = 0.1 * 0.9 ** np.arange(n)[::-1]
    mean = weights @ values[start : start + n] / weights.sum()
    np.testing.assert_allclose(found[start + n - 1], mean, rtol=1e-5)


def test_debiasing_is_accurate_in_long_averages():
  """1 - decay**n in float32 would have an error of 1e-3 at the beginning."""
  for n in (1, 2, 1000, 20_000):
    weight = averages.ema_weight(jnp.int32(n - 1), 0.9999, debias=True)
    exact = 1e-4 / (1 - np.float64(0.9999) ** n)
    np.testing.assert_allclose(float(weight), exact, rtol=1e-5)


# Runs.


class Linear(nn.Module):
  num_classes: int | None = None

  @nn.compact
  def __call__(self, images, *, train=False):
    features = nn.Dense(3, name='hidden')(images.mean((1, 2)))
    return nn.Dense(self.num_classes, name='head')(features)


class Kept:
  """Evaluator that keeps the parameters that it is given."""

  def __init__(self, seen):
    self.seen = seen

  def run(self, params):
    self.seen.append(jax.tree.map(np.asarray, params))
    return {'sum': float(jax.tree.leaves(params)[0].sum())}


RATE = 0.1


def run(workdir, rule=sgd, *, total=4, seen=None, **options):
  source = Synthetic(image_size=4, num_classes=4, num_examples=32)
  kept = Evaluation(lambda *_, **__: Kept(seen))
  evals = {} if seen is None else {'kept': kept}
  return train(
    workdir,
    model=Linear(),
    data=Data(source, batch_size=8),
    objective=softmax_xent,
    optimizer=Optimizer(rule, freeze=['hidden/bias']),
    schedule=Schedule(RATE, decay='constant'),
    total=steps(total),
    evals=evals,
    checkpoint=Checkpoints(every=steps(1), keep_every=steps(1)),
    **options,
  )


def assert_same(actual, expected, rtol=0.0):
  actual, expected = tree.flatten(actual), tree.flatten(expected)
  assert actual.keys() == expected.keys()
  for path, value in expected.items():
    np.testing.assert_allclose(actual[path], value, rtol=rtol, atol=rtol)


def test_a_run_starts_and_debiases_its_ema(tmp_path):
  options = {'ema_decay': 0.75, 'ema_start': steps(2), 'ema_debias': True}
  state = run(tmp_path, **options)
  one, two = (
    stored.load_params(tmp_path, step=step, ema=False)[0] for step in (3, 4)
  )
  expected = {k: (3 * one[k] + 4 * two[k]) / 7 for k in one}
  assert_same(state.ema, tree.unflatten(expected), 1e-6)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'ema_start': steps(1)}, 'no meaning without an EMA. Set ema_decay'),
    ({'ema_debias': True}, 'no meaning without an EMA. Set ema_decay'),
    (
      {'ema_decay': 0.9, 'ema_start': epochs(1)},
      r'ema_start \(4 steps\) must be shorter than the run \(4 steps\)',
    ),
    (
      {'ema_decay': 0.9, 'rule': schedule_free_adamw},
      'schedule-free optimizer defines an average .* Leave out ema_decay',
    ),
  ],
)
def test_mistakes(tmp_path, options, message):
  with pytest.raises(ValueError, match=message):
    run(tmp_path, **options)


def test_a_schedule_free_run_evaluates_and_saves_its_average(tmp_path):
  seen = []
  rule = functools.partial(schedule_free_adamw, b1=0.6)
  state = run(tmp_path / 'whole', rule, seen=seen)
  (z,) = [x.z for x in averages._schedule_free(state.opt_state)]
  flat_z = tree.flatten(z)
  for path, x in tree.flatten(state.ema).items():
    y = tree.flatten(state.params)[path]
    if path == 'hidden/bias':  # frozen
      assert path not in flat_z
      np.testing.assert_array_equal(x, y)
    else:
      np.testing.assert_allclose(y, 0.6 * x + 0.4 * flat_z[path], atol=1e-6)
      assert jnp.abs(x - y).max() > 1e-4
  assert_same(seen[-1], state.ema)
  saved, _ = stored.load_params(tmp_path / 'whole')
  assert_same(tree.unflatten(saved), state.ema)
  assert any(
    'kept/sum' in record for record in read_records(tmp_path / 'whole')
  )


@pytest.mark.slow
def test_a_schedule_free_run_resumes_exactly(tmp_path):
  whole = run(tmp_path / 'whole', schedule_free_adamw)
  run(tmp_path / 'parts', schedule_free_adamw, total=2)
  resumed = run(
    tmp_path / 'parts', schedule_free_adamw, allow_changes=['total_steps']
  )
  for name in ('params', 'ema', 'opt_state'):
    assert_same(getattr(resumed, name), getattr(whole, name))


@pytest.mark.slow
def test_a_schedule_free_run_averages_from_the_weights_that_it_loads(tmp_path):
  run(tmp_path / 'first', seed=1)
  init_from = InitFrom(
    str(tmp_path / 'first'), head='keep', trust=(Linear.__module__,)
  )
  state = run(
    tmp_path / 'second',
    functools.partial(
      schedule_free_adamw, eps=1.0
    ),  # updates like those of SGD
    total=1,
    init_from=init_from,
  )
  before, _ = stored.load_params(tmp_path / 'first')
  for each in (state.params, state.ema):
    for path, value in tree.flatten(each).items():
      assert jnp.abs(value - before[path]).max() < 0.5 * RATE, path

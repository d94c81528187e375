"""EMA of the parameters: its weights, and a run with one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vit_jax.optim.durations import Timeline, epochs, steps
from vit_jax.optim.schedules import Ema
from vit_jax.step import TrainState, train_step

TIMELINE = Timeline(batch_size=8, num_examples=32, total_steps=12)


def averaged(values, *args, **options):
  """Return the EMA after each of the values, from a start at 100."""
  weight = Ema(*args, **options)(TIMELINE)
  ema, found = 100.0, []
  for step, value in enumerate(values):
    w = float(weight(jnp.int32(step)))
    ema = w * value + (1 - w) * ema
    found.append(ema)
  return found


def test_the_start_has_a_weight_by_default():
  assert averaged([1.0, 2.0], 0.75) == [75.25, 56.9375]
  # A Python number: the compiled step is that of an EMA without options.
  assert Ema(0.75)(TIMELINE)(jnp.int32(9)) == 0.25


def test_the_average_starts_later():
  found = averaged([1.0, 2.0, 6.0], 0.75, start=steps(2))
  np.testing.assert_allclose(found, [1, 2, 3], rtol=1e-6)
  # Half an epoch of 4 steps.
  assert averaged([1.0, 2.0, 6.0], 0.75, start=epochs(0.5)) == found


@pytest.mark.parametrize('start', [0, 2])
def test_a_debiased_ema_has_weights_that_add_to_one(start):
  values = np.random.default_rng(0).normal(size=12)
  found = averaged(values, 0.9, start=steps(start), debias=True)
  np.testing.assert_allclose(found[:start], values[:start], rtol=1e-6)
  for n in range(1, len(values) - start + 1):
    weights = 0.1 * 0.9 ** np.arange(n)[::-1]
    mean = weights @ values[start : start + n] / weights.sum()
    np.testing.assert_allclose(found[start + n - 1], mean, rtol=1e-5)


def test_debiasing_is_accurate_in_long_averages():
  """1 - decay**n in float32 would have an error of 1e-3 at the beginning."""
  weight = Ema(0.9999, debias=True)(TIMELINE)
  for n in (1, 2, 1000, 20_000):
    exact = 1e-4 / (1 - np.float64(0.9999) ** n)
    found = float(weight(jnp.int32(n - 1)))
    np.testing.assert_allclose(found, exact, rtol=1e-5)


def test_a_step_averages_the_new_parameters():
  def loss_fn(params, batch, rng):
    return params['w'] * batch['x'].mean(), {}

  params, tx = {'w': jnp.float32(1.0)}, optax.sgd(1.0)
  state = TrainState(
    jnp.int32(0), params, tx.init(params), jax.random.key(0), ema=params
  )
  weight = Ema(0.75, start=steps(1), debias=True)(TIMELINE)
  step = functools.partial(
    train_step, loss_fn=loss_fn, tx=tx, ema_weight=weight
  )
  seen = []
  for _ in range(3):
    state, _ = step(state, {'x': jnp.ones(2)})
    seen.append(float(state.ema['w']))
  # Parameters are 0, -1 and -2; the average of the last two has 3/7 and 4/7.
  np.testing.assert_allclose(seen, [0, -1, -(3 * 1 + 4 * 2) / 7], rtol=1e-6)
  assert state.eval_params is state.ema


def test_a_run_that_ends_before_the_average_starts_is_refused():
  with pytest.raises(ValueError, match='12 steps'):
    Ema(0.9, start=epochs(3))(TIMELINE)

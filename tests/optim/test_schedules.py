"""Durations, learning rates and EMA weights against closed forms and timm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import durations
from vit_jax.durations import Timeline, epochs, examples, fraction, steps
from vit_jax.optim.schedules import Ema, Schedule

# Durations.


@pytest.mark.parametrize(
  ('duration', 'expected'),
  [
    (steps(10_000), 10_000),
    (steps(7.0), 7),
    (steps(0), 0),
    (epochs(300), 93_835),  # of ImageNet: 93.8k
    (epochs(0.5), 156),
    (examples(8192), 2),
    (examples(8191), 1),
    (examples(1), 1),  # a duration above 0 lasts at least one step
    (fraction(0.1), 10),
    (fraction(0.29), 29),  # although 0.29 * 100 < 29 in floating point
    (fraction(0.001), 1),
    (fraction(0.0), 0),
    (fraction(1), 100),
    (None, 0),
  ],
)
def test_durations_in_steps(duration, expected):
  imagenet = Timeline(4096, 1_281_167, total_steps=100)
  assert imagenet.steps(duration) == expected


@pytest.mark.parametrize(
  ('value', 'unit'),
  [
    (1.5, 'steps'),
    (-1, 'steps'),
    (True, 'steps'),
    ('90', 'epochs'),
    (float('inf'), 'epochs'),
    (1.1, 'fraction'),
  ],
)
def test_values_that_a_unit_cannot_have(value, unit):
  with pytest.raises(ValueError, match=f'{unit}={value!r} must'):
    durations.Duration(value, unit)


@pytest.mark.parametrize('total', [steps(1e21), epochs(1e308), steps(10**30)])
def test_more_steps_than_can_be_counted(total):
  with pytest.raises(ValueError, match=r' steps\. .* has at most 2\*\*31 - 1'):
    Timeline(4096, 1_281_167).steps(total)
  assert Timeline(1, 1).steps(steps(2**31 - 1)) == 2**31 - 1


# Learning rates.


def schedule(total=100, warmup=0, cooldown=0, **fields):
  """Return the learning rate over the steps of a run."""
  ramps = {'warmup': steps(warmup), 'cooldown': steps(cooldown)}
  return Schedule(**fields, **ramps)(Timeline(1, 1, total))


# Paper, tables 3 and 4, and its released code; 10k steps of warm-up.
@pytest.mark.parametrize(
  ('decay', 'fields', 'expected'),
  [
    (  # ImageNet-21k: linear to 0 at the end
      'linear',
      {'lr': 1e-3, 'total': 312_000},
      {0: 0, 1: 1e-7, 5000: 5e-4, 10_000: 1e-3, 161_000: 5e-4, 312_000: 0},
    ),
    (  # ImageNet: the same with a cosine
      'cosine',
      {'lr': 3e-3, 'total': 90_000},
      {
        **{0: 0, 10_000: 3e-3, 50_000: 1.5e-3, 90_000: 0},
        30_000: 3e-3 * (1 + np.cos(np.pi / 4)) / 2,
      },
    ),
    (  # the released code's linear decay ends at 1e-5
      'linear',
      {'lr': 1e-2, 'total': 20_000, 'end_lr': 1e-5},
      {0: 0, 10_000: 1e-2, 15_000: 0.005005, 20_000: 1e-5},
    ),
    (  # "Scaling ViT": lr / sqrt(1 + (t - warmup) / timescale), cooldown
      'rsqrt',
      {'lr': 8e-4, 'total': 200_000, 'cooldown': 50_000},
      {
        **{0: 0, 10_000: 8e-4, 40_000: 4e-4, 200_000: 0},
        150_000: 8e-4 / np.sqrt(15),
        175_000: 4e-4 / np.sqrt(17.5),
      },
    ),
    (
      'rsqrt',
      {'lr': 1.0, 'total': 90_000, 'timescale': 5_000},
      {10_000: 1.0, 25_000: 0.5, 90_000: 17**-0.5},
    ),
    (  # BiT: 30, 60 and 80 of 90 epochs, here of 1000 steps
      'step',
      {'lr': 0.48, 'total': 90_000, 'milestones': (30 / 90, 60 / 90, 80 / 90)},
      {
        **{0: 0, 5000: 0.24, 10_000: 0.48, 29_999: 0.48, 30_000: 0.048},
        **{59_999: 0.048, 60_000: 0.0048, 79_999: 0.0048},
        **{80_000: 0.00048, 90_000: 0.00048},
      },
    ),
    (  # the first within warm-up; and 0.29 * 100_000 is not below 29_000
      'step',
      {
        **{'lr': 0.8, 'total': 100_000, 'milestones': [0.05, 0.29]},
        'step_factor': 0.5,
      },
      {
        **{2_500: 0.2, 5_000: 0.2, 10_000: 0.4},
        **{28_999: 0.4, 29_000: 0.2, 100_000: 0.2},
      },
    ),
    (
      'constant',
      {'lr': 0.5, 'total': 20_000},
      {0: 0.0, 2_500: 0.125, 10_000: 0.5, 20_000: 0.5},
    ),
    ('cosine', {'lr': 0.03, 'warmup': 0}, {0: 0.03}),  # fine-tuning
  ],
)
def test_learning_rates(decay, fields, expected):
  rate = jax.jit(schedule(decay=decay, **{'warmup': 10_000} | fields))
  for step, value in expected.items():
    # At the end of a cosine 1 + cos(pi) leaves a rounding.
    np.testing.assert_allclose(rate(step), value, rtol=1e-5, atol=1e-9)
    assert rate(step).dtype == jnp.float32


def test_timm_cosine(timm_training):
  """Warm-up ends at the peak, and the cosine has run since step 0."""
  fields = {'lr': 3e-4, 'end_lr': 1e-5, 'total': 200, 'warmup': 20}
  rate = schedule(decay='timm_cosine', **fields)
  found = jax.vmap(rate)(jnp.arange(200))
  np.testing.assert_allclose(found, timm_training['rates'], rtol=2e-6)


@pytest.mark.parametrize(
  'fields',
  [
    {'warmup': 60, 'cooldown': 50},
    {'decay': 'rsqrt', 'end_lr': 0.1},
    {'decay': 'step', 'milestones': (0.5,), 'end_lr': 0.1},
    {'milestones': (0.5,)},
    {'decay': 'step'},
    {'warmup': 1, 'total': 1},  # the rate of the first step is 0
  ],
  ids=str,
)
def test_mistakes(fields):
  with pytest.raises(ValueError, match=r'decay=|100 steps|1 step of'):
    schedule(lr=1.0, **fields)


# EMA.


def test_the_start_has_a_weight_by_default():
  # A Python number, which the compiled step has as a constant.
  assert Ema(0.75)(jnp.int32(0)) == Ema(0.75)(jnp.int32(9)) == 0.25


def test_a_debiased_ema_has_weights_that_add_to_one():
  """1 - decay**n in float32 would have an error of 1e-3 at the beginning."""
  for n in (1, 2, 1000, 20_000):
    exact = 1e-4 / (1 - np.float64(0.9999) ** n)
    found = float(Ema(0.9999, debias=True)(jnp.int32(n - 1)))
    np.testing.assert_allclose(found, exact, rtol=1e-5)

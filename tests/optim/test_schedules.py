"""Learning-rate schedules against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.optim.durations import Timeline, steps
from vit_jax.optim.schedules import Schedule


def schedule(*, total_steps, warmup_steps=0, cooldown_steps=0, **fields):
  """Return the learning rate over the steps of a run."""
  ramps = {'warmup': steps(warmup_steps), 'cooldown': steps(cooldown_steps)}
  return Schedule(**fields, **ramps)(Timeline(1, 1, total_steps))


# Paper, tables 3 and 4, and its released code.


@pytest.mark.parametrize(
  ('arguments', 'expected'),
  [
    (  # ImageNet-21k: 10k of warm-up, linear to 0 at the end
      {'lr': 1e-3, 'decay': 'linear', 'total_steps': 312_000},
      {
        0: 0.0,
        1: 1e-7,
        5_000: 5e-4,
        10_000: 1e-3,
        161_000: 5e-4,
        312_000: 0.0,
      },
    ),
    (  # ImageNet: the same with a cosine
      {'lr': 3e-3, 'decay': 'cosine', 'total_steps': 90_000},
      {
        0: 0.0,
        10_000: 3e-3,
        30_000: 3e-3 * (1 + np.cos(np.pi / 4)) / 2,
        50_000: 1.5e-3,
        90_000: 0.0,
      },
    ),
    (  # the released code's linear decay ends at 1e-5
      {'lr': 1e-2, 'decay': 'linear', 'total_steps': 20_000, 'end_lr': 1e-5},
      {0: 0.0, 10_000: 1e-2, 15_000: 0.005005, 20_000: 1e-5},
    ),
    (  # "Scaling ViT": lr / sqrt(1 + (t - warmup) / timescale), cooldown
      {
        'lr': 8e-4,
        'decay': 'rsqrt',
        'total_steps': 200_000,
        'cooldown_steps': 50_000,
      },
      {
        0: 0.0,
        10_000: 8e-4,
        40_000: 4e-4,
        150_000: 8e-4 / np.sqrt(15),
        175_000: 4e-4 / np.sqrt(17.5),
        200_000: 0.0,
      },
    ),
    (  # BiT: 30, 60 and 80 of 90 epochs, here of 1000 steps
      {
        'lr': 0.48,
        'decay': 'step',
        'total_steps': 90_000,
        'milestones': (30 / 90, 60 / 90, 80 / 90),
      },
      {
        0: 0.0,
        5_000: 0.24,
        10_000: 0.48,
        29_999: 0.48,
        30_000: 0.048,
        59_999: 0.048,
        60_000: 0.0048,
        79_999: 0.0048,
        80_000: 0.00048,
        90_000: 0.00048,
      },
    ),
    (  # the first within warm-up; and 0.29 * 100_000 is not below 29_000
      {
        'lr': 0.8,
        'decay': 'step',
        'total_steps': 100_000,
        'milestones': [0.05, 0.29],
        'step_factor': 0.5,
      },
      {
        2_500: 0.2,
        5_000: 0.2,
        10_000: 0.4,
        28_999: 0.4,
        29_000: 0.2,
        100_000: 0.2,
      },
    ),
    (
      {'lr': 0.5, 'decay': 'constant', 'total_steps': 20_000},
      {0: 0.0, 2_500: 0.125, 10_000: 0.5, 20_000: 0.5},
    ),
  ],
)
def test_schedules(arguments, expected):
  rate = jax.jit(schedule(**arguments, warmup_steps=10_000))
  for step, value in expected.items():
    # At the end of a cosine 1 + cos(pi) leaves a rounding.
    np.testing.assert_allclose(rate(step), value, rtol=1e-5, atol=1e-9)
    assert rate(step).dtype == jnp.float32


def test_finetuning_cosine_without_warmup_starts_at_the_peak():
  rate = schedule(lr=0.03, total_steps=500)
  np.testing.assert_allclose(rate(0), 0.03, rtol=1e-6)


@pytest.mark.parametrize(
  'arguments',
  [
    {'warmup_steps': 60, 'cooldown_steps': 50},
    {'decay': 'rsqrt', 'end_lr': 0.1},
    {'decay': 'step', 'milestones': (0.5,), 'end_lr': 0.1},
    {'milestones': (0.5,)},
    {'decay': 'step'},
    {'decay': 'step', 'milestones': (0.0, 0.5)},
    {'decay': 'step', 'milestones': (0.5, 1.0)},
    {'decay': 'step', 'milestones': (0.6, 0.3)},
    {'decay': 'step', 'milestones': (0.3, 0.3)},
  ],
  ids=str,
)
def test_mistakes(arguments):
  with pytest.raises(ValueError, match=r'decay=|100 steps'):
    schedule(lr=1.0, total_steps=100, **arguments)

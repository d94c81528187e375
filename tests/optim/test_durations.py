"""Steps, epochs, examples and fractions are all converted to steps."""

import pytest

from vit_jax.optim.durations import Duration, Timeline, epochs, fraction, steps

IMAGENET = Timeline(4096, 1_281_167, total_steps=100)


@pytest.mark.parametrize(
  ('value', 'unit', 'expected'),
  [
    (10_000, 'steps', 10_000),
    (7.0, 'steps', 7),
    (0, 'steps', 0),
    (300, 'epochs', 93_835),  # 300 epochs of ImageNet: 93.8k
    (0.5, 'epochs', 156),
    (8192, 'examples', 2),
    (8191, 'examples', 1),
    (1, 'examples', 1),  # a duration above 0 lasts at least one step
    (0.1, 'fraction', 10),
    (0.29, 'fraction', 29),  # although 0.29 * 100 < 29 in floating point
    (0.001, 'fraction', 1),
    (0.0, 'fraction', 0),
    (1, 'fraction', 100),
  ],
)
def test_units(value, unit, expected):
  assert IMAGENET.steps(Duration(value, unit)) == expected


@pytest.mark.parametrize(
  ('value', 'unit'),
  [
    (1.5, 'steps'),
    (-1, 'steps'),
    (True, 'steps'),
    ('90', 'epochs'),
    (1.1, 'fraction'),
  ],
)
def test_mistakes(value, unit):
  with pytest.raises(ValueError, match=f'{unit}={value!r} must'):
    Duration(value, unit)


def test_a_run_cannot_be_a_fraction_of_itself():
  with pytest.raises(ValueError, match='cannot be a fraction of itself'):
    Timeline(1, 1).steps(fraction(0.5))


def test_no_duration():
  assert IMAGENET.steps(None) is None
  assert steps(3) == Duration(3, 'steps') != epochs(3)

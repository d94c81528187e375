"""Steps, epochs, examples and fractions all come out as steps."""

import ml_collections
import pytest

from vit_jax.durations import to_steps

IMAGENET = {'batch_size': 4096, 'num_examples': 1_281_167}


def steps(config, **kwargs):
  return to_steps(config, 'x', **({**IMAGENET, 'total_steps': 100} | kwargs))


@pytest.mark.parametrize(
  ('config', 'expected'),
  [
    ({'x_steps': 10_000}, 10_000),
    ({'x_steps': 7.0}, 7),
    ({'x_steps': 0}, 0),
    ({'x_epochs': 300}, 93_835),  # 300 epochs of ImageNet: 93.8k
    ({'x_epochs': 0.5}, 156),
    ({'x_examples': 8192}, 2),
    ({'x_examples': 8191}, 1),
    ({'x_examples': 1}, 1),  # longer than nothing
    ({'x_fraction': 0.1}, 10),
    ({'x_fraction': 0.29}, 29),  # although 0.29 * 100 < 29 in floating point
    ({'x_fraction': 0.001}, 1),
    ({'x_fraction': 0.0}, 0),
    ({'x_fraction': 1}, 100),
    ({'x_steps': None, 'x_epochs': 300}, 93_835),
  ],
)
def test_units(config, expected):
  assert steps(config) == expected
  assert steps(ml_collections.ConfigDict(config)) == expected


@pytest.mark.parametrize(
  ('config', 'kwargs', 'message'),
  [
    ({'x_steps': 1, 'x_epochs': 2}, {}, 'One duration, 2 times'),
    ({}, {'default': ...}, r"set one of \['x_steps', 'x_epochs'"),
    ({'x_steps': 1.5}, {}, 'must be a whole number'),
    ({'x_steps': -1}, {}, 'number of 0 or more'),
    ({'x_epochs': '90'}, {}, "x_epochs='90' must be a number"),
    ({'x_fraction': 1.1}, {}, 'between 0 and 1'),
    ({'x_fraction': 0.5}, {'total_steps': None}, 'cannot be a fraction'),
    ({'x_epochs': 1}, {'num_examples': None}, 'x_steps or x_examples instead'),
  ],
)
def test_mistakes(config, kwargs, message):
  with pytest.raises(ValueError, match=message):
    steps(config, **kwargs)


def test_default():
  assert steps({'y_steps': 3}, default=5) == 5
  assert steps({}, default=None) is None

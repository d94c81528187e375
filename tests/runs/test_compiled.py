"""Results that equal calls share."""

import copy
import functools

import numpy as np
import pytest

from vit_jax.config import Partial
from vit_jax.objectives.frozen_teacher import FrozenTeacher
from vit_jax.optim.optimizers import Optimizer
from vit_jax.runs import compiled


def make(*args, **kwargs):
  return args, kwargs


@pytest.mark.parametrize(
  'value', [3, {'a': [1, np.ones(2)]}, Optimizer(make, freeze=['.*'])]
)
def test_equal_arguments_share_a_result(value, monkeypatch):
  monkeypatch.setattr('jax.clear_caches', dict)  # slow after many tests

  def call(value):
    value = copy.deepcopy(value)
    return compiled.reuse(make, 1, rule=Partial(make, 2, value=value))

  first = call(value)
  assert call(value) is first and call(4) is not first
  assert Partial(make, 1) != functools.partial(make, 1)
  compiled.forget()
  assert call(value) is not first


def test_teachers_and_other_arrays_are_not_shared():
  for values in (map(FrozenTeacher, 'aa'), map(np.arange, (2, 3))):
    first, second = (compiled.reuse(make, a=[x]) for x in values)
    assert first is not second

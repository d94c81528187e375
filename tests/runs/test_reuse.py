"""Results that equal calls share."""

import functools

import numpy as np

from vit_jax.config import Partial
from vit_jax.runs import compiled


def make(*args, **kwargs):
  return args, kwargs


def test_equal_arguments_share_a_result():
  def call(value):
    return compiled.reuse(make, 1, rule=Partial(make, 2, value=value))

  assert call(3) is call(3)
  assert call(3) is not call(4)
  assert Partial(make, 1) != functools.partial(make, 1)
  first = call(3)
  compiled.forget()
  assert call(3) is not first and call(3) == first


def test_arguments_without_a_hash_are_not_shared():
  for value in ([1], np.ones(2), Partial(make, rates=[1])):
    assert compiled.reuse(make, value) is not compiled.reuse(make, value)

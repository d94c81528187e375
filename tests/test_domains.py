"""Annotations say which values fit; messages say what is expected."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from vit_jax.config import domains
from vit_jax.config.domains import Count, Dtype, PathRule, Rate, Size


@pytest.mark.parametrize(
  ('value', 'annotation', 'what'),
  [
    (3, Count, ''),
    (np.int64(3), Count, ''),
    (0, Count, 'an integer of at least 1'),
    (True, Count, 'an integer of at least 1'),
    (1.0, int, 'an integer'),
    (1, float, ''),
    (math.nan, float, 'a number'),
    (1e-300, float, 'a number'),
    (1, Rate, 'in [0, 1)'),
    ('x', Rate, 'a number in [0, 1)'),
    (None, Rate | None, ''),
    ('text', Sequence[str], 'a list or tuple, each item text'),
    ((1, 'x'), tuple[int, ...], 'a list or tuple, each item an integer'),
    ([1, 2], tuple[int, int], ''),
    ([1], tuple[int, int], '(an integer, an integer)'),
    ({'a': 'x'}, Mapping[str, int], 'a dict of an integer'),
    ('[', PathRule, "a regular expression such as 'head/.*'"),
    (np.float32, Dtype, ''),
    ((8, 0), Size, domains.describe(Size)),
  ],
)
def test_expected(value, annotation, what):
  assert domains.expected(value, annotation) == what


def test_a_misspelt_target_is_named():
  near = domains.expected({'trgetx': 'a.B', 'size': 3}, Callable[..., int])
  assert "(did you mean 'target' by 'trgetx'?)" in near
  assert 'did you mean' not in domains.expected({'size': 3}, int)


def test_checked_classes_and_functions():
  @domains.checked
  @dataclasses.dataclass(frozen=True)
  class Part:
    size: Count = 1

  @domains.checked
  def make(*, part: Part, rate: Rate = 0.5):
    return part, rate

  assert make(part=Part(2), rate=0) == (Part(2), 0)
  with pytest.raises(ValueError, match='Part: size=0 must be an integer of at'):
    Part(size=0)
  with pytest.raises(ValueError, match=r'make: rate=1 must be in \[0, 1\)'):
    make(part=Part(), rate=1)
  with pytest.raises(ValueError, match='make: part=3 must be a Part'):
    make(part=3)
  with pytest.raises(TypeError, match='prat'):
    make(prat=3)

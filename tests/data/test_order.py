"""The order of an epoch: that of Grain, at every size."""

import numpy as np
import pytest
from grain.experimental import index_shuffle

from vit_jax.data import order


@pytest.mark.parametrize(
  'count', [1, 2, 3, 10, 50, 64, 999, 2**16 - 1, 2**16, 2**16 + 1, 10**6]
)
def test_places_are_those_of_grain(count):
  places = {*range(min(count, 12)), count // 2, count - 1}
  for seed in (0, 123, 2**32 - 1):
    for place in places:
      assert order.index_at(place, count, seed) == index_shuffle(
        place, max_index=count - 1, seed=seed, rounds=4
      )


@pytest.mark.parametrize('count', [7, 100, 2**16])
def test_an_epoch_is_a_permutation(count):
  found = [order.index_at(place, count, 5) for place in range(count)]
  np.testing.assert_array_equal(np.sort(found), np.arange(count))

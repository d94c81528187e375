"""The orders of training: epochs, repeats, turns by weight."""

import collections

import numpy as np
import pytest
from grain.experimental import index_shuffle

from vit_jax.data import order, pipeline


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


class Numbers:
  """Images whose pixels are the index of the example."""

  def __init__(self, count):
    self.count = count

  def __len__(self):
    return self.count

  def __getitem__(self, index):
    return {'image': np.full((1, 1, 1), index, np.uint8), 'label': index}


def noise(image, rng):
  """Draw a number that identifies the random stream."""
  drawn = rng.integers(256, size=image.shape, dtype=np.uint8)
  return np.concatenate([image, drawn], axis=-1)


@pytest.mark.parametrize('times', [1, 3, 4])
def test_repeats_are_in_one_batch_and_augmented_differently(times):
  repeated = order.Repeated(times)
  data = pipeline.Data(Numbers(48), 12, (noise,), order=repeated)
  batches = data.train_batches(seed=3)
  rows = [next(batches)['image'][:, 0, 0] for _ in range(4 * times)]
  batches.close()
  for row in rows:
    assert set(collections.Counter(row[:, 0].tolist()).values()) == {times}
  rows = np.concatenate(rows)
  # An epoch of 48 visits has 48 / times of the examples; the next ones have
  # the others.
  epochs = rows[:, 0].reshape(times, 48)
  assert all(len(set(x.tolist())) == 48 // times for x in epochs)
  assert len(set(rows[:, 0].tolist())) == 48
  # 256 numbers for each repeat: few of them are equal by chance.
  by_example = collections.defaultdict(set)
  for index, drawn in rows.tolist():
    by_example[index].add(drawn)
  assert sum(map(len, by_example.values())) > 48 * (times - 0.2)


def test_the_first_repeats_are_those_of_the_order_itself():
  plain = order.Shuffled().bind(Numbers(10), 5)
  repeated = order.Repeated(2).bind(Numbers(10), 5)
  found = [repeated(p) for p in range(60)]
  assert len(set(found)) == 60
  assert [index for _, index in found[::2]] == [plain(p)[1] for p in range(30)]
  assert [x[1] for x in found[1::2]] == [x[1] for x in found[::2]]
  once = order.Repeated(1).bind(Numbers(10), 5)
  assert [once(p) for p in range(30)] == [plain(p) for p in range(30)]


def test_repeats_of_repeats():
  inner = order.Repeated(2)
  visits = order.Repeated(3, inner).bind(Numbers(4), 0)
  found = [visits(p) for p in range(48)]
  assert len(set(found)) == 48
  assert all(
    len({i for _, i in found[k : k + 6]}) == 1 for k in range(0, 48, 6)
  )


@pytest.mark.parametrize('times', [0, -1, 1.5, True, None])
def test_times_that_are_none(times):
  with pytest.raises(ValueError, match=r'Repeated: times=.* must be'):
    order.Repeated(times)


@pytest.mark.parametrize(
  'weights',
  [
    (1,),
    (5, 1, 0),
    (2**0.5, 1),
    (0.95, 0.05),
    (1e-6, 1, 1),
    (1_281_167, 14_197_122, 50_000),
    tuple(1 + k % 7 for k in range(40)),
  ],
)
def test_turns_never_drift(weights):
  turns = order.Turns(weights, seed=1)
  start = 10**9 // turns.length  # of a block, after long training
  count = 64 * turns.length
  positions = range(start * turns.length, start * turns.length + count)
  found = [turns(p) for p in positions]
  share = np.array(weights) / sum(weights)
  for part, weight in enumerate(share):
    own = [turn for each, turn in found if each == part]
    if own:  # each turn in order, and as many before as the weight says
      assert own == list(range(own[0], own[0] + len(own)))
      assert abs(own[0] - weight * positions[0]) < 2.5
    assert abs(len(own) - weight * count) < 4


def test_parts_of_large_numbers():
  rng = np.random.default_rng(0)
  total = rng.integers(1, 2**62, 1000)
  weight = (rng.random(1000) * total).astype(np.int64)
  weight[:9], weight[9:99] = total[:9], 0
  count = rng.integers(0, 2**50, 1000)
  found = order._part_of(count, weight, total)
  rows = zip(count.tolist(), weight.tolist(), total.tolist())
  assert found.tolist() == [c * w // t for c, w, t in rows]


def test_turns_depend_on_seed_and_block():
  turns = [order.Turns((2, 3), seed) for seed in (0, 0, 1)]
  found = [[t(p) for p in range(50)] for t in turns]
  assert found[0] == found[1] != found[2]
  # In any order, which is what threads do.
  again = order.Turns((2, 3), 0)
  backwards = [again(p) for p in reversed(range(50))]
  assert backwards[::-1] == found[0]

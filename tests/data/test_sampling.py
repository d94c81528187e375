"""Orders of training by class, and by weights of the examples."""

import collections
import itertools

import numpy as np
import pytest

from vit_jax.data import pipeline
from vit_jax.data.order import BalancedOrder
from vit_jax.data.sampling import Balanced, Weighted

COUNTS = (50, 7, 1, 0, 3)  # of each class; one is empty
LABELS = np.repeat(np.arange(5), COUNTS)


class Numbers:
  """Images whose pixels are the index of the example."""

  num_classes = 5
  class_names = ('ash', 'birch', 'cedar', 'date', 'elm')

  def __len__(self):
    return len(LABELS)

  def __getitem__(self, index):
    image = np.full((2, 2, 1), index, np.uint8)
    return {'image': image, 'label': int(LABELS[index])}

  def labels(self):
    return LABELS.astype(np.int32)


def noise(image, rng):
  """Draw a number that identifies the random stream."""
  return np.stack([image, rng.integers(256, size=image.shape, dtype=np.uint8)])[
    :, 0
  ]


def batches(count, *, start=0, seed=0, **process):
  data = pipeline.Data(Numbers(), 16, (noise,), order=Balanced())
  found = data.train_batches(seed=seed, start=start, **process)
  rows = list(itertools.islice(found, count))
  found.close()
  return rows


def test_each_class_is_visited_equally_often():
  order = BalancedOrder(LABELS, seed=3)
  visits = [order(p) for p in range(4 * 100)]
  labels = LABELS[[index for _, index in visits]].reshape(100, 4)
  np.testing.assert_array_equal(np.sort(labels), [[0, 1, 2, 4]] * 100)
  assert len({tuple(row) for row in labels}) > 10  # not in a fixed order
  # No example is visited again before all others of its class.
  times = collections.Counter(index for _, index in visits)
  for label, count in enumerate(COUNTS):
    seen = [times[i] for i in np.flatnonzero(label == LABELS)]
    assert all(n in (100 // count, 100 // count + 1) for n in seen)
  # Visits of one example differ in what their augmentation is drawn from.
  assert len(set(visits)) == len(visits)
  assert visits != [BalancedOrder(LABELS, 4)(p) for p in range(400)]


def test_it_resumes_exactly_on_any_number_of_hosts():
  whole = batches(6)
  assert len({x.tobytes() for x in whole[0]['image']}) == 16
  for a, b in zip(whole[2:], batches(4, start=32), strict=True):
    np.testing.assert_array_equal(a['image'], b['image'])
  halves = [batches(6, process_index=i, process_count=2) for i in (0, 1)]
  for batch, *parts in zip(whole, *halves, strict=True):
    np.testing.assert_array_equal(
      batch['image'], np.concatenate([x['image'] for x in parts])
    )


def shares(order, positions):
  """Return the number of visits of each class."""
  visits = order.bind(Numbers(), 0)
  found = [visits(p) for p in range(positions)]
  assert len(set(found)) == positions  # each draws another augmentation
  labels = LABELS[[index for _, index in found]]
  return np.bincount(labels, minlength=5)


@pytest.mark.parametrize(
  'options, expected',
  [
    ({}, (1, 1, 1, 0, 1)),
    ({'power': 1}, COUNTS),
    ({'power': 0.5}, np.sqrt(COUNTS)),
    ({'power': -1}, (1 / 50, 1 / 7, 1, 0, 1 / 3)),
    ({'weights': {'ash': 3, 'cedar': 0}}, (3, 1, 0, 0, 1)),
    ({'weights': (3, 1, 0, 9, 1.5)}, (3, 1, 0, 0, 1.5)),
    ({'weights': {'elm': 2}, 'power': 1}, (50, 7, 1, 0, 6)),
  ],
)
def test_classes_in_other_proportions(options, expected):
  found = shares(Balanced(**options), 640)
  expected = 640 * np.array(expected) / np.sum(expected)
  np.testing.assert_allclose(found, expected, atol=3)


def test_power_1_visits_each_example_equally_often():
  visits = Balanced(power=1).bind(Numbers(), 0)
  times = collections.Counter(visits(p)[1] for p in range(61 * 5))
  assert min(times.values()) >= 4 and max(times.values()) <= 6


WEIGHTS = np.where(LABELS == 0, 0.0, 1 + np.arange(len(LABELS)) % 3)


def test_examples_are_drawn_by_weight(tmp_path):
  np.save(tmp_path / 'weights.npy', WEIGHTS.astype(np.float32))
  order = Weighted(tmp_path / 'weights.npy')
  visits = order.bind(Numbers(), 7)
  found = [visits(p) for p in range(20_000)]
  assert len(set(found)) == len(found)
  counts = np.bincount([i for _, i in found], minlength=len(LABELS))
  expected = 20_000 * WEIGHTS / WEIGHTS.sum()
  assert not counts[WEIGHTS == 0].any()
  error = (counts - expected)[WEIGHTS > 0] / np.sqrt(expected[WEIGHTS > 0])
  assert np.abs(error).max() < 4.5 and 0.3 < np.mean(error**2) < 3
  # The same numbers in Python.
  same = Weighted(WEIGHTS).bind(Numbers(), 7)
  assert [same(p) for p in range(50)] == found[:50]
  other = Weighted(list(WEIGHTS)).bind(Numbers(), 8)
  assert [other(p) for p in range(50)] != found[:50]


def test_one_example_with_a_weight():
  visits = Weighted(np.arange(61) == 17).bind(Numbers(), 0)
  assert {visits(p)[1] for p in range(100)} == {17}


@pytest.mark.parametrize(
  'order, message',
  [
    (Balanced(weights=(1, 2)), '2 numbers, but the source has 5'),
    (Balanced(weights={'oak': 1}), "'oak', which is none of the 5"),
    (Balanced(weights={'brich': 1}), "Did you mean 'birch'?"),
    (Balanced(weights=(0,) * 5), 'all are 0'),
    (
      Balanced(weights=(0, 0, 0, 1, 0)),
      'every class that has examples',
    ),
    (Weighted([1.0, 2.0]), '2 numbers, but the source has 61 examples'),
    (Weighted([0.0] * 61), 'all are 0'),
    (Weighted([1.0] * 60 + [-1]), 'number 60 is -1.0'),
    (Weighted([float('nan')] * 61), 'number 0 is nan (and 60 more)'),
    (Weighted([[1.0] * 61]), 'shape (1, 61)'),
    (Weighted('/none/weights.npy'), 'cannot be read: FileNotFound'),
    (Weighted(__file__), 'cannot be read: ValueError'),
    (Weighted(['much'] * 61), 'cannot be read: ValueError'),
  ],
)
def test_weights_that_do_not_fit(order, message):
  with pytest.raises(ValueError) as error:
    pipeline.Data(Numbers(), 8, order=order).train_batches()
  assert message in str(error.value)


def test_names_of_classes_need_class_names():
  class Nameless(Numbers):
    class_names = None

  with pytest.raises(ValueError, match='has no class_names'):
    Balanced(weights={'ash': 2}).bind(Nameless(), 0)


@pytest.mark.parametrize(
  'options', [{'power': float('nan')}, {'weights': {'ash': -1}}, {'power': '1'}]
)
def test_options_that_are_none(options):
  with pytest.raises(ValueError, match=r'Balanced: .* must be'):
    Balanced(**options)


def test_balanced_without_labels_balances_the_classes_that_the_source_has():
  options = {'order': Balanced(), 'labels': False}
  data = pipeline.Data(Numbers(), 16, **options)
  batches = data.train_batches()
  batch = next(batches)
  batches.close()
  labels = LABELS[batch['image'][:, 0, 0, 0]]
  assert list(np.bincount(labels)) == [4, 4, 4, 0, 4]
  assert not batch['label'].any()


def test_evaluation_visits_each_example_once():
  data = pipeline.Data(Numbers(), 16, order=Balanced())
  index = np.concatenate([x['index'][x['mask']] for x in data.eval_batches()])
  np.testing.assert_array_equal(index, np.arange(len(LABELS)))


def test_balance_needs_one_class_per_example():
  with pytest.raises(ValueError, match=r'one class per example.*\(3, 5\)'):
    BalancedOrder(np.zeros((3, 5), np.float32), 0)

"""Mixtures: the share of each source, its own epochs, and labels."""

import collections
import itertools
import pickle

import numpy as np
import pytest

from vit_jax.data import fingerprints, pipeline
from vit_jax.data.mixture import Mixed, Mixture
from vit_jax.data.sampling import Balanced
from vit_jax.data.subset import Subset


class Numbers:
  """Images whose pixels are `first` plus the index of the example."""

  def __init__(self, count, first=0, classes=('a', 'b'), channels=1):
    self.count, self.first, self.channels = count, first, channels
    self.class_names = None if classes is None else list(classes)
    self.num_classes = None if classes is None else len(classes)

  def __len__(self):
    return self.count

  def __getitem__(self, index):
    image = np.full((1, 1, self.channels), self.first + index, np.uint8)
    return {'image': image, 'label': index % (self.num_classes or 1)}

  def describe(self, index):
    return f'number {index}'


class Vectors(Numbers):
  """The same with one weight for each class."""

  def __getitem__(self, index):
    example = super().__getitem__(index)
    vector = np.eye(self.num_classes, dtype=np.float32)[example['label']]
    return {**example, 'label': vector}


def two(**options):
  # Not in the order of the names.
  return Mixture({'two': Numbers(5, 100), 'one': Numbers(20)}, **options)


def visits(order, count, source=None, seed=0):
  at = order.bind(source or two(), seed)
  return [at(p) for p in range(count)]


@pytest.mark.parametrize(
  'weights, window, expected',
  [
    ({'one': 3, 'two': 1}, 4, (3, 1)),
    ({'one': 0.3, 'two': 0.7}, 10, (3, 7)),
    ({'one': 1 / 3, 'two': 2 / 3}, 3, (1, 2)),
    ({'one': 0.99, 'two': 0.01}, 100, (99, 1)),
    ({'one': 0, 'two': 2}, 5, (0, 5)),
  ],
)
def test_shares_are_exact_over_short_windows(weights, window, expected):
  found = visits(Mixed(weights), 30 * window)
  of_one = np.array([index < 20 for _, index in found]).reshape(30, window)
  np.testing.assert_array_equal(of_one.sum(1), [expected[0]] * 30)
  if expected[0] > 0 and window < 20:
    assert len({tuple(row) for row in of_one}) > 2  # not in a fixed order


def test_each_source_has_epochs_of_its_own():
  found = visits(Mixed({'one': 3, 'two': 1}), 400)
  assert len(set(found)) == 400  # each visit draws another augmentation
  for examples, count in (range(20), 300), (range(20, 25), 100):
    own = [pair for pair in found if pair[1] in examples]
    assert len(own) == count
    times = collections.Counter(index for _, index in own)
    assert set(times.values()) == {count // len(examples)}
    epochs = collections.Counter(epoch for epoch, _ in own)
    assert set(epochs.values()) == {len(examples)}
  assert found != visits(Mixed({'one': 3, 'two': 1}), 400, seed=1)


def test_a_source_keeps_its_order_when_others_are_added():
  def order_of_one(source, **weights):
    found = visits(Mixed(weights), 150, source)
    start = source.starts()['one']
    return [i - start for _, i in found if 0 <= i - start < 20][:20]

  more = Mixture({'early': Numbers(7), **two().sources})
  before = order_of_one(two(), one=1, two=1)
  assert sorted(before) == list(range(20))  # no example again before all others
  assert before == order_of_one(more, one=1, two=2, early=3)


def test_a_source_in_an_order_of_its_own():
  order = Mixed({'one': 1, 'two': 1}, {'two': Balanced()})
  found = [index for _, index in visits(order, 200)]
  labels = collections.Counter(i % 2 for i in found if i >= 20)
  assert labels == {0: 50, 1: 50}  # of 3 and 2 examples


def test_without_the_order_all_examples_are_visited_once():
  data = pipeline.Data(two(), 5)
  batches = list(itertools.islice(data.train_batches(), 5))
  found = np.concatenate([x['image'].reshape(-1) for x in batches])
  assert sorted(found) == [*range(20), *range(100, 105)]
  rows = [x['image'].reshape(-1) for x in data.eval_batches()]
  np.testing.assert_array_equal(
    np.concatenate(rows), [*range(20), *range(100, 105)]
  )


def test_labels_and_descriptions():
  source = two()
  assert len(source) == 25 and source.class_names == ['a', 'b']
  assert source.describe(19) == 'one: number 19'
  assert source.describe(20) == 'two: number 0'
  assert source.starts() == {'one': 0, 'two': 20}
  read = [source[i]['label'] for i in range(25)]
  np.testing.assert_array_equal(source.labels(), read)
  with pytest.raises(IndexError, match='25'):
    source[25]
  assert len(pickle.loads(pickle.dumps(source))) == 25


@pytest.mark.parametrize('kind', [Numbers, Vectors])
def test_classes_by_name_and_concatenated(kind):
  sources = {'x': kind(4, 0, 'ab'), 'y': kind(4, 0, 'cba')}
  merged = Mixture(sources, classes='by_name')
  assert merged.class_names == ['a', 'b', 'c'] and merged.num_classes == 3
  apart = Mixture(sources, classes='concatenated')
  assert apart.class_names == ['x/a', 'x/b', 'y/c', 'y/b', 'y/a']
  for source, expected in (
    (merged, [0, 1, 0, 1, 2, 1, 0, 2]),
    (apart, [0, 1, 0, 1, 2, 3, 4, 2]),
  ):
    read = pipeline.stack_labels([source[i]['label'] for i in range(8)])
    np.testing.assert_array_equal(source.labels(), read)
    assert source.labels().dtype == read.dtype
    if kind is Vectors:
      assert read.shape == (8, source.num_classes)
      read = read.argmax(1)
    np.testing.assert_array_equal(read, expected)
  pipeline.first_example(merged)


def test_a_label_without_a_class():
  source = Mixture({'x': Minus(3), 'y': Numbers(3)}, classes='concatenated')
  with pytest.raises(
    ValueError, match="label of 'x' does not fit its 2 classes"
  ):
    source[0]


class Minus(Numbers):
  """Numbers whose split has no labels."""

  def __getitem__(self, index):
    return {**super().__getitem__(index), 'label': -1}


def test_fingerprints_contain_those_of_the_sources():
  before = fingerprints.fingerprint(two())
  more = Mixture({'two': Numbers(6, 100), 'one': Numbers(20)})
  assert fingerprints.differences(before, before) == []
  found = '; '.join(
    fingerprints.differences(before, fingerprints.fingerprint(more))
  )
  assert 'two: 1 example more (5 -> 6)' in found
  assert fingerprints.fingerprint(two(classes='by_name')) != before


@pytest.mark.parametrize(
  'sources, classes, message',
  [
    ({}, 'same', 'empty'),
    ({'x': Numbers(2)}, 'other', "one of 'same', 'by_name', 'concatenated'"),
    (
      {'x': Numbers(2), 'y': Numbers(2, 0, 'abc')},
      'same',
      "'x' and 'y' have 2 and 3 classes. Use classes='by_name'",
    ),
    (
      {'x': Numbers(2), 'y': Numbers(2, 0, 'ac')},
      'same',
      "class 1 is 'b' and 'c'",
    ),
    ({'x': Numbers(2), 'y': Numbers(2, 0, None)}, 'same', '2 and None classes'),
    ({'x': Numbers(2, 0, None)}, 'by_name', "'x' has no class_names"),
    ({'x': Numbers(2, 0, 'aa')}, 'by_name', "several classes of the name 'a'"),
    ({'x': Numbers(2, 0, None)}, 'concatenated', "'x' has no num_classes"),
    (
      {'x': Numbers(2), 'y': Numbers(2, channels=3)},
      'same',
      "different channels, {'x': 1, 'y': 3}",
    ),
  ],
)
def test_sources_that_do_not_fit(sources, classes, message):
  with pytest.raises(ValueError) as error:
    Mixture(sources, classes=classes)
  assert message in str(error.value)


def test_ints_and_vectors_do_not_mix():
  source = Mixture({'x': Numbers(2), 'y': Vectors(2)})
  with pytest.raises(ValueError, match='some sources have one class per'):
    source.labels()
  with pytest.raises(ValueError, match=r'labels of one batch'):
    next(pipeline.Data(source, 4).train_batches())


def test_without_labels():
  source = Mixture(
    {
      'x': pipeline.Unlabelled(Numbers(2)),
      'y': pipeline.Unlabelled(Numbers(2, 0, None)),
    }
  )
  assert source.num_classes is None and not source.labels().any()
  data = pipeline.Data(
    two(), 4, order=Mixed({'one': 1, 'two': 1}), labels=False
  )
  batch = next(data.train_batches())
  assert not batch['label'].any() and (batch['image'] >= 100).sum() == 2


@pytest.mark.parametrize(
  'order, message',
  [
    (Mixed({'one': 1, 'twoo': 1}), "'twoo', which is no source of the Mixture"),
    (Mixed({'one': 1, 'twoo': 1}), "Did you mean 'two'?"),
    (Mixed({'one': 1}), "'two' has no weight"),
    (Mixed({'one': 0, 'two': 0}), 'all are 0'),
    (Mixed({'one': 1, 'two': 1}, {'tow': Balanced()}), "orders has 'tow'"),
  ],
)
def test_orders_that_do_not_fit(order, message):
  with pytest.raises(ValueError) as error:
    order.bind(two(), 0)
  assert message in str(error.value)


@pytest.mark.parametrize('weight', [-1, float('nan'), float('inf'), '1', True])
def test_weights_that_are_none(weight):
  with pytest.raises(ValueError, match=r'weights=.* must be'):
    Mixed({'one': weight, 'two': 1})


def test_the_order_needs_a_mixture():
  for source in Numbers(3), Subset(two(), examples=3):
    with pytest.raises(ValueError, match='needs a Mixture, but the source is'):
      Mixed({'one': 1, 'two': 1}).bind(source, 0)

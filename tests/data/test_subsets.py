"""Views of sources: slices, subsets, sources without labels."""

import collections
import itertools
import pickle

import numpy as np
import pytest
from listed import Listed

from vit_jax.data.balance import class_weights, moments, positive_weights
from vit_jax.data.images import Colours
from vit_jax.data.subsets import (
  ByNames,
  Slice,
  Subset,
  Unlabelled,
  View,
  _classes,
  labels,
)

COUNTS = (50, 7, 1, 20)  # of each class
LABELS = np.repeat(np.arange(4), COUNTS)[np.arange(78) * 31 % 78]


class Numbers:
  """Images whose pixels are the index of the example."""

  num_classes, decode = 4, Colours(1, exif=False)
  class_names = ('ash', 'birch', 'cedar', 'elm')

  def __init__(self):
    self.read = 0

  def __len__(self):
    return len(LABELS)

  def __getitem__(self, index):
    self.read += 1
    image = np.full((1, 1, 1), index, np.uint8)
    return {'image': image, 'label': int(LABELS[index])}

  def describe(self, index):
    return f'number {index}'


class Labelled(Numbers):
  def labels(self):
    return LABELS.astype(np.int32)


class Vectors(Numbers):
  def labels(self):
    return np.eye(4, dtype=np.float32)[LABELS]


def chosen(view):
  return [int(view[i]['image'][0, 0, 0]) for i in range(len(view))]


def subset(**options):
  return chosen(Subset(Labelled(), **options))


VIEWS = {
  'view': lambda source: View(source, [5, 3, 5]),
  'subset': lambda source: Subset(source, examples=9),
  'slice': lambda source: Slice(source, '[90%:]'),
  'nested': lambda source: Slice(Subset(source, examples=9), '[:4]'),
}


@pytest.mark.parametrize('make', VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize('source', [Numbers, Labelled])
def test_views_show_examples_of_their_source(make, source):
  view = make(source())
  view = pickle.loads(pickle.dumps(view))
  indices = chosen(view)
  read = [view[i]['label'] for i in range(len(view))]
  assert read == LABELS[indices].tolist()
  np.testing.assert_array_equal(view.labels(), read)
  assert view.labels().dtype == np.int32
  assert view.describe(1) == f'number {indices[1]}'
  assert (view.num_classes, view.decode) == (4, source.decode)
  assert view.class_names == Numbers.class_names
  with pytest.raises(IndexError):
    view[len(view)]


def test_only_its_own_examples_are_read():
  source = Numbers()
  part = Subset(source, examples=9)
  assert source.read == 0
  part.labels()
  assert source.read == 9
  assert Subset(Vectors(), examples=3).labels().shape == (3, 4)
  assert labels(source).tolist() == LABELS.tolist()


def test_the_choice_is_the_same_on_every_machine():
  """These numbers must not change: workdirs and papers depend on them."""
  assert subset(examples=5) == [0, 43, 54, 66, 69]
  assert subset(per_class=2, seed=3) == [27, 42, 43, 47, 60, 71, 75]
  assert chosen(Slice(Labelled(), '[:5]')) == [0, 43, 54, 66, 69]


def test_numbers_of_examples():
  for count in (1, 30, len(LABELS)):
    found = subset(examples=count)
    assert len(set(found)) == count and found == sorted(found)
  for cap in (1, 5, 20, 50):
    counts = collections.Counter(LABELS[subset(per_class=cap)].tolist())
    assert counts == {c: min(n, cap) for c, n in enumerate(COUNTS)}
  both = LABELS[subset(per_class=5, examples=10)]
  assert len(both) == 10 and max(np.bincount(both)) <= 5


def test_a_smaller_subset_is_part_of_a_larger_one():
  for option in 'examples', 'per_class':
    sets = [set(subset(**{option: count})) for count in (1, 2, 5, 11, 40)]
    assert all(a < b for a, b in itertools.pairwise(sets))
  assert subset(examples=20) != subset(examples=20, seed=1)


@pytest.mark.parametrize('stratified', [False, True])
def test_slices_part_the_examples(stratified):
  bounds = ('[:30%]', '[30%:55%]', '[55%:-7]', '[-7:]')
  parts = [chosen(Slice(Labelled(), x, stratified=stratified)) for x in bounds]
  assert [len(x) for x in parts] == [23, 20, 28, 7]  # of 78: to 23.4, 42.9
  assert sorted(itertools.chain(*parts)) == list(range(78))


def test_slices_of_sorted_examples_have_all_classes():
  """Classes are often runs of examples, or every tenth one."""

  class Digits(Labelled):
    def __len__(self):
      return 1000

  held_out = np.array(Slice(Digits(), '[90%:]').indices)
  assert len(held_out) == 100
  for classes in (held_out // 100, held_out % 10):
    counts = np.bincount(classes, minlength=10)
    assert counts.min() >= 4 and counts.max() <= 18


def test_stratified_slices_have_the_same_fraction_of_each_class():
  train, test = (
    np.bincount(Slice(Labelled(), x, stratified=True).labels(), minlength=4)
    for x in ('[:90%]', '[90%:]')
  )
  assert train.tolist() == [45, 6, 1, 18] and test.tolist() == [5, 1, 0, 2]


@pytest.mark.parametrize('bound', ['90%', '-10%', '3%', '99%'])
def test_both_slices_have_each_class_with_two_examples(bound):
  class Few(Labelled):
    def labels(self):
      return np.repeat([0, 1, 2, 3], [3, 72, 2, 1])

  bounds = f'[:{bound}]', f'[{bound}:]'
  parts = [Slice(Few(), x, stratified=True).labels() for x in bounds]
  counts = [np.bincount(x, minlength=4) for x in parts]
  assert min(*counts[0][:3], *counts[1][:3]) == 1
  assert sum(counts).tolist() == [3, 72, 2, 1]


@pytest.mark.parametrize('stratified', [False, True])
@pytest.mark.parametrize('bound', ['80%', '3%', '40', '-10%'])
def test_slices_do_not_divide_groups(stratified, bound):
  """78 examples of 13 groups in two classes; group 0 has 30 of them."""
  groups = np.array([f'g{max(0, i % 43 - 30)}' for i in range(78)])
  by_class = type('OfGroups', (Labelled,), {'labels': lambda _: [*groups]})
  names = np.unique(groups)
  of_group = dict(zip(names, np.arange(len(names)) % 2))
  by_class.labels = lambda self: np.array([of_group[x] for x in groups])
  train, test = (
    Slice(by_class(), x, stratified=stratified, groups=groups)
    for x in (f'[:{bound}]', f'[{bound}:]')
  )
  parts = [{*groups[x.indices]} for x in (train, test)]
  assert not parts[0] & parts[1] and parts[0] | parts[1] == {*groups}
  assert len(train) + len(test) == 78
  if stratified and '%' in bound:  # both have groups of both classes
    assert {*train.labels()} == {*test.labels()} == {0, 1}


def test_slices_cut_groups_by_the_number_of_examples():
  groups = np.repeat(np.arange(39), 2)
  part = Slice(Labelled(), '[:50%]', groups=groups)
  assert len(part) in (38, 40)
  # One label each is stratified as classes are.
  both = [Slice(x(), '[:50%]', stratified=True) for x in (Vectors, Labelled)]
  assert chosen(both[0]) == chosen(both[1])
  of_groups = _classes(np.repeat([0, 1], 3), np.array([5, 5, 7, 7, 5, 7]), 2)
  assert of_groups.tolist() == [0, 1]  # the most frequent of 5 and 7
  one = Slice(Labelled(), '[:90%]', groups=['a'] * 78)
  assert len(one) == 78


def test_labels_by_the_names_of_a_model():
  """Another order, a class less, and ints for names; columns likewise."""
  numbers = Labelled()
  names = ['elm', 'oak', 'ash', 'cedar', 'birch']
  found = ByNames(numbers, names)
  assert found[0]['label'] == names.index(numbers.class_names[LABELS[0]])
  np.testing.assert_array_equal(labels(found), np.array([2, 4, 3, 0])[LABELS])
  assert (found.num_classes, found.class_names) == (5, names)
  numbers.class_names = '0123'  # they index the names
  np.testing.assert_array_equal(labels(ByNames(numbers, names)), LABELS)
  with pytest.raises(ValueError, match=r"\['cedar'\], which are not among"):
    ByNames(Labelled(), ['ash', 'birch', 'elm'])
  found = ByNames(Vectors(), ['elm', 'oak', 'ash', 'birch', 'cedar'])
  expected = np.eye(4)[LABELS][:, [3, 0, 0, 1, 2]]
  expected[:, 1] = np.nan  # the data says nothing about it
  np.testing.assert_array_equal(labels(found), expected)


def several(seed):
  """Return 240 images with a rare, a common and a missing label."""
  rng, rows = np.random.default_rng(seed), np.zeros((240, 3), np.float32)
  rows[rng.permutation(240)[:10], 0] = 1
  rows[:, 1] = rng.random(240) < 0.4
  rows[rng.random(240) < 0.1, 2] = np.nan
  return Listed([b''] * 240, rows)


@pytest.mark.parametrize('size', [1, 3])
def test_several_labels_are_stratified_by_the_rarest(size):
  groups = np.arange(240) // size
  for seed in range(20):
    options = {'stratified': True, 'groups': groups}
    part = Slice(several(seed), '[90%:]', **options).labels()
    assert part[:, 0].any() and abs(part[:, 1].mean() - 0.4) < 0.25
  numbers = several(0)
  numbers.given[0, 0] = 0.5
  both = [Slice(numbers, '[90%:]', stratified=x) for x in (False, True)]
  np.testing.assert_array_equal(*(x.labels() for x in both))


def test_a_slice_of_another_size_is_said(capsys):
  Slice(Labelled(), '[:90%]', groups=['a'] * 78)
  assert "'[:90%]' has 78 of 78" not in capsys.readouterr().out  # 70
  Slice(Labelled(), '[50%:]', groups=['a'] * 60 + [*'bcdefghijklmnopqrs'])
  assert 'examples, not 39, as groups' in capsys.readouterr().out


def test_unlabelled():
  view = pickle.loads(pickle.dumps(Unlabelled(Labelled())))
  assert len(view) == 78 and view.decode == Colours(1, exif=False)
  assert view.num_classes is None and view.class_names is None
  assert view[60]['label'] == 0 and view[60]['image'].item() == 60
  assert view.describe(60) == 'number 60'
  assert labels(view).tolist() == [0] * 78 and labels(view).dtype == np.int32


@pytest.mark.parametrize(
  'make, words',
  [
    (lambda: Subset(Labelled(), examples=79), ['79', '78']),
    (lambda: Subset(Labelled(), per_class=5, examples=17), ['17', '16']),
    (lambda: Subset(Vectors(), per_class=2), ['Vectors', '(78, 4)', 'Leave']),
    (lambda: Slice(Labelled(), 'train[:5]'), ["'train[:5]'"]),
    (lambda: Slice(Labelled(), '[78:]'), ["'[78:]'", 'none of 78']),
  ],
)
def test_errors(make, words):
  with pytest.raises(ValueError) as error:
    make()
  assert all(word in str(error.value) for word in words)


def test_class_weights():
  weights = class_weights(Labelled())
  expected = [78 / (4 * c) for c in COUNTS]
  np.testing.assert_allclose(weights, expected)
  np.testing.assert_allclose(np.mean(np.take(weights, LABELS)), 1)

  class Empty(Labelled):  # a class without examples
    num_classes = 5

  np.testing.assert_allclose(class_weights(Empty()), [*expected, 1])


def measured(*rows):
  return Listed([b''] * len(rows), np.array(rows, np.float32), ('a', 'b'))


def test_positive_weights_and_moments_are_of_known_labels():
  both = measured((1, 0), (0, np.nan), (0, 0), (np.nan, 0))
  assert positive_weights(both) == (2.0, 1.0)
  assert moments(measured([1], [np.nan], [4])) == ((2.5, 1.5),)
  with pytest.raises(ValueError, match='b has 1 different numbers in 4 '):
    moments(both)
  with pytest.raises(ValueError, match='a has 0 different numbers in 1 '):
    moments(measured([np.nan, 1]))

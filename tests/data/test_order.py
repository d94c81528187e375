"""The orders of training: epochs, repeats, classes, restarts and hosts."""

import collections
import itertools
import types

import numpy as np
import pytest

from vit_jax.data import order
from vit_jax.data.order import Balanced, Repeated, Shuffled
from vit_jax.data.pipeline import Data

COUNTS = (50, 7, 1, 0, 3)  # of each class; one is empty
LABELS = np.repeat(np.arange(5), COUNTS)
BATCH = 24


# Images whose pixels are the index of the example.
NUMBERS = [
  {'image': np.full((1, 1, 1), index, np.uint8), 'label': int(label)}
  for index, label in enumerate(LABELS)
]


def noise(image, rng):
  """Draw numbers that identify the random stream."""
  drawn = rng.integers(256, size=(1, 1, 4), dtype=np.uint8)
  return np.concatenate([image, drawn], axis=-1)


def visits(kind, count, seed=0, start=0):
  bound = kind.bind(NUMBERS, seed)
  return [bound(p) for p in range(start, start + count)]


def test_the_permutation_of_an_epoch():
  """These numbers must not change: runs that resume depend on them."""
  bound = Shuffled().bind(range(6), 3)
  expected = [np.random.default_rng([3, e]).permutation(6) for e in range(3)]
  found = [bound(p) for p in range(18)]
  assert [index for _, index in found] == np.concatenate(expected).tolist()
  assert [epoch for epoch, _ in found] == [0] * 6 + [1] * 6 + [2] * 6
  assert [index for _, index in found[:6]] == [2, 5, 4, 1, 3, 0]


def test_large_sets_are_permuted_one_place_at_a_time(monkeypatch):
  from grain.experimental import index_shuffle

  count = 2**31 + 3
  found = Shuffled().bind(range(count), 4)(2 * count + 7)
  seed = int(np.random.SeedSequence([4, 2]).generate_state(1)[0])
  place = index_shuffle(7, max_index=count - 1, seed=seed, rounds=4)
  assert found == (2, place)
  monkeypatch.setattr(order, '_MOST_PERMUTED', 10)
  bound = Shuffled().bind(range(99), 4)
  assert sorted(bound(p) for p in range(99, 198)) == [(1, i) for i in range(99)]


@pytest.mark.parametrize('times', [1, 3, 4])
def test_repeats(times):
  assert Repeated() == Repeated(3, Shuffled())  # DeiT's
  plain = visits(Shuffled(), 40, seed=5)
  found = visits(Repeated(times), 40 * times, seed=5)
  assert len(set(found)) == 40 * times  # other augmentation
  for repeat in range(times):
    assert [index for _, index in found[repeat::times]] == [i for _, i in plain]


def test_repeats_are_those_of_timms_sampler(timm_training):
  expected = timm_training['repeats']
  in_order = types.SimpleNamespace(bind=lambda *_: lambda p: (0, p))
  found = visits(Repeated(3, in_order), len(expected))
  assert [index for _, index in found] == expected.tolist()


def test_each_class_is_visited_equally_often():
  found = visits(Balanced(), 4 * 100, seed=3)
  labels = LABELS[[index for _, index in found]].reshape(100, 4)
  np.testing.assert_array_equal(np.sort(labels), [[0, 1, 2, 4]] * 100)
  assert len({tuple(row) for row in labels}) > 10  # not in a fixed order
  # No example is visited again before all others of its class.
  times = collections.Counter(index for _, index in found)
  for label, count in enumerate(COUNTS):
    seen = [times[i] for i in np.flatnonzero(label == LABELS)]
    assert all(n in (100 // count, 100 // count + 1) for n in seen)
  own = [index for _, index in found if LABELS[index] == 1][:14]
  assert sorted(own[:7]) == sorted(own[7:]) == list(range(50, 57))
  assert own[:7] != own[7:]  # each round has another order
  assert len(set(found)) == len(found)
  assert found != visits(Balanced(), 400, seed=4)
  # These numbers must not change: runs that resume depend on them.
  assert found[:4] == [(0, 58), (0, 57), (0, 54), (0, 2)]


@pytest.mark.parametrize(
  'power, expected',
  [(1, COUNTS), (0.5, np.sqrt(COUNTS)), (-1, (1 / 50, 1 / 7, 1, 0, 1 / 3))],
)
def test_classes_in_proportion_to_a_power(power, expected):
  found = visits(Balanced(power), 4096 * 2)
  assert len(set(found)) == len(found)
  counts = np.bincount(LABELS[[i for _, i in found]], minlength=5)
  expected = np.array(expected) / np.sum(expected)
  np.testing.assert_allclose(counts / len(found), expected, atol=5e-4)


def test_many_classes_in_proportion_to_a_power():
  labels = np.repeat(np.arange(400), [1, 9] * 200)
  many = types.SimpleNamespace(labels=lambda: labels)
  bound = Balanced(0.5).bind(many, 0)
  counts = np.bincount(labels[[bound(p)[1] for p in range(800)]])
  assert counts.tolist() == [1, 3] * 200


def test_balance_needs_one_class_for_each_example():
  vectors = [{'label': row} for row in np.zeros((61, 5), np.float32)]
  with pytest.raises(ValueError, match=r'list: .*\(61, 5\)'):
    Balanced().bind(vectors, 0)


KINDS = [
  Shuffled(),
  Repeated(3),
  Balanced(),
  Balanced(0.5),
  Repeated(2, Balanced()),
]


def rows(kind, count, *, start=0, num_workers=0, **process):
  """Return the images from a position on: uint8 [n, 5]."""
  data = Data(NUMBERS, BATCH, (noise,), order=kind, num_workers=num_workers)
  batches = data.train_batches(seed=9, start=start, **process)
  found = [x['image'] for x in itertools.islice(batches, count)]
  assert batches.position == start + count * BATCH
  batches.close()
  return np.concatenate(found).reshape(-1, 5)


@pytest.mark.parametrize('kind', KINDS, ids=str)
def test_restarts_at_any_position_on_any_number_of_hosts(kind):
  whole = rows(kind, 8)
  assert len({x.tobytes() for x in whole}) == len(whole)  # other augmentation
  for start in (1, BATCH, 3 * BATCH + 13):
    rest = rows(kind, 4, start=start)
    np.testing.assert_array_equal(rest, whole[start : start + 4 * BATCH])
  hosts = [rows(kind, 8, process_index=i, process_count=3) for i in range(3)]
  parts = [host.reshape(8, BATCH // 3, 5) for host in hosts]
  found = np.concatenate(parts, axis=1).reshape(-1, 5)
  np.testing.assert_array_equal(found, whole)


def test_any_number_of_worker_processes():
  kind = KINDS[-1]
  found = rows(kind, 3, start=17, num_workers=2)
  np.testing.assert_array_equal(found, rows(kind, 4)[17 : 17 + 3 * BATCH])

"""Neighbours and votes against numpy, ties included, on 1 and 8 devices."""

import jax
import numpy as np
import pytest
import splits

from vit_jax.evals import frozen, knn
from vit_jax.evals.frozen import Split
from vit_jax.evals.knn import Knn
from vit_jax.parallel import sharding

TRAIN, TEST = splits.digits('train'), splits.digits('test')[:300]


def reference(train, test, k, temperature, metric='cosine'):
  """Accuracy, with all in memory and a stable sort."""
  x, q = train.x.astype(np.float64), test.x.astype(np.float64)
  if metric == 'cosine':
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    q = q / np.linalg.norm(q, axis=1, keepdims=True)
    similar = q @ x.T
  else:
    similar = -(((q[:, None] - x[None]) ** 2).sum(axis=-1))
  near = np.argsort(-similar, axis=1, kind='stable')[:, :k]
  hits = 0
  for i, rows in enumerate(near):
    votes = dict.fromkeys(np.unique(train.y), 0.0)
    for row in rows:
      t = temperature
      votes[train.y[row]] += np.exp(similar[i, row] / t) if t else 1.0
    hits += max(votes, key=votes.get) == test.y[i]
  return hits / len(test.y)


@pytest.mark.parametrize('num_devices', [1, 8])
def test_digits_are_classified_as_in_numpy(num_devices):
  mesh = splits.mesh_of(num_devices)
  read = Knn(k=(1, 10, 200), temperature=(0.07, None))
  with jax.transfer_guard('disallow'):
    found = read(TRAIN, TEST, mesh=mesh)
  for k in (1, 10, 200):
    assert found[f'k{k}_t0.07'] == reference(TRAIN, TEST, k, 0.07)
    assert found[f'k{k}_majority'] == reference(TRAIN, TEST, k, None)
  assert len(found) == 6
  assert found['k10_t0.07'] > 0.95 > 0.9 > found['k200_majority']


def tied(count, seed):
  """Rows with four ones, of norm 2: similarities are exact, most are tied."""
  rng = np.random.default_rng(seed)
  x = np.zeros((count, 12), np.float32)
  for row in x:
    row[rng.permutation(12)[:4]] = rng.choice([-1, 1], 4)
  return Split(x, rng.integers(0, 3, count))


@pytest.mark.parametrize(
  'num_devices, metric', [(1, 'euclidean'), (8, 'euclidean'), (8, 'cosine')]
)
def test_ties_are_those_of_a_stable_sort(num_devices, metric):
  # More than a block of rows on several devices, and of queries; odd numbers.
  train, test = tied(2501, seed=0), tied(259, seed=1)
  mesh = splits.mesh_of(num_devices)
  similar, rows = knn.neighbours(train.x, test.x, 33, metric=metric, mesh=mesh)
  exact = test.x @ train.x.T / 4
  if metric == 'euclidean':
    exact = 8 * exact - 8
  expected = np.argsort(-exact, axis=1, kind='stable')[:, :33]
  np.testing.assert_array_equal(rows, expected)
  np.testing.assert_array_equal(
    similar, np.take_along_axis(exact, expected, axis=1)
  )
  found = Knn(k=(33, 4), temperature=None, metric=metric)
  found = found(train, test, mesh=mesh)
  for k in (4, 33):
    assert found[f'k{k}_majority'] == reference(train, test, k, None, metric)


def test_axes_of_any_mesh():
  mesh = sharding.make_mesh(data=2, fsdp=2, model=2)
  expected = reference(TRAIN, TEST, 10, 0.07)
  assert Knn(k=10)(TRAIN, TEST, mesh=mesh) == {'k10_t0.07': expected}


def test_no_temperature_overflows():
  similar = np.array([[1.0, 0.999, 0.998]], np.float32)
  labels = np.array([[2, 1, 1]])
  assert knn.vote(similar, labels, 1e-6) == [2]
  assert knn.vote(similar, labels, None) == [1]


def test_k_is_chosen_away_from_test():
  mesh = splits.mesh_of(8)
  settings = {'k': (1, 10, 200), 'temperature': (0.07, None)}
  kept, held = frozen.Tuned(held_out=0.2, seed=3).rows(TRAIN.y)
  for keywords, val in (
    ({'held_out': 0.2, 'seed': 3}, None),
    ({}, TEST[:100]),
  ):
    fit, there = (TRAIN[kept], TRAIN[held]) if val is None else (TRAIN, val)
    scores = {
      (k, t): reference(fit, there, k, t)
      for k in settings['k']
      for t in settings['temperature']
    }
    k, t = max(scores, key=scores.get)
    found = Knn(**settings, **keywords)(TRAIN, TEST, val=val, mesh=mesh)
    assert found['chosen_k'] == k
    assert found.get('chosen_t') == t
    assert found['chosen'] == reference(TRAIN, TEST, k, t)


def test_errors():
  with pytest.raises(ValueError, match=r'k=200, but there are 30 training'):
    Knn().check(np.arange(30) % 2, np.zeros(4))
  with pytest.raises(ValueError, match=r'k=30, but .* 26 .* not held out'):
    Knn(k=(3, 30), held_out=0.1).check(np.arange(30) % 2, np.zeros(4))
  with pytest.raises(ValueError, match=r'k=\(0,\) must be integers'):
    Knn(k=(0,))
  with pytest.raises(ValueError, match=r"metric='l1' must be one of"):
    Knn(metric='l1')
  with pytest.raises(ValueError, match=r'temperature=0 must be a number above'):
    Knn(temperature=0)

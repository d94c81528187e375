"""Neighbours and votes against numpy, ties included."""

import numpy as np
import pytest
import splits
from options import all_set

from vit_jax.evals import knn
from vit_jax.evals.frozen import Split
from vit_jax.evals.knn import Knn

TRAIN, TEST = splits.digits('train'), splits.digits('test')[:300]


def reference(train, test, k, temperature):
  """Accuracy, with all in memory and a stable sort."""
  x, q = train.x.astype(np.float64), test.x.astype(np.float64)
  x = x / np.linalg.norm(x, axis=1, keepdims=True)
  q = q / np.linalg.norm(q, axis=1, keepdims=True)
  similar = q @ x.T
  near = np.argsort(-similar, axis=1, kind='stable')[:, :k]
  hits = 0
  for i, rows in enumerate(near):
    votes = dict.fromkeys(np.unique(train.y), 0.0)
    for row in rows:
      votes[train.y[row]] += np.exp(similar[i, row] / temperature)
    hits += max(votes, key=votes.get) == test.y[i]
  return hits / len(test.y)


def test_digits_are_classified_as_in_numpy():
  knn = all_set(Knn, k=(1, 10, 200), temperature=(0.07, 10))
  found = knn(TRAIN, TEST)
  for k in (1, 10, 200):
    assert found[f'k{k}_t0.07'] == reference(TRAIN, TEST, k, 0.07)
    assert found[f'k{k}_t10'] == reference(TRAIN, TEST, k, 10)
  assert len(found) == 6
  assert found['k10_t0.07'] > 0.95 > 0.9 > found['k200_t10']


def tied(count, seed):
  """Rows with four ones, of norm 2: similarities are exact, most are tied."""
  rng = np.random.default_rng(seed)
  x = np.zeros((count, 12), np.float32)
  for row in x:
    row[rng.permutation(12)[:4]] = rng.choice([-1, 1], 4)
  return Split(x, rng.integers(0, 3, count))


def test_ties_are_those_of_a_stable_sort_in_any_number_of_chunks(monkeypatch):
  train, test = tied(2501, seed=0), tied(259, seed=1)
  exact = test.x @ train.x.T / 4
  expected = np.argsort(-exact, axis=1, kind='stable')[:, :33]
  for rows_at_a_time in (1000, 10_000):
    monkeypatch.setattr(knn, '_ROWS', rows_at_a_time)
    similarities, rows = knn.neighbours(train.x, test.x, 33)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(
      similarities, np.take_along_axis(exact, expected, axis=1)
    )
  found = Knn(k=(33, 4), temperature=(1,))(train, test)
  for k in (4, 33):
    assert found[f'k{k}_t1'] == reference(train, test, k, 1)


def test_no_temperature_overflows():
  similar = np.array([[1.0, 0.999, 0.998]], np.float32)
  labels = np.array([[2, 1, 1]])
  assert knn.vote(similar, labels, 1e-6) == [2]
  assert knn.vote(similar, labels, 1) == [1]


def test_too_few_training_examples():
  labels = {'train': np.arange(30) % 2, 'test': np.zeros(4)}
  with pytest.raises(ValueError, match=r'k=31.*30'):
    Knn(k=(3, 31)).check(labels)
  Knn(k=(3, 30)).check(labels)

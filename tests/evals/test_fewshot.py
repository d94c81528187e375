"""The closed form against other solvers, and the protocol around it."""

import numpy as np
import pytest
import splits
from options import all_set
from sklearn.linear_model import Ridge

from vit_jax.evals.fewshot import FewShot
from vit_jax.evals.frozen import Split

RNG = np.random.default_rng(0)
TRAIN, TEST = splits.digits('train'), splits.digits('test')


def choose(labels, shots, seed, **options):
  return np.concatenate(FewShot(**options).draw(labels, shots, seed))


def problem(n, dim, num_classes=4):
  x = RNG.normal(size=(n, dim)) * RNG.uniform(0.1, 10, dim) + 3
  y = np.arange(n) % num_classes
  x[:, 0] += 5 * y
  return x.astype(np.float32), 10 * y + 7  # labels need not be 0 .. K-1


def prepared(x, of=None):
  """Features as they are fitted, by the statistics of `of`, or their own."""
  x, of = (np.float64(x), np.float64(x if of is None else of))
  x = (x - of.mean(axis=0)) / (of.std(axis=0) + 1e-5)
  return np.concatenate([x, np.full((len(x), 1), 100.0)], axis=1)


@pytest.mark.parametrize('l2', [2.0**10, 0.5])
@pytest.mark.parametrize(
  ('n', 'dim'), [(40, 6), (12, 30), (16, 15)], ids=['primal', 'dual', 'equal']
)
def test_the_solution_is_that_of_other_solvers(n, dim, l2):
  x, y = problem(n, dim)
  solution = FewShot().solver(Split(x, y))(l2)
  features = prepared(x)
  targets = np.where(y[:, None] == np.unique(y), 1.0, -1.0)
  weights = np.vstack([solution.kernel, solution.bias / 100.0])
  ridge = Ridge(alpha=l2, fit_intercept=False, solver='svd')
  ridge.fit(features, targets)
  np.testing.assert_allclose(weights, ridge.coef_.T, atol=1e-9)
  predicted = np.unique(y)[ridge.predict(features).argmax(axis=1)]
  np.testing.assert_array_equal(solution.predict(x), predicted)


def test_constant_features_do_no_harm():
  x, y = problem(40, 6)
  x[:, 3] = 2.0
  solver = FewShot().solver
  with_it = solver(Split(x, y))(1.0).predict(x)
  without = np.delete(x, 3, axis=1)
  expected = solver(Split(without, y))(1.0).predict(without)
  np.testing.assert_array_equal(with_it, expected)


def test_choice():
  labels = np.repeat([3, 5, 9], [4, 6, 5])
  chosen = choose(labels, 4, seed=0)
  np.testing.assert_array_equal(labels[chosen], np.repeat([3, 5, 9], 4))
  assert len(set(chosen)) == 12
  np.testing.assert_array_equal(choose(labels, 4, seed=0), chosen)
  assert set(choose(labels, 4, seed=1)) != set(chosen)
  fewer = choose(labels, 2, seed=0).reshape(3, 2)
  np.testing.assert_array_equal(fewer, chosen.reshape(3, 4)[:, :2])
  with pytest.raises(
    ValueError, match=r'5 shots .*class 3 has 4 training exam'
  ):
    choose(labels, 5, seed=0)


def ridge_accuracy(fit, there, l2):
  ridge = Ridge(alpha=l2, fit_intercept=False, solver='svd')
  ridge.fit(prepared(fit.x), 2 * np.eye(10)[fit.y] - 1)
  predicted = ridge.predict(prepared(there.x, of=fit.x)).argmax(axis=1)
  return np.mean(predicted == there.y)


def test_accuracies_of_each_draw():
  found = FewShot(shots=(1, 7), seeds=(0, 4))(TRAIN, TEST)
  expected = {}
  for shots in (1, 7):
    each = [
      ridge_accuracy(TRAIN[choose(TRAIN.y, shots, seed)], TEST, 2.0**10)
      for seed in (0, 4)
    ]
    expected |= {
      f'{shots}shot_seed0': each[0],
      f'{shots}shot_seed4': each[1],
      f'{shots}shot': np.mean(each),
      f'{shots}shot_std': abs(each[0] - each[1]) / 2,
    }
  assert found == pytest.approx(expected, abs=1e-12)
  assert found['7shot'] > 0.75 > found['1shot'] > 0.4


def test_the_strength_is_chosen_on_held_out_shots():
  choices = tuple(2.0 ** np.arange(-4, 20, 6))
  options = {'shots': (10, 4), 'seeds': (0, 1), 'held_out_shots': 6}
  read = all_set(FewShot, l2=choices, allow_fewer=True, **options)
  found = read(TRAIN, TEST)
  for shots in (10, 4):
    for seed in (0, 1):
      rows = choose(TRAIN.y, shots + 6, seed).reshape(10, -1)
      kept, held = (TRAIN[x.ravel()] for x in (rows[:, :-6], rows[:, -6:]))
      scores = [ridge_accuracy(kept, held, l2) for l2 in choices]
      best = max(l2 for l2, s in zip(choices, scores) if s == max(scores))
      assert found[f'{shots}shot_l2_seed{seed}'] == best
      accuracy = ridge_accuracy(kept, TEST, best)
      assert found[f'{shots}shot_seed{seed}'] == pytest.approx(accuracy)


def test_mistakes():
  with pytest.raises(ValueError, match=r'l2=\(1.0, 2.0\) .*held_out_shots'):
    FewShot(shots=(1, 5), l2=(1.0, 2.0))
  three = {'train': np.arange(30) % 3}
  FewShot(shots=(10,)).check(three)
  with pytest.raises(ValueError, match=r'13 shots .*class 0 has 10'):
    FewShot(shots=(1, 10), l2=(1, 2), held_out_shots=3).check(three)


def test_a_class_may_have_fewer():
  labels = np.repeat([0, 1, 2], [1, 3, 9])
  chosen = choose(labels, 5, 0, allow_fewer=True)
  np.testing.assert_array_equal(np.bincount(labels[chosen]), [1, 3, 5])
  # Held out are 0, 0 and 2.
  x = np.random.default_rng(0).normal(size=(13, 4)).astype(np.float32)
  split = Split(x + labels[:, None].astype(np.float32), labels)
  options = {'l2': (1.0, 100.0), 'held_out_shots': 2, 'allow_fewer': True}
  fewshot = FewShot(shots=(5,), **options)
  fewshot.check({'train': labels})
  assert 0 <= fewshot(split, split)['5shot'] <= 1

"""Logistic regression against scikit-learn, on real features."""

import functools

import numpy as np
import pytest
import splits
from options import all_set
from sklearn import metrics
from sklearn.linear_model import LogisticRegression

from vit_jax.evals import logistic
from vit_jax.evals.frozen import Split, moments
from vit_jax.evals.logistic import Logistic

TRAIN, TEST = splits.digits('train'), splits.digits('test')


@functools.cache
def reference(C):
  """The same minimum, by Newton's method in float64."""
  made = LogisticRegression(C=C, tol=1e-9, solver='newton-cg')
  return made.fit(TRAIN.x.astype(np.float64), TRAIN.y)


@pytest.mark.parametrize('rows', [2**16, 500])
def test_solutions_equal_those_of_scikit_learn(rows, monkeypatch):
  monkeypatch.setattr(logistic, '_ROWS', rows)  # 1,029 examples
  logistic._minimise.clear_cache()
  # Measured: 4e-7, 3e-6, 2e-5, 3e-4 for coefficients of 0.4, 0.9, 1.6, 2.8.
  bounds = {0.01: 2e-6, 0.1: 2e-5, 1.0: 2e-4, 10.0: 2e-3}
  fits = Logistic().fit(TRAIN, list(bounds))
  for (C, bound), (found, converged) in zip(bounds.items(), fits):
    wanted = reference(C)
    kernel = found.kernel / found.std[:, None]
    np.testing.assert_allclose(kernel, wanted.coef_.T, atol=bound)
    np.testing.assert_array_equal(found.predict(TEST.x), wanted.predict(TEST.x))
    assert converged


def test_standardized_features_may_have_any_scale():
  mean, std = moments(TRAIN.x)
  scales = np.float32(10.0) ** (np.arange(TRAIN.x.shape[1]) % 5 - 2)
  scaled = Split(TRAIN.x * scales, TRAIN.y)
  ((found, _),) = Logistic(standardize=True).fit(scaled, [0.1])
  before = Split(((TRAIN.x - mean) / std).astype(np.float32), TRAIN.y)
  ((wanted, _),) = Logistic().fit(before, [0.1])
  # 1e-5 is added to each deviation, and the smallest is 4e-5.
  np.testing.assert_allclose(
    found.kernel, wanted.kernel / wanted.std[:, None], atol=5e-3
  )
  predicted = wanted.predict((TEST.x - mean) / std)
  np.testing.assert_array_equal(found.predict(TEST.x * scales), predicted)


def test_C_is_chosen_on_val():
  """The held-out examples of train prefer a larger C."""
  choices, small = (10.0, 0.001, 1.0, 0.1), reference(0.001)
  val = TEST[small.predict(TEST.x) == TEST.y]
  accuracy = small.score(TEST.x, TEST.y)
  mean = metrics.balanced_accuracy_score(TEST.y, small.predict(TEST.x))
  found = Logistic(C=choices)(TRAIN, TEST, val)
  assert found.pop('mean_per_class_accuracy') == pytest.approx(mean)
  assert found == {'accuracy': accuracy, 'C': 0.001, 'converged': 1.0}


def test_C_is_chosen_on_held_out_examples():
  choices = (10.0, 0.0001)
  kept, held = logistic.hold_out(TRAIN.y)
  fits = Logistic().fit(TRAIN[kept], sorted(choices))
  scores = [linear.accuracy(TRAIN[held]) for linear, _ in fits]
  best = sorted(choices)[int(np.argmax(scores))]
  found = Logistic(C=choices)(TRAIN, TEST)
  assert found['C'] == best
  assert found['accuracy'] == reference(best).score(TEST.x, TEST.y)


def test_held_out_rows_are_stratified():
  labels = np.repeat([5, 2], [40, 10])
  kept, held = logistic.hold_out(labels)
  np.testing.assert_array_equal(np.sort([*kept, *held]), np.arange(50))
  assert np.sum(labels[held] == 5) == 4 and len(held) == 5


def test_a_fit_that_does_not_converge_is_reported():
  read = all_set(Logistic, C=(100.0,), tol=1e-9, max_iter=30, standardize=True)
  found = read(TRAIN, TEST)
  expected = reference(100.0).score(TEST.x, TEST.y)
  assert found['converged'] == 0.0
  assert found['accuracy'] == pytest.approx(expected, abs=2 / len(TEST.y))
  assert Logistic(max_iter=3)(TRAIN, TEST)['converged'] == 0.0


def test_too_few_to_hold_out():
  each = {'train': np.arange(3), 'test': np.arange(3)}
  with pytest.raises(ValueError, match='least populated class'):
    Logistic(C=(1, 2)).check(each)
  Logistic(C=(1, 2)).check(each | {'val': np.arange(3)})

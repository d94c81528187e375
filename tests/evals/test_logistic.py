"""Logistic regression against scikit-learn, on real features."""

import functools

import jax
import numpy as np
import pytest
import splits
from sklearn.linear_model import LogisticRegression

from vit_jax.evals import frozen
from vit_jax.evals.logistic import Logistic

TRAIN, TEST = splits.digits('train'), splits.digits('test')


@functools.cache
def reference(C):
  """The same minimum, by Newton's method in float64."""
  made = LogisticRegression(C=C, tol=1e-9, solver='newton-cg')
  return made.fit(TRAIN.x.astype(np.float64), TRAIN.y)


def test_solutions_equal_those_of_scikit_learn():
  # Measured: 4e-7, 3e-6, 2e-5, 3e-4 for coefficients of 0.4, 0.9, 1.6, 2.8.
  bounds = {0.01: 2e-6, 0.1: 2e-5, 1.0: 2e-4, 10.0: 2e-3}
  for num_devices in (1, 8):
    mesh = splits.mesh_of(num_devices)
    with jax.transfer_guard('disallow'):
      solutions = Logistic().fit(TRAIN, list(bounds), mesh)
    for (C, bound), found in zip(bounds.items(), solutions):
      expected = reference(C)
      kernel = found.kernel / found.std[:, None]
      np.testing.assert_allclose(kernel, expected.coef_.T, atol=bound)
      assert found.converged
      np.testing.assert_array_equal(
        found.predict(TEST.x), expected.predict(TEST.x)
      )


def test_standardised_features():
  mesh = splits.mesh_of(8)
  x = TRAIN.x * np.linspace(0.1, 100, 64, dtype=np.float32) + 3
  logistic = Logistic(standardise=True)
  (found,) = logistic.fit(frozen.Split(x, TRAIN.y), [0.01], mesh)
  x = x.astype(np.float64)
  made = LogisticRegression(C=0.01, tol=1e-8, solver='newton-cg')
  made.fit((x - x.mean(axis=0)) / (x.std(axis=0) + 1e-5), TRAIN.y)
  np.testing.assert_allclose(found.kernel, made.coef_.T, atol=1e-5)
  assert np.mean(found.predict(x) == TRAIN.y) > 0.95


def test_C_is_not_chosen_on_test():
  mesh, choices = splits.mesh_of(8), (10.0, 0.001, 1.0, 0.1)
  val, test = TEST[:400], TEST[400:]
  with jax.transfer_guard('disallow'):
    found = Logistic(C=choices)(TRAIN, test, val=val, mesh=mesh)
  scores = {C: reference(C).score(val.x, val.y) for C in sorted(choices)}
  best = max(scores, key=scores.get)
  accuracy = reference(best).score(test.x, test.y)
  assert found == {'accuracy': accuracy, 'C': best, 'converged': 1.0}


def test_a_tolerance_below_rounding_is_reported_and_does_no_harm():
  found = Logistic(C=100.0, tol=1e-9, max_iter=300)
  found = found(TRAIN, TEST, mesh=splits.mesh_of(8))
  expected = reference(100.0).score(TEST.x, TEST.y)
  assert found['converged'] == 0.0
  assert found['accuracy'] == pytest.approx(expected, abs=2 / len(TEST.y))


def test_too_few_iterations_are_reported():
  mesh = splits.mesh_of(8)
  found = Logistic(max_iter=3)(TRAIN, TEST, mesh=mesh)
  assert found['converged'] == 0.0
  assert found['accuracy'] > 0.5


def test_errors():
  with pytest.raises(ValueError, match=r'C=0 must be a number above 0'):
    Logistic(C=0)
  with pytest.raises(ValueError, match=r'held_out=1 must be a fraction'):
    Logistic(held_out=1)
  with pytest.raises(ValueError, match=r'3 training examples are all of one'):
    Logistic().check(np.array([4, 4, 4]), np.array([4]))
  with pytest.raises(ValueError, match=r'No class of the 3 .* Add a val'):
    Logistic(C=(1, 2)).check(np.arange(3), np.arange(3))
  Logistic(C=(1, 2)).check(np.arange(3), np.arange(3), labels_val=np.arange(3))

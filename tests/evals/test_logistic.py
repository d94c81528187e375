"""Logistic regression against scikit-learn, on real features."""

import functools

import jax
import numpy as np
import pytest
import scipy.optimize
import splits
from sklearn.linear_model import LogisticRegression

from vit_jax.evals import lbfgs, logistic, readout
from vit_jax.evals.logistic import Logistic

TRAIN, TEST = splits.digits('train'), splits.digits('test')


@functools.cache
def reference(C):
  """The same minimum, by Newton's method in float64."""
  made = LogisticRegression(C=C, tol=1e-9, solver='newton-cg')
  return made.fit(TRAIN.x.astype(np.float64), TRAIN.y)


# Measured: 3e-7, 2.5e-6, 2.8e-5, 2.4e-4, of coefficients of 0.4, 0.9, 1.6, 2.8.
@pytest.mark.parametrize(
  'C, bound', [(0.01, 2e-6), (0.1, 2e-5), (1.0, 2e-4), (10.0, 2e-3)]
)
@pytest.mark.parametrize('num_devices', [1, 8])
def test_the_solution_is_scikit_learns(num_devices, C, bound):
  mesh = splits.mesh_of(num_devices)
  with jax.transfer_guard('disallow'):
    found = logistic.solver(TRAIN.x, TRAIN.y, mesh=mesh)(C)
  expected = reference(C)
  np.testing.assert_allclose(found['kernel'], expected.coef_.T, atol=bound)
  assert found['converged']
  np.testing.assert_array_equal(
    readout.predict(found, TEST.x), expected.predict(TEST.x)
  )


def test_standardised_features():
  mesh = splits.mesh_of(8)
  x = TRAIN.x * np.linspace(0.1, 100, 64, dtype=np.float32) + 3
  found = logistic.solver(x, TRAIN.y, mesh=mesh, standardise=True)(0.01)
  x = x.astype(np.float64)
  made = LogisticRegression(C=0.01, tol=1e-8, solver='newton-cg')
  made.fit((x - x.mean(axis=0)) / (x.std(axis=0) + 1e-5), TRAIN.y)
  np.testing.assert_allclose(found['kernel'], made.coef_.T, atol=1e-5)
  predicted = readout.predict(found, x)
  assert np.mean(predicted == TRAIN.y) > 0.95


@pytest.mark.parametrize('given_val', [True, False])
def test_C_is_chosen_away_from_test(given_val):
  mesh, choices = splits.mesh_of(8), (10.0, 0.001, 1.0, 0.1)
  kept, held = readout.hold_out(TRAIN.y, 0.3, seed=1)
  fit, val = TRAIN[kept], TRAIN[held]
  train = fit if given_val else TRAIN
  with jax.transfer_guard('disallow'):
    found = Logistic(C=choices, held_out=0.3, seed=1)(
      train, TEST, val=val if given_val else None, mesh=mesh
    )

  def fitted(C, on):
    made = LogisticRegression(C=C, tol=1e-10, solver='newton-cg')
    return made.fit(on.x.astype(np.float64), on.y)

  scores = {C: fitted(C, fit).score(val.x, val.y) for C in sorted(choices)}
  best = max(scores, key=scores.get)
  accuracy = fitted(best, train).score(TEST.x, TEST.y)
  assert found == {'accuracy': accuracy, 'C': best, 'converged': 1.0}


def test_it_says_where_it_has_not_converged():
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
  with pytest.raises(ValueError, match=r'No class of the 3 .*; give `val`'):
    Logistic(C=(1, 2)).check(np.arange(3), np.arange(3))
  Logistic(C=(1, 2)).check(np.arange(3), np.arange(3), labels_val=np.arange(3))


def test_lbfgs_finds_the_minimum_that_scipy_finds():
  """Of a convex function, badly scaled, neither quadratic nor bounded."""
  rng = np.random.default_rng(0)
  a = rng.normal(size=(60, 20)) * np.logspace(-1, 0.5, 20)
  b = rng.normal(size=60)

  def value(x):
    return np.logaddexp(a @ x, -a @ x).sum() + b @ (a @ x) / 2 + x @ x / 200

  def gradient(x):
    return a.T @ (np.tanh(a @ x) + b / 2) + x / 100

  start = rng.normal(size=20)
  x, g, done = lbfgs.minimise(gradient, start, tol=1e-9, max_iter=2000)
  assert done and np.abs(g).max() <= 1e-9
  expected = scipy.optimize.minimize(
    value, start, jac=gradient, method='BFGS', options={'gtol': 1e-9}
  )
  np.testing.assert_allclose(x, expected.x, rtol=1e-5, atol=1e-6)
  *_, done = lbfgs.minimise(gradient, start, tol=1e-9, max_iter=3)
  assert not done


def test_lbfgs_stops_where_rounding_rules():
  noise = np.random.default_rng(0)

  def gradient(x):
    return x + 1e-6 * noise.normal(size=5)

  calls = []
  x, _, done = lbfgs.minimise(
    lambda x: calls.append(1) or gradient(x),
    np.ones(5),
    tol=1e-12,
    max_iter=1000,
  )
  assert not done and np.abs(x).max() < 1e-4

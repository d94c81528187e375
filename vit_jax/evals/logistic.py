"""Multinomial logistic regression on frozen features, by L-BFGS.

The linear probe of CLIP (Radford et al. 2021; from memory), which sweeps the
strength of the penalty on a validation split. The objective is scikit-learn's.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import sharding
from vit_jax.evals import lbfgs, readout


class Logistic:
  """Accuracy of argmin over W, b of |W|^2 / 2 + C * sum of cross-entropies.

  Args:
    C: weight of the data against the penalty, one or several. Of several, the
      best on `val` is taken, or else on what is held out of train (the
      smallest, that is most regularised, of equals); it is then fitted to the
      whole of train.
    held_out: fraction of each class of train for that.
    seed: of what is held out.
    standardise: whether features are brought to mean 0 and standard deviation
      1 over the examples fitted to; CLIP does not.
    max_iter: of L-BFGS, for each fit.
    tol: it stops where no component of the gradient of the mean objective (the
      above, divided by C n) is larger, for features divided by their root mean
      square.

  The bias is not penalised. The gradient is computed in float32, sharded by
  examples over all devices, and the rest in float64 on every host.
  """

  def __init__(
    self,
    C=1.0,
    held_out=0.1,
    seed=0,
    standardise=False,
    max_iter=1000,
    tol=1e-7,
  ):
    self._C = sorted(readout.sweep(C, 'C', least=0))
    readout.check_held_out(held_out)
    self._held_out, self._seed = held_out, seed
    self._standardise = standardise
    self._options = {'max_iter': max_iter, 'tol': tol}

  def check(self, labels_train, labels_test, *, labels_val=None):
    """Raises ValueError for a single class, or if none can be held out."""
    del labels_test
    readout.check_classes(labels_train)
    if len(self._C) > 1 and labels_val is None:
      readout.hold_out(labels_train, self._held_out, self._seed)

  def __call__(self, train, test, *, val=None, mesh):
    """{'accuracy', 'C', 'converged': 1 or 0, of the solution tested}."""
    C, start = self._C[0], None
    if len(self._C) > 1:
      parts = readout.for_choice(train, val, self._held_out, self._seed)
      C, start = self._choose(*parts, mesh)
    solution = self._solver(train, mesh)(C, start)
    return {
      'accuracy': readout.accuracy(readout.predict(solution, test.x), test.y),
      'C': float(C),
      'converged': float(solution['converged']),
    }

  def _choose(self, train, held, mesh):
    """(C, its solution) with the best accuracy on held."""
    solve = self._solver(train, mesh)
    best, solution = (-1.0, None, None), None
    for C in self._C:  # each starts where the one before has ended
      solution = solve(C, solution)
      found = readout.accuracy(readout.predict(solution, held.x), held.y)
      best = max(best, (found, C, solution), key=lambda x: x[0])
    return best[1:]

  def _solver(self, train, mesh):
    return solver(
      train.x,
      train.y,
      mesh=mesh,
      standardise=self._standardise,
      **self._options,
    )


def solver(x, y, *, mesh, standardise=False, max_iter=1000, tol=1e-7):
  """(C, start=None) -> solution, for what `Logistic` minimises.

  Args:
    x: [n, D] features; y: int [n] labels. numpy, the same on every host.
    mesh: of `sharding.make_mesh`.
    standardise, max_iter, tol: see `Logistic`.

  Returns:
    A function; start is an earlier solution. A solution has 'kernel' [D, K]
    and 'bias' [K] (float64, of features standardised by 'mean' and 'std', where
    std is 1 unless `standardise`), 'classes', 'converged'.
  """
  mean, std = readout.moments(x)
  if not standardise:
    # Moved to mean 0 all the same: the bias, free of penalty, makes up for it.
    std = np.ones_like(mean)
  x = readout.standardised(x, mean, std)
  count, dim = x.shape
  classes, numbers = np.unique(y, return_inverse=True)
  # The size of the first steps, and tol, are those of features of size 1.
  unit = np.sqrt(np.mean(np.square(x), dtype=np.float64)) or 1.0
  data = [readout.put_rows(a, mesh) for a in (x, numbers.astype(np.int32))]
  shape = (dim + 1, len(classes))  # the bias is the last row

  def gradient(flat, C):
    """Of mean cross-entropy + |W|^2 / (2 C n), by W * unit and b, flattened."""
    scaled = flat.reshape(shape)
    weights = readout.put_whole(_times(scaled, 1 / unit), mesh)
    total = jax.device_get(_gradient(weights, *data, n=count, mesh=mesh))
    mean = _times(total, 1 / unit, np.float64) / count
    mean[:-1] += scaled[:-1] / (C * count * unit**2)
    return mean.ravel()

  def solve(C, start=None):
    scaled = np.zeros(shape)
    if start is not None:
      scaled = np.concatenate([start['kernel'] * unit, start['bias'][None]])
    flat, _, converged = lbfgs.minimise(
      functools.partial(gradient, C=C),
      scaled.ravel(),
      tol=tol,
      max_iter=max_iter,
    )
    weights = _times(flat.reshape(shape), 1 / unit, np.float64)
    return {
      'kernel': weights[:-1],
      'bias': weights[-1],
      'mean': mean,
      'std': std,
      'classes': classes,
      'converged': converged,
    }

  return solve


def _times(weights, factor, dtype=np.float32):
  """All rows but the bias's times factor."""
  return np.concatenate([weights[:-1] * factor, weights[-1:]]).astype(dtype)


@functools.partial(jax.jit, static_argnames=('n', 'mesh'))
def _gradient(weights, x, y, *, n, mesh):
  """Gradient of the sum of the cross-entropies of the first n rows."""

  def total(weights):
    logits = jnp.matmul(x, weights[:-1], precision='highest') + weights[-1:]
    of_label = jnp.take_along_axis(logits, y[:, None], axis=1)[:, 0]
    losses = jax.nn.logsumexp(logits, axis=1) - of_label
    return jnp.sum(jnp.where(jnp.arange(len(x)) < n, losses, 0.0))

  return jax.lax.with_sharding_constraint(
    jax.grad(total)(weights), sharding.replicated(mesh)
  )

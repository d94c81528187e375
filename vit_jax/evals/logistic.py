"""Multinomial logistic regression on frozen features.

The linear probe of CLIP (Radford et al. 2021; from memory), which sweeps the
strength of the penalty on a validation split. The objective is that of
scikit-learn, minimised by `optax.lbfgs` on the devices. The L-BFGS of
scikit-learn takes 7 times as long on the same 2 CPU cores (20,000 x 384
features, 100 classes), and cannot use accelerators or several hosts.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from vit_jax.config.domains import Positive, Range, Share, checked
from vit_jax.evals import frozen
from vit_jax.parallel import sharding


@checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class Logistic(frozen.TunedLinear):
  """Accuracy of argmin over W, b of |W|^2 / 2 + C * sum of cross-entropies.

  The bias b is not penalised.

  Attributes (more in `frozen.Tuned`):
    C: weight of the data relative to the penalty, one or several values. Of
      several, the one with the best accuracy on `val`, or else on a held-out
      part of train, is fitted to the whole of train (the smallest of equals).
    standardise: whether to scale each feature to mean 0 and standard deviation
      1 over the training examples; CLIP does not.
    max_iter: largest number of iterations of L-BFGS for each fit.
    tol: stop when no component of the gradient of the mean objective (divided
      by C n, for features divided by their root mean square) is larger.
  """

  C: Positive | Sequence[Positive] = 1.0
  standardise: bool = False
  max_iter: Annotated[int, Range(1, 10**6)] = 1000
  tol: Share = 1e-7

  def __post_init__(self) -> None:
    super().__post_init__()
    object.__setattr__(self, 'C', self.settings)

  @property
  def settings(self) -> Sequence[float]:
    return tuple(sorted(frozen.sweep(self.C, 'C')))

  def __call__(
    self,
    train: frozen.Split,
    test: frozen.Split,
    *,
    val: frozen.Split | None = None,
    mesh: Mesh,
  ) -> dict[str, float]:
    """Return {'accuracy', 'C', 'converged': 1 or 0} of the tested solution."""
    C, solution = self.best(train, val, mesh)
    return {
      'accuracy': solution.accuracy(test),
      'C': C,
      'converged': float(solution.converged),
    }

  def fit(
    self, train: frozen.Split, strengths: Sequence[float], mesh: Mesh
  ) -> list[frozen.Linear]:
    """Return a `frozen.Linear` for each C in `strengths`.

    The examples are sharded over the devices of the mesh. Each fit starts from
    the solution of the one before.
    """
    count, dim = train.x.shape
    mean, std = frozen.moments(train.x)
    if not self.standardise:
      # Centring changes nothing, because the bias is not penalised. A common
      # scale gives `tol` a meaning; the penalty takes it into account.
      std = np.full(dim, np.sqrt(np.mean(std**2)))
    penalty = 1.0 if self.standardise else 1 / std[0] ** 2
    classes, numbers = np.unique(train.y, return_inverse=True)
    x = frozen.put_rows(frozen.standardise(train.x, mean, std), mesh)
    y = frozen.put_rows(numbers.astype(np.int32), mesh)
    put = functools.partial(frozen.put_whole, mesh=mesh)
    params = tuple(
      put(np.zeros((rows, len(classes)), np.float32)) for rows in (dim, 1)
    )
    limits = np.int32(count), np.int32(self.max_iter), np.float32(self.tol)
    limits = jax.tree.map(put, limits)
    solutions = []
    for C in strengths:
      l2 = put(np.float32(penalty / (C * count)))
      params, converged = _minimise(params, x, y, l2, *limits, mesh=mesh)
      found = jax.device_get(params)
      kernel, bias = (np.asarray(a, np.float64) for a in found)
      solutions.append(
        frozen.Linear(kernel, bias[0], classes, mean, std, bool(converged))
      )
    return solutions


@functools.partial(jax.jit, static_argnames='mesh')
def _minimise(params, x, y, l2, n, max_iter, tol, *, mesh):
  """Minimise mean cross-entropy of the first n rows + l2 / 2 |kernel|^2.

  Returns (kernel, bias), and whether no component of the gradient exceeds tol.
  """

  def loss(params):
    losses = frozen.cross_entropies(params, x, y)
    mean = jnp.sum(jnp.where(jnp.arange(len(x)) < n, losses, 0.0)) / n
    return mean + l2 / 2 * jnp.sum(params[0] ** 2)

  solver = optax.lbfgs()
  value_and_grad = optax.value_and_grad_from_state(loss)

  def step(carry):
    i, params, state, _ = carry
    value, grad = value_and_grad(params, state=state)
    updates, state = solver.update(
      grad, state, params, value=value, grad=grad, value_fn=loss
    )
    params = optax.apply_updates(params, updates)
    largest = optax.tree.norm(optax.tree.get(state, 'grad'), ord=jnp.inf)
    return i + 1, params, state, largest

  def unfinished(carry):
    i, *_, largest = carry
    return (i < max_iter) & (largest > tol)

  start = (0, params, solver.init(params), jnp.inf)
  _, params, _, largest = jax.lax.while_loop(unfinished, step, start)
  return jax.lax.with_sharding_constraint(
    (params, largest <= tol), sharding.replicated(mesh)
  )

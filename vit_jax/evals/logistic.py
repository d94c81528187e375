"""Multinomial logistic regression on frozen features.

The linear probe of CLIP (Radford et al. 2021; from memory), which sweeps the
strength of the penalty on a validation split. The objective is scikit-learn's,
whose L-BFGS takes 7 times as long (20,000 x 384 features, 100 classes).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.evals.frozen import Linear, Split, moments
from vit_jax.types import ACCURACY, DETAIL, Count, Kinds, Positive, Share

_ROWS = 2**16  # at a time: their logits of 1,000 classes take 0.3 GB


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logistic:
  """Accuracy of argmin over W, b of |W|^2 / 2 + C * sum of cross-entropies.

  The bias b is not penalised.

  Attributes:
    C: weights of the data relative to the penalty. If there are several, the
      most accurate one on `val`, or else on a held-out tenth of train, is
      fitted to the whole of train (the smallest of equals).
    max_iter: largest number of iterations of L-BFGS for each fit.
    tol: stop when no component of the gradient of the mean objective (divided
      by C n, for features divided by their root mean square) is larger.
    standardize: whether each feature is divided by its standard deviation in
      train, so that the penalty is the same for features of any scale.
  """

  C: Sequence[Positive] = (1.0,)
  max_iter: Count = 1000
  tol: Share = 1e-7
  standardize: bool = False

  metrics: ClassVar[Kinds] = {
    **dict.fromkeys(('accuracy', 'mean_per_class_accuracy'), ACCURACY),
    **dict.fromkeys(('C', 'converged'), DETAIL),
  }

  def check(self, labels: Mapping[str, np.ndarray]) -> None:
    if len(self.C) > 1 and 'val' not in labels:
      hold_out(labels['train'])

  def __call__(
    self, train: Split, test: Split, val: Split | None = None
  ) -> dict[str, float]:
    """Return metrics of the tested solution; 'converged' is 1 or 0."""
    best, *others = strengths = sorted(self.C)
    if others:
      fitted = train
      if val is None:
        kept, held = hold_out(train.y)
        fitted, val = train[kept], train[held]
      fits = self.fit(fitted, strengths)
      scores = [linear.accuracy(val) for linear, _ in fits]
      best = strengths[int(np.argmax(scores))]
    ((linear, converged),) = self.fit(train, [best])
    return {
      'accuracy': linear.accuracy(test),
      'mean_per_class_accuracy': linear.mean_per_class_accuracy(test),
      'C': float(best),
      'converged': float(converged),
    }

  def fit(
    self, train: Split, strengths: Sequence[float]
  ) -> list[tuple[Linear, bool]]:
    """Return (Linear, whether it reached `tol`) for each C in turn.

    train.y are classes, int [N], or the shares of all classes, float32 [N, K].
    """
    count, dim = train.x.shape
    # Centring changes nothing, because the bias is not penalised. A common
    # scale gives `tol` a meaning; the penalty takes it into account.
    mean, std = moments(train.x)
    scale = 1.0 if self.standardize else np.sqrt(np.mean(std**2))
    std = std if self.standardize else np.full(dim, scale)
    x = (train.x - mean.astype('f4')) / std.astype('f4')
    if train.y.ndim == 1:
      classes, labels = np.unique(train.y, return_inverse=True)
      labels = labels.astype(np.int32)
    else:
      classes, labels = np.arange(train.y.shape[1]), train.y
    data = jax.device_put((x, labels))
    params = tuple(np.zeros((n, len(classes)), np.float32) for n in (dim, 1))
    found = []
    for C in strengths:
      penalty = 1 / (C * count * scale**2)
      params, converged = jax.device_get(
        _minimise(params, data, penalty, self.max_iter, self.tol)
      )
      kernel, bias = (x.astype(np.float64) for x in params)
      linear = Linear(kernel, bias[0], classes, mean, std)
      found.append((linear, bool(converged)))
    return found


def hold_out(labels: np.ndarray) -> list[np.ndarray]:
  """Return the rows (kept, held out) of a stratified split, 9 to 1."""
  from sklearn import model_selection  # takes a second

  return model_selection.train_test_split(
    np.arange(len(labels)), test_size=0.1, stratify=labels, random_state=0
  )


@jax.jit
def _minimise(params, data, penalty, max_iter, tol):
  """Minimise the mean cross-entropy + penalty / 2 |kernel|^2.

  Returns (kernel, bias), and whether no component of the gradient exceeds tol.
  """

  def loss(params):
    kernel, bias = params

    @jax.checkpoint
    def of_example(example):
      x, label = example
      logits = jnp.matmul(x, kernel, precision='highest') + bias[0]
      if label.ndim == logits.ndim:
        return optax.softmax_cross_entropy(logits, label)
      return optax.softmax_cross_entropy_with_integer_labels(logits, label)

    losses = jax.lax.map(of_example, data, batch_size=_ROWS)
    return jnp.mean(losses) + penalty / 2 * jnp.sum(kernel**2)

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
  return params, largest <= tol

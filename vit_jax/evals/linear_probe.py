"""A linear classifier on frozen features, trained by SGD."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax.config.domains import LearningRate, Range, Rate
from vit_jax.evals import frozen
from vit_jax.parallel import sharding
from vit_jax.runs import terminal


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearProbe(frozen.TunedLinear):
  """Accuracy of a softmax classifier trained by SGD with momentum.

  Every epoch sees the same features. For a linear probe with augmentation,
  train a model with all but its head frozen. Weights start at zero; the
  learning rate decays to zero along half a cosine.

  Attributes (more in `frozen.Tuned`; the seed also orders the examples):
    lr, weight_decay: one or several values of each. All pairs are trained at
      once. The pair with the best accuracy on `val`, or else on a held-out part
      of train, is trained on the whole of train (the smallest learning rate,
      then weight decay, of equals). weight_decay * W is added to the gradient
      of the kernel W.
    epochs: number of passes over train. In each, the random examples that do
      not fill the last batch are left out.
    batch_size: over all devices; at most the size of train is used.
    momentum: of SGD.
    standardise: whether to scale each feature to mean 0 and standard deviation
      1 over the training examples, like a batch norm without parameters.
  """

  lr: LearningRate | Sequence[LearningRate] = (
    *(0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
  )
  epochs: Annotated[int, Range(1, 10**6)] = 100
  batch_size: Annotated[int, Range(1, 2**20)] = 256
  momentum: Rate = 0.9
  weight_decay: LearningRate | Sequence[LearningRate] = (0.0,)
  standardise: bool = True

  def __post_init__(self) -> None:
    super().__post_init__()
    _ = self.settings  # raises an error if they are invalid
    if self.epochs < 1 or self.batch_size < 1:
      raise ValueError(
        f'epochs={self.epochs} and batch_size={self.batch_size} must be at '
        'least 1.'
      )

  @property
  def settings(self) -> list[tuple[float, float]]:
    rates = frozen.sweep(self.lr, 'lr')
    decays = frozen.sweep(self.weight_decay, 'weight_decay', allow_zero=True)
    return list(itertools.product(sorted(rates), sorted(decays)))

  def __call__(
    self,
    train: frozen.Split,
    test: frozen.Split,
    *,
    val: frozen.Split | None = None,
    mesh: Mesh,
  ) -> dict[str, float]:
    """Return {'accuracy', 'lr', 'weight_decay'}."""
    (lr, decay), solution = self.best(train, val, mesh)
    accuracy = solution.accuracy(test)
    if accuracy < 0:
      raise ValueError(
        f'The linear probe diverged with lr={lr}. Use a smaller lr.'
      )
    return {'accuracy': accuracy, 'lr': lr, 'weight_decay': decay}

  def fit(
    self, train: frozen.Split, grid: Sequence[tuple[float, float]], mesh: Mesh
  ) -> list[frozen.Linear]:
    """Return a `frozen.Linear` for each (lr, weight_decay) of grid.

    All are trained at once, on the same batches. The examples are sharded over
    the devices of the mesh.
    """
    x, (count, dim) = train.x, train.x.shape
    mean, std = np.zeros(dim), np.ones(dim)
    if self.standardise:
      mean, std = frozen.moments(x)
      x = frozen.standardise(x, mean, std)
    classes, numbers = np.unique(train.y, return_inverse=True)
    data = [frozen.put_rows(a, mesh) for a in (x, numbers.astype(np.int32))]
    rates, decays = (np.asarray(part, np.float32) for part in zip(*grid))
    put_whole = functools.partial(frozen.put_whole, mesh=mesh)
    params = [
      put_whole(np.zeros((len(grid), rows, len(classes)), np.float32))
      for rows in (dim, 1)
    ]
    state, decays = (params, params), put_whole(decays)
    batch_size = min(self.batch_size, count)
    steps = count // batch_size
    for epoch in terminal.track(
      range(self.epochs),
      self.epochs,
      unit='epochs of the linear probe',
      live=False,
    ):
      rows = np.random.default_rng((self.seed, epoch)).permutation(count)
      rows = rows[: steps * batch_size].reshape(steps, batch_size)
      done = (epoch * steps + np.arange(steps)) / (self.epochs * steps)
      factor = ((1 + np.cos(np.pi * done)) / 2).astype(np.float32)[:, None]
      order = [put_whole(rows.astype(np.int32)), put_whole(factor * rates)]
      state = _epoch(
        state, data, order, decays, momentum=self.momentum, mesh=mesh
      )
    kernels, biases = (
      np.asarray(a, np.float64) for a in jax.device_get(state[0])
    )
    return [
      frozen.Linear(kernel, bias[0], classes, mean, std)
      for kernel, bias in zip(kernels, biases)
    ]


@functools.partial(jax.jit, static_argnames=('momentum', 'mesh'))
def _epoch(state, data, order, decays, *, momentum, mesh):
  """Train G classifiers on batches of rows [S, B] with rates [S, G]."""
  x, y = data

  def loss(params, x, y):
    return jnp.mean(frozen.cross_entropies(params, x, y))

  def step(params, velocity, rate, decay, x, y):
    kernel, bias = jax.grad(loss)(params, x, y)
    grads = [kernel + decay * params[0], bias]
    velocity = jax.tree.map(lambda v, g: momentum * v + g, velocity, grads)
    return jax.tree.map(lambda p, v: p - rate * v, params, velocity), velocity

  def batch(state, order):
    rows, rates = order
    steps = jax.vmap(step, in_axes=(0, 0, 0, 0, None, None))
    return steps(*state, rates, decays, x[rows], y[rows]), None

  state, _ = jax.lax.scan(batch, state, order)
  return jax.lax.with_sharding_constraint(state, sharding.replicated(mesh))

"""A linear classifier on frozen features, trained by SGD."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import sharding, terminal
from vit_jax.evals import readout


class LinearProbe:
  """Accuracy of a softmax classifier trained by SGD with momentum.

  It sees the same features of an image in each epoch, as images are not
  augmented; a linear probe with augmentation is a training whose optimizer
  has `freeze` for all but the head. Weights start at zero; the learning rate
  falls to zero along a half cosine.

  Args:
    lr, weight_decay: one or several of each. All pairs train at once; the best
      on `val` is taken, or else on what is held out of train (the smallest
      learning rate, then weight decay, of equals), and trained on the whole of
      train. weight_decay * W is added to the gradient of the kernel W.
    epochs: of train. The examples that do not fill a batch, other ones in each
      epoch, are left out of it.
    batch_size: global; the training set's size, if that is smaller.
    momentum: of SGD.
    standardise: whether features are brought to mean 0 and standard deviation
      1 over the examples trained on, as a batch norm without parameters does;
      the scale of the features then does not matter to lr.
    held_out: fraction of each class of train to choose on.
    seed: of the order of the examples and of what is held out.
  """

  def __init__(
    self,
    lr=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
    epochs=100,
    batch_size=256,
    momentum=0.9,
    weight_decay=(0.0,),
    standardise=True,
    held_out=0.1,
    seed=0,
  ):
    rates = sorted(readout.sweep(lr, 'lr', least=0))
    decays = sorted(readout.sweep(weight_decay, 'weight_decay'))
    if decays[0] < 0:
      raise ValueError(f'weight_decay={weight_decay!r} must not be negative.')
    if epochs < 1 or batch_size < 1:
      raise ValueError(
        f'epochs={epochs} and batch_size={batch_size} count from 1.'
      )
    readout.check_held_out(held_out)
    self._grid = list(itertools.product(rates, decays))
    self._held_out, self._seed = held_out, seed
    self._settings = {
      'epochs': epochs,
      'batch_size': batch_size,
      'momentum': momentum,
      'standardise': standardise,
      'seed': seed,
    }

  def check(self, labels_train, labels_test, *, labels_val=None):
    """Raises ValueError for a single class, or if none can be held out."""
    del labels_test
    readout.check_classes(labels_train)
    if len(self._grid) > 1 and labels_val is None:
      readout.hold_out(labels_train, self._held_out, self._seed)

  def __call__(self, train, test, *, val=None, mesh):
    """{'accuracy', 'lr', 'weight_decay'}."""
    best = self._grid[0]
    if len(self._grid) > 1:
      fit, held = readout.for_choice(train, val, self._held_out, self._seed)
      solutions = train_all(fit.x, fit.y, self._grid, mesh, **self._settings)
      scores = [_score(solution, held) for solution in solutions]
      best = self._grid[int(np.argmax(scores))]
    (solution,) = train_all(train.x, train.y, [best], mesh, **self._settings)
    accuracy = _score(solution, test)
    if accuracy < 0:
      raise ValueError(
        f'The linear probe diverged with lr={best[0]}; give a smaller lr.'
      )
    return {'accuracy': accuracy, 'lr': best[0], 'weight_decay': best[1]}


def _score(solution, split):
  """Accuracy; -1 of what has diverged."""
  if not all(np.isfinite(solution[name]).all() for name in ('kernel', 'bias')):
    return -1.0
  return readout.accuracy(readout.predict(solution, split.x), split.y)


def train_all(
  x,
  y,
  grid,
  mesh,
  *,
  epochs,
  batch_size,
  momentum=0.9,
  standardise=True,
  seed=0,
):
  """A solution for each (lr, weight_decay) of grid, all in one training.

  Args:
    x: float32 [n, D] features; y: int [n]. numpy, the same on every host.
    grid: list of pairs.
    mesh: of `sharding.make_mesh`; the features are split over its devices.
    epochs, batch_size, momentum, standardise, seed: see `LinearProbe`.

  Returns:
    List of {'kernel' [D, K], 'bias' [K], 'mean', 'std', 'classes'}.
  """
  mean, std = np.zeros(x.shape[1]), np.ones(x.shape[1])
  if standardise:
    mean, std = readout.moments(x)
    x = readout.standardised(x, mean, std)
  classes, numbers = np.unique(y, return_inverse=True)
  data = [readout.put_rows(a, mesh) for a in (x, numbers.astype(np.int32))]
  rates, decays = (np.asarray(part, np.float32) for part in zip(*grid))
  decays = readout.put_whole(decays, mesh)
  kernel = np.zeros((len(grid), x.shape[1], len(classes)), np.float32)
  bias = np.zeros((len(grid), len(classes)), np.float32)
  state = [readout.put_whole(a, mesh) for a in (kernel, bias, kernel, bias)]
  batch_size = min(batch_size, len(x))
  steps = len(x) // batch_size
  unit = 'epochs of the linear probe'
  for epoch in terminal.track(range(epochs), epochs, unit=unit, live=False):
    rows = np.random.default_rng((seed, epoch)).permutation(len(x))
    rows = rows[: steps * batch_size].reshape(steps, batch_size)
    done = (epoch * steps + np.arange(steps)) / (epochs * steps)
    factor = np.float32((1 + np.cos(np.pi * done)) / 2)
    order = [
      readout.put_whole(a, mesh)
      for a in (rows.astype(np.int32), factor[:, None] * rates[None])
    ]
    state = _epoch(state, data, order, decays, momentum=momentum, mesh=mesh)
  kernel, bias, *_ = jax.device_get(state)
  form = {'mean': mean, 'std': std, 'classes': classes}
  return [
    form | {'kernel': np.float64(w), 'bias': np.float64(b)}
    for w, b in zip(kernel, bias)
  ]


@functools.partial(jax.jit, static_argnames=('momentum', 'mesh'))
def _epoch(state, data, order, decays, *, momentum, mesh):
  """SGD over batches of rows [S, B] at rates [S, G] for the G settings."""
  x, y = data

  def loss(params, x, y):
    kernel, bias = params
    logits = jnp.matmul(x, kernel, precision='highest') + bias[None]
    of_label = jnp.take_along_axis(logits, y[:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - of_label)

  def step(kernel, bias, velocity, velocity_bias, rate, decay, x, y):
    grad, grad_bias = jax.grad(loss)((kernel, bias), x, y)
    velocity = momentum * velocity + grad + decay * kernel
    velocity_bias = momentum * velocity_bias + grad_bias
    kernel, bias = kernel - rate * velocity, bias - rate * velocity_bias
    return [kernel, bias, velocity, velocity_bias]

  steps = jax.vmap(step, in_axes=(0,) * 6 + (None, None))

  def batch(state, order):
    rows, rates = order
    return steps(*state, rates, decays, x[rows], y[rows]), None

  state, _ = jax.lax.scan(batch, state, tuple(order))
  return jax.lax.with_sharding_constraint(state, sharding.replicated(mesh))

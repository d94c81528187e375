"""SGD on frozen features against plain loops of numpy."""

import jax
import numpy as np
import pytest
import splits

from vit_jax.evals import frozen
from vit_jax.evals.linear_probe import LinearProbe

TRAIN, TEST = splits.digits('train'), splits.digits('test')


def reference(x, y, lr, decay, *, epochs, batch_size, momentum, seed):
  """Float64 SGD, one setting at a time."""
  x, classes = x.astype(np.float64), np.unique(y)
  targets = (y[:, None] == classes).astype(float)
  kernel = np.zeros((x.shape[1], len(classes)))
  bias, steps = np.zeros(len(classes)), len(x) // batch_size
  v_kernel, v_bias = np.zeros_like(kernel), np.zeros_like(bias)
  for epoch in range(epochs):
    order = np.random.default_rng((seed, epoch)).permutation(len(x))
    for step in range(steps):
      rows = order[step * batch_size : (step + 1) * batch_size]
      logits = x[rows] @ kernel + bias
      p = np.exp(logits - logits.max(axis=1, keepdims=True))
      error = p / p.sum(axis=1, keepdims=True) - targets[rows]
      done = (epoch * steps + step) / (epochs * steps)
      rate = lr * (1 + np.cos(np.pi * done)) / 2
      v_kernel = momentum * v_kernel + x[rows].T @ error / batch_size
      v_kernel += decay * kernel
      v_bias = momentum * v_bias + error.mean(axis=0)
      kernel, bias = kernel - rate * v_kernel, bias - rate * v_bias
  return kernel, bias


@pytest.mark.parametrize('num_devices', [1, 8])
def test_all_settings_train_as_each_alone(num_devices):
  train = splits.blobs(107, 9, 4)
  grid = [(0.01, 0.0), (0.01, 0.1), (0.3, 0.0)]
  options = {'epochs': 4, 'batch_size': 20, 'momentum': 0.9, 'seed': 5}
  mesh = splits.mesh_of(num_devices)
  with jax.transfer_guard('disallow'):
    found = LinearProbe(standardise=False, **options).fit(train, grid, mesh)
  for (lr, decay), solution in zip(grid, found):
    kernel, bias = reference(train.x, train.y, lr, decay, **options)
    np.testing.assert_allclose(solution.kernel, kernel, atol=2e-5)
    np.testing.assert_allclose(solution.bias, bias, atol=2e-5)
  assert len(found) == 3


def test_standardised_features_do_not_depend_on_their_scale():
  mesh, probe = splits.mesh_of(8), LinearProbe(epochs=5, batch_size=64)
  scale = np.linspace(1, 1000, 64, dtype=np.float32)
  scaled = frozen.Split(TRAIN.x * scale + 10, TRAIN.y)
  (one,) = probe.fit(TRAIN, [(0.1, 0)], mesh)
  (other,) = probe.fit(scaled, [(0.1, 0)], mesh)
  a, b = one.predict(TEST.x), other.predict(TEST.x * scale + 10)
  assert np.mean(a == b) > 0.99
  assert np.mean(a == TEST.y) > 0.85


def test_settings_are_not_chosen_on_test():
  mesh, val, test = splits.mesh_of(8), TEST[:400], TEST[400:]
  probe = LinearProbe(
    lr=(0.1, 1e-4), weight_decay=(1.0, 0.0), epochs=8, batch_size=128
  )
  with jax.transfer_guard('disallow'):
    found = probe(TRAIN, test, val=val, mesh=mesh)
  grid = [(1e-4, 0.0), (1e-4, 1.0), (0.1, 0.0), (0.1, 1.0)]
  tried = probe.fit(TRAIN, grid, mesh)
  scores = [np.mean(s.predict(val.x) == val.y) for s in tried]
  lr, decay = grid[int(np.argmax(scores))]
  (last,) = probe.fit(TRAIN, [(lr, decay)], mesh)
  accuracy = np.mean(last.predict(test.x) == test.y)
  assert found == {'accuracy': accuracy, 'lr': lr, 'weight_decay': decay}
  assert lr == 0.1 and accuracy > 0.85


def test_what_diverges_is_not_chosen():
  mesh, train = splits.mesh_of(8), splits.blobs(60, 9, 3)
  probe = LinearProbe(lr=(1e30, 0.1), epochs=30, batch_size=1000)
  assert probe(train, train, mesh=mesh)['lr'] == 0.1
  with pytest.raises(ValueError, match=r'diverged with lr=1e\+38. Use a sm'):
    LinearProbe(lr=1e38, epochs=30)(train, train, mesh=mesh)


def test_errors():
  with pytest.raises(
    ValueError, match=r'weight_decay=-1 .* number of at least 0'
  ):
    LinearProbe(weight_decay=-1)
  with pytest.raises(ValueError, match=r"lr='0.1' must be a number above 0"):
    LinearProbe(lr='0.1')
  with pytest.raises(ValueError, match=r'epochs=0 and batch_size=256 must'):
    LinearProbe(epochs=0)
  with pytest.raises(ValueError, match=r'all of one class'):
    LinearProbe().check(np.zeros(5, int), np.zeros(5, int))

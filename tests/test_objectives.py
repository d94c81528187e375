"""Losses against scipy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from vit_jax.objectives import classification
from vit_jax.objectives.classification import sigmoid_xent, softmax_xent

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (6, 2, 2, 3), np.uint8)
KERNEL = RNG.normal(size=(12, 5)).astype(np.float32)
LABELS = np.array([0, 4, 2, 2, 1, 3], np.int32)


class Linear:
  """Enough of a model: flat images times a kernel."""

  def apply(self, variables, images, *, train, rngs):
    assert train
    noise = jax.random.normal(rngs['dropout'], ())
    flat = images.reshape(len(images), -1)
    return flat @ variables['params']['kernel'] + 0 * noise


def scaled(images):
  return images.astype(jnp.float32) / 255


def logits():
  return (IMAGES.reshape(6, -1) / 255.0) @ KERNEL.astype(np.float64)


def expected_loss(kind, targets):
  """Float64, by the definitions: -sum t log p, summed over classes."""
  z = logits()
  if kind is softmax_xent:
    losses = -(targets * scipy.special.log_softmax(z, axis=1)).sum(axis=1)
  else:
    p = scipy.special.expit(z)
    losses = -(targets * np.log(p) + (1 - targets) * np.log(1 - p)).sum(axis=1)
  return losses.mean()


@pytest.mark.parametrize('kind', [softmax_xent, sigmoid_xent])
@pytest.mark.parametrize('smoothing', [0.0, 0.1])
@pytest.mark.parametrize('soft', [False, True])
def test_losses(kind, smoothing, soft):
  labels, targets = LABELS, np.eye(5)[LABELS]
  if soft:
    labels = RNG.dirichlet(np.ones(5), 6).astype(np.float32)
    targets = labels.astype(np.float64)
  loss_fn = kind(Linear(), preprocess=scaled, label_smoothing=smoothing)
  batch = {'image': IMAGES, 'label': jnp.asarray(labels)}
  loss, metrics = jax.jit(loss_fn)({'kernel': KERNEL}, batch, jax.random.key(0))
  targets = targets * (1 - smoothing) + smoothing / 5
  np.testing.assert_allclose(loss, expected_loss(kind, targets), rtol=1e-6)
  assert metrics['loss'] == loss and loss.shape == ()
  hits = logits().argmax(axis=1) == targets.argmax(axis=1)
  np.testing.assert_allclose(metrics['accuracy'], hits.mean(), rtol=1e-6)


@pytest.mark.parametrize('kind', ['softmax_loss', 'sigmoid_loss'])
def test_extreme_logits_stay_finite(kind):
  loss = getattr(classification, kind)
  big = jnp.asarray([[1e4, -1e4, 0.0]])
  right, wrong = jnp.asarray([[1.0, 0, 0]]), jnp.asarray([[0, 1.0, 0]])
  assert loss(big, wrong)[0] >= 1e4
  assert loss(big, right)[0] < 1
  gradient = jax.grad(lambda z: loss(z, wrong).sum())(big)
  assert jnp.isfinite(gradient).all()


def test_smoothing_is_a_fraction():
  with pytest.raises(ValueError, match=r'label_smoothing=1\.5 must be in'):
    softmax_xent(Linear(), preprocess=scaled, label_smoothing=1.5)

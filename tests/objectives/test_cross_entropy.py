"""Losses against scipy and timm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import sklearn.metrics

from vit_jax.models.pooling import ScaledHead
from vit_jax.objectives import classification, mixing
from vit_jax.objectives.classification import (
  huber,
  labels_xent,
  sigmoid_xent,
  softmax_xent,
  squared_error,
)

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (6, 2, 2, 3), np.uint8)
KERNEL = RNG.normal(size=(12, 5)).astype(np.float32)
LABELS = np.array([0, 4, 2, 2, 1, 3], np.int32)
SOFT = 1.5 * RNG.dirichlet(np.ones(5), 6).astype(np.float32)
SOFT[0] = 0  # no label
WEIGHTS = (0.5, 2.0, 0.0, 1.0, 3.0)


class Linear:
  """Enough of a model: flat images times a kernel."""

  def apply(self, variables, images, *, train, rngs):
    assert train
    noise = jax.random.normal(rngs['dropout'], ())
    flat = images.reshape(len(images), -1)
    return flat @ variables['params']['kernel'] + 0 * noise


def logits():
  return (IMAGES.reshape(6, -1) / 255.0) @ KERNEL.astype(np.float64)


def run(kind, labels, **options):
  loss_fn = kind(Linear(), preprocess=lambda x: x / 255.0, **options)
  assert loss_fn.activation == kind.__name__.split('_')[0]
  batch = {'image': IMAGES, 'label': jnp.asarray(labels)}
  found = jax.jit(loss_fn)({'kernel': KERNEL}, batch, jax.random.key(0))
  loss, metrics = loss_fn.compare(jnp.asarray(logits()), jnp.asarray(labels))
  np.testing.assert_allclose(found[0], loss, rtol=1e-5)
  assert set(metrics) == {'loss', 'accuracy'}
  return found


def expected_losses(kind, targets):
  """Float64 [B], by the definitions: -sum t log p, summed over classes."""
  z = logits()
  if kind is softmax_xent:
    return -(targets * scipy.special.log_softmax(z, axis=1)).sum(axis=1)
  p = scipy.special.expit(z)
  return -(targets * np.log(p) + (1 - targets) * np.log(1 - p)).sum(axis=1)


@pytest.mark.parametrize('kind', [softmax_xent, sigmoid_xent])
@pytest.mark.parametrize('smoothing', [0.0, 0.1])
@pytest.mark.parametrize('labels', [LABELS, SOFT], ids=['numbers', 'vectors'])
def test_losses(kind, smoothing, labels):
  targets = np.eye(5)[labels] if labels.ndim == 1 else labels
  smooth = targets * (1 - smoothing) + smoothing / 5
  losses = expected_losses(kind, smooth)
  loss, metrics = run(kind, labels, label_smoothing=smoothing)
  np.testing.assert_allclose(loss, losses.mean(), rtol=1e-6)
  assert metrics['loss'] == loss and loss.shape == ()
  hits = logits().argmax(axis=1) == targets.argmax(axis=1)
  hits &= targets.any(axis=1)
  np.testing.assert_allclose(metrics['accuracy'], hits.mean(), rtol=1e-6)
  # Weights of classes: a weighted mean over the batch.
  weights = targets @ WEIGHTS / np.maximum(targets.sum(axis=1), 1e-9)
  loss, metrics = run(
    kind, labels, label_smoothing=smoothing, class_weights=WEIGHTS
  )
  np.testing.assert_allclose(loss, (weights * losses).mean(), rtol=1e-6)
  assert metrics['loss'] == loss
  # A class without images has no weight of its own.
  short = run(kind, labels, class_weights=WEIGHTS[:4])
  assert short == run(kind, labels, class_weights=(*WEIGHTS[:4], 1.0))


def test_labels_above_a_threshold():
  smoothing = 0.1
  for threshold in (0.0, 0.25):
    targets = (threshold < SOFT) * (1 - smoothing) + smoothing / 5
    loss, _ = run(
      sigmoid_xent, SOFT, threshold=threshold, label_smoothing=smoothing
    )
    expected = expected_losses(sigmoid_xent, targets).mean()
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
  edge = np.full((6, 5), 0.25, np.float32)
  loss, _ = run(sigmoid_xent, edge, threshold=0.25)  # equal is not above
  expected = expected_losses(sigmoid_xent, 0 * edge).mean()
  np.testing.assert_allclose(loss, expected, rtol=1e-6)
  # Class numbers remain as they are.
  assert run(sigmoid_xent, LABELS, threshold=0.5) == run(sigmoid_xent, LABELS)


MISSING = np.where(RNG.random((6, 5)) < 0.3, np.nan, SOFT > 0.1)
MISSING[1] = np.nan


def value_and_gradient(loss_fn, labels):
  def loss(logits):
    return loss_fn.compare(logits, jnp.asarray(labels, jnp.float32))[0]

  return jax.value_and_grad(loss)(jnp.asarray(logits(), jnp.float32))


def test_missing_labels_and_weights_of_positive_ones():
  loss_fn = sigmoid_xent(Linear(), preprocess=None, positive_weights=WEIGHTS)
  loss, gradient = value_and_gradient(loss_fn, MISSING)
  expected, p, known = 0.0, scipy.special.expit(logits()), ~np.isnan(MISSING)
  for i in range(5):
    true = MISSING[known[:, i], i]
    expected += sklearn.metrics.log_loss(
      *(true, p[known[:, i], i]),
      **{'normalize': False, 'labels': [0, 1]},
      sample_weight=np.where(true == 1, WEIGHTS[i], 1),
    )
  np.testing.assert_allclose(loss, expected / 6, rtol=1e-6)
  of_each = np.where(MISSING == 1, WEIGHTS * (p - 1), p)
  expected = np.where(known, of_each, 0) / 6
  np.testing.assert_allclose(gradient, expected, atol=1e-7)
  loss_fn = labels_xent(Linear(), preprocess=None)
  _, metrics = loss_fn.compare(jnp.float32(logits()), jnp.float32(MISSING))
  right = ((p >= 0.5) == MISSING) | ~known
  assert metrics['exact_match'] == pytest.approx(right.all(axis=1).mean())


@pytest.mark.parametrize('delta', [None, 0.5])
def test_errors_of_numbers_are_relative_to_their_deviation(delta):
  labels = MISSING + np.where(known := ~np.isnan(MISSING), logits() / 2, 0)
  std = np.arange(1.0, 6.0)
  model = Linear()
  model.head = ScaledHead(moments=tuple((7.0, x) for x in std))
  kind = squared_error if delta is None else huber
  options = {} if delta is None else {'delta': delta}
  loss_fn = kind(model, preprocess=None, **options)
  loss, gradient = value_and_gradient(loss_fn, labels)
  errors = np.where(known, logits() - np.nan_to_num(labels), 0) / std
  of_each, slope = errors**2, 2 * errors
  if delta:
    of_each = scipy.special.huber(delta, errors)
    slope = np.clip(errors, -delta, delta)
  np.testing.assert_allclose(loss, of_each.mean(), rtol=1e-6)
  np.testing.assert_allclose(gradient, slope / std / 30, atol=1e-7)
  assert loss_fn.activation == 'identity'


def test_a_missing_label_stays_missing_when_mixed():
  one, other = jnp.array([1.0, jnp.nan, 0.0]), jnp.array([0.0, 1.0, jnp.nan])
  for weight, expected in (
    (0.25, [0.25, np.nan, np.nan]),
    (1.0, one),
    (0.0, other),
  ):
    np.testing.assert_array_equal(mixing._mean(weight, one, other), expected)


def test_soft_targets_are_timms(timm_training):
  logits, soft = timm_training['logits'], jnp.asarray(timm_training['soft'])
  options = {'threshold': 0.0, 'mean_over_classes': True}
  for name, kind, fields in (
    ('softmax', softmax_xent, {}),
    ('bce', sigmoid_xent, options),
  ):
    loss_fn = kind(Linear(), preprocess=None, **fields)
    loss, metrics = loss_fn.compare(logits, soft)
    np.testing.assert_allclose(loss, timm_training[f'loss/{name}'], rtol=1e-6)
    assert metrics['loss'] == loss


@pytest.mark.parametrize('kind', classification.LOSSES)
def test_extreme_logits_stay_finite(kind):
  loss = classification.LOSSES[kind]
  big = jnp.asarray([[1e4, -1e4, 0.0]])
  right, wrong = jnp.asarray([[1.0, 0, 0]]), jnp.asarray([[0, 1.0, 0]])
  assert loss(big, wrong)[0] >= 1e4
  assert loss(big, right)[0] < 1
  gradient = jax.grad(lambda z: loss(z, wrong).sum())(big)
  assert jnp.isfinite(gradient).all()

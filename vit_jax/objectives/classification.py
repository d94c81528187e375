"""Losses of labels: softmax and sigmoid cross-entropy, squared error, Huber.

A batch is {'image': uint8 [B, H, W, C], 'label': int32 [B] or float32 [B, K]},
and the loss the mean over it. In vectors NaN is missing, and adds nothing.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from vit_jax import types
from vit_jax.models.vit import Classifier, grid_of
from vit_jax.objectives.encode import encode
from vit_jax.step import Labelled, OfFeatures, Seen, Terms


@dataclasses.dataclass(frozen=True, eq=False)
class OfLogits(OfFeatures, Labelled):
  """Base of losses of the logits and labels [B] or [B, K] of images."""

  model: types.Model  # has apply({'params': p}, images, train=True, rngs=...)
  _: dataclasses.KW_ONLY
  preprocess: types.Preprocess
  terms: Terms = dataclasses.field(default_factory=dict)

  for_grids = True

  def encode(self, seen: Seen, whole: bool = False) -> Seen:
    """Return it with the logits; `whole`, and for terms, with all features."""
    model, images = self.model, self.preprocess(seen.batch['image'])
    grid = grid_of(model, seen.batch) if 'grid' in seen.batch else {}
    if (whole or self.terms) and isinstance(model, Classifier):
      found = encode(model, seen.params, images, seen.rng, **grid)
    else:
      options: Any = {'train': True, 'rngs': {'dropout': seen.rng}, **grid}
      logits = model.apply({'params': seen.params}, images, **options)
      found = {'logits': logits}
    return seen._replace(features={'image': found})

  def loss(self, seen: Seen) -> types.Outputs:
    logits = seen.features['image']['logits']
    return self.compare(logits, jnp.asarray(seen.batch['label']))

  def compare(self, logits: jax.Array, labels: jax.Array) -> Any:
    """Return (loss, metrics) of logits [B, K]."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class CrossEntropy(OfLogits):
  """Base of the cross-entropies of logits and labels.

  Attributes:
    label_smoothing: s in targets * (1 - s) + s / K.
    class_weights: K numbers w, the last ones 1 by default; the loss is the mean
      over the batch of w[label] times the loss of the example (not divided by
      the sum of the weights), for a vector of labels the mean of w under the
      vector. The evaluators' loss has none. See `data.balance.class_weights`.
  """

  label_smoothing: types.Rate = 0.0
  class_weights: Sequence[types.NonNegative] | types.OfSource | None = None

  mean_over_classes = False

  def losses(self, logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the loss of each example: [B, K] -> [B]."""
    raise NotImplementedError

  def compare(self, logits: jax.Array, labels: jax.Array) -> Any:
    num_classes = logits.shape[-1]
    targets = soft_targets(labels, num_classes, self.label_smoothing)
    losses = self.losses(logits, targets)
    true = soft_targets(labels, num_classes)
    if self.class_weights is not None:
      weights = jnp.array([self.class_weights], jnp.float32)
      others = (0, 0), (0, num_classes - weights.size)  # without images
      sums = (true * jnp.pad(weights, others, constant_values=1)).sum(axis=-1)
      losses = losses * (sums / jnp.maximum(true.sum(axis=-1), 1e-12))
    loss = jnp.mean(losses) / (num_classes if self.mean_over_classes else 1)
    predicted = jnp.argmax(logits, axis=-1, keepdims=True)
    best = jnp.nanmax(true, axis=-1, keepdims=True, initial=1e-12)
    hits = jnp.take_along_axis(true, predicted, axis=-1) >= best
    return loss, {'loss': loss, 'accuracy': jnp.mean(hits)}


class softmax_xent(CrossEntropy):
  """Softmax cross-entropy, the paper's loss for fine-tuning."""

  losses = staticmethod(optax.softmax_cross_entropy)  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class sigmoid_xent(CrossEntropy):
  """Sigmoid cross-entropy, by default summed over classes.

  The paper does not name its pre-training loss. The ViT configs of big_vision
  (ImageNet-21k) and scenic use this one, with a head bias of -10.

  Attributes:
    threshold: labels [B, K] above it become 1, all others 0, before they are
      smoothed. With 0 and inside `mixing.Mixed` this is DeiT III's loss: both
      classes of a mixed image have the target 1, and the metric 'accuracy'
      counts either. None: labels remain as they are.
    mean_over_classes: whether the loss is divided by the number of classes, as
      in DeiT III. The evaluators' loss remains the sum.
    positive_weights: K numbers that multiply the loss of labels of 1, PyTorch's
      pos_weight. See `data.balance.positive_weights`.
  """

  threshold: types.Rate | None = None
  mean_over_classes: bool = False
  positive_weights: Sequence[types.NonNegative] | types.OfSource | None = None

  activation = 'sigmoid'

  def compare(self, logits: jax.Array, labels: jax.Array) -> Any:
    if self.threshold is not None and labels.ndim == 2:
      above = (labels > self.threshold).astype(jnp.float32)
      labels = jnp.where(jnp.isnan(labels), labels, above)
    return super().compare(logits, labels)

  def losses(self, logits: jax.Array, targets: jax.Array) -> jax.Array:
    weights = self.positive_weights
    weights = 1.0 if weights is None else jnp.array([weights])
    return sigmoid_loss(logits, targets, weights)


class labels_xent(sigmoid_xent):
  """Sigmoid cross-entropy of several labels of an image.

  The metric 'exact_match' is the fraction of images without a wrong label.
  """

  kinds: ClassVar[types.Kinds] = {'loss': types.LOSS, 'exact_match': types.RATE}

  def compare(self, logits: jax.Array, labels: jax.Array) -> Any:
    loss, _ = super().compare(logits, labels)
    right = ((logits >= 0) == (labels >= 0.5)) | jnp.isnan(labels)
    return loss, {'loss': loss, 'exact_match': jnp.mean(right.all(axis=-1))}


class squared_error(OfLogits):
  """Mean over numbers of ((output - label) / std)^2.

  std is that of the training labels, of a `models.pooling.ScaledHead`; else 1.
  """

  activation = 'identity'
  kinds: ClassVar[types.Kinds] = {'loss': types.LOSS}
  of_errors: ClassVar[Any] = staticmethod(jnp.square)  # losses of errors / std

  def compare(self, logits: jax.Array, labels: jax.Array) -> Any:
    moments = getattr(getattr(self.model, 'head', None), 'moments', ((0, 1),))
    std = jnp.array([[std for _, std in moments]], jnp.float32)
    known = ~jnp.isnan(labels)
    errors = jnp.where(known, logits - jnp.where(known, labels, 0), 0) / std
    loss = jnp.mean(self.of_errors(errors))
    return loss, {'loss': loss}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class huber(squared_error):
  """Mean of e^2 / 2, linear above delta, of e = |output - label| / std."""

  delta: types.Positive = 1.0

  def of_errors(self, errors: jax.Array) -> jax.Array:
    return optax.huber_loss(errors, delta=self.delta)


def sigmoid_loss(
  logits: types.Array,
  targets: types.Array,
  positive_weights: types.Array | float = 1.0,
) -> jax.Array:
  """Return the loss of each example, summed over its known labels: -> [B]."""
  on, off = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
  positive = positive_weights * jnp.nan_to_num(targets)
  terms = positive * on + jnp.nan_to_num(1 - targets) * off
  return -jnp.sum(terms, axis=-1)


LOSSES = {'softmax': optax.softmax_cross_entropy, 'sigmoid': sigmoid_loss}


def soft_targets(
  labels: types.Array, num_classes: int, label_smoothing: float = 0.0
) -> jax.Array:
  """Return float32 targets [B, K] of labels int [B] or float [B, K]."""
  labels = jnp.asarray(labels)
  if jnp.issubdtype(labels.dtype, jnp.integer):
    labels = jax.nn.one_hot(labels, num_classes)
  return labels * (1 - label_smoothing) + label_smoothing / num_classes

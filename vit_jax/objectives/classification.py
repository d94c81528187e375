"""Supervised classification: softmax and sigmoid cross-entropy.

Its batch is {'image': uint8 [B, H, W, C], 'label': int32 [B] or float32
[B, K]}, and its loss the mean over the batch.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax.models.vit import Classifier
from vit_jax.objectives.encode import encode
from vit_jax.step import Labelled, OfFeatures, Seen, Terms
from vit_jax.types import Array, Model, NonNegative, Outputs, Preprocess, Rate


@dataclasses.dataclass(frozen=True, eq=False)
class CrossEntropy(OfFeatures, Labelled):
  """Base of the cross-entropies of logits and labels.

  Attributes:
    model: has apply({'params': p}, images, train=True, rngs=...) -> [B, K].
    preprocess: uint8 images -> float images.
    label_smoothing: s in targets * (1 - s) + s / K.
    class_weights: K numbers w; the loss is the mean over the batch of w[label]
      times the loss of the example (not divided by the sum of the weights), for
      a vector of labels the mean of w under the vector. The evaluators' loss
      has no weights. See `data.balance.class_weights`.
  """

  model: Model
  _: dataclasses.KW_ONLY
  preprocess: Preprocess
  label_smoothing: Rate = 0.0
  class_weights: Sequence[NonNegative] | None = None
  terms: Terms = dataclasses.field(default_factory=dict)

  mean_over_classes = False

  def encode(self, seen: Seen, whole: bool = False) -> Seen:
    """Return it with the logits; `whole`, and for terms, with all features."""
    model, images = self.model, self.preprocess(seen.batch['image'])
    if (whole or self.terms) and isinstance(model, Classifier):
      found = encode(model, seen.params, images, seen.rng)
    else:
      options: Any = {'train': True, 'rngs': {'dropout': seen.rng}}
      logits = model.apply({'params': seen.params}, images, **options)
      found = {'logits': logits}
    return seen._replace(features={'image': found})

  def loss(self, seen: Seen) -> Outputs:
    logits = seen.features['image']['logits']
    return self.compare(logits, jnp.asarray(seen.batch['label']))

  def compare(self, logits: jax.Array, labels: jax.Array) -> Any:
    """Return (loss, metrics) of logits [B, K]."""
    num_classes = logits.shape[-1]
    targets = soft_targets(labels, num_classes, self.label_smoothing)
    losses = LOSSES[self.activation](logits, targets)
    if self.class_weights is not None:
      true = soft_targets(labels, num_classes)
      sums = (true * jnp.array([self.class_weights], jnp.float32)).sum(axis=-1)
      losses = losses * (sums / jnp.maximum(true.sum(axis=-1), 1e-12))
    loss = jnp.mean(losses) / (num_classes if self.mean_over_classes else 1)
    classes = labels if labels.ndim == 1 else jnp.argmax(labels, axis=-1)
    hits = jnp.argmax(logits, axis=-1) == classes
    return loss, {'loss': loss, 'accuracy': jnp.mean(hits)}


@dataclasses.dataclass(frozen=True, eq=False)
class softmax_xent(CrossEntropy):
  """Softmax cross-entropy, the paper's loss for fine-tuning."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class sigmoid_xent(CrossEntropy):
  """Sigmoid cross-entropy, by default summed over classes.

  The paper does not name its pre-training loss. The ViT configs of big_vision
  (ImageNet-21k) and scenic use this one, with a head bias of -10.

  Attributes:
    threshold: labels [B, K] above it become 1, all others 0, before they are
      smoothed. With 0 and inside `mixing.Mixed` this is DeiT III's loss: both
      classes of a mixed image have the target 1, and the metric 'accuracy'
      counts the first. None: labels remain as they are.
    mean_over_classes: whether the loss is divided by the number of classes, as
      in DeiT III. The evaluators' loss remains the sum.
  """

  threshold: Rate | None = None
  mean_over_classes: bool = False

  activation = 'sigmoid'

  def compare(self, logits: jax.Array, labels: jax.Array) -> Any:
    if self.threshold is not None and labels.ndim == 2:
      labels = (labels > self.threshold).astype(jnp.float32)
    return super().compare(logits, labels)


def sigmoid_loss(logits: Array, targets: Array) -> jax.Array:
  """Return the loss of each example, summed over classes: -> [B]."""
  on, off = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
  return -jnp.sum(targets * on + (1 - targets) * off, axis=-1)


LOSSES = {'softmax': optax.softmax_cross_entropy, 'sigmoid': sigmoid_loss}


def soft_targets(
  labels: Array, num_classes: int, label_smoothing: float = 0.0
) -> jax.Array:
  """Return float32 targets [B, K] of labels int [B] or float [B, K]."""
  labels = jnp.asarray(labels)
  if jnp.issubdtype(labels.dtype, jnp.integer):
    labels = jax.nn.one_hot(labels, num_classes)
  return labels * (1 - label_smoothing) + label_smoothing / num_classes

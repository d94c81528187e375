"""Supervised classification: softmax and sigmoid cross-entropy.

Its batch is {'image': uint8 [B, H, W, C], 'label': int32 [B] or float32
[B, K]}, and its loss the mean over the batch.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from vit_jax.step import Context, Labelled
from vit_jax.types import (
  Array,
  Batch,
  Metrics,
  Model,
  NonNegative,
  Outputs,
  Params,
  Preprocess,
  Rate,
)


def softmax_xent(
  model: Model,
  *,
  preprocess: Preprocess,
  label_smoothing: Rate = 0.0,
  class_weights: Sequence[NonNegative] | None = None,
) -> 'CrossEntropy':
  """Return the softmax cross-entropy, the paper's loss for fine-tuning.

  Args:
    model: has apply({'params': p}, images, train=True, rngs=...) -> [B, K].
    preprocess: uint8 images -> float images.
    label_smoothing: s in targets * (1 - s) + s / K.
    class_weights: K numbers w; the loss is the mean over the batch of w[label]
      times the loss of the example (not divided by the sum of the weights), for
      a vector of labels the mean of w under the vector. The evaluators' loss
      has no weights. See `data.balance.class_weights`.
  """

  def compare(logits, labels):
    targets = soft_targets(labels, logits.shape[-1], label_smoothing)
    return _loss_and_metrics(
      softmax_loss(logits, targets), labels, logits, class_weights
    )

  return CrossEntropy(
    model=model, preprocess=preprocess, compare=compare, activation='softmax'
  )


def sigmoid_xent(
  model: Model,
  *,
  preprocess: Preprocess,
  label_smoothing: Rate = 0.0,
  class_weights: Sequence[NonNegative] | None = None,
  threshold: Rate | None = None,
  mean_over_classes: bool = False,
) -> 'CrossEntropy':
  """Return the sigmoid cross-entropy, by default summed over classes.

  The paper does not name its pre-training loss. The ViT configs of big_vision
  (ImageNet-21k) and scenic use this one, with a head bias of -10.

  Args:
    model, preprocess, label_smoothing, class_weights: as in `softmax_xent`.
    threshold: labels [B, K] above it become 1, all others 0, before they are
      smoothed. With 0 and inside `mixing.mixed` this is DeiT III's loss: both
      classes of a mixed image have the target 1, and the metric 'accuracy'
      counts the first. None: labels remain as they are.
    mean_over_classes: whether the loss is divided by the number of classes, as
      in DeiT III. The evaluators' loss remains the sum.
  """

  def compare(logits, labels):
    if threshold is not None and labels.ndim == 2:
      labels = (labels > threshold).astype(jnp.float32)
    num_classes = logits.shape[-1]
    targets = soft_targets(labels, num_classes, label_smoothing)
    losses = sigmoid_loss(logits, targets)
    divisor = num_classes if mean_over_classes else 1
    return _loss_and_metrics(losses, labels, logits, class_weights, divisor)

  return CrossEntropy(
    model=model, preprocess=preprocess, compare=compare, activation='sigmoid'
  )


def softmax_loss(logits: Array, targets: Array) -> jax.Array:
  """Return the loss of each example: [B, K], [B, K] -> [B]."""
  return -jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1)


def sigmoid_loss(logits: Array, targets: Array) -> jax.Array:
  """Return the loss of each example, summed over classes: -> [B]."""
  on, off = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
  return -jnp.sum(targets * on + (1 - targets) * off, axis=-1)


LOSSES = {'softmax': softmax_loss, 'sigmoid': sigmoid_loss}


def soft_targets(
  labels: Array, num_classes: int, label_smoothing: float = 0.0
) -> jax.Array:
  """Return float32 targets [B, K] of labels int [B] or float [B, K]."""
  labels = jnp.asarray(labels)
  if jnp.issubdtype(labels.dtype, jnp.integer):
    labels = jax.nn.one_hot(labels, num_classes)
  return labels * (1 - label_smoothing) + label_smoothing / num_classes


def _loss_and_metrics(losses, labels, logits, class_weights, divisor=1):
  """Return (loss, metrics), with each example weighted by its class."""
  if class_weights is not None:
    targets = soft_targets(labels, logits.shape[-1])
    sums = (targets * jnp.array([class_weights], jnp.float32)).sum(axis=-1)
    losses = losses * (sums / jnp.maximum(targets.sum(axis=-1), 1e-12))
  loss = jnp.mean(losses) / divisor
  classes = labels if labels.ndim == 1 else jnp.argmax(labels, axis=-1)
  hits = jnp.argmax(logits, axis=-1) == classes
  return loss, {'loss': loss, 'accuracy': jnp.mean(hits)}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class CrossEntropy(Labelled):
  """The loss of `compare`, a function (logits, labels) -> (loss, metrics)."""

  model: Model
  preprocess: Preprocess
  compare: Callable[[jax.Array, jax.Array], tuple[jax.Array, Metrics]]
  activation: str = dataclasses.field()

  def __call__(
    self, params: Params, batch: Batch, rng: Array, context: Context = Context()
  ) -> Outputs:
    logits = self.model.apply(
      {'params': params},
      self.preprocess(batch['image']),
      train=True,
      rngs={'dropout': rng},
    )
    return self.compare(logits, jnp.asarray(batch['label']))

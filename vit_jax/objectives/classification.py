"""Supervised classification: objectives, i.e. factories that return a LossFn.

LossFn = (params, batch, rng) -> (loss, metrics), for a batch of
{'image': uint8 [B, H, W, C], 'label': int32 [B] or float32 [B, K]}. The loss is
the mean over the batch. `LossFn.activation` is the function that converts the
logits to probabilities, 'softmax' or 'sigmoid'. An objective that wraps another
one keeps it by `functools.wraps(loss_fn)`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.config.domains import Rate, checked
from vit_jax.objectives.class_weights import check_weights, weights_of
from vit_jax.types import Array, LossFn, Model, Preprocess


@checked
def softmax_xent(
  model: Model,
  *,
  preprocess: Preprocess,
  label_smoothing: Rate = 0.0,
  class_weights: Any = None,
) -> LossFn:
  """Return the softmax cross-entropy, the paper's loss for fine-tuning.

  Args:
    model: has apply({'params': p}, images, train=True, rngs=...) -> [B, K].
    preprocess: uint8 images -> float images.
    label_smoothing: s in targets * (1 - s) + s / K.
    class_weights: K numbers w; the loss is the mean over the batch of w[label]
      times the loss of the example (not divided by the sum of the weights). For
      a vector of labels the weight is the mean of w under the vector. The
      evaluators' loss has no weights. See `data.balance.class_weights`.
  """
  return _loss_fn(model, preprocess, label_smoothing, class_weights, 'softmax')


@checked
def sigmoid_xent(
  model: Model,
  *,
  preprocess: Preprocess,
  label_smoothing: Rate = 0.0,
  class_weights: Any = None,
) -> LossFn:
  """Return the sigmoid cross-entropy, summed over classes.

  The paper does not name its pre-training loss. The ViT configs of big_vision
  (ImageNet-21k) and scenic use this one, with a head bias of -10.
  The arguments are those of `softmax_xent`.
  """
  return _loss_fn(model, preprocess, label_smoothing, class_weights, 'sigmoid')


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


def _loss_fn(model, preprocess, label_smoothing, class_weights, activation):
  weights = None if class_weights is None else check_weights(class_weights)

  def loss_fn(params, batch, rng):
    logits = model.apply(
      {'params': params},
      preprocess(batch['image']),
      train=True,
      rngs={'dropout': rng},
    )
    labels = batch['label']
    targets = soft_targets(labels, logits.shape[-1], label_smoothing)
    losses = LOSSES[activation](logits, targets)
    if weights is not None:
      losses = losses * weights_of(labels, weights, logits.shape[-1])
    loss = jnp.mean(losses)
    if labels.ndim == 2:
      labels = jnp.argmax(labels, axis=-1)
    accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == labels)
    return loss, {'loss': loss, 'accuracy': accuracy}

  loss_fn.activation = activation  # type: ignore[attr-defined]
  return loss_fn

"""Wrappers of an objective that together make DeiT III's cross-entropy.

mean_over_classes(objective=thresholded(objective=sigmoid_xent))
"""

import functools

import jax.numpy as jnp

from vit_jax.config.domains import Rate, checked
from vit_jax.types import LossFn, Model, Objective, Preprocess


@checked
def thresholded(
  model: Model,
  *,
  preprocess: Preprocess,
  objective: Objective,
  above: Rate = 0.0,
) -> LossFn:
  """Return the LossFn of `objective` with targets 0 and 1.

  A target that is above the threshold becomes 1. With `above=0` and inside
  `mixing.mixed` this is DeiT III's loss: both classes of a mixed image have the
  target 1, whatever their shares. Labels are not smoothed yet: the smoothing of
  `objective` comes after the threshold. Class numbers remain as they are. Of
  several classes with the target 1, the metric 'accuracy' counts the first.

  Args:
    model, preprocess: of the objective.
    objective: the objective to wrap, such as `sigmoid_xent`.
    above: threshold; targets that are equal to it become 0.

  Raises:
    ValueError: `objective` mixes images.
  """
  inner = objective(model, preprocess=preprocess)
  if hasattr(inner, 'prepare'):
    raise ValueError(
      'thresholded: the objective inside mixes images, so its targets are made '
      'after the threshold. Wrap thresholded in mixed, not the reverse.'
    )

  @functools.wraps(inner)
  def loss_fn(params, batch, rng):
    labels = jnp.asarray(batch['label'])
    if labels.ndim == 2:
      batch = {**batch, 'label': (labels > above).astype(jnp.float32)}
    return inner(params, batch, rng)

  return loss_fn


@checked
def mean_over_classes(
  model: Model, *, preprocess: Preprocess, objective: Objective
) -> LossFn:
  """Return the LossFn of `objective`, divided by the number of classes.

  `sigmoid_xent` is the sum over classes; PyTorch's default, which DeiT III
  uses, is the mean. This matters where gradients are clipped. The evaluators'
  loss remains the sum.

  Args:
    model: has num_classes.
    preprocess: of the objective.
    objective: the objective to wrap.
  """
  inner = objective(model, preprocess=preprocess)

  @functools.wraps(inner)
  def loss_fn(params, batch, rng):
    loss, metrics = inner(params, batch, rng)
    loss = loss / model.num_classes
    return loss, {**metrics, 'loss': loss}

  return loss_fn

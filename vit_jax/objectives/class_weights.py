"""Weights of classes in a loss, for imbalanced data."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.types import Array


def check_weights(class_weights: Sequence[float]) -> tuple[float, ...]:
  """Return the weights; ValueError unless they are numbers of 0 or more."""
  numbers = isinstance(class_weights, Sequence | np.ndarray) and all(
    isinstance(w, int | float) and 0 <= w < math.inf for w in class_weights
  )
  if not numbers:
    raise ValueError(
      f'class_weights={class_weights!r:.80} must be one number of 0 or more '
      'for each class. For n / (K n_c), use the word class_weights in the '
      'argument of the config, or vit_jax.data.balance.class_weights(source).'
    )
  return tuple(class_weights)


def weights_of(
  labels: Array, class_weights: Sequence[float], num_classes: int
) -> jax.Array:
  """Return the weights [B] of examples with labels int [B] or float [B, K]."""
  if len(class_weights) != num_classes:
    raise ValueError(
      f'class_weights has {len(class_weights)} numbers, but the model has '
      f'{num_classes} classes. Give one for each class.'
    )
  weights, labels = jnp.array(class_weights, jnp.float32), jnp.asarray(labels)
  if jnp.issubdtype(labels.dtype, jnp.integer):
    return weights[labels]
  return labels @ weights / jnp.maximum(labels.sum(axis=-1), 1e-12)

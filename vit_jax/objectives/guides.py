"""Guides: columns of the data that representations follow, or forget.

    config.objective.terms.site = dict(
      target='vit_jax.objectives.guides.Prototypes', weight=0.03,
      key='site', adversarial=True)
    config.data.keep = dict(site=dict(target='vit_jax.data.targets.Classes'))

As in FINO (arXiv 2606.05107), a guide predicts a column, such as the scanner or
the year, from the class tokens of the large views. Its parameters learn by its
full gradient. The model gets this gradient times

    2 / (1 + exp(-10 p)) - 1

after the share p of the steps after `warmup`, negative if `adversarial`, and
scaled to the mean length of all guides. The loss of the objective stays as it
is. Examples whose cell is missing do not count. FINO has a weight of 0.03.

B images, G large views, widths D, K classes or numbers.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax.durations import Duration, Timeline
from vit_jax.models.dense import GELU
from vit_jax.objectives.terms import find
from vit_jax.step import Guide, Pull, Seen
from vit_jax.types import Array, Count, Params, Positive, Rate, UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfColumn(Guide):
  """Base of the guides of a column.

  Attributes:
    key: name of the column in data.keep.
    adversarial: whether the model forgets it. Then the loss is a tenth.
    warmup: time before the model gets a gradient.
    outputs: K, set by the run.
  """

  key: str
  adversarial: bool = False
  warmup: Duration | None = None
  outputs: int = 0
  timeline: Any = None

  def of_run(
    self, timeline: Timeline, example: Mapping[str, Any], where: str
  ) -> 'OfColumn':
    column: Any = example.get(self.key)
    if getattr(column, 'ndim', 0) != 1:
      raise UserError(
        f'{where} reads the column {self.key!r}, and examples have {column}. '
        f"Expected a vector: config.data.keep = {{'{self.key}': {{'target': "
        "'vit_jax.data.targets.Classes'}}."
      )
    return dataclasses.replace(self, timeline=timeline, outputs=len(column))

  def factor(self, step: Array) -> jax.Array:
    warmup = self.timeline.steps(self.warmup)
    rest = max(1, self.timeline.total_steps - warmup)
    ramp = jnp.tanh(5 * jnp.clip((step - warmup) / rest, 0, 1))
    return -ramp if self.adversarial else ramp

  def loss(
    self, params: Params, x: jax.Array, target: jax.Array, state: Any
  ) -> jax.Array:
    """Return the loss of features [B, G, D] and a column [B, K] with NaN."""
    raise NotImplementedError

  def following(self, state: Any, seen: Seen, target: jax.Array) -> Any:
    """Return the next state."""
    return None

  def __call__(self, seen: Seen, params: Params, state: Any) -> Pull:
    x, target = find(seen, 'pre_logits'), seen.batch[self.key]
    x = x.reshape(len(x), -1, x.shape[-1])
    share = 0.1 if self.adversarial else 1.0
    fixed = jax.lax.stop_gradient((params, x))

    def loss(params, x):
      return share * self.loss(params, x, target, state)

    gradient = jax.grad(loss, argnums=1)(*fixed)
    following = self.following(state, seen, target)
    return Pull(loss(params, fixed[1]), x, gradient, following)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfHead(OfColumn):
  """Base of the guides with a head: an MLP, whose width is our choice."""

  hidden: Count = 256

  def init(self, rng: jax.Array, width: int) -> Params:
    make, params = jax.nn.initializers.normal(0.02), {}
    widths = width, self.hidden, self.outputs
    for i, key in enumerate(jax.random.split(rng), start=1):
      kernel, bias = make(key, widths[i - 1 : i + 1]), jnp.zeros(widths[i])
      params[f'fc{i}'] = {'kernel': kernel, 'bias': bias}
    return params

  def head(self, params: Params, x: jax.Array) -> jax.Array:
    """Return outputs [B, G, K] of features [B, G, D]."""
    for name in ('fc1', 'fc2'):
      layer = params[name]
      x = jnp.matmul(x, layer['kernel'], precision='highest')
      x += layer['bias'][None, None]
      x = GELU['exact'](x) if name == 'fc1' else x
    return x


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classification(OfHead):
  """Cross-entropy of a head with the class in the column."""

  def loss(
    self, params: Params, x: jax.Array, target: jax.Array, state: Any
  ) -> jax.Array:
    return _cross_entropy(self.head(params, x), jnp.nan_to_num(target))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regression(OfHead):
  """Mean squared error of a head with the numbers in the column."""

  def loss(
    self, params: Params, x: jax.Array, target: jax.Array, state: Any
  ) -> jax.Array:
    target = jnp.broadcast_to(target[:, None], (*x.shape[:2], self.outputs))
    known = ~jnp.isnan(target)
    errors = self.error(self.head(params, x), jnp.nan_to_num(target))
    return jnp.sum(jnp.where(known, errors, 0)) / jnp.maximum(1, jnp.sum(known))

  def error(self, outputs: jax.Array, target: jax.Array) -> jax.Array:
    """Return the loss of each output [B, G, K]."""
    return (outputs - target) ** 2


class Labelling(Regression):
  """Sigmoid cross-entropy of a head with the labels (targets.Labels)."""

  def error(self, outputs: jax.Array, target: jax.Array) -> jax.Array:
    return optax.sigmoid_binary_cross_entropy(outputs, target)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prototypes(OfColumn):
  """Cross-entropy of the cosines with centroids of the classes.

  A cosine is divided by the concentration of the class. The centroids are EMAs
  of the teacher's class tokens, divided by their lengths; without a teacher, of
  the student's. A concentration is the EMA of the root of the mean squared
  distance to the former centroid, in batches with two or more images of the
  class, and at least 0.01. A class that was not seen before has no prototype,
  and its images do not count (our reading).

  Attributes:
    temperature: first concentration; 0.02333 in FINO's recipes.
    momentum: weight of the former centroids and concentrations.
  """

  temperature: Positive = 0.07
  momentum: Rate = 0.999

  def carried(self, width: int) -> Any:
    return {
      'centroids': jnp.zeros((self.outputs, width)),
      'concentrations': jnp.full(self.outputs, self.temperature, jnp.float32),
      'seen': jnp.zeros(self.outputs, bool),
    }

  def loss(
    self, params: Params, x: jax.Array, target: jax.Array, state: Any
  ) -> jax.Array:
    old = state['seen'][None]
    centroids = jnp.where(old.T, state['centroids'], 1.0)
    cosines = jnp.einsum(
      'bgd,kd->bgk', _unit(x), _unit(centroids), precision='highest'
    )
    logits = cosines / state['concentrations'][None, None]
    target = jnp.where(old, jnp.nan_to_num(target), 0)
    return _cross_entropy(jnp.where(old[None], logits, -1e9), target)

  def following(self, state: Any, seen: Seen, target: jax.Array) -> Any:
    name = 'teacher' if 'teacher' in seen.features else 'image'
    y = seen.features[name]['pre_logits'].astype(jnp.float32)
    y = jax.lax.stop_gradient(_unit(y.reshape(len(target), -1, y.shape[-1])))
    target = jnp.nan_to_num(target)
    images = jnp.sum(target, axis=0)
    counts = jnp.maximum(1, images) * y.shape[1]
    sums = jnp.einsum('bk,bgd->kd', target, y, precision='highest')
    old, means = state['centroids'], sums / counts[:, None]
    own = jnp.matmul(target, old, precision='highest')[:, None]
    squares = jnp.sum((y - own) ** 2, axis=(1, 2))
    squares = jnp.matmul(squares, target, precision='highest')
    spread = jnp.sqrt(squares / counts)
    known, now, keep = state['seen'], images > 0, self.momentum
    new = jnp.where(known[:, None], keep * old + (1 - keep) * means, means)
    widths = state['concentrations']
    wider = jnp.maximum(0.01, keep * widths + (1 - keep) * spread)
    return {
      'centroids': jnp.where(now[:, None], new, old),
      'concentrations': jnp.where(known & (images >= 2), wider, widths),
      'seen': known | now,
    }


def _unit(x):
  return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def _cross_entropy(logits, target):
  """Return the mean of logits [B, G, K] over the images with a class."""
  logs = jax.nn.log_softmax(logits)
  total = -jnp.einsum('bgk,bk->', logs, target, precision='highest')
  return total / (jnp.maximum(1, jnp.sum(target)) * logits.shape[1])

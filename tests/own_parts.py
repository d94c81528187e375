"""One part of each kind, of a package outside: test_adding.py uses them all.

typed_user.py has those with type hints checked.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import cv2
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.data.pipeline import Data
from vit_jax.data.targets import Classes, Targets
from vit_jax.models import attention, pooling, posemb, vit
from vit_jax.objectives.wrapper import Wrapper
from vit_jax.step import Context
from vit_jax.types import Model, Params
from vit_jax.weights.keymap import linear


class Net(nn.Module):
  """Model: a linear map of the pixels and a head."""

  width: int
  num_classes: int | None = None

  @nn.compact
  def __call__(self, images, *, train=False):
    x = images.reshape(images.shape[0], -1)
    x = nn.relu(nn.Dense(self.width, name='pixels')(x))
    return nn.Dense(self.num_classes, name='head')(x)


class Shades(Classes):
  """Kind of label: classes that are counted in other words."""

  def words(self, name, *cells):
    return f'{cells[0]} {name} squares'


class Squares:
  """Data set: dark and light squares."""

  num_classes = 2
  class_names = ('dark', 'light')

  def __init__(self, size: int = 8, targets: Targets | None = None):
    self.size, self.targets = size, targets or Shades()

  def __len__(self) -> int:
    return 16

  def __getitem__(self, i: int) -> dict[str, Any]:
    image = np.full((self.size, self.size, 3), 50 + 100 * (i % 2) + i)
    file = cv2.imencode('.png', image)[1].tobytes()
    return {'image': file, 'label': i % 2, 'site': i % 4}

  def describe(self, i):
    return f'square {i}'


@dataclasses.dataclass(frozen=True)
class Crop:
  """Transform: the upper left corner."""

  size: int

  def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return image[: self.size, : self.size]


@dataclasses.dataclass(frozen=True)
class Renumber:
  """Transform of an example: the sites from 3 to 0."""

  takes_example = True

  def __call__(self, example, rng):
    return example | {'site': 3 - example['site']}


class Largest:
  """Evaluator of a data set: the largest logit, computed batch by batch."""

  def __init__(self, model: Model, *, preprocess: Any, mesh: Any, data: Data):
    self.model, self.data = model, data

  def run(self, params: Params) -> dict[str, float]:
    largest = -np.inf
    for batch in self.data.eval_batches():
      images = batch['image'] / np.float32(255)
      logits = self.model.apply({'params': params}, images)
      largest = max(largest, np.max(logits[batch['mask']]))
    return {'logit': largest}


class Total:
  """Writer: the sum of all losses that a run logs, in a file."""

  def __init__(self, name):
    self.name, self.total = name, 0.0

  def start(self, workdir, config):
    self.path = workdir / f'{self.name}_{config["seed"]}.txt'

  def write(self, step, values):
    self.total += values.get('train/loss', 0.0)

  def close(self):
    self.path.write_text(str(self.total))


class Seen:
  """Evaluator that reports what it was given."""

  def __init__(self, net, *, preprocess, mesh, factor=1):
    self.net, self.mesh, self.preprocess = net, mesh, preprocess
    self.factor = factor

  def check(self, params):
    assert all(hasattr(x, 'shape') for x in jax.tree.leaves(params))

  def run(self, params):
    return {
      'devices': self.factor * self.mesh.size,
      'black': self.preprocess(np.zeros((1, 1, 1, 3), np.uint8)).max(),
      'classes': jnp.asarray(self.net.num_classes),
    }


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Scaled(Wrapper):
  """Objective that wraps an objective."""

  factor: float

  def __call__(
    self,
    params: Params,
    batch: Mapping[str, jax.Array],
    rng: jax.Array,
    context: Context = Context(),
  ) -> Any:
    loss, metrics = self.inner(params, batch, rng, context)
    return self.factor * loss, metrics | {'scaled': self.factor * loss}


def length(*, grads, **others):
  """Probe: the norm of all gradients."""
  return {'grads': optax.tree.norm(grads)}


def brier(model, *, preprocess):
  """Objective: squared error of the probabilities."""

  def loss_fn(params, batch, rng):
    images = preprocess(batch['image'])
    rngs = {'dropout': rng}
    logits = model.apply({'params': params}, images, train=True, rngs=rngs)
    targets = jax.nn.one_hot(batch['label'], logits.shape[-1])
    loss = jnp.square(jax.nn.softmax(logits) - targets).sum(-1).mean()
    return loss, {'loss': loss, 'site': jnp.mean(batch['site'])}

  return loss_fn


def certainty(seen, *, power):
  """Term: how certain the model is."""
  logits = seen.features['image']['logits']
  return jax.nn.softmax(logits).max(-1) ** power


def needs_model(seen, model, power):
  """No term: terms do not get the model."""


def signs(learning_rate, *, optimizer, mask=None):
  """Optimizer that wraps an optimizer: the signs of its updates."""
  inner = optimizer(1.0, mask=mask)
  return optax.chain(
    inner,
    optax.stateless(lambda updates, _: jax.tree.map(jnp.sign, updates)),
    optax.scale_by_schedule(learning_rate),
  )


@dataclasses.dataclass(frozen=True)
class Rows(posemb.PositionEmbedding):
  """Position embedding: one vector for each row of patches."""

  std: float = 0.02

  def add_to_patches(
    self, module: Any, x: jax.Array, grid: tuple[int, int]
  ) -> jax.Array:
    init = jax.nn.initializers.normal(self.std)
    table: jax.Array = module.param('rows', init, (grid[0], x.shape[-1]))
    return x + jnp.repeat(table, grid[1], axis=0)[None]

  def resize(self, name, table, shape, method='paper'):
    if name != 'rows':
      return None
    at = np.arange(shape[0]) * len(table) // shape[0]
    return np.asarray(table)[at]


@dataclasses.dataclass(frozen=True)
class Sum(pooling.Pooling):
  """Pooling: the sum over the patches."""

  def __call__(self, module, tokens, layout):
    return tokens.sum(axis=1)


class GatedAttention(attention.Attention):
  """Attention: its output is multiplied by a learned number."""

  @nn.compact
  def __call__(self, queries, tokens, shared=None, lengths=None):
    gate = self.param('gate', nn.initializers.ones, ())
    return gate * super().__call__(queries, tokens, shared, lengths)


class GatedBlock(vit.Block):
  attend = GatedAttention


@dataclasses.dataclass(frozen=True)
class Shared(vit.Layers):
  """Layers: one for all, with the attention above."""

  def layer(self, model):
    return GatedBlock

  def __call__(self, model, x, *, training, per_layer, shared=(), **fields):
    block = self.layer(model)(name='block_0', **fields)
    for _ in range(model.depth):
      x = block(x, None, *shared)
    return x, {}


# Weights format: one key map.
KEYS = [*linear('fc1', 'pixels'), *linear('fc2', 'head')]

# Kernels of heads, with the axes [D, h, dh].
KERNELS = [('.*/memory', ['in'], ['heads', 'head_dim'])]

# Parallelism: rules that shard hidden units.
RULES = [('.*pixels/kernel', (None, 'fsdp')), ('.*head/kernel', ('fsdp',))]

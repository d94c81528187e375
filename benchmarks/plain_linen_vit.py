"""A ViT in plain Flax Linen, to compare with.

It is the worker of `benchmark --peer=linen`, and a script for
`compile --peer_script=benchmarks/plain_linen_vit.py:B/16`.

The model that the paper's authors released, from the same modules of Flax: a
convolution for the patches, LayerNorm, MultiHeadDotProductAttention (separate
dense layers for query, key and value, softmax, einsum), two dense layers with
GELU (tanh), a class token; layers one after the other, and no dropout, as in
its configurations of Ti, S and B. Everything is float32, or with
dtype=bfloat16 the matrix products are bfloat16. The optimizer is optax's AdamW
with clipping; loss and batch are those of our worker. This file is outside the
package because it is a reference for speed, not a model to use.
"""

import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.models import names
from vit_jax.tools.benchmark import workers

XAVIER = nn.initializers.xavier_uniform()


class Layer(nn.Module):
  num_heads: int
  mlp_dim: int
  dtype: Any

  @nn.compact
  def __call__(self, x):
    width = x.shape[-1]
    y = nn.LayerNorm(dtype=self.dtype)(x)
    x = x + nn.MultiHeadDotProductAttention(
      self.num_heads, dtype=self.dtype, kernel_init=XAVIER, deterministic=True
    )(y)
    y = nn.LayerNorm(dtype=self.dtype)(x)
    y = nn.Dense(self.mlp_dim, dtype=self.dtype, kernel_init=XAVIER)(y)
    y = nn.gelu(y)
    return x + nn.Dense(width, dtype=self.dtype, kernel_init=XAVIER)(y)


class PlainViT(nn.Module):
  width: int
  depth: int
  mlp_dim: int
  num_heads: int
  patch_size: tuple[int, int]
  num_classes: int
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, images):
    patch = self.patch_size
    x = nn.Conv(self.width, patch, patch, padding='VALID', dtype=self.dtype)(
      images
    )
    x = x.reshape(x.shape[0], -1, self.width)
    cls = self.param('cls', nn.initializers.zeros, (1, 1, self.width))
    cls = jnp.broadcast_to(cls, (x.shape[0], 1, self.width)).astype(x.dtype)
    x = jnp.concatenate([cls, x], axis=1)
    init = nn.initializers.normal(0.02)
    x = x + self.param('positions', init, (1, *x.shape[1:])).astype(x.dtype)
    for _ in range(self.depth):
      x = Layer(self.num_heads, self.mlp_dim, self.dtype)(x)
    x = nn.LayerNorm(dtype=self.dtype)(x)[:, 0].astype(jnp.float32)
    return nn.Dense(self.num_classes, kernel_init=nn.initializers.zeros)(x)


def create(name, num_classes, dtype='float32'):
  """Return the PlainViT with the sizes of our model of that name."""
  ours = names.create(name)
  return PlainViT(
    width=ours.width,
    depth=ours.depth,
    mlp_dim=ours.mlp_dim,
    num_heads=ours.num_heads,
    patch_size=ours.embedding.patch_size,
    num_classes=num_classes,
    dtype=jnp.dtype(dtype),
  )


def make_functions(model):
  """Return (optax transformation, update, infer) of a PlainViT.

  update: ((params, opt_state), images, labels) -> (the new state, loss).
  infer: (params, images, labels) -> logits.
  """
  tx = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=0.1)
  )

  def infer(params, images, labels):
    del labels
    return model.apply(params, images.astype(jnp.float32) / 127.5 - 1)

  def loss(params, images, labels):
    found = optax.softmax_cross_entropy_with_integer_labels(
      infer(params, images, labels), labels
    )
    return found.mean()

  def update(state, images, labels):
    params, opt_state = state
    value, grads = jax.value_and_grad(loss)(params, images, labels)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  return tx, update, infer


def make_step(name='B/16', *, batch_size, image_shape, num_classes, mesh):
  """Return a bfloat16 step and the shapes of its arguments, see peer.py."""
  del mesh  # the state is replicated, and the batch sharded
  model = create(name, num_classes, 'bfloat16')
  tx, update, _ = make_functions(model)

  def init():
    params = model.init(jax.random.key(0), jnp.zeros((1, *image_shape)))
    return params, tx.init(params)

  images = jax.ShapeDtypeStruct((batch_size, *image_shape), jnp.uint8)
  labels = jax.ShapeDtypeStruct((batch_size,), jnp.int32)

  def step(state, batch):
    return update(state, *batch)

  return step, (jax.eval_shape(init), (images, labels))


class Plain:
  """A compiled step of it, with its batch; settings as in ours.py."""

  def __init__(self, settings):
    num_classes = settings['num_classes']
    model = create(settings['model'], num_classes, settings['precision'])
    batch, size = settings['batch_size'], settings['image_size']
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (batch, size, size, 3), np.uint8)
    labels = rng.integers(0, num_classes, batch, np.int32)
    self._batch = jax.device_put((images, labels))
    params = model.init(jax.random.key(0), jnp.zeros((1, size, size, 3)))
    self._train = settings['mode'] == 'train'
    tx, update, infer = make_functions(model)
    self._state = (params, tx.init(params)) if self._train else params
    step = update if self._train else infer
    step = jax.jit(step, donate_argnums=0 if self._train else ())
    start = time.perf_counter()
    self._step = step.lower(self._state, *self._batch).compile()
    compile_s = time.perf_counter() - start
    self.round(settings.get('warmup', 0))
    self.started = {
      'compile_s': compile_s,
      'param_count': sum(x.size for x in jax.tree.leaves(params)),
      'notes': f'plain Linen, {settings["precision"]}',
      'versions': {'jax': jax.__version__},
    }

  def round(self, steps):
    start = time.perf_counter()
    for _ in range(steps):
      out = self._step(self._state, *self._batch)
      if self._train:
        self._state, out = out
      elif jax.default_backend() == 'cpu':
        jax.block_until_ready(out)
    jax.block_until_ready((self._state, out) if steps else ())
    return time.perf_counter() - start


if __name__ == '__main__':
  workers.serve(Plain)

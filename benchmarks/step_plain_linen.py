"""Train step or logits of a ViT in plain Flax Linen: images per second.

  python benchmarks/step_plain_linen.py B/16 --batch_size=64 [--mode=infer]

The model that the paper's authors released, from the same modules of Flax: a
convolution for the patches, LayerNorm, MultiHeadDotProductAttention (separate
dense layers for query, key and value, softmax, einsum), two dense layers with
GELU (tanh), a class token; layers one after the other, and no dropout, as in
its configurations of Ti, S and B. With --dtype=bfloat16 the matrix products are
bfloat16. Optimizer, loss and batch are those of step_ours.py.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jax_steps
import optax

from vit_jax.zoo import names

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


def main():
  args = jax_steps.parser(__doc__).parse_args()
  ours = names.create(args.model)
  model = PlainViT(
    width=ours.width,
    depth=ours.depth,
    mlp_dim=ours.mlp_dim,
    num_heads=ours.num_heads,
    patch_size=ours.embedding.patch_size,
    num_classes=jax_steps.NUM_CLASSES,
    dtype=jnp.dtype(args.dtype),
  )
  report(args, model)


def report(args, model):
  """Print images per second of a Linen model."""

  def params():
    images = jnp.zeros((1, args.image_size, args.image_size, 3))
    return model.init(jax.random.key(0), images)

  def state():
    made = params()
    return made, jax_steps.TX.init(made)

  def logits(params, images):
    found = model.apply(params, images.astype(jnp.float32) / 127.5 - 1)
    return found[0] if isinstance(found, tuple) else found

  def loss(params, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(
      logits(params, images), labels
    ).mean()

  def train(state, images, labels):
    params, opt_state = state
    value, grads = jax.value_and_grad(loss)(params, images, labels)
    updates, opt_state = jax_steps.TX.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  jax_steps.report(args, params, logits, state, train)


if __name__ == '__main__':
  main()

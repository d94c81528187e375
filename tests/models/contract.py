"""Helpers of the tests of all models: parameters, gradients, comparisons."""

import functools

import jax
import numpy as np

from vit_jax import tree
from vit_jax.models.vit import PatchEmbedding, VisionTransformer

IMAGES = np.random.default_rng(0).uniform(-1, 1, (4, 8, 12, 3))
IMAGES = IMAGES.astype(np.float32)


TINY_VIT = {  # fields of a ViT, or an axial one; a grid of 2x6 of IMAGES
  'width': 16,
  'depth': 2,
  'mlp_dim': 24,
  'num_heads': 2,
  'embedding': PatchEmbedding((4, 2)),
  'num_classes': 5,
}


def tiny(**fields):
  """Return a ViT with the fields of TINY_VIT, or others."""
  return VisionTransformer(**(TINY_VIT | fields))


def random_params(model, images=IMAGES, seed=0, scale=0.3):
  """Return initial parameters plus noise, so that none is zero."""
  args = images if isinstance(images, tuple) else (images,)
  shapes = jax.eval_shape(model.init, jax.random.key(0), *args)['params']
  rng = np.random.default_rng(seed)
  flat = {
    k: (k.endswith('scale') + scale * rng.standard_normal(v.shape)).astype('f')
    for k, v in sorted(tree.flatten(shapes).items())
  }
  return tree.unflatten(flat)


def stack_layers(params):
  """The scanned layout of unrolled parameters."""
  return tree.unflatten(tree.stack_blocks(tree.flatten(params)))


def apply(model, params, images=IMAGES, **options):
  """Apply a model, compiled once per model and options; return NumPy arrays."""
  run = _forward(model, tuple(options.items()))
  return jax.device_get(run({'params': params}, images))


@functools.cache
def _forward(model, options):
  return jax.jit(functools.partial(model.apply, **dict(options)))


def logits_and_grads(model, params, images=IMAGES, rngs=None):
  """Return logits and the gradients of a loss, compiled once per model."""
  return jax.device_get(_backward(model)(params, images, rngs))


@functools.cache
def _backward(model):
  def loss(params, images, rngs):
    logits = model.apply(
      {'params': params}, images, train=rngs is not None, rngs=rngs
    )
    return (logits**2).mean(), logits

  def run(params, images, rngs):
    (_, logits), grads = jax.value_and_grad(loss, has_aux=True)(
      params, images, rngs
    )
    return logits, grads

  return jax.jit(run)


def formula(q, k, v, do=0.0, lengths=np.inf):
  """Return the output of attention and gradients of q, k, v, in float64."""
  q, k, v, do = (np.asarray(x, np.float64) for x in (q, k, v, do))
  scale = q.shape[-1] ** -0.5
  scores = np.einsum('bqhd,bnhd->bhqn', q, k) * scale
  is_key = np.arange(k.shape[1]) < np.reshape(lengths, (-1, 1, 1, 1))
  scores = np.where(is_key, scores, -np.inf)
  p = np.exp(scores - scores.max(-1, keepdims=True))
  p /= p.sum(-1, keepdims=True)
  out = np.einsum('bhqn,bnhd->bqhd', p, v)
  do = np.broadcast_to(do, out.shape)
  dp = np.einsum('bqhd,bnhd->bhqn', do, v)
  ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
  return (
    out,
    np.einsum('bhqn,bnhd->bqhd', ds, k),
    np.einsum('bhqn,bqhd->bnhd', ds, q),
    np.einsum('bhqn,bqhd->bnhd', p, do),
  )


def assert_scan_is_the_loop(model):
  params = random_params(model)
  scanned = model.clone(scan=True)
  actual = apply(scanned, stack_layers(params))
  expected = apply(model, params)
  np.testing.assert_allclose(actual, expected, atol=1e-5)


def compare_to_bfloat16(model, params, expected, images=IMAGES):
  """Relative errors of bfloat16's logits and gradients; checks the dtypes.

  `expected` is (logits, gradients) of float32.
  """
  half = model.clone(dtype='bfloat16')
  initial = jax.eval_shape(half.init, jax.random.key(0), images)
  assert {x.dtype for x in jax.tree.leaves(initial)} == {np.dtype('float32')}
  expected, expected_grads = expected
  actual, grads = logits_and_grads(half, params, images)
  assert actual.dtype == np.float32
  assert {x.dtype for x in jax.tree.leaves(grads)} == {np.dtype('float32')}

  def norm(grads):
    return sum((x**2).sum() for x in jax.tree.leaves(grads)) ** 0.5

  difference = jax.tree.map(lambda a, b: a - b, grads, expected_grads)
  error = np.abs(actual - expected).max() / np.abs(expected).max()
  return error, norm(difference) / norm(expected_grads)

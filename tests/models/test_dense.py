"""Normalisation, products with float32 gradients, the program for GPUs."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import IMAGES, random_params, tiny
from flax import linen as nn
from nightly import nightly
from tiny import quick_key

from vit_jax.models import dense as dense_lib
from vit_jax.models import resnet
from vit_jax.models.dense import Normalize, SwiGlu
from vit_jax.models.resnet import Hybrid
from vit_jax.models.vit import PatchEmbedding
from vit_jax.parallel.sharding import make_mesh

PRODUCTS = {  # product, shapes of the inputs and of the kernel
  'matmul': (dense_lib.matmul, (50, 6), (6, 4)),
  'matmul, tokens apart': (dense_lib.matmul, (2, 25, 6), (6, 4)),
  'convolve': (
    functools.partial(resnet.convolve, stride=2, padding='SAME'),
    (3, 7, 7, 2),
    (3, 3, 2, 5),
  ),
}


def test_normalize():
  images = np.arange(256, dtype=np.uint8).reshape(2, 8, 16, 1).repeat(3, -1)
  out = jax.jit(Normalize())(images)
  assert out.dtype == np.float32 and (out.min(), out.max()) == (-1, 1)
  np.testing.assert_allclose(out, (images - 127.5) / 127.5, atol=1e-7)
  mean, std = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
  out = Normalize(mean, std)(images[0])  # one image without a batch dimension
  expected = (images[0].astype(np.float64) - mean) / std
  np.testing.assert_allclose(out, expected, atol=1e-6)


def numbers(shape, seed, dtype=np.float32):
  return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(product, x, kernel):
  """Return the result, and both gradients for a random one of the result."""
  out, pull = jax.vjp(product, x, kernel)
  gradient = numbers(out.shape, 2, jnp.bfloat16)
  return out, *pull(gradient.astype(out.dtype))


@pytest.mark.parametrize('name', PRODUCTS)
def test_gradients_of_kernels_are_sums_in_float32(name):
  product, shape, kernel_shape = PRODUCTS[name]
  x, kernel = numbers(shape, 0, jnp.bfloat16), numbers(kernel_shape, 1)
  found = with_gradients(product, x, kernel)
  assert [y.dtype for y in found] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
  # The same factors, bfloat16 numbers, multiplied in float32.
  rounded = kernel.astype(jnp.bfloat16).astype(jnp.float32)
  exact = with_gradients(product, x.astype(jnp.float32), rounded)
  for y, wanted in zip(found[:2], exact[:2], strict=True):
    y = np.asarray(y, np.float32)
    np.testing.assert_allclose(y, wanted, rtol=2**-7, atol=2**-5)
  np.testing.assert_allclose(found[2], exact[2], rtol=1e-5, atol=1e-5)


def test_tpus_get_rounded_kernels_and_tokens_apart(monkeypatch):
  dense = dense_lib.Dense(
    (6,), (2, 3), nn.initializers.normal(1), dtype='bfloat16'
  )
  x = numbers((3, 5, 6), 0)
  params = jax.jit(dense.init)(quick_key(1), x)

  def loss(params, x):
    return jnp.sum(jnp.sin(dense.apply(params, x).astype(jnp.float32)))

  def trace_and_gradients():
    jaxpr = str(jax.make_jaxpr(lambda x: dense.apply(params, x))(x))
    gradients = jax.grad(lambda *args: loss(*args), argnums=(0, 1))
    gradients = jax.jit(gradients)(params, x)
    return 'bf16[15,6]' in jaxpr, 'optimization_barrier' in jaxpr, gradients

  *on_cpu, expected = trace_and_gradients()
  monkeypatch.setattr(dense_lib, 'platform', lambda: 'tpu')
  *on_tpu, found = trace_and_gradients()
  assert (on_cpu, on_tpu) == ([True, False], [False, True])
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
    np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02)


HYBRIDS = {(): 4, (1,): 4, (1, 1): 8, (3, 4, 9): 16}


@pytest.mark.parametrize(
  'embedding, height, width',
  [(PatchEmbedding((4, 2)), 4, 2)]
  + [(Hybrid(2, stages=x), 2 * n, 2 * n) for x, n in HYBRIDS.items()],
)
def test_sizes_of_grids_and_images(embedding, height, width):
  assert embedding.grid((3 * height, 6 * width, 3)) == (3, 6)
  assert embedding.image_size((3, 6)) == (3 * height, 6 * width)


def test_gpus_sum_gradients_of_biases_in_float32(monkeypatch):
  """There a bias is rounded, and added within the product."""
  dense = dense_lib.Dense((6,), (4,), nn.initializers.ones, dtype='bfloat16')
  x = numbers((5000, 6), 0, jnp.bfloat16)
  params = {'kernel': numbers((6, 4), 1), 'bias': numbers((4,), 3)}
  gradient = numbers((5000, 4), 2, jnp.bfloat16)

  def run(params):
    out, pull = jax.vjp(lambda p: dense.apply({'params': p}, x), params)
    return out.astype('f'), pull(gradient)[0]

  expected, wanted = jax.jit(run)(params)
  monkeypatch.setattr(dense_lib, 'platform', lambda: 'gpu')
  out, found = jax.jit(lambda params: run(params))(params)
  np.testing.assert_allclose(out, expected, rtol=2**-6, atol=2**-6)
  exact = np.asarray(gradient, np.float64).sum(axis=0)
  np.testing.assert_allclose(found['bias'], exact, rtol=1e-5, atol=1e-4)
  np.testing.assert_array_equal(found['kernel'], wanted['kernel'])


GPUS = [(n, mlp) for n in (0, 1, 8, 3) for mlp in (dense_lib.Gelu(), SwiGlu())]


@pytest.mark.parametrize(  # 0 devices: there is no mesh
  'num_devices, mlp', nightly(GPUS, but=[GPUS[0], GPUS[5], GPUS[6]])
)
def test_the_program_for_gpus_computes_the_same(num_devices, mlp, monkeypatch):
  model = tiny(block=dense_lib.BlockOptions(mlp=mlp), depth=1)
  images = np.concatenate([IMAGES, IMAGES + 0.1])
  params = random_params(model)
  mesh = contextlib.nullcontext()
  if num_devices:
    mesh = jax.set_mesh(make_mesh(jax.devices()[:num_devices]))

  def loss(params, images):
    logits = model.apply({'params': params}, images, train=True)
    return (logits**2).sum()

  split = num_devices in (1, 8)  # 8 images cannot be split over 3
  spec = jax.sharding.PartitionSpec('data' if split else None)
  with mesh:
    given = jax.device_put(images, spec) if num_devices else images
    run = jax.jit(jax.value_and_grad(loss))
    expected = run(params, given)
    monkeypatch.setattr(dense_lib, 'platform', lambda: 'gpu')
    lowered = jax.jit(jax.value_and_grad(lambda *x: loss(*x)))
    lowered = lowered.lower(params, given)
    program = lowered.compile()
    found = program(params, given)
  assert ('LayoutConstraint' in lowered.as_text()) == (num_devices != 3)
  assert 'all-gather' not in program.as_text()  # of activations
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
    *(found, expected),
  )

"""Gradients of kernels in the dtype that a step asks for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from vit_jax.models import common, names, products
from vit_jax.objectives.classification import softmax_xent
from vit_jax.preprocess import Normalize
from vit_jax.step import init_state, train_step

OPTIONS = {
  'window_strides': (2, 2),
  'padding': 'SAME',
  'dimension_numbers': ('NHWC', 'HWIO', 'NHWC'),
}
CASES = {  # product, shapes of the inputs and of the kernel
  'matmul': (products.matmul, (50, 6), (6, 4)),
  'matmul, tokens apart': (products.matmul, (2, 25, 6), (6, 4)),
  'convolve': (
    functools.partial(products.convolve, **OPTIONS),
    (3, 7, 7, 2),
    (3, 3, 2, 5),
  ),
}


@pytest.fixture(scope='module', autouse=True)
def fast_compilation():
  """Little is computed here, so XLA's optimizations would not pay off."""
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', False)


def numbers(shape, seed, dtype):
  return jax.random.normal(jax.random.key(seed), shape, dtype)


def derivatives(product, x, kernel, grad_dtype):
  """Return the result, and both gradients for a random one of the result."""
  with products.gradients_in(grad_dtype):
    out, pull = jax.vjp(product, x, kernel)
  return out, *pull(numbers(out.shape, 2, out.dtype))


def is_rounded(x):
  """Return whether all numbers are bfloat16 numbers."""
  return bool(jnp.all(x == x.astype(jnp.bfloat16).astype(x.dtype)))


@pytest.mark.parametrize('name', CASES)
def test_gradients_of_kernels_are_sums_in_float32(name):
  product, shape, kernel_shape = CASES[name]
  x = numbers(shape, 0, jnp.bfloat16)
  kernel = numbers(kernel_shape, 1, jnp.float32)
  fine = derivatives(product, x, kernel, 'float32')
  coarse = derivatives(product, x, kernel, 'bfloat16')
  # The result and the gradient of the inputs are the same.
  for a, b in zip(fine[:2], coarse[:2]):
    assert a.dtype == b.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.float32(a), np.float32(b))
  # The same factors, bfloat16 numbers, multiplied in float32.
  upcast = x.astype(jnp.float32)
  out, pull = jax.vjp(functools.partial(product, upcast), kernel)
  given = numbers(out.shape, 2, jnp.bfloat16).astype(jnp.float32)
  (wanted,) = pull(given)
  assert fine[2].dtype == coarse[2].dtype == jnp.float32
  np.testing.assert_allclose(fine[2], wanted, rtol=1e-5, atol=1e-5)
  assert is_rounded(coarse[2]) and not is_rounded(fine[2])


def test_affine_keeps_tokens_apart_for_tpus_only(monkeypatch):
  affine = common.Affine((6,), (2, 3), nn.initializers.normal(1))
  x = numbers((3, 5, 6), 0, jnp.float32)
  params = affine.init(jax.random.key(1), x)

  def loss(params, x):
    return jnp.sum(jnp.sin(affine.apply(params, x)))

  def products_and_gradients():
    jaxpr = str(jax.make_jaxpr(affine.apply)(params, x))
    return 'f32[15,6]' in jaxpr, jax.grad(loss, argnums=(0, 1))(params, x)

  flat, expected = products_and_gradients()
  monkeypatch.setattr(common, 'platform', lambda: 'tpu')
  apart, found = products_and_gradients()
  assert (flat, apart) == (True, False)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('grad_dtype', ['float32', 'bfloat16'])
def test_tpus_round_kernels_before_products(grad_dtype, monkeypatch):
  x, kernel = numbers((5, 6), 0, jnp.bfloat16), numbers((6, 4), 1, jnp.float32)
  expected = derivatives(products.matmul, x, kernel, grad_dtype)
  monkeypatch.setattr(products, 'platform', lambda: 'tpu')

  def matmul(*arrays):  # a new function, of which nothing has been traced
    return products.matmul(*arrays)

  for a, b in zip(derivatives(matmul, x, kernel, grad_dtype), expected):
    np.testing.assert_array_equal(np.float32(a), np.float32(b))
  assert 'optimization_barrier' in str(jax.make_jaxpr(matmul)(x, kernel))


@pytest.mark.parametrize('name', CASES)
def test_float32_inputs_are_not_affected(name):
  product, *shapes = CASES[name]
  x, kernel = (numbers(s, i, jnp.float32) for i, s in enumerate(shapes))
  both = [derivatives(product, x, kernel, d) for d in ('float32', 'bfloat16')]
  for a, b in zip(*both):
    np.testing.assert_array_equal(a, b)


def test_the_context_ends():
  x, kernel = numbers((3, 2), 0, jnp.bfloat16), jnp.ones((2, 2))
  with pytest.raises(KeyError), products.gradients_in('float32'):
    raise KeyError
  gradient = jax.grad(lambda k: products.matmul(x, k).sum())(kernel)
  assert is_rounded(gradient)


def keep_gradients():
  """Return an optax transformation whose state are the last gradients."""
  zeros = functools.partial(jax.tree.map, jnp.zeros_like)
  return optax.GradientTransformation(zeros, lambda g, _, p: (zeros(p), g))


@pytest.mark.parametrize(
  ('fields', 'accum_steps'),
  [
    ({}, 1),
    pytest.param({}, 2, marks=pytest.mark.slow),
    pytest.param({'scan': True, 'remat': 'dots'}, 1, marks=pytest.mark.slow),
  ],
)
def test_a_step_makes_the_gradients_of_its_dtype(fields, accum_steps):
  sizes = {'width': 16, 'depth': 1, 'mlp_dim': 16, 'num_heads': 2}
  model = names.create(
    'Ti/16', num_classes=3, dtype='bfloat16', **sizes, **fields
  )
  images = jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32)
  tx = keep_gradients()
  state = init_state(
    jax.random.key(0), model=model, images=images, tx=lambda params: tx
  )
  # The head starts at zero, and no gradient would pass it.
  state.params['head']['kernel'] = numbers((16, 3), 0, jnp.float32)
  pixels = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), np.uint8)
  batch = {'image': pixels, 'label': np.arange(4) % 3}
  found = {}
  for grad_dtype in ('float32', 'bfloat16'):
    after, _ = jax.jit(
      functools.partial(
        train_step,
        loss_fn=softmax_xent(model, preprocess=Normalize()),
        tx=tx,
        grad_dtype=grad_dtype,
        accum_steps=accum_steps,
      )
    )(state, batch)
    found[grad_dtype] = after.opt_state
  for path, fine in jax.tree.leaves_with_path(found['float32']):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    coarse = functools.reduce(
      lambda x, key: x[key], name.split('/'), found['bfloat16']
    )
    scale = float(jnp.abs(coarse).max())
    # Softmax does not depend on the bias of keys, whose gradient is rounding.
    # The largest difference of all others was 0.0096 of the scale.
    if not name.endswith('key/bias'):
      np.testing.assert_allclose(fine, coarse, atol=0.02 * scale + 1e-12)
    if name.endswith('mlp/fc1/kernel') and accum_steps == 1:
      assert is_rounded(coarse) and not is_rounded(fine), name

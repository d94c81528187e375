"""MlpMixer: its contract, and its numbers against timm's."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import (
  IMAGES,
  apply,
  assert_trees_close,
  compare_to_bfloat16,
  golden,
  logits_and_grads,
  random_params,
  relative_error,
  stack_layers,
)
from flax import linen as nn

from vit_jax import tree
from vit_jax.models.layers import Head, PatchEmbedding
from vit_jax.models.mixer import MlpMixer


def tiny(**fields):
  defaults = {
    'width': 16,
    'depth': 2,
    'tokens_mlp_dim': 10,
    'channels_mlp_dim': 24,
    'embedding': PatchEmbedding((4, 2)),
    'num_classes': 5,
  }
  return MlpMixer(**(defaults | fields))


@functools.cache
def computed():
  model = tiny()
  params = random_params(model)
  return model, params, *logits_and_grads(model, params)


def test_equals_timm():
  params, images, expected = golden('mixer')
  model = MlpMixer(
    24, 2, 12, 48, PatchEmbedding(4), num_classes=5, gelu='exact'
  )
  shapes = jax.eval_shape(model.init, jax.random.key(0), images)['params']
  assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, shapes)
  actual = apply(model, params, images)
  # timm computed in float64. Measured: 2e-7 of the largest logit.
  assert relative_error(actual, expected) < 2e-6
  tanh = apply(model.clone(gelu='tanh'), params, images)
  assert 1e-5 < relative_error(tanh, expected) < 1e-2


def test_shapes_and_finite_gradients():
  _, _, logits, grads = computed()
  assert logits.shape == (4, 5) and logits.dtype == jnp.float32
  for name, grad in tree.flatten(grads).items():
    assert np.isfinite(grad).all(), name
    assert np.abs(grad).max() > 1e-9, name


@pytest.mark.parametrize('scan, remat', [(True, 'none'), (False, 'full')])
def test_scan_and_remat_change_no_output_and_no_gradient(scan, remat):
  model, params, expected, expected_grads = computed()
  if scan:
    params, expected_grads = stack_layers(params), stack_layers(expected_grads)
  logits, grads = logits_and_grads(model.clone(scan=scan, remat=remat), params)
  np.testing.assert_allclose(logits, expected, atol=1e-5)
  assert_trees_close(grads, expected_grads, rtol=1e-4, atol=1e-5)


def test_bfloat16_computes_near_float32():
  model, params, *expected = computed()
  error, grads_error = compare_to_bfloat16(model, params, expected)
  assert 1e-5 < error < 0.03
  assert grads_error < 0.05


def test_initial_distributions():
  model = tiny(width=64, tokens_mlp_dim=48, head=Head(bias_init=-6.9))
  images = np.zeros((1, 64, 32, 3), np.float32)  # 256 patches
  params = jax.jit(model.init)(jax.random.key(0, impl='rbg'), images)['params']
  logits = apply(model, params, images)
  np.testing.assert_array_equal(logits, np.full((1, 5), -6.9, np.float32))
  for name, value in tree.flatten(params).items():
    if name.endswith('bias') and name != 'head/bias':
      assert not value.any(), name
    elif 'fc' in name or name == 'embedding/kernel':
      std = math.prod(value.shape[:-1]) ** -0.5  # LeCun's
      assert abs(value.std() / std - 1) < 5 / (2 * value.size) ** 0.5, name
      assert np.abs(value).max() <= 2 * std / 0.8796, name


@pytest.mark.parametrize('scan', [False, True])
def test_stochastic_depth_skips_examples_in_training_only(scan):
  model = tiny(scan=scan, stochastic_depth=0.5)
  _, params, expected, _ = computed()
  images = np.repeat(IMAGES[:1], 64, axis=0)
  variables = {'params': stack_layers(params) if scan else params}
  evaluated = apply(model, variables['params'])  # needs no rng
  np.testing.assert_allclose(evaluated, expected, atol=1e-5)
  features = functools.partial(model.apply, train=True, method='features')
  rngs = {'dropout': jax.random.key(0, impl='rbg')}
  out = jax.jit(features)(variables, images, rngs=rngs)
  first, last = np.asarray(out['block_0']), np.asarray(out['block_1'])
  # The first layer always acts. Either branch of the second is skipped or not.
  np.testing.assert_allclose(first, np.repeat(first[:1], 64, 0), atol=1e-5)
  assert len(np.unique(last.reshape(64, -1).round(3), axis=0)) == 4
  skipped = np.all(last == first, axis=(1, 2)).mean()
  assert abs(skipped - 0.25) < 0.2


def test_features_by_name():
  model, params, logits, _ = computed()
  out = apply(model, params, method='features')
  names = ['patches', 'block_0', 'block_1', 'tokens', 'pooled', 'pre_logits']
  assert sorted(out) == sorted([*names, 'logits'])
  np.testing.assert_allclose(out['logits'], logits, atol=1e-5)
  assert out['patches'].shape == out['tokens'].shape == (4, 12, 16)
  np.testing.assert_allclose(out['pooled'], out['tokens'].mean(1), atol=1e-6)
  headless = model.clone(num_classes=None)
  pooled = apply(headless, params)
  np.testing.assert_allclose(pooled, out['pooled'], atol=1e-6)
  shapes = jax.eval_shape(headless.init, jax.random.key(0), IMAGES)
  assert 'head' not in shapes['params']


def test_every_layer_norm_has_the_epsilon():
  found = []

  def watch(call, args, kwargs, context):
    if isinstance(context.module, nn.LayerNorm):
      found.append(context.module.epsilon)
    return call(*args, **kwargs)

  with nn.intercept_methods(watch):
    model = tiny(norm_eps=1e-3)
    jax.eval_shape(model.init, jax.random.key(0), IMAGES)
  assert found == [1e-3] * (2 * 2 + 1)

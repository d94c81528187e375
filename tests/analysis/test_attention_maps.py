"""Known answers, and numpy written out in loops beside the functions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import tiny

from vit_jax import tree
from vit_jax.analysis import attention
from vit_jax.models.dense import BlockOptions
from vit_jax.models.pooling import ClassToken
from vit_jax.models.vit import PatchEmbedding

# Op by op, each would be compiled by itself.
mean_distance = jax.jit(attention.mean_distance)
rollout = jax.jit(attention.rollout)
softmax_of = jax.jit(attention.weights)

SMALL = {'depth': 3, 'embedding': PatchEmbedding((2, 3)), 'num_classes': 5}
SHAPE = (2, 8, 9, 3)  # grid 4x3
FIRST = jnp.zeros((1, 1, 7)).at[..., 0].set(1)  # the first of 7 tokens


def qk(tokens=7, batch=2, heads=3, width=4, seed=0, scale=1.0):
  rng = np.random.default_rng(seed)
  shape = (2, batch, tokens, heads, width)
  q, k = rng.normal(size=shape, scale=scale).astype(np.float32)
  return jnp.asarray(q), jnp.asarray(k)


EVERYTHING = {
  'block': BlockOptions(qk_norm=True),
  'pooling': ClassToken(num_registers=2),
}


def numpy_weights(q, k, added=0.0):
  """[B, h, N, N] in float64."""
  q, k = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (q, k))
  scores = (q @ k.swapaxes(2, 3) + added) / np.sqrt(q.shape[-1])
  return scipy.special.softmax(scores, axis=-1)


def record(model, variables, images):
  """(features, intermediates)."""
  apply = functools.partial(
    model.apply, method='features', mutable=['intermediates']
  )
  found, recorded = jax.jit(apply)(variables, images)
  return found, recorded['intermediates']


def make(**fields):
  """(model, variables with random parameters, images)."""
  model = tiny.vit(**SMALL | fields)
  params = tree.unflatten(tiny.normal_params(model, SHAPE[1:], scale=0.4))
  images = np.random.default_rng(1).uniform(-1, 1, SHAPE).astype(np.float32)
  return model, {'params': params}, images


def test_weights_are_the_softmax():
  q, k = qk()
  wanted = numpy_weights(q, k)
  np.testing.assert_allclose(softmax_of(q, k), wanted, atol=1e-6)
  half = softmax_of(q.astype('bfloat16'), k.astype('bfloat16'))
  assert half.dtype == jnp.float32
  np.testing.assert_allclose(half.sum(-1), 1, atol=1e-6)


@pytest.mark.parametrize('fields', [{}, EVERYTHING])
def test_recorded_is_what_the_parameters_make_of_the_block_before(fields):
  model, variables, images = make(**fields)
  features, recorded = record(model, variables, images)
  q, k, added = attention.recorded(recorded)
  assert added is None
  assert q.shape == k.shape == (3, 2, 13 + 2 * bool(fields), 2, 8)
  params = jax.tree.map(np.asarray, variables['params'])
  for i in (1, 2):
    x = np.asarray(features[f'block_{i - 1}'], np.float64)
    block = params[f'block_{i}']
    y = numpy_norm(x, block['norm1'])
    for found, name in ((q[i], 'query'), (k[i], 'key')):
      kernel, bias = block['attn'][name]['kernel'], block['attn'][name]['bias']
      wanted = np.einsum('bnd,dhe->bnhe', y, kernel) + bias
      if fields:
        wanted = numpy_norm(wanted, block['attn'][f'{name}_norm'])
      np.testing.assert_allclose(found, wanted, atol=3e-5)


def numpy_norm(x, params):
  x = x - x.mean(-1, keepdims=True)
  x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
  return x * params['scale'] + params['bias']


def test_scanned_layers_are_the_unrolled_ones():
  model, variables, images = make()
  stacked = tree.stack_blocks(tree.flatten(variables['params']))
  scanned = model.clone(scan=True)
  variables_too = {'params': tree.unflatten(stacked)}
  found = attention.recorded(record(scanned, variables_too, images)[1])
  wanted = attention.recorded(record(model, variables, images)[1])
  assert found[2] is wanted[2] is None
  for a, b in zip(found[:2], wanted[:2]):
    assert a.shape == b.shape == (3, 2, 13, 2, 8)
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_more_than_ten_layers_keep_their_order():
  x = np.zeros((1, 2, 1, 1))
  layers = {
    f'block_{i}': {'attn': {'q': (x + i,), 'k': (x - i,)}} for i in range(12)
  }
  q, k, _ = attention.recorded(dict(sorted(layers.items())))
  np.testing.assert_array_equal(q[:, 0, 0, 0, 0], np.arange(12))
  np.testing.assert_array_equal(k[:, 0, 0, 0, 0], -np.arange(12))


def layers(count):
  """q and k of some layers, [L, B, N, h, d]."""
  of_each = [qk(seed=i, scale=1.5) for i in range(count)]
  return tuple(jnp.stack(x) for x in zip(*of_each))


def test_rollout():
  q, k = layers(4)
  wanted = np.eye(7)
  for layer in zip(q, k):
    wanted = (numpy_weights(*layer).mean(1) + np.eye(7)) / 2 @ wanted
  np.testing.assert_allclose(rollout(q, k), wanted, atol=2e-6)
  row = rollout(q, k, start=FIRST)
  np.testing.assert_allclose(row[:, 0], wanted[:, 0], atol=2e-6)


def test_rollout_of_heads():
  q, k = layers(3)
  start = jax.nn.one_hot(np.arange(2), 7)[None]
  found = jax.jit(attention.rollout_of_heads)(q, k, start=start)
  assert found.shape == (2, 3, 3, 2, 7)
  for i in range(3):
    wanted = rollout(q[: i + 1], k[: i + 1], start=start)
    np.testing.assert_allclose(found[:, i].mean(1), wanted, atol=1e-6)
  # One head: its attention, then the layers before it.
  of_head = (start @ softmax_of(q[2], k[2])[:, 1] + start) / 2
  wanted = of_head @ rollout(q[:2], k[:2])
  np.testing.assert_allclose(found[:, 2, 1], wanted, rtol=1e-4, atol=1e-6)


def test_what_positions_add_counts_everywhere():
  (q, k), rng = qk(), np.random.default_rng(1)
  added = rng.normal(size=(2, 3, 7, 7), scale=3).astype(np.float32)
  weights = numpy_weights(q, k, added)
  np.testing.assert_allclose(softmax_of(q, k, added), weights, atol=1e-6)
  found = rollout(*(x[None] for x in (q, k, added)))
  wanted = (weights.mean(axis=1) + np.eye(7)[None]) / 2
  np.testing.assert_allclose(found, wanted, atol=1e-6)
  distances = attention.cell_distances((2, 3), (4, 5))
  weights = weights[:, :, 1:, 1:]
  weights /= weights.sum(axis=-1, keepdims=True)
  wanted = (weights * distances[None, None]).sum(axis=-1)
  found = mean_distance(q, k, added, distances=distances)
  np.testing.assert_allclose(found, wanted.mean(axis=-1), rtol=1e-5)


def loop_distance(weights, grid, cell):
  """[h]: weights [h, P, P] of one image."""
  at = [
    (y * cell[0], x * cell[1]) for y in range(grid[0]) for x in range(grid[1])
  ]
  total = np.zeros(len(weights))
  for i, (y, x) in enumerate(at):
    for j, (v, u) in enumerate(at):
      total += weights[:, i, j] * np.sqrt((y - v) ** 2 + (x - u) ** 2)
  return total / len(at)


@pytest.mark.parametrize('grid, cell', [((3, 3), (16, 16)), ((2, 5), (8, 14))])
def test_distance(grid, cell):
  n = grid[0] * grid[1]
  distances = attention.cell_distances(grid, cell)
  uniform = jnp.zeros((1, n, 2, 4))
  found = mean_distance(uniform, uniform, distances=distances)
  wanted = loop_distance(np.full((2, n, n), 1 / n), grid, cell)
  np.testing.assert_allclose(found[0], wanted, rtol=1e-5)

  q, k = qk(tokens=n + 3)
  weights = numpy_weights(q, k)[:, :, 3:, 3:]
  found = mean_distance(q, k, distances=distances)
  for b in range(2):
    scaled = weights[b] / weights[b].sum(-1, keepdims=True)
    wanted = loop_distance(scaled, grid, cell)
    np.testing.assert_allclose(found[b], wanted, rtol=1e-5)


def test_distance_where_all_attention_is_on_the_class_token():
  """Nothing is left for the patches in float32; the mean is still a number."""
  q = jnp.ones((1, 10, 1, 4)).at[:, 0].mul(1000)
  distances = attention.cell_distances((3, 3), (1, 1))
  found = mean_distance(q, q, distances=distances)
  np.testing.assert_allclose(found[0, 0], distances.mean(), rtol=1e-5)


@pytest.mark.parametrize('what', ['maps', 'rollout', 'distance'])
def test_one_layer_is_in_memory_at_a_time(what):
  shape = (12, 2, 197, 4, 8)
  distances = attention.cell_distances((14, 14), (16, 16))
  start = jnp.zeros((1, 1, 197)).at[..., 0].set(1)
  of_layer = {
    'maps': lambda q, k, _: start[:, None] @ softmax_of(q, k),
    'distance': lambda q, k, _: mean_distance(q, k, distances=distances),
  }

  def run(q, k):
    if what == 'rollout':
      return rollout(q, k, start=start)
    return attention.per_layer(of_layer[what], q, k)

  stacked = jax.ShapeDtypeStruct(shape, jnp.float32)
  compiled = jax.jit(run).lower(stacked, stacked).compile()
  one = 2 * 4 * 197 * 197 * 4  # bytes of [B, h, N, N]; all would be 12 of them
  assert compiled.memory_analysis().temp_size_in_bytes < 4 * one


def test_per_layer():
  q, k = np.random.default_rng(0).normal(size=(2, 3, 2, 10, 2, 4))
  distances = attention.cell_distances((3, 3), (2, 2))
  found = attention.per_layer(
    lambda q, k, _: mean_distance(q, k, distances=distances), q, k
  )
  assert found.shape == (2, 3, 2)
  for i in range(3):
    wanted = mean_distance(q[i], k[i], distances=distances)
    np.testing.assert_allclose(found[:, i], wanted, rtol=1e-6)


def test_a_model_without_attention():
  with pytest.raises(ValueError, match='no attention'):
    attention.recorded({'block_0': {}})

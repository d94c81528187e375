"""Masked autoencoders: transformers' numbers, and what is hidden."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from vit_jax import tree
from vit_jax.models.dense import BlockOptions, Gelu, Normalize
from vit_jax.models.pooling import ClassToken, Mean
from vit_jax.models.posemb import SinCos2d
from vit_jax.models.resnet import Hybrid
from vit_jax.models.vit import PatchEmbedding
from vit_jax.objectives.mae import Decoder, Mae
from vit_jax.weights.families import hf_vit
from vit_jax.weights.keymap import Key, KeyMap, linear, norm
from vit_jax.zoo import names

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (8, 16, 12, 3), np.uint8)  # 2 x 3 patches
IMAGES[0] = 100, 110, 120  # zeros, whose patches have no deviation
COLOURS = Normalize((100.0, 110.0, 120.0), (50.0, 60.0, 70.0))


def make(images=IMAGES, preprocess=COLOURS, options=None, **fields):
  """Return a small Mae and noisy parameters, of which none is zero."""
  given = {'width': 12, 'mlp_dim': 24, 'embedding': PatchEmbedding((8, 4))}
  model = tiny.vit(**given | fields)
  options = {'decoder': Decoder(8, 1, 2)} | (options or {})
  mae = Mae(model, preprocess=preprocess, **options)

  def init(rng, images):
    params = model.init(rng, images)['params']
    return {**params, 'objective': mae.init(rng, images)}

  zeros = jnp.zeros(images.shape)
  shapes = tree.flatten(jax.eval_shape(init, jax.random.key(0), zeros))
  rng = np.random.default_rng(1)
  params = {
    path: rng.normal(path.endswith('scale'), 0.2, x.shape).astype(np.float32)
    for path, x in shapes.items()
  }
  return mae, tree.unflatten(params)


def value_and_grad(mae, params, batch, seed=0):
  return jitted(mae)(params, batch, jax.random.key(seed))


@functools.cache
def jitted(mae):
  return jax.jit(jax.value_and_grad(mae, has_aux=True))


# Against transformers.

_PARTS = 'layernorm_before layernorm_after', hf_vit.NEW, 'mlp.fc1 mlp.fc2'
_DECODER = (
  Key('decoder.mask_token', 'mask'),
  *linear('decoder.decoder_embed', 'embedding'),
  *hf_vit.layers('decoder.decoder_layers.{i}', *_PARTS),
  *norm('decoder.decoder_norm', 'norm'),
  *linear('decoder.decoder_pred', 'head'),
)
KEYS = KeyMap(
  *hf_vit.OUTSIDE,
  Key('embeddings.cls_token', 'cls'),
  *hf_vit.layers('layers.{i}', *_PARTS),
  *(key._replace(ours=f'objective/{key.ours}') for key in _DECODER),
)


def test_equals_transformers():
  golden = tiny.golden('mae')
  mae, params = make(
    golden['images'],
    Normalize(),
    depth=2,
    embedding=PatchEmbedding(4),
    posemb=SinCos2d(endpoint=False),
    block=BlockOptions(mlp=Gelu('exact')),
  )
  shapes = tree.flatten(params).items()

  def read(kind):
    start = re.compile(rf'{kind}/(vit\.)?')
    arrays = {start.sub('', k): golden[k] for k in golden if start.match(k)}
    ours = KEYS.to_ours(arrays)
    return tree.unflatten({k: ours[k].reshape(x.shape) for k, x in shapes})

  tx = optax.adamw(3e-3, b2=0.95, eps=1e-6, weight_decay=0.05)

  @jax.jit
  def take(params, state, batch):
    found, grads = value_and_grad(mae, params, batch)
    updates, state = tx.update(grads, state, params)
    return found, grads, optax.apply_updates(params, updates), state

  params = read('first')
  state, losses = jax.jit(tx.init)(params), []
  for step, noise in enumerate(golden['noise']):
    rank = np.argsort(np.argsort(noise, axis=1), axis=1)
    batch = {'image': golden['images'], 'rank': rank}
    (loss, metrics), grads, params, state = take(params, state, batch)
    assert metrics == {'loss': loss}
    losses.append(loss)
    if step == 0:
      tiny.assert_trees_close(grads, read('grad'), atol=1e-5)
  np.testing.assert_allclose(losses[0], golden['losses'][0], rtol=1e-5)
  np.testing.assert_allclose(losses, golden['losses'], rtol=1e-3)
  tiny.assert_trees_close(params, read('last'), atol=1e-3)


# What is hidden.


def test_each_image_has_its_own_random_order():
  mae, _ = make()
  draw = jax.jit(lambda images, rng: mae.prepare({'image': images}, rng))
  images = np.zeros((2000, 16, 12, 3), np.uint8)
  rank = np.asarray(draw(images, jax.random.key(0))['rank'])
  np.testing.assert_array_equal(np.sort(rank), np.tile(np.arange(6), (2000, 1)))
  # Each patch is equally often in each place: 333 times, deviation 17.
  counts = [np.bincount(column, minlength=6) for column in rank.T]
  assert np.abs(np.array(counts) - 2000 / 6).max() < 5 * 17
  assert len(np.unique(rank, axis=0)) > 600  # of 720


def test_hidden_patches_are_predicted_from_the_visible_ones():
  mae, params = make(options={'normalize': False, 'ratio': 0.6})
  pictures = jax.jit(mae.pictures)

  def reconstruct(images):
    (rows,) = pictures(params, {'image': images}, jax.random.key(3)).values()
    return np.asarray(rows)

  found = reconstruct(IMAGES)
  masked, predicted, whole = np.moveaxis(found, 1, 0)
  grey = (masked == 128).all(axis=-1)
  assert grey.sum() == 8 * 4 * 32  # int(6 * 0.4) of 6 patches are visible
  kept = ~grey
  np.testing.assert_array_equal(whole, IMAGES)
  np.testing.assert_array_equal(masked[kept], IMAGES[kept])
  np.testing.assert_array_equal(predicted[kept], IMAGES[kept])
  np.testing.assert_array_equal(reconstruct(masked)[:, :2], found[:, :2])
  changed = reconstruct(np.where(kept[..., None], np.uint8(9), IMAGES))
  different = changed[:, 1] != predicted
  assert (different & grey[..., None]).any(axis=(1, 2, 3)).all()


@pytest.mark.parametrize('normalize', [True, False])
def test_predictions_become_pixels(normalize):
  """A decoder that predicts the same numbers for each patch."""
  mae, params = make(options={'normalize': normalize})
  outputs = RNG.normal(size=96).astype(np.float32)
  head = params['objective']['head']
  params['objective']['head'] = {'kernel': 0 * head['kernel'], 'bias': outputs}
  rng = jax.random.key(0)
  (rows,) = jax.jit(mae.pictures)(params, {'image': IMAGES}, rng).values()
  errors = []
  for masked, reconstruction, image in jax.device_get(rows):
    for y in range(0, 16, 8):
      for x in range(0, 12, 4):
        at = np.s_[y : y + 8, x : x + 4]
        if (masked[at] != 128).any():
          continue
        patch = (image[at] - [100, 110, 120]) / [50, 60, 70]
        mean, std = patch.mean(), np.sqrt(patch.var(ddof=1) + 1e-6)
        values = outputs.reshape(8, 4, 3)
        target = (patch - mean) / std if normalize else patch
        errors.append((target - values) ** 2)
        values = values * std + mean if normalize else values
        pixels = values * [50, 60, 70] + [100, 110, 120]
        expected = np.clip(pixels, 0, 255)
        np.testing.assert_allclose(reconstruction[at], expected, atol=0.501)
  assert len(errors) == 8 * 5
  batch = jax.jit(mae.prepare)({'image': IMAGES}, rng)
  (loss, _), _ = value_and_grad(mae, params, batch)
  np.testing.assert_allclose(loss, np.mean(errors), rtol=1e-5)


def test_positions_of_an_oblong_grid():
  mae, _ = make(pooling=ClassToken(num_registers=1))
  rows = [np.zeros(8), np.zeros(8)]
  for y in range(2):
    for x in range(3):
      waves = [
        f(at * w) for at in (x, y) for f in (np.sin, np.cos) for w in (1, 0.01)
      ]
      rows.append(np.array(waves))
  table = mae._decoder(IMAGES).posemb.table({}, (1, 1), 8)
  np.testing.assert_allclose(table, rows, atol=1e-6)


@pytest.mark.parametrize(
  ('name', 'width', 'heads'),
  [('Ti/16', 128, 4), ('S/16', 256, 8)]
  + [(x, 512, 16) for x in ('B/16', 'L/16', 'H/14')],
)
def test_the_decoder_is_smaller_than_the_encoder(name, width, heads):
  model = names.create(name, num_classes=0, scan=True)
  mae = Mae(model, preprocess=COLOURS)
  images = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
  decoder = tree.flatten(jax.eval_shape(mae.init, jax.random.key(0), images))
  kernels = [x for path, x in decoder.items() if path.endswith('query/kernel')]
  assert [x.shape for x in kernels] == [(8, width, heads, 32)]
  encoder = jax.eval_shape(model.init, jax.random.key(0), images)
  sizes = [sum(x.size for x in jax.tree.leaves(y)) for y in (decoder, encoder)]
  assert sizes[0] < 0.4 * sizes[1]


# Models.


@pytest.mark.parametrize(
  'channels, fields',
  [
    (3, {'pooling': Mean(), 'dropout': 0.5, 'num_classes': 3}),
    (1, {'pooling': ClassToken(num_registers=2), 'scan': True}),
    (4, {'dtype': 'bfloat16', 'remat': 'full', 'attention': 'einsum'}),
  ],
)
def test_all_models_learn(channels, fields):
  images = np.repeat(IMAGES[..., :1], channels, axis=-1)
  mae, params = make(images, Normalize(), {'ratio': 0.5}, **fields)
  batch = jax.jit(mae.prepare)({'image': images}, jax.random.key(0))
  (loss, _), grads = value_and_grad(mae, params, batch)
  assert loss.dtype == np.float32
  flat = tree.flatten(jax.device_get(grads)).items()
  still = {k for k, x in flat if not np.any(x) and 'key/bias' not in k}
  head = {'head/kernel', 'head/bias'} if mae.model.num_classes else set()
  assert still == head
  (other, _), _ = value_and_grad(mae, params, batch, seed=1)
  assert (loss != other) == bool(mae.model.dropout)


def test_models_that_cannot_leave_patches_out():
  with pytest.raises(ValueError, match='no hybrid'):
    make(embedding=Hybrid(1, stages=(1,)))

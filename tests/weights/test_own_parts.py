"""What models of ours alone have: read back, and refused to other formats."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import pretrained
from vit_jax.checkpoint import Checkpointer
from vit_jax.models import names
from vit_jax.tools.look import arrays
from vit_jax.train import TrainState
from vit_jax.weights import bundle, formats, grids

PARAMS = {  # of two layers, width 8, 2 heads, patches of 4x4
  'embedding/kernel': np.zeros((4, 4, 3, 8), 'f'),
  'block_0/norm1/scale': np.zeros(8, 'f'),
  'block_0/attn/query/kernel': np.zeros((8, 2, 4), 'f'),
  'block_0/mlp/fc1/kernel': np.zeros((8, 16), 'f'),
}


@pytest.mark.parametrize(
  'table, shape, expected',
  [
    ('pos_embedding', (1, 3, 5, 8), {'posemb': 'learned'}),
    ('pos_embedding_x', (1, 1, 5, 4), {'posemb': 'learned2d'}),
    (
      'block_0/pos_embedding',
      (1, 3, 5, 8),
      {'posemb': 'learned', 'posemb_at': 'layers'},
    ),
    (
      'block_0/pos_embedding_x',
      (1, 1, 5, 4),
      {'posemb': 'learned2d', 'posemb_at': 'layers'},
    ),
    ('block_0/attn/offset_embedding', (6, 5, 2, 4), {'posemb': 'relative'}),
    ('block_0/norm2/scale', (8,), {'posemb': 'sincos2d'}),
  ],
)
def test_positions_are_told_by_their_tables(table, shape, expected):
  found = bundle.infer(PARAMS | {table: np.zeros(shape, 'f')})
  assert {k: v for k, v in found.items() if 'posemb' in k} == expected


def test_image_of_overlapping_patches():
  params = PARAMS | {'pos_embedding': np.zeros((1, 3, 5, 8), 'f')}
  settings = bundle.infer(params, patch_stride=2)
  assert grids.image_shape(params, settings) == (8, 12, 3)
  assert grids.image_shape(params, bundle.infer(params)) == (12, 20, 3)


@pytest.mark.parametrize(
  'name, fields, message',
  [
    ('B/16', {'posemb': 'relative'}, "posemb is 'relative'"),
    ('B/16', {'posemb_at': 'layers'}, "posemb_at is 'layers'"),
    ('B/16', {'patch_stride': 8}, 'patch_stride is 8'),
    ('Axial-B/16', {}, 'target is .*AxialViT'),
    ('Axial-R50x1', {}, 'target is .*AxialResNet'),
  ],
)
@pytest.mark.parametrize('format', formats.FORMATS)
def test_no_other_format_has_them(name, fields, message, format, tmp_path):
  settings = names.settings(name, **fields)
  weights = bundle.Weights(settings, {}, (224, 224, 3))
  with pytest.raises(ValueError, match=f'{message}.* cannot hold it'):
    formats.write(weights, tmp_path / 'file', format)
  assert not list(tmp_path.iterdir())


def made_up(params=None, *, name='B/16', image=(224, 224, 3), **fields):
  return bundle.Weights(names.settings(name, **fields), params or {}, image)


def test_what_inspect_shows_of_them():
  shown = {
    'all': made_up(),
    'overlap': made_up(patch_stride=8),
    'relative': made_up(posemb='relative'),
    'layers': made_up(posemb_at='layers'),
    'shared': made_up(posemb_at='layers_shared'),
    'axial': made_up(name='Axial-B/16'),
  }
  obstacles = {k: set(arrays.obstacles(v)) for k, v in shown.items()}
  pictures = {'maps', 'rollout', 'distance'}
  assert obstacles == {
    'all': set(),
    'overlap': set(),
    'relative': {'positions'},
    'layers': {'positions'},
    'shared': set(),
    'axial': {*pictures, 'positions'},
  }
  assert arrays.geometry(shown['overlap']) == ((27, 27), (8, 8), 1)
  assert arrays.geometry(shown['all']) == ((14, 14), (16, 16), 1)


def test_similarity_of_learned2d_positions():
  rng = np.random.default_rng(0)
  x, y = rng.standard_normal((2, 3, 4)).astype('f')
  params = {
    'pos_embedding_x': x.reshape(1, 1, 3, 4),
    'pos_embedding_y': y[:2].reshape(1, 2, 1, 4),
  }
  grid = np.stack(
    [np.concatenate([x[c], y[r]]) for r in range(2) for c in range(3)]
  )
  grid /= np.linalg.norm(grid, axis=1, keepdims=True)
  weights = made_up(params, image=(32, 48, 3), posemb='learned2d')
  found = arrays.positions(weights).reshape(6, 6)
  np.testing.assert_allclose(found, grid @ grid.T, atol=1e-6)


@pytest.mark.parametrize(
  'name', ['R50x1', pytest.param('Axial-R50x1', marks=pytest.mark.slow)]
)
def test_runs_of_resnets(name, tmp_path):
  """Which have no `scan`; positions are resized."""
  settings = names.settings(name, stages=(1,), num_classes=5)
  model = bundle.make(settings)
  images = jax.ShapeDtypeStruct((1, 8, 8, 3), jnp.float32)
  shapes = jax.eval_shape(model.init, jax.random.key(0), images)['params']
  params = jax.tree.map(lambda x: jnp.zeros(x.shape), shapes)
  state = TrainState(jnp.int32(1), params, (), jax.random.key(0))
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, state, {})
  checkpointer.close()
  about = {
    'model': settings,
    'preprocess': {'target': bundle.NORMALIZE},
    'image_shape': [8, 8, 3],
  }
  (tmp_path / 'model.json').write_text(json.dumps(about))
  found, loaded = pretrained.load(tmp_path, image_size=16)
  images = jax.ShapeDtypeStruct((2, 16, 16, 3), jnp.float32)
  assert jax.eval_shape(found.apply, {'params': loaded}, images).shape == (2, 5)

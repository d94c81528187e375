"""Weights of our own: workdirs old and new, the format vit_jax, your models."""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch_files
from PIL import Image
from small import fields as fields_of
from small import logits, random_weights, tiny

from vit_jax import config, pretrained, tree
from vit_jax.data.transforms import Resize
from vit_jax.models import names
from vit_jax.models.axial import AxialResNet
from vit_jax.models.mixer import MlpMixer
from vit_jax.models.posemb import Learned
from vit_jax.models.vit import VisionTransformer
from vit_jax.runs.checkpoint import Checkpointer
from vit_jax.step import TrainState
from vit_jax.tools import convert
from vit_jax.tools import predict as predict_tool
from vit_jax.tools.look import arrays as look
from vit_jax.weights import bundle, export, formats
from vit_jax.weights.surgery import InitFrom
from vit_jax.weights.surgery import read as read_init_from

OLD_RUN = pathlib.Path(__file__).parents[1] / 'golden' / 'old_run'
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
    ('block_0/attn/offset_embedding', (6, 5, 2, 4), {'posemb': 'relative'}),
    ('block_0/norm2/scale', (8,), {'posemb': 'sincos2d'}),
  ],
)
def test_positions_are_inferred_from_their_tables(table, shape, expected):
  model = bundle.infer(PARAMS | {table: np.zeros(shape, 'f')})
  assert fields_of(model, expected) == expected


def test_image_shape_of_overlapping_patches():
  params = PARAMS | {'pos_embedding': np.zeros((1, 3, 5, 8), 'f')}
  for fields, expected in (
    ({'patch_stride': 2}, (8, 12, 3)),
    ({}, (12, 20, 3)),
  ):
    model = bundle.infer(params, **fields)
    assert bundle.infer_image_shape(model, params) == expected


def test_infer_needs_a_model_of_ours():
  with pytest.raises(ValueError, match='No model of vit_jax'):
    bundle.infer({'a': np.zeros(3), 'b': np.zeros(3)})


def test_fields_of_parts_have_short_names():
  model = names.create('B/16', num_classes=5)
  changed = bundle.replace(model, gelu='exact', posemb='none', dtype='bfloat16')
  assert (changed.block.gelu, changed.posemb) == ('exact', None)
  assert bundle.replace(
    changed, posemb='learned', gelu='tanh', dtype='float32'
  ) == (model)
  for field, message in (
    ({'gleu': 'exact'}, r"no field 'gleu'.*'gelu'"),
    ({'posemb': 'x'}, 'posemb=.x. must be one of learned'),
    ({'norm_after_pooling': True}, 'pooling=ClassToken.* has no norm_after'),
  ):
    with pytest.raises(ValueError, match=message):
      bundle.replace(model, **field)


def test_a_run_from_before_the_redesign_is_read():
  weights = formats.read(OLD_RUN)
  assert weights.model == bundle.from_fields(
    VisionTransformer,
    **{'width': 32, 'depth': 1, 'mlp_dim': 128, 'num_heads': 2},
    **{'patch_size': 4, 'num_classes': 10, 'dropout': 0.1},
    posemb_init_std=0.5,
  )
  assert weights.model.posemb == Learned(init_std=0.5)
  assert weights.transforms == (Resize((8, 8)),)
  assert weights.class_names == list('0123456789') and weights.step == 3
  assert weights.params['block_0/attn/query/kernel'].shape == (32, 2, 16)


@pytest.mark.parametrize(
  'old',
  [
    {'pooling': 'gap', 'posemb': 'sincos2d', 'num_registers': 2},
    {'posemb': 'none', 'class_token': None, 'head_bias_init': -10.0},
    {'resnet_stages': [1, 2], 'patch_size': [1, 1], 'gelu': 'exact'},
    {'pooling': 'none', 'class_token': True, 'mask_token': True},
    {'posemb': 'learned2d', 'posemb_at': 'layers', 'patch_stride': [2, 2]},
    {'pooling': 'gap', 'norm_after_pooling': True, 'qk_norm': True},
  ],
)
def test_model_json_with_flat_fields_is_read(old):
  flat = {'width': 32, 'depth': 1, 'mlp_dim': 128, 'num_heads': 2}
  flat |= {'patch_size': 4, 'target': 'vit_jax.models.vit.VisionTransformer'}
  model = bundle.build_model(flat | old)
  assert bundle.build_model(config.describe(model)) == model
  found = json.loads(json.dumps(fields_of(model, old)))
  assert found == old | (
    {'class_token': True} if old.get('posemb') == 'none' else {}
  )


@pytest.mark.parametrize(
  'target, fields',
  [
    ('resnet.ResNet', {'stages': [1, 2], 'head_bias_init': -1.0}),
    ('axial.AxialResNet', {'stages': [1], 'head_bias_init': 0.0}),
    ('axial.AxialViT', {'width': 8, 'depth': 1, 'mlp_dim': 8, 'num_heads': 2}),
    (
      'mixer.MlpMixer',
      {'width': 8, 'depth': 1, 'tokens_mlp_dim': 8, 'channels_mlp_dim': 8},
    ),
  ],
)
def test_other_models_with_flat_fields_are_read(target, fields):
  fields = {'target': f'vit_jax.models.{target}'} | fields
  if 'width' in fields:
    fields |= {'patch_size': [4, 4], 'num_classes': 5}
  model = bundle.build_model(fields)
  assert type(model).__name__ == target.split('.')[1]
  assert bundle.build_model(config.describe(model)) == model


REFUSED = [
  ('B/16', {'posemb': 'relative'}, r'posemb=Relative\('),
  ('B/16', {'posemb_at': 'layers'}, r'posemb=Learned\(.*layers'),
  ('B/16', {'patch_stride': 8}, 'stride='),
  ('Axial-B/16', {}, 'AxialViT'),
  ('Axial-R50x1', {}, 'AxialResNet'),
]


@pytest.mark.parametrize('name, fields, message', REFUSED)
def test_other_formats_refuse_what_only_our_models_have(
  name, fields, message, tmp_path
):
  model = bundle.replace(names.create(name), **fields)
  weights = bundle.Weights(model, {}, (224, 224, 3))
  for format in formats.FORMATS[1:]:
    match = f'{format} cannot hold.*{message}.*--format=vit_jax'
    with pytest.raises(ValueError, match=match):
      formats.write(weights, tmp_path / 'file', format)
  assert not list(tmp_path.iterdir())


def test_our_format_holds_every_model(tmp_path):
  small = {'width': 16, 'num_heads': 2, 'depth': 2, 'mlp_dim': 16}
  weights = tiny(posemb='relative', qk_norm=True, num_registers=2, depth=2)
  axial = names.create('Axial-B/16', num_classes=3, **small)
  for made in (weights, random_weights(axial, (32, 32, 3))):
    formats.write(made, tmp_path / 'x.npz', 'vit_jax')
    back = formats.read(tmp_path / 'x.npz')
    assert back.model == made.model and back.transforms == made.transforms
    assert back.params.keys() == made.params.keys()
    for path, value in made.params.items():
      np.testing.assert_array_equal(back.params[path], value)
  about = json.loads((tmp_path / 'x.json').read_text())
  about['model']['width'] = 32
  (tmp_path / 'x.json').write_text(json.dumps(about))
  with pytest.raises(
    ValueError, match=r'(?s)not those of the model.*\+ cls|\+ '
  ):
    formats.read(tmp_path / 'x.npz')
  del about['model']['width']
  (tmp_path / 'x.json').write_text(json.dumps(about))
  with pytest.raises(ValueError, match='lacks arguments'):
    formats.read(tmp_path / 'x.npz')


def test_no_description_does_harm(tmp_path):
  path = tmp_path / 'x.npz'
  mixer = bundle.from_fields(
    MlpMixer,
    **{'width': 8, 'depth': 1, 'tokens_mlp_dim': 8, 'channels_mlp_dim': 8},
    **{'patch_size': 4, 'gelu': 'exact', 'num_classes': 3},
  )
  for weights in (tiny(gelu='exact'), random_weights(mixer, (8, 8, 3))):
    formats.write(weights, path, 'vit_jax')
    assert formats.read(path).model == weights.model
    about = json.loads((tmp_path / 'x.json').read_text())
    found = []
    for _, changed in torch_files.hostile(about, 8):
      (tmp_path / 'x.json').write_text(json.dumps(changed))
      found.append(torch_files.reads(lambda p, _: formats.read(p), path, None))
    assert any(found) and not all(found)
  for model in (
    *([], 'x', {'target': 'os.system'}, {'pooling': 'token', 'patch_size': 4}),
    {'target': 'vit_jax.models.vit.VisionTransformer', 'patch_size': []},
    {'target': 'vit_jax.models.resnet.ResNet', 'head_bias_init': {}, 'x': 1},
  ):
    with pytest.raises(ValueError):
      bundle.build_model(model)


def save_run(workdir, weights):
  """Write a workdir as training does."""
  params = jax.tree.map(jnp.asarray, tree.unflatten(weights.params))
  state = TrainState(jnp.int32(1), params, (), jax.random.key(0))
  checkpointer = Checkpointer(workdir)
  checkpointer.save(1, state, {})
  checkpointer.close()
  about = {
    'model': config.describe(weights.model),
    'preprocess': config.describe(weights.preprocess),
    'transforms': config.describe(weights.transforms),
    'image_shape': weights.image_shape,
    'class_names': weights.class_names,
  }
  (workdir / 'model.json').write_text(json.dumps(about))


@pytest.fixture(scope='module')
def own(tmp_path_factory):
  """(workdir of a model of a user's own package, its Weights)."""
  import own_models

  weights = random_weights(
    own_models.Pixels(width=4, num_classes=3),
    (8, 8, 3),
    preprocess=own_models.Halve(by=4.0),
    transforms=(Resize(8), own_models.Invert()),
    class_names=['a', 'b', 'c'],
  )
  workdir = tmp_path_factory.mktemp('own')
  save_run(workdir, weights)
  return workdir, weights


def test_nothing_is_imported_from_a_package_that_is_not_trusted(own):
  workdir, _ = own
  module = sys.modules.pop('own_models')
  try:
    match = r"'own_models\.Pixels'.*trust=\('own_models',\).*--trust=own_models"
    with pytest.raises(ValueError, match=match):
      formats.read(workdir)
    with pytest.raises(ValueError, match='not'):
      formats.read(workdir, trust=('own',))
    assert 'own_models' not in sys.modules
  finally:
    sys.modules['own_models'] = module


def test_a_model_of_your_own_is_read_everywhere(own, tmp_path, capsys):
  workdir, expected = own
  trust = ('own_models',)
  weights = read_init_from(InitFrom(path=str(workdir), trust=trust))
  assert weights.model == expected.model
  assert weights.preprocess == expected.preprocess
  assert weights.transforms == expected.transforms
  found = logits(expected)
  np.testing.assert_allclose(logits(weights), found, atol=1e-6)
  model, params = pretrained.load(workdir, trust=trust, report=None)
  assert model == expected.model
  np.testing.assert_array_equal(
    params['Dense_0']['kernel'], expected.params['Dense_0/kernel']
  )
  # convert, and read what it wrote
  file = tmp_path / 'own.npz'
  command = [str(workdir), str(file), '--trust=own_models']
  with pytest.raises(SystemExit, match=r'the model Pixels.*--format=vit_jax'):
    convert.main(command)
  convert.main([*command, '--format=vit_jax'])
  assert 'Pixels(width=4)' in capsys.readouterr().out
  with pytest.raises(ValueError, match='--trust=own_models'):
    formats.read(file)
  back = formats.read(file, trust=trust)
  np.testing.assert_allclose(logits(back), found, atol=1e-6)
  # predict
  pixels = np.full((8, 8, 3), 51, np.uint8)
  Image.fromarray(pixels).save(tmp_path / 'x.png')
  images = expected.preprocess(255 - pixels[None])
  (result,) = predict_tool.predict(weights, [str(tmp_path / 'x.png')])
  np.testing.assert_allclose(
    result['probabilities'],
    jax.nn.softmax(logits(expected, np.asarray(images))[0]),
    atol=1e-6,
  )
  with pytest.raises(ValueError, match='no method `features`'):
    predict_tool.predict(weights, ['x.png'], layer='pooled')
  # inspect: says what cannot be drawn
  assert set(look.obstacles(weights)) == set(look.FIGURES)


def test_a_model_of_your_own_is_exported(own):
  pytest.importorskip('flatbuffers')
  content, about = export.stablehlo(own[1], platforms=('cpu',))
  run = jax.export.deserialize(content).call
  pixels = np.arange(2 * 8 * 8 * 3, dtype=np.uint8).reshape(2, 8, 8, 3)
  images = np.asarray(own[1].preprocess(pixels))
  np.testing.assert_allclose(run(pixels), logits(own[1], images), atol=1e-6)
  assert about['model'] == {
    'target': 'own_models.Pixels',
    **{'width': 4, 'num_classes': 3},
  }


@pytest.mark.parametrize(
  'name', ['R50x1', pytest.param('Axial-R50x1', marks=pytest.mark.slow)]
)
def test_runs_of_resnets(name, tmp_path):
  """They have no `scan`; position embeddings are resized."""
  model = names.create(name, stages=(1,), num_classes=5)
  weights = random_weights(model, (8, 8, 3))
  save_run(tmp_path, weights)
  found, loaded = pretrained.load(tmp_path, image_size=16, report=None)
  assert found == model
  images = jax.ShapeDtypeStruct((2, 16, 16, 3), jnp.float32)
  assert jax.eval_shape(found.apply, {'params': loaded}, images).shape == (2, 5)
  if type(model) is not AxialResNet:
    for path, value in weights.params.items():
      np.testing.assert_array_equal(tree.flatten(loaded)[path], value)


def made_up(params=None, *, name='B/16', image=(224, 224, 3), **fields):
  model = bundle.replace(names.create(name), **fields)
  return bundle.Weights(model, params or {'embedding/kernel': 0}, image)


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
  found = look.positions(weights).reshape(6, 6)
  np.testing.assert_allclose(found, grid @ grid.T, atol=1e-6)

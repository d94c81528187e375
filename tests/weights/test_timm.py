"""timm's files: what is read computes what timm does, and timm reads ours."""

import dataclasses

import numpy as np
import pytest
import torch_files
from small import equal
from torch_files import BOUND, check_logits, check_row, fill, seeded

from vit_jax.data.transforms import CentralCrop, ResizeSmall
from vit_jax.models.mixer import MlpMixer
from vit_jax.models.pooling import (
  ClassToken,
  DistillationToken,
  Map,
  Mean,
)
from vit_jax.models.posemb import Learned
from vit_jax.models.resnet import ResNet
from vit_jax.weights import bundle, timm

CASES = torch_files.load('formats_timm.json')
READ, WRITTEN = CASES['read'], CASES['written']
SMALL = {
  **{'width': 24, 'depth': 1, 'mlp_dim': 50, 'num_heads': 3},
  **{'patch_size': (4, 2), 'num_classes': 5},
}
OURS = {  # as record_timm_formats.py has them
  'token': SMALL | {'depth': 2},
  'exact': SMALL | {'gelu': 'exact', 'posemb': 'sincos2d'},
  'token_registers': SMALL | {'num_registers': 2, 'layerscale_init': 0.1},
  'gap': SMALL | {'pooling': 'gap', 'posemb': 'sincos2d', 'qk_norm': True},
  'fc_norm': SMALL | {'pooling': 'gap', 'norm_after_pooling': True},
  'map': SMALL | {'pooling': 'map', 'num_registers': 1, 'posemb': 'none'},
  'distilled': SMALL | {'pooling': 'distilled', 'depth': 2},
  'distilled_features': SMALL
  | {'pooling': 'distilled', 'posemb': 'sincos2d', 'num_classes': None},
  'features': SMALL | {'num_classes': None},
  'hybrid_root': SMALL
  | {'resnet_stages': (), 'patch_size': (4, 4), 'image_shape': (64, 32, 3)},
}
# timm's hybrids have other epsilons; 5e-6 and 3e-6 were found.
BOUNDS = {'hybrid': 1.5e-5, 'hybrid_root': 1e-5}


def read(name, **options):
  case = READ[name]
  if case['config'] is None:
    options = {'image_size': case['image'][:2]} | options
    if name == 'hybrid':
      options['num_heads'] = 3
  return timm.read(fill(case), case['config'], **options)


@pytest.mark.parametrize('name', READ)
def test_what_is_read_computes_what_timm_does(name):
  weights = read(name)
  assert weights.image_shape == tuple(READ[name]['image'])
  check_logits(weights, READ[name], BOUNDS.get(name, BOUND))
  assert timm.recognise(READ[name]['shapes'])


@pytest.mark.parametrize(
  'name, pooling, block',
  [
    ('token', ClassToken(), {'gelu': 'exact', 'norm_eps': 1e-6}),
    ('avg', Mean(norm_after=True), {'gelu': 'exact'}),
    ('avg_class_token', Mean(num_registers=1), {}),
    ('token_fc_norm', ClassToken(), {}),
    ('siglip', Map(), {'gelu': 'tanh'}),
    ('registers', ClassToken(num_registers=2), {}),
    ('registers_avg', None, {'qk_norm': True}),
    ('deit3', ClassToken(), {'layerscale_init': 1e-5}),
    ('distilled', DistillationToken(), {'qk_norm': False}),
    ('channels', ClassToken(), {'gelu': 'tanh'}),
  ],
)
def test_the_architecture_is_read(name, pooling, block):
  model = read(name).model
  assert (model.num_heads, model.mlp_dim) == (3, 48)
  if pooling:
    assert model.pooling == pooling
  for field, value in block.items():
    assert getattr(model.block, field) == value


def test_other_architectures_are_read():
  assert read('no_positions').model.posemb is None
  assert read('hybrid').model.embedding.stages == (1, 1)
  bit, mixer = read('bit').model, read('mixer').model
  assert type(bit) is ResNet and type(mixer) is MlpMixer
  assert (bit.stages, bit.form, bit.pool_padding) == ((1, 2), 'preact', 'zero')
  assert (mixer.gelu, mixer.tokens_mlp_dim) == ('exact', 12)


def config_of(name, **change):
  return READ[name]['config'] | change


@pytest.mark.parametrize(
  'architecture, width, heads, gelu',
  [
    ('vit_base_patch16_224', 768, 12, 'exact'),
    ('vit_base_patch16_gap_224', 768, 16, 'exact'),
    ('vit_small_patch32_224', 384, 6, 'exact'),
    ('test_vit2', 64, 2, 'exact'),
    ('vit_so400m_patch16_siglip_256', 1152, 16, 'tanh'),
    ('vit_base_patch32_siglip_256', 768, 12, 'tanh'),
    ('vit_base_patch16_siglip_256', 768, 12, 'exact'),
  ],
)
def test_the_name_of_an_architecture_says(architecture, width, heads, gelu):
  """Without model_args: heads of timm's models, and tanh where timm has it."""
  block, zero = 'blocks.0', np.float32(0)
  shapes = {
    'cls_token': (1, 1, width),
    'pos_embed': (1, 5, width),
    'patch_embed.proj.weight': (width, 3, 8, 8),
    f'{block}.attn.qkv.weight': (3 * width, width),
    f'{block}.attn.proj.weight': (width, width),
    f'{block}.mlp.fc1.weight': (4 * width, width),
    f'{block}.mlp.fc2.weight': (width, 4 * width),
    f'{block}.norm1.weight': (width,),
    f'{block}.norm2.weight': (width,),
    'norm.weight': (width,),
  }
  shapes |= {
    k.replace('weight', 'bias'): x[:1] for k, x in shapes.items() if 'wei' in k
  }
  arrays = {k: np.broadcast_to(zero, x) for k, x in shapes.items()}
  config = {'architecture': architecture, 'num_classes': 0}
  model = timm.read(arrays, config).model
  assert (model.num_heads, model.block.gelu) == (heads, gelu)
  if width == 768:
    with pytest.raises(ValueError, match='num_heads=12'):
      timm.read(arrays)


def test_class_token_and_registers_land_where_they_belong():
  file, weights = fill(READ['registers']), read('registers')
  params = weights.params
  np.testing.assert_array_equal(params['cls'], file['cls_token'])
  rows = file['pos_embed']
  np.testing.assert_array_equal(params['cls_pos_embedding'], rows[:, :1])
  np.testing.assert_array_equal(
    params['registers'], file['reg_token'] + rows[:, 1:3]
  )
  np.testing.assert_array_equal(
    params['pos_embedding'], rows[:, 3:].reshape(1, 3, 4, 24)
  )
  file, weights = fill(READ['deit3']), read('deit3')  # no_embed_class
  assert not weights.params['cls_pos_embedding'].any()
  assert file['pos_embed'].shape == (1, 12, 24)
  file, weights = fill(READ['avg_class_token']), read('avg_class_token')
  np.testing.assert_array_equal(
    weights.params['registers'], file['cls_token'] + file['pos_embed'][:, :1]
  )
  assert any('not pooled, is register 0' in note for note in weights.notes)


def test_without_a_config():
  file, config = fill(READ['token']), READ['token']['config']
  weights = timm.read(file, num_heads=3, grid=(3, 4))
  assert equal(weights.params, read('token').params)
  assert weights.model == read('token').model
  with pytest.raises(ValueError, match=r'11 patches.*grid='):
    timm.read(file | {'pos_embed': file['pos_embed'][:, :12]}, num_heads=3)
  with pytest.raises(ValueError, match='num_heads'):
    timm.read(file, num_heads=5, grid=(3, 4))
  avg = timm.read(fill(READ['avg']), num_heads=3, grid=(3, 4))
  assert avg.model == read('avg').model
  wrapped = {f'timm_model.{name}': array for name, array in file.items()}
  assert timm.recognise(wrapped)
  assert equal(timm.read(wrapped, config).params, weights.params)


def test_fields_of_the_user_come_first():
  assert read('token', gelu='tanh').model.block.gelu == 'tanh'
  assert read('token', norm_eps=1e-5).model.block.norm_eps == 1e-5
  weights = read('token', pooling='gap')
  assert weights.model.pooling == Mean(num_registers=1, norm_after=False)


def test_queries_keys_and_values_may_be_without_bias():
  file = fill(READ['token'])
  zero = {k: np.zeros_like(v) for k, v in file.items() if '.qkv.bias' in k}
  less = {k: v for k, v in file.items() if k not in zero}
  config = READ['token']['config']
  weights = timm.read(less, config)
  assert equal(weights.params, timm.read(file | zero, config).params)
  assert any('bias' in note for note in weights.notes)


@pytest.mark.parametrize('name', OURS)
def test_what_is_written_is_what_timm_loaded(name):
  """timm.create_model('local-dir:...') loaded it when it was recorded."""
  weights = seeded.model_weights(OURS[name])
  arrays, files = timm.write(weights)
  assert files == {'config.json': WRITTEN[name]['config']}
  assert seeded.digest(arrays) == WRITTEN[name]['digest']
  check_logits(weights, WRITTEN[name], BOUNDS.get(name, BOUND))
  check_row(weights, WRITTEN[name])


@pytest.mark.parametrize('name', OURS)
def test_writing_and_reading_gives_the_same(name):
  weights = seeded.model_weights(OURS[name])
  arrays, files = timm.write(weights)
  again = timm.read(arrays, files['config.json'])
  expected = dict(weights.params)
  if OURS[name].get('posemb') == 'sincos2d':  # written as a table
    assert again.model.posemb == Learned()
    check_logits(again, WRITTEN[name])
    again.params.pop('pos_embedding')
    for name in ('cls_pos_embedding', 'dist_pos_embedding'):
      again.params.pop(name, None)
  else:
    fields = (
      {'layerscale_init': 1e-5} if 'layerscale_init' in OURS[name] else {}
    )
    assert again.model == bundle.replace(weights.model, **fields)
  assert equal(again.params, expected)
  for key in ('image_shape', 'class_names', 'activation'):
    assert getattr(again, key) == getattr(weights, key)
  *others, crop = weights.transforms
  crop = dataclasses.replace(crop, rounding='even')  # as timm has it
  assert again.transforms == (*others, crop)
  np.testing.assert_allclose(again.preprocess.mean, weights.preprocess.mean)
  assert again.preprocess.std == weights.preprocess.std


@pytest.mark.parametrize(
  'name', ['token', 'siglip', 'deit3', 'distilled', 'no_positions']
)
def test_reading_and_writing_gives_the_file_back(name):
  file = fill(READ[name])
  arrays, _ = timm.write(read(name))
  if name == 'deit3':  # its class token has no position, ours a zero
    arrays['pos_embed'] = arrays['pos_embed'][:, 1:]
  assert equal(arrays, file)


def test_use_travels():
  weights = seeded.model_weights(SMALL, activation='sigmoid')
  _, files = timm.write(weights)
  assert files['config.json']['activation'] == 'sigmoid'
  weights = read('token')
  assert weights.class_names == [f'class {i}' for i in range(5)]
  assert weights.preprocess.mean == 127.5
  config = READ['token']['config']
  square = config | {
    'pretrained_cfg': config['pretrained_cfg']
    | {'crop_pct': 0.875, 'interpolation': 'lanczos', 'input_size': [3, 16, 16]}
  }
  square['model_args'] = square['model_args'] | {'img_size': 16}
  del square['label_names']
  table = np.zeros((1, 33, 24), np.float32)
  weights = timm.read(fill(READ['token']) | {'pos_embed': table}, square)
  assert weights.transforms == (
    ResizeSmall(18, 'lanczos', antialias=True, rounding='down'),
    CentralCrop(16, rounding='even'),
  )
  assert weights.class_names is None
  _, files = timm.write(weights)
  theirs = files['config.json']['pretrained_cfg']
  assert theirs['crop_mode'] == 'center' and int(16 / theirs['crop_pct']) == 18
  older = {'architecture': 'vit_base_patch16_224'} | config['pretrained_cfg']
  older |= {'num_classes': 5, 'labels': ['a', 'b', 'c', 'd', 'e']}
  weights = timm.read(fill(READ['token']), older, num_heads=3)
  assert weights.class_names == list('abcde')


def test_families_beyond_what_timm_has_are_not_written():
  with pytest.raises(ValueError, match=r'no ResNet with \(\(1, 2\)'):
    timm.write(read('bit'))
  with pytest.raises(ValueError, match='no MlpMixer with'):
    timm.write(read('mixer'))


@pytest.mark.parametrize(
  'change, said',
  [
    ({'architecture': 'vit_base_patch16_rpn_224'}, 'norms after'),
    ({'architecture': 'vit_base_patch32_clip_quickgelu_224'}, 'QuickGELU'),
    ({'global_pool': 'avgmax'}, 'avgmax'),
    ({'model_args': {'act_layer': 'silu'}}, 'silu'),
    ({'model_args': {'pool_include_prefix': True}}, 'pool_include_prefix'),
    ({'model_args': {'num_heads': 5}}, 'num_heads'),
  ],
)
def test_a_config_of_another_computation_is_refused(change, said):
  changed = READ['token']['config'] | {'model_args': {}} | change
  with pytest.raises(ValueError, match=said):
    timm.read(fill(READ['token']), changed)


@pytest.mark.parametrize(
  'name, change, said',
  [
    ('token', {'dist_token': (1, 1, 24)}, 'pos_embed|11 patches'),
    ('token', {'norm_pre.weight': (24,)}, r'- norm_pre\.weight'),
    ('token', {'blocks.0.mlp.norm.weight': (48,)}, r'- blocks\.0\.mlp\.norm'),
    ('token', {'pos_embed': None}, "posemb='none'"),
    ('bit', {'norm.weight': None}, r'- norm\.bias'),
    ('mixer', {'head.weight': (6, 24)}, r'\+ head\.bias \(6,\)'),
  ],
)
def test_other_arrays_are_refused_by_name(name, change, said):
  file = fill(READ[name])
  for key, shape in change.items():
    file.pop(key, None)
    if shape:
      file[key] = np.zeros(shape, np.float32)
  with pytest.raises(ValueError, match=said):
    timm.read(file, READ[name]['config'])

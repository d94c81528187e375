"""timm's files: what is read computes what timm does, and timm reads ours."""

import dataclasses

import numpy as np
import pytest
import torch_files
from small import fields as fields_of
from torch_files import (
  BOUND,
  check_logits,
  check_row,
  equal,
  fill,
  seeded,
)

from vit_jax.data.transforms import CentralCrop, ResizeSmall
from vit_jax.models.mixer import MlpMixer
from vit_jax.models.pooling import Mean
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
  'name, fields',
  [
    ('token', {'pooling': 'token', 'gelu': 'exact', 'num_heads': 3}),
    ('avg', {'pooling': 'gap', 'norm_after_pooling': True}),
    ('avg_class_token', {'pooling': 'gap', 'num_registers': 1}),
    ('token_fc_norm', {'pooling': 'token', 'num_registers': 0}),
    ('siglip', {'pooling': 'map', 'gelu': 'tanh'}),
    ('registers', {'pooling': 'token', 'num_registers': 2}),
    ('registers_avg', {'num_registers': 3, 'qk_norm': True}),
    ('deit3', {'pooling': 'token', 'layerscale_init': 1e-5}),
    ('distilled', {'pooling': 'distilled', 'num_classes': 5, 'depth': 2}),
    ('no_positions', {'posemb': 'none', 'num_classes': None}),
    ('channels', {'gelu': 'tanh'}),
    ('hybrid', {'resnet_stages': (1, 1), 'patch_size': (1, 1)}),
    ('bit', {'kind': ResNet, 'stages': (1, 2), 'form': 'preact'}),
    ('mixer', {'kind': MlpMixer, 'gelu': 'exact', 'tokens_mlp_dim': 12}),
  ],
)
def test_the_architecture_is_read(name, fields):
  model = read(name).model
  kind = fields.pop('kind', None)
  assert kind in (None, type(model))
  assert fields_of(model, fields) == fields


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


@pytest.mark.parametrize(
  ('name', 'keys'),
  [
    ('hybrid', timm._vit_keys()),
    ('bit', timm._RESNET_KEYS),
    ('mixer', timm._MIXER_KEYS),
  ],
)
def test_names_are_the_same_both_ways(name, keys):
  """Among them projections, whose names begin as those of convolutions."""
  file = fill(READ[name])
  params, names = keys.to_ours(file)
  assert {*names.values()} == file.keys()
  assert keys.to_theirs(params).keys() == file.keys()


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


@pytest.mark.parametrize(
  'fields, said',
  [
    ({'representation_size': 8}, 'tanh layer'),
    ({'norm_eps': 1e-12}, 'norm_eps is 1e-12'),
    ({'pooling': 'none'}, 'single patches'),
    (
      {
        'resnet_stages': (1, 1),
        'patch_size': (1, 1),
        'image_shape': (32, 32, 3),
      },
      'kind',
    ),
  ],
)
def test_what_timm_cannot_have_is_not_written(fields, said):
  weights = seeded.model_weights(SMALL | fields)
  with pytest.raises(ValueError, match=rf'{said}.*npz'):
    timm.write(weights)


def test_families_beyond_what_timm_has_are_not_written():
  with pytest.raises(ValueError, match=r'no ResNet of the kind \(\(1, 2\)'):
    timm.write(read('bit'))
  with pytest.raises(ValueError, match='no MlpMixer of the kind'):
    timm.write(read('mixer'))


@pytest.mark.parametrize(
  'more, said',
  [
    ({'dist_token': (1, 1, 24)}, 'pos_embed has 11 patches'),
    ({'norm_pre.weight': (24,)}, 'norm before the layers'),
    ({'blocks.0.mlp.w12.weight': (96, 24)}, 'SwiGLU'),
    ({'blocks.0.attn.rel_pos.table': (9, 3)}, 'relative positions'),
    ({'blocks.0.mlp.norm.weight': (48,)}, r'- blocks\.0\.mlp\.norm'),
  ],
)
def test_other_models_are_refused_with_the_reason(more, said):
  file = fill(READ['token']) | {k: np.zeros(s) for k, s in more.items()}
  with pytest.raises(ValueError, match=said):
    timm.read(file, READ['token']['config'])


@pytest.mark.parametrize(
  'change, said',
  [
    ({'architecture': 'vit_base_patch16_rpn_224'}, 'norms after'),
    ({'architecture': 'vit_base_patch32_clip_quickgelu_224'}, 'QuickGELU'),
    ({'global_pool': 'avgmax'}, 'avgmax'),
    ({'model_args': {'act_layer': 'silu'}}, 'silu'),
    ({'model_args': {'pool_include_prefix': True}}, 'pool_include_prefix'),
    ({'model_args': {'num_heads': 5}}, 'multiple of num_heads'),
    ({'model_args': 'os.system'}, 'model_args'),
    ({'label_names': [1, 2]}, 'class names'),
  ],
)
def test_a_config_of_another_computation_is_refused(change, said):
  changed = READ['token']['config'] | {'model_args': {}} | change
  with pytest.raises(ValueError, match=said):
    timm.read(fill(READ['token']), changed)


def test_no_config_does_harm():
  for name, every in (('token', 1), ('deit3', 5)):
    file, config = fill(READ[name]), READ[name]['config']
    found = [
      torch_files.reads(timm.read, file, changed)
      for _, changed in torch_files.hostile(config, every)
    ]
    assert not all(found)
  for config in ([], 'x', 3):
    assert not torch_files.reads(timm.read, file, config)


@pytest.mark.parametrize('name', ['registers_avg', 'siglip', 'bit', 'mixer'])
def test_a_broken_file_is_refused(name):
  file, config = fill(READ[name]), READ[name]['config']
  for what, arrays in torch_files.broken(file):
    assert not torch_files.reads(timm.read, arrays, config), what


def test_all_that_is_missing_is_in_one_error():
  file = fill(READ['token'])
  less = {k: v for k, v in file.items() if 'blocks.0.mlp' not in k}
  with pytest.raises(ValueError) as e:
    timm.read(less, READ['token']['config'])
  for name in file.keys() - less.keys():
    assert f'+ {name} {file[name].shape}' in str(e.value)
  high = file | {'blocks.999999999999.norm1.weight': file['norm.weight']}
  with pytest.raises(ValueError, match='999999999999'):
    timm.read(high, READ['token']['config'])

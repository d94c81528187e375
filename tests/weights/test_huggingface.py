"""Hugging Face's ViT: read, it computes the same; written, it is loaded."""

import numpy as np
import pytest
import torch_files
from small import equal
from torch_files import check_logits, check_row, fill, seeded

from vit_jax.data.transforms import CentralCrop, ResizeSmall
from vit_jax.models.pooling import ClassToken
from vit_jax.weights import huggingface

CASES = torch_files.load('formats_hf.json')
READ, WRITTEN = CASES['read'], CASES['written']
SMALL = {
  **{'width': 24, 'depth': 1, 'mlp_dim': 50, 'num_heads': 3},
  **{'patch_size': (4, 2), 'num_classes': 5},
}
OURS = {  # as record_hf.py has them
  'token': SMALL | {'depth': 2},
  'exact': SMALL | {'gelu': 'exact', 'norm_eps': 0.1, 'posemb': 'sincos2d'},
  'layerscale': SMALL | {'layerscale_init': 0.1, 'posemb': 'none'},
  'features': SMALL | {'num_classes': None},
  'representation': SMALL | {'num_classes': None, 'representation_size': 20},
}
# Names that version 5 of transformers has in memory, by those in its files.
IN_MEMORY = {
  'encoder.layer.': 'layers.',
  'attention.attention.query': 'attention.q_proj',
  'attention.attention.key': 'attention.k_proj',
  'attention.attention.value': 'attention.v_proj',
  'attention.output.dense': 'attention.o_proj',
  'intermediate.dense': 'mlp.fc1',
  'output.dense': 'mlp.fc2',
}


def read(name, config=None, **options):
  case = READ[name]
  return huggingface.read(fill(case), config or case['config'], **options)


@pytest.mark.parametrize('name', READ)
def test_what_is_read_computes_what_transformers_does(name):
  weights = read(name)
  assert weights.image_shape == tuple(READ[name]['image'])
  check_logits(weights, READ[name])
  assert huggingface.recognise(READ[name]['shapes'])
  if 'row' in READ[name]:
    check_row(weights, READ[name])


@pytest.mark.parametrize(
  'name, gelu, eps, size, classes',
  [
    ('classifier', 'exact', 1e-12, None, 5),
    ('tanh', 'tanh', 0.1, None, 5),
    ('pooler', 'exact', 1e-12, 20, None),
    ('no_pooler', 'exact', 1e-12, None, None),
  ],
)
def test_the_architecture_is_read(name, gelu, eps, size, classes):
  model = read(name).model
  assert (model.block.gelu, model.block.norm_eps) == (gelu, eps)
  assert model.head.representation_size == size
  assert (model.num_classes, model.num_heads) == (classes, 3)
  assert model.pooling == ClassToken()


@pytest.mark.parametrize('name', ['classifier', 'pooler'])
def test_names_of_files_and_of_memory_are_both_read(name):
  file, config, other = fill(READ[name]), READ[name]['config'], {}
  for key, value in file.items():
    for old, new in IN_MEMORY.items():
      key = key.replace(old, new)
    other[key] = value
  assert not other.keys() & {k for k in file if 'encoder' in k}
  expected = read(name).params
  for arrays in (file, other):
    bare = {k.removeprefix('vit.'): v for k, v in arrays.items()}
    for variant in (arrays, bare):
      assert huggingface.recognise(variant)
      assert equal(huggingface.read(variant, config).params, expected)


def test_what_the_logits_do_not_depend_on_is_left_out():
  file = fill(READ['classifier'])
  more = file | {
    'vit.pooler.dense.weight': np.ones((24, 24), np.float32),
    'vit.pooler.dense.bias': np.ones(24, np.float32),
    'vit.embeddings.mask_token': np.ones((1, 1, 24), np.float32),
  }
  weights = huggingface.read(more, READ['classifier']['config'])
  assert equal(weights.params, read('classifier').params)
  assert len(weights.notes) == 3
  assert all('do not depend' in note for note in weights.notes)


def test_without_a_config():
  file = fill(READ['classifier'])
  weights = huggingface.read(file, num_heads=3, grid=(3, 4))
  assert weights.model == read('classifier').model
  assert weights.class_names is None
  with pytest.raises(ValueError, match=r'12 patches.*grid='):
    huggingface.read(file, num_heads=3)
  weights = read('classifier', gelu='tanh', norm_eps=1e-6)
  assert weights.model.block.gelu == 'tanh'
  assert weights.model.block.norm_eps == 1e-6


@pytest.mark.parametrize('name', OURS)
def test_what_is_written_is_what_transformers_loaded(name):
  """from_pretrained and AutoImageProcessor did, when it was recorded."""
  weights = seeded.model_weights(OURS[name])
  arrays, files = huggingface.write(weights)
  assert files == WRITTEN[name]['files']
  assert seeded.digest(arrays) == WRITTEN[name]['digest']
  check_logits(weights, WRITTEN[name])
  check_row(weights, WRITTEN[name])


@pytest.mark.parametrize('name', OURS)
def test_writing_and_reading_gives_the_same(name):
  weights = seeded.model_weights(OURS[name])
  arrays, files = huggingface.write(weights)
  config = files['config.json']
  config['preprocessor_config'] = files['preprocessor_config.json']
  again = huggingface.read(arrays, config)
  if name in ('exact', 'layerscale'):  # written as a table, and folded
    check_logits(again, WRITTEN[name])
    assert ('LayerScale' in str(weights.notes)) == (name == 'layerscale')
  else:
    assert equal(again.params, weights.params)
    assert again.model == weights.model
  for key in ('image_shape', 'transforms', 'class_names', 'activation'):
    assert getattr(again, key) == getattr(weights, key)
  for key in ('mean', 'std'):
    np.testing.assert_allclose(
      getattr(again.preprocess, key),
      getattr(weights.preprocess, key),
      rtol=1e-9,
    )


@pytest.mark.parametrize('name', READ)
def test_reading_and_writing_gives_the_file_back(name):
  arrays, _ = huggingface.write(read(name))
  assert equal(arrays, fill(READ[name]))


def test_use_travels():
  assert read('classifier').class_names == [f'class {i}' for i in range(5)]
  weights = read('tanh')
  assert weights.class_names is None  # LABEL_0, ... stand for none
  assert weights.activation == 'sigmoid'
  _, files = huggingface.write(weights)
  config = files['config.json']
  assert config['problem_type'] == 'multi_label_classification'
  assert config['id2label'] == READ['tanh']['config']['id2label']
  small, crop = read('square').transforms
  assert small == ResizeSmall(16, interpolation='bicubic', antialias=True)
  assert crop == CentralCrop((12, 12))
  config = READ['square']['config']
  processor = config['preprocessor_config']
  _, files = huggingface.write(read('square'))
  assert files['preprocessor_config.json'] == processor
  for change, note in [
    ({'do_center_crop': False}, True),
    ({'do_resize': False, 'do_center_crop': False}, False),
    ({'size': 12, 'do_center_crop': False}, False),
  ]:
    weights = read(
      'square', config | {'preprocessor_config': processor | change}
    )
    assert ('makes another size' in str(weights.notes)) == note
  raw = {'do_rescale': False, 'do_normalize': False}
  weights = read('square', config | {'preprocessor_config': processor | raw})
  assert weights.preprocess.mean == 0 and weights.preprocess.std == 1


@pytest.mark.parametrize(
  'change, said',
  [
    ({'model_type': 'deit'}, "'deit'"),
    ({'hidden_act': 'quick_gelu'}, 'quick_gelu'),
    ({'num_attention_heads': 5}, 'num_heads'),
    ({'pooler_act': 'relu'}, 'pooler_act'),
  ],
)
def test_a_config_of_another_model_is_refused(change, said):
  with pytest.raises(ValueError, match=said):
    read('classifier', READ['classifier']['config'] | change)


def test_other_arrays_are_refused_by_name():
  file = fill(READ['classifier'])
  less = {k: v for k, v in file.items() if 'layer.0.output' not in k}
  less['vit.embeddings.distillation_token'] = np.zeros((1, 1, 24), np.float32)
  with pytest.raises(ValueError) as e:
    huggingface.read(less, READ['classifier']['config'])
  for name in ('weight (24, 50)', 'bias (24,)'):
    assert f'+ encoder.layer.0.output.dense.{name}' in str(e.value)
  assert '- embeddings.distillation_token' in str(e.value)

"""Files of timm and transformers: read, they compute the same; written, too.

The goldens were recorded by golden/record_timm_formats.py and record_hf.py.
"""

import dataclasses

import jax
import numpy as np
import pytest
import seeded
from nightly import nightly
from PIL import Image
from small import equal, logits
from tiny import recorded
from written import OURS

from vit_jax import tree
from vit_jax.data.transforms import CentralCrop, Resize, ResizeSmall
from vit_jax.models.dense import Gelu, Normalize
from vit_jax.models.pooling import Mean
from vit_jax.models.posemb import Learned, SinCos2d
from vit_jax.models.vit import PatchEmbedding, VisionTransformer
from vit_jax.weights import bundle, family, huggingface, image_configs, timm
from vit_jax.weights.families import timm_vit

FORMATS = {'timm': timm, 'hf': huggingface}
CASES = {format: recorded(f'formats_{format}') for format in FORMATS}
READ = [(format, name) for format in FORMATS for name in CASES[format]['read']]
WRITTEN = [(format, name) for format in FORMATS for name in OURS[format]]
# Of the largest logit; the largest found: 5e-7 of ViTs, 1.1e-6 of ResNets.
# timm's hybrids have other epsilons; 5e-6 was found.
BOUNDS = {'hybrid': 1.5e-5}
BOUND = 2e-6
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


def fill(format, name):
  """Return the arrays that were given to a recorded model."""
  shapes = CASES[format]['read'][name]['shapes']
  return seeded.weights({k: tuple(v) for k, v in shapes.items()})


def config_of(format, name):
  return CASES[format]['read'][name]['config']


def read(format, name, arrays=None, change=None, **options):
  """Return Weights of a recorded file, with other arrays or config."""
  config = config_of(format, name)
  if config is None:
    options['image_size'] = CASES[format]['read'][name]['image'][:2]
    if name == 'hybrid':
      options['num_heads'] = 3
  if change is not None:
    config = config | change
  arrays = fill(format, name) if arrays is None else arrays
  return FORMATS[format].read(arrays, config, **options)


def check_logits(weights, case, name):
  images = seeded.images(weights.image_shape)
  params = {'params': tree.unflatten(weights.params)}
  # Without any optimization some CPUs are 10 times less precise, 2.3e-6.
  fast = {'xla_backend_optimization_level': 1}
  found = jax.jit(weights.model.apply, compiler_options=fast)(params, images)
  expected = np.asarray(case['logits'])
  error = np.abs(np.asarray(found) - expected).max()
  assert error <= BOUNDS.get(name, BOUND) * np.abs(expected).max()


def check_row(weights, case):
  """A picture comes out of our preprocessing as it came out of theirs."""
  picture = seeded.picture()
  for transform in weights.transforms:
    picture = transform(picture, None)
  made = np.asarray(weights.preprocess(picture))
  assert made.shape == weights.image_shape
  row = np.asarray(seeded.middle_row(made.transpose(2, 0, 1)))
  level = 1 / 255 / 0.224  # they and we round to uint8 at times
  np.testing.assert_allclose(row, np.asarray(case['row']), atol=1.6 * level)


# The contract of both formats.


@pytest.mark.parametrize(('format', 'name'), READ)
def test_what_is_read_is_for_the_same_images(format, name):
  case, weights = CASES[format]['read'][name], read(format, name)
  assert weights.image_shape == tuple(case['image'])
  assert family.recognise(FORMATS[format].FAMILIES, case['shapes'])
  if 'row' in case:
    check_row(weights, case)


BY_DAY = [  # with what test_families.py runs by default: each line
  *[('timm', x) for x in ('bit', 'hybrid', 'mixer', 'no_positions')],
  *[('timm', 'registers_avg'), ('hf', 'classifier'), ('hf', 'tanh')],
]


@pytest.mark.parametrize(('format', 'name'), nightly(READ, but=BY_DAY))
def test_what_is_read_computes_the_same(format, name):
  check_logits(read(format, name), CASES[format]['read'][name], name)


@pytest.mark.slow
@pytest.mark.parametrize(('format', 'name'), WRITTEN)
def test_what_was_loaded_computes_the_same(format, name):
  weights = seeded.model_weights(OURS[format][name])
  check_logits(weights, CASES[format]['written'][name], name)


@pytest.mark.parametrize(('format', 'name'), WRITTEN)
def test_what_is_written_is_what_was_loaded(format, name):
  """timm and transformers loaded it when it was recorded; so do we."""
  fields, case = OURS[format][name], CASES[format]['written'][name]
  weights = seeded.model_weights(fields)
  arrays, files = FORMATS[format].write(weights)
  expected = case.get('files', {'config.json': case.get('config')})
  assert files == expected
  assert seeded.digest(arrays) == case['digest']
  check_row(weights, case)

  config = files['config.json']
  if format == 'hf':
    config = config | {'preprocessor_config': files['preprocessor_config.json']}
  again = FORMATS[format].read(arrays, config)
  if fields.get('posemb') == SinCos2d():
    assert type(again.model.posemb) is Learned  # written as a table
    check_logits(again, case, name)
  else:
    path = 'block.layerscale_init'  # arrays do not show the value
    scale = {path: 1e-5} if path in fields else {}
    model = bundle.replace(weights.model, **scale)
    assert not bundle.differences(again.model, model)
    assert again.model == model.clone(posemb=again.model.posemb)
    assert equal(again.params, weights.params)
  for key in ('image_shape', 'class_names', 'activation'):
    assert getattr(again, key) == getattr(weights, key)
  *others, crop = weights.transforms
  if format == 'timm':
    crop = dataclasses.replace(crop, rounding='even')
  assert again.transforms == (*others, crop)
  for key in ('mean', 'std'):
    found, expected = (getattr(x.preprocess, key) for x in (again, weights))
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_the_architecture_is_read():
  """Check fields that do not change the logits, and dtypes."""
  assert read('timm', 'avg_class_token').model.pooling == Mean(class_token=True)
  assert read('timm', 'deit3').model.block.layerscale_init == 1e-5
  pooler, bare = read('hf', 'pooler').model, read('hf', 'no_pooler').model
  assert (pooler.head.representation_size, pooler.num_classes) == (20, None)
  assert (bare.head.representation_size, bare.num_classes) == (None, None)


@pytest.mark.parametrize(
  'architecture, width, heads, gelu',
  [
    ('vit_base_patch16_224', 768, 12, 'exact'),
    ('vit_base_patch16_gap_224', 768, 16, 'exact'),
    ('vit_small_patch32_224', 384, 6, 'exact'),
    ('vit_little_patch16_reg4_gap_256', 320, 5, 'exact'),
    ('vit_betwixt_patch16_reg4_gap_256', 640, 10, 'exact'),
    ('vit_wee_patch16_reg1_gap_256', 256, 4, 'exact'),
    ('test_vit2', 64, 2, 'exact'),
    ('test_vit4', 96, 3, 'exact'),
    ('vit_large_patch16_siglip_512', 1024, 16, 'tanh'),
    ('vit_large_patch16_siglip_256', 1024, 16, 'exact'),
    ('vit_giantopt_patch16_siglip_gap_256', 1536, 16, 'tanh'),
    ('vit_so400m_patch16_siglip_256', 1152, 16, 'tanh'),
    ('vit_base_patch32_siglip_256', 768, 12, 'tanh'),
    ('vit_base_patch16_siglip_256', 768, 12, 'exact'),
  ],
)
def test_the_name_of_an_architecture_says(architecture, width, heads, gelu):
  """Without model_args: heads of timm's models, and tanh where timm has it."""
  sizes = {'width': width, 'mlp_dim': 8, 'num_heads': 1, 'depth': 1}
  model = VisionTransformer(**sizes, embedding=PatchEmbedding(8))
  shapes = bundle.shapes(model, (16, 16, 3))
  zeros = {k: np.zeros(x.shape, np.float32) for k, x in shapes.items()}
  arrays, _ = timm.write(bundle.Weights(model, zeros, (16, 16, 3)))
  config = {'architecture': architecture, 'num_classes': 0}
  model = timm.read(arrays, config).model
  assert (model.num_heads, model.block.mlp.form) == (heads, gelu)


@pytest.mark.parametrize(
  ('format', 'name'), [('timm', 'token'), ('hf', 'classifier')]
)
def test_without_a_config(format, name):
  file, options = fill(format, name), {'num_heads': 3, 'grid': (3, 4)}
  weights = FORMATS[format].read(file, **options)
  assert equal(weights.params, read(format, name).params)
  assert weights.model == read(format, name).model
  assert weights.class_names is None
  for lost, match in (('grid', r'patches.*grid='), ('num_heads', '--set num_')):
    with pytest.raises(ValueError, match=match):
      given = {k: x for k, x in options.items() if k != lost}
      FORMATS[format].read(file, **given)
  with pytest.raises(ValueError, match='num_heads'):
    FORMATS[format].read(file, **options | {'num_heads': 5})


def test_fields_of_the_user_come_first():
  for case in (('timm', 'token'), ('hf', 'classifier')):
    block = read(*case, block={'mlp': Gelu(), 'norm_eps': 1e-5}).model.block
    assert (block.mlp.form, block.norm_eps) == ('tanh', 1e-5)
    assert read(*case, block=block).model.block == block  # given whole
    given = {'block.mlp': Gelu(), 'block.norm_eps': 1e-5}
    assert read(*case, **given).model.block == block
  weights = read('timm', 'token', pooling=Mean())
  assert weights.model.pooling == Mean(class_token=True)


@pytest.mark.parametrize(
  ('format', 'name', 'change', 'said'),
  [
    ('timm', 'token', {'architecture': 'vit_b_xp_224'}, 'No family .*_xp_'),
    ('timm', 'token', {'architecture': 'test_vit3'}, "reads 'test_vit3'"),
    ('timm', 'avg', {'model_args': {'global_pool': 'avgmax'}}, 'avgmax'),
    ('timm', 'token', {'model_args': {'act_layer': 'silu'}}, 'silu'),
    *(
      ('timm', 'token', {'model_args': {name: 'other'}}, name)
      for name in timm_vit.ARGS
    ),
    ('timm', 'token', {'model_args': {'num_heads': 5}}, 'num_heads'),
    ('hf', 'classifier', {'model_type': 'swin'}, "'swin'"),
    ('hf', 'classifier', {'hidden_act': 'relu'}, 'relu'),
    ('hf', 'classifier', {'num_attention_heads': 5}, 'num_heads'),
    ('hf', 'pooler', {'pooler_act': 'relu'}, 'pooler_act'),
  ],
)
def test_a_config_of_another_computation_is_refused(format, name, change, said):
  with pytest.raises(ValueError, match=said):
    read(format, name, change=change)


@pytest.mark.parametrize(
  ('format', 'name', 'change', 'said'),
  [
    ('timm', 'token', {'dist_token': (1, 1, 24)}, 'pos_embed|11 patches'),
    ('timm', 'token', {'norm_pre.weight': (24,)}, r'- norm_pre\.weight'),
    ('timm', 'token', {'blocks.0.mlp.norm.bias': (8,)}, '- blocks.0.mlp.norm'),
    ('timm', 'token', {'pos_embed': None}, 'posemb=None'),
    ('timm', 'token', {'norm.weight': (25,)}, r'\+ norm\.weight \(24,\)'),
    ('timm', 'bit', {'norm.weight': None}, r'- norm\.bias'),
    ('timm', 'mixer', {'head.weight': (6, 24)}, r'\+ head\.bias \(6,\)'),
    (
      'hf',
      'classifier',
      {'vit.encoder.layer.0.output.dense.weight': None},
      r'\+ encoder\.layer\.0\.output\.dense\.weight \(24, 50\)',
    ),
    ('hf', 'classifier', {'vit.embeddings.x': (1, 1, 24)}, '- embeddings.x'),
  ],
)
def test_other_arrays_are_refused_by_name(format, name, change, said):
  file = fill(format, name)
  for key, shape in change.items():
    file.pop(key, None)
    if shape:
      file[key] = np.zeros(shape, np.float32)
  with pytest.raises(ValueError, match=said):
    read(format, name, file)


# timm.


def test_a_class_token_that_is_not_pooled_stays():
  """The logits above show where each row of positions belongs."""
  weights = read('timm', 'deit3')  # no_embed_class
  assert weights.model.posemb == Learned(
    prefix=False, resize_method='bicubic_antialias'
  )
  assert 'cls_pos_embedding' not in weights.params
  weights = read('timm', 'avg_class_token')
  assert {'cls', 'cls_pos_embedding'} < weights.params.keys()


def test_other_forms_of_the_same_arrays():
  """No biases of queries, keys and values."""
  file = fill('timm', 'token')
  zero = {k: np.zeros_like(v) for k, v in file.items() if '.qkv.bias' in k}
  less = {k: v for k, v in file.items() if k not in zero}
  weights = read('timm', 'token', less)
  assert weights.model.block.biases == ('out', 'mlp')
  same = read('timm', 'token', file | zero)
  np.testing.assert_allclose(logits(weights), logits(same), atol=1e-5)


def test_use_of_timm_travels():
  weights = seeded.model_weights({}, activation='sigmoid')
  _, files = timm.write(weights)
  assert files['config.json']['activation'] == 'sigmoid'
  weights = read('timm', 'token')
  assert weights.class_names == [f'class {i}' for i in range(5)]
  assert weights.preprocess.mean == 127.5
  config = config_of('timm', 'token')
  data = config['pretrained_cfg']
  square = {'crop_pct': 0.9, 'interpolation': 'lanczos'}
  change = {
    'pretrained_cfg': data | square | {'input_size': [3, 16, 16]},
    'model_args': config['model_args'] | {'img_size': 16},
    'label_names': None,
  }
  table = np.zeros((1, 33, 24), np.float32)
  arrays = fill('timm', 'token') | {'pos_embed': table}
  weights = read('timm', 'token', arrays, change)
  assert weights.transforms == (
    ResizeSmall(17, 'lanczos', antialias=True, rounding='down'),  # 17.8
    CentralCrop(16, rounding='even'),
  )
  assert weights.class_names is None
  older = {'architecture': 'vit_base_patch16_224', 'labels': list('abcde')}
  weights = timm.read(fill('timm', 'token'), older | data, num_heads=3)
  assert weights.class_names == list('abcde')


def test_ratios_of_any_width_give_the_hidden_width():
  """timm rounds the product down, and 49 * (1 / 49) is below 1."""
  for width in (29, 49):
    for hidden in range(1, 4 * width):
      assert int(width * timm_vit.ratio(hidden, width)) == hidden


def test_grey_images_get_the_mean_over_colours():
  use = image_configs.use((8, 8, 1), 8, 'bilinear', **image_configs.IMAGENET)
  found = use['preprocess'].mean, use['preprocess'].std
  np.testing.assert_allclose(found, (0.449 * 255, 0.226 * 255), rtol=1e-9)


def test_what_configs_leave_out_is_the_default():
  file = fill('timm', 'token')
  older = {'input_size': [3, 12, 8], 'num_classes': 5}
  weights = timm.read(file, older, num_heads=3)
  resize, crop = weights.transforms
  assert resize == Resize((13, 9), 'bicubic', antialias=True)
  assert crop == CentralCrop((12, 8), rounding='even')
  np.testing.assert_allclose(
    weights.preprocess.mean, (123.675, 116.28, 103.53), rtol=1e-9
  )
  np.testing.assert_allclose(
    weights.preprocess.std, (58.395, 57.12, 57.375), rtol=1e-9
  )
  change = {'preprocessor_config': {}}
  weights = read('hf', 'square', change=change)
  assert weights.preprocess == Normalize(127.5, 127.5)
  assert weights.transforms == (Resize((12, 12), 'bilinear', antialias=True),)
  assert 'another size' in str(weights.notes)
  weights = read('hf', 'square', change={'preprocessor_config': None})
  assert weights.transforms == (Resize((12, 12), 'bilinear', antialias=True),)


@pytest.mark.parametrize(
  ('config', 'transforms'),
  [
    (  # of CLIP, before sizes had names
      {
        'feature_extractor_type': 'CLIPFeatureExtractor',
        'size': 16,
        'crop_size': 12,
      },
      (ResizeSmall(16, 'bicubic', True, 'down'), CentralCrop((12, 12))),
    ),
    (  # of DINOv2, whose positions are for larger images than it makes
      {
        'image_processor_type': 'BitImageProcessor',
        'size': {'shortest_edge': 8},
        'crop_size': {'height': 6, 'width': 6},
      },
      (ResizeSmall(16, 'bicubic', True, 'down'), CentralCrop((12, 12))),
    ),
    (
      {'do_center_crop': None, 'size': {'shortest_edge': 12}},
      (Resize((12, 12), 'bilinear', antialias=True),),
    ),
  ],
)
def test_image_processors_decide_how_images_are_resized(config, transforms):
  config = {'do_center_crop': True, **config}
  weights = read('hf', 'square', change={'preprocessor_config': config})
  assert weights.transforms == transforms


@pytest.mark.parametrize('shape', [(31, 43), (43, 30), (24, 17)])
def test_images_are_cut_as_by_transformers(shape):
  """Sides are int(size * long / short), and offsets (side - 12) // 2."""
  image = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
  height, width = (int(16 * side / min(shape)) for side in shape)
  whole = Image.fromarray(image).resize((width, height), Image.BICUBIC)
  y, x = (height - 12) // 2, (width - 12) // 2
  use = image_configs.use((12, 12, 3), 16, 'bicubic', **image_configs.IMAGENET)
  for transform in use['transforms']:
    image = transform(image, None)
  np.testing.assert_array_equal(image, np.asarray(whole)[y:, x:][:12, :12])


@pytest.mark.parametrize(
  'transforms, large, mode, method, notes',
  [
    ((Resize(16, 'bicubic', antialias=True),), 16, 'squash', 'bicubic', 0),
    ((Resize(16),), 16, 'squash', 'bilinear', 1),
    ((ResizeSmall(32), CentralCrop(16)), 32, 'center', 'bilinear', 1),
    # 24 / (24 / 59) is rounded down to 58.99...
    ((ResizeSmall(59), CentralCrop(24)), 59, 'center', 'bilinear', 1),
    ((Resize(24, 'nearest'), CentralCrop(16)), 24, 'squash', 'nearest', 0),
    ((Resize(24, 'nearest'),), 16, 'squash', 'bilinear', 2),
    ((ResizeSmall(24), CentralCrop(8)), 16, 'squash', 'bilinear', 2),
  ],
)
def test_transforms_are_written(transforms, large, mode, method, notes):
  size = 24 if large == 59 else 16
  fields = {'image_shape': (size, size, 3), 'embedding': PatchEmbedding(4)}
  weights = seeded.model_weights(fields, transforms=transforms)
  _, files = timm.write(weights)
  data = files['config.json']['pretrained_cfg']
  assert (data['crop_mode'], data['interpolation']) == (mode, method)
  assert int(size / data['crop_pct']) == large
  assert len(weights.notes) == notes
  about = [x for x in weights.notes if 'antialiased' in x]
  assert all('Predictions may change' in x for x in about)


# transformers.


@pytest.mark.parametrize('name', ['classifier', 'pooler'])
def test_names_of_files_and_of_memory_are_both_read(name):
  file, config, other = fill('hf', name), config_of('hf', name), {}
  for key, value in file.items():
    for old, new in IN_MEMORY.items():
      key = key.replace(old, new)
    other[key] = value
  assert not other.keys() & {k for k in file if 'encoder' in k}
  expected = read('hf', name).params
  for arrays in (file, other):
    bare = {k.removeprefix('vit.'): v for k, v in arrays.items()}
    for variant in (arrays, bare):
      assert family.recognise(huggingface.FAMILIES, variant)
      assert equal(huggingface.read(variant, config).params, expected)


def test_what_the_logits_do_not_depend_on_is_left_out():
  more = fill('hf', 'classifier') | {
    'vit.pooler.dense.weight': np.ones((24, 24), np.float32),
    'vit.pooler.dense.bias': np.ones(24, np.float32),
    'vit.embeddings.mask_token': np.ones((1, 1, 24), np.float32),
  }
  weights = read('hf', 'classifier', more)
  assert equal(weights.params, read('hf', 'classifier').params)
  (note,) = weights.notes
  assert '1 arrays left out' in note


def test_use_of_transformers_travels():
  weights = read('hf', 'classifier')
  assert weights.class_names == [f'class {i}' for i in range(5)]
  weights = read('hf', 'tanh')
  assert weights.class_names is None  # LABEL_0, ... stand for none
  assert weights.activation == 'sigmoid'
  _, files = huggingface.write(weights)
  config = files['config.json']
  assert config['problem_type'] == 'multi_label_classification'
  assert config['id2label'] == config_of('hf', 'tanh')['id2label']
  small, crop = read('hf', 'square').transforms
  assert small == ResizeSmall(16, 'bicubic', True, 'down')
  assert crop == CentralCrop((12, 12))
  processor = config_of('hf', 'square')['preprocessor_config']
  _, files = huggingface.write(read('hf', 'square'))
  assert files['preprocessor_config.json'] == processor
  for change, note in [
    ({'do_center_crop': False}, True),
    ({'size': 12, 'do_center_crop': False}, False),
    ({'do_rescale': False, 'do_normalize': False}, False),
  ]:
    change = {'preprocessor_config': processor | change}
    weights = read('hf', 'square', change=change)
    assert ('makes another size' in str(weights.notes)) == note
  assert weights.preprocess.mean == 0 and weights.preprocess.std == 1

"""Families of timm and transformers: features as recorded, and back."""

import json
import re

import family_cases
import numpy as np
import pytest
from nightly import nightly
from small import equal
from tiny import GOLDEN, golden

from vit_jax import pretrained
from vit_jax.models.dense import Normalize
from vit_jax.types import UserError
from vit_jax.weights import array_files, bundle, formats, original, timm


def load(name):
  """Return a recorded case, what is said about it, and arrays of its file."""
  recorded = golden(f'families/{name}')
  about = json.loads(str(recorded.pop('about')))
  return recorded, about, family_cases.arrays_of(about, recorded)


CASES = sorted(path.stem for path in GOLDEN.glob('families/*.npz'))
# Together they run each line that reads, builds or writes a family.
BY_DAY = """
  hf_beit hf_clip hf_dinov2 hf_dinov3 hf_mlcd hf_pixio
  hf_siglip2_naflex hf_vit_features original_clip original_dinov3
  original_vit5 timm_aimv2 timm_beit timm_beit3 timm_clip_quick timm_deepseek
  timm_deit timm_eva02_clip timm_pe_core timm_post_norm timm_qwen3_shard
  timm_radio_corners timm_registers timm_rope_mixed_ape
"""


@pytest.mark.parametrize('name', nightly(CASES, but=BY_DAY.split()))
def test_features_are_those_of_the_source(name):
  recorded, about, arrays = load(name)
  family_cases.check(about, recorded, arrays)


@pytest.mark.parametrize('name', CASES)
def test_arrays_come_back(name):
  _, about, arrays = load(name)
  weights = family_cases.read(about, arrays)
  plain = not re.search('flexivit|radio', name)
  assert weights.patch_resize == ('bicubic_antialias' if plain else 'bilinear')
  if about['back']:
    family_cases.check_back(about, weights, arrays)


def test_a_config_of_openclip_says_which_gelu_and_pixels():
  _, about, arrays = load('original_clip')
  images = {'mean': [0.5, 0.5, 0.5], 'std': [0.5, 0.5, 0.5]}
  for model, form in (({}, 'exact'), ({'quick_gelu': True}, 'quick')):
    config = {'model_cfg': model | {'embed_dim': 5}, 'preprocess_cfg': images}
    weights = original.read(arrays, config, **about['options'])
    assert weights.model.block.mlp.form == form
    assert weights.preprocess == Normalize()
  weights = original.read(arrays, None, **about['options'])
  assert weights.preprocess.mean[2] == pytest.approx(0.40821073 * 255)


def test_what_authors_publish_is_written_as_timm_has_it():
  """There, CLIP's projection and patches have a bias."""
  recorded, about, arrays = load('original_clip')
  arrays, texts = timm.write(family_cases.check(about, recorded, arrays)[0])
  about |= {'format': 'timm', 'config': texts['config.json'], 'options': {}}
  family_cases.check(about, recorded, arrays)


def released(name, folder, rename=str, more=()):
  """Write the seeded arrays of a recorded family; return its config."""
  _, about, arrays = load(name)
  arrays = {rename(k): x for k, x in arrays.items()} | dict(more)
  array_files.write(folder / 'model.safetensors', arrays)
  return about['config']


@pytest.mark.parametrize('at', ['', 'snapshots/0a1b', 'checkpoint-500'])
def test_folders_of_a_model_an_adapter_or_a_processor(at, tmp_path):
  folder = tmp_path / at
  folder.mkdir(parents=True, exist_ok=True)
  images = {'image_mean': [0.2] * 3, 'image_std': [0.7] * 3, 'resample': 3}
  processor = folder / 'processor_config.json'
  processor.write_text(json.dumps({'image_processor': images}))
  config = released('hf_vit', folder)
  (folder / 'config.json').write_text(json.dumps(config))
  weights = formats.read(tmp_path)
  assert weights.preprocess == Normalize(0.2 * 255, 0.7 * 255)
  assert 'assumed' not in str(weights.notes)
  processor.unlink()
  weights = formats.read(tmp_path)
  assert 'without resample, image_mean, image_std: im' in str(weights.notes)
  assert weights.transforms[0].antialias
  released('hf_vit', folder, more={'vit.layers.0.lora_A.x': np.zeros(4, 'f')})
  with pytest.raises(UserError, match=r'LoRA.*merge_and_unload'):
    formats.read(tmp_path)


@pytest.mark.parametrize(
  'name, change',
  [
    ('timm_token', {'architecture': 3}),
    ('timm_token', {'model_args': 'x'}),
    ('timm_token', {'pretrained_cfg': [1]}),
    ('hf_vit', {'id2label': 5}),
    ('hf_vit', {'hidden_act': ['gelu']}),
    ('hf_dinov3', {'image_size': {'a': 1}}),
    ('hf_dinov3', {'layer_norm_eps': 'x'}),
  ],
)
def test_a_value_of_another_type_is_one_error(name, change, tmp_path):
  config = released(name, tmp_path) | change
  (tmp_path / 'config.json').write_text(json.dumps(config))
  with pytest.raises(UserError, match=r'config\.json, an array or an option'):
    formats.read(tmp_path)


def test_without_a_config_the_error_and_the_notes_say_so(tmp_path):
  released('timm_dinov3', tmp_path)
  with pytest.raises(UserError, match=r"Put the model's config\.json next to"):
    formats.read(tmp_path)
  config = released('timm_post_norm', tmp_path)
  options = {'num_heads': 3, 'grid': (3, 4)}
  weights = formats.read(tmp_path, **options)
  notes = '\n'.join(weights.notes)
  for text in ('assumed', 'norms before attention', 'std=127.5', 'Mean(cl'):
    assert text in notes
  assert not weights.model.block.post_norm
  (tmp_path / 'config.json').write_text(json.dumps(config))
  weights = formats.read(tmp_path)
  assert weights.model.block.post_norm and 'assumed' not in str(weights.notes)
  (tmp_path / 'config.json').write_text('[' * 100_000)
  with pytest.raises(UserError, match='cannot be read as JSON'):
    formats.read(tmp_path)


BARE = {'num_heads': 3, 'grid': (3, 4)}
PREFIXES = 'module. _orig_mod. module._orig_mod. model.backbone. 0. timm_model.'
LAYERS = r'\1.\1. 0.\1. \1._orig_mod.'


@pytest.mark.parametrize('new', (PREFIXES + ' ' + LAYERS).split())
@pytest.mark.parametrize('name', ['timm_token', 'hf_vit'])
def test_names_of_wrappers_and_chunks_are_found(name, new, tmp_path):
  at = '^' if new in PREFIXES else r'(?<=blocks\.)(.)\.'
  released(name, tmp_path, lambda x: re.sub(at, new, x))
  weights = formats.read(tmp_path, **BARE)
  released(name, tmp_path)
  assert equal(weights.params, formats.read(tmp_path, **BARE).params)
  assert at != '^' or re.search(rf'  {new}.* read as', weights.notes[0])


TIMM_VLM = r'^encoder\.(?!layer|rel)'


def test_names_of_all_families_are_found_below_a_prefix():
  for path in GOLDEN.glob('families/*.npz'):
    names = json.loads(str(np.load(path)['about']))['shapes']
    found, _ = formats._unwrapped({f'a.net.{x}': x for x in names}, None)
    assert found == {re.sub(TIMM_VLM, '', x): x for x in names}, path


def test_of_several_models_one_is_chosen(tmp_path):
  more = {f'student.{k}': 0 * x for k, x in load('timm_token')[2].items()}
  released('timm_token', tmp_path, 'teacher.backbone.{}'.format, more)
  for prefix in None, 'ema.':
    with pytest.raises(UserError, match=r"'student\.', 'teacher\.backbone\.'"):
      formats.read(tmp_path, prefix=prefix, **BARE)
  weights = formats.read(tmp_path, prefix='teacher.', **BARE)
  assert weights.params['cls'].any()
  assert f'{len(more)} other arrays left out' in weights.notes[1]


@pytest.mark.parametrize(
  'name, at, new, said',
  [
    ('timm_token', r'(?<=blocks\.)(.)', r'\1.0', r'blocks\.1\.0\.'),
    ('timm_token', r'(?<=blocks\.)1', '0._orig_mod', r'blocks\.0\._orig_mod'),
    ('hf_vit', r'^vit\.encoder\.layer\.1', 'encoder.layer.0', r'and vit'),
  ],
)
def test_names_that_become_one_are_refused(name, at, new, said, tmp_path):
  """Such as those of layers that are numbered from 0 in each chunk."""
  released(name, tmp_path, lambda x: re.sub(at, new, x))
  with pytest.raises(UserError, match=f'{said}.* would both be read as '):
    formats.read(tmp_path, **BARE)


LLM = {'lm_head.weight': 1, 'norm.weight': 1, 'layers.0.attn.wo.weight': 2}


@pytest.mark.parametrize(
  'name, prefix, config',
  [
    ('timm_qwen3_shard', 'model.visual.', {'vision_config': {'num_heads': 3}}),
    ('timm_qwen3_shard', 'vlm.model.visual.', None),
    ('timm_deepseek_shard', 'vision.', {'num_attention_heads': 64}),
  ],
)
def test_one_shard_of_an_llm_is_enough(name, prefix, config, tmp_path):
  _, about, arrays = load(name)
  arrays = {prefix + k: x for k, x in arrays.items()}
  more = {k: np.ones([8] * n, np.float32) for k, n in LLM.items()}
  array_files.write(tmp_path / 'b.safetensors', arrays | more)
  index = dict.fromkeys(arrays | more, 'b.safetensors')
  index |= {'layers.1.attn.wo.weight': 'a.safetensors'}  # there is no such file
  path = tmp_path / 'model.safetensors.index.json'
  path.write_text(json.dumps({'weight_map': index}))
  if config:
    config |= {'model_type': 'llm', 'rms_norm_eps': 1e-5}
    (tmp_path / 'config.json').write_text(json.dumps(config))
  given = {} if config and 'vision_config' in config else {'num_heads': 3}
  weights = formats.read(tmp_path, **given)
  alone = family_cases.FORMATS['timm'].read(
    {k.removeprefix(prefix): x for k, x in arrays.items()},
    about['config'],
    num_heads=3,
  )
  assert equal(weights.params, alone.params) and weights.model == alone.model
  assert weights.preprocess == Normalize() and '3 other' in weights.notes[1]
  if given:
    with pytest.raises(UserError, match='the number of heads'):
      formats.read(tmp_path)
  # timm names the arrays otherwise, and the patches are a convolution.
  written, texts = timm.write(weights)
  again = timm.read(written, texts['config.json'])
  assert equal(again.params, weights.params)
  assert not bundle.differences(again.model, weights.model)


def test_the_head_next_to_an_encoder_is_found(tmp_path):
  config = released('timm_qwen3', tmp_path, 'module.{}'.format)
  config['model_args']['final_norm'] = False
  (tmp_path / 'config.json').write_text(json.dumps(config))
  weights = formats.read(tmp_path)
  assert weights.model.num_classes == 5
  assert not weights.model.pooling.unit_norm
  _, texts = timm.write(weights)
  assert texts['config.json']['model_args']['final_norm'] is False


def test_pixels_of_c_radio_are_normalised_as_its_config_says(tmp_path):
  config = released('hf_radio', tmp_path) | {'norm_mean': [0.5, 0.25, 0.5]}
  (tmp_path / 'config.json').write_text(json.dumps(config))
  name = 'preprocessor_config.json'
  (tmp_path / name).write_text(json.dumps({'do_normalize': False, 'size': 12}))
  weights = formats.read(tmp_path)
  assert weights.preprocess.mean == (127.5, 63.75, 127.5)
  formats.write(weights, tmp_path / 'hf', 'hf')
  arrays = array_files.read(tmp_path / 'hf' / 'model.safetensors')
  assert arrays['radio_model.input_conditioner.norm_mean'][1] == 0.25
  assert arrays['radio_model.summary_idxs'].dtype == np.int64
  assert formats.read(tmp_path / 'hf').preprocess == weights.preprocess


@pytest.mark.parametrize('name', ['head.fc.', 'classifier.0.', 'fc.'])
def test_a_head_of_unknown_name_is_left_out_for_a_new_one(name, tmp_path):
  released('timm_token', tmp_path, lambda x: re.sub(r'^head\.', name, x))
  with pytest.raises(UserError, match=rf'{name}weight(?s:.*)num_classes=N'):
    formats.read(tmp_path, **BARE)
  how = BARE | {'num_classes': 7, 'report': (said := []).append}
  assert pretrained.load(tmp_path, **how)[0].num_classes == 7
  assert '2 arrays left out' in said[0]


def test_values_that_are_not_weights_are_refused(tmp_path):
  name = 'blocks.0.mlp.fc1.weight'
  array = load('timm_token')[2][name]
  for value, said in (
    (array * np.nan, 'block_0/mlp/fc1/kernel has NaN'),
    (array.astype(np.int8), f'{name} has int8 numbers'),
  ):
    released('timm_token', tmp_path, more={name: value})
    with pytest.raises(UserError, match=f'^{tmp_path}: {said}'):
      formats.read(tmp_path, **BARE)

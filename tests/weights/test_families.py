"""Families of timm and transformers: features as recorded, and back."""

import json
import pathlib
import sys

import numpy as np
import pytest

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
sys.path.insert(0, str(GOLDEN))
import family_cases  # noqa: E402

from vit_jax.models.layers import Normalize  # noqa: E402
from vit_jax.types import UserError  # noqa: E402
from vit_jax.weights import array_files, formats, original, timm  # noqa: E402


def load(name):
  """Return a recorded case, what is said about it, and arrays of its file."""
  recorded = dict(np.load(GOLDEN / 'families' / f'{name}.npz'))
  about = json.loads(str(recorded.pop('about')))
  return recorded, about, family_cases.arrays_of(about, recorded)


@pytest.mark.parametrize(
  'name', sorted(path.stem for path in GOLDEN.glob('families/*.npz'))
)
def test_features_are_those_of_the_source_and_arrays_come_back(name):
  recorded, about, arrays = load(name)
  weights, _ = family_cases.check(about, recorded, arrays)
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
  assert not original.recognise(['mask_token', 'lm_head.weight'])  # EVA


def test_what_authors_publish_is_written_as_timm_has_it():
  """There, CLIP's projection and patches have a bias."""
  recorded, about, arrays = load('original_clip')
  arrays, texts = timm.write(family_cases.check(about, recorded, arrays)[0])
  about |= {'format': 'timm', 'config': texts['config.json'], 'options': {}}
  family_cases.check(about, recorded, arrays)


def released(name, folder):
  """Write the seeded arrays of a recorded family; return its config."""
  _, about, arrays = load(name)
  array_files.write(folder / 'model.safetensors', arrays)
  return about['config']


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
def test_a_config_with_a_value_of_another_type_is_one_error(
  name, change, tmp_path
):
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
  (note,) = weights.notes
  assert 'assumed' in note and 'norms before attention and MLP' in note
  assert not weights.model.block.post_norm
  (tmp_path / 'config.json').write_text(json.dumps(config))
  weights = formats.read(tmp_path)
  assert weights.model.block.post_norm and 'assumed' not in str(weights.notes)
  (tmp_path / 'config.json').write_text('[' * 100_000)
  with pytest.raises(UserError, match='cannot be read as JSON'):
    formats.read(tmp_path)

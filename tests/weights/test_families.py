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
from vit_jax.weights import original, timm  # noqa: E402


@pytest.mark.parametrize(
  'name', sorted(path.stem for path in GOLDEN.glob('families/*.npz'))
)
def test_features_are_those_of_the_source_and_arrays_come_back(name):
  recorded = dict(np.load(GOLDEN / 'families' / f'{name}.npz'))
  about = json.loads(str(recorded.pop('about')))
  arrays = family_cases.arrays_of(about, recorded)
  weights, _ = family_cases.check(about, recorded, arrays)
  if about['back']:
    family_cases.check_back(about, weights, arrays)


def test_a_config_of_openclip_says_which_gelu_and_pixels():
  recorded = np.load(GOLDEN / 'families' / 'original_clip.npz')
  about = json.loads(str(recorded['about']))
  arrays = family_cases.arrays_of(about, {})
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
  recorded = dict(np.load(GOLDEN / 'families' / 'original_clip.npz'))
  about = json.loads(str(recorded.pop('about')))
  arrays = family_cases.arrays_of(about, recorded)
  arrays, texts = timm.write(family_cases.check(about, recorded, arrays)[0])
  about |= {'format': 'timm', 'config': texts['config.json'], 'options': {}}
  family_cases.check(about, recorded, arrays)

"""Names of models: ours, timm's, and what is no name."""

import json
import pathlib

import pytest

from vit_jax import build, names
from vit_jax.models.mixer import MlpMixer
from vit_jax.models.resnet import ResNet
from vit_jax.models.vit import VisionTransformer, variant

SIZES = json.loads(
  (pathlib.Path(__file__).parent / 'golden' / 'timm_sizes.json').read_text()
)


def test_both_kinds_of_names_give_the_same_settings():
  listed = names.models()
  for ours, theirs in listed.items():
    settings = names.settings(ours)
    for name in theirs:
      assert names.settings(name) == settings, name
      assert names.settings(f'{name}.augreg_in21k_ft_in1k') == settings
      assert name in SIZES
    short = ours.removeprefix('BiT-').replace('ViT-', '')
    assert names.settings(short) == settings
  theirs = [name for timm_names in listed.values() for name in timm_names]
  assert len(set(theirs)) == len(theirs)
  kinds = {names.settings(name)['target'] for name in listed}
  assert kinds == {
    *(names.VIT, names.RESNET, names.MIXER),
    *(names.AXIAL_VIT, names.AXIAL_RESNET),
  }


def test_settings_are_fields_of_the_models():
  for name in [*names.models(), *SIZES]:
    settings = names.settings(name)
    build.check_arguments(build.locate(settings.pop('target')), settings)


@pytest.mark.parametrize('name', SIZES)
def test_models_are_as_large_as_those_of_timm(name):
  """Of each model of timm's that a name here stands for, but for zeros."""
  side, count, heads = SIZES[name]
  fields = names.settings(name)
  ours = names.count_parameters(name, image_size=side)
  if name.startswith('deit3'):  # the class token has a position here
    ours -= fields['width']
  if name.startswith('vit_medium_patch16_gap'):  # and q, k and v have a bias
    ours -= 3 * fields['depth'] * fields['width']
  assert ours == count
  # Where a MAP head pools, timm's has as many heads as the blocks.
  assert fields.get('num_heads') == heads


def test_create_makes_the_model():
  vit = names.create('vit_base_patch16_224', num_classes=10, gelu='exact')
  assert vit == VisionTransformer(
    **variant('B/16'), num_classes=10, gelu='exact'
  )
  assert names.create('BiT-R101x3') == ResNet((3, 4, 23, 3), 3)
  assert names.create('mixer_l32_224') == MlpMixer(
    1024, 24, 512, 4096, (32, 32)
  )
  with pytest.raises(ValueError, match="no argument 'classes'"):
    names.create('B/16', classes=10)


@pytest.mark.parametrize(
  'name, fields',
  [
    (
      'vit_base_patch16_reg4_gap_256',
      {
        'num_registers': 4,
        'pooling': 'gap',
        'norm_after_pooling': True,
      },
    ),
    ('vit_so400m_patch14_siglip_384', {'pooling': 'map'}),
    ('vit_so400m_patch14_siglip_gap_384', {'pooling': 'gap'}),
    ('vit_small_patch16_reg2', {'num_registers': 2}),
    ('deit3_large_patch16_384.fb_in22k', {'layerscale_init': 1e-6}),
    ('vit_tiny_r_s16_p8_224', {'resnet_stages': (), 'patch_size': (8, 8)}),
    ('vit_large_r101_s16_224', {'resnet_stages': (3, 4, 26)}),
  ],
)
def test_parts_of_timm_names(name, fields):
  settings = names.settings(name)
  assert settings.items() >= fields.items()
  plain = {'target', *variant('B/16')}
  assert settings.keys() == plain | fields.keys()


@pytest.mark.parametrize(
  'name, message',
  [
    ('vit_bse_patch16_224', 'Near it: vit_base_patch16_224,'),
    ('ViT-b/16', 'SIZE is one of mu, Ti, .* Near it: ViT-B/16,'),
    ('R50+B/14', r'one of R26, R50, .* Near it: R50\+ViT-B/16'),
    ('BiT-R51x1', 'one of 26, 50, .* Near it: BiT-R50x1'),
    ('Mixer-B16', 'SIZE is one of S, B, L, H. Near it: Mixer-B/16'),
    ('deit_base_distilled_patch16_224', 'second class token .* deit_base_'),
    ('vit_base_patch16_clip_224', 'no model named .* Near it: vit_base'),
    ('vit_base_patch16_224_miil', 'no model named'),
    ('deit3_tiny_patch16_224', 'no model named'),
    ('', "no model named ''"),
  ],
)
def test_unknown_names_say_what_is_near(name, message):
  with pytest.raises(ValueError, match=message):
    names.settings(name)


def test_the_table_has_every_model(capsys, monkeypatch):
  few = {k: v for k, v in names.models().items() if 'Ti' in k or 'S/8' in k}
  monkeypatch.setattr(names, 'models', lambda: few)
  names.main()
  lines = capsys.readouterr().out.splitlines()
  assert 'ViT-Ti/16          5,717,416  vit_tiny_patch16_224' in lines[1]
  assert lines[2].strip() == 'deit_tiny_patch16_224'
  assert 'R+ViT-Ti/16        6,337,704  vit_tiny_r_s16_p8_224' in lines[4]
  assert max(map(len, lines)) <= 80

"""Names of models, ours and timm's, and the exact number of parameters.

COUNTS, and the counts without class token, are asserted by the paper's released
code too; the others follow from the shapes.
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from nightly import nightly
from tiny import recorded

from vit_jax.models.dense import BlockOptions
from vit_jax.models.mixer import MlpMixer
from vit_jax.models.pooling import ClassToken, Map, Mean
from vit_jax.models.resnet import Hybrid, ResNet
from vit_jax.models.vit import PatchEmbedding, VisionTransformer
from vit_jax.tools import names as tool
from vit_jax.zoo import names, published

SIZES, PARAMETERS = recorded('timm_sizes'), recorded('parameters')


@functools.cache
def count(model, size=224):
  """Count parameters. One layer is traced instead of up to 48."""
  if hasattr(model, 'scan'):
    model = model.clone(scan=True)
  resnet, more = getattr(model, 'embedding', model), 0
  if type(resnet) in (ResNet, Hybrid):
    for stage, units in enumerate(resnet.stages):
      width = 64 * getattr(resnet, 'width_factor', 1) * 2**stage
      more += (units - 1) * (17 * width**2 + 12 * width)
    first = {'stages': (1,) * len(resnet.stages)}
    if resnet is not model:
      first = {'embedding': dataclasses.replace(resnet, **first)}
    model = model.clone(**first)
  images = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
  shapes = jax.eval_shape(model.init, jax.random.key(0), images)
  return more + sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


ONLY_OURS = [x for x, of_timm in names.models().items() if not of_timm]


@pytest.mark.parametrize('name', nightly(names.models(), but=ONLY_OURS))
def test_parameter_count(name):
  assert count(names.create(name, num_classes=1000)) == PARAMETERS[name]


@pytest.mark.parametrize(
  'name, size, expected',
  [
    ('deit_tiny_distilled_patch16_224', 224, 5_910_800),
    ('deit_small_distilled_patch16_224', 224, 22_436_432),
    ('deit_base_distilled_patch16_224.fb_in1k', 224, 87_338_192),
    ('deepseek_vit_412m', 546, 412_867_560),
    ('qwen3_vit_88m', 768, 88_183_528),
    ('qwen3_vit_416m.qwen3_8_27b', 768, 416_159_704),
  ],
)
def test_distilled_models_and_encoders_are_as_large(name, size, expected):
  assert count(names.create(name, num_classes=1000), size) == expected


# One name of those that differ in the size of images, or in nothing.
ONE_OF_ALL = {str(names.settings(x)): x for x in SIZES}.values()


@pytest.mark.parametrize('name', nightly(SIZES, but=ONE_OF_ALL))
def test_models_are_as_large_as_those_of_timm(name):
  side, expected, heads = SIZES[name]
  fields = names.settings(name)
  ours = count(names.create(name, num_classes=1000), side)
  if name.startswith('deit3'):  # the class token has a position here
    ours -= fields['width']
  if name.startswith('vit_medium_patch16_gap'):  # and q, k and v have a bias
    ours -= 3 * fields['depth'] * fields['width']
  assert ours == expected
  # With MAP pooling, timm's has as many heads as the blocks.
  assert fields.get('num_heads') == heads


def test_both_kinds_of_names_give_the_same_settings():
  listed = names.models()
  for ours, in_timm in listed.items():
    settings = names.settings(ours)
    for name in in_timm:
      assert names.settings(name) == settings, name
      assert names.settings(f'{name}.augreg_in21k_ft_in1k') == settings
      assert name in SIZES
    short = ours.removeprefix('BiT-').replace('ViT-', '')
    assert names.settings(short) == settings
  in_timm = [name for timm_names in listed.values() for name in timm_names]
  assert len(set(in_timm)) == len(in_timm)
  kinds = {names.settings(name)['target'] for name in listed}
  assert kinds == {
    *(names.VIT, names.RESNET, names.MIXER),
    *(names.AXIAL_VIT, names.AXIAL_RESNET),
  }


def test_create_makes_the_model():
  vit = names.create('vit_base_patch16_224', num_classes=10, posemb=None)
  assert vit == VisionTransformer(
    768, 12, 3072, 12, PatchEmbedding(16), posemb=None, num_classes=10
  )
  assert names.create('BiT-R101x3') == ResNet((3, 4, 23, 3), 3)
  assert names.create('mixer_l32_224') == MlpMixer(
    1024, 24, 512, 4096, PatchEmbedding(32)
  )
  with pytest.raises(ValueError, match="no argument 'classes'"):
    names.create('B/16', classes=10)


@pytest.mark.parametrize(
  'name, embedding',
  [
    ('ViT-L/14', PatchEmbedding((14, 14))),
    ('g-opt/16x8', PatchEmbedding((16, 8))),
    ('R50+ViT-B/16', Hybrid(1, stages=(3, 4, 9))),
    ('R50+B/32', Hybrid(1, stages=(3, 4, 6, 3))),
    ('R200+L/16', Hybrid(1, stages=(3, 24, 39))),
    ('R+Ti/16', Hybrid(8, stages=())),
    ('vit_tiny_r_s16_p8_224', Hybrid(8, stages=())),
    ('vit_large_r101_s16_224', Hybrid(1, stages=(3, 4, 26))),
  ],
)
def test_patches_of_names(name, embedding):
  assert names.create(name).embedding == embedding


@pytest.mark.parametrize(
  'name, fields',
  [
    (
      'vit_base_patch16_reg4_gap_256',
      {'pooling': Mean(num_registers=4, norm='after')},
    ),
    ('vit_base_patch16_gap_224', {'pooling': Mean(), 'num_heads': 16}),
    ('vit_so400m_patch14_siglip_384', {'pooling': Map()}),
    ('vit_so400m_patch14_siglip_gap_384', {'pooling': Mean()}),
    ('vit_small_patch16_reg2', {'pooling': ClassToken(num_registers=2)}),
    (
      'deit3_large_patch16_384.fb_in22k',
      {'block': BlockOptions(layerscale_init=1e-6)},
    ),
  ],
)
def test_parts_of_timm_names(name, fields):
  size = re.search('base|so400m|small|large', name)[0]
  size = {'base': 'B', 'so400m': 'So400m', 'small': 'S', 'large': 'L'}[size]
  patch = re.search(r'patch(\d+)', name)[1]
  assert names.create(name) == names.create(f'{size}/{patch}', **fields)


@pytest.mark.parametrize(
  'name, similar',
  [
    ('vit_bse_patch16_224', 'vit_base_patch16_224'),
    ('ViT-b/16', 'ViT-B/16'),
    ('R50+B/14', 'R50+ViT-B/16'),
    ('R50+B/16x8', ''),
    ('R51+B/16', ''),
    ('R+Ti/16x8', ''),
    ('B/0', ''),
    ('B/16x', ''),
    ('BiT-R51x1', 'BiT-R50x1'),
    ('BiT-R50x0', ''),
    ('Mixer-B16', 'Mixer-B/16'),
    ('vit_base_patch16_clip_224', 'vit_base'),
    ('deit4_tiny_patch16_224', 'deit_'),
    ('', ''),
  ],
)
def test_unknown_names_list_similar_ones(name, similar):
  with pytest.raises(ValueError, match=re.escape(f'named {name!r}')) as error:
    names.settings(name)
  assert similar in str(error.value)


@pytest.mark.parametrize(
  'text, count',
  [('', 60), ('PATCH16*384', 4), ('bit-r50', 4), ('mixer_?16', 3)],
)
def test_the_table(capsys, text, count):
  tool.main([text])
  _, *rows = capsys.readouterr().out.split('\n\n')[0].splitlines()
  assert len(rows) == count
  assert {x for row in rows for x in row.split()} <= {
    x for name, others in names.models().items() for x in (name, *others)
  }


@pytest.mark.parametrize(
  'text, row',
  [
    ('dinov3', 'facebook/dinov3-* S,S+,B,L,H+,7B 16 256 token DINOv3 hf,timm'),
    ('refused', '*_sapiens2: grouped-query attention'),
    ('NaFlex', 'naflexvit_*_radio_*: other interpolation'),
  ],
)
def test_published_weights_and_refused_models(capsys, text, row):
  tool.main([text])
  assert row in ' '.join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
  'name, licence',
  [
    ('facebook/dinov2-base', 'apache-2.0'),
    ('timm/vit_huge_patch14_clip_224.dfn5b', 'apple-amlr-noncommercial'),
    ('timm/vit_pe_lang_large_patch14_448', 'apache-2.0'),
    ('timm/vit_base_patch16_dinov3_qkvb.eupe_lvd1689m', 'fair-noncommercial'),
    ('facebook/vit-mae-base', 'cc-by-nc-4.0'),
    ('Qwen/Qwen3-VL-4B-Instruct', 'apache-2.0'),
    ('Qwen/Qwen3.8-Flash-Next', 'qwen-community'),
    ('timm/qwen3_vit_416m.qwen3_8_flash_next', 'qwen-community'),
    ('deepseek-ai/DeepSeek-V4.1-Flash', 'mit'),
    ('facebook/pixio-vith16', 'fair-noncommercial'),
    ('timm/vit_base_patch16_224.mae', 'cc-by-nc-4.0'),
    ('somebody/grounding-dino', None),
  ],
)
def test_licences(name, licence):
  assert (published.licence(name) or '').split(' ')[0] == (licence or '')


@pytest.mark.parametrize(
  'command, named',
  [
    ('vit_bse*', 'vit_bse*'),
    ('nothing --summary', 'nothing'),
    ('B/16 --summary --image_size=100', '100x100'),
  ],
)
def test_mistakes_of_the_command(command, named):
  with pytest.raises(SystemExit, match=re.escape(named)):
    tool.main(command.split())


def test_a_summary(capsys):
  tool.main(['vit_tiny_patch16_384', '--summary'])
  found = capsys.readouterr().out
  for part in ('384x384', '[1,577,192]', 'blocks/attn', '5,790,'):
    assert part in found
  tool.main(['ViT-Ti/16', '--summary'])
  found = capsys.readouterr().out
  assert 'float32[1,14,14,192]' in found and '5,717,416' in found
  assert '2.507 GFLOPs' in found


def test_head_dimensions():
  found = {k: width // heads for k, (width, _, _, heads) in names.SIZES.items()}
  others = {'mu': 16, 'So400m': 72, 'H': 80, 'g': 88, 'G': 104, 'e': 112}
  others |= {'XL': 72, 'g-opt': 96, 'G-opt': 96}
  assert found == dict.fromkeys(found, 64) | others

"""Variants by name, and the exact number of parameters of each.

COUNTS, and the counts without class token, are asserted by the paper's released
code too; the others follow from the shapes.
"""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from vit_jax.models.vit import VisionTransformer, variant

COUNTS = {  # 1,000 classes, 224 px, class token
  'Ti/16': 5_717_416,
  'S/32': 22_878_952,
  'S/16': 22_050_664,
  'B/32': 88_224_232,
  'B/16': 86_567_656,
  'B/8': 86_576_872,
  'L/32': 306_535_400,
  'L/16': 304_326_632,
  'H/14': 632_045_800,
  'R+Ti/16': 6_337_704,
  'R26+S/32': 36_431_912,
  'R26+B/32': 101_383_976,
  'R50+B/16': 98_659_112,
  'R50+L/32': 328_994_856,
  'R50+B/32': 110_945_832,  # in the paper, not in the released code
  'R50+L/16': 316_483_624,  # likewise
}
COUNTS_OF_HEADS = {
  # bare, 1k + rep, 21k, 21k + rep, 10-way, 1k at 384 px (518 for /14)
  'Ti/16': (5524416, 5754472, 9740115, 9777171, 5526346, 5790376),
  'S/32': (22493952, 23026792, 30903507, 31051347, 22497802, 22915432),
  'S/16': (21665664, 22198504, 30075219, 30223059, 21669514, 22196584),
  'B/32': (87455232, 88814824, 104252499, 104843091, 87462922, 88297192),
  'B/16': (85798656, 87158248, 102595923, 103186515, 85806346, 86859496),
  'B/8': (85807872, 87167464, 102605139, 103195731, 85815562, 87744232),
  'L/32': (305510400, 307585000, 327899475, 328949075, 305520650, 306632680),
  'L/16': (303301632, 305376232, 325690707, 326740307, 303311882, 304715752),
  'H/14': (630764800, 633685480, 658745683, 660385363, 630777610, 633470440),
  'g/14': (1011202432, None, None, None, None, 1014178536),
  'G/14': (1842775680, None, None, None, None, 1846292712),
}


def count(name, size=224, **fields):
  # Scanned, as tracing one layer is faster than tracing 48.
  model = VisionTransformer(**(variant(name) | {'scan': True} | fields))
  images = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
  shapes = jax.eval_shape(model.init, jax.random.key(0), images)
  return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


@pytest.mark.parametrize('name', COUNTS)
def test_parameter_count(name):
  assert count(name, num_classes=1000) == COUNTS[name]


@pytest.mark.parametrize('name', COUNTS_OF_HEADS)
def test_parameter_count_with_other_heads(name):
  width = variant(name)['width']
  large = 518 if name.endswith('/14') else 384
  cases = [
    {'num_classes': None},
    {'num_classes': 1000, 'representation_size': width},
    {'num_classes': 21_843},
    {'num_classes': 21_843, 'representation_size': width},
    {'num_classes': 10},
    {'num_classes': 1000, 'size': large},
  ]
  for fields, expected in zip(cases, COUNTS_OF_HEADS[name]):
    if expected:
      assert count(name, **fields) == expected, fields


@pytest.mark.parametrize(
  'name, fields, expected',
  [
    ('S/32', {'pooling': 'gap'}, 22_878_184),
    ('S/16', {'pooling': 'gap'}, 22_049_896),
    ('B/32', {'pooling': 'gap'}, 88_222_696),
    ('B/16', {'pooling': 'gap'}, 86_566_120),
    ('S/16', {'pooling': 'gap', 'posemb': 'sincos2d'}, 21_974_632),
    ('B/16', {'scan': False}, 86_567_656),
  ],
)
def test_parameter_count_of_other_kinds(name, fields, expected):
  assert count(name, num_classes=1000, **fields) == expected


def test_variant_reads_names():
  assert variant('B/16') == {
    'width': 768,
    'depth': 12,
    'mlp_dim': 3072,
    'num_heads': 12,
    'patch_size': (16, 16),
  }
  assert variant('ViT-L/14') == variant('L/14')
  assert variant('g-opt/16x8')['patch_size'] == (16, 8)
  assert variant('So400m/14')['mlp_dim'] == 4304


def test_variant_reads_hybrids():
  plain = variant('B/16')
  hybrid = plain | {'patch_size': (1, 1), 'resnet_stages': (3, 4, 9)}
  assert variant('R50+B/16') == variant('R50+ViT-B/16') == hybrid
  hybrid = plain | {'patch_size': (1, 1), 'resnet_stages': (3, 4, 6, 3)}
  assert variant('R50+B/32') == hybrid
  assert variant('R26+S/32')['resnet_stages'] == (2, 2, 2, 2)
  assert variant('R200+L/16')['resnet_stages'] == (3, 24, 39)
  root = variant('Ti/16') | {'patch_size': (8, 8), 'resnet_stages': ()}
  assert variant('R+Ti/16') == root


@pytest.mark.parametrize(
  'name', ['R50+B/14', 'R50+B/16x8', 'R51+B/16', 'R+Ti/32', 'R+Ti/16x8']
)
def test_variant_lists_the_resnets(name):
  message = f'{re.escape(repr(name))}.*R26, R50, R101, R152, R200, and /16 or'
  with pytest.raises(ValueError, match=message):
    variant(name)


@pytest.mark.parametrize('name', ['X/16', 'B', 'B/0', 'B/16x', 'b/16', 'B-16'])
def test_variant_lists_the_sizes(name):
  with pytest.raises(ValueError, match=f"'{name}'.*mu, Ti, S, M, .* G-opt, e"):
    variant(name)

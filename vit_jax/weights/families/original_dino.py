"""DINOv2, DINOv3 and their relatives as their authors publish them.

Relatives are Franca, EUPE and TIPSv2; other names are those of timm's ViT. The
class token is pooled.
"""

import dataclasses
import re

import numpy as np

from vit_jax.models.rotary import RotaryDino
from vit_jax.weights import image_configs
from vit_jax.weights.families import timm_vit
from vit_jax.weights.family import Family
from vit_jax.weights.keymap import Key, KeyMap, linear

_HEADS = timm_vit.HEADS | {1536: 24}
_MLP = 'blocks.{i}.mlp'
_TRAINING = r'(.*\.)?(mask_token|(dino|ibot)_head\..*|projectors\..*)'


def _unchunk(arrays, config):
  """Return arrays of layers that training code numbers within chunks."""
  chunk = re.compile(r'blocks\.\d+\.(?=\d)')
  return {chunk.sub('blocks.', name): x for name, x in arrays.items()}


def _without_key_bias(arrays, config):
  """Return arrays without the bias of keys, which a mask sets to zero."""
  arrays = _unchunk(arrays, config)
  for name in [x for x in arrays if x.endswith('.qkv.bias')]:
    layer = name.removesuffix('qkv.bias')
    q, _, v = np.split(arrays.pop(name), 3)
    arrays |= {f'{layer}q_bias': q, f'{layer}v_bias': v}
  return arrays


_DINOV2 = Family(
  'original',
  'mask_token',
  KeyMap(
    Key('register_tokens', 'registers'),
    *timm_vit.ROWS,
    *linear(f'{_MLP}.w12', 'block_{i}/mlp/gate|fc1'),
    *linear(f'{_MLP}.w3', 'block_{i}/mlp/fc2'),
    *linear('head', 'head'),
  ),
  fields={'mlp': 'gelu', 'pooling': 'token'},
  heads=_HEADS,
  prefix=r'(teacher\.)?(module\.)?(backbone\.)?',
  unused=_TRAINING,
  prepare=_unchunk,
  rows=(('cls',),),
  posemb_resize='dinov2_offset',
  images=image_configs.IMAGENET,
)
_DINOV3 = dataclasses.replace(
  _DINOV2,
  anchor='storage_tokens',
  keys=KeyMap(
    Key('storage_tokens', 'registers'),
    Key('blocks.{i}.attn.q_bias', 'block_{i}/attn/query/bias', 'flat'),
    Key('blocks.{i}.attn.v_bias', 'block_{i}/attn/value/bias', 'flat'),
    *timm_vit.ROWS,
    *linear(f'{_MLP}.w1', 'block_{i}/mlp/gate'),
    *linear(f'{_MLP}.w2', 'block_{i}/mlp/fc1'),
    *linear(f'{_MLP}.w3', 'block_{i}/mlp/fc2'),
  ),
  fields={**_DINOV2.fields, 'norm_eps': 1e-5, 'posemb': RotaryDino()},
  heads=_HEADS | {1280: 20, 4096: 32},
  unused=rf'{_TRAINING}|.*(bias_mask|periods)|(.*\.)?local_cls_norm\..*',
  prepare=_without_key_bias,
)
_TIPS = dataclasses.replace(
  _DINOV2,
  prefix=r'vision_encoder\.',
  unused=r'vision_encoder\.mask_token|(?!vision_encoder\.).*',
  posemb_resize='bilinear_antialias',
  images={'mean': (0.0,) * 3, 'std': (1.0,) * 3},
)
ORIGINAL = (
  _DINOV3,
  dataclasses.replace(
    _DINOV2, anchor='register_tokens', posemb_resize='bicubic_antialias'
  ),
  _DINOV2,
  _TIPS,
)

"""DINOv2, Franca, TIPSv2, DINOv3, EUPE, C-RADIO and AIMv2 of their authors.

Most names are those of timm's ViT. The class token is pooled, if there is one.
C-RADIO has positions for images of 2048 pixels; load it with image_size=512.
"""

import dataclasses
import math
import re

import numpy as np

from vit_jax.models.rotary import RotaryDino
from vit_jax.weights import image_configs
from vit_jax.weights.families import timm_vit
from vit_jax.weights.family import Family
from vit_jax.weights.keymap import Key, KeyMap, conv, linear, norm

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
    *timm_vit.BIASES,
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


def _radio_tokens(arrays, config):
  """Return arrays with a convolution, and with the class token apart."""
  name, tokens = 'patch_generator.embedder.weight', 'patch_generator.cls_token'
  side = math.isqrt(arrays[name].shape[1] // 3)
  kernel = arrays[name].reshape(-1, 3, side, side)
  cls, registers = np.split(arrays.pop(f'{tokens}.token')[None], [1], axis=1)
  return arrays | {name: kernel, 'cls_token': cls, 'reg_token': registers}


_RADIO_PREFIX = r'radio_model\.model\.'
_RADIO = dataclasses.replace(
  _DINOV2,
  anchor=r'patch_generator\.embedder\.weight',
  keys=KeyMap(
    *conv('patch_generator.embedder', 'embedding'),
    Key('patch_generator.pos_embed', 'pos_embedding', 'table'),
    *timm_vit.ROWS,
    Key('blocks.{i}.ls{n}.grandma', 'block_{i}/ls{n}'),
  ),
  prefix=_RADIO_PREFIX,
  unused=f'(?!{_RADIO_PREFIX}).*',
  prepare=_radio_tokens,
  rows=((),),
  posemb_resize='bilinear_square',
  images=image_configs.OPENAI,
)
_TRUNK, _PATCHES = 'trunk.blocks.{i}', 'preprocessor.patchifier'
_AIMV2 = Family(
  'original',
  rf'{_PATCHES}\.proj\.weight',
  KeyMap(
    *conv(f'{_PATCHES}.proj', 'embedding'),
    *norm(f'{_PATCHES}.norm', 'embedding_norm'),
    Key('preprocessor.pos_embed', 'pos_embedding', 'table'),
    *norm(f'{_TRUNK}.norm_{{n}}', 'block_{i}/norm{n}'),
    *linear(f'{_TRUNK}.attn.qkv', 'block_{i}/attn/query|key|value'),
    *linear(f'{_TRUNK}.attn.proj', 'block_{i}/attn/out', 'merged'),
    *linear(f'{_TRUNK}.mlp.fc1', 'block_{i}/mlp/gate'),
    *linear(f'{_TRUNK}.mlp.fc3', 'block_{i}/mlp/fc1'),
    *linear(f'{_TRUNK}.mlp.fc2', 'block_{i}/mlp/fc2'),
    *norm('trunk.post_trunk_norm', 'norm'),
  ),
  fields={'embedding_norm': 'patches', 'norm_eps': 1e-5, 'pooling': 'gap'},
  heads={1024: 8, 1536: 12, 2048: 16, 3072: 24},
  rows=((),),
  posemb_resize='bicubic_antialias',
  images=image_configs.OPENAI,
)
ORIGINAL = (
  _DINOV3,
  dataclasses.replace(
    _DINOV2, anchor='register_tokens', posemb_resize='bicubic_antialias'
  ),
  _DINOV2,
  _TIPS,
  _RADIO,
  _AIMV2,
)

"""DINOv2, DINOv3 and EUPE as their authors publish them.

Most names are those of timm's ViT. The class token is pooled.
"""

import dataclasses

import numpy as np

from vit_jax.models.rotary import RotaryDino
from vit_jax.weights import image_configs
from vit_jax.weights.families import timm_vit
from vit_jax.weights.family import Family
from vit_jax.weights.keymap import Key, KeyMap, linear

_MLP = 'blocks.{i}.mlp'
_KEYS = KeyMap(
  Key('register_tokens', 'registers'),  # of DINOv2
  Key('storage_tokens', 'registers'),  # of DINOv3
  *timm_vit.BIASES,
  *timm_vit.ROWS,
  *linear(f'{_MLP}.w12', 'block_{i}/mlp/gate|fc1'),
  *linear(f'{_MLP}.w1', 'block_{i}/mlp/gate'),
  *linear(f'{_MLP}.w2', 'block_{i}/mlp/fc1'),
  *linear(f'{_MLP}.w3', 'block_{i}/mlp/fc2'),
)


def _without_key_bias(arrays, config):
  """Return arrays without the bias of keys, which a mask sets to zero."""
  arrays = dict(arrays)
  for name in [x for x in arrays if x.endswith('.qkv.bias')]:
    layer = name.removesuffix('qkv.bias')
    q, _, v = np.split(arrays.pop(name), 3)
    arrays |= {f'{layer}q_bias': q, f'{layer}v_bias': v}
  return arrays


_DINOV2 = Family(
  'original',
  'mask_token',
  _KEYS,
  fields={'mlp': 'gelu', 'pooling': 'token'},
  heads=timm_vit.HEADS | {1280: 20, 1536: 24, 4096: 32},
  unused='mask_token',
  rows=(('cls',),),
  posemb_resize='dinov2_offset',
  images=image_configs.IMAGENET,
)
_DINOV3 = dataclasses.replace(
  _DINOV2,
  anchor='storage_tokens',
  fields={**_DINOV2.fields, 'norm_eps': 1e-5, 'posemb': RotaryDino()},
  unused=r'mask_token|.*(bias_mask|periods)|local_cls_norm\..*',
  prepare=_without_key_bias,
)
ORIGINAL = (
  _DINOV3,
  dataclasses.replace(
    _DINOV2, anchor='register_tokens', posemb_resize='bicubic_antialias'
  ),
  _DINOV2,
)

"""Files as the authors of a model publish them, converted to safetensors.

These are DINOv2, DINOv3 and EUPE, whose class token is pooled, ViT-5, and image
towers of CLIP by OpenAI and OpenCLIP. They have no config but, perhaps,
open_clip_config.json: names of arrays say what they are. They are only read.

Arrays of CLIP do not show which GELU there is. open_clip_config.json says it;
without it CLIP has OpenAI's. CLIPs of LAION and DataComp have Gelu('exact').
Heads have 64 dimensions in widths up to 1024, and there are 16 in larger ones.
"""

import dataclasses
from typing import Any

import numpy as np

from vit_jax.models.dense import Gelu
from vit_jax.models.posemb import Learned
from vit_jax.models.rotary import RotaryAxial, RotaryDino
from vit_jax.types import FlatParams
from vit_jax.weights import architecture, bundle, family, image_configs, timm
from vit_jax.weights.bundle import Weights
from vit_jax.weights.families import timm_vit
from vit_jax.weights.family import Config, Family
from vit_jax.weights.keymap import Key, KeyMap, attention, conv, linear, norm

_DINO_KEYS = KeyMap(
  Key('register_tokens', 'registers'),  # of DINOv2
  Key('storage_tokens', 'registers'),  # of DINOv3
  *timm_vit.BIASES,
  *timm_vit.ROWS,
  *timm_vit.W12,
  *linear('blocks.{i}.mlp.w1', 'block_{i}/mlp/gate'),
  *linear('blocks.{i}.mlp.w2', 'block_{i}/mlp/fc1'),
)


def _without_key_bias(arrays, config):
  """Return arrays without the bias of keys, which a mask sets to zero."""
  for name in [x for x in arrays if x.endswith('.qkv.bias')]:
    layer = name.removesuffix('qkv.bias')
    q, _, v = np.split(arrays.pop(name), 3)
    arrays |= {f'{layer}q_bias': q, f'{layer}v_bias': v}
  return arrays


_DINOV2 = Family(
  'original',
  'mask_token',
  _DINO_KEYS,
  fields={'block.mlp': Gelu('exact')},
  heads=timm_vit.DINO_HEADS,
  unused='mask_token',
  rows=(('cls',),),
  posemb_resize='dinov2_offset',
  images=image_configs.IMAGENET,
)
_DINOV3 = dataclasses.replace(
  _DINOV2,
  anchor='storage_tokens',
  fields={**_DINOV2.fields, 'block.norm_eps': 1e-5, 'posemb': RotaryDino()},
  unused=r'mask_token|.*(bias_mask|periods)|local_cls_norm\..*',
  prepare=_without_key_bias,
)

_VIT5 = Family(
  'original',
  r'blocks\.0\.attn\.rope_reg\.freqs',
  KeyMap(
    Key('blocks.{i}.gamma_{n}', 'block_{i}/ls{n}'),
    *timm_vit.VIT.keys.keys,
  ),
  fields={
    'block.mlp': Gelu('exact'),
    'posemb': RotaryAxial(Learned(prefix=False), registers=100.0),
  },
  heads=timm_vit.HEADS,
  unused=r'.*\.rope(_reg)?\.freqs',
  rows=((),),
  posemb_resize='bicubic_antialias',
  images=image_configs.IMAGENET | {'crop_pct': 1.0},
)

_LAYER = 'transformer.resblocks.{i}'
_CLIP_KEYS = KeyMap(
  Key('class_embedding', 'cls', 'token'),
  Key('positional_embedding', 'cls_pos_embedding|pos_embedding', 'rows'),
  *conv('conv1', 'embedding'),
  *norm('ln_pre', 'embedding_norm'),
  *norm(f'{_LAYER}.ln_{{n}}', 'block_{i}/norm{n}'),
  *attention(f'{_LAYER}.attn', 'block_{i}/attn'),
  *linear(f'{_LAYER}.mlp.c_fc', 'block_{i}/mlp/fc1'),
  *linear(f'{_LAYER}.mlp.c_proj', 'block_{i}/mlp/fc2'),
  *norm('ln_post', 'norm'),
  Key('proj', 'head/kernel'),
)


def _clip_fields(config, arrays):
  is_quick = config.get('quick_gelu', not config)
  return {'block.mlp': Gelu('quick' if is_quick else 'exact')}


_CLIP = Family(
  'original',
  r'ln_post\.weight',
  _CLIP_KEYS,
  fields={'block.norm_eps': 1e-5},
  configure=_clip_fields,
  heads=timm_vit.HEADS,
  rows=(('cls',),),
  posemb_resize='bicubic_antialias',
  images=image_configs.OPENAI,
)
_VISUAL = r'(module\.)?visual\.'
FAMILIES = (  # the first that fits counts
  _VIT5,
  _DINOV3,
  dataclasses.replace(
    _DINOV2, anchor='register_tokens', posemb_resize='bicubic_antialias'
  ),
  _DINOV2,
  _CLIP,
  dataclasses.replace(_CLIP, prefix=_VISUAL, unused=f'(?!{_VISUAL}).*'),
)


def read(
  arrays: FlatParams, config: Config | None = None, **options: Any
) -> Weights:
  """Return Weights of arrays and open_clip_config.json; see `formats.read`."""
  levels = [(config or {}).get(x, {}) for x in ('model_cfg', 'preprocess_cfg')]
  config = levels[0] | levels[1]
  found = family.find(FAMILIES, arrays, 'original')
  weights = architecture.read(found, arrays, config, **options)
  images = {**found.images, **config}
  use = timm.image_use(images, weights.image_shape, weights.notes)
  weights = dataclasses.replace(weights, origin='original', **use)
  return bundle.assume(weights, config, timm.IMAGES)

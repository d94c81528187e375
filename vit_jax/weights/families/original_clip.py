"""Image towers of CLIP and PE as OpenAI, OpenCLIP and Meta publish them.

Arrays do not show which GELU there is. open_clip_config.json says it if it is
in the folder; without it CLIP has OpenAI's, and mlp='gelu' is that of LAION and
DataComp. PE has the exact one. Heads have 64 dimensions in widths up to 1024,
and there are 16 in larger ones. The class token of PE's lang and spatial models
is pooled, where they have one. Text towers are left out.
"""

import dataclasses

from vit_jax.models.pooling import Map
from vit_jax.models.posemb import Learned
from vit_jax.models.rotary import RotaryAxial
from vit_jax.weights import image_configs
from vit_jax.weights.families import timm_vit
from vit_jax.weights.family import Family
from vit_jax.weights.keymap import Key, KeyMap, attention, conv, linear, norm

_LAYER = 'transformer.resblocks.{i}'
_KEYS = KeyMap(
  Key('class_embedding', 'cls', 'token'),
  Key('positional_embedding', 'cls_pos_embedding|pos_embedding', 'rows'),
  *conv('conv1', 'embedding'),
  *norm('ln_pre', 'embedding_norm'),
  *norm(f'{_LAYER}.ln_{{n}}', 'block_{i}/norm{n}'),
  *attention(f'{_LAYER}.attn', 'block_{i}/attn'),
  *linear(f'{_LAYER}.mlp.c_fc', 'block_{i}/mlp/fc1'),
  *linear(f'{_LAYER}.mlp.c_proj', 'block_{i}/mlp/fc2'),
  Key(f'{_LAYER}.ls_{{n}}.gamma', 'block_{i}/ls{n}'),
  *norm('ln_post', 'norm'),
  Key('attn_pool.probe', 'map_head/probe'),
  *attention('attn_pool.attn', 'map_head/attn'),
  *norm('attn_pool.layernorm', 'map_head/norm'),
  *linear('attn_pool.mlp.c_fc', 'map_head/mlp/fc1'),
  *linear('attn_pool.mlp.c_proj', 'map_head/mlp/fc2'),
  Key('proj', 'head/kernel'),
)


def _clip_fields(config, arrays):
  is_quick = config.get('quick_gelu', not config)
  return {'mlp': 'quick_gelu' if is_quick else 'gelu'}


def _pe_fields(config, arrays):
  has_class = 'class_embedding' in arrays
  posemb = RotaryAxial(Learned(), order='xy', first=int(has_class))
  pooling = 'token' if has_class else 'gap'
  if 'attn_pool.probe' in arrays:
    hidden = len(arrays['attn_pool.mlp.c_fc.bias'])
    pooling = Map(num_heads=8, mlp_dim=hidden, all_tokens=True)
  return {'posemb': posemb, 'pooling': pooling}


_CLIP = Family(
  'original',
  r'ln_post\.weight',
  _KEYS,
  fields={'norm_eps': 1e-5},
  configure=_clip_fields,
  heads=timm_vit.HEADS,
  rows=(('cls',), ()),
  posemb_resize='bicubic_antialias',
  images=image_configs.OPENAI,
)
_PE = dataclasses.replace(
  _CLIP,
  anchor=r'ln_pre\.weight',  # lang and spatial have no ln_post
  fields={'norm_eps': 1e-5, 'mlp': 'gelu'},
  configure=_pe_fields,
  posemb_resize='bilinear',
  images={
    **{'mean': (0.5,) * 3, 'std': (0.5,) * 3},
    **{'interpolation': 'bilinear', 'crop_mode': 'squash', 'crop_pct': 1.0},
  },
)
_PE_CORE = dataclasses.replace(_PE, anchor=r'attn_pool\.probe')
_VISUAL = r'(module\.)?visual\.'
ORIGINAL = tuple(
  dataclasses.replace(family, prefix=prefix, unused=unused)
  for prefix, unused in (('', '(?!)'), (_VISUAL, f'(?!{_VISUAL}).*'))
  for family in (_PE_CORE, _CLIP, _PE)
)

"""Image towers of CLIP as OpenAI and OpenCLIP publish them.

Arrays do not show which GELU there is. open_clip_config.json says it if it is
in the folder; without it CLIP has OpenAI's, and mlp='gelu' is that of LAION and
DataComp. Heads have 64 dimensions in widths up to 1024, and there are 16 in
larger ones. Text towers are left out.
"""

import dataclasses

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
  *norm('ln_post', 'norm'),
  Key('proj', 'head/kernel'),
)


def _clip_fields(config, arrays):
  is_quick = config.get('quick_gelu', not config)
  return {'mlp': 'quick_gelu' if is_quick else 'gelu'}


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
_VISUAL = r'(module\.)?visual\.'
ORIGINAL = (
  _CLIP,
  dataclasses.replace(_CLIP, prefix=_VISUAL, unused=f'(?!{_VISUAL}).*'),
)

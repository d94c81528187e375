"""DINOv2 with registers, without SwiGLU, as Meta publishes it."""

from vit_jax.weights.families import timm_vit
from vit_jax.weights.family import Family
from vit_jax.weights.keymap import Key, KeyMap, linear

_REGISTERS = Family(
  'original',
  'register_tokens',
  KeyMap(
    Key('register_tokens', 'registers'),
    *timm_vit.ROWS,
    *linear('head', 'head'),
  ),
  fields={'mlp': 'gelu', 'pooling': 'token'},
  heads=timm_vit.HEADS,
  unused='mask_token',
  rows=(('cls',),),
  posemb_resize='bicubic_antialias',
)
ORIGINAL = (_REGISTERS,)

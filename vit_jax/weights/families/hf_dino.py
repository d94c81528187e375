"""transformers' DINOv2, with and without registers, and DINOv3's ViT.

A classifier of DINOv2, which reads the class token beside the mean of the
patches, is left out. Mask vectors are left out, too, and written as zeros.
"""

import dataclasses

import numpy as np

from vit_jax.models.layers import SwiGlu
from vit_jax.models.rotary import RotaryDino
from vit_jax.types import UserError
from vit_jax.weights import bundle
from vit_jax.weights.architecture import PLAIN
from vit_jax.weights.families import hf_vit
from vit_jax.weights.family import Family
from vit_jax.weights.keymap import Key, KeyMap, conv, linear, norm

_NORMS = 'norm1', 'norm2'
_TOKENS = (
  Key('embeddings.cls_token', 'cls'),
  Key('embeddings.register_tokens', 'registers'),
)
_LAYER = 'encoder.layer.{i}'
_PACKED = (
  *linear(f'{_LAYER}.mlp.weights_in', 'block_{i}/mlp/gate|fc1'),
  *linear(f'{_LAYER}.mlp.weights_out', 'block_{i}/mlp/fc2'),
)
_V2 = KeyMap(
  *_TOKENS,
  *hf_vit.POSITIONS,
  *hf_vit.layers(
    _LAYER,
    _NORMS,
    hf_vit.OLD_QKV,
    'attention.output.dense',
    ('mlp.fc1', 'mlp.fc2'),
  ),
  *hf_vit.layers(
    _LAYER,
    _NORMS,
    hf_vit.NEW_QKV,
    'attention.o_proj',
    ('mlp.up_proj', 'mlp.down_proj'),
  ),
  *linear(f'{_LAYER}.mlp.gate_proj', 'block_{i}/mlp/gate'),
  *_PACKED,
  Key(f'{_LAYER}.layer_scale{{n}}.lambda1', 'block_{i}/ls{n}'),
  *norm('layernorm', 'norm'),
)
_V3 = KeyMap(
  *_TOKENS,
  *conv('embeddings.patch_embeddings', 'embedding'),
  *hf_vit.layers(
    'layer.{i}',
    _NORMS,
    hf_vit.NEW_QKV,
    'attention.o_proj',
    ('mlp.up_proj', 'mlp.down_proj'),
  ),
  *linear('layer.{i}.mlp.gate_proj', 'block_{i}/mlp/gate'),
  Key('layer.{i}.layer_scale{n}.lambda1', 'block_{i}/ls{n}'),
  *norm('norm', 'norm'),
)


def _describe(weights, kind, model_type):
  model, block = weights.model, weights.model.block
  return hf_vit.describe(weights) | {
    'architectures': [kind],
    'model_type': model_type,
    'num_register_tokens': model.pooling.num_registers,
    'layerscale_value': block.layerscale_init,
  }


def _write_v2(weights):
  model = weights.model
  kind = 'Dinov2Model', 'dinov2'
  if model.pooling.num_registers:
    kind = 'Dinov2WithRegistersModel', 'dinov2_with_registers'
  is_gated = isinstance(model.block.mlp, SwiGlu)
  widths = {x: x * model.width for x in range(1, 17)}
  if is_gated:
    widths = {x: (int(n * 2 / 3) + 7) // 8 * 8 for x, n in widths.items()}
  ratios = [x for x, width in widths.items() if width == model.mlp_dim]
  if not ratios:
    raise UserError(f"transformers' DINOv2 has no mlp_dim={model.mlp_dim}.")
  keys = KeyMap(*_PACKED, *_V2.keys) if is_gated else _V2
  arrays = keys.to_theirs(bundle.with_table(weights).params)
  arrays['embeddings.mask_token'] = np.zeros((1, model.width), np.float32)
  config = {'mlp_ratio': ratios[0], 'use_swiglu_ffn': is_gated}
  return arrays, _describe(weights, *kind) | config


def _write_v3(weights):
  model = weights.model
  if not isinstance(model.posemb, RotaryDino):
    raise UserError("transformers' DINOv3 has rotary positions.")
  arrays = _V3.to_theirs(weights.params)
  arrays['embeddings.mask_token'] = np.zeros((1, 1, model.width), np.float32)
  biases = {'query': 'query', 'key': 'key', 'value': 'value', 'out': 'proj'}
  biases |= {'mlp': 'mlp'}
  config = {f'{x}_bias': k in model.block.biases for k, x in biases.items()}
  return arrays, _describe(weights, 'DINOv3ViTModel', 'dinov3_vit') | config | {
    'use_gated_mlp': isinstance(model.block.mlp, SwiGlu),
    'rope_theta': model.posemb.temperature,
    'pos_embed_rescale': model.posemb.rescale,
  }


def _configure_v3(config, arrays):
  rotary = RotaryDino(
    temperature=config.get('rope_theta') or 100.0,
    rescale=config.get('pos_embed_rescale') or 1.0,
  )
  return hf_vit.configure(config, arrays) | {'posemb': rotary}


_REGISTERS = Family(
  '(dinov2_with_registers)?',
  r'embeddings\.register_tokens',
  _V2,
  fields=PLAIN | {'mlp': 'gelu'},
  configure=hf_vit.configure,
  prefix=r'dinov2(_with_registers)?\.',
  unused=r'(.*\.)?embeddings\.mask_token|classifier\..*',
  rows=(('cls',),),
  posemb_resize='bicubic_antialias',
  write=_write_v2,
)
FAMILIES = (
  Family(
    '(dinov3_vit)?',
    r'layer\.0\.attention\.q_proj\.weight',
    _V3,
    fields={k: x for k, x in PLAIN.items() if k != 'biases'}
    | {'mlp': 'gelu', 'norm_eps': 1e-5},
    configure=_configure_v3,
    prefix=r'model\.',
    unused=_REGISTERS.unused,
    write=_write_v3,
  ),
  _REGISTERS,
  dataclasses.replace(
    _REGISTERS,
    pattern='(dinov2)?',
    anchor=r'encoder\.layer\.0\.layer_scale1\.lambda1',
    posemb_resize='bicubic',
  ),
)

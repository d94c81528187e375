"""transformers' DINOv2 and 3, and the vision towers CLIP, SigLIP and AIMv2.

Left out are text towers, mask vectors (written as zeros), a classifier of
DINOv2, which reads two features, and AIMv2's attention pooling. CLIP's
projection is our head. Final norms are applied to all tokens, as in timm, where
transformers norms only CLIP's class token. SigLIP 2 with images of any shape
(NaFlex) is read as a model for one shape.
"""

import dataclasses
import math
from functools import partial

import numpy as np

from vit_jax.models.dense import Gelu, SwiGlu
from vit_jax.models.pooling import Map
from vit_jax.models.rotary import RotaryDino
from vit_jax.types import UserError
from vit_jax.weights import image_configs
from vit_jax.weights.architecture import PLAIN
from vit_jax.weights.families import hf_vit, timm_vit
from vit_jax.weights.families.hf_vit import NEW, OLD, UNUSED, family, layers
from vit_jax.weights.keymap import Key, KeyMap, attention, conv, linear, norm

_TOKENS = (
  Key('embeddings.cls_token', 'cls'),
  Key('embeddings.register_tokens', 'registers'),
)
_GATED = 'mlp.up_proj mlp.down_proj mlp.gate_proj'
_PACKED = (
  *linear('encoder.layer.{i}.mlp.weights_in', 'block_{i}/mlp/gate|fc1'),
  *linear('encoder.layer.{i}.mlp.weights_out', 'block_{i}/mlp/fc2'),
)
_DINOV2 = KeyMap(
  *_TOKENS,
  *hf_vit.PATCHES,
  *layers('encoder.layer.{i}', 'norm1 norm2', OLD, 'mlp.fc1 mlp.fc2'),
  *layers('encoder.layer.{i}', 'norm1 norm2', NEW, _GATED),
  *_PACKED,
  Key('encoder.layer.{i}.layer_scale{n}.lambda1', 'block_{i}/ls{n}'),
  *norm('layernorm', 'norm'),
)
_DINOV3 = KeyMap(
  *_TOKENS,
  *conv('embeddings.patch_embeddings', 'embedding'),
  *layers('layer.{i}', 'norm1 norm2', NEW, _GATED),
  Key('layer.{i}.layer_scale{n}.lambda1', 'block_{i}/ls{n}'),
  *norm('norm', 'norm'),
)
_LAYER, _SELF = 'encoder.layers.{i}', 'self_attn.{x[0]}_proj self_attn.out_proj'
_POSITIONS = 'embeddings.position_embedding.weight'
_TOWER = (
  *conv('embeddings.patch_embedding', 'embedding'),
  *layers(_LAYER, 'layer_norm1 layer_norm2', _SELF, 'mlp.fc1 mlp.fc2'),
  *norm('post_layernorm', 'norm'),
)
_CLIP = KeyMap(
  Key('embeddings.class_embedding', 'cls', 'token'),
  Key(_POSITIONS, 'cls_pos_embedding|pos_embedding', 'rows'),
  *norm('pre_layrnorm', 'embedding_norm'),
  *_TOWER,
  *linear('visual_projection', 'head'),
)
_SIGLIP = KeyMap(
  Key(_POSITIONS, 'pos_embedding', 'rows'),
  *_TOWER,
  Key('head.probe', 'map_head/probe'),
  *attention('head.attention', 'map_head/attn'),
  *norm('head.layernorm', 'map_head/norm'),
  *linear('head.mlp.fc{n}', 'map_head/mlp/fc{n}'),
)
_AIMV2 = KeyMap(
  Key(_POSITIONS, 'pos_embedding', 'rows'),
  *conv('embeddings.patch_embed', 'embedding'),
  *norm('embeddings.rms_norm', 'embedding_norm'),
  *layers(
    _LAYER,
    'rms_norm1 rms_norm2',
    'attention.{x[0]}_proj attention.out_proj',
    'ffn.up_proj ffn.down_proj ffn.gate_proj',
  ),
  *norm('rms_norm', 'norm'),
)


def _write_dinov2(weights):
  model, count = weights.model, weights.model.pooling.num_registers
  is_gated, width = isinstance(model.block.mlp, SwiGlu), model.width
  if model.mlp_dim != (-(width * 8 // -24) * 8 if is_gated else 4 * width):
    raise UserError("transformers' DINOv2 has another mlp_dim.")
  name, kind = ('_with_registers', 'WithRegisters') if count else ('', '')
  keys = KeyMap(*_PACKED, *_DINOV2.keys) if is_gated else _DINOV2
  names = f'dinov2{name}', f'Dinov2{kind}Model'
  arrays, config = hf_vit.write(weights, keys, *names)
  arrays['embeddings.mask_token'] = np.zeros((1, width), np.float32)
  config |= {'use_swiglu_ffn': is_gated, 'num_register_tokens': count}
  return arrays, config


def _write_dinov3(weights):
  model, block = weights.model, weights.model.block
  names = 'dinov3_vit', 'DINOv3ViTModel'
  arrays, config = hf_vit.write(weights, _DINOV3, *names)
  arrays['embeddings.mask_token'] = np.zeros((1, 1, model.width), np.float32)
  biases = {x: x for x in ('query', 'key', 'value', 'mlp')} | {'out': 'proj'}
  config |= {f'{x}_bias': k in block.biases for k, x in biases.items()}
  config['num_register_tokens'] = model.pooling.num_registers
  config['use_gated_mlp'] = isinstance(block.mlp, SwiGlu)
  return arrays, config


def _write_tower(keys, name, weights):
  model_type, kind = f'{name.lower()}_vision_model', f'{name}VisionModel'
  if weights.model.num_classes:
    kind += 'WithProjection'
  prefix = 'vision_model.'
  arrays, config = hf_vit.write(weights, keys, model_type, kind, prefix)
  config['vision_use_head'] = isinstance(weights.model.pooling, Map)
  return arrays, config | {'projection_dim': weights.model.num_classes or 512}


def _unfold(arrays, config):
  """Return arrays with a convolution for patches of [height, width, RGB]."""
  name = 'embeddings.patch_embedding.weight'
  side = math.isqrt(arrays[name].shape[1] // 3)
  kernel = arrays[name].reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
  return arrays | {name: kernel}


_SCALED = PLAIN | {'block.mlp': Gelu('exact'), 'block.layerscale_init': 1.0}
_ROTARY = {'posemb': RotaryDino(), 'block.norm_eps': 1e-5}
_CLIP_FIELDS = PLAIN | {
  'block.mlp': Gelu('quick'),
  'block.norm_eps': 1e-5,
  'embedding.bias': False,
  'embedding.norm': 'tokens',
  'head.bias': False,
}
_DINOV2_FAMILY = family(
  '(dinov2)?',
  r'encoder\.layer\.0\.layer_scale1\.lambda1',
  _DINOV2,
  _SCALED,
  images=image_configs.IMAGENET,
  heads=timm_vit.DINO_HEADS,
  unused=UNUSED + r'|classifier\..*',
  write=_write_dinov2,
)
_SIGLIP_FAMILY = family(
  '(siglip(_vision_model)?)?',
  r'encoder\.layers\.0\.self_attn\.q_proj\.weight',
  _SIGLIP,
  PLAIN | {'block.mlp': Gelu()},
  write=partial(_write_tower, _SIGLIP, 'Siglip'),
)
FAMILIES = (
  family(
    '(dinov3_vit)?',
    r'layer\.0\.attention\.q_proj\.weight',
    _DINOV3,
    {k: x for k, x in _SCALED.items() if k != 'block.biases'} | _ROTARY,
    args={'rope_theta': (100.0,)},
    images=image_configs.IMAGENET,
    heads=timm_vit.DINO_HEADS,
    write=_write_dinov3,
  ),
  dataclasses.replace(
    _DINOV2_FAMILY,
    pattern='(dinov2_with_registers)?',
    anchor=r'embeddings\.register_tokens',
    rows=(('cls',),),  # and none for registers
    posemb_resize='bicubic_antialias',
  ),
  _DINOV2_FAMILY,
  family(
    '((clip|metaclip_2)(_vision_model)?)?',
    r'pre_layrnorm\.weight',
    _CLIP,
    _CLIP_FIELDS,
    images=image_configs.OPENAI,
    write=partial(_write_tower, _CLIP, 'CLIP'),
  ),
  dataclasses.replace(
    _SIGLIP_FAMILY,
    pattern='siglip2(_vision_model)?',
    prepare=_unfold,
    posemb_resize='bilinear_antialias',
  ),
  _SIGLIP_FAMILY,
  family(
    '(aimv2(_vision_model)?)?',
    r'encoder\.layers\.0\.ffn\.gate_proj\.weight',
    _AIMV2,
    {'embedding.norm': 'patches', 'block.norm_eps': 1e-5},
    heads={1024: 8},
    args={'is_native': (False,)},
    unused=UNUSED + r'|(vision_model\.)?head\..*|visual_projection\..*',
  ),
)

"""transformers' DINOv2 and 3, TIPSv2, CLIP, MLCD, SigLIP, AIMv2, RADIO, Pixio.

Left out are text towers, mask vectors (written as zeros), a classifier of
DINOv2, which reads two features, and AIMv2's attention pooling. CLIP's
projection is our head. Final norms are applied to all tokens, as in timm, where
transformers norms only CLIP's class token. `siglip2` is SigLIP 2 for images of
any aspect ratio (NaFlex); for others, the files of SigLIP 2 are SigLIP's. Class
tokens of C-RADIO after the first, and all of Pixio, are our registers.
"""

import dataclasses
from functools import partial

import numpy as np

from vit_jax.models.dense import Gelu, SwiGlu
from vit_jax.models.pooling import Map, Mean
from vit_jax.models.rotary import RotaryAxial, RotaryDino
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
  *hf_vit.OUTSIDE,
  *layers('encoder.layer.{i}', 'norm1 norm2', OLD, 'mlp.fc1 mlp.fc2'),
  *layers('encoder.layer.{i}', 'norm1 norm2', NEW, _GATED),
  *_PACKED,
  Key('encoder.layer.{i}.layer_scale{n}.lambda1', 'block_{i}/ls{n}'),
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
_MLCD = KeyMap(
  Key('class_pos_emb', 'cls_angles'),
  Key('embeddings.class_embedding', 'cls', 'token'),
  Key(_POSITIONS, 'cls_pos_embedding|pos_embedding', 'rows'),
  *norm('pre_layrnorm', 'embedding_norm'),
  *_TOWER,
)
_CLIP = KeyMap(*_MLCD.keys, *linear('visual_projection', 'head'))
_SIGLIP = KeyMap(
  Key(_POSITIONS, 'pos_embedding', 'rows'),
  *_TOWER,
  Key('head.probe', 'map_head/probe'),
  *attention('head.attention', 'map_head/attn'),
  *norm('head.layernorm', 'map_head/norm'),
  *linear('head.mlp.fc{n}', 'map_head/mlp/fc{n}'),
)
_SIGLIP2 = KeyMap(
  Key('embeddings.patch_embedding.weight', 'embedding/kernel', 'hwc'),
  *_SIGLIP.keys,
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

_PIXIO = KeyMap(
  Key('embeddings.cls_token', 'registers'),
  *hf_vit.OUTSIDE,
  *layers('encoder.layer.{i}', 'norm1 norm2', OLD, hf_vit.DENSE),
)
_TIPS = KeyMap(
  Key('register_tokens', 'registers'),
  *linear('blocks.{i}.mlp.c_fc', 'block_{i}/mlp/fc1'),
  *linear('blocks.{i}.mlp.c_proj', 'block_{i}/mlp/fc2'),
  *timm_vit.ROWS,
)
_RADIO = KeyMap(
  Key('row', 'cls_pos_embedding'),  # is never written
  Key('patch_generator.cls_token.token', 'cls|registers', 'tokens'),
  Key('patch_generator.pos_embed', 'pos_embedding', 'table'),
  Key('patch_generator.embedder.weight', 'embedding/kernel', 'chw'),
  Key('blocks.{i}.layer_scale{n}.lambda1', 'block_{i}/ls{n}'),
  *timm_vit.ROWS,
  Key('blocks.{i}.ls{n}.grandma', 'block_{i}/ls{n}'),
)


def _sized(weights, names, keys, gated=(), number=int, prefix=''):
  """Return `hf_vit.write` with an mlp_ratio, by other keys for SwiGLU."""
  model, width = weights.model, weights.model.width
  is_gated = isinstance(model.block.mlp, SwiGlu)
  hidden = model.mlp_dim * 3 // 2 if is_gated else model.mlp_dim
  ratio = number(timm_vit.ratio(hidden, width))
  made = int(width * ratio)
  if model.mlp_dim != ((made * 2 // 3 + 7) // 8 * 8 if is_gated else made):
    raise UserError(f"transformers' {names[1]} has another mlp_dim.")
  keys = KeyMap(*gated, *keys.keys) if is_gated else keys
  arrays, config = hf_vit.write(weights, keys, *names, prefix)
  return arrays, config | {'use_swiglu_ffn': is_gated, 'mlp_ratio': ratio}


def _write_dinov2(weights):
  posemb, mask = weights.model.posemb, 'embeddings.mask_token'
  count = weights.model.pooling.num_registers
  if getattr(posemb, 'resize_method', '') == 'bilinear_antialias':
    names, mask = ('tipsv2_vision_model', 'Tipsv2VisionModel'), 'mask_token'
    arrays, config = _sized(weights, names, _TIPS, timm_vit.W12, float)
  else:
    name, kind = ('_with_registers', 'WithRegisters') if count else ('', '')
    names = f'dinov2{name}', f'Dinov2{kind}Model'
    arrays, config = _sized(weights, names, _DINOV2, _PACKED, lambda x: 4)
  arrays[mask] = np.zeros((1, weights.model.width), np.float32)
  return arrays, config | {'num_register_tokens': count}


def _write_radio(weights):
  names, inner = ('radio', 'RadioModel'), 'radio_model.model.'
  arrays, config = _sized(weights, names, _RADIO, (), float, inner)
  count = weights.model.pooling.num_registers
  size, row = config['image_size'], arrays.pop(f'{inner}row', np.ones(1))
  if list in (type(size), type(config['patch_size'])) or count < 2 or row.any():
    raise UserError("transformers' C-RADIO has other tokens and is square.")
  arrays['radio_model.summary_idxs'] = np.arange(2)
  *_, mean, std = image_configs.describe(dataclasses.replace(weights, notes=[]))
  for name, value in {'norm_mean': mean, 'norm_std': std}.items():
    array = np.float32(value).reshape(-1, 1, 1)
    arrays[f'radio_model.input_conditioner.{name}'] = array
    config[name] = value
  return arrays, config | {'max_img_size': size, 'num_registers': count - 2}


def _write_pixio(weights):
  arrays, config = _sized(weights, ('pixio', 'PixioModel'), _PIXIO)
  return arrays, config | {'n_cls_tokens': weights.model.pooling.num_registers}


def _configure_mlcd(config, arrays):
  theta = (config.get('rope_parameters') or {}).get('rope_theta', 10_000.0)
  count = arrays['embeddings.class_embedding'].size
  return {
    'num_heads': count // 2 // arrays['class_pos_emb'].size,
    'posemb': RotaryAxial(None, theta, pairs_axis=-2, class_angles=True),
  } | hf_vit.configure(config, arrays)


def _write_mlcd(weights):
  names = 'mlcd_vision_model', 'MLCDVisionModel'
  arrays, config = hf_vit.write(weights, _MLCD, *names)
  rope = {'rope_theta': getattr(weights.model.posemb, 'temperature', 0)}
  return arrays, config | {'rope_parameters': rope | {'rope_type': 'axial'}}


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


def _write_siglip2(weights):
  arrays, config = _write_tower(_SIGLIP2, 'Siglip2', weights)
  del config['image_size']
  count = len(arrays['vision_model.embeddings.position_embedding.weight'])
  return arrays, config | {'num_patches': count}


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
    'tipsv2(_vision_model)?',
    'register_tokens',
    KeyMap(*_TIPS.keys, *timm_vit.W12),
    _SCALED,
    prefix=r'vision_encoder\.',
    unused=r'(vision_encoder\.)?mask_token|text_encoder\..*|temperature',
    rows=(('cls',),),
    posemb_resize='bilinear_antialias',
    images={'mean': (0.0,) * 3, 'std': (1.0,) * 3, 'crop_pct': 1.0},
  ),
  family(
    '(mlcd(_vision_model)?)?',
    'class_pos_emb',
    _MLCD,
    _CLIP_FIELDS | {'block.mlp': Gelu('exact')},
    configure=_configure_mlcd,
    args={'num_key_value_groups': (1,)},
    images=image_configs.OPENAI,
    write=_write_mlcd,
  ),
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
    keys=_SIGLIP2,
    posemb_resize='bilinear_antialias',
    keeps_aspect=True,
    write=_write_siglip2,
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
  family(
    '(radio)?',
    r'patch_generator\.embedder\.weight',
    _RADIO,
    {'block.mlp': Gelu('exact'), 'embedding.bias': False, 'pooling.norm': None},
    args={'use_swiglu_ffn': (False,)},
    prefix=r'radio_model\.(model\.)?',
    unused=r'(radio_model\.)?(input_cond|summary_idxs).*|.*video_embedder.*',
    rows=((),),
    posemb_resize='bilinear_square',
    patch_resize='bilinear',
    images=image_configs.OPENAI,
    write=_write_radio,
  ),
  family(
    '(pixio)?',
    r'encoder\.layer\.0\.norm1\.weight',
    _PIXIO,
    PLAIN | {'block.mlp': Gelu('exact'), 'pooling': Mean(registers=True)},
    rows=(('registers',),),
    images=image_configs.IMAGENET,
    write=_write_pixio,
  ),
)

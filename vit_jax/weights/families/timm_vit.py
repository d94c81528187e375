"""timm's VisionTransformer; hybrids, BiT and MLP-Mixer, which are only read.

ViT, DeiT, DeiT III, FlexiViT, DINO, DINOv2, TIPSv2, MAE, I-JEPA, AIMv2, BEiT-3,
C-RADIO, InternViT, and the towers of CLIP and SigLIP. Without a config: exact
GELU, an epsilon of 1e-6 as ours, and the class token is pooled unless there is
`fc_norm`. timm takes neither an epsilon nor SwiGLU from a config: what we write
has an architecture that implies them.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.models.dense import Gelu, SwiGlu
from vit_jax.models.pooling import ClassToken, Map, Mean
from vit_jax.types import FlatParams, UserError
from vit_jax.weights import bundle, image_configs
from vit_jax.weights.bundle import Weights
from vit_jax.weights.family import Config, Family
from vit_jax.weights.keymap import TABLE, Key, KeyMap, conv, linear, norm
from vit_jax.zoo import names

_NAFLEX = (
  Key('embeds.pos_embed', 'pos_embedding'),
  Key('embeds.proj.weight', 'embedding/kernel', 'hwc'),
  Key('embeds.proj.bias', 'embedding/bias'),
)
ROWS = (
  Key('cls_token', 'cls'),
  Key('dist_token', 'dist'),
  Key('reg_token', 'registers'),
  Key('pos_embed', TABLE, 'table'),
  *conv('patch_embed.proj', 'embedding'),
  *_NAFLEX,
  *norm('norm_pre', 'embedding_norm'),
  *norm('blocks.{i}.norm{n}', 'block_{i}/norm{n}'),
  *linear('blocks.{i}.attn.qkv', 'block_{i}/attn/query|key|value'),
  *linear('blocks.{i}.attn.proj', 'block_{i}/attn/out', 'merged'),
  *norm('blocks.{i}.attn.q_norm', 'block_{i}/attn/query_norm'),
  *norm('blocks.{i}.attn.k_norm', 'block_{i}/attn/key_norm'),
  *norm('blocks.{i}.{part}.norm', 'block_{i}/{part}/norm'),
  *linear('blocks.{i}.mlp.fc{n}', 'block_{i}/mlp/fc{n}'),
  Key('blocks.{i}.ls{n}.gamma', 'block_{i}/ls{n}'),
  *norm('norm', 'norm'),
  *norm('fc_norm', 'norm'),
  Key('attn_pool.latent', 'map_head/probe'),
  *linear('attn_pool.q', 'map_head/attn/query'),
  *linear('attn_pool.kv', 'map_head/attn/key|value'),
  *linear('attn_pool.proj', 'map_head/attn/out', 'merged'),
  *norm('attn_pool.norm', 'map_head/norm'),
  *linear('attn_pool.mlp.fc{n}', 'map_head/mlp/fc{n}'),
)
_KEYS = KeyMap(*ROWS, *linear('head', 'head'))
_DISTILLED = KeyMap(
  *ROWS, *linear('head', 'head/cls'), *linear('head_dist', 'head/dist')
)
PACKED = linear('blocks.{i}.mlp.fc1', 'block_{i}/mlp/gate|fc1')
W12 = (
  *linear('blocks.{i}.mlp.w12', 'block_{i}/mlp/gate|fc1'),
  *linear('blocks.{i}.mlp.w3', 'block_{i}/mlp/fc2'),
)
SPLIT = [
  *linear('blocks.{i}.mlp.fc1_g', 'block_{i}/mlp/gate'),
  *linear('blocks.{i}.mlp.fc1_x', 'block_{i}/mlp/fc1'),
]
BIASES = (  # where keys have none
  Key('blocks.{i}.attn.q_bias', 'block_{i}/attn/query/bias', 'flat'),
  Key('blocks.{i}.attn.v_bias', 'block_{i}/attn/value/bias', 'flat'),
)
_PACKED = KeyMap(*PACKED, *_KEYS.keys)
_SPLIT = KeyMap(
  *norm('patch_embed.norm', 'embedding_norm'), *SPLIT, *_KEYS.keys
)
# Heads of timm's architectures of a width, which config.json leaves out.
HEADS = {width: heads for width, _, _, heads in names.SIZES.values()}
HEADS |= {256: 4, 320: 5, 640: 10, 832: 13, 896: 14}
DINO_HEADS = HEADS | {1280: 20, 1536: 24, 4096: 32}  # and of EVA
# Values of model_args that change the computation but not the arrays, and for
# which our model is the same.
ARGS = {
  'pool_include_prefix': (False, None),
  'norm_layer': (None, 'layernorm', 'rmsnorm'),
  'dynamic_img_pad': (False, None),
}
_EXACT, _TANH, _QUICK = Gelu('exact'), Gelu('tanh'), Gelu('quick')
_ACTS = {'gelu': _EXACT, 'gelu_tanh': _TANH, 'quick_gelu': _QUICK}
_PRE_NORM = {'embedding.norm': 'tokens', 'embedding.bias': False}
_NO_PRE_NORM = {'embedding.norm': None, 'embedding.bias': True}
_CLIP = _PRE_NORM | {'block.norm_eps': 1e-5}
_POOLING: Config = {'token': ClassToken(), 'avg': Mean(), 'map': Map()}
_NO_NORM: Config = {'pooling.norm': None}
# Width: architecture under which ViTs are written; model_args make it theirs.
_ARCHITECTURES = {
  192: 'vit_tiny_patch16_224',
  384: 'vit_small_patch16_224',
  768: 'vit_base_patch16_224',
  1024: 'vit_large_patch16_224',
  1280: 'vit_huge_patch14_224',
}
# Norm, its epsilon and MLP: architecture, for what model_args cannot say.
_IMPLIED = {
  ('layer', 1e-5, Gelu): 'vit_base_patch16_clip_224',
  ('layer', 1e-6, SwiGlu): 'vit_giant_patch14_dinov2',
  ('rms', 1e-5, SwiGlu): 'aimv2_large_patch14_224',
}


def configure(config: Config, arrays: FlatParams) -> dict[str, Any]:
  """Return fields of a ViT that config.json has, or names of arrays imply."""
  found = {k: config[k] for k in ('num_heads',) if k in config}
  if 'act_layer' in config:
    name = config['act_layer']
    found['block.mlp'] = image_configs.choose(_ACTS, name, 'act_layer')
  has_fc_norm = 'fc_norm.weight' in arrays
  is_token = 'cls_token' in arrays and not has_fc_norm
  name = config.get('global_pool') or ('token' if is_token else 'avg')
  if not {'attn_pool.latent', 'dist_token'} & arrays.keys():
    found['pooling'] = image_configs.choose(_POOLING, name, 'global_pool')
  if config.get('norm_layer'):
    found['block.norm_eps'] = 1e-6
  if 'pre_norm' in config:
    found |= _PRE_NORM if config['pre_norm'] else _NO_PRE_NORM
  if 'final_norm' in config:
    found['pooling.norm'] = 'before' if config['final_norm'] else None
  if has_fc_norm and name == 'avg':
    # For a single token, the norm before and after pooling are the same.
    found['pooling.norm'] = 'after'
  if config.get('pos_embed') in ('none', '') and 'pos_embed' not in arrays:
    found['posemb'] = None
  return found


def ratio(hidden: int, width: int) -> float:
  """Return mlp_ratio such that int(width * mlp_ratio) is `hidden`."""
  found = hidden / width
  return found if int(width * found) == hidden else (hidden + 0.5) / width


def sizes(weights: Weights) -> dict[str, Any]:
  """Return the model_args that all classes of ViTs have."""
  model, patch = weights.model, weights.model.embedding.patch_size
  pools = {type(pooling): name for name, pooling in _POOLING.items()}
  return {
    'img_size': list(weights.image_shape[:2]),
    'patch_size': patch[0] if patch[0] == patch[1] else list(patch),
    'embed_dim': model.width,
    'depth': model.depth,
    'num_heads': model.num_heads,
    'mlp_ratio': ratio(model.mlp_dim, model.width),
    'global_pool': pools.get(type(model.pooling), 'token'),
  }


def write(
  weights: Weights, first: Sequence[Key] = ()
) -> tuple[FlatParams, Any]:
  """Return (arrays, (architecture, model_args)); rows of `first` come first."""
  model, params = weights.model, dict(weights.params)
  pooling, block = model.pooling, model.block
  nearest = min(_ARCHITECTURES, key=lambda x: abs(math.log(x / model.width)))
  how = block.norm, block.norm_eps, type(block.mlp)
  architecture, keys = _IMPLIED.get(how, _ARCHITECTURES[nearest]), _KEYS
  distilled = pooling.distillation_token
  args = sizes(weights)
  if distilled:
    architecture, keys = 'deit_base_distilled_patch16_224', _DISTILLED
  elif architecture.startswith('aimv2'):
    keys = _SPLIT
  elif type(block.mlp) is SwiGlu:
    keys = _PACKED
    args['mlp_ratio'] = ratio(2 * model.mlp_dim, model.width)
  args |= {
    'class_token': pooling.class_token,
    'fc_norm': pooling.norm == 'after',
    'reg_tokens': pooling.num_registers,
    'qk_norm': block.qk_norm,
    'no_embed_class': True,
  }
  is_biased = keys is not _SPLIT
  for name, value, default in (  # which older versions of timm do not know
    ('pre_norm', model.embedding.norm == 'tokens', '_clip_' in architecture),
    ('final_norm', pooling.norm is not None, True),
    ('qkv_bias', 'query' in block.biases, is_biased),
    ('proj_bias', 'mlp' in block.biases, is_biased),
    ('scale_attn_norm', 'attn' in block.sub_norm, False),
    ('scale_mlp_norm', 'mlp' in block.sub_norm, False),
  ):
    if value != default:
      args[name] = value
  if block.layerscale_init is not None:
    args['init_values'] = block.layerscale_init
  if block.mlp in (_TANH, _QUICK):
    args['act_layer'] = 'gelu_tanh' if block.mlp == _TANH else 'quick_gelu'
  if how[:2] == ('rms', 1e-6):
    args['norm_layer'] = 'rmsnorm'
  if model.posemb is None and not distilled:
    args['pos_embed'] = 'none'
  else:
    rows = {'cls_pos_embedding', 'registers_pos_embedding'}
    params = bundle.with_table(weights).params
    if distilled or not rows.isdisjoint(weights.params):  # all tokens have them
      args['no_embed_class'] = False
      for name in {'dist', 'registers'} & params.keys():
        params.setdefault(f'{name}_pos_embedding', np.zeros_like(params[name]))
    else:
      params.pop('cls_pos_embedding', None)
  if pooling.norm == 'after':
    keys = KeyMap(*norm('fc_norm', 'norm'), *keys.keys)
  if 'head/kernel' in params:
    params.setdefault('head/bias', np.zeros(model.num_classes, np.float32))
  if model.embedding.norm != 'tokens':
    params.setdefault('embedding/bias', np.zeros(model.width, np.float32))
  return KeyMap(*first, *keys.keys).to_theirs(params), (architecture, args)


def _write_naflex(weights):
  arrays, (architecture, args) = write(weights, _NAFLEX)
  tokens = args['class_token'] or args['reg_tokens']
  if tokens or architecture not in _ARCHITECTURES.values():
    raise UserError("timm's NaFlexVit has other norms, MLPs or tokens.")
  grid = list(weights.model.posemb.stored)
  args = {'act_layer': 'gelu', 'pos_embed_grid_size': grid} | args
  del args['no_embed_class']
  return arrays, ('naflexvit_base_patch16_siglip', args)


VIT = Family(
  r'(vit_(?!dp?wee|pwee|dlittle)[a-z0-9]+_patch\d+'
  r'(_plus|_36x1|_reg\d|_siglip|_gap|_map|_tipsv2|_dinov2)*(_\d+)?(_miil)?|'
  r'eva_large_patch14_\d+|deit3?_.*)?',
  r'blocks\.0\.attn\.qkv\.weight',
  _KEYS,
  fields={'block.mlp': _EXACT, 'pooling.norm': 'before', **_NO_PRE_NORM},
  configure=configure,
  heads=HEADS,
  args=ARGS,
  posemb_resize='bicubic_antialias',
  write=write,
)


def _like(pattern: str, fields: Config | None = None, **changes: Any) -> Family:
  """Return VIT for other architectures, which is only read."""
  fields = {**VIT.fields, **(fields or {})}
  return dataclasses.replace(
    VIT, pattern=pattern, fields=fields, **{'write': None} | changes
  )


def _backbone(stem: str, prefix: str = '') -> list[Key]:
  """Return the rows of a ResNet."""
  unit = f'{prefix}stages.{{s}}.blocks.{{u}}'
  ours = 'resnet/stage{s+1}/unit{u+1}'
  return [
    *conv(f'{stem}conv', 'resnet/root/conv'),
    *norm(f'{stem}norm', 'resnet/root/norm'),
    *conv(f'{unit}.downsample.conv', f'{ours}/conv_proj'),
    *norm(f'{unit}.downsample.norm', f'{ours}/norm_proj'),
    *conv(f'{unit}.conv{{n}}', f'{ours}/conv{{n}}'),  # not of _proj
    *norm(f'{unit}.norm{{n}}', f'{ours}/norm{{n}}'),
  ]


FAMILIES = (
  _like(
    r'naflexvit_[a-z0-9]+_patch\d+_siglip',
    {'block.mlp': _TANH},
    anchor=r'embeds\.proj\.weight',
    posemb_resize='bilinear_antialias',
    keeps_aspect=True,
    write=_write_naflex,
  ),
  _like(
    'vit_(so400m|giantopt)_patch16_siglip_.*|vit_base_patch32_siglip_.*|'
    'vit_large_patch16_siglip_(gap_)?512',
    {'block.mlp': _TANH},
  ),
  _like('vit_base_patch16_gap_224', {'num_heads': 16}),
  _like('vit_base_patch16_rpn_224', {'block.post_norm': True}),
  _like('test_vit2?', {'num_heads': 2}),
  _like('test_vit4', {'num_heads': 3}),
  _like(r'vit_[a-z]+_patch\d+(_plus)?_clip_\d+', _CLIP),
  _like(
    r'vit_[a-z]+_patch\d+_clip_quickgelu_\d+', _CLIP | {'block.mlp': _QUICK}
  ),
  _like(
    r'vit_giant_patch14_(reg\d_)?(dinov2|tipsv2)',
    keys=_PACKED,
    heads={1536: 24},
  ),
  _like(
    'aimv2_.*',
    {'block.norm_eps': 1e-5, 'embedding.norm': 'patches'},
    keys=_SPLIT,
    heads={1024: 8, 1536: 12, 2048: 16, 3072: 24},
  ),
  _like('beit3_.*', {'block.norm_eps': 1e-5}),
  _like('vit_intern300m_.*', _NO_NORM),
  _like(  # whose authors align the corners, too
    'vit_(base|huge)_patch16_radio_v3',
    _NO_NORM,
    posemb_resize='paper_square',
    patch_resize='bilinear',
  ),
  _like(
    r'vit_[a-z0-9]+_patch16_radio_v\d',
    _NO_NORM,
    heads=HEADS | {1536: 24},
    posemb_resize='bilinear_square',
    patch_resize='bilinear',
  ),
  _like('flexivit_.*', posemb_resize='bilinear', patch_resize='bilinear'),
  dataclasses.replace(
    VIT, anchor='dist_token', keys=_DISTILLED, rows=(('cls', 'dist'),)
  ),
  _like(
    '(vit_[a-z]+_(r[0-9]*_s|resnet).*)?',
    anchor=r'patch_embed\.backbone\.(stem\.)?conv\.weight',
    keys=KeyMap(
      *_KEYS.keys,
      *_backbone('patch_embed.backbone.stem.', 'patch_embed.backbone.'),
      *_backbone('patch_embed.backbone.', 'patch_embed.backbone.'),
    ),
  ),
  VIT,
  Family(
    '(mixer_.*)?',
    r'blocks\.0\.mlp_tokens\.fc1\.weight',
    KeyMap(
      *conv('stem.proj', 'embedding'),
      *linear('blocks.{i}.mlp_{x}s.fc{n}', 'block_{i}/{x}_mixing/fc{n}'),
      *_KEYS.keys,
    ),
    fields={'mlp': Gelu('exact')},
  ),
  Family(
    '(resnetv2_.*_bit)?',
    r'stages\.0\.blocks\.0\.conv1\.weight',
    KeyMap(
      *_backbone('stem.'), *norm('norm', 'norm'), *conv('head.fc', 'head')
    ),
  ),
)

"""timm's Eva: EVA-01 and 02, DINOv3, EUPE, LingBot, PE, RoPE-ViT; and Beit.

Names of architectures stand for arguments that config.json leaves out. We write
all arguments but the epsilon of the norms, which only a name can give.
"""

import functools
import math

from vit_jax.models.layers import SwiGlu, as_pair
from vit_jax.models.pooling import Map
from vit_jax.models.posemb import Learned
from vit_jax.models.rotary import (
  RotaryAxial,
  RotaryDino,
  RotaryMixed,
)
from vit_jax.weights import bundle, image_configs
from vit_jax.weights.families import timm_vit
from vit_jax.weights.family import Family
from vit_jax.weights.keymap import Key, KeyMap, linear, norm

_BIASES = [
  Key(f'blocks.{{i}}.attn.{x[0]}_bias', f'block_{{i}}/attn/{x}/bias', 'flat')
  for x in ('query', 'value')
]
_APART = [
  row
  for x in ('query', 'key', 'value')
  for row in linear(f'blocks.{{i}}.attn.{x[0]}_proj', f'block_{{i}}/attn/{x}')
]
_SPLIT = [
  *linear('blocks.{i}.mlp.fc1_g', 'block_{i}/mlp/gate'),
  *linear('blocks.{i}.mlp.fc1_x', 'block_{i}/mlp/fc1'),
]
_PACKED = linear('blocks.{i}.mlp.fc1', 'block_{i}/mlp/gate|fc1')
_ROWS = (
  Key('blocks.{i}.gamma_{n}', 'block_{i}/ls{n}'),
  *norm('blocks.{i}.{part}.norm', 'block_{i}/{part}/norm'),
  *norm('norm_pre', 'embedding_norm'),
  Key('rope.freqs', 'block_{i}/attn/frequencies', 'layers1'),
  *timm_vit.ROWS,
  *linear('head', 'head'),
)
_TABLE = 'attn.relative_position_bias_table'
# Array of the first block: matrices that have a bias.
_QKV = {
  'qkv.bias': ('query', 'key', 'value'),
  'q_bias': ('query', 'value'),
  'q_proj.bias': ('query', 'value'),
}
_SIZES = {384: 'small', 768: 'base', 1024: 'large'}


def _configure(defaults, config, arrays):
  args = {**defaults, **config}
  found = timm_vit.configure(args, arrays)
  if found['pooling'] == 'map':
    hidden = len(arrays['attn_pool.mlp.fc1.weight'])
    found['pooling'] = Map(
      num_heads=args.get('attn_pool_num_heads'), mlp_dim=hidden, all_tokens=True
    )
  elif found['pooling'] == 'gap' and args.get('use_fc_norm') is not False:
    found['final_norm'] = 'after'  # files of pre-trained EVA call it `norm`
  qkv = [x for k, x in _QKV.items() if f'blocks.0.attn.{k}' in arrays]
  found['biases'] = (*(qkv or [()])[0], 'out', 'mlp')
  found['embedding_bias'] = 'norm_pre.weight' not in arrays
  if args.get('use_rot_pos_emb'):
    found['posemb'] = _rotary(args, arrays)
  return found


def _rotary(args, arrays):
  has_rows = 'cls_token' not in arrays or not args.get('no_embed_class')
  learned = Learned(prefix=has_rows) if 'pos_embed' in arrays else None
  kind = args.get('rope_type', 'cat')
  temperature = args.get('rope_temperature', 10_000.0)
  if kind == 'cat':
    reference = args.get('ref_feat_shape')
    return RotaryAxial(
      learned,
      temperature,
      'xy' if args.get('rope_grid_indexing') == 'xy' else 'yx',
      args.get('rope_grid_offset', 0),
      reference and as_pair(reference),
    )
  kinds = {'dinov3': RotaryDino, 'mixed': RotaryMixed}
  return image_configs.choose(kinds, kind, 'rope_type')(learned, temperature)


def _write(weights):
  model, block, pooling = (
    weights.model,
    weights.model.block,
    weights.model.pooling,
  )
  is_swiglu, is_normed = isinstance(block.mlp, SwiGlu), 'mlp' in block.sub_norm
  is_small = block.norm_eps < 1e-5
  is_packed = is_swiglu and not is_normed and is_small
  args = timm_vit.sizes(weights) | {
    'class_token': pooling.class_token,
    'num_reg_tokens': pooling.num_registers,
    'qk_norm': block.qk_norm,
    'qkv_bias': 'query' in block.biases,
    'qkv_fused': not is_normed,
    'attn_type': 'rope' if 'key' in block.biases else 'eva',
    'swiglu_mlp': is_swiglu,
    'swiglu_align_to': int(is_swiglu and not is_packed),
    'scale_mlp': is_normed,
    'init_values': block.layerscale_init,
    'scale_attn_inner': 'attn' in block.sub_norm,
    'use_pre_transformer_norm': model.embedding.norm == 'tokens',
    'use_post_transformer_norm': pooling.norm == 'before',
    'use_fc_norm': pooling.norm == 'after',
    **_positions(model.posemb),
  }
  if isinstance(pooling, Map):
    hidden = pooling.mlp_dim or model.mlp_dim
    args['attn_pool_num_heads'] = pooling.num_heads or model.num_heads
    args['attn_pool_mlp_ratio'] = timm_vit.ratio(hidden, model.width)
  if not args['use_rot_pos_emb']:
    weights = bundle.with_table(weights)
  keys = KeyMap(
    *(_APART if is_normed else []),
    *([] if 'key' in block.biases else _BIASES),
    *(_PACKED if is_packed else _SPLIT if is_swiglu else []),
    *(norm('fc_norm', 'norm') if args['use_fc_norm'] else []),
    *_ROWS,
  )
  size = _SIZES[min(_SIZES, key=lambda x: abs(math.log(x / model.width)))]
  name = f'vit_{size}_patch16_{"rope_224" if is_small else "dinov3"}'
  if is_packed:
    name = 'eva02_small_patch14_224'
  return keys.to_theirs(weights.params), (name, args)


def _positions(posemb):
  kinds = {RotaryAxial: 'cat', RotaryDino: 'dinov3', RotaryMixed: 'mixed'}
  kind = kinds.get(type(posemb))
  if kind is None:
    has_table = posemb is not None
    return {'use_rot_pos_emb': False, 'use_abs_pos_emb': has_table}
  learned = posemb.learned
  args = {
    'use_rot_pos_emb': True,
    'use_abs_pos_emb': learned is not None,
    'no_embed_class': learned is not None and not learned.prefix,
    'rope_type': kind,
    'rope_temperature': posemb.temperature,
    'rope_rotate_half': kind == 'dinov3',
    'rope_grid_indexing': 'xy' if kind == 'mixed' else 'ij',
  }
  if kind == 'cat':
    args |= {
      'rope_grid_indexing': 'ij' if posemb.order == 'yx' else 'xy',
      'rope_grid_offset': posemb.first,
      'ref_feat_shape': posemb.reference and list(posemb.reference),
    }
  return args


def _eva(pattern, norm_eps=1e-6, heads=None, keys=_SPLIT, write=None, **args):
  """Return the Family of architectures with the same arguments of Eva."""
  return Family(
    pattern,
    r'blocks\.0\.attn\.(qkv|q_proj)\.weight',
    KeyMap(*keys, *_ROWS, *_BIASES, *_APART),
    fields={
      'mlp': 'gelu',
      'norm': 'layer',
      'norm_eps': norm_eps,
      'head_bias': True,
    },
    configure=functools.partial(_configure, args),
    heads=timm_vit.HEADS | (heads or {}),
    args={
      'dynamic_img_pad': (False,),
      'use_post_norm': (False,),
      'attn_only_layer_scale': (False,),
      'num_kv_heads': (None,),
    },
    unused=r'mask_token|lm_head\..*|.*\.relative_position_index',
    posemb_resize='bicubic_antialias',
    write=write,
  )


_AXIAL = {'use_rot_pos_emb': True}
_EVA02 = _AXIAL | {'ref_feat_shape': 16}
_XY = _AXIAL | {'rope_grid_indexing': 'xy'}
_PE = _XY | {'attn_pool_num_heads': 8, 'use_fc_norm': False}
_MIXED = _XY | {'rope_type': 'mixed', 'rope_temperature': 10.0}
FAMILIES = (
  _eva(
    r'vit_\w+_patch16_(dinov3(_qkvb)?|lingbot)',
    1e-5,
    {1280: 20, 1536: 24, 4096: 32},
    write=_write,
    rope_type='dinov3',
    rope_temperature=100.0,
    use_fc_norm=False,
    **_AXIAL,
  ),
  _eva(r'eva02_(tiny|small)_patch14_\d+', keys=_PACKED, **_EVA02),
  _eva(r'eva02_(base|large)_patch1[46]_(clip_)?\d+', **_EVA02),
  _eva(r'eva_giant_patch14_(clip_)?\d+'),
  _eva(r'vit_[a-z]+_patch16_rope_reg\d_gap_256', **_EVA02),
  _eva('vit_[a-z]+_patch16_rope_224', rope_temperature=100.0, **_XY),
  _eva(
    'vit_[a-z]+_patch16_rope_ape_224',
    rope_temperature=100.0,
    no_embed_class=True,
    **_XY,
  ),
  _eva('vit_[a-z]+_patch16_rope_mixed_224', **_MIXED),
  _eva('vit_[a-z]+_patch16_rope_mixed_ape_224', no_embed_class=True, **_MIXED),
  _eva(r'vit_pe_\w+_gigantic_patch14_448', 1e-5, ref_feat_shape=32, **_PE),
  *(
    _eva(
      rf'vit_pe_\w+_(tiny|small|base|large)_patch\d+_({sides})',
      1e-5,
      ref_feat_shape=reference,
      rope_grid_offset=1,
      **_PE,
    )
    for sides, reference in (('224', 14), ('336|384', 24), ('448|512', 32))
  ),
)

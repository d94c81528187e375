"""timm's Eva and Beit: EVA, DINOv3, EUPE, LingBot, PE, RoPE-ViT; BEiT.

A name stands for arguments that config.json leaves out (_ARGS), and we write
all but the epsilon of the norms, which only the name can say.
"""

import functools
from typing import Any

from vit_jax.models import rotary
from vit_jax.models.dense import Gelu, SwiGlu
from vit_jax.models.pooling import Map
from vit_jax.models.posemb import Learned, RelativeBias
from vit_jax.models.vit import as_pair
from vit_jax.types import UserError
from vit_jax.weights import bundle
from vit_jax.weights.families import timm_vit
from vit_jax.weights.family import Family
from vit_jax.weights.keymap import Key, KeyMap, linear, norm

_APART = (
  *linear('blocks.{i}.attn.q_proj', 'block_{i}/attn/query'),
  *linear('blocks.{i}.attn.k_proj', 'block_{i}/attn/key'),
  *linear('blocks.{i}.attn.v_proj', 'block_{i}/attn/value'),
)
_ROWS = (
  Key('blocks.{i}.gamma_{n}', 'block_{i}/ls{n}'),
  Key('rope.freqs', 'block_{i}/attn/frequencies', 'layers1'),
  Key(
    'blocks.{i}.attn.relative_position_bias_table',
    'block_{i}/attn/relative_bias|class_bias',
    'relative',
  ),
  *timm_vit.VIT.keys.keys,
  *_APART,
  *timm_vit.BIASES,
)
_XY = {'use_rot_pos_emb': True, 'rope_grid_indexing': 'xy'}
_NAVER = _XY | {'no_embed_class': True}
_PE = _XY | {'attn_pool_num_heads': 8, 'norm_eps': 1e-5}
_PE_CLS = _PE | {'rope_grid_offset': 1}
_EVA02 = {'use_rot_pos_emb': True, 'ref_feat_shape': 16}
_DINOV3 = {'use_rot_pos_emb': True, 'rope_type': 'dinov3', 'norm_eps': 1e-5}
# Regular expression of names: arguments of Eva or Beit, and of Family below.
_ARGS: dict[str, dict[str, Any]] = {
  r'vit_\w+_patch16_(dinov3(_qkvb)?|lingbot)': _DINOV3,
  r'eva02_enormous_\w+': {'use_post_norm': True},
  r'eva02_(tiny|small)_patch14_\d+': _EVA02 | {'mlp_keys': timm_vit.PACKED},
  r'eva02_(base|large)_\w+|vit_[a-z]+_patch16_rope_reg\d_gap_256': _EVA02,
  r'eva_giant_\w+': {},
  'vit_[a-z]+_patch16_rope_(ape_)?224': _NAVER | {'rope_temperature': 100.0},
  'vit_[a-z]+_patch16_rope_mixed_(ape_)?224': _NAVER | {'rope_type': 'mixed'},
  r'vit_pe_\w+_gigantic_\w+': _PE | {'ref_feat_shape': 32, 'num_heads': 16},
  r'vit_pe_core_base_\w+': _PE_CLS | {'ref_feat_shape': 14},
  r'vit_pe_core_\w+': _PE_CLS | {'ref_feat_shape': 24},
  r'vit_pe_\w+': _PE_CLS | {'ref_feat_shape': 32},
  r'beit(v2)?_\w+': {'use_rel_pos_bias': True, 'posemb_resize': 'geometric'},
}
_FIELDS = {'block.mlp': Gelu('exact'), 'block.norm': 'layer', 'head.bias': True}
_ROTARY = {
  'cat': rotary.RotaryAxial,
  'dinov3': rotary.RotaryDino,
  'mixed': rotary.RotaryMixed,
}


def _configure(defaults, config, arrays):
  args = {**defaults, **config}
  found = timm_vit.configure(args, arrays)
  found['block.norm_eps'] = args.get('norm_eps', 1e-6)
  found['block.post_norm'] = bool(args.get('use_post_norm'))
  found['embedding.bias'] = 'norm_pre.weight' not in arrays
  if 'attn_pool.latent' in arrays:
    heads = args.get('attn_pool_num_heads')
    hidden = len(arrays['attn_pool.mlp.fc1.weight'])
    found['pooling'] = Map(num_heads=heads, mlp_dim=hidden, all_tokens=True)
  if args.get('use_rel_pos_bias'):
    found['posemb'] = RelativeBias()
  if args.get('use_rot_pos_emb'):
    cls = _ROTARY[args.get('rope_type', 'cat')]
    reference = args.get('ref_feat_shape')
    has_rows = 'cls_token' not in arrays or not args.get('no_embed_class')
    learned = Learned(prefix=has_rows) if 'pos_embed' in arrays else None
    fields = [learned, args.get('rope_temperature', cls.temperature)]
    if cls is rotary.RotaryAxial:
      order = 'xy' if args.get('rope_grid_indexing') == 'xy' else 'yx'
      fields += [order, args.get('rope_grid_offset', 0)]
      is_half = args.get('rope_rotate_half')
      fields += [reference and as_pair(reference), None, -2 if is_half else -1]
    found['posemb'] = cls(*fields)
  return found


def _write(weights):
  model, block = weights.model, weights.model.block
  pooling, posemb = model.pooling, model.posemb
  biases = ''.join(name[0] for name in block.biases)
  scaled = block.qk_norm or block.layerscale_init is not None
  if biases not in ('om', 'qvom', 'qkvom') or (block.post_norm and scaled):
    raise UserError(f"timm's Eva has no model with {block}.")
  if not (posemb and posemb.in_layers):
    weights, posemb = bundle.with_table(weights), Learned()
  is_beit = isinstance(posemb, RelativeBias)
  is_coarse = block.norm_eps == 1e-5
  is_swiglu, is_normed = isinstance(block.mlp, SwiGlu), 'mlp' in block.sub_norm
  is_packed = is_swiglu and not is_normed and not is_coarse
  table = getattr(posemb, 'learned', None if is_beit else posemb)
  rope = {cls: kind for kind, cls in _ROTARY.items()}.get(type(posemb))
  is_xy = rope == 'mixed' or getattr(posemb, 'order', '') == 'xy'
  args = timm_vit.sizes(weights) | {
    'init_values': block.layerscale_init,
    'qkv_bias': 'q' in biases,
    'swiglu_mlp': is_swiglu,
    'scale_mlp': is_normed,
    'use_abs_pos_emb': table is not None,
    'use_fc_norm': pooling.norm == 'after',
  }
  if not is_beit:
    args |= {
      'class_token': pooling.class_token,
      'num_reg_tokens': pooling.num_registers,
      'qk_norm': block.qk_norm,
      'use_post_norm': block.post_norm,
      'qkv_fused': not is_normed,
      'attn_type': 'rope' if 'k' in biases else 'eva',
      'scale_attn_inner': 'attn' in block.sub_norm,
      'swiglu_align_to': int(is_swiglu and not is_packed),
      'use_pre_transformer_norm': model.embedding.norm == 'tokens',
      'use_post_transformer_norm': pooling.norm == 'before',
      'no_embed_class': not getattr(table, 'prefix', True),
      'use_rot_pos_emb': rope is not None,
      'rope_type': rope,
      'rope_rotate_half': getattr(posemb, 'pairs_axis', -1) == -2,
      'rope_temperature': getattr(posemb, 'temperature', None),
      'rope_grid_indexing': 'xy' if is_xy else 'ij',
      'rope_grid_offset': getattr(posemb, 'first', 0),
      'ref_feat_shape': getattr(posemb, 'reference', None),
    }
  if isinstance(pooling, Map):
    hidden = pooling.mlp_dim or model.mlp_dim
    args['attn_pool_num_heads'] = pooling.num_heads or model.num_heads
    args['attn_pool_mlp_ratio'] = timm_vit.ratio(hidden, model.width)
  keys = KeyMap(
    *(_APART if is_normed else ()),
    *(() if 'k' in biases else timm_vit.BIASES),
    *(timm_vit.PACKED if is_packed else timm_vit.SPLIT if is_swiglu else ()),
    *(norm('fc_norm', 'norm') if args['use_fc_norm'] else ()),
    *_ROWS,
  )
  name = 'vit_base_patch16_dinov3' if is_coarse else 'vit_base_patch16_rope_224'
  name = 'eva02_small_patch14_224' if is_packed else name
  name = 'beitv2_base_patch16_224' if is_beit else name
  return keys.to_theirs(weights.params), (name, args)


FAMILIES = tuple(
  Family(
    pattern,
    r'blocks\.0\.attn\.(qkv|q_proj)\.weight',
    KeyMap(*args.get('mlp_keys', timm_vit.SPLIT), *_ROWS),
    fields=_FIELDS,
    configure=functools.partial(_configure, args),
    heads=timm_vit.DINO_HEADS,
    unused=r'.*\.relative_position_index',
    posemb_resize=args.get('posemb_resize', 'bicubic_antialias'),
    write=_write,
  )
  for pattern, args in _ARGS.items()
)

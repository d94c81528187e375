"""timm's DeepSeek and Qwen, and the same encoders in files of their LLMs.

Heads turn halves as pairs (RoPE); Qwen has a table of positions, too. Pooled is
the mean, which timm's classifiers normalise. Projectors to the LLM are left
out, and so are heads that read them. Files of LLMs are only read.
"""

import functools
import math

import numpy as np

from vit_jax.models.dense import Gelu
from vit_jax.models.pooling import Mean
from vit_jax.models.posemb import Learned
from vit_jax.models.rotary import RotaryAxial
from vit_jax.types import UserError
from vit_jax.weights.families import timm_vit
from vit_jax.weights.family import Family
from vit_jax.weights.keymap import Key, KeyMap, linear

_QWEN = KeyMap(
  *timm_vit.VIT.keys.keys,
  Key('pos_embed.weight', 'pos_embedding', 'rows'),  # from here on of LLMs
  *linear('blocks.{i}.mlp.linear_fc{n}', 'block_{i}/mlp/fc{n}'),
  *linear('blocks.{i}.attn.wqkv', 'block_{i}/attn/query|key|value'),
  *linear('blocks.{i}.attn.wo', 'block_{i}/attn/out', 'merged'),
  *linear('blocks.{i}.mlp.w1', 'block_{i}/mlp/gate|fc1'),
  *linear('blocks.{i}.mlp.w2', 'block_{i}/mlp/fc2'),
)
_DEEPSEEK = KeyMap(*timm_vit.PACKED, *_QWEN.keys)
_UNUSED = r'(encoder\.)?((deepstack_)?merger(_list)?|aligner|rotary_.*)\..*'


def _configure(config, arrays):
  name, own = config.get('architecture', ''), config.get('vision_config') or {}
  args = config if name else {}  # or of an LLM
  rope = {'rope_theta': args.get('rope_temperature', 10_000.0)}
  heads = own.get('num_attention_heads', (config | own).get('num_heads'))
  learned = Learned() if {'pos_embed', 'pos_embed.weight'} & {*arrays} else None
  theta = (own.get('rope_parameters') or rope)['rope_theta']
  is_normed = name and '_enc' not in name and config.get('final_norm', True)
  return ({'num_heads': heads} if heads else {}) | {
    'posemb': RotaryAxial(learned, theta, pairs_axis=-2),
    'block.norm_eps': args.get('norm_eps', 1e-6),
    'pooling': Mean(unit_norm=bool(is_normed)),
  }


def _prepare(arrays, config):
  """Return arrays without a prefix, and kernels of patches of one image."""
  arrays = {k.removeprefix('encoder.'): x for k, x in arrays.items()}
  kernel = arrays['patch_embed.proj.weight']
  if kernel.ndim == 5:  # of frames, which are equal in an image
    kernel = np.sum(kernel, axis=2, dtype=np.float64).astype(np.float32)
  side = math.isqrt(kernel[0].size // 3)
  shape = kernel.shape if kernel.ndim == 4 else (-1, 3, side, side)
  return arrays | {'patch_embed.proj.weight': kernel.reshape(shape)}


def _write(weights):
  model, eps = weights.model, weights.model.block.norm_eps
  is_qwen = model.block.norm == 'layer'
  is_normed = getattr(model.pooling, 'unit_norm', False)
  args = timm_vit.sizes(weights) | {'out_features': 0, 'norm_eps': eps}
  args['rope_temperature'] = getattr(model.posemb, 'temperature', 0)
  arrays = (_QWEN if is_qwen else _DEEPSEEK).to_theirs(weights.params)
  gh, gw = weights.grid
  count = (12 if is_qwen else 8) * model.depth + 3 + 2 * bool(model.num_classes)
  if len(arrays) != count or (is_qwen and gh != gw):
    raise UserError("timm's DeepSeek and Qwen have other, square, arrays.")
  args |= {'pos_embed_grid_size': gh} if is_qwen else {}
  name = 'qwen3_vit_416m' if is_qwen else 'deepseek_vit_412m'
  if not (is_normed or model.num_classes):
    return arrays, (f'{name}_enc', args)
  parts = {k: '' if k.startswith('head') else 'encoder.' for k in arrays}
  args['final_norm'] = is_normed
  return {parts[k] + k: x for k, x in arrays.items()}, (name, args)


_family = functools.partial(  # (pattern, anchor, keys, ...)
  Family,
  fields={'block.mlp': Gelu()},
  configure=_configure,
  heads={768: 12, 1024: 16, 1152: 16},
  args={'encoder_pool': ('',), 'act_layer': (None, 'gelu_tanh')},
  unused=_UNUSED,
  prepare=_prepare,
  images={'mean': (0.5,) * 3, 'std': (0.5,) * 3, 'crop_pct': 1.0, 'grid': 39},
)
_ANCHOR = r'(encoder\.)?blocks\.0\.attn\.qkv\.weight'
_NO_HEAD = rf'{_UNUSED}|head\..*'
FAMILIES = (
  _family('', r'blocks\.0\.mlp\.linear_fc1\.weight', _QWEN),
  _family('', r'blocks\.0\.attn\.wqkv\.weight', _DEEPSEEK),
  _family('qwen3_vit_[^_]*(_enc)?', _ANCHOR, _QWEN, write=_write),
  _family('deepseek_vit_[^_]*(_enc)?', _ANCHOR, _DEEPSEEK),
  _family('qwen3_vit_.*_merge', _ANCHOR, _QWEN, unused=_NO_HEAD),
  _family('deepseek_vit_.*_align', _ANCHOR, _DEEPSEEK, unused=_NO_HEAD),
)

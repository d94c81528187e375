"""What the released .npz files have in common: names that Flax gave.

Models were written in Flax three times over the years, and each file has the
names of its time. Shared by original.py and big_vision.py.
"""

import math
import re

import numpy as np

from vit_jax.weights import grids
from vit_jax.weights.bundle import MIXER, Weights, fold_layerscale
from vit_jax.weights.naming import Rule, rename
from vit_jax.weights.shapes import settings_of

TABLE = 'Transformer/posembed_input/pos_embedding'  # of the original's files
BIT_ROOT = 'resnet/root_block/standardized_conv2d/kernel'  # of the BiT paper's
BIG_VISION = 'big_vision npz'
GENERATIONS = {  # numbers of the modules in a layer: attention, 2nd norm, MLP
  'linen': (0, 1, 0),  # counted for each class
  'pre_linen': (1, 2, 3),  # counted for all of them together
}
_ANCHORS = 'embedding/kernel', 'stem/kernel', 'conv_root/kernel', BIT_ROOT
_PREFIXES = '', 'opt/target/', 'params/img/', 'img/', 'params/', 'target/'
_STATE = r'(opt|opt_state|state)/.*|(.*/)?step'
_TEXT = r'(params/)?(txt/.*|t|b)'  # the other tower, temperature and bias
_LAYER = 'Transformer/encoderblock'

_HYBRID = [
  Rule('conv_root/kernel', 'resnet/root/conv/kernel'),
  Rule('gn_root/{p}', 'resnet/root/norm/{p}'),
  Rule(
    'block{s}/unit{u}/conv{n}/kernel', 'resnet/stage{s}/unit{u}/conv{n}/kernel'
  ),
  Rule('block{s}/unit{u}/gn{n}/{p}', 'resnet/stage{s}/unit{u}/norm{n}/{p}'),
]
_MAP = [
  Rule('MAPHead_0/probe', 'map_head/probe'),
  Rule(
    'MAPHead_0/MultiHeadDotProductAttention_0/{n}/{p}', 'map_head/attn/{n}/{p}'
  ),
  Rule('MAPHead_0/LayerNorm_0/{p}', 'map_head/norm/{p}'),
  Rule('MAPHead_0/MlpBlock_0/Dense_0/{p}', 'map_head/mlp/fc1/{p}'),
  Rule('MAPHead_0/MlpBlock_0/Dense_1/{p}', 'map_head/mlp/fc2/{p}'),
]
_MIXER = [
  Rule('stem/{p}', 'embedding/{p}'),
  Rule('MixerBlock_{i}/LayerNorm_0/{p}', 'block_{i}/norm1/{p}'),
  Rule('MixerBlock_{i}/LayerNorm_1/{p}', 'block_{i}/norm2/{p}'),
  Rule('MixerBlock_{i}/{n}_mixing/Dense_0/{p}', 'block_{i}/{n}_mixing/fc1/{p}'),
  Rule('MixerBlock_{i}/{n}_mixing/Dense_1/{p}', 'block_{i}/{n}_mixing/fc2/{p}'),
  Rule('pre_head_layer_norm/{p}', 'norm/{p}'),
  Rule('head/{p}', 'head/{p}'),
]


def _vit_rules(generation):
  attention, norm, mlp = GENERATIONS[generation]
  layer, ours = _LAYER + '_{i}/', 'block_{i}/'
  mlp = f'{layer}MlpBlock_{mlp}/Dense_'
  return [
    Rule('cls', 'cls'),
    Rule('embedding/{p}', 'embedding/{p}'),
    Rule(layer + 'LayerNorm_0/{p}', ours + 'norm1/{p}'),
    Rule(
      f'{layer}MultiHeadDotProductAttention_{attention}/{{n}}/{{p}}',
      ours + 'attn/{n}/{p}',
    ),
    Rule(f'{layer}LayerNorm_{norm}/{{p}}', ours + 'norm2/{p}'),
    Rule(mlp + '0/{p}', ours + 'mlp/fc1/{p}'),
    Rule(mlp + '1/{p}', ours + 'mlp/fc2/{p}'),
    Rule('Transformer/encoder_norm/{p}', 'norm/{p}'),
    Rule('pre_logits/{p}', 'pre_logits/{p}'),
    Rule('head/{p}', 'head/{p}'),
    *_MAP,
    *_HYBRID,
  ]


def prefix_of(names):
  """What stands before the parameters' names; None if there are none known."""
  for prefix in _PREFIXES:
    if any(prefix + anchor in names for anchor in _ANCHORS):
      return prefix
  return None


def is_transformer(names, prefix):
  return any(n.startswith(f'{prefix}{_LAYER}') for n in names)


def parameters(arrays, notes):
  """{name: array} without prefix, optimizer, other tower; one layer each.

  What is left out is added to notes. GroupNorm's stored [1, 1, 1, C] are [C].
  """
  prefix = prefix_of(arrays) or ''
  out, state, text, empty = {}, 0, 0, 0
  for name, array in arrays.items():
    if prefix and name.startswith(prefix):
      name = name[len(prefix) :]
    elif re.fullmatch(_STATE, name):
      state += 1
      continue
    elif prefix.endswith('img/') and re.fullmatch(_TEXT, name):
      text += 1
      continue
    if re.fullmatch('(pre_logits|head)/?', name) and not array.size:
      empty += 1
      continue
    if re.fullmatch('(.*/)?gn([123]|_root|_proj)/(scale|bias)', name):
      array = array.reshape(-1) if array.shape[:-1] == (1, 1, 1) else array
    if re.match('probe$|(LayerNorm|MlpBlock|MultiHead[a-zA-Z]*)_0/', name):
      name = f'MAPHead_0/{name}'  # early files have the head's parts outside
    out |= _unstack(name, array)
  for count, what in (
    (state, "of the optimizer's and other state"),
    (text, 'of the text tower, its temperature and bias'),
    (empty, 'that are empty'),
  ):
    if count:
      notes.append(f'  {count} arrays {what} left out')
  return out


def _unstack(name, array):
  if not name.startswith(_LAYER + '/') or not array.ndim:
    return {name: array}
  rest = name[len(_LAYER) :]
  return {f'{_LAYER}_{i}{rest}': layer for i, layer in enumerate(array)}


def read(arrays, positions, to_theirs, notes, *, origin, **options):
  """Weights of what `parameters` gives.

  Args:
    arrays: {name: array}.
    positions: function (table, has_cls, grid) -> {our path: array}.
    to_theirs: function (params, generation) -> arrays.
    notes: of the Weights.
    origin: of the Weights.
    **options: num_heads, grid, image_size, and fields of the model.
  """
  grid, size = options.pop('grid', None), options.pop('image_size', None)
  given = {k: v for k, v in options.items() if v is not None}
  mixer = 'stem/kernel' in arrays
  old = any('/MlpBlock_3/' in name for name in arrays)
  generation = 'pre_linen' if old else 'linen'
  params, rest = rename(
    arrays, _MIXER if mixer else _vit_rules(generation), to='ours'
  )
  tables = [name for name in (TABLE, 'pos_embedding') if name in rest]
  # Fixed positions, which are in no table, came with big_vision's format.
  fixed = origin == BIG_VISION and not old and 'conv_root/kernel' not in arrays
  if is_transformer(arrays, '') and not tables and not fixed:
    raise ValueError(f'The file lacks its position table, {TABLE}.')
  if tables and not mixer:
    params |= positions(rest.pop(tables[0]), 'cls' in arrays, grid)
  settings = settings_of(
    params, rest, arrays, lambda p: to_theirs(p, generation), **given
  )
  shape = grids.image_shape(params, settings, image_size=size, grid=grid)
  if old:
    origin += ' (pre-Linen names)'
  return Weights(settings, params, shape, origin=origin, notes=notes)


def names_of(params, generation):
  """{their name: array} of ours, but for positions."""
  mixer = 'block_0/token_mixing/fc1/kernel' in params
  out, rest = rename(
    {k: v for k, v in params.items() if 'pos_embedding' not in k},
    _MIXER if mixer else _vit_rules(generation),
    to='theirs',
  )
  if rest:
    raise ValueError(f'The format has no place for {", ".join(sorted(rest))}.')
  return out


def writable(weights, format, *, holds_map=False):
  """Params in float32, LayerScale folded, of a model that a format can hold.

  Raises:
    ValueError: it cannot; names every reason.
  """
  settings = weights.settings
  problems = [
    text
    for problem, text in (
      (settings.get('num_registers'), 'registers'),
      (settings.get('qk_norm'), 'norms of queries and keys (qk_norm)'),
      (settings.get('norm_after_pooling'), 'norm_after_pooling'),
      (
        settings.get('norm_eps', 1e-6) != 1e-6,
        f'norm_eps {settings.get("norm_eps")} (readers take 1e-6)',
      ),
      (
        settings.get('pooling') == 'map' and not holds_map,
        "a MAP head (pooling='map'), which big_vision's format has",
      ),
    )
    if problem
  ]
  if problems:
    raise ValueError(
      f'{format} .npz cannot hold {", ".join(problems)}. Write the weights as '
      'timm (config.json, model.safetensors) instead.'
    )
  for field, value in (('gelu', 'exact'), ('pooling', 'none')):
    if settings.get(field) == value:
      weights.notes.append(
        f'  {field}={value!r} is not in the file: tell its reader'
      )
  params = {k: np.asarray(v, np.float32) for k, v in weights.params.items()}
  if settings['target'] == MIXER:
    return params
  return fold_layerscale(params, weights.notes)


def check_table(table):
  """A position table [1, N, D] or [N, D] as [1, N, D]."""
  if table.ndim < 2 or math.prod(table.shape[:-2]) != 1:
    raise ValueError(
      f'The position table has shape {table.shape}; expected (1, N, D).'
    )
  return table.reshape(1, *table.shape[-2:])

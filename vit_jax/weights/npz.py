"""The released .npz files: the paper's authors', BiT's and big_vision's.

All store arrays in the layout of Flax, so the key maps only rename. The
models were written three times over the years, and each file has the names of
its time, below 'opt/target/', 'params/' or nothing.

'npz' is the format of the paper's code (also AugReg, SAM, MLP-Mixers and
ResNets of both forms). The position table of a Transformer, TABLE, has a row
for the class token before those of the patches if there is a class token.

'big_vision' has a table 'pos_embedding' for the patches only; the position of
the class token is added to 'cls'. There may be a MAP head; layers may be
stacked, 'Transformer/encoderblock/...' with a leading dimension; the model may
be the image tower of two, 'params/img/...'. A file without a table has fixed
positions: it is read as posemb='sincos2d' unless the caller says otherwise.
Its ResNets have both forms of `models.resnet`: 'root_block/conv_root' and
'block1/unit01' are 'preact', as the BiT paper has it; 'conv_root' and
'block1/unit1' are 'postact'.

Neither format contains transforms of test images. Those of big_vision's models
are big_vision's; those of 'npz', and of the image tower of two, resize to a
square as both code bases do for such models.

The ImageNet-21k files of the first release have the tanh layer 'pre_logits'
and a head of zeros; AugReg's have a working head and no such layer.
"""

import functools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from vit_jax.config.checks import one_of
from vit_jax.data import transforms
from vit_jax.models.layers import as_pair
from vit_jax.models.mixer import MlpMixer
from vit_jax.models.pooling import Map, NoPooling
from vit_jax.models.resnet import Hybrid, ResNet
from vit_jax.types import FlatParams, Size
from vit_jax.weights import bundle
from vit_jax.weights.bundle import Weights
from vit_jax.weights.keymap import Key, KeyMap

TABLE = 'Transformer/posembed_input/pos_embedding'
GENERATIONS = {  # numbers of the modules in a layer: attention, 2nd norm, MLP
  'linen': (0, 1, 0),  # counted for each class
  'pre_linen': (1, 2, 3),  # counted for all of them together
}
_BIT_ROOT = 'resnet/root_block/standardized_conv2d/kernel'
_POSTACT_ROOT, _PREACT_ROOT = 'conv_root/kernel', 'root_block/conv_root/kernel'
_ROOTS = _POSTACT_ROOT, _PREACT_ROOT, _BIT_ROOT
_ANCHORS = 'embedding/kernel', 'stem/kernel', *_ROOTS
_PREFIXES = '', 'opt/target/', 'params/img/', 'img/', 'params/', 'target/'
_STATE = r'(opt|opt_state|state)/.*|(.*/)?step'
_TEXT = r'(params/)?(txt/.*|t|b)'  # the other tower, temperature and bias
_LAYER = 'Transformer/encoderblock'
_GROUP_NORM = r'(.*/)?(gn([123]|_root|_proj)/(scale|bias)|group_norm/.*)'

_UNIT, _OUR_UNIT = 'block{s}/unit{u}', 'resnet/stage{s}/unit{u}'
_UNIT_CONV = Key(f'{_UNIT}/conv{{n}}/kernel', f'{_OUR_UNIT}/conv{{n}}/kernel')
_MIXER = KeyMap(
  Key('stem/{p}', 'embedding/{p}'),
  Key('MixerBlock_{i}/LayerNorm_0/{p}', 'block_{i}/norm1/{p}'),
  Key('MixerBlock_{i}/LayerNorm_1/{p}', 'block_{i}/norm2/{p}'),
  Key('MixerBlock_{i}/{n}_mixing/Dense_0/{p}', 'block_{i}/{n}_mixing/fc1/{p}'),
  Key('MixerBlock_{i}/{n}_mixing/Dense_1/{p}', 'block_{i}/{n}_mixing/fc2/{p}'),
  Key('pre_head_layer_norm/{p}', 'norm/{p}'),
  Key('head/{p}', 'head/{p}'),
)


@functools.cache
def _vit_keys(generation):
  attention, norm, mlp = GENERATIONS[generation]
  layer, map_head = _LAYER + '_{i}', 'MAPHead_0'
  return KeyMap(
    Key('cls', 'cls'),
    Key('embedding/{p}', 'embedding/{p}'),
    Key(layer + '/LayerNorm_0/{p}', 'block_{i}/norm1/{p}'),
    Key(
      f'{layer}/MultiHeadDotProductAttention_{attention}/{{n}}/{{p}}',
      'block_{i}/attn/{n}/{p}',
    ),
    Key(f'{layer}/LayerNorm_{norm}/{{p}}', 'block_{i}/norm2/{p}'),
    Key(f'{layer}/MlpBlock_{mlp}/Dense_0/{{p}}', 'block_{i}/mlp/fc1/{p}'),
    Key(f'{layer}/MlpBlock_{mlp}/Dense_1/{{p}}', 'block_{i}/mlp/fc2/{p}'),
    Key('Transformer/encoder_norm/{p}', 'norm/{p}'),
    Key('pre_logits/{p}', 'pre_logits/{p}'),
    Key('head/{p}', 'head/{p}'),
    Key(f'{map_head}/probe', 'map_head/probe'),
    Key(
      f'{map_head}/MultiHeadDotProductAttention_0/{{n}}/{{p}}',
      'map_head/attn/{n}/{p}',
    ),
    Key(f'{map_head}/LayerNorm_0/{{p}}', 'map_head/norm/{p}'),
    Key(f'{map_head}/MlpBlock_0/Dense_0/{{p}}', 'map_head/mlp/fc1/{p}'),
    Key(f'{map_head}/MlpBlock_0/Dense_1/{{p}}', 'map_head/mlp/fc2/{p}'),
    Key(_POSTACT_ROOT, 'resnet/root/conv/kernel'),
    Key('gn_root/{p}', 'resnet/root/norm/{p}'),
    _UNIT_CONV,
    Key(f'{_UNIT}/gn{{n}}/{{p}}', f'{_OUR_UNIT}/norm{{n}}/{{p}}'),
  )


def _spatial_norm(theirs, ours):
  """Return the row of a GroupNorm that is stored as [1, 1, 1, C]."""
  return Key(theirs, ours, np.ravel, lambda x: x[None, None, None], ndim=4)


_PREACT = KeyMap(
  Key(_PREACT_ROOT, 'resnet/root/conv/kernel'),
  _UNIT_CONV,
  _spatial_norm(f'{_UNIT}/gn{{n}}/{{p}}', f'{_OUR_UNIT}/norm{{n}}/{{p}}'),
  _spatial_norm('norm-pre-head/{p}', 'norm/{p}'),
  Key('head/{p}', 'head/{p}'),
)


@functools.cache
def _bit_keys():
  conv, unit, ours = 'standardized_conv2d/kernel', f'resnet/{_UNIT}', _OUR_UNIT
  keys = [
    Key(_BIT_ROOT, 'resnet/root/conv/kernel'),
    Key(f'{unit}/a/proj/{conv}', f'{ours}/conv_proj/kernel'),
    Key('resnet/group_norm/gamma', 'norm/scale'),
    Key('resnet/group_norm/beta', 'norm/bias'),
    Key(
      'resnet/head/conv2d/kernel',
      'head/kernel',
      lambda x: x[0, 0] if x.shape[:2] == (1, 1) else x,
      lambda x: x[None, None],
      ndim=4,
    ),
    Key('resnet/head/conv2d/bias', 'head/bias'),
  ]
  for i, letter in enumerate('abc', 1):
    keys += [
      Key(f'{unit}/{letter}/{conv}', f'{ours}/conv{i}/kernel'),
      Key(f'{unit}/{letter}/group_norm/gamma', f'{ours}/norm{i}/scale'),
      Key(f'{unit}/{letter}/group_norm/beta', f'{ours}/norm{i}/bias'),
    ]
  return KeyMap(*keys)


def recognise(names: Iterable[str]) -> bool:
  """Return whether arrays of these names are a file of these formats."""
  return _prefix(names) is not None


def _prefix(names):
  """Return what precedes the parameters' names; None if none are known."""
  for prefix in _PREFIXES:
    if any(prefix + anchor in names for anchor in _ANCHORS):
      # Our checkpoints have 'embedding/kernel' too, but other layers.
      layers = f'{prefix}{_LAYER}', f'{prefix}MixerBlock', f'{prefix}resnet/'
      other = [f'{prefix}{x}' for x in (*_ROOTS, 'Transformer/')]
      if any(name.startswith((*layers, *other)) for name in names):
        return prefix
  return None


def needed(names: Iterable[str]) -> set[str]:
  """Return the names without those of arrays that `read` does not use."""
  names = set(names)
  return names - {x for found in _left_out(names).values() for x in found}


def _left_out(names):
  """Return {what: names} of optimizer, other state and other tower."""
  prefix = _prefix(names) or ''
  found = {}
  for name in names:
    if prefix and name.startswith(prefix):
      continue
    if re.fullmatch(_STATE, name):
      found.setdefault('optimizer and other state', []).append(name)
    elif prefix.endswith('img/') and re.fullmatch(_TEXT, name):
      found.setdefault('text tower, temperature, bias', []).append(name)
  return found


def read(
  arrays: FlatParams,
  config: Mapping[str, Any] | None = None,
  *,
  grid: tuple[int, int] | None = None,
  image_size: Size | None = None,
  **fields: Any,
) -> Weights:
  """Return Weights of the arrays of a file.

  Args:
    arrays: {name: array}.
    config: ignored; the formats have no such file.
    grid: (rows, columns) of a position table, or of a Mixer's patches, that is
      not a square.
    image_size: for ResNets, and models without a table.
    **fields: of the model, for what is not in the file, see `bundle.infer`.

  Raises:
    ValueError: an array is missing, unexpected or of another shape.
  """
  del config
  notes: list[str] = []
  is_tower = (_prefix(arrays) or '').endswith('img/')
  arrays = _parameters(arrays, notes)
  is_old = any('/MlpBlock_3/' in name for name in arrays)
  is_vit = any(name.startswith(_LAYER) for name in arrays)
  origin = 'npz'
  if is_vit and TABLE not in arrays:
    origin = 'big_vision npz'
    if 'pos_embedding' not in arrays and (
      is_old or _POSTACT_ROOT in arrays
    ):  # older than fixed positions, which are in no table
      raise ValueError(f'The file has no position table, {TABLE}.')
  elif not is_vit and {_POSTACT_ROOT, _PREACT_ROOT} & arrays.keys():
    origin = 'big_vision npz'
  if _BIT_ROOT in arrays:
    origin, keys = 'BiT npz', _bit_keys()
  elif _PREACT_ROOT in arrays:
    keys = _PREACT
  elif 'stem/kernel' in arrays:
    keys = _MIXER
  else:
    keys = _vit_keys('pre_linen' if is_old else 'linen')
  params, names = keys.to_ours(arrays)
  table = TABLE if TABLE in arrays else 'pos_embedding'
  if is_vit and table in arrays:
    split = _split if table == TABLE else _split_big_vision
    positions = split(arrays[table], 'cls' in arrays, grid)
    params |= positions
    names |= dict.fromkeys(positions, table)
  if keys is _PREACT:  # unlike BiT's own code
    fields = {'pool_padding': 'lowest'} | fields
  model = bundle.infer(params, **fields)
  params, shape = bundle.finish(
    model, params, names, arrays, keys, image_size=image_size, grid=grid
  )
  use: dict[str, Any] = {}
  if origin == 'big_vision npz' and shape[0] == shape[1] and not is_tower:
    use['transforms'] = transforms.evaluation('big_vision', shape[0])
  if is_old:
    origin += ' (pre-Linen names)'
  return Weights(model, params, shape, origin=origin, notes=notes, **use)


def _parameters(arrays, notes):
  """Return {name: array} without prefix, optimizer and other tower.

  Stacked layers are taken apart. What is left out is added to notes.
  """
  prefix = _prefix(arrays) or ''
  left_out, out = _left_out(arrays), {}
  skipped = {name for found in left_out.values() for name in found}
  for name, array in arrays.items():
    if name in skipped:
      continue
    name = name.removeprefix(prefix)
    if re.fullmatch('(pre_logits|head)/?', name) and not array.size:
      left_out.setdefault('empty', []).append(name)
      continue
    if re.fullmatch(_GROUP_NORM, name) and array.shape[:-1] == (1, 1, 1):
      array = array.reshape(-1)
    if re.match('probe$|(LayerNorm|MlpBlock|MultiHead[a-zA-Z]*)_0/', name):
      name = f'MAPHead_0/{name}'  # early files have the head's parts outside
    name = re.sub(r'/unit0*(\d+)/', r'/unit\1/', name)  # BiT has unit01
    # Some of BiT's files number these.
    name = re.sub(r'/standardized_conv2d_\d+/', '/standardized_conv2d/', name)
    if name.startswith(f'{_LAYER}/') and array.ndim:
      rest = name[len(_LAYER) :]
      if len(array) > bundle.MAX_LAYERS:
        raise ValueError(f'{name} has {len(array)} layers.')
      out |= {f'{_LAYER}_{i}{rest}': layer for i, layer in enumerate(array)}
    else:
      out[name] = array
  notes += [
    f'  {len(names)} arrays left out ({what})'
    for what, names in left_out.items()
  ]
  return out


def _split(table, has_cls, grid):
  cls, patches = bundle.split_table(table, prefix=int(has_cls), grid=grid)
  out = {'pos_embedding': patches}
  return out | {'cls_pos_embedding': cls} if has_cls else out


def _split_big_vision(table, has_cls, grid):
  if table.ndim == 4 or (table.ndim == 3 and table.shape[0] > 1):
    patches = table.reshape(-1, *table.shape[-3:])  # a grid
    cls = None
  else:
    # Early files still have the class token's row. The file says whether there
    # is a class token; only the count says whether it has a row, and n² + 1 is
    # not a square.
    rows = table.shape[-2] - 1 if table.ndim > 1 else 0
    cells = math.prod(as_pair(grid)) if grid else math.isqrt(max(rows, 0)) ** 2
    prefix = int(has_cls and rows > 0 and rows == cells)
    cls, patches = bundle.split_table(table, prefix=prefix, grid=grid)
  if not has_cls:
    return {'pos_embedding': patches}
  if cls is None or not cls.shape[1]:
    cls = np.zeros((1, 1, patches.shape[-1]), np.float32)
  return {'pos_embedding': patches, 'cls_pos_embedding': cls}


def write(
  weights: Weights, *, generation: str = 'pre_linen'
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """Return ({name: array}, {}) in the format of the paper's code.

  Args:
    weights: Weights. Computed positions become a table; LayerScale is
      multiplied into the layers before it.
    generation: 'pre_linen', the names in all published files and the only ones
      timm reads; or 'linen'. The authors' code reads both.

  Raises:
    ValueError: the format cannot hold the model.
  """
  one_of('generation', generation, GENERATIONS)
  model = weights.model
  params = _writable(weights, 'npz')
  if isinstance(model, ResNet) and model.form == 'preact':
    return _two_digits(_bit_keys().to_theirs(params)), {}
  cls = params.pop('cls_pos_embedding', None)
  table = params.pop('pos_embedding', None)
  out = _keys_of(model, generation).to_theirs(params)
  if not isinstance(model, MlpMixer | ResNet):
    if table is None:
      weights.notes.append('  positions written as a table, which is learned')
    table = bundle.patch_positions(weights)
    if 'cls' in params:
      cls = np.zeros_like(params['cls']) if cls is None else cls
      table = np.concatenate([cls, table], axis=1)
    out[TABLE] = table
  return out, {}


def write_big_vision(
  weights: Weights, *, scan: bool = False
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """Return ({name: array}, {}) in big_vision's format.

  Args:
    weights: Weights. LayerScale is multiplied into the layers before it, the
      position of the class token is added to it.
    scan: whether layers are stacked.

  Raises:
    ValueError: the format cannot hold the model.
  """
  model = weights.model
  if isinstance(getattr(model, 'embedding', None), Hybrid):
    raise ValueError(
      "big_vision's .npz cannot hold a hybrid. Use --format=npz instead."
    )
  params = _writable(weights, 'big_vision')
  if isinstance(model, ResNet) and model.form == 'preact':
    return _two_digits(_PREACT.to_theirs(params)), {}
  cls = params.pop('cls_pos_embedding', None)
  table = params.pop('pos_embedding', None)
  out = _keys_of(model, 'linen').to_theirs(params)
  if not isinstance(model, MlpMixer | ResNet):
    if table is not None or model.posemb is None:
      out['pos_embedding'] = bundle.patch_positions(weights)
    if model.posemb is None:
      weights.notes.append('  the model has no positions: written as zeros')
    if cls is not None:
      out['cls'] = out['cls'] + cls
      if np.any(cls):
        weights.notes.append('  position of the class token added to it')
  return _stack(out) if scan else out, {}


def _keys_of(model, generation):
  return _MIXER if isinstance(model, MlpMixer) else _vit_keys(generation)


def _writable(weights, format):
  """Return params in float32, LayerScale folded, if the format can hold them.

  Raises:
    ValueError: it cannot; names every reason.
  """
  model = weights.model
  if isinstance(model, ResNet):
    return {k: np.asarray(v, np.float32) for k, v in weights.params.items()}
  block = getattr(model, 'block', model)  # a Mixer has the same fields itself
  pooling = getattr(model, 'pooling', None)
  problems = {
    'registers': getattr(pooling, 'num_registers', 0),
    'norms of queries and keys (qk_norm)': getattr(block, 'qk_norm', False),
    'a norm after pooling': getattr(pooling, 'norm_after', False),
    f'norm_eps {block.norm_eps} (readers assume 1e-6)': block.norm_eps != 1e-6,
    "a MAP head, which big_vision's format can": isinstance(pooling, Map)
    and format == 'npz',
  }
  if found := [text for text, is_problem in problems.items() if is_problem]:
    raise ValueError(
      f'{format} cannot hold {", ".join(found)}. Use --format=timm or '
      '--format=vit_jax instead.'
    )
  if block.gelu == 'exact':
    weights.notes.append(
      "  gelu='exact' is not in the file: pass it to the reader"
    )
  if isinstance(pooling, NoPooling):
    weights.notes.append(
      "  pooling='none' is not in the file: pass it to the reader"
    )
  params = {k: np.asarray(v, np.float32) for k, v in weights.params.items()}
  return bundle.fold_layerscale(params, weights.notes)


def _two_digits(arrays):
  return {
    re.sub(r'/unit(\d+)/', lambda m: f'/unit{int(m[1]):02}/', name): array
    for name, array in arrays.items()
  }


def _stack(arrays):
  out, layers = {}, {}
  for name, array in arrays.items():
    if found := re.fullmatch(rf'{_LAYER}_(\d+)/(.*)', name):
      layers.setdefault(found[2], {})[int(found[1])] = array
    else:
      out[name] = array
  return out | {
    f'{_LAYER}/{rest}': np.stack([found[i] for i in range(len(found))])
    for rest, found in layers.items()
  }

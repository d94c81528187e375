"""The released .npz files: the paper's authors', BiT's and big_vision's.

All store arrays in the layout of Flax, so the key maps only rename. The
models were written three times over the years, and each file has the names of
its time, below 'opt/target/', 'params/' or nothing.

The paper's code (also AugReg, SAM, MLP-Mixers and ResNets of both forms) has a
position table TABLE with a row for the class token before those of the patches
if there is a class token.

big_vision has a table 'pos_embedding' for the patches only; the position of
the class token is added to 'cls'. There may be a MAP head; layers may be
stacked, 'Transformer/encoderblock/...' with a leading dimension; the model may
be the image tower of two, 'params/img/...'. A file without a table has fixed
positions. Its ResNets have both forms of `models.resnet`:
'root_block/conv_root' and 'block1/unit01' are 'preact', as the BiT paper has
it; 'conv_root' and 'block1/unit1' are 'postact'.

No file contains transforms of test images. Those of big_vision's models are
big_vision's; those of the paper's code, and of the image tower of two, resize
to a square as both code bases do for such models.

The ImageNet-21k files of the first release have the tanh layer 'pre_logits'
and a head of zeros; AugReg's have a working head and no such layer.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from vit_jax.data import transforms
from vit_jax.models.mixer import MlpMixer
from vit_jax.models.resnet import ResNet
from vit_jax.models.vit import VisionTransformer
from vit_jax.types import FlatParams, UserError
from vit_jax.weights import bundle, family
from vit_jax.weights.architecture import PLAIN, convert
from vit_jax.weights.bundle import Weights
from vit_jax.weights.keymap import Key, KeyMap

TABLE = 'Transformer/posembed_input/pos_embedding'
_BIT_ROOT = 'resnet/root_block/standardized_conv2d/kernel'
_POSTACT_ROOT, _PREACT_ROOT = 'conv_root/kernel', 'root_block/conv_root/kernel'
_ROOTS = _POSTACT_ROOT, _PREACT_ROOT, _BIT_ROOT
_PREFIXES = '', 'opt/target/', 'params/img/', 'img/', 'params/', 'target/'
_LAYER = 'Transformer/encoderblock'
# Stored as [1, 1, 1, C] by some, and as [C] by others.
_GROUP_NORM = r'(.*/)?(gn([123]|_root|_proj)|norm-pre-head)/(scale|bias)'

_UNIT, _OUR_UNIT = 'block{s}/unit{u}', 'resnet/stage{s}/unit{u}'
_UNIT_KEYS = (
  Key(f'{_UNIT}/conv{{n}}/kernel', f'{_OUR_UNIT}/conv{{n}}/kernel'),
  Key(f'{_UNIT}/gn{{n}}/{{p}}', f'{_OUR_UNIT}/norm{{n}}/{{p}}'),
)
_MIXER = KeyMap(
  Key('stem/{p}', 'embedding/{p}'),
  Key('MixerBlock_{i}/LayerNorm_0/{p}', 'block_{i}/norm1/{p}'),
  Key('MixerBlock_{i}/LayerNorm_1/{p}', 'block_{i}/norm2/{p}'),
  Key('MixerBlock_{i}/{n}_mixing/Dense_0/{p}', 'block_{i}/{n}_mixing/fc1/{p}'),
  Key('MixerBlock_{i}/{n}_mixing/Dense_1/{p}', 'block_{i}/{n}_mixing/fc2/{p}'),
  Key('pre_head_layer_norm/{p}', 'norm/{p}'),
  Key('head/{p}', 'head/{p}'),
)
_PREACT = KeyMap(
  Key(_PREACT_ROOT, 'resnet/root/conv/kernel'),
  *_UNIT_KEYS,
  Key('norm-pre-head/{p}', 'norm/{p}'),
  Key('head/{p}', 'head/{p}'),
)


_QKVO = 'query', 'key', 'value', 'out'  # and no norms

_IN_JSON = 'block.mlp', 'mlp.form'  # NAME.json has them


def _vit_keys(attention, norm, mlp):
  """Return the rows; arguments are the numbers of modules in a layer."""
  layer = f'{_LAYER}_{{i}}'
  attn = f'MultiHeadDotProductAttention_{attention}'
  return [
    Key('cls', 'cls'),
    Key(TABLE, 'cls_pos_embedding|pos_embedding', 'table'),
    Key('pos_embedding', 'cls_pos_embedding|pos_embedding', 'table'),
    Key('embedding/{p}', 'embedding/{p}'),
    Key(f'{layer}/LayerNorm_0/{{p}}', 'block_{i}/norm1/{p}'),
    *(
      Key(f'{layer}/{attn}/{n}/{{p}}', f'block_{{i}}/attn/{n}/{{p}}')
      for n in _QKVO
    ),
    Key(f'{layer}/LayerNorm_{norm}/{{p}}', 'block_{i}/norm2/{p}'),
    Key(f'{layer}/MlpBlock_{mlp}/Dense_0/{{p}}', 'block_{i}/mlp/fc1/{p}'),
    Key(f'{layer}/MlpBlock_{mlp}/Dense_1/{{p}}', 'block_{i}/mlp/fc2/{p}'),
    Key('Transformer/encoder_norm/{p}', 'norm/{p}'),
    Key('pre_logits/{p}', 'pre_logits/{p}'),
    Key('head/{p}', 'head/{p}'),
    Key(_POSTACT_ROOT, 'resnet/root/conv/kernel'),
    Key('gn_root/{p}', 'resnet/root/norm/{p}'),
    *_UNIT_KEYS,
  ]


_MAP = 'MAPHead_0/MultiHeadDotProductAttention_0'
# Numbers count the modules of each class, or all modules together.
_LINEN = KeyMap(
  *_vit_keys(0, 1, 0),
  Key('MAPHead_0/probe', 'map_head/probe'),
  Key(f'{_MAP}/{{n}}/{{p}}', 'map_head/attn/{n}/{p}'),
  Key('MAPHead_0/LayerNorm_0/{p}', 'map_head/norm/{p}'),
  Key('MAPHead_0/MlpBlock_0/Dense_0/{p}', 'map_head/mlp/fc1/{p}'),
  Key('MAPHead_0/MlpBlock_0/Dense_1/{p}', 'map_head/mlp/fc2/{p}'),
)
_PRE_LINEN = KeyMap(*_vit_keys(1, 2, 3))


def _bit_keys():
  conv, unit = 'standardized_conv2d/kernel', f'resnet/{_UNIT}'
  keys = [
    Key(_BIT_ROOT, 'resnet/root/conv/kernel'),
    Key(f'{unit}/a/proj/{conv}', f'{_OUR_UNIT}/conv_proj/kernel'),
    Key('resnet/group_norm/gamma', 'norm/scale'),
    Key('resnet/group_norm/beta', 'norm/bias'),
    Key('resnet/head/conv2d/kernel', 'head/kernel', '1x1'),
    Key('resnet/head/conv2d/bias', 'head/bias'),
  ]
  for i, letter in enumerate('abc', 1):
    keys += [
      Key(f'{unit}/{letter}/{conv}', f'{_OUR_UNIT}/conv{i}/kernel'),
      Key(f'{unit}/{letter}/group_norm/gamma', f'{_OUR_UNIT}/norm{i}/scale'),
      Key(f'{unit}/{letter}/group_norm/beta', f'{_OUR_UNIT}/norm{i}/bias'),
    ]
  return KeyMap(*keys)


_BIT = _bit_keys()


def recognise(names: Iterable[str]) -> bool:
  """Return whether arrays of these names are a file of this format."""
  return _prefix(names) is not None


def _prefix(names):
  """Return what precedes the parameters' names; None if none are known."""
  for prefix in _PREFIXES:
    known = tuple(prefix + x for x in (_LAYER, 'MixerBlock', *_ROOTS))
    if any(name.startswith(known) for name in names):
      return prefix
  return None


def read(
  arrays: FlatParams,
  config: Mapping[str, Any] | None = None,
  *,
  grid: tuple[int, int] | None = None,
  **options: Any,
) -> Weights:
  """Return Weights of {name: array}; see `formats.read`. There is no config."""
  del config
  notes: list[str] = []
  prefix = _prefix(arrays) or ''
  arrays = _parameters(arrays, prefix, notes)
  is_old = any('/MlpBlock_3/' in name for name in arrays)
  origin, keys = 'npz', _PRE_LINEN if is_old else _LINEN
  known: dict[str, Any] = {}
  if _BIT_ROOT in arrays:
    origin, keys = 'BiT npz', _BIT
  elif 'stem/kernel' in arrays:
    keys = _MIXER
  elif TABLE not in arrays:
    origin = 'big_vision npz'
    if _PREACT_ROOT in arrays:
      keys, known = _PREACT, {'pool_padding': 'lowest'}
  rows: Any = (('cls',),)
  if TABLE not in arrays and 'pos_embedding' in arrays:
    rows = ('cls',), ()  # early files of big_vision have a row for the token
  elif TABLE not in arrays and 'embedding/kernel' in arrays:
    # Some are older than fixed positions, and lack their table.
    is_old = is_old or _POSTACT_ROOT in arrays
    known['posemb'] = 'learned' if is_old else 'sincos2d'
  if 'embedding/kernel' in arrays:
    known |= PLAIN
  weights = convert(arrays, keys, known=known, rows=rows, grid=grid, **options)
  height, width, _ = weights.image_shape
  is_tower = prefix.endswith('img/')
  if origin == 'big_vision npz' and height == width and not is_tower:
    weights.transforms = transforms.evaluation('big_vision', height)
  return dataclasses.replace(
    weights, origin=origin, notes=notes + weights.notes
  )


def _parameters(arrays, prefix, notes):
  """Return {name: array} of the model, with the names of the key maps.

  Stacked layers are taken apart. What is left out is added to notes.
  """
  out, left_out = {}, []
  for name, array in arrays.items():
    short = name.removeprefix(prefix)
    is_empty = re.fullmatch('(pre_logits|head)/?', short) and not array.size
    if is_empty or not name.startswith(prefix):
      left_out.append(name)
      continue
    if re.fullmatch(_GROUP_NORM, short):
      array = np.ravel(array)
    if re.match('probe$|(LayerNorm|MlpBlock|MultiHead[a-zA-Z]*)_0/', short):
      short = f'MAPHead_0/{short}'  # early files have the head's parts outside
    short = re.sub(r'/unit0*(\d+)/', r'/unit\1/', short)  # BiT has unit01
    # Some of BiT's files number these.
    short = re.sub(r'/standardized_conv2d_\d+/', '/standardized_conv2d/', short)
    if short.startswith(f'{_LAYER}/'):
      rest = short[len(_LAYER) :]
      out |= {f'{_LAYER}_{i}{rest}': layer for i, layer in enumerate(array)}
    else:
      out[short] = array
  if left_out:
    notes.append(
      f'  {len(left_out)} arrays left out (state of the optimizer, text tower, '
      f'or empty), such as {left_out[0]}'
    )
  return out


def write(weights: Weights) -> tuple[FlatParams, dict[str, Any]]:
  """Return ({name: array}, {}) in the format of the paper's code.

  The names are those of the published files, the only ones that timm reads.
  """
  model, params = weights.model, weights.params
  if type(model) not in (VisionTransformer, ResNet, MlpMixer):
    raise UserError(f'It is a {type(model).__name__}.')
  if isinstance(model, MlpMixer):
    arrays = _MIXER.to_theirs(params)
  elif isinstance(model, ResNet) and model.form == 'preact':
    arrays = {
      re.sub(r'/unit(\d+)/', lambda m: f'/unit{int(m[1]):02}/', name): array
      for name, array in _BIT.to_theirs(params).items()
    }
  else:
    if isinstance(model, VisionTransformer):
      params = bundle.with_table(weights).params
    arrays = _PRE_LINEN.to_theirs(params)
  family.check(weights, arrays, {}, read, ignored=_IN_JSON)
  return arrays, {}

"""The released .npz files: the paper's authors', BiT's and big_vision's.

All store arrays in the layout of Flax, so the key maps only rename. The
models were written three times over the years, and each file has the names of
its time, below 'opt/target/', 'params/' or nothing.

The paper's code (also AugReg, SAM, MLP-Mixers and ResNets of both forms) has a
position table TABLE with rows for the class token, if any, and the patches.

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
from typing import Any

import numpy as np

from vit_jax.data import transforms
from vit_jax.models.mixer import MlpMixer
from vit_jax.models.posemb import Learned, SinCos2d
from vit_jax.models.resnet import ResNet
from vit_jax.models.vit import VisionTransformer
from vit_jax.types import FlatParams, UserError
from vit_jax.weights import architecture, bundle, family
from vit_jax.weights.architecture import PLAIN
from vit_jax.weights.bundle import Weights
from vit_jax.weights.family import Config, Family
from vit_jax.weights.keymap import Key, KeyMap

TABLE = 'Transformer/posembed_input/pos_embedding'
_LAYER = 'Transformer/encoderblock'
_POSITIONS = 'cls_pos_embedding|pos_embedding'
# Stored as [1, 1, 1, C] by some, and as [C] by others.
_GROUP_NORM = r'(.*/)?(gn([123]|_root|_proj)|norm-pre-head)/(scale|bias)'
_IN_JSON = 'block.mlp', 'mlp.form'  # NAME.json has them


def _mlp(theirs, ours):
  return Key(f'{theirs}/Dense_{{u}}/{{p}}', f'{ours}/fc{{u+1}}/{{p}}')


def _layer(attention, norm, mlp):
  """Return the rows; arguments are the numbers of modules in a layer."""
  layer = f'{_LAYER}_{{i}}'
  attn = f'{layer}/MultiHeadDotProductAttention_{attention}'
  return [
    *(
      Key(f'{attn}/{n}/{{p}}', f'block_{{i}}/attn/{n}/{{p}}')
      for n in ('query', 'key', 'value', 'out')  # and no norms
    ),
    Key(f'{layer}/LayerNorm_{norm}/{{p}}', 'block_{i}/norm2/{p}'),
    _mlp(f'{layer}/MlpBlock_{mlp}', 'block_{i}/mlp'),
  ]


_UNIT, _OUR_UNIT = 'block{s}/unit{u}', 'resnet/stage{s}/unit{u}'
_KEYS = KeyMap(
  Key('cls', 'cls'),
  Key(TABLE, _POSITIONS, 'table'),
  Key('pos_embedding', _POSITIONS, 'table'),
  Key('embedding/{p}', 'embedding/{p}'),
  Key(f'{_LAYER}_{{i}}/LayerNorm_0/{{p}}', 'block_{i}/norm1/{p}'),
  *_layer(1, 2, 3),  # the modules of a layer are numbered together,
  *_layer(0, 1, 0),  # or, in later files, those of each class
  Key('Transformer/encoder_norm/{p}', 'norm/{p}'),
  Key('pre_logits/{p}', 'pre_logits/{p}'),
  Key('head/{p}', 'head/{p}'),
  Key('conv_root/kernel', 'resnet/root/conv/kernel'),
  Key('gn_root/{p}', 'resnet/root/norm/{p}'),
  Key('root_block/conv_root/kernel', 'resnet/root/conv/kernel'),
  Key('norm-pre-head/{p}', 'norm/{p}'),
  Key(f'{_UNIT}/conv{{n}}/kernel', f'{_OUR_UNIT}/conv{{n}}/kernel'),
  Key(f'{_UNIT}/gn{{n}}/{{p}}', f'{_OUR_UNIT}/norm{{n}}/{{p}}'),
)
_MAP = 'MAPHead_0/MultiHeadDotProductAttention_0'
_WITH_MAP = KeyMap(  # only read: published files have it with later names
  *_KEYS.keys,
  Key('MAPHead_0/probe', 'map_head/probe'),
  Key(f'{_MAP}/{{n}}/{{p}}', 'map_head/attn/{n}/{p}'),
  Key('MAPHead_0/LayerNorm_0/{p}', 'map_head/norm/{p}'),
  _mlp('MAPHead_0/MlpBlock_0', 'map_head/mlp'),
)
_MIXER = KeyMap(
  Key('stem/{p}', 'embedding/{p}'),
  Key('MixerBlock_{i}/LayerNorm_{u}/{p}', 'block_{i}/norm{u+1}/{p}'),
  _mlp('MixerBlock_{i}/{n}_mixing', 'block_{i}/{n}_mixing'),
  Key('pre_head_layer_norm/{p}', 'norm/{p}'),
  Key('head/{p}', 'head/{p}'),
)
_CONV, _BIT_UNIT = 'standardized_conv2d/kernel', f'resnet/{_UNIT}'
_BIT = KeyMap(
  Key(f'resnet/root_block/{_CONV}', 'resnet/root/conv/kernel'),
  Key(f'{_BIT_UNIT}/a/proj/{_CONV}', f'{_OUR_UNIT}/conv_proj/kernel'),
  *(
    row
    for i, letter in enumerate('abc', 1)
    for norm in [f'{_BIT_UNIT}/{letter}/group_norm']
    for row in (
      Key(f'{_BIT_UNIT}/{letter}/{_CONV}', f'{_OUR_UNIT}/conv{i}/kernel'),
      Key(f'{norm}/gamma', f'{_OUR_UNIT}/norm{i}/scale'),
      Key(f'{norm}/beta', f'{_OUR_UNIT}/norm{i}/bias'),
    )
  ),
  Key('resnet/group_norm/gamma', 'norm/scale'),
  Key('resnet/group_norm/beta', 'norm/bias'),
  Key('resnet/head/conv2d/kernel', 'head/kernel', '1x1'),
  Key('resnet/head/conv2d/bias', 'head/bias'),
)


def _prepare(arrays, config):
  """Return arrays with the names of the key maps and stacked layers apart."""
  out = {}
  for name, array in arrays.items():
    if re.fullmatch(_GROUP_NORM, name):
      array = np.ravel(array)
    if re.match('probe$|(LayerNorm|MlpBlock|MultiHead[a-zA-Z]*)_0/', name):
      name = f'MAPHead_0/{name}'  # early files have the head's parts outside
    name = re.sub(r'/unit0*(\d+)/', r'/unit\1/', name)  # BiT has unit01
    # Some of BiT's files number these.
    name = re.sub(r'/standardized_conv2d_\d+/', '/standardized_conv2d/', name)
    if name.startswith(f'{_LAYER}/'):
      rest = name.removeprefix(_LAYER)
      out |= {f'{_LAYER}_{i}{rest}': layer for i, layer in enumerate(array)}
    else:
      out[name] = array
  return out


def _configure(config, arrays):
  """Return the positions of a ViT without a table; the oldest lack theirs."""
  if TABLE in arrays or 'pos_embedding' in arrays:
    return {}
  is_old = f'{_LAYER}_0/MlpBlock_3/Dense_0/kernel' in arrays
  is_hybrid = 'conv_root/kernel' in arrays
  return {'posemb': Learned() if is_old or is_hybrid else SinCos2d()}


def _family(anchor, keys, **changes):
  return Family(
    '',
    anchor,
    keys,
    prefix='opt/target/|(params/)?img/|params/|target/',
    # State of the optimizer, text towers, and empty heads.
    unused=r'opt/(?!target/).*|(params/)?((txt|llm)/.*|[tb])'
    r'|(.*/)?(pre_logits|head)/?',
    prepare=_prepare,
    patch_resize='bilinear',
    **changes,
  )


_VIT = _family(
  f'{_LAYER}(_0)?/.*', _WITH_MAP, fields=PLAIN, configure=_configure
)
_PAPER = (
  _family('stem/kernel', _MIXER),
  _family('resnet/root_block/.*', _BIT),
  dataclasses.replace(_VIT, anchor=TABLE, rows=(('cls',),)),
)
_BIG_VISION = (
  dataclasses.replace(_VIT, rows=((), ('cls',))),  # early tables have its row
  _family('root_block/.*', _KEYS, fields={'pool_padding': 'lowest'}),
  _family('conv_root/.*', _KEYS),
)
FAMILIES = _PAPER + _BIG_VISION  # the first that fits counts


def read(
  arrays: FlatParams, config: Config | None = None, **options: Any
) -> Weights:
  """Return Weights of {name: array}; see `formats.read`. There is no config."""
  found = family.find(FAMILIES, arrays, '')
  weights = architecture.read(found, arrays, {}, **options)
  height, width, _ = weights.image_shape
  table = weights.params.get('pos_embedding', np.zeros(0))
  if found in _BIG_VISION and table.shape[1:3] == (7, 7) and height != 224:
    # FlexiViT stores this grid for patches of any size.
    method = {'posemb.resize_method': 'bilinear_antialias'}
    weights.model = bundle.replace(weights.model, **method)
  is_tower = any(re.match('(params/)?img/', name) for name in arrays)
  if found in _BIG_VISION and height == width and not is_tower:
    weights.transforms = transforms.evaluation('big_vision', height)
  return dataclasses.replace(weights, origin='npz')


def write(weights: Weights) -> tuple[FlatParams, dict[str, Any]]:
  """Return ({name: array}, {}) in the format of the paper's code.

  The names are those of the published files, the only ones that timm reads. A
  ViT has a table of positions, see `bundle.with_table`.
  """
  model = weights.model
  if type(model) not in (VisionTransformer, ResNet, MlpMixer):
    raise UserError(f'It is a {type(model).__name__}.')
  keys = _MIXER if isinstance(model, MlpMixer) else _KEYS
  if getattr(model, 'form', '') == 'preact':
    keys = _BIT
  arrays = {
    re.sub(r'resnet/(.*)/unit(\d)/', r'resnet/\1/unit0\2/', name): array
    for name, array in keys.to_theirs(weights.params).items()
  }
  family.check(weights, arrays, {}, read, ignored=_IN_JSON)
  return arrays, {}

"""timm: model.safetensors and config.json.

Read: VisionTransformer (DeiT, also distilled, DeiT III, SigLIP's image tower,
DINOv2 except with SwiGLU), its hybrids, BiT and MLP-Mixers. A class token that
is not pooled is read as our first register, which is equivalent. Only the first
are written: timm reads the others' npz.

    {'architecture': 'vit_base_patch16_224', 'num_classes': 1000,
     'global_pool': 'token', 'model_args': {...}, 'label_names': [...],
     'pretrained_cfg': {'input_size': [3, 224, 224], 'mean': [...], ...}}

is config.json. Older files have the content of pretrained_cfg at the top and no
model_args. We also write 'activation', which timm ignores. timm's LayerNorms
have an epsilon of 1e-6, as ours.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from vit_jax.models import names
from vit_jax.models.layers import as_pair
from vit_jax.models.pooling import Map, Mean
from vit_jax.types import FlatParams, Size, UserError
from vit_jax.weights import bundle, image_configs
from vit_jax.weights.architecture import convert, split_table
from vit_jax.weights.bundle import Weights
from vit_jax.weights.keymap import Key, KeyMap, conv, linear, norm

_WRAPPER = 'timm_model.'  # of the class in transformers that wraps them
_BACKBONE = 'patch_embed.backbone.'


@functools.cache
def _vit_keys(last_norm, distilled, stem=None):
  heads = linear('head', 'head')
  if distilled:
    heads = [*linear('head', 'head/cls'), *linear('head_dist', 'head/dist')]
  return KeyMap(
    Key('cls_token', 'cls'),
    Key('dist_token', 'dist'),
    Key('reg_token', 'registers'),
    Key('pos_embed', 'pos_embedding'),
    Key('cls_pos', 'cls_pos_embedding'),  # of `_with_tokens`
    Key('dist_pos', 'dist_pos_embedding'),
    *conv('patch_embed.proj', 'embedding'),
    *norm('blocks.{i}.norm{n}', 'block_{i}/norm{n}'),
    *linear('blocks.{i}.attn.qkv', 'block_{i}/attn/query|key|value'),
    *linear('blocks.{i}.attn.proj', 'block_{i}/attn/out', 'merged'),
    *norm('blocks.{i}.attn.q_norm', 'block_{i}/attn/query_norm'),
    *norm('blocks.{i}.attn.k_norm', 'block_{i}/attn/key_norm'),
    *linear('blocks.{i}.mlp.fc{n}', 'block_{i}/mlp/fc{n}'),
    Key('blocks.{i}.ls{n}.gamma', 'block_{i}/ls{n}'),
    *norm(last_norm, 'norm'),
    Key('attn_pool.latent', 'map_head/probe'),
    *linear('attn_pool.q', 'map_head/attn/query'),
    *linear('attn_pool.kv', 'map_head/attn/key|value'),
    *linear('attn_pool.proj', 'map_head/attn/out', 'merged'),
    *norm('attn_pool.norm', 'map_head/norm'),
    *linear('attn_pool.mlp.fc{n}', 'map_head/mlp/fc{n}'),
    *heads,
    *(_backbone_keys(stem, _BACKBONE) if stem else []),
  )


def _backbone_keys(stem, prefix=''):
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


_RESNET_KEYS = KeyMap(
  *_backbone_keys('stem.'), *norm('norm', 'norm'), *conv('head.fc', 'head')
)
_MIXER_KEYS = KeyMap(
  *conv('stem.proj', 'embedding'),
  *norm('blocks.{i}.norm{n}', 'block_{i}/norm{n}'),
  *linear('blocks.{i}.mlp_tokens.fc{n}', 'block_{i}/token_mixing/fc{n}'),
  *linear('blocks.{i}.mlp_channels.fc{n}', 'block_{i}/channel_mixing/fc{n}'),
  *norm('norm', 'norm'),
  *linear('head', 'head'),
)


# Values of model_args that change the computation but not the arrays, and for
# which our model is the same.
_ARGS = {
  'pool_include_prefix': (False, None),
  'norm_layer': (None, 'layernorm'),
  'scale_attn_norm': (False, None),
  'scale_mlp_norm': (False, None),
  'dynamic_img_pad': (False, None),
}


@dataclasses.dataclass(frozen=True)
class Family:
  """Architectures of timm that are read alike.

  Attributes:
    pattern: regular expression for `architecture` in config.json.
    keys: key map, or None: that of timm's VisionTransformer.
    anchor: array that files of these architectures have.
    fields: fields of our model that the arrays do not show.
    refused: why no model here computes the same, or ''.
  """

  pattern: str
  keys: KeyMap | None = None
  anchor: str = 'patch_embed.proj.weight'
  fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  refused: str = ''


_EXACT = {'gelu': 'exact'}
FAMILIES = (  # the first that fits counts
  Family('vit_.*_rpn_.*', refused='norms after the branches'),
  Family('.*quickgelu.*', refused='the activation QuickGELU'),
  Family('test_vit3', refused='pooling over the class token and registers'),
  Family(
    'vit_(so400m|giantopt)_patch16_siglip_.*|vit_base_patch32_siglip_.*|'
    'vit_large_patch16_siglip_(gap_)?512',
    fields={'gelu': 'tanh'},
  ),
  Family('vit_base_patch16_gap_224', fields=_EXACT | {'num_heads': 16}),
  Family('test_vit2?', fields=_EXACT | {'num_heads': 2}),
  Family('test_vit4', fields=_EXACT | {'num_heads': 3}),
  Family('.*', fields=_EXACT),
  Family('.*', _MIXER_KEYS, anchor='stem.proj.weight', fields=_EXACT),
  Family('.*', _RESNET_KEYS, anchor='stem.conv.weight'),
)
# Heads of timm's architectures of a width, which config.json leaves out.
_HEADS = {width: heads for width, _, _, heads in names.SIZES.values()}
_HEADS |= {256: 4, 320: 5, 640: 10}
_GELU = {'gelu': 'exact', 'gelu_tanh': 'tanh'}
_POOLING = {'token': 'token', 'avg': 'gap', 'map': 'map'}
# Width: architecture under which ViTs are written; model_args make it theirs.
_ARCHITECTURES = {
  192: 'vit_tiny_patch16_224',
  384: 'vit_small_patch16_224',
  768: 'vit_base_patch16_224',
  1024: 'vit_large_patch16_224',
  1280: 'vit_huge_patch14_224',
}
_DISTILLED = 'deit_base_distilled_patch16_224'


def recognise(names: Iterable[str]) -> bool:
  """Return whether arrays of these names are a timm model."""
  names = {name.removeprefix(_WRAPPER) for name in names}
  return any(family.anchor in names for family in FAMILIES) and any(
    re.match(r'(stages\.0\.)?blocks\.0\.', name) for name in names
  )


def read(
  arrays: FlatParams,
  config: Mapping[str, Any] | None = None,
  *,
  grid: tuple[int, int] | None = None,
  image_size: Size | None = None,
  **fields: Any,
) -> Weights:
  """Return Weights of {name: array} and config.json; see `formats.read`.

  Without a config: exact GELU, and the class token is pooled unless there is
  `fc_norm`.
  """
  arrays = {k.removeprefix(_WRAPPER): x for k, x in arrays.items()}
  config = config or {}
  levels = config.get('pretrained_cfg'), config, config.get('model_args')
  config = {
    name: value
    for level in levels
    for name, value in (level or {}).items()
    if value is not None
  }
  family = _family(config, arrays)
  if image_size is None:  # input_size is of channels, height, width
    image_size = config.get('img_size') or config.get('input_size', ())[-2:]
  place: dict[str, Any] = {'grid': grid, 'image_size': image_size or None}
  notes: list[str] = []
  known, keys = dict(family.fields), family.keys
  if 'act_layer' in config:
    known['gelu'] = image_configs.choose(
      _GELU, config['act_layer'], 'act_layer'
    )
  if keys is None:
    known |= _vit_fields(arrays, config, known, fields)
    keys = _vit_keys(
      'fc_norm' if 'fc_norm.weight' in arrays else 'norm',
      'dist_token' in arrays,
      _BACKBONE if f'{_BACKBONE}conv.weight' in arrays else f'{_BACKBONE}stem.',
    )
    arrays = _with_biases(arrays, notes)
    arrays = _with_tokens(arrays, known['pooling'], config, place, notes)
  weights = convert(arrays, keys, known=known, **place, **fields)
  return dataclasses.replace(
    weights,
    class_names=config.get('label_names') or config.get('labels'),
    activation=config.get('activation', 'softmax'),
    origin=f'timm {config.get("architecture", "")}'.strip(),
    **(_use(config, weights.image_shape, notes) if config else {}),
    notes=notes,
  )


def _family(config, arrays):
  """Return the Family of a file, if a model here computes the same."""
  architecture = config.get('architecture', '')
  family = next(
    x
    for x in FAMILIES
    if x.anchor in arrays and re.fullmatch(x.pattern, architecture)
  )
  wrong = [family.refused] if family.refused else []
  wrong += [
    f'{name}={config[name]!r}'
    for name, values in _ARGS.items()
    if config.get(name) not in values
  ]
  if wrong:
    raise UserError(
      f'No model here has {", ".join(wrong)}, as {architecture} has.'
    )
  return family


def _vit_fields(arrays, config, known, given):
  """Return fields of a ViT that config.json has, or names of arrays imply."""
  found = {}
  width = arrays['patch_embed.proj.weight'].shape[0]
  if 'num_heads' in config:
    found['num_heads'] = config['num_heads']
  elif 'architecture' in config and width in _HEADS:
    found['num_heads'] = known.get('num_heads', _HEADS[width])
  has_fc_norm = 'fc_norm.weight' in arrays
  is_token = 'cls_token' in arrays and not has_fc_norm
  name = config.get('global_pool') or ('token' if is_token else 'avg')
  pooling = image_configs.choose(_POOLING, name, 'global_pool')
  if 'attn_pool.latent' in arrays:
    pooling = 'map'
  elif 'dist_token' in arrays and pooling == 'token':
    pooling = 'distilled'
  found['pooling'] = pooling = given.get('pooling', pooling)
  if has_fc_norm and pooling != 'token':
    # For a single token, the norm before and after pooling are the same.
    found['norm_after_pooling'] = True
  if 'pos_embed' not in arrays and given.get('posemb') is None:
    if config.get('pos_embed') not in ('none', ''):
      raise UserError(
        'The file has no pos_embed, and nothing says that its model has none. '
        "If it has none, pass posemb='none'."
      )
    found['posemb'] = 'none'
  return found


def _with_biases(arrays, notes):
  """Return the arrays with zero biases of qkv, if no layer has any."""
  biases = {
    name.replace('weight', 'bias'): np.zeros(len(x), np.float32)
    for name, x in arrays.items()
    if name.endswith('.qkv.weight')
  }
  if not biases or biases.keys() & arrays.keys():
    return arrays
  notes.append('  biases of queries, keys and values are zero: there are none')
  return arrays | biases


def _with_tokens(arrays, pooling, config, place, notes):
  """Return the arrays with tokens and positions as our models have them.

  Only pooled tokens are apart, and have positions 'cls_pos' and 'dist_pos';
  other tokens are registers. The positions of patches are a grid.
  """
  arrays = dict(arrays)
  has_cls = 'cls_token' in arrays
  names = 'cls_token', 'dist_token', 'reg_token'
  tokens = [arrays.pop(name) for name in names if name in arrays]
  kernel = arrays['patch_embed.proj.weight']
  prefix = np.concatenate([*tokens, np.zeros((1, 0, len(kernel)), 'f')], axis=1)
  count, found = prefix.shape[1], prefix[:, :0]
  if 'pos_embed' in arrays:
    found, arrays['pos_embed'] = split_table(
      arrays['pos_embed'],
      (0, count) if config.get('no_embed_class') else (count, 0),
      patch_size=kernel.shape[2:],
      **place,
    )
  rows = found if found.size else np.zeros_like(prefix)
  pooled = {'token': ('cls',), 'distilled': ('cls', 'dist')}.get(pooling, ())
  for i, name in enumerate(pooled):
    arrays[f'{name}_token'] = prefix[:, i : i + 1]
    if found.size:
      arrays[f'{name}_pos'] = rows[:, i : i + 1]
  if count > len(pooled):
    arrays['reg_token'] = (prefix + rows)[:, len(pooled) :]
    if rows[:, len(pooled) :].any():
      notes.append('  positions of registers added to them: ours have none')
    if has_cls and not pooled:
      notes.append('  the class token, which is not pooled, is register 0')
  return arrays


def _use(config, image_shape, notes):
  """Return arguments of Weights for timm's evaluation of images.

  crop_mode 'center' resizes the shorter side to the image size / crop_pct and
  crops the centre, 'squash' resizes both sides.
  """
  mode = config.get('crop_mode') or 'center'
  fraction = config.get('crop_pct') or 0.875
  large = tuple(int(side / fraction) for side in image_shape[:2])
  if mode == 'center' and large[0] == large[1]:
    large = large[0]
  elif mode != 'squash':
    notes.append(
      f'  images are resized to {large} without keeping the aspect ratio; '
      f'timm has crop_mode {mode!r}'
    )
  return image_configs.use(
    image_shape,
    large,
    config.get('interpolation') or 'bicubic',
    config.get('mean', (0.485, 0.456, 0.406)),
    config.get('std', (0.229, 0.224, 0.225)),
    torchvision=True,
  )


def write(weights: Weights) -> tuple[FlatParams, dict[str, Any]]:
  """Return (arrays, {'config.json': content}), see `formats.write`.

  timm.create_model('local-dir:FOLDER', pretrained=True) loads them.
  """
  model = weights.model
  distilled = model.pooling.distillation_token
  params, args = _model_args(weights)
  keys = _vit_keys(
    'fc_norm' if args['fc_norm'] else 'norm', distilled=distilled
  )
  height, width, channels = weights.image_shape
  num_classes = model.num_classes or 0
  mean, std = image_configs.mean_and_std(weights)
  large, method = image_configs.describe(weights)
  architecture = _ARCHITECTURES[
    min(_ARCHITECTURES, key=lambda x: abs(math.log(x / model.width)))
  ]
  config = {
    'architecture': _DISTILLED if distilled else architecture,
    'num_classes': num_classes,
    'global_pool': args['global_pool'],
    'model_args': {'in_chans': channels} | args | {'num_classes': num_classes},
    'pretrained_cfg': {
      'custom_load': False,
      'input_size': [channels, height, width],
      'fixed_input_size': True,
      'interpolation': method,
      'crop_pct': _fraction(large, (height, width)),
      'crop_mode': 'center' if isinstance(large, int) else 'squash',
      'mean': mean,
      'std': std,
      'num_classes': num_classes,
      'pool_size': None,
      'first_conv': 'patch_embed.proj',
      'classifier': ['head', 'head_dist'] if distilled else 'head',
    },
  }
  if weights.class_names:
    config['label_names'] = list(weights.class_names)
  if weights.activation != 'softmax':
    config['activation'] = weights.activation
  return keys.to_theirs(params), {'config.json': config}


def _model_args(weights):
  """Return (parameters with timm's position table, model_args)."""
  model, params = weights.model, dict(weights.params)
  pooling, block, patch = model.pooling, model.block, model.embedding.patch_size
  pools = {Mean: 'avg', Map: 'map'}
  ratio = model.mlp_dim / model.width
  if int(model.width * ratio) != model.mlp_dim:  # as timm rounds it
    ratio = (model.mlp_dim + 0.5) / model.width
  args = {
    'img_size': list(weights.image_shape[:2]),
    'patch_size': patch[0] if patch[0] == patch[1] else list(patch),
    'embed_dim': model.width,
    'depth': model.depth,
    'num_heads': model.num_heads,
    'mlp_ratio': ratio,
    'class_token': pooling.class_token,
    'global_pool': pools.get(type(pooling), 'token'),
    'fc_norm': pooling.norm_after,
    'reg_tokens': pooling.num_registers,
    'qk_norm': block.qk_norm,
    'no_embed_class': True,
  }
  if block.layerscale_init is not None:
    args['init_values'] = block.layerscale_init
  if block.gelu == 'tanh':
    args['act_layer'] = 'gelu_tanh'
  distilled = pooling.distillation_token
  if model.posemb is None and not distilled:
    return params, args | {'pos_embed': 'none'}
  has_rows = 'cls_pos_embedding' in params or distilled
  params = bundle.with_table(weights).params
  table = params['pos_embedding'].reshape(1, -1, model.width)
  cls = params.pop('cls_pos_embedding', None)
  if has_rows:  # registers have none, and a distilled model always has these
    rows = [cls, params.pop('dist_pos_embedding', np.zeros_like(cls))]
    rows = rows[: 1 + distilled] + [np.zeros_like(cls)] * pooling.num_registers
    table = np.concatenate([*rows, table], axis=1)
    args['no_embed_class'] = False
  return params | {'pos_embedding': table}, args


def _fraction(large, size):
  """Return crop_pct such that int(size / crop_pct) is `large`."""
  sides = list(zip(size, as_pair(large)))
  fraction = min(s / l for s, l in sides)
  while any(int(s / fraction) < l for s, l in sides):
    fraction *= 1 - 1e-9  # it was rounded up
  return min(fraction, 1.0)

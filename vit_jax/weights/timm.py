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

from vit_jax.data.transforms import CentralCrop, Resize, ResizeSmall
from vit_jax.models import names
from vit_jax.models.pooling import (
  DistillationToken,
  Map,
  Mean,
)
from vit_jax.types import FlatParams, Size, UserError
from vit_jax.weights import bundle, image_configs
from vit_jax.weights.architecture import convert, grid_of, split_table, square
from vit_jax.weights.bundle import Weights
from vit_jax.weights.keymap import Key, KeyMap, conv, linear, norm

_WRAPPER = 'timm_model.'  # of the class in transformers that wraps them
_BACKBONE = 'patch_embed.backbone.'


@functools.cache
def _vit_keys(last_norm='norm', stem=f'{_BACKBONE}stem.', distilled=False):
  heads = linear('head', 'head')
  if distilled:
    heads = [*linear('head', 'head/cls'), *linear('head_dist', 'head/dist')]
  return KeyMap(
    Key('cls_token', 'cls'),
    Key('dist_token', 'dist'),
    Key('reg_token', 'registers'),
    Key('pos_embed', 'pos_embedding'),
    Key('cls_pos', 'cls_pos_embedding'),  # of `_to_grid`
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
    *linear('pre_logits.fc', 'pre_logits'),
    *heads,
    *_backbone_keys(stem, _BACKBONE),
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


@dataclasses.dataclass(frozen=True)
class Family:
  """Architectures of timm that are read alike.

  Attributes:
    pattern: regular expression for `architecture` in config.json.
    keys: key map, or None: that of timm's VisionTransformer.
    anchor: array that files of these architectures have.
    fields: fields of our model that the arrays do not show.
    args: values of model_args that change the computation but not the arrays,
      and for which our model is the same.
    refused: why no model here computes the same, or ''.
  """

  pattern: str
  keys: KeyMap | None = None
  anchor: str = 'patch_embed.proj.weight'
  fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  args: Mapping[str, Any] = dataclasses.field(
    default_factory=lambda: {
      'pool_include_prefix': (False, None),
      'norm_layer': (None, 'layernorm'),
      'scale_attn_norm': (False, None),
      'scale_mlp_norm': (False, None),
      'dynamic_img_pad': (False, None),
    }
  )
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
  """Return Weights of {name: array} and the content of config.json.

  Without a config: exact GELU, and the class token is pooled unless there is
  `fc_norm`. Other arguments: see `formats.read`; they override the config.
  """
  arrays = {k.removeprefix(_WRAPPER): x for k, x in arrays.items()}
  config = config or {}
  args = config.get('model_args') or {}
  data = config.get('pretrained_cfg') or config
  architecture = config.get('architecture', '')
  family = _family(architecture, args, arrays)
  image_size = image_size or args.get('img_size')
  if image_size is None and 'input_size' in data:
    image_size = tuple(data['input_size'][-2:])  # of channels, height, width
  notes: list[str] = []
  known, keys = dict(family.fields), family.keys
  if (name := args.get('act_layer')) is not None:
    known['gelu'] = image_configs.choose(_GELU, name, 'act_layer')
  if keys is None:
    known |= _vit_fields(arrays, config, known, fields)
    keys = _vit_keys(
      'fc_norm' if 'fc_norm.weight' in arrays else 'norm',
      _BACKBONE if f'{_BACKBONE}conv.weight' in arrays else f'{_BACKBONE}stem.',
      'dist_token' in arrays,
    )
    arrays = _add_biases(arrays, notes)
    arrays = _to_grid(arrays, known['pooling'], args, image_size, grid, notes)
  model, params, shape = convert(
    arrays, keys, known=known, image_size=image_size, grid=grid, **fields
  )
  return Weights(
    model=model,
    params=params,
    image_shape=shape,
    class_names=config.get('label_names')
    or data.get('label_names')
    or config.get('labels'),
    activation=config.get('activation', 'softmax'),
    origin=f'timm {architecture}'.strip(),
    **(_preprocess(data, shape, notes) if data else {}),
    notes=notes,
  )


def _family(architecture, args, arrays):
  """Return the Family of a file, if a model here computes the same."""
  family = next(
    x
    for x in FAMILIES
    if x.anchor in arrays and re.fullmatch(x.pattern, architecture)
  )
  wrong = [
    f'model_args {name}={args[name]!r}'
    for name, values in family.args.items()
    if args.get(name) not in values
  ]
  if family.refused:
    wrong.append(family.refused)
  if wrong:
    raise UserError(
      f'The architecture {architecture} has {", ".join(wrong)}, which no model '
      'here has.'
    )
  return family


def _vit_fields(arrays, config, known, given):
  """Return fields of a ViT that config.json has, or names of arrays imply."""
  args = config.get('model_args') or {}
  data = config.get('pretrained_cfg') or config
  found = {}
  width = arrays['patch_embed.proj.weight'].shape[0]
  if 'num_heads' in args:
    found['num_heads'] = args['num_heads']
  elif 'architecture' in config and width in _HEADS:
    found['num_heads'] = known.get('num_heads', _HEADS[width])
  has_fc_norm = 'fc_norm.weight' in arrays
  name = args.get('global_pool') or config.get('global_pool')
  name = name or data.get('global_pool')
  if 'pooling' in given:
    pooling = given['pooling']
  elif 'attn_pool.latent' in arrays:
    pooling = 'map'
  elif 'dist_token' in arrays and name in (None, 'token'):
    pooling = 'distilled'
  elif name is not None:
    pooling = image_configs.choose(_POOLING, name, 'global_pool')
  else:
    is_token = 'cls_token' in arrays and not has_fc_norm
    pooling = 'token' if is_token else 'gap'
  found['pooling'] = pooling
  if has_fc_norm and pooling != 'token':
    # For a single token, the norm before and after pooling are the same.
    found['norm_after_pooling'] = True
  if 'pos_embed' not in arrays and given.get('posemb') is None:
    if args.get('pos_embed', 'learn') not in ('none', '', None):
      raise UserError(
        'The file has no pos_embed, and nothing says that its model has none. '
        "If it has none, pass posemb='none'."
      )
    found['posemb'] = 'none'
  return found


def _add_biases(arrays, notes):
  """Return the arrays with zero biases of qkv, if no layer has any."""
  weights = {k: x for k, x in arrays.items() if k.endswith('.qkv.weight')}
  biases = {
    k.replace('weight', 'bias'): np.zeros(len(x), np.float32)
    for k, x in weights.items()
  }
  if not biases or biases.keys() & arrays.keys():
    return arrays
  notes.append('  biases of queries, keys and values are zero: there are none')
  return arrays | biases


def _to_grid(arrays, pooling, args, image_size, grid, notes):
  """Return the arrays with tokens and positions as our models have them.

  Only pooled tokens are apart, and have positions 'cls_pos' and 'dist_pos';
  other tokens are registers. The positions of patches are a grid.
  """
  arrays = dict(arrays)
  has_cls = 'cls_token' in arrays
  names = 'cls_token', 'dist_token', 'reg_token'
  tokens = [arrays.pop(name) for name in names if name in arrays]
  width = arrays['patch_embed.proj.weight'].shape[0]
  prefix = np.concatenate([*tokens, np.zeros((1, 0, width), 'f')], axis=1)
  count, rows = prefix.shape[1], np.zeros_like(prefix)
  if 'pos_embed' in arrays:
    table = arrays['pos_embed']
    grid = grid or _grid(table.shape[-2], count, arrays, args, image_size)
    found, arrays['pos_embed'] = split_table(
      table, prefix=table.shape[-2] - math.prod(grid), grid=grid
    )
    rows = found if found.shape[1] else rows
    if rows.shape != prefix.shape:
      raise UserError(
        f'pos_embed has {rows.shape[1]} rows before those of the patches, and '
        f'there are {count} tokens.'
      )
  pooled = {'token': ('cls',), 'distilled': ('cls', 'dist')}.get(pooling, ())
  for i, name in enumerate(pooled):
    arrays[f'{name}_token'] = prefix[:, i : i + 1]
    if 'pos_embed' in arrays:
      arrays[f'{name}_pos'] = rows[:, i : i + 1]
  if count > len(pooled):
    arrays['reg_token'] = (prefix + rows)[:, len(pooled) :]
    if rows[:, len(pooled) :].any():
      notes.append('  positions of registers added to them: ours have none')
    if has_cls and not pooled:
      notes.append('  the class token, which is not pooled, is register 0')
  return arrays


def _grid(rows, tokens, arrays, args, image_size):
  """Return (rows, columns) of a table with or without rows of the tokens."""
  counts = [rows - tokens, rows]
  if args.get('no_embed_class', False):
    counts.reverse()
  patch_size = arrays['patch_embed.proj.weight'].shape[2:]
  if found := grid_of(image_size, patch_size, counts):
    return found
  squares = (n for n in counts if n > 0 and math.isqrt(n) ** 2 == n)
  return square(next(squares, rows - tokens))


def _preprocess(data, image_shape, notes):
  """Return arguments of Weights for timm's evaluation of images.

  crop_mode 'center' resizes the shorter side to the image size / crop_pct and
  crops the centre, 'squash' resizes both sides. timm antialiases, and rounds as
  torchvision does.
  """
  mode = data.get('crop_mode') or 'center'
  fraction = data.get('crop_pct') or 0.875
  method = image_configs.choose(
    image_configs.INTERPOLATIONS,
    data.get('interpolation') or 'bicubic',
    'interpolation',
  )
  size = tuple(image_shape[:2])
  large = tuple(int(side / fraction) for side in size)
  if mode == 'center' and large[0] == large[1]:
    resize = ResizeSmall(large[0], **method, rounding='down')
  else:
    resize = Resize(large, **method)
    if mode != 'squash':
      notes.append(
        f'  images are resized to {large} without keeping the aspect ratio; '
        f'timm has crop_mode {mode!r}'
      )
  crops = fraction < 1 or isinstance(resize, ResizeSmall)
  crop = CentralCrop(size, rounding='even')
  return {
    'preprocess': image_configs.normalize(
      data.get('mean', (0.485, 0.456, 0.406)),
      data.get('std', (0.229, 0.224, 0.225)),
      1 / 255,
      image_shape[2],
    ),
    'transforms': (resize, crop) if crops else (resize,),
  }


def write(weights: Weights) -> tuple[FlatParams, dict[str, Any]]:
  """Return (arrays, {'config.json': content}) that timm loads.

  timm.create_model('local-dir:FOLDER', pretrained=True) loads a folder with
  the two, and computes the same. The weights are of a ViT that timm can hold,
  see `formats.write`.
  """
  model, params = weights.model, dict(weights.params)
  distilled = isinstance(model.pooling, DistillationToken)
  args = _model_args(weights, params)
  last_norm = 'fc_norm' if args['fc_norm'] else 'norm'
  keys = _vit_keys(last_norm, distilled=distilled)
  height, width, channels = weights.image_shape
  num_classes = model.num_classes or 0
  mean, std = image_configs.mean_and_std(weights.preprocess, channels, 1 / 255)
  large, keeps_aspect, method = image_configs.describe(weights)
  config = {
    'architecture': _architecture(model),
    'num_classes': num_classes,
    'global_pool': args['global_pool'],
    'model_args': {'in_chans': channels} | args | {'num_classes': num_classes},
    'pretrained_cfg': {
      'custom_load': False,
      'input_size': [channels, height, width],
      'fixed_input_size': True,
      'interpolation': method,
      'crop_pct': _fraction(large, (height, width)),
      'crop_mode': 'center' if keeps_aspect else 'squash',
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


def _architecture(model):
  """Return timm's most similar architecture; model_args make it this model."""
  if isinstance(model.pooling, DistillationToken):
    return 'deit_base_distilled_patch16_224'
  patch_size = max(model.embedding.patch_size)
  known = {
    theirs[0]: names.create(ours)
    for ours, theirs in names.models().items()
    if theirs
  }

  def distance(name):
    other = known[name]
    return (
      abs(math.log(other.width / model.width)),
      abs(max(other.embedding.patch_size) - patch_size),
    )

  return min(
    (name for name in known if re.match('vit_[a-z]+_patch', name)),
    key=distance,
  )


def _model_args(weights, params):
  """Return model_args; params get timm's position table."""
  model = weights.model
  pooling, block, patch = model.pooling, model.block, model.embedding.patch_size
  distilled = isinstance(pooling, DistillationToken)
  pools = {Mean: 'avg', Map: 'map'}
  args = {
    'img_size': list(weights.image_shape[:2]),
    'patch_size': patch[0] if patch[0] == patch[1] else list(patch),
    'embed_dim': model.width,
    'depth': model.depth,
    'num_heads': model.num_heads,
    'mlp_ratio': _ratio(model.mlp_dim, model.width),
    'class_token': pooling.class_token,
    'global_pool': pools.get(type(pooling), 'token'),
    'fc_norm': pooling.norm_after,
    'reg_tokens': pooling.num_registers,
    'qk_norm': block.qk_norm,
  }
  if block.layerscale_init is not None:
    args['init_values'] = block.layerscale_init
  if block.gelu == 'tanh':
    args['act_layer'] = 'gelu_tanh'
  args['no_embed_class'] = True
  if model.posemb is None and not distilled:
    args['pos_embed'] = 'none'
    return args
  table = bundle.patch_positions(weights)
  rows = [params.pop(f'{x}_pos_embedding', None) for x in ('cls', 'dist')]
  if rows[0] is not None or distilled:  # a distilled model always has these
    zero = np.zeros((1, 1, model.width), np.float32)
    rows = [zero if x is None else x for x in rows[: 1 + distilled]]
    rows += [zero] * pooling.num_registers
    table = np.concatenate([*rows, table], axis=1)
    args['no_embed_class'] = False
  params['pos_embedding'] = table
  return args


def _ratio(hidden, width):
  """Return the number for which timm computes int(width * ratio) = hidden."""
  ratio = hidden / width
  return ratio if int(width * ratio) == hidden else (hidden + 0.5) / width


def _fraction(large, size):
  """Return crop_pct such that int(size / crop_pct) is `large`."""
  fraction = min(s / l for s, l in zip(size, large))
  while any(int(s / fraction) < l for s, l in zip(size, large)):
    fraction *= 1 - 1e-9  # it was rounded up
  return min(fraction, 1.0)

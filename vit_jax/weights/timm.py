"""timm: model.safetensors and config.json, read and written.

What of timm has a counterpart: VisionTransformer (DeiT, DeiT III, SigLIP's
image side, DINOv2 but for SwiGLU), its hybrids, BiT and the Mixer. A class
token that is not pooled becomes our first register, for that is all it is.

Without config.json these are taken as given: exact GELU, heads of 64 but in
published widths (`bundle.default_heads`), a class token is pooled unless there
is `fc_norm`. timm's LayerNorms have an epsilon of 1e-6, as ours by default.
"""

import re

import numpy as np

from vit_jax.weights import grids, timm_config, torch_layout
from vit_jax.weights.bundle import Weights, infer
from vit_jax.weights.timm_layout import mixer_parts, resnet_parts, vit_parts
from vit_jax.weights.timm_out import write as write
from vit_jax.weights.torch_layout import count, shape_of

_WRAPPER = 'timm_model.'  # of the class in transformers that wraps them

# Why a timm model has no counterpart here, by what its arrays are called.
_REASONS = {
  r'dist_token|head_dist\..*': 'it has a distillation token (DeiT distilled)',
  r'norm_pre\..*': 'it has a norm before the layers (CLIP)',
  r'.*\.(w12|fc1_g|w1)\..*': 'its MLPs have gates (SwiGLU)',
  r'.*rel_pos.*|.*relative_position.*': 'it has relative positions',
  r'.*rope.*': 'it has rotary positions',
  r'.*\.(attns|ffns|in_proj)\..*': 'its branches are in parallel',
  r'.*\.running_(mean|var)': 'it has batch norm',
  r'stem\.conv1\..*|patch_embed\.backbone\.(conv1|0)\..*': 'its stem is deep',
  r'.*\.(q_bias|v_bias)|.*\.q_proj\..*': 'its attention is of another form',
}


def recognise(names):
  """Whether arrays of these names are a model of timm's."""
  names = {name.removeprefix(_WRAPPER) for name in names}
  firsts = 'patch_embed.proj.weight', 'stem.proj.weight', 'stem.conv.weight'
  return any(name in names for name in firsts) and any(
    re.match(r'(stages\.0\.)?blocks\.0\.', name) for name in names
  )


def read(
  arrays, config=None, *, num_heads=None, grid=None, image_size=None, **fields
):
  """Weights of timm's arrays.

  Args:
    arrays: {name: array}.
    config: content of config.json, or None.
    num_heads, grid, image_size: see `formats.read`.
    **fields: of the model, before what the config says: gelu, pooling, ....

  Raises:
    ValueError: no model of ours has these arrays.
  """
  arrays = {k.removeprefix(_WRAPPER): np.asarray(v) for k, v in arrays.items()}
  config = timm_config.parse(config)
  config.check()
  notes = []
  if 'stem.proj.weight' in arrays:
    params, given = _read_mixer(arrays), {'gelu': config.gelu}
  elif 'patch_embed.proj.weight' in arrays:
    params, given, notes = _read_vit(arrays, config, num_heads, grid, fields)
  else:
    params, given = _read_resnet(arrays), {}
  settings = infer(params, **given | fields)
  shape = grids.image_shape(
    params, settings, image_size=image_size or config.image_size, grid=grid
  )
  preprocess, transforms, more = timm_config.preprocess(config, shape)
  known = {'preprocess': preprocess} if preprocess else {}
  return Weights(
    settings=settings,
    params=params,
    image_shape=shape,
    transforms=transforms,
    class_names=config.class_names,
    activation=config.activation,
    origin=f'timm {config.architecture}'.strip(),
    notes=notes + more,
    **known,
  )


def _read(arrays, parts, what):
  why = {
    reason
    for pattern, reason in _REASONS.items()
    if any(re.fullmatch(pattern, name) for name in arrays)
  }
  return torch_layout.to_ours(
    arrays, parts, what=what, why='; '.join(sorted(why))
  )


def _read_mixer(arrays):
  width, channels, *patch = shape_of(arrays, r'stem\.proj\.weight', 4)
  fc1 = r'blocks\.\d+\.mlp_{}\.fc1\.weight'
  tokens_mlp_dim, tokens = shape_of(arrays, fc1.format('tokens'), 2)
  parts = mixer_parts(
    width=width,
    depth=count(arrays, r'blocks\.(\d+)\.'),
    tokens=tokens,
    tokens_mlp_dim=tokens_mlp_dim,
    channels_mlp_dim=shape_of(arrays, fc1.format('channels'), 2)[0],
    patch_size=tuple(patch),
    channels=channels,
    num_classes=_rows(arrays, 'head.weight'),
  )
  return _read(arrays, parts, 'an MlpMixer')


def _read_resnet(arrays):
  width, channels, *_ = shape_of(arrays, r'stem\.conv\.weight', 4)
  parts = resnet_parts(
    units=_units(arrays, ''),
    width=width,
    channels=channels,
    form='preact' if 'norm.weight' in arrays else 'postact',
    num_classes=_rows(arrays, 'head.fc.weight'),
  )
  return _read(arrays, parts, 'a ResNet')


def _read_vit(arrays, config, num_heads, grid, fields):
  width, _, *patch = shape_of(arrays, r'patch_embed\.proj\.weight', 4)
  stem = 'patch_embed.backbone.'
  units, channels = None, arrays['patch_embed.proj.weight'].shape[1]
  if any(name.startswith(stem) for name in arrays):
    units = _units(arrays, stem)
    conv = rf'{re.escape(stem)}(stem\.)?conv\.weight'
    channels = shape_of(arrays, conv, 4)[1]
  heads = num_heads or _heads(arrays, config, width)
  if width % heads:
    raise ValueError(f'num_heads={heads} does not divide the width {width}.')
  pooling = fields.get('pooling') or _pooling(arrays, config)
  table = arrays.get('pos_embed')
  parts = vit_parts(
    width=width,
    depth=count(arrays, r'blocks\.(\d+)\.'),
    mlp_dim=shape_of(arrays, r'blocks\.\d+\.mlp\.fc1\.weight', 2)[0],
    num_heads=heads,
    patch_size=tuple(patch),
    channels=channels,
    num_classes=_rows(arrays, 'head.weight'),
    resnet_stages=units,
    class_token='cls_token' in arrays,
    registers=_rows(arrays, 'reg_token', 1) or 0,
    positions=None if table is None else _rows(arrays, 'pos_embed', 1),
    layerscale='blocks.0.ls1.gamma' in arrays,
    qk_norm='blocks.0.attn.q_norm.weight' in arrays,
    map_head=pooling == 'map',
    norm_name='fc_norm' if 'fc_norm.weight' in arrays else 'norm',
    representation_size=_rows(arrays, 'pre_logits.fc.weight'),
  )
  arrays, notes = _with_biases(arrays, parts)
  params = _read(arrays, parts, f'a VisionTransformer with {heads} heads')
  given = {'gelu': config.gelu}
  if 'fc_norm.weight' in arrays and pooling != 'token':
    # Of one token it is the same before pooling and after it.
    given['norm_after_pooling'] = True
    if pooling != 'gap':
      raise ValueError(f'The file has fc_norm, with pooling {pooling!r}.')
  if table is None:
    given['posemb'] = _fixed_positions(config, fields)
  notes += _place(params, pooling, config, grid, patch, units)
  return params, given, notes


def _with_biases(arrays, parts):
  """(arrays, notes): zero biases of qkv, where no layer has any."""
  biases = [p for p in parts if p.theirs.endswith('.qkv.bias')]
  if any(p.theirs in arrays for p in biases):
    return arrays, []
  zeros = {p.theirs: np.zeros(p.shape) for p in biases}
  note = '  biases of queries, keys and values are zero: there are none'
  return arrays | zeros, [note]


def _place(params, pooling, config, grid, patch, units):
  """Gives positions and tokens that precede the patches our form."""
  notes = []
  cls, registers = params.pop('cls', None), params.pop('registers', None)
  prefix = [p for p in (cls, registers) if p is not None]
  table = params.pop('pos_embedding', None)
  if prefix:
    prefix = np.concatenate(prefix, axis=1)
  if table is not None:
    stride = grids.stride({'patch_size': patch, 'resnet_stages': units})
    length = prefix.shape[1] if len(prefix) else 0
    size = _grid(table.shape[1], length, config, grid, stride)
    rows, params['pos_embedding'] = grids.positions(
      table, prefix=table.shape[1] - size[0] * size[1], grid=size
    )
  else:
    rows = np.zeros((1, 0, 0), np.float32)
  first = 0
  if pooling == 'token':
    if cls is None:
      raise ValueError("The file has no cls_token; pooling cannot be 'token'.")
    params['cls'], first = cls, 1
    if table is not None:
      row = rows[:, :1] if rows.shape[1] else np.zeros_like(cls)
      params['cls_pos_embedding'] = row
  if len(prefix) and prefix.shape[1] > first:
    params['registers'] = prefix[:, first:]
    if rows[:, first:].any():
      params['registers'] = prefix[:, first:] + rows[:, first:]
      notes.append('  positions of registers added to them, as ours have none')
    if cls is not None and first == 0:
      notes.append('  the class token, which is not pooled, is register 0')
  return notes


def _fixed_positions(config, fields):
  """The posemb of a model without a table of positions."""
  if config.has_positions and 'posemb' not in fields:
    raise ValueError(
      'The file has no pos_embed, and nothing says that its model has none. '
      "If it has none, pass posemb='none'."
    )
  return 'none'


def _grid(count, prefix, config, grid, stride):
  """(rows, columns) of a position table with and without the prefix's rows."""
  if config.image_size and not grid:
    grid = tuple(s // t for s, t in zip(config.image_size, stride))
    if grid[0] * grid[1] not in (count, count - prefix):
      grid = None  # of another size than the config says
  if grid:
    return grids.pair(grid)
  embeds_prefix = not config.args.get('no_embed_class', False)
  for patches in (count - prefix, count)[:: 1 if embeds_prefix else -1]:
    if patches > 0 and int(patches**0.5 + 0.5) ** 2 == patches:
      return grids.square(patches, None, 'pos_embed')
  return grids.square(count - prefix, None, 'pos_embed')


def _heads(arrays, config, width):
  norm = arrays.get('blocks.0.attn.q_norm.weight')
  if norm is not None and norm.size and width % norm.size == 0:
    return width // norm.size
  return config.heads(width)


def _pooling(arrays, config):
  if 'attn_pool.latent' in arrays:
    return 'map'
  if config.pooling:
    return config.pooling
  if 'cls_token' in arrays and 'fc_norm.weight' not in arrays:
    return 'token'
  return 'gap'


def _units(arrays, prefix):
  """Units in each stage of a ResNet."""
  prefix = rf'{re.escape(prefix)}stages\.'
  return tuple(
    count(arrays, rf'{prefix}{stage}\.blocks\.(\d+)\.')
    for stage in range(count(arrays, rf'{prefix}(\d+)\.'))
  )


def _rows(arrays, name, axis=0):
  array = arrays.get(name)
  return None if array is None or array.ndim <= axis else array.shape[axis]

"""Our models as timm's: the nearest name of an architecture, and what differs.

timm makes its model of a function by that name and of `model_args`, which come
before all that the function sets itself, where it lets them.
"""

import math

import numpy as np

from vit_jax.weights import grids, timm_config, torch_layout
from vit_jax.weights.bundle import MIXER, RESNET, depth
from vit_jax.weights.timm_layout import mixer_parts, resnet_parts, vit_parts

_VITS = {  # (width, patch): name
  (192, 16): 'vit_tiny_patch16_224',
  (384, 8): 'vit_small_patch8_224',
  (384, 16): 'vit_small_patch16_224',
  (384, 32): 'vit_small_patch32_224',
  (768, 8): 'vit_base_patch8_224',
  (768, 16): 'vit_base_patch16_224',
  (768, 32): 'vit_base_patch32_224',
  (1024, 14): 'vit_large_patch14_224',
  (1024, 16): 'vit_large_patch16_224',
  (1024, 32): 'vit_large_patch32_224',
  (1280, 14): 'vit_huge_patch14_224',
  (1408, 14): 'vit_giant_patch14_224',
  (1664, 14): 'vit_gigantic_patch14_224',
}
_HYBRIDS = {
  (): 'vit_tiny_r_s16_p8_224',
  (2, 2, 2, 2): 'vit_small_r26_s32_224',
  (3, 4, 9): 'vit_base_r50_s16_224',
  (3, 4, 6, 3): 'vit_large_r50_s32_224',
}
_RESNETS = {  # (stages, width factor)
  ((3, 4, 6, 3), 1): 'resnetv2_50x1_bit',
  ((3, 4, 6, 3), 3): 'resnetv2_50x3_bit',
  ((3, 4, 23, 3), 1): 'resnetv2_101x1_bit',
  ((3, 4, 23, 3), 3): 'resnetv2_101x3_bit',
  ((3, 8, 36, 3), 2): 'resnetv2_152x2_bit',
  ((3, 8, 36, 3), 4): 'resnetv2_152x4_bit',
}
_MIXERS = {  # (width, depth, patch)
  (512, 8, 16): 'mixer_s16_224',
  (512, 8, 32): 'mixer_s32_224',
  (768, 12, 16): 'mixer_b16_224',
  (768, 12, 32): 'mixer_b32_224',
  (1024, 24, 16): 'mixer_l16_224',
  (1024, 24, 32): 'mixer_l32_224',
}


def write(weights):
  """(arrays, {'config.json': content}) that timm loads, and computes the same.

  timm.create_model('local-dir:FOLDER', pretrained=True) does, of a folder with
  the two.

  Raises:
    ValueError: timm has no such model.
  """
  target = weights.settings['target']
  make = {RESNET: _resnet, MIXER: _mixer}.get(target, _vit)
  if (eps := weights.settings.get('norm_eps', 1e-6)) != 1e-6:
    raise ValueError(
      f'norm_eps is {eps}, and that of timm is 1e-06. Write hf or npz; or read '
      'the weights with norm_eps=1e-6, if that is near enough.'
    )
  name, args, params, parts = make(weights)
  first_conv = next(p.theirs for p in parts if len(p.shape) == 4)
  config = timm_config.make(
    weights,
    name,
    args | {'num_classes': weights.settings.get('num_classes') or 0},
    first_conv=first_conv.removesuffix('.weight'),
    classifier='head.fc' if target == RESNET else 'head',
  )
  return torch_layout.to_theirs(params, parts), {'config.json': config}


def _vit(weights):
  settings, params = weights.settings, dict(weights.params)
  _check_vit(settings)
  width, mlp_dim = settings['width'], settings['mlp_dim']
  units = settings.get('resnet_stages')
  pooling = settings.get('pooling', 'token')
  after = settings.get('norm_after_pooling', False)
  registers = settings.get('num_registers', 0)
  args = {
    'img_size': list(weights.image_shape[:2]),
    'patch_size': _patch(settings),
    'embed_dim': width,
    'depth': settings['depth'],
    'num_heads': settings['num_heads'],
    'mlp_ratio': _ratio(mlp_dim, width),
    'class_token': pooling == 'token',
    'global_pool': {'gap': 'avg'}.get(pooling, pooling),
    'fc_norm': after,
    'reg_tokens': registers,
    'qk_norm': settings.get('qk_norm', False),
  }
  if settings.get('layerscale_init') is not None:
    args['init_values'] = settings['layerscale_init']
  if settings.get('gelu', 'tanh') == 'tanh':
    args['act_layer'] = 'gelu_tanh'
  args['no_embed_class'] = _join_positions(weights, params, args)
  table = params.get('pos_embedding')
  parts = vit_parts(
    width=width,
    depth=settings['depth'],
    mlp_dim=mlp_dim,
    num_heads=settings['num_heads'],
    patch_size=grids.pair(settings['patch_size']),
    channels=weights.image_shape[2],
    num_classes=settings.get('num_classes'),
    resnet_stages=units,
    class_token=pooling == 'token',
    registers=registers,
    positions=None if table is None else table.shape[1],
    layerscale='init_values' in args,
    qk_norm=args['qk_norm'],
    map_head=pooling == 'map',
    norm_name='fc_norm' if after else 'norm',
  )
  return _vit_name(settings), args, params, parts


def _join_positions(weights, params, args):
  """Makes params those of timm's names; whether the prefix has no positions."""
  if weights.settings.get('posemb', 'learned') == 'none':
    args['pos_embed'] = 'none'
    return True
  rows = grids.position_rows(weights)
  cls = params.pop('cls_pos_embedding', None)
  if cls is not None:
    zeros = np.zeros((1, args['reg_tokens'], rows.shape[-1]), np.float32)
    rows = np.concatenate([cls, zeros, rows], axis=1)
  params['pos_embedding'] = rows
  return cls is None


def _check_vit(settings):
  if settings.get('representation_size'):
    raise ValueError(
      'timm has no tanh layer between pooling and head (representation_size='
      f'{settings["representation_size"]}). Write npz; or train a head without '
      'it.'
    )
  if settings.get('pooling') == 'none':
    raise ValueError(
      "timm has no logits of single patches (pooling 'none'). Write npz or "
      'StableHLO.'
    )


def _vit_name(settings):
  units, patch = settings.get('resnet_stages'), _patch(settings)
  if units is not None:
    if tuple(units) in _HYBRIDS:
      return _HYBRIDS[tuple(units)]
    raise ValueError(
      f'resnet_stages={tuple(units)}: timm has hybrids of '
      f'{", ".join(map(str, _HYBRIDS))} only. Write npz.'
    )
  side = max(grids.pair(patch))

  def distance(key):
    return abs(math.log(key[0] / settings['width'])), abs(key[1] - side)

  return _VITS[min(_VITS, key=distance)]


def _resnet(weights):
  settings, params = weights.settings, weights.params
  units = tuple(settings.get('stages', (3, 4, 6, 3)))
  factor = settings.get('width_factor', 1)
  form = settings.get('form', 'preact')
  name = _RESNETS.get((units, factor))
  if form != 'preact' or name is None:
    have = ', '.join(f'{s} x{f}' for s, f in _RESNETS)
    raise ValueError(
      f'timm has no {form!r} ResNet of the stages {units} x{factor}; it has '
      f"'preact' ones of {have}. Write npz."
    )
  parts = resnet_parts(
    units=units,
    width=64 * factor,
    channels=weights.image_shape[2],
    form=form,
    num_classes=settings.get('num_classes'),
  )
  return name, {}, params, parts


def _mixer(weights):
  settings, params = weights.settings, weights.params
  width, patch = settings['width'], _patch(settings)
  name = _MIXERS.get((width, depth(params), patch))
  if name is None:
    have = ', '.join(f'{w}, {d}, {p}' for w, d, p in _MIXERS)
    raise ValueError(
      f'timm has no Mixer of the width, depth and patch {width}, '
      f'{depth(params)}, {patch}; it has {have}. Write npz.'
    )
  if settings.get('gelu', 'tanh') != 'exact':
    raise ValueError(
      "timm's Mixer has the exact GELU, this one gelu='tanh'. Write npz; or "
      "read the weights with gelu='exact', if that is near enough."
    )
  hidden = settings['tokens_mlp_dim'], settings['channels_mlp_dim']
  args = {
    'img_size': list(weights.image_shape[:2]),
    'mlp_ratio': [_ratio(h, width) for h in hidden],
  }
  parts = mixer_parts(
    width=width,
    depth=depth(params),
    tokens=params['block_0/token_mixing/fc1/kernel'].shape[0],
    tokens_mlp_dim=hidden[0],
    channels_mlp_dim=hidden[1],
    patch_size=grids.pair(settings['patch_size']),
    channels=weights.image_shape[2],
    num_classes=settings.get('num_classes'),
  )
  return name, args, params, parts


def _patch(settings):
  patch = grids.pair(settings['patch_size'])
  return patch[0] if patch[0] == patch[1] else list(patch)


def _ratio(hidden, width):
  """A number that timm makes `hidden` of: int(width * ratio)."""
  ratio = hidden / width
  return ratio if int(width * ratio) == hidden else (hidden + 0.5) / width

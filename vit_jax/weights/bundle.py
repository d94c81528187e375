"""What every weights file is read to, and what every one is written from.

In the middle of all formats stands `Weights`: parameters under our names, one
layer after the other, and what else is needed in order to use them. Whatever a
file holds, its architecture is read off the parameters: `infer`.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.config import instantiate
from vit_jax.models.names import (
  AXIAL_RESNET,
  AXIAL_VIT,
  MIXER,
  RESNET,
  SIZES,
  VIT,
)

NORMALIZE = 'vit_jax.preprocess.Normalize'
TRANSFORMS = 'vit_jax.data.transforms.'
# All that a file may name. Whatever else it names is never imported.
_TRUSTED = {
  VIT,
  RESNET,
  MIXER,
  AXIAL_VIT,
  AXIAL_RESNET,
  NORMALIZE,
  f'{TRANSFORMS}Resize',
  f'{TRANSFORMS}ResizeSmall',
  f'{TRANSFORMS}CentralCrop',
}

# Heads of the published widths; any other width is taken to have heads of 64.
_HEADS = {width: heads for width, _, _, heads in SIZES.values()}


@dataclasses.dataclass
class Weights:
  """A model and its parameters, and what is needed to use them.

  Attributes:
    settings: of the model: its target, and its fields.
    params: {path: array}, layers unrolled ('block_0/...').
    image_shape: (H, W, C) that the model was last trained or used with.
    preprocess: settings of what takes uint8 to float images.
    transforms: settings, in order, of what makes such an image of a picture.
    class_names: of the outputs, or None.
    activation: that makes probabilities of logits, 'softmax' or 'sigmoid'.
    origin: what was read, in words.
    notes: what was done to the parameters beyond renaming them.
    step: of the run, or 0.
  """

  settings: dict[str, Any]
  params: dict[str, np.ndarray]
  image_shape: tuple[int, int, int]
  preprocess: dict[str, Any] = dataclasses.field(
    default_factory=lambda: {'target': NORMALIZE}
  )
  transforms: list[dict[str, Any]] | None = None
  class_names: list[str] | None = None
  activation: str = 'softmax'
  origin: str = ''
  notes: list[str] = dataclasses.field(default_factory=list)
  step: int = 0

  def __post_init__(self):
    if self.transforms is None:  # the released code's: aspect not kept
      size = list(self.image_shape[:2])
      self.transforms = [{'target': f'{TRANSFORMS}Resize', 'size': size}]


def _model_of(weights):
  return make(weights.settings)


Weights.model = property(_model_of)


def make(settings: Mapping[str, Any]):
  """The object that settings read from a file describe; see check_targets."""
  check_targets(settings)
  return instantiate(settings)


def check_targets(settings: Any) -> None:
  """Raises ValueError if a target in settings from a file is not trusted.

  A file from elsewhere must not choose what is run: it can name models,
  preprocessing and test-time transforms of ours, and nothing else.
  """
  for target in _targets(settings):
    if not isinstance(target, str) or target not in _TRUSTED:
      raise ValueError(
        f'The weights name {target!r}, which is none of '
        f'{", ".join(sorted(_TRUSTED))}; nothing else is taken from a file. '
        'If it is your own, name it in your config or call.'
      )


def _targets(value):
  if isinstance(value, Mapping):
    if 'target' in value:
      yield value['target']
    value = value.values()
  elif not isinstance(value, list | tuple):
    return
  for item in value:
    yield from _targets(item)


def infer(params: Mapping[str, np.ndarray], **given) -> dict[str, Any]:
  """The settings of the model that parameters under our names belong to.

  A file cannot tell these, which are by default: gelu 'tanh', norm_eps 1e-6,
  norm_after_pooling False; posemb 'sincos2d' where there is no table; posemb_at
  'stem' where there is one; patch_stride None; pooling 'gap' where there is
  neither class token nor MAP head; 'none' with a mask vector; a ResNet with a
  final norm is 'preact'.

  Args:
    params: {path: array}, unrolled.
    **given: fields of the model. What the file tells too must be the same.

  Raises:
    ValueError: no model of ours has such parameters, or `given` differs.
  """
  if 'block_0/token_mixing/fc1/kernel' in params:
    found = _infer_mixer(params)
  elif 'embedding/kernel' in params and 'block_0/norm1/scale' in params:
    found = _infer_vit(params, given)
  elif 'resnet/root/conv/kernel' in params:
    found = _infer_resnet(params)
  else:
    raise ValueError(
      'No model of ours has such parameters (neither a ViT, nor a hybrid, a '
      f'ResNet or a Mixer): {_some(params)}.'
    )
  head = params.get('head/kernel')
  found['num_classes'] = None if head is None else head.shape[-1]
  wrong = {
    name: (_plain(value), _plain(found[name]))
    for name, value in given.items()
    if name in found and _plain(value) != _plain(found[name])
  }
  if wrong:
    lines = '; '.join(f'{k}={v!r}, not {g!r}' for k, (g, v) in wrong.items())
    raise ValueError(
      f'The file says {lines} as was given. Leave out what the file says.'
    )
  return found | given


def _infer_vit(params, given):
  query = params['block_0/attn/query/kernel']  # [D, h, d]
  found = {
    'target': VIT,
    'width': query.shape[0],
    'depth': depth(params),
    'mlp_dim': params['block_0/mlp/fc1/kernel'].shape[-1],
    'num_heads': query.shape[1],
    'patch_size': tuple(params['embedding/kernel'].shape[:2]),
    'representation_size': None,
    'num_registers': 0,
    'layerscale_init': None,
    'qk_norm': 'block_0/attn/query_norm/scale' in params,
  }
  if 'mask' in params:  # the pre-training of masked_patches.py
    found |= {'mask_token': True, 'class_token': 'cls' in params}
    found['pooling'] = 'none'
  elif 'cls' in params:
    found['pooling'] = 'token'
  elif 'map_head/probe' in params:
    found['pooling'] = 'map'
  else:
    found['pooling'] = 'none' if given.get('pooling') == 'none' else 'gap'
  found |= _infer_positions(params, given)
  if 'pre_logits/kernel' in params:
    found['representation_size'] = params['pre_logits/kernel'].shape[-1]
  if 'registers' in params:
    found['num_registers'] = params['registers'].shape[1]
  if 'block_0/ls1' in params:
    # Where its training began is not in the file; it only has to be there.
    found['layerscale_init'] = given.get('layerscale_init', 1e-5)
  if 'resnet/root/conv/kernel' in params:
    found['resnet_stages'] = stages(params)
  return found


def _infer_positions(params, given):
  if 'block_0/attn/offset_embedding' in params:
    return {'posemb': 'relative'}
  for name, kind in (
    ('pos_embedding', 'learned'),
    ('pos_embedding_x', 'learned2d'),
  ):
    if f'block_0/{name}' in params:
      return {'posemb': kind, 'posemb_at': 'layers'}
    if name in params:
      return {'posemb': kind}
  return {'posemb': 'none' if given.get('posemb') == 'none' else 'sincos2d'}


def _infer_resnet(params):
  width = params['resnet/root/conv/kernel'].shape[-1]
  return {
    'target': RESNET,
    'stages': stages(params),
    'width_factor': width // 64,
    'form': 'preact' if 'norm/scale' in params else 'postact',
  }


def _infer_mixer(params):
  kernel = params['embedding/kernel']
  return {
    'target': MIXER,
    'width': kernel.shape[-1],
    'depth': depth(params),
    'tokens_mlp_dim': params['block_0/token_mixing/fc1/kernel'].shape[-1],
    'channels_mlp_dim': params['block_0/channel_mixing/fc1/kernel'].shape[-1],
    'patch_size': tuple(kernel.shape[:2]),
  }


def depth(params):
  """Number of layers block_0, block_1, ... ."""
  found = (re.match(r'block_(\d+)/', path) for path in params)
  return 1 + max((int(m[1]) for m in found if m), default=-1)


def stages(params):
  """Units in each stage of a ResNet; () where there is only its root."""
  units = {}
  for path in params:
    if found := re.match(r'resnet/stage(\d+)/unit(\d+)/', path):
      stage, unit = int(found[1]), int(found[2])
      units[stage] = max(unit, units.get(stage, 0))
  return tuple(units.get(i + 1, 0) for i in range(max(units, default=0)))


def default_heads(width):
  """Heads of a published ViT of that width; of another width / 64."""
  heads = _HEADS.get(width, max(width // 64, 1))
  if width % heads:
    raise ValueError(
      f'The file does not say how many heads its width of {width} has, and no '
      'published model is so wide. Give num_heads.'
    )
  return heads


def fold_layerscale(params, notes):
  """Multiplies LayerScale into the layer before it, which is equal."""
  if 'block_0/ls1' not in params:
    return params
  out = {}
  for path, value in params.items():
    found = re.fullmatch(r'(block_\d+)/(attn/out|mlp/fc2)/(kernel|bias)', path)
    if found:
      value = value * params[f'{found[1]}/ls{1 if "attn" in path else 2}']
    if not re.fullmatch(r'block_\d+/ls[12]', path):
      out[path] = value
  notes.append(
    '  LayerScale multiplied into attn/out and mlp/fc2, as the format has none'
  )
  return out


def _plain(value):
  return tuple(value) if isinstance(value, list) else value


def _some(names):
  names = sorted(names)
  return ', '.join(names[:8]) + (', ...' if len(names) > 8 else '')

"""timm: model.safetensors and config.json.

    {'architecture': 'vit_base_patch16_224', 'num_classes': 1000,
     'global_pool': 'token', 'model_args': {...}, 'label_names': [...],
     'pretrained_cfg': {'input_size': [3, 224, 224], 'mean': [...], ...}}

is config.json. Older files have the content of pretrained_cfg at the top and no
model_args. We also write 'activation' and, for images of any aspect ratio,
'max_num_patches', which timm ignores.
"""

import dataclasses
import functools
from typing import Any

from vit_jax.data.targets import Classes, Numbers
from vit_jax.models.vit import as_pair
from vit_jax.types import FlatParams, Shape
from vit_jax.weights import architecture, family, image_configs
from vit_jax.weights.bundle import Weights, assume, keep_aspect
from vit_jax.weights.families import timm_eva, timm_vit, timm_vlm
from vit_jax.weights.family import Config

IMAGES = ('mean', 'std', 'interpolation', 'crop_pct')  # how they are converted
# The supported models; the first that fits counts.
FAMILIES = timm_vlm.FAMILIES + timm_vit.FAMILIES + timm_eva.FAMILIES


def read(
  arrays: FlatParams, config: Config | None = None, **options: Any
) -> Weights:
  """Return Weights of {name: array} and config.json; see `formats.read`."""
  config = config or {}
  levels = config.get('pretrained_cfg'), config, config.get('model_args')
  config = {
    name: value
    for level in levels
    for name, value in (level or {}).items()
    if value is not None
  }
  # input_size is of channels, height, width.
  size = config.get('img_size') or config.get('input_size', ())[-2:] or None
  name = config.get('architecture', '')
  options = {'name': name, 'image_size': size} | options
  found = family.find(FAMILIES, arrays, name)
  weights = architecture.read(found, arrays, config, **options)
  images = {**found.images, **config}
  use = image_use(images, weights.image_shape, weights.notes) if images else {}
  activation = config.get('activation', 'softmax')
  weights = dataclasses.replace(
    weights,
    class_names=config.get('label_names') or config.get('labels'),
    activation=activation,
    targets=Numbers() if activation == 'identity' else Classes(),
    origin=f'timm {name}'.strip(),
    **use,
  )
  if found.keeps_aspect:
    weights = keep_aspect(weights, config.get('max_num_patches'))
  return assume(weights, config, IMAGES)


def image_use(
  config: Config, image_shape: Shape, notes: list[str]
) -> dict[str, Any]:
  """Return arguments of Weights for timm's evaluation of images.

  crop_mode 'center' resizes the shorter side to the image size / crop_pct and
  crops the centre, 'squash' resizes both sides.
  """
  mode = config.get('crop_mode') or 'center'
  fraction = config.get('crop_pct') or 0.875
  large: Any = tuple(int(side / fraction) for side in image_shape[:2])
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
    config.get('mean', image_configs.IMAGENET['mean']),
    config.get('std', image_configs.IMAGENET['std']),
    torchvision=True,
  )


def _texts(weights, described):
  architecture, args = described
  height, width, channels = weights.image_shape
  num_classes = weights.model.num_classes or 0
  large, method, mean, std = image_configs.describe(weights)
  distilled = weights.model.pooling.distillation_token
  config = {
    'architecture': architecture,
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
  if weights.keeps_aspect:
    config['max_num_patches'] = weights.transforms[-1].max_patches
  return {'config.json': config}


# timm.create_model('local-dir:FOLDER', pretrained=True) loads what this makes.
write = functools.partial(family.write, FAMILIES, make=_texts, reread=read)


def _fraction(large, size):
  """Return crop_pct such that int(size / crop_pct) is `large`."""
  sides = list(zip(size, as_pair(large)))
  fraction = min(s / l for s, l in sides)
  while any(int(s / fraction) < l for s, l in sides):
    fraction *= 1 - 1e-9  # it was rounded up
  return min(fraction, 1.0)

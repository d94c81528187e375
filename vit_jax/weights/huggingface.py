"""Hugging Face transformers: model.safetensors, and the two JSON files
config.json and preprocessor_config.json.

Version 5 has arrays such as 'layers.0.attention.q_proj' in memory, but still
'encoder.layer.0.attention.attention.query' in files. Both names are read, and
the second is written.
"""

import dataclasses
import functools
import re
from typing import Any

from vit_jax.data.targets import Classes, Labels, Numbers, Targets
from vit_jax.data.transforms import scale
from vit_jax.models.vit import as_pair
from vit_jax.types import FlatParams
from vit_jax.weights import architecture, family, image_configs, timm
from vit_jax.weights.bundle import Weights, assume, keep_aspect
from vit_jax.weights.families import hf_towers, hf_vit
from vit_jax.weights.family import Config

FAMILIES = hf_vit.FAMILIES + hf_towers.FAMILIES  # the first that fits counts
_PROBLEMS: dict[str, tuple[Any, Targets]] = {
  'multi_label_classification': ('sigmoid', Labels()),
  'regression': ('identity', Numbers()),
}
_IMAGES = ('resample', 'image_mean', 'image_std')
_RESAMPLE = ('nearest', 'lanczos', 'bilinear', 'bicubic', 'box')  # of Pillow


def read(
  arrays: FlatParams, config: Config | None = None, **options: Any
) -> Weights:
  """Return Weights of {name: array} and config.json; see `formats.read`.

  The config has the content of preprocessor_config.json, or 'image_processor'
  of processor_config.json, as 'preprocessor_config'. Values of 'vision_config'
  come first.
  """
  config = dict(config or {})
  name = config.get('model_type', '')
  config |= config.get('vision_config') or {}
  options = {'name': name, 'image_size': config.get('image_size')} | options
  found = family.find(FAMILIES, arrays, name)
  weights = architecture.read(found, arrays, config, **options)
  labels = config.get('id2label') or {}
  unnamed = [f'LABEL_{i}' for i in range(weights.model.num_classes or 0)]
  class_names = [labels.get(str(i), x) for i, x in enumerate(unnamed)]
  problem = config.get('problem_type') or ''
  activation, targets = _PROBLEMS.get(problem, ('softmax', Classes()))
  use = config.get('preprocessor_config')
  if use and 'norm_mean' in config:  # C-RADIO normalises images in the model
    mean, std = config['norm_mean'], config['norm_std']
    use |= {'do_normalize': True, 'image_mean': mean, 'image_std': std}
  weights = dataclasses.replace(
    weights,
    class_names=None if class_names == unnamed else class_names,
    activation=activation,
    targets=targets,
    origin=f'hf {name}'.strip(),
    **_use(use, found.images, weights.image_shape, weights.notes),
  )
  if found.keeps_aspect:
    weights = keep_aspect(weights, (use or {}).get('max_num_patches'))
  return assume(weights, use or {}, _IMAGES)


def _use(config, images, image_shape, notes):
  """Return arguments of Weights from preprocessor_config.json or `images`."""
  if config is None and images:
    return timm.image_use(images, image_shape, notes)
  is_picture = image_shape[2] in (1, 3)  # or a raster
  if config is None:
    of_levels = dict.fromkeys(('do_rescale', 'do_normalize'), is_picture)
    config = {'size': image_shape[:2], **of_levels}
  config = {name: value for name, value in config.items() if value is not None}
  old_kind = config.get('feature_extractor_type', '')
  kind = config.get('image_processor_type', old_kind)
  bicubic = re.match('(CLIP|Siglip|Bit|Beit)(Image|Feature)', kind)
  size, is_naflex = tuple(image_shape[:2]), 'max_num_patches' in config
  large = _size(config.get('size', size if is_naflex else 224))
  if bicubic and bicubic[1] == 'CLIP' and isinstance(config.get('size'), int):
    large = config['size']
  crops = config.get('do_center_crop')
  made = _size(config.get('crop_size', 224)) if crops else large
  if made != size:
    notes.append(
      f'  images are resized to {size}: preprocessor_config.json makes another '
      'size'
    )
  if isinstance(made, int):  # and the other side is longer
    made = large = size
  normalizes = config.get('do_normalize', True)
  rescales = config.get('do_rescale', True)
  found = image_configs.use(
    (*made, image_shape[2]),
    large,
    _RESAMPLE[config.get('resample', 3 if bicubic else 2)],
    config.get('image_mean', [0.5] * 3) if normalizes else [0.0],
    config.get('image_std', [0.5] * 3) if normalizes else [1.0],
    factor=config.get('rescale_factor', 1 / 255) if rescales else 1.0,
  )
  return found | {'transforms': scale(found['transforms'], size, old=made)}


def _size(value):
  """Return an int, of the shorter side, or (height, width)."""
  if isinstance(value, dict):
    if edge := value.get('shortest_edge'):
      return edge
    value = value['height'], value['width']
  return as_pair(value)


def _texts(weights, config):
  if classes := weights.model.num_classes:
    names = weights.class_names or [f'LABEL_{i}' for i in range(classes)]
    config['id2label'] = {str(i): name for i, name in enumerate(names)}
    config['label2id'] = {name: i for i, name in enumerate(names)}
  for problem, (activation, _) in _PROBLEMS.items():
    if activation == weights.activation:
      config['problem_type'] = problem
  height, width, _ = weights.image_shape
  large, method, mean, std = image_configs.describe(weights)
  use = {
    'image_processor_type': 'ViTImageProcessor',
    'do_resize': True,
    'size': {'shortest_edge': large}
    if isinstance(large, int)
    else {'height': large[0], 'width': large[1]},
    'resample': _RESAMPLE.index(method),
    'do_rescale': weights.decode.dtype == 'uint8',  # not in rasters
    'rescale_factor': 1 / 255,
    'do_normalize': True,
    'image_mean': mean,
    'image_std': std,
  }
  if weights.keeps_aspect:
    use['image_processor_type'] = 'Siglip2ImageProcessor'
    use['patch_size'] = config['patch_size']
    use['max_num_patches'] = weights.transforms[-1].max_patches
  elif large != (height, width):
    use['do_center_crop'] = True
    use['crop_size'] = {'height': height, 'width': width}
  return {'config.json': config, 'preprocessor_config.json': use}


# `from_pretrained` of the class in config.json loads what this makes.
write = functools.partial(family.write, FAMILIES, make=_texts, reread=read)

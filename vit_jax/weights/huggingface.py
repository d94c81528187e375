"""transformers' ViT: model.safetensors, config.json, preprocessor_config.json.

ViTModel and ViTForImageClassification. The names of arrays changed: version 5
has 'layers.0.attention.q_proj' in memory, but its files still have
'encoder.layer.0.attention.attention.query'. Both are read, with and without
the prefix 'vit.'; the latter is written. The model has a pooled class token
and no registers, MAP head or LayerScale.

The tanh layer of a ViTModel, `pooler`, is our representation layer; a
classifier does not read it, and then it is left out. Without config.json: exact
GELU, and LayerNorms with an epsilon of 1e-12.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from vit_jax.models.layers import as_pair
from vit_jax.types import FlatParams, Size, UserError
from vit_jax.weights import bundle, image_configs
from vit_jax.weights.architecture import convert, split_table
from vit_jax.weights.bundle import Weights
from vit_jax.weights.keymap import Key, KeyMap, conv, linear, norm

_PATCHES = 'embeddings.patch_embeddings.projection'
_LAYER = 'encoder.layer.{i}'
_KEYS = KeyMap(
  Key('embeddings.cls_token', 'cls'),
  Key('embeddings.cls_position', 'cls_pos_embedding'),  # of `read`
  Key('embeddings.position_embeddings', 'pos_embedding'),
  *conv(_PATCHES, 'embedding'),
  *norm(f'{_LAYER}.layernorm_before', 'block_{i}/norm1'),
  *linear(f'{_LAYER}.attention.output.dense', 'block_{i}/attn/out', 'merged'),
  *linear(f'{_LAYER}.attention.attention.{{n}}', 'block_{i}/attn/{n}'),
  *norm(f'{_LAYER}.layernorm_after', 'block_{i}/norm2'),
  *linear(f'{_LAYER}.intermediate.dense', 'block_{i}/mlp/fc1'),
  *linear(f'{_LAYER}.output.dense', 'block_{i}/mlp/fc2'),
  *norm('layernorm', 'norm'),
  *linear('pooler.dense', 'pre_logits'),
  *linear('classifier', 'head'),
)
_IN_MEMORY = {  # names of version 5: names in files
  '.attention.q_proj.': '.attention.attention.query.',
  '.attention.k_proj.': '.attention.attention.key.',
  '.attention.v_proj.': '.attention.attention.value.',
  '.attention.o_proj.': '.attention.output.dense.',
  '.mlp.fc1.': '.intermediate.dense.',
  '.mlp.fc2.': '.output.dense.',
}
_GELU = {'gelu': 'exact', 'gelu_new': 'tanh', 'gelu_pytorch_tanh': 'tanh'}
_RESAMPLE = ('nearest', 'lanczos', 'bilinear', 'bicubic', 'box')  # of Pillow


def recognise(names: Iterable[str]) -> bool:
  """Return whether arrays of these names are a ViT of transformers."""
  return any(name.endswith(f'{_PATCHES}.weight') for name in names)


def read(
  arrays: FlatParams,
  config: Mapping[str, Any] | None = None,
  *,
  grid: tuple[int, int] | None = None,
  image_size: Size | None = None,
  **fields: Any,
) -> Weights:
  """Return Weights of {name: array} and config.json; see `formats.read`.

  The config has the content of preprocessor_config.json as
  'preprocessor_config'.
  """
  config = config or {}
  for name, value in (('model_type', 'vit'), ('pooler_act', 'tanh')):
    if config.get(name, value) != value:
      raise UserError(
        f'config.json: {name} is {config[name]!r}; only {value!r} is supported.'
      )
  notes: list[str] = []
  arrays = _file_names(arrays, notes)
  act = config.get('hidden_act', 'gelu')
  known = {
    'gelu': image_configs.choose(_GELU, act, 'hidden_act'),
    'norm_eps': config.get('layer_norm_eps', 1e-12),
  }
  if 'num_attention_heads' in config:
    known['num_heads'] = config['num_attention_heads']
  cls, table = split_table(
    arrays['embeddings.position_embeddings'],
    (1,),
    grid=grid,
    image_size=image_size or config.get('image_size'),
    patch_size=arrays[f'{_PATCHES}.weight'].shape[2:],
  )
  arrays['embeddings.cls_position'] = cls
  arrays['embeddings.position_embeddings'] = table
  weights = convert(arrays, _KEYS, known=known, **fields)
  labels = config.get('id2label') or {}
  count = weights.model.num_classes or 0
  class_names = [labels.get(str(i), f'LABEL_{i}') for i in range(count)]
  if class_names == [f'LABEL_{i}' for i in range(count)]:  # the default
    class_names = None
  problem = config.get('problem_type') == 'multi_label_classification'
  return dataclasses.replace(
    weights,
    class_names=class_names,
    activation='sigmoid' if problem else 'softmax',
    origin='hf',
    **_use(config.get('preprocessor_config'), weights.image_shape, notes),
    notes=notes,
  )


def _file_names(arrays, notes):
  """Return the arrays that logits depend on, with the names that files have."""
  out = {}
  skipped = ['embeddings.mask_token', 'embeddings.position_ids']
  if 'classifier.weight' in arrays:
    skipped += ['pooler.dense.weight', 'pooler.dense.bias']
  for name, array in arrays.items():
    name = name.removeprefix('vit.')
    if name.startswith('layers.'):
      name = f'encoder.layer.{name.removeprefix("layers.")}'
      for ours, theirs in _IN_MEMORY.items():
        name = name.replace(ours, theirs)
    if name in skipped:
      notes.append(f'- {name}, which the logits do not depend on')
    else:
      out[name] = array
  return out


def _use(config, image_shape, notes):
  """Return arguments of Weights from preprocessor_config.json."""
  if config is None:
    return {}
  size = tuple(image_shape[:2])
  large = _size(config.get('size', 224))
  crop = _size(config.get('crop_size', 224))
  if (crop if config.get('do_center_crop') else large) != size:
    notes.append(
      f'  images are resized to {size}: preprocessor_config.json makes another '
      'size'
    )
    large = size
  normalizes = config.get('do_normalize', True)
  rescales = config.get('do_rescale', True)
  return image_configs.use(
    image_shape,
    large,
    _RESAMPLE[config.get('resample', 2)],
    config.get('image_mean', [0.5] * 3) if normalizes else [0.0],
    config.get('image_std', [0.5] * 3) if normalizes else [1.0],
    factor=config.get('rescale_factor', 1 / 255) if rescales else 1.0,
  )


def _size(value):
  """Return an int, of the shorter side, or (height, width)."""
  if isinstance(value, dict):
    if edge := value.get('shortest_edge'):
      return edge
    value = value['height'], value['width']
  return as_pair(value)


def write(weights: Weights) -> tuple[FlatParams, dict[str, Any]]:
  """Return (arrays, files), see `formats.write`.

  ViTForImageClassification.from_pretrained(FOLDER) loads them, and
  AutoImageProcessor; ViTModel if there is no head.
  """
  params = bundle.with_table(weights).params
  if 'cls' not in params or (
    'pre_logits/kernel' in params and weights.model.num_classes
  ):
    raise UserError(
      "transformers' ViT has a class token; its classifier has no tanh layer"
    )
  cls, table = params.pop('cls_pos_embedding'), params['pos_embedding']
  table = table.reshape(1, -1, table.shape[-1])
  params['pos_embedding'] = np.concatenate([cls, table], axis=1)
  prefix = 'vit.' if weights.model.num_classes else ''
  arrays = {
    name if name.startswith('classifier') else prefix + name: array
    for name, array in _KEYS.to_theirs(params).items()
  }
  return arrays, {
    'config.json': _make_config(weights),
    'preprocessor_config.json': _make_preprocessor_config(weights),
  }


def _make_config(weights):
  model, (height, width, channels) = weights.model, weights.image_shape
  classes = model.num_classes or 0
  config = {
    'architectures': ['ViTForImageClassification' if classes else 'ViTModel'],
    'model_type': 'vit',
    'hidden_size': model.width,
    'num_hidden_layers': model.depth,
    'num_attention_heads': model.num_heads,
    'intermediate_size': model.mlp_dim,
    'hidden_act': 'gelu_pytorch_tanh' if model.block.gelu == 'tanh' else 'gelu',
    'layer_norm_eps': model.block.norm_eps,
    'image_size': _one_or_two(height, width),
    'patch_size': _one_or_two(*model.embedding.patch_size),
    'num_channels': channels,
    'qkv_bias': True,
    'hidden_dropout_prob': 0.0,
    'attention_probs_dropout_prob': 0.0,
    'pooler_act': 'tanh',
  }
  if model.head.representation_size:
    config['pooler_output_size'] = model.head.representation_size
  if classes:
    names = weights.class_names or [f'LABEL_{i}' for i in range(classes)]
    config['id2label'] = {str(i): name for i, name in enumerate(names)}
    config['label2id'] = {name: i for i, name in enumerate(names)}
  if weights.activation == 'sigmoid':
    config['problem_type'] = 'multi_label_classification'
  return config


def _one_or_two(height, width):
  return height if height == width else [height, width]


def _make_preprocessor_config(weights):
  height, width, _ = weights.image_shape
  mean, std = image_configs.mean_and_std(weights)
  large, method = image_configs.describe(weights)
  keeps_aspect = isinstance(large, int)
  config = {
    'image_processor_type': 'ViTImageProcessor',
    'do_resize': True,
    'size': {'shortest_edge': large}
    if keeps_aspect
    else {'height': large[0], 'width': large[1]},
    'resample': _RESAMPLE.index(method),
    'do_rescale': True,
    'rescale_factor': 1 / 255,
    'do_normalize': True,
    'image_mean': mean,
    'image_std': std,
  }
  if large != (height, width):
    config['do_center_crop'] = True
    config['crop_size'] = {'height': height, 'width': width}
  return config

"""transformers' ViT: model.safetensors, config.json, preprocessor_config.json.

ViTModel and ViTForImageClassification. The names of arrays changed: version 5
has 'layers.0.attention.q_proj' in memory, but its files still have
'encoder.layer.0.attention.attention.query'. Both are read, with and without
the prefix 'vit.'; the latter is written. The model has a pooled class token
and no registers, MAP head or LayerScale.

The tanh layer of a ViTModel, `pooler`, is our representation layer; a
classifier does not read it, and then it is left out.

An image is resized, to a height and width or to a 'shortest_edge'; its centre
is cropped if do_center_crop; then it is multiplied by rescale_factor, and
normalised by image_mean and image_std. transformers antialiases.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from vit_jax.data.transforms import CentralCrop, Resize, ResizeSmall
from vit_jax.models.layers import PatchEmbedding
from vit_jax.models.pooling import ClassToken
from vit_jax.models.vit import VisionTransformer
from vit_jax.types import FlatParams, Size
from vit_jax.weights import bundle, image_configs
from vit_jax.weights.bundle import Weights
from vit_jax.weights.keymap import Key, KeyMap, conv, linear, norm

_PATCHES = 'embeddings.patch_embeddings.projection'
_LAYER = 'encoder.layer.{i}'
_KEYS = KeyMap(
  Key('embeddings.cls_token', 'cls'),
  Key('embeddings.position_embeddings', 'pos_embedding'),
  *conv(_PATCHES, 'embedding'),
  *norm(f'{_LAYER}.layernorm_before', 'block_{i}/norm1'),
  *linear(
    f'{_LAYER}.attention.output.dense', 'block_{i}/attn/out', merge_inputs=True
  ),
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
_GELU = {
  'gelu': 'exact',
  'gelu_python': 'exact',
  'gelu_new': 'tanh',
  'gelu_fast': 'tanh',
  'gelu_pytorch_tanh': 'tanh',
}
_RESAMPLE = ('nearest', 'lanczos', 'bilinear', 'bicubic', 'box')  # of Pillow


def recognise(names: Iterable[str]) -> bool:
  """Return whether arrays of these names are a ViT of transformers."""
  return any(name.endswith(f'{_PATCHES}.weight') for name in names)


def needed(names: Iterable[str]) -> set[str]:
  """Return the names without those of arrays that `read` does not use."""
  names = set(names)
  skipped = _skipped({name.removeprefix('vit.') for name in names})
  return {name for name in names if name.removeprefix('vit.') not in skipped}


def read(
  arrays: FlatParams,
  config: Mapping[str, Any] | None = None,
  *,
  grid: tuple[int, int] | None = None,
  image_size: Size | None = None,
  **fields: Any,
) -> Weights:
  """Return Weights of the arrays of a ViT of transformers.

  Without config.json: exact GELU, and LayerNorms with an epsilon of 1e-12.

  Args:
    arrays: {name: array}.
    config: content of config.json, or None; the content of
      preprocessor_config.json is in it as 'preprocessor_config'.
    grid, image_size: see `formats.read`.
    **fields: of the model, which override the config.

  Raises:
    ValueError: no model of vit_jax has these arrays.
  """
  config = {} if config is None else config
  kind = image_configs.item(config, 'model_type', str)
  if kind not in (None, 'vit'):
    raise ValueError(
      f'config.json: the model_type is {kind!r}; of transformers, only '
      "'vit' is supported."
    )
  del image_size  # the position table has it
  notes: list[str] = []
  arrays = _skip(_file_names(arrays), config, notes)
  params, names = _KEYS.to_ours(arrays)
  model = bundle.infer(params, **_fields(config) | fields)
  if not {'cls', 'pos_embedding'} <= params.keys():
    raise ValueError('The file has no class token, or no position table.')
  table = params['pos_embedding']
  if grid is None and (size := config.get('image_size')) is not None:
    grid = model.embedding.grid(image_configs.sides(size, 'image_size'))
    if math.prod(grid) != np.size(table) // model.width - 1:
      grid = None  # the table is of another size than the config says
  params['cls_pos_embedding'], params['pos_embedding'] = bundle.split_table(
    table, prefix=1, grid=grid
  )
  params, shape = bundle.finish(
    model, params, names, arrays, _KEYS, hint=_hint(arrays)
  )
  problem = config.get('problem_type') == 'multi_label_classification'
  processor = image_configs.item(config, 'preprocessor_config', dict)
  return Weights(
    model=model,
    params=params,
    image_shape=shape,
    class_names=_class_names(config, model.num_classes),
    activation='sigmoid' if problem else 'softmax',
    origin='hf',
    **_preprocess(processor, shape, notes),
    notes=notes,
  )


def _file_names(arrays):
  """Return the arrays without prefix, with the names that files have."""
  prefix = 'vit.' if f'vit.{_PATCHES}.weight' in arrays else ''
  out = {}
  for name, array in arrays.items():
    name = name.removeprefix(prefix)
    if name.startswith('layers.'):
      name = f'encoder.layer.{name.removeprefix("layers.")}'
      for ours, theirs in _IN_MEMORY.items():
        name = name.replace(ours, theirs)
    out[name] = np.asarray(array)
  return out


def _skip(arrays, config, notes):
  """Return the arrays that logits depend on."""
  act = config.get('pooler_act', 'tanh')
  skipped = _skipped(arrays)
  if 'pooler.dense.weight' in arrays.keys() - set(skipped) and act != 'tanh':
    raise ValueError(f"config.json: pooler_act is {act!r}; expected 'tanh'.")
  notes += [
    f'- {name}, which the logits do not depend on'
    for name in skipped
    if name in arrays
  ]
  return {k: v for k, v in arrays.items() if k not in skipped}


def _skipped(names):
  skipped = ['embeddings.mask_token', 'embeddings.position_ids']
  if 'classifier.weight' in names:
    skipped += ['pooler.dense.weight', 'pooler.dense.bias']
  return skipped


def _hint(arrays):
  if any('distillation_token' in name for name in arrays):
    return ': it has a distillation token (DeiT)'
  if any('lambda' in name or 'relative_position' in name for name in arrays):
    return ': it is not a plain ViT (LayerScale or relative positions)'
  if not any(name.endswith('query.bias') for name in arrays):
    return ': its queries, keys and values have no bias (qkv_bias false)'
  return ''


def _fields(config):
  """Return the fields of the model that config.json has and arrays do not."""
  eps = config.get('layer_norm_eps', 1e-12)
  if type(eps) not in (int, float) or not 0 <= eps < 1:
    raise ValueError(f'config.json: layer_norm_eps is {eps!r:.80}.')
  gelu = config.get('hidden_act', 'gelu')
  gelu = image_configs.choose(_GELU, gelu, 'hidden_act')
  found = {'gelu': gelu, 'norm_eps': float(eps)}
  if (heads := config.get('num_attention_heads')) is not None:
    found['num_heads'] = image_configs.size(heads, 'num_attention_heads')
  return found


def _class_names(config, num_classes):
  """Return id2label, unless it is 'LABEL_0', ... (the default of models)."""
  labels = image_configs.item(config, 'id2label', dict) or {}
  numbers = range(num_classes or 0)
  found = [labels.get(str(i)) for i in numbers]
  if None in found or found == [f'LABEL_{i}' for i in numbers]:
    return None
  return image_configs.class_names(found)


def _preprocess(config, image_shape, notes):
  """Return arguments of Weights from preprocessor_config.json."""
  if config is None:
    return {}
  image_size = tuple(image_shape[:2])
  code = config.get('resample', 2)
  if type(code) is not int or not 0 <= code < len(_RESAMPLE):
    raise ValueError(
      f'preprocessor_config.json: resample is {code!r}; expected 0 to 4: '
      f'{", ".join(_RESAMPLE)}.'
    )
  method = image_configs.interpolation(_RESAMPLE[code])
  transforms, size = [], image_size
  if config.get('do_resize', True):
    size = _size(config.get('size', 224))
    resize = ResizeSmall if isinstance(size, int) else Resize
    transforms.append(resize(size, **method))
  if config.get('do_center_crop'):
    size = _size(config.get('crop_size', 224))
    transforms.append(CentralCrop(size))
  if size != image_size:
    notes.append(
      f'  images are resized to {image_size}: preprocessor_config.json makes '
      'another size'
    )
    transforms = [Resize(image_size, **method)]
  factor = config.get('rescale_factor', 1 / 255)
  factor = factor if config.get('do_rescale', True) else 1.0
  mean, std = [0.0], [1.0]
  if config.get('do_normalize', True):
    mean = config.get('image_mean', [0.5] * 3)
    std = config.get('image_std', [0.5] * 3)
  return {
    'preprocess': image_configs.normalize(mean, std, factor, image_shape[2]),
    'transforms': tuple(transforms),
  }


def _size(value):
  """Return an int, of the shorter side, or (height, width)."""
  if isinstance(value, dict):
    if edge := value.get('shortest_edge'):
      return image_configs.size(edge, 'shortest_edge')
    value = value.get('height'), value.get('width')
  return image_configs.sides(value, 'size')


def write(weights: Weights) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
  """Return (arrays, files) that transformers loads, and computes the same.

  ViTForImageClassification.from_pretrained(FOLDER) loads them, and
  AutoImageProcessor; ViTModel if there is no head.

  Raises:
    ValueError: transformers' ViT cannot be such a model.
  """
  model = weights.model
  _check(model)
  params = bundle.fold_layerscale(dict(weights.params), weights.notes)
  row = params.pop('cls_pos_embedding', None)
  if row is None:
    row = np.zeros((1, 1, model.width), np.float32)
  table = [row, bundle.patch_positions(weights)]
  params['pos_embedding'] = np.concatenate(table, axis=1)
  arrays = _KEYS.to_theirs(params)
  prefix = 'vit.' if model.num_classes else ''
  out = {
    k if k.startswith('classifier') else prefix + k: np.asarray(v, np.float32)
    for k, v in arrays.items()
  }
  return out, {
    'config.json': _make_config(weights),
    'preprocessor_config.json': _make_preprocessor_config(weights),
  }


def _check(model):
  """Raise ValueError unless transformers' ViT can be such a model."""
  wrong = []
  if type(model) is not VisionTransformer:
    wrong.append(f'the model {type(model).__name__}')
  else:
    if model.pooling != ClassToken():
      wrong.append(f'pooling={model.pooling}')
    if type(model.embedding) is not PatchEmbedding:
      wrong.append(f'embedding={model.embedding}')
    if model.block.qk_norm:
      wrong.append('qk_norm=True')
    if model.head.representation_size and model.num_classes:
      wrong.append(f'representation_size={model.head.representation_size}')
  if wrong:
    raise ValueError(
      f"transformers' ViT cannot have {', '.join(wrong)}: it is a ViT that "
      'pools its class token, without registers, and without a layer between '
      'the class token and a classifier. Use --format=npz, big_vision, timm or '
      'vit_jax instead.'
    )


def _make_config(weights):
  model, (height, width, channels) = weights.model, weights.image_shape
  num_classes = model.num_classes or 0
  patch = model.embedding.patch_size
  config = {
    'architectures': [
      'ViTForImageClassification' if num_classes else 'ViTModel'
    ],
    'model_type': 'vit',
    'hidden_size': model.width,
    'num_hidden_layers': model.depth,
    'num_attention_heads': model.num_heads,
    'intermediate_size': model.mlp_dim,
    'hidden_act': {'exact': 'gelu', 'tanh': 'gelu_pytorch_tanh'}[
      model.block.gelu
    ],
    'layer_norm_eps': model.block.norm_eps,
    'image_size': _one_or_two(height, width),
    'patch_size': _one_or_two(*patch),
    'num_channels': channels,
    'qkv_bias': True,
    'hidden_dropout_prob': 0.0,
    'attention_probs_dropout_prob': 0.0,
    'pooler_act': 'tanh',
  }
  if model.head.representation_size:
    config['pooler_output_size'] = model.head.representation_size
  if num_classes:
    names = weights.class_names or [f'LABEL_{i}' for i in range(num_classes)]
    config['id2label'] = {str(i): name for i, name in enumerate(names)}
    config['label2id'] = {name: i for i, name in enumerate(names)}
  if weights.activation == 'sigmoid':
    config['problem_type'] = 'multi_label_classification'
  return config


def _one_or_two(height, width):
  return height if height == width else [height, width]


def _make_preprocessor_config(weights):
  height, width, channels = weights.image_shape
  factor = 1 / 255
  mean, std = image_configs.mean_and_std(weights.preprocess, channels, factor)
  large, keeps_aspect, method = image_configs.describe(weights)
  config = {
    'image_processor_type': 'ViTImageProcessor',
    'do_resize': True,
    'size': {'height': large[0], 'width': large[1]},
    'resample': _RESAMPLE.index(method),
    'do_rescale': True,
    'rescale_factor': factor,
    'do_normalize': True,
    'image_mean': mean,
    'image_std': std,
  }
  if keeps_aspect:
    config['size'] = {'shortest_edge': large[0]}
  if keeps_aspect or large != (height, width):
    config['do_center_crop'] = True
    config['crop_size'] = {'height': height, 'width': width}
  return config

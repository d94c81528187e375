"""Hugging Face's ViT: model.safetensors, config.json, preprocessor_config.json.

ViTModel and ViTForImageClassification of transformers, whose names of arrays
changed: version 5 has 'layers.0.attention.q_proj' in memory, but files have
'encoder.layer.0.attention.attention.query' still. Both are read, with and
without 'vit.' in front, and the latter is written. It has a class token,
pooled, and no registers, MAP head or LayerScale.

The tanh layer of a ViTModel, `pooler`, is our representation; a classifier
does not read it, and then it is left out.
"""

import numpy as np

from vit_jax.weights import grids, hf_config, pictures, torch_layout
from vit_jax.weights.bundle import (
  Weights,
  default_heads,
  fold_layerscale,
  infer,
)
from vit_jax.weights.hf_layout import FILES, MEMORY, PATCHES
from vit_jax.weights.hf_layout import parts as parts_of
from vit_jax.weights.torch_layout import count, shape_of


def recognise(names):
  """Whether arrays of these names are a ViT of transformers."""
  return any(name.endswith(PATCHES) for name in names)


def read(
  arrays, config=None, *, num_heads=None, grid=None, image_size=None, **fields
):
  """Weights of the arrays of a ViT of transformers.

  Without config.json: exact GELU, and LayerNorms with an epsilon of 1e-12.

  Args:
    arrays: {name: array}.
    config: content of config.json, or None; what preprocessor_config.json
      holds is in it as 'preprocessor_config'.
    num_heads, grid, image_size: see `formats.read`.
    **fields: of the model, before what the config says.

  Raises:
    ValueError: no model of ours has these arrays.
  """
  config = {} if config is None else config
  kind = pictures.item(config, 'model_type', str)
  if kind not in (None, 'vit'):
    raise ValueError(
      f'config.json: the model_type is {kind!r}; of transformers, only '
      "'vit' is read."
    )
  names = _Names(arrays)
  arrays, notes = _skip(names.arrays, config)
  patches = shape_of(arrays, PATCHES.replace('.', r'\.'), 4)
  heads = num_heads or config.get('num_attention_heads')
  parts = parts_of(
    names.layers,
    width=patches[0],
    depth=count(arrays, names.layers[0].format(i=r'(\d+)')),
    mlp_dim=shape_of(arrays, names.pattern('fc1'), 2)[0],
    num_heads=_heads(heads, patches[0]),
    patch_size=patches[2:],
    channels=patches[1],
    positions=shape_of(arrays, r'embeddings\.position_embeddings', 3)[1],
    num_classes=_rows(arrays, 'classifier.weight'),
    representation_size=_rows(arrays, 'pooler.dense.weight'),
  )
  params = torch_layout.to_ours(
    arrays, parts, what='a ViT of transformers', why=_why(arrays)
  )
  table = params.pop('pos_embedding')
  params['cls_pos_embedding'], params['pos_embedding'] = grids.positions(
    table, prefix=1, grid=grid or _grid(config, patches, table)
  )
  known = hf_config.fields(config)
  settings = infer(params, **known | fields)
  shape = grids.image_shape(params, settings, image_size=image_size)
  kept = hf_config.preprocess(
    pictures.item(config, 'preprocessor_config', dict), shape, notes
  )
  problem = config.get('problem_type') == 'multi_label_classification'
  return Weights(
    settings=settings,
    params=params,
    image_shape=shape,
    class_names=hf_config.class_names(config, settings['num_classes']),
    activation='sigmoid' if problem else 'softmax',
    origin='hf',
    notes=notes,
    **kept,
  )


def write(weights):
  """(arrays, files) that transformers loads, and computes the same.

  ViTForImageClassification.from_pretrained(FOLDER) does, and
  AutoImageProcessor; a ViTModel if there is no head.

  Raises:
    ValueError: transformers' ViT is no such model.
  """
  settings = weights.settings
  hf_config.check(settings)
  notes = weights.notes
  params = fold_layerscale(dict(weights.params), notes)
  table = [grids.position_rows(weights)]
  row = params.pop('cls_pos_embedding', None)
  width, heads = settings['width'], settings['num_heads']
  table.insert(0, np.zeros((1, 1, width), np.float32) if row is None else row)
  params['pos_embedding'] = np.concatenate(table, axis=1)
  num_classes = settings.get('num_classes')
  parts = parts_of(
    FILES,
    width=width,
    depth=settings['depth'],
    mlp_dim=settings['mlp_dim'],
    num_heads=heads,
    patch_size=grids.pair(settings['patch_size']),
    channels=weights.image_shape[2],
    positions=params['pos_embedding'].shape[1],
    num_classes=num_classes,
    representation_size=settings.get('representation_size'),
  )
  out = torch_layout.to_theirs(params, parts)
  if num_classes:
    out = {
      k if k.startswith('classifier') else f'vit.{k}': v for k, v in out.items()
    }
  return out, {
    'config.json': hf_config.make(weights),
    'preprocessor_config.json': hf_config.make_processor(weights),
  }


class _Names:
  """The arrays of a file without their prefix, and which names they have."""

  def __init__(self, arrays):
    prefix = 'vit.' if f'vit.{PATCHES}' in arrays else ''
    self.arrays = {k.removeprefix(prefix): v for k, v in arrays.items()}
    new = any(name.startswith('layers.') for name in self.arrays)
    self.layers = MEMORY if new else FILES

  def pattern(self, layer):
    start, names = self.layers
    name = f'{start}{names[layer]}.weight'.replace('.', r'\.')
    return name.replace('{i}', r'\d+')


def _skip(arrays, config):
  """(arrays that are computed with, notes on the others)."""
  arrays = {k: np.asarray(v) for k, v in arrays.items()}
  notes, act = [], config.get('pooler_act', 'tanh')
  skipped = ['embeddings.mask_token', 'embeddings.position_ids']
  if 'classifier.weight' in arrays:
    skipped += ['pooler.dense.weight', 'pooler.dense.bias']
  elif 'pooler.dense.weight' in arrays and act != 'tanh':
    raise ValueError(f"config.json: pooler_act is {act!r}, ours is 'tanh'.")
  for name in skipped:
    if arrays.pop(name, None) is not None:
      notes.append(f'- {name}, which the logits do not depend on')
  return arrays, notes


def _why(arrays):
  if any('distillation_token' in name for name in arrays):
    return 'it has a distillation token (DeiT)'
  if any('lambda' in name or 'relative_position' in name for name in arrays):
    return 'it is no plain ViT (LayerScale or relative positions)'
  if not any(
    name.endswith('query.bias') or 'q_proj.bias' in name for name in arrays
  ):
    return 'its queries, keys and values have no bias (qkv_bias false)'
  return ''


def _heads(heads, width):
  if heads is None:
    return default_heads(width)
  if width % pictures.number(heads, 'num_attention_heads'):
    raise ValueError(f'{heads} heads do not divide the width {width}.')
  return heads


def _grid(config, patches, table):
  """(rows, columns) of config.json's images, if the table has as many."""
  size = config.get('image_size')
  if size is None:
    return None
  size = pictures.sides(size, 'image_size')
  grid = [s // p for s, p in zip(size, patches[2:])]
  return tuple(grid) if grid[0] * grid[1] == table.shape[1] - 1 else None


def _rows(arrays, name):
  array = arrays.get(name)
  return None if array is None or not array.ndim else array.shape[0]

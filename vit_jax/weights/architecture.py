"""The architecture of a model, read off the arrays of a file.

Facts come from the arrays, then from the file's config and the user, and
defaults are applied last.
"""

import math
import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from vit_jax.models.layers import as_pair
from vit_jax.models.mixer import MlpMixer
from vit_jax.models.resnet import ROOT_WIDTH, ResNet
from vit_jax.models.vit import VisionTransformer
from vit_jax.types import FlatParams, Shape, Size, UserError
from vit_jax.weights import bundle
from vit_jax.weights.keymap import KeyMap

IMAGE_SIZE = 224  # if neither the file nor the user says
_ROOT = 'resnet/root/conv/kernel'


def convert(
  arrays: FlatParams,
  keys: KeyMap,
  *,
  model: Any = None,
  known: Mapping[str, Any] = MappingProxyType({}),
  image_size: Size | None = None,
  grid: tuple[int, int] | None = None,
  **given: Any,
) -> tuple[Any, dict[str, np.ndarray], tuple[int, int, int]]:
  """Return (model, parameters, image_shape) of the arrays of a file.

  Args:
    arrays: {name: array}, everything in the file.
    keys: key map of the format.
    model: if the file describes it; else `known` and **given are its fields,
      see `infer`.
    image_size, grid: see `image_shape_of`.

  Raises:
    ValueError: the arrays are not those of one model.
  """
  params = keys.to_ours(arrays)
  if model is None:
    model = infer(params, known, **given)
  shape = image_shape_of(model, params, image_size=image_size, grid=grid)
  return model, keys.fit(arrays, bundle.shapes(model, shape)), shape


def infer(
  params: FlatParams,
  known: Mapping[str, Any] = MappingProxyType({}),
  **given: Any,
) -> Any:
  """Return the model that parameters belong to.

  Arrays do not show num_heads, if its axes are merged, nor gelu and norm_eps;
  nor pooling and posemb if these have no parameters: by default the mean over
  patches, and fixed positions.

  Args:
    params: {path: array}, unrolled; axes of attention may be merged.
    known: fields of the model, as in `bundle.replace`, from the file's config.
    **given: fields from the user, which come first.

  Raises:
    ValueError: there is no such model, the arrays contradict other fields, or
      the number of heads is unknown.
  """
  cls, facts = _facts(params)
  given = bundle.without_parts(known, given) | given
  for name in facts.keys() & given.keys():
    if not np.array_equal(facts[name], given[name]):
      raise UserError(
        f'The file has {name}={facts[name]!r}, not {given[name]!r} as was '
        'given. Leave it out.'
      )
  defaults: dict[str, Any] = {}
  if cls is VisionTransformer:
    defaults = {'pooling': 'gap', 'posemb': 'sincos2d'}
    if 'block_0/ls1' in params:
      defaults['layerscale_init'] = 1e-5
  fields = defaults | facts | given
  if cls is VisionTransformer and 'num_heads' not in fields:
    raise UserError(
      'The file does not contain the number of heads. Give num_heads, for '
      f'example num_heads={max(fields["width"] // 64, 1)} for heads of 64.'
    )
  return bundle.from_fields(cls, **fields)


def _facts(params):
  """Return (class, {short name: value}) of what the parameters show."""
  head = params.get('head/kernel', params.get('head/cls/kernel'))
  facts: dict[str, Any] = {
    'num_classes': None if head is None else head.shape[-1]
  }
  layers = (re.match(r'block_(\d+)/', path) for path in params)
  depth = 1 + max((int(found[1]) for found in layers if found), default=-1)
  if not depth:
    return ResNet, facts | {
      'stages': _stages(params),
      'width_factor': _shape(params, _ROOT)[3] // ROOT_WIDTH,
      'form': 'preact' if 'norm/scale' in params else 'postact',
    }
  *patch_size, _, width = _shape(params, 'embedding/kernel')
  facts |= {'width': width, 'depth': depth, 'patch_size': tuple(patch_size)}
  if 'block_0/token_mixing/fc1/kernel' in params:
    fc1 = 'block_0/{}_mixing/fc1/kernel'
    return MlpMixer, facts | {
      'tokens_mlp_dim': _shape(params, fc1.format('token'))[1],
      'channels_mlp_dim': _shape(params, fc1.format('channel'))[1],
    }
  return VisionTransformer, facts | _vit_facts(params, width)


def _vit_facts(params, width):
  norm = 'block_0/attn/query_norm/scale'
  facts = {
    'mlp_dim': _shape(params, 'block_0/mlp/fc1/kernel')[1],
    'qk_norm': norm in params,
  }
  query = _shape(params, 'block_0/attn/query/kernel')
  if len(query) == 3:
    facts['num_heads'] = query[1]
  elif norm in params:
    facts['num_heads'] = width // params[norm].size
  poolings = {'map_head/probe': 'map', 'cls': 'token', 'dist': 'distilled'}
  for path, pooling in poolings.items():
    if path in params:
      facts['pooling'] = pooling
  if 'pos_embedding' in params:
    facts['posemb'] = 'learned'
  for path in ('pre_logits/kernel', 'pre_logits/cls/kernel'):
    if path in params:
      facts['representation_size'] = params[path].shape[-1]
  if 'registers' in params:
    facts['num_registers'] = params['registers'].shape[1]
  if _ROOT in params:
    facts['resnet_stages'] = _stages(params)
  return facts


def _shape(params, path):
  if path not in params:
    some = ', '.join(sorted(params)[:8])
    raise UserError(
      f'No model here has such arrays: there is no {path!r} among {some}, ...'
    )
  return params[path].shape


def _stages(params):
  """Return the number of units in each stage of a ResNet; () for a root."""
  units: dict[int, int] = {}
  for path in params:
    if found := re.match(r'resnet/stage(\d+)/unit(\d+)/', path):
      stage, unit = int(found[1]), int(found[2])
      units[stage] = max(unit, units.get(stage, 0))
  return tuple(units[stage] for stage in sorted(units))


def image_shape_of(
  model: Any,
  params: FlatParams,
  *,
  image_size: Size | None = None,
  grid: tuple[int, int] | None = None,
) -> tuple[int, int, int]:
  """Return (H, W, C) of the images that parameters were made for.

  `image_size`, an int or (H, W), is for models without a table of positions,
  and `grid`, (rows, columns), for Mixers whose patches are not a square.
  """
  kernel = _ROOT if _ROOT in params else 'embedding/kernel'
  channels = params[kernel].shape[2]
  if 'pos_embedding' in params:
    grid = params['pos_embedding'].shape[1:3]
  elif isinstance(model, MlpMixer):
    tokens = params['block_0/token_mixing/fc1/kernel'].shape[0]
    grid = square(tokens, grid)
  else:
    return (*as_pair(image_size or IMAGE_SIZE), channels)
  return (*model.embedding.image_size(grid), channels)


def square(count: int, grid: Shape | None = None) -> tuple[int, int]:
  """Return `grid` if it has `count` cells; if it is None, the square that has.

  Raises:
    ValueError: it has another number of cells, or there is no such square.
  """
  side = math.isqrt(max(count, 0))
  rows, columns = (side, side) if grid is None else grid
  if count < 1 or rows * columns != count:
    raise UserError(
      f'The file has positions of {count} patches, not of {rows}x{columns}. '
      'Give grid=(rows, columns) whose product is that.'
    )
  return rows, columns


def grid_of(
  image_size: Size | None, patch_size: Shape, counts: Collection[int]
) -> tuple[int, int] | None:
  """Return the grid of an image's patches if their number is one of counts."""
  if image_size is None:
    return None
  rows, columns = (n // p for n, p in zip(as_pair(image_size), patch_size))
  return (rows, columns) if rows * columns in counts else None


def split_table(
  table: np.ndarray, *, prefix: int, grid: Shape | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """Split [1, prefix + gh * gw, D] into [1, prefix, D] and [1, gh, gw, D].

  Args:
    table: position table; the leading 1 may be missing.
    prefix: number of rows that do not belong to patches.
    grid: (gh, gw) of the patches; a square if None.
  """
  table = table.reshape(1, *table.shape[-2:])
  grid = square(table.shape[1] - prefix, grid)
  return table[:, :prefix], table[:, prefix:].reshape(1, *grid, table.shape[-1])

"""What `inspect` shows, as numbers: of weights, and of pictures one by one."""

import functools

import jax
import numpy as np

from vit_jax import pretrained
from vit_jax.analysis import attention, embeddings
from vit_jax.models.names import AXIAL_RESNET, AXIAL_VIT, VIT
from vit_jax.tools import predict
from vit_jax.weights.bundle import make
from vit_jax.weights.grids import grid_of, stride

OF_PICTURES = ('maps', 'rollout', 'distance')
FIGURES = (*OF_PICTURES, 'filters', 'positions')


def obstacles(weights):
  """{figure: why there is none of these weights}, of those there cannot be."""
  settings, found = weights.settings, {}
  kind = settings.get('posemb', 'learned')
  if settings['target'] in (AXIAL_VIT, AXIAL_RESNET):
    why = 'its attention is of rows and of columns, not of the whole image'
    found |= dict.fromkeys((*OF_PICTURES, 'positions'), why)
  elif settings['target'] != VIT:
    why = 'the model has no attention (ResNets and Mixers have none)'
    found |= dict.fromkeys(OF_PICTURES, why)
    found['positions'] = 'the model has no position embeddings'
  elif kind == 'none':
    found['positions'] = "the model has no position embeddings (posemb='none')"
  elif kind == 'relative':
    found['positions'] = 'positions are of pairs of patches (relative)'
  elif settings.get('posemb_at') == 'layers':
    found['positions'] = 'each layer has position embeddings of its own'
  if 'resnet/root/conv/kernel' in weights.params:
    found['filters'] = (
      'the model sees no patches of pixels, but the feature map of a ResNet'
    )
  return found


def geometry(weights):
  """(grid (gh, gw), pixels (height, width) to a patch, tokens before them).

  Of a hybrid, a patch is a cell of its feature map, in pixels of the picture.
  """
  cell = stride(weights.settings)
  grid = grid_of(weights.settings, weights.image_shape)
  model = make(weights.settings)
  return grid, cell, model.pooling.layout(grid).prefix


def filters(weights, count=28):
  """(components [n, ph, pw, C], shares [n]) of `embeddings.filters`."""
  _check(weights, 'filters')
  return embeddings.filters(weights.params['embedding/kernel'], count)


def positions(weights):
  """[gh, gw, gh, gw] of `embeddings.position_similarity`."""
  _check(weights, 'positions')
  model = make(weights.settings)
  grid = geometry(weights)[0]
  table = model.posemb.table(weights.params, grid, model.width)
  return embeddings.position_similarity(table)


def look(
  weights,
  paths,
  *,
  figures=OF_PICTURES,
  heads='mean',
  residual='half',
  prefix='left_out',
  query=None,
  batch_size=8,
  num_workers=None,
  on_error='raise',
):
  """Yields what a model's attention does with each picture, in order.

  Args:
    weights: Weights.
    paths: of the pictures, see `image_files.find`.
    figures: some of OF_PICTURES.
    heads, residual: of `attention.rollout`.
    prefix: of `attention.mean_distance`.
    query: (row, column) of the patch whose attention is wanted in maps and
      rollout; by default the image's representation, which is the class token
      where there is one, see `attention.representation`.
    batch_size, num_workers, on_error: as of `predict.predict`. Of a batch, the
      attention of one layer is in memory at a time.

  Returns:
    iterator of dicts: 'path'; 'maps' [L, h, gh, gw] and 'maps_prefix'
    [L, h, .], attention to patches and to class token and registers;
    'rollout' [gh, gw] and 'rollout_prefix' [.]; 'distance' [L, h], in pixels.
    float32. With on_error='skip', 'path' and 'error' of pictures that cannot
    be read.

  Raises:
    ValueError: the model has no attention, an argument makes no sense.
  """
  for figure in figures:
    _check(weights, figure)
  for what, value, choices in (
    ('heads', heads, attention.HEADS),
    ('residual', residual, attention.RESIDUALS),
    ('prefix', prefix, attention.PREFIXES),
    ('on_error', on_error, ('raise', 'skip')),
  ):
    if value not in choices:
      raise ValueError(f'{what}={value!r}; it can be {", ".join(choices)}.')
  grid = geometry(weights)[0]
  if query and not all(0 <= at < size for at, size in zip(query, grid)):
    raise ValueError(
      f'query={query}, but the grid of patches is {grid[0]}x{grid[1]}; rows '
      'and columns count from 0.'
    )
  loaded, shape = predict.load(weights, paths, batch_size, num_workers)
  model, params = pretrained.build(weights)
  rollout = functools.partial(attention.rollout, heads=heads, residual=residual)
  distance = functools.partial(attention.mean_distance, prefix=prefix)
  forward = _forward(weights, model, figures, query, rollout, distance)
  return predict.in_batches(forward, params, loaded, shape, on_error)


def _forward(weights, model, figures, query, rollout, distance):
  """(params, uint8 [B, H, W, C]) -> {name: [B, ...]}."""
  preprocess = make(weights.preprocess)
  grid, cell, before = geometry(weights)
  layout = model.pooling.layout(grid)
  distances = attention.cell_distances(grid, cell)

  def split(name, rows):
    """[B, ..., N] of a representation, as patches and as what precedes them."""
    patches = rows[..., before:].reshape(*rows.shape[:-1], *grid)
    return {name: patches, f'{name}_prefix': rows[..., :before]}

  def forward(params, images):
    _, recorded = model.apply(
      {'params': params},
      preprocess(images),
      method='features',
      per_layer=False,
      mutable=['intermediates'],
    )
    recorded = recorded['intermediates']
    layers = attention.recorded(recorded)
    tokens = layers[0].shape[2]
    if query is None:
      start = model.pooling.token_weights(layout, recorded)
    else:
      at = before + query[0] * grid[1] + query[1]
      start = jax.nn.one_hot(at, tokens).reshape(1, 1, tokens)
    out = {}
    if 'maps' in figures:
      maps = attention.per_layer(
        lambda *layer: attention.maps(*layer, start=start)[:, :, 0], *layers
      )
      out |= split('maps', maps)
    if 'rollout' in figures:
      out |= split('rollout', rollout(*layers, start=start)[:, 0])
    if 'distance' in figures:
      out['distance'] = attention.per_layer(
        lambda *layer: distance(*layer, distances=distances), *layers
      )
    return out

  return forward


def uniform_distance(weights):
  """Mean attention distance, in pixels, of a head that looks everywhere."""
  grid, cell, _ = geometry(weights)
  return float(np.mean(attention.cell_distances(grid, cell)))


def _check(weights, figure):
  if figure not in FIGURES:
    raise ValueError(f'No figure {figure!r}; there are {", ".join(FIGURES)}.')
  if why := obstacles(weights).get(figure):
    raise ValueError(
      f'{weights.origin or "These weights"}: {figure} cannot be shown, {why}. '
      'Leave it out, or take other weights.'
    )

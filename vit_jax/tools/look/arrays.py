"""The numbers that the figures show, of weights and of images."""

import functools

import jax

from vit_jax import export, pretrained
from vit_jax.analysis import attention, embeddings
from vit_jax.checks import one_of
from vit_jax.models.axial import AxialResNet, AxialViT
from vit_jax.tools import predict

OF_IMAGES = ('maps', 'rollout', 'distance')
FIGURES = (*OF_IMAGES, 'filters', 'positions')


def obstacles(weights):
  """Return {figure: reason} of the figures that cannot be drawn.

  Any model with the attributes `embedding`, `posemb` and `pooling` of
  VisionTransformer, whose blocks record queries and keys, has all figures.
  """
  model, reason = weights.model, None
  embedding = getattr(model, 'embedding', None)
  if isinstance(model, export.Function):
    reason = 'an exported function computes its output only'
  elif isinstance(model, AxialViT | AxialResNet):
    reason = 'attention is along rows and columns, not over the whole image'
  elif embedding is None or not hasattr(model, 'pooling'):
    reason = 'the model has no attention (ResNets and Mixers have none)'
  found = dict.fromkeys(OF_IMAGES, reason) if reason else {}
  if getattr(model, 'posemb', None) is None:
    found['positions'] = 'the model has no position embeddings'
  elif _table(weights) is None:
    found['positions'] = 'they are relative, or each layer has its own'
  if 'embedding/kernel' not in weights.params:
    found['filters'] = 'the model has no patch embedding (embedding/kernel)'
  elif embedding.reduction > 1:
    found['filters'] = 'the model embeds feature maps of a ResNet, not pixels'
  return found


def layout(weights):
  """Return the Layout of the tokens for images of the weights' size."""
  model = weights.model
  return model.pooling.layout(model.embedding.grid(weights.image_shape))


def filters(weights, count=28):
  """Return (components, shares) of `embeddings.filters`."""
  _check(weights, 'filters')
  return embeddings.filters(weights.params['embedding/kernel'], count)


def positions(weights):
  """Return the similarities [gh, gw, gh, gw] of position embeddings."""
  _check(weights, 'positions')
  return embeddings.position_similarity(_table(weights))


def _table(weights):
  model = weights.model
  grid = model.embedding.grid(weights.image_shape)
  return model.posemb.table(weights.params, grid, model.width)


def cell_distances(weights):
  """Return the distances [P, P] between patches (hybrids: cells) in pixels."""
  pixels = weights.model.embedding.pixels_per_token
  return attention.cell_distances(layout(weights).grid, pixels)


def look_at(
  weights,
  paths,
  *,
  figures=OF_IMAGES,
  heads='mean',
  residual='half',
  prefix='left_out',
  query=None,
  batch_size=8,
  num_workers=None,
  on_error='raise',
):
  """Yield what a model attends to in each image, in order.

  Args:
    weights: Weights.
    paths: of the images; see `image_files.find`.
    figures: some of OF_IMAGES.
    heads, residual: of `attention.rollout`.
    prefix: of `attention.mean_distance`.
    query: (row, column) of the patch whose attention maps and rollout show; by
      default the tokens of `Pooling.token_weights`, such as the class token.
    batch_size, num_workers, on_error: of `predict.predict`. The attention of
      one layer for a batch must fit in memory.

  Returns:
    Iterator of dicts of float32 arrays and 'path'. 'maps' [L, h, gh, gw] and
    'maps_prefix' [L, h, P]: attention to patches, to class token and registers;
    'rollout' [gh, gw] and 'rollout_prefix' [P]; 'distance' [L, h] in pixels. An
    image that is skipped has 'path' and 'error'.

  Raises:
    ValueError: the model has no attention, or an argument is invalid.
  """
  for figure in figures:
    _check(weights, figure)
  one_of('heads', heads, attention.HEADS)
  one_of('residual', residual, attention.RESIDUALS)
  one_of('prefix', prefix, attention.PREFIXES)
  one_of('on_error', on_error, ('raise', 'skip'))
  grid = layout(weights).grid
  if query and not all(0 <= at < size for at, size in zip(query, grid)):
    raise ValueError(
      f'query={query} is outside the grid of {grid[0]}x{grid[1]} patches. '
      'Rows and columns count from 0.'
    )
  loaded, shape = predict.load(weights, paths, batch_size, num_workers)
  model, params = pretrained.build(weights)
  rollout = functools.partial(attention.rollout, heads=heads, residual=residual)
  distance = functools.partial(attention.mean_distance, prefix=prefix)
  forward = forward_fn(
    weights, model, figures, query=query, rollout=rollout, distance=distance
  )
  return predict.in_batches(forward, params, loaded, shape, on_error)


def forward_fn(
  weights,
  model,
  figures,
  *,
  query=None,
  rollout=attention.rollout,
  distance=attention.mean_distance,
):
  """Return the function (params, uint8 [B, H, W, C]) -> {name: [B, ...]}.

  Args:
    weights, model: of `pretrained.build`.
    figures: some of OF_IMAGES, and 'heads' for 'heads' [B, L, h, gh, gw] of
      `attention.rollout_of_heads`.
    query: as of `look_at`.
    rollout, distance: functions of `attention`, with their options.
  """
  preprocess, tokens = weights.preprocess, layout(weights)
  distances = cell_distances(weights)

  def split(name, rows):
    """Split [B, ..., N] into patches and the tokens before them."""
    patches = rows[..., tokens.prefix :]
    patches = patches.reshape(*rows.shape[:-1], *tokens.grid)
    return {name: patches, f'{name}_prefix': rows[..., : tokens.prefix]}

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
    if query is None:
      start = model.pooling.token_weights(tokens, recorded)
    else:
      at = tokens.prefix + query[0] * tokens.grid[1] + query[1]
      start = jax.nn.one_hot(at, tokens.num_tokens)[None, None]
    out = {}
    if 'maps' in figures:
      maps = attention.per_layer(
        lambda *layer: attention.maps(*layer, start=start)[:, :, 0], *layers
      )
      out |= split('maps', maps)
    if 'rollout' in figures:
      out |= split('rollout', rollout(*layers, start=start)[:, 0])
    if 'heads' in figures:
      heads = attention.rollout_of_heads(*layers, start=start)
      out |= split('heads', heads[:, :, :, 0])
    if 'distance' in figures:
      out['distance'] = attention.per_layer(
        lambda *layer: distance(*layer, distances=distances), *layers
      )
    return out

  return forward


def _check(weights, figure):
  one_of('figure', figure, FIGURES)
  if reason := obstacles(weights).get(figure):
    raise ValueError(
      f'{weights.origin or "These weights"}: cannot draw {figure}: {reason}. '
      'Leave it out, or use other weights.'
    )

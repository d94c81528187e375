"""The numbers that the figures show, of weights and of images."""

import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import pretrained
from vit_jax.analysis import attention
from vit_jax.models.axial import AxialResNet, AxialViT
from vit_jax.models.posemb import Layout
from vit_jax.models.vit import VisionTransformer
from vit_jax.tools import predict
from vit_jax.weights.bundle import Weights

OF_ATTENTION = ('maps', 'rollout', 'distance')
OF_PATCHES = ('norms', 'pca', 'similarity')
OF_IMAGES = (*OF_ATTENTION, 'tsne', *OF_PATCHES)
FIGURES = (*OF_IMAGES, 'filters', 'positions')


def obstacles(weights: Weights) -> dict[str, str]:
  """Return {figure: reason} of the figures that cannot be drawn.

  Any model with the attributes `embedding`, `posemb` and `pooling` of
  VisionTransformer, whose blocks record queries and keys, has all figures.
  """
  model, found = weights.model, {}
  if isinstance(model, AxialViT | AxialResNet) or not hasattr(model, 'pooling'):
    reason = 'the model has no attention over the whole image'
    found = dict.fromkeys(OF_ATTENTION, reason)
  if not isinstance(model, VisionTransformer):
    found |= dict.fromkeys(OF_PATCHES, 'the model has no maps of patches')
  if not hasattr(model, 'features'):
    found['tsne'] = 'the model has no method `features`'
  if getattr(model, 'posemb', None) is None or table(weights) is None:
    found['positions'] = 'the model has no table of positions for all layers'
  if 'embedding/kernel' not in weights.params or model.embedding.reduction > 1:
    found['filters'] = 'the model does not embed patches of pixels'
  return found


def layout(weights: Weights) -> Layout:
  """Return the Layout of the tokens for images of the weights' size."""
  model = weights.model
  return model.pooling.layout(model.embedding.grid(weights.image_shape))


def table(weights: Weights) -> Any:
  """Return the position embeddings [gh, gw, D], or None without a table."""
  model = weights.model
  grid = model.embedding.grid(weights.image_shape)
  return model.posemb.table(weights.params, grid, model.width)


def cell_distances(weights: Weights) -> np.ndarray:
  """Return the distances [P, P] between patches (hybrids: cells) in pixels."""
  pixels = weights.model.embedding.image_size((1, 1))
  return attention.cell_distances(layout(weights).grid, pixels)


def look_at(
  weights: Weights,
  paths: Sequence[str],
  *,
  figures: Sequence[str] = OF_IMAGES,
  batch_size: int = 8,
  **options: Any,
) -> Iterator[dict[str, Any]]:
  """Yield the dicts of `forward_fn`, with 'path', of the images, in order.

  An image that cannot be read has 'path' and 'error'. `figures` are some of
  OF_IMAGES, `options` more arguments of `predict.in_batches`. The attention of
  one layer for a batch must fit in memory.
  """
  model, params = pretrained.build(weights)
  forward = forward_fn(weights, model, figures)
  options |= {'batch_size': batch_size}
  return predict.in_batches(forward, params, weights, paths, **options)


def forward_fn(
  weights: Weights, model: Any, figures: Sequence[str]
) -> Callable[..., dict[str, jax.Array]]:
  """Return the function (params, uint8 [B, H, W, C]) -> {name: [B, ...]}.

  `figures` are some of OF_IMAGES, and 'heads'. The arrays are float32, for each
  image 'maps' [L, h, gh, gw], the attention from the tokens of
  `Pooling.token_weights`, such as the class token; 'rollout' [gh, gw]; 'heads'
  [L, h, gh, gw] of `attention.rollout_of_heads`; 'distance' [L, h] in pixels;
  'features' [D], the input of the head, for 'tsne'; 'norms' [L, N] of tokens
  after each layer; 'patches' [gh, gw, D] after the final norm; and what
  `predict` returns of a model with a head.
  """
  with_attention = {*figures} - {'tsne', *OF_PATCHES}
  options = {'maps': (-1,)} if {'pca', 'similarity'} & {*figures} else {}
  if with_attention:
    tokens, distances = layout(weights), cell_distances(weights)

  def patches(rows):
    """Return [B, ..., gh, gw] of [B, ..., N]."""
    return rows[..., tokens.prefix :].reshape(*rows.shape[:-1], *tokens.grid)

  def forward(params, images):
    features, recorded = model.apply(
      {'params': params},
      weights.preprocess(images),
      method='features',
      per_layer='norms' in figures,
      mutable=['intermediates'],
      **options,
    )
    out, logits = {}, features.get('logits')
    if logits is not None and logits.ndim == 2:
      convert = getattr(jax.nn, weights.activation)
      out[weights.targets.outputs] = convert(logits)
    if 'tsne' in figures:
      x = features['pre_logits'].astype(jnp.float32)
      out['features'] = x.reshape(len(x), -1, x.shape[-1]).mean(1)
    if 'norms' in figures:
      layers = [features[f'block_{i}'] for i in range(model.depth)]
      norms = [jnp.linalg.norm(x.astype(jnp.float32), axis=-1) for x in layers]
      out['norms'] = jnp.stack(norms, axis=1)
    if options:
      out['patches'] = features['map_-1'].astype(jnp.float32)
    if not with_attention:
      return out
    recorded = recorded['intermediates']
    layers = attention.recorded(recorded)
    start = model.pooling.token_weights(tokens, recorded)
    if 'maps' in figures:
      maps = attention.per_layer(
        lambda *layer: (start[:, None] @ attention.weights(*layer))[:, :, 0],
        *layers,
      )
      out['maps'] = patches(maps)
    if 'rollout' in figures:
      out['rollout'] = patches(attention.rollout(*layers, start=start)[:, 0])
    if 'heads' in figures:
      rows = attention.rollout_of_heads(*layers, start=start)
      out['heads'] = patches(rows[:, :, :, 0])
    if 'distance' in figures:
      distance = functools.partial(attention.mean_distance, distances=distances)
      out['distance'] = attention.per_layer(distance, *layers)
    return out

  return forward


def in_words(weights: Weights, look: Mapping[str, Any]) -> str:
  """Return the prediction of an image in words; '' without a head."""
  kind = weights.targets
  if kind.outputs not in look:
    return ''
  found = kind.shown(look[kind.outputs], predict.names_of(weights), 1)
  if not isinstance(found, str):
    found = ', '.join(f'{name} {p:.0%}' for name, p in found.items())
  return found


def tsne(features: Any) -> np.ndarray:
  """Return points [n, 2]: t-SNE of the first 50 principal components of [n, D].

  See van der Maaten and Hinton, 2008.
  """
  import sklearn.decomposition  # takes a second
  import sklearn.manifold
  import threadpoolctl

  features = np.asarray(features, np.float64)
  count = min(50, *features.shape)
  # With several threads, a busy machine takes several times as long.
  with threadpoolctl.threadpool_limits(1):
    pca = sklearn.decomposition.PCA(count, random_state=0)
    return sklearn.manifold.TSNE(
      perplexity=min(30, (len(features) - 1) / 3), random_state=0
    ).fit_transform(pca.fit_transform(features).astype(np.float32))


def sample(items: Sequence[Any], count: int) -> list[Any]:
  """Return at most `count` items at equal distances in the list."""
  at = np.linspace(0, len(items) - 1, min(count, len(items)))
  return [items[i] for i in at.astype(int)]


def classes(paths: Sequence[str]) -> list[str]:
  """Return the folder of each path, or [] if it is the same for all."""
  found = [pathlib.PurePath(path).parent.name for path in paths]
  return found if len(set(found)) > 1 else []

"""Features of images, of views and of masked images, for all objectives."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax import tree
from vit_jax.types import Array, Params, UserError


def encode(
  model: Any,
  params: Params,
  images: jax.Array,
  rng: Array | None = None,
  **options: Any,
) -> dict[str, jax.Array]:
  """Return model.features() of images [B, H, W, C] or views [B, V, H, W, C].

  Features of views are [B, V, ...]; 'pre_logits' is the representation.

  Views may be smaller than the images that the parameters are for: learned
  position embeddings are resized by the `resize_method` of the model's posemb,
  and trained through it. Without `rng` the model does not train. `options` are
  arguments of features(), such as `visible`, `patch_sources` or `per_layer`.
  """
  if params is None:
    raise UserError(
      'There are no parameters to encode with. If the objective needs '
      'context.ema, set --config.ema.decay=0.9999, or inherit from EmaTeacher.'
    )
  views, images = images.shape[:-3], images.reshape(-1, *images.shape[-3:])
  if len(views) == 2:
    params = _fitted(model, params, images)
  options = {'per_layer': False, 'train': rng is not None} | options
  rngs = None if rng is None else {'dropout': rng}
  found = model.apply(
    {'params': params}, images, rngs=rngs, method='features', **options
  )
  return {k: x.reshape(*views, *x.shape[1:]) for k, x in found.items()}


def summarize(
  model: Any, params: Params, images: jax.Array, found: Any = None
) -> tuple[jax.Array, Any]:
  """Return (representation [B, D], patches [B, gh, gw, F]), both float32.

  `found` are the features, if they are known. The representation of a model
  that does not pool is the mean over patches. Patches are the last tokens, or
  the cells of a ResNet's last map; None for a model without both.
  """
  found = encode(model, params, images) if found is None else found
  pooled, patches = found['pre_logits'], found.get('map_-1')
  if patches is None and 'tokens' in found:
    grid = model.embedding.grid(images.shape[1:])
    patches = found['tokens'][:, -math.prod(grid) :]
    patches = patches.reshape(len(images), *grid, -1)
  if pooled.ndim == 3:
    pooled = pooled.mean(axis=1)
  return jax.tree.map(jnp.float32, (pooled, patches))


def _fitted(model, params, images):
  """Return the parameters, with tables for the patches of these images."""
  init = functools.partial(model.init, jax.random.key(0))
  shapes = tree.flatten(jax.eval_shape(init, images)['params'])

  def fit(path, x):
    if path not in shapes or x.shape == (shape := shapes[path].shape):
      return x
    name, posemb = path.rsplit('/', 1)[-1], model.posemb
    resized = posemb.resize(name, x, shape, posemb.resize_method)
    return x if resized is None else resized

  return tree.map_with_path(fit, params)

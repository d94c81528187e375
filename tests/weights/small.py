"""A small ViT of ours with random weights, and what it says."""

import jax
import numpy as np

from vit_jax import tree
from vit_jax.config import instantiate
from vit_jax.weights.bundle import VIT, Weights


def tiny(**fields):
  """Weights of a ViT of ours with random parameters."""
  settings = {
    'target': VIT,
    **{'width': 16, 'depth': 1, 'mlp_dim': 24, 'num_heads': 4},
    **{'patch_size': (4, 2), 'num_classes': 5},
    **fields,
  }
  model = instantiate(settings)
  images = np.zeros((1, 12, 6, 3), np.float32)
  shapes = jax.eval_shape(model.init, jax.random.key(0), images)['params']
  rng = np.random.default_rng(0)
  params = {
    path: 0.3 * rng.standard_normal(leaf.shape, np.float32)
    for path, leaf in tree.flatten(shapes).items()
  }
  return Weights(settings, params, (12, 6, 3))


def logits(weights):
  images = np.random.default_rng(1).standard_normal((2, *weights.image_shape))
  apply = jax.jit(instantiate(weights.settings).apply)
  variables = {'params': tree.unflatten(weights.params)}
  return np.asarray(apply(variables, images))

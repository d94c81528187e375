"""A small ViT with random weights, and its logits."""

import functools

import jax
import numpy as np
from tiny import weights as random_weights

from vit_jax import tree
from vit_jax.models.vit import PatchEmbedding, VisionTransformer
from vit_jax.weights import bundle

FIELDS = {
  **{'width': 16, 'depth': 1, 'mlp_dim': 24, 'num_heads': 4},
  **{'embedding': PatchEmbedding((4, 2)), 'num_classes': 5},
}


def tiny(**fields):
  """Weights of a ViT with random parameters, for images of 12x6 pixels."""
  model = bundle.from_fields(VisionTransformer, **FIELDS | fields)
  return random_weights(model, (12, 6, 3))


@functools.cache
def _jitted(model):
  # Little is computed, so most of the time would go into compilation.
  options = {'xla_backend_optimization_level': 0}
  return jax.jit(model.apply, compiler_options=options)


def logits(weights, images=None):
  if images is None:
    rng = np.random.default_rng(1)
    images = rng.standard_normal((2, *weights.image_shape), np.float32)
  variables = {'params': tree.unflatten(weights.params)}
  return np.asarray(_jitted(weights.model)(variables, images))


def equal(a, b):
  """Whether two {name: array} have the same names, shapes, types and bits."""
  assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
  for name in a:
    assert a[name].dtype == b[name].dtype in (np.float32, np.int64), name
    assert a[name].shape == b[name].shape, name
    assert a[name].tobytes() == b[name].tobytes(), name
  return True

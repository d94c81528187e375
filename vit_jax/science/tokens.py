"""Tokens in place of patches, for a warm-up without images."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn

from vit_jax.models.vit import Embedded, PatchEmbedding
from vit_jax.types import Count, Size


@dataclasses.dataclass(frozen=True)
class FrozenTokens(PatchEmbedding):
  """Random vectors that are not trained, one for each token.

  Images [B, H, W, 1] contain token numbers; every pixel is a patch.
  """

  patch_size: Size = 1
  vocabulary: Count = 128

  def __call__(self, module: nn.Module, images: jax.Array) -> Embedded:
    shape = self.vocabulary, module.width
    table = jax.random.normal(jax.random.key(0), shape, module.dtype)
    batch, height, width, _ = images.shape
    patches = table[images.astype(jnp.int32).reshape(batch, -1)]
    return {'patches': patches}, (height, width)

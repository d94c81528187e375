"""MLP-Mixer ("MLP-Mixer: An all-MLP Architecture for Vision").

A ViT with MLPs along the tokens in place of attention. Shapes as in vit.py.
"""

import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from vit_jax.models import vit
from vit_jax.models.dense import BlockOptions, Gelu, Mlp, keep_batch_split
from vit_jax.models.pooling import Head
from vit_jax.types import HARMLESS, Count, Dtype, Natural, Positive


class MixerBlock(nn.Module):
  """One layer: [B, N, D] -> [B, N, D]."""

  tokens_mlp_dim: int
  channels_mlp_dim: int
  mlp: Gelu = Gelu()
  norm_eps: float = 1e-6
  dtype: Any = 'float32'

  @nn.compact
  def __call__(
    self, x: jax.Array, drop_rate: jax.Array | None = None, shared: Any = None
  ) -> jax.Array:
    """Apply the layer; drop_rate is of stochastic depth, shared is not used."""
    x = keep_batch_split(x)
    norm = functools.partial(nn.LayerNorm, self.norm_eps, dtype=self.dtype)
    options = BlockOptions(mlp=self.mlp)
    mlp = functools.partial(
      Mlp, options=options, dtype=self.dtype, kernel_init='mixing'
    )
    y = jnp.swapaxes(norm(name='norm1')(x), 1, 2)  # [B, D, N]
    y = mlp(self.tokens_mlp_dim, name='token_mixing')(y)
    x = x + vit.drop_path(self, jnp.swapaxes(y, 1, 2), drop_rate)
    y = norm(name='norm2')(x)
    y = mlp(self.channels_mlp_dim, name='channel_mixing')(y)
    return x + vit.drop_path(self, y, drop_rate)


class MlpMixer(vit.Classifier):
  """Images to logits.

  The MLPs along the tokens fix the number of patches, and so the image size.

  Attributes:
    tokens_mlp_dim, channels_mlp_dim: hidden widths of the MLPs along these.
    mlp, norm_eps: as in BlockOptions; the others as in VisionTransformer.
  """

  width: Count
  depth: vit.Depth
  tokens_mlp_dim: Count
  channels_mlp_dim: Count
  embedding: vit.PatchEmbedding
  head: Head = Head()
  num_classes: Natural | None = None
  stochastic_depth: vit.StochasticDepth = 0.0
  mlp: Gelu = Gelu()
  norm_eps: Positive = 1e-6
  dtype: Dtype = 'float32'
  scan: bool = False
  remat: Annotated[vit.Remat, HARMLESS] = 'none'

  layer = MixerBlock

  @nn.compact
  def features(
    self, images: jax.Array, *, train: bool = False, per_layer: bool = True
  ) -> dict[str, jax.Array]:
    """Compute the features of VisionTransformer.features; mean pooling."""
    vit.check_images(images)
    out, _ = self.embedding(self, images)
    names = 'tokens_mlp_dim', 'channels_mlp_dim', 'mlp', 'norm_eps', 'dtype'
    fields = {name: getattr(self, name) for name in names}
    x, outputs = vit.Layers()(
      self, out['patches'], training=train, per_layer=per_layer, **fields
    )
    out |= outputs
    norm = nn.LayerNorm(self.norm_eps, dtype=self.dtype, name='norm')
    out['tokens'] = x = norm(x)
    return out | self.head(self, x.mean(axis=1))

"""The Vision Transformer ("An Image is Worth 16x16 Words", section 3.1).

Shapes:
  B  examples in the batch      ph, pw  patch height and width
  H  image height, W width      gh, gw  the grid of patches, H / ph by W / pw
  C  image channels             N  tokens: those of the pooling, then the
  D  model width                   gh * gw patches, row by row
  h  attention heads            M  hidden width of the MLPs
  d  head dimension, D / h      L  layers, K classes

VisionTransformer embeds patches, applies L Blocks and pools. Its parts:
layers.py (patch embedding, MLP, head; resnet.py for hybrids), attention.py,
posemb.py (position embeddings) and pooling.py.
"""

import functools
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from vit_jax.models import layers
from vit_jax.models.attention import Attention, Implementation
from vit_jax.models.layers import BlockOptions, Head, PatchEmbedding
from vit_jax.models.pooling import ClassToken, Pooling
from vit_jax.models.posemb import Layout, Learned, PositionEmbedding
from vit_jax.types import HARMLESS, Count, Dtype, Natural, Rate, UserError


class Block(nn.Module):
  """One layer of the encoder (equations 2 and 3): [B, N, D] -> [B, N, D]."""

  num_heads: int
  mlp_dim: int
  options: BlockOptions = BlockOptions()
  posemb: PositionEmbedding | None = None  # if it acts in the layers
  layout: Layout = Layout((0, 0))
  dropout: float = 0.0
  attention: str = 'auto'
  dtype: Any = 'float32'
  train: bool = False

  @nn.compact
  def __call__(
    self, x: jax.Array, drop_rate: jax.Array | None = None, shared: Any = None
  ) -> jax.Array:
    """Apply the layer; drop_rate is of stochastic depth, None: 0.

    `shared` is what the position embedding shares among layers, or None.
    """
    options = self.options
    norm = functools.partial(options.make_norm, self.dtype)
    x = layers.keep_batch_split(x)
    if self.posemb:
      x = self.posemb.add_to_layer(self, x, self.layout, shared)
    y = x if options.post_norm else norm('norm1')(x)
    y = Attention(
      num_heads=self.num_heads,
      options=options,
      posemb=self.posemb,
      layout=self.layout,
      implementation=self.attention,
      dtype=self.dtype,
      train=self.train,
      name='attn',
    )(y, y, shared)
    y = norm('norm1')(y) if options.post_norm else y
    y = nn.Dropout(self.dropout, deterministic=not self.train)(y)
    x = x + self._branch(y, 'ls1', drop_rate)
    mlp = layers.Mlp(
      self.mlp_dim, options, self.dropout, self.dtype, self.train, name='mlp'
    )
    y = norm('norm2')(mlp(x)) if options.post_norm else mlp(norm('norm2')(x))
    return x + self._branch(y, 'ls2', drop_rate)

  def _branch(self, y, name, drop_rate):
    """Apply LayerScale (DeiT III) and stochastic depth to a branch."""
    if self.options.layerscale_init is not None:
      init = nn.initializers.constant(self.options.layerscale_init)
      scale = self.param(name, init, y.shape[-1:])
      y = y * scale.reshape(1, 1, -1).astype(y.dtype)
    return layers.drop_path(self, y, drop_rate)


class VisionTransformer(layers.Classifier):
  """Images to logits.

  Attributes:
    width, depth, mlp_dim, num_heads: D, L, M and h.
    embedding: layers.PatchEmbedding, or resnet.Hybrid.
    posemb: position embedding, a class of posemb.py; None: no positions.
    pooling: a class of pooling.py, which also says whether there are a class
      token and registers.
    num_classes: K; None or 0: no head.
    dropout: rate of dropout after the position embedding, the attention output
      and both MLP layers.
    stochastic_depth: fraction of examples whose residual branches are dropped,
      in the last layer; grows linearly from 0 in the first layer (AugReg). Or
      those in the first and the last layer; two equal ones in DeiT III.
    dtype: dtype of the computation, 'float32' or 'bfloat16'.
    scan: compile one layer and loop over stacked parameters, blocks/... with a
      leading dimension L, instead of block_0/..., block_1/... This compiles
      faster and runs slower, see docs/compile.md.
    remat: what to recompute in the backward pass to save memory: 'none';
      'dots', all but the results of attention and of products with parameters;
      'full', each layer.
    attention: an implementation named in attention.py.
  """

  width: Count
  depth: layers.Depth
  mlp_dim: Count
  num_heads: Count
  embedding: PatchEmbedding
  posemb: PositionEmbedding | None = Learned()
  pooling: Pooling = ClassToken()
  head: Head = Head()
  num_classes: Natural | None = None
  block: BlockOptions = BlockOptions()
  dropout: Rate = 0.0
  stochastic_depth: layers.StochasticDepth = 0.0
  dtype: Dtype = 'float32'
  scan: bool = False
  remat: Annotated[layers.Remat, HARMLESS] = 'none'
  attention: Implementation = 'auto'

  layer = Block  # class of the layers

  @nn.compact
  def features(
    self,
    images: jax.Array,
    *,
    train: bool = False,
    per_layer: bool = True,
    maps: Sequence[int] = (),
    patch_sources: jax.Array | None = None,
    visible: jax.Array | None = None,
  ) -> dict[str, jax.Array]:
    """Compute all intermediate features and the logits, by name.

    Args:
      images, train: see Classifier.
      per_layer: whether to return the output of each layer.
      maps: layers whose patches are returned as maps; -1: after the final norm.
      patch_sources: int32 [B, gh * gw], index of the patch whose embedding
        replaces each patch before positions are added, or below 0 for the mask
        vector. None: nothing is replaced.
      visible: int32 [B, v], the patches that the layers get, in this order,
        each with its own position; then N is the tokens of the pooling plus v,
        and there are no maps. None: all patches.

    Returns:
      feature_map: [B, ., ., F], output of the ResNet of a hybrid.
      patches: [B, gh * gw, D], embedded patches before any is replaced.
      block_0 ... block_{L-1}: [B, N, D], output of each layer.
      map_i, map_-1: [B, gh, gw, D], the patches of block_i, and of tokens.
      tokens: [B, N, D], all tokens after the final norm, if that comes before
        pooling.
      pooled: [B, D], or [B, gh * gw, D] with NoPooling.
      pre_logits: output of the head's tanh layer if there is one, else pooled.
      logits: float32 [B, K], or [B, gh * gw, K]. Absent without a head.
      class_logits, distillation_logits: [B, K], see pooling.DistillationToken.
    """
    self._check()
    layers.check_images(images)
    pooling, posemb = self.pooling, self.posemb or PositionEmbedding()
    # Equation 1, added in float32.
    out, grid = self.embedding(self, images)
    layout = pooling.layout(grid)
    x = self.embedding.replace(self, out['patches'], patch_sources)
    x = posemb.add_to_patches(self, x.astype(jnp.float32), grid)
    if visible is not None:
      if posemb.in_layers:
        raise UserError(f'{posemb} needs all patches. Use SinCos2d().')
      x = jnp.take_along_axis(x, visible[..., None], axis=1)
    prefix = [
      jnp.broadcast_to(token, (x.shape[0], *token.shape[1:]))
      for token in pooling.tokens(self, posemb, layout)
    ]
    x = jnp.concatenate([*prefix, x], axis=1).astype(self.dtype)
    norm = functools.partial(self.block.make_norm, self.dtype)
    if self.embedding.norm == 'tokens':
      x = norm('embedding_norm')(x)
    x = nn.Dropout(self.dropout, deterministic=not train)(x)
    # Equations 2 and 3.
    x, outputs = layers.run_layers(
      self,
      x,
      training=train,
      per_layer=per_layer or bool(maps),
      shared=posemb.shared(self, layout, train),
      **self.layer_fields(layout, train),
    )
    # Equation 4.
    out |= outputs if per_layer else {}
    out['tokens'] = norm('norm')(x) if pooling.norm == 'before' else x
    for i in maps:
      chosen = out['tokens'] if i == -1 else outputs[f'block_{i}']
      patches = chosen[:, layout.prefix :]
      out[f'map_{i}'] = patches.reshape(-1, *grid, self.width)
    x = pooling(self, out['tokens'], layout)
    x = norm('norm')(x) if pooling.norm == 'after' else x
    return out | pooling.classify(self, self.head, x)

  def layer_fields(self, layout: Layout, train: bool) -> dict[str, Any]:
    """Return the fields of the layers, which are of the class `layer`."""
    return {
      'num_heads': self.num_heads,
      'mlp_dim': self.mlp_dim,
      'options': self.block,
      'posemb': self.posemb if self.posemb and self.posemb.in_layers else None,
      'layout': layout,
      'dropout': self.dropout,
      'attention': self.attention,
      'dtype': self.dtype,
      'train': train,
    }

  def _check(self):
    if self.width % self.num_heads:
      raise UserError(
        f'width={self.width} must be a multiple of num_heads={self.num_heads}.'
      )

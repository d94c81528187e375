"""The Vision Transformer ("An Image is Worth 16x16 Words", section 3.1).

Shapes:
  B  examples in the batch      ph, pw  patch height and width
  H  image height, W width      gh, gw  the grid of patches, H / ph by W / pw
  C  image channels             N  tokens: those of the pooling, then the
  D  model width                   gh * gw patches, row by row
  h  attention heads            M  hidden width of the MLPs
  d  head dimension, D / h      L  layers, K classes

VisionTransformer embeds patches, applies L Blocks and pools. It is composed of
a patch embedding and a head (common.py; resnet.py for hybrids), a position
embedding (posemb.py) and a pooling (pooling.py).
"""

import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from vit_jax.config.domains import Dtype, OneOf, Rate
from vit_jax.models import common
from vit_jax.models.attention import IMPLEMENTATIONS, Chooser, attention
from vit_jax.models.common import (
  GELU,
  INIT,
  Affine,
  BlockOptions,
  Head,
  LayerNorm,
  PatchEmbedding,
  drop_path,
  initializer,
)
from vit_jax.models.mesh import keep_batch_split
from vit_jax.models.pooling import ClassToken, Pooling
from vit_jax.models.posemb import Layout, Learned, PositionEmbedding


class Attention(nn.Module):
  """Multi-head attention (appendix A): [B, Q, D], [B, N, D] -> [B, Q, D].

  Records queries and keys, as they enter the softmax except for the scale
  1 / √d, as 'q' and 'k' [B, N, h, d] in the collection 'intermediates'; and
  what the position embedding adds to q kᵀ as 'position_logits' [B, h, N, N].
  """

  num_heads: int
  options: BlockOptions = BlockOptions()
  posemb: PositionEmbedding = PositionEmbedding()
  layout: Layout = Layout((0, 0))
  implementation: str | Chooser = 'auto'
  dtype: Any = 'float32'
  train: bool = False

  @nn.compact
  def __call__(self, queries: jax.Array, tokens: jax.Array) -> jax.Array:
    width, options = tokens.shape[-1], self.options
    heads = self.num_heads, width // self.num_heads
    affine = functools.partial(
      Affine,
      kernel_init=initializer('attention', options.init_std),
      dtype=self.dtype,
    )
    inputs = {'query': queries, 'key': tokens, 'value': tokens}
    projections = [
      affine((width,), heads, name=name)(x, parts=True)
      for name, x in inputs.items()
    ]
    q, k, v = (each.result for each in projections)
    if options.qk_norm:
      norm = functools.partial(LayerNorm, options.norm_eps, dtype=self.dtype)
      q, k = norm(name='query_norm')(q), norm(name='key_norm')(k)
    q, k = self.posemb.queries_and_keys(self, q, k, self.layout)
    self.sow('intermediates', 'q', q)
    self.sow('intermediates', 'k', k)
    position_logits = self.posemb.logits(self, q, self.layout)
    if position_logits is not None:
      self.sow('intermediates', 'position_logits', position_logits)
    drop = self.train and options.attention_dropout > 0
    x = attention(
      *(q, k, v),
      implementation=self.implementation,
      dropout_rate=options.attention_dropout if drop else 0.0,
      dropout_rng=self.make_rng('dropout') if drop else None,
      position_logits=position_logits,
      projections=projections,
    )
    return affine(heads, (width,), name='out')(x)


class Mlp(nn.Module):
  """Two layers with a GELU between them: [..., D] -> [..., D].

  `kernel_init` is the key of the kernels' initialiser in INIT; `init_std` as in
  BlockOptions.
  """

  mlp_dim: int
  dropout: float = 0.0
  gelu: str = 'tanh'
  dtype: Any = 'float32'
  train: bool = False
  kernel_init: str = 'mlp'
  init_std: float | None = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    width, hidden = (x.shape[-1],), (self.mlp_dim,)
    affine = functools.partial(
      Affine,
      kernel_init=initializer(self.kernel_init, self.init_std),
      bias_init=INIT[f'{self.kernel_init}_bias'],
      dtype=self.dtype,
    )
    dropout = nn.Dropout(self.dropout, deterministic=not self.train)
    x = affine(width, hidden, name='fc1')(x)
    x = dropout(GELU[self.gelu](x))
    return dropout(affine(hidden, width, name='fc2')(x))


class Block(nn.Module):
  """One layer of the encoder (equations 2 and 3): [B, N, D] -> [B, N, D]."""

  num_heads: int
  mlp_dim: int
  options: BlockOptions = BlockOptions()
  posemb: PositionEmbedding = PositionEmbedding()
  layout: Layout = Layout((0, 0))
  dropout: float = 0.0
  attention: str | Chooser = 'auto'
  dtype: Any = 'float32'
  train: bool = False

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    drop_rate: jax.Array | None = None,
    shared: jax.Array | None = None,
  ) -> jax.Array:
    """Apply the layer.

    Args:
      x: [B, N, D].
      drop_rate: rate of stochastic depth in this layer, or None.
      shared: what the position embedding shares among layers, or None.
    """
    options = self.options
    norm = functools.partial(LayerNorm, options.norm_eps, dtype=self.dtype)
    x = self.posemb.add_to_layer(self, keep_batch_split(x), self.layout, shared)
    y = norm(name='norm1')(x)
    y = Attention(
      num_heads=self.num_heads,
      options=options,
      posemb=self.posemb,
      layout=self.layout,
      implementation=self.attention,
      dtype=self.dtype,
      train=self.train,
      name='attn',
    )(y, y)
    y = nn.Dropout(self.dropout, deterministic=not self.train)(y)
    x = x + self._branch(y, 'ls1', drop_rate)
    y = norm(name='norm2')(x)
    y = Mlp(
      mlp_dim=self.mlp_dim,
      dropout=self.dropout,
      gelu=options.gelu,
      dtype=self.dtype,
      train=self.train,
      init_std=options.init_std,
      name='mlp',
    )(y)
    return x + self._branch(y, 'ls2', drop_rate)

  def _branch(self, y, name, drop_rate):
    """Apply LayerScale (DeiT III) and stochastic depth to a branch."""
    if self.options.layerscale_init is not None:
      init = nn.initializers.constant(self.options.layerscale_init)
      scale = self.param(name, init, y.shape[-1:])
      y = y * scale.reshape(1, 1, -1).astype(y.dtype)
    return drop_path(self, y, drop_rate)


class VisionTransformer(common.Classifier):
  """Images to logits.

  Attributes:
    width: D, also the width of the tokens between layers.
    depth: L.
    mlp_dim: M.
    num_heads: h; must divide the width.
    embedding: common.PatchEmbedding, or resnet.Hybrid.
    posemb: position embedding, a class of posemb.py; None: no positions.
    pooling: a class of pooling.py, which also says whether there are a class
      token and registers.
    head: common.Head.
    num_classes: K; None or 0: no head.
    block: options of the layers.
    dropout: rate of dropout after the position embedding, the attention output
      and both MLP layers.
    stochastic_depth: fraction of examples whose residual branches are dropped,
      in the last layer; grows linearly from 0 in the first layer (AugReg). Or
      those in the first and the last layer; two equal ones in DeiT III.
    dtype: dtype of the computation, 'float32' or 'bfloat16'.
    scan: compile one layer and loop over stacked parameters, blocks/... with a
      leading dimension L, instead of block_0/..., block_1/... ; slower on TPUs,
      see docs/compile.md. Or the layers of an iteration, a divisor of L.
    remat: what to recompute in the backward pass to save memory: 'none';
      'dots', all but the results of attention and of products with parameters;
      'full', each layer; or any name in jax.checkpoint_policies.
    attention: an implementation named in attention.py, or its Chooser.
  """

  width: common.Width
  depth: common.Depth
  mlp_dim: common.Hidden
  num_heads: common.Heads
  embedding: PatchEmbedding
  posemb: PositionEmbedding | None = Learned()
  pooling: Pooling = ClassToken()
  head: Head = Head()
  num_classes: common.NumClasses | None = None
  block: BlockOptions = BlockOptions()
  dropout: Rate = 0.0
  stochastic_depth: common.StochasticDepth = 0.0
  dtype: Dtype = 'float32'
  scan: common.Scan = False
  remat: common.Remat = 'none'
  attention: Annotated[str, OneOf(*IMPLEMENTATIONS)] | Chooser = 'auto'

  layer = Block  # class of the layers

  @nn.compact
  def features(
    self,
    images: jax.Array,
    *,
    train: bool = False,
    per_layer: bool = True,
    patch_sources: jax.Array | None = None,
  ) -> dict[str, jax.Array]:
    """Compute all intermediate features and the logits, by name.

    Called as model.apply(variables, images, method='features').

    Args:
      images, train: see Classifier.
      per_layer: whether to return the output of each layer.
      patch_sources: int32 [B, gh * gw], index of the patch whose embedding
        replaces each patch before positions are added, or below 0 for the mask
        vector. None: nothing is replaced.

    Returns:
      feature_map: [B, ., ., F], output of the ResNet of a hybrid.
      patches: [B, gh * gw, D], embedded patches before any is replaced.
      block_0 ... block_{L-1}: [B, N, D], output of each layer.
      tokens: [B, N, D], all tokens after the final LayerNorm (before it, if
        pooling.norm_after).
      pooled: [B, D], or [B, gh * gw, D] with NoPooling.
      pre_logits: output of the head's tanh layer if there is one, else pooled.
      logits: float32 [B, K], or [B, gh * gw, K]. Absent without a head.
      class_logits, distillation_logits: [B, K], see pooling.DistillationToken.
    """
    self._check()
    common.check_images(self, images)
    out, grid = self.embedding(self, images)
    patches = self.embedding.replace(self, out['patches'], patch_sources)
    posemb, pooling = self.posemb or PositionEmbedding(), self.pooling
    layout = pooling.layout(grid)
    tokens = self._assemble(patches, layout, posemb)
    tokens = nn.Dropout(self.dropout, deterministic=not train)(tokens)
    tokens, layers = common.run_layers(
      self.layer,
      tokens,
      depth=self.depth,
      stochastic_depth=self.stochastic_depth if train else 0.0,
      scan=self.scan,
      remat_policy=self.remat,
      per_layer=per_layer,
      shared=posemb.shared(self, layout, self.width),
      num_heads=self.num_heads,
      mlp_dim=self.mlp_dim,
      options=self.block,
      posemb=posemb,
      layout=layout,
      dropout=self.dropout,
      attention=self.attention,
      dtype=self.dtype,
      train=train,
    )
    norm = LayerNorm(self.block.norm_eps, dtype=self.dtype, name='norm')
    out |= layers
    out['tokens'] = tokens if pooling.norm_after else norm(tokens)
    x = pooling(self, out['tokens'], layout)
    x = norm(x) if pooling.norm_after else x
    return out | pooling.classify(self, self.head, x)

  def _assemble(self, patches, layout, posemb):
    """Equation 1: [B, gh * gw, D] -> [B, N, D], added in float32."""
    batch, x = patches.shape[0], patches.astype(jnp.float32)
    x = posemb.add_to_patches(self, x, layout.grid)
    prefix = self.pooling.tokens(self, posemb, layout)
    prefix = [jnp.broadcast_to(p, (batch, *p.shape[1:])) for p in prefix]
    return jnp.concatenate([*prefix, x], axis=1).astype(self.dtype)

  def _check(self):
    if self.width % self.num_heads:
      raise ValueError(
        f'width={self.width} must be a multiple of num_heads={self.num_heads}.'
      )

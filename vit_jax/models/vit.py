"""The Vision Transformer ("An Image is Worth 16x16 Words", section 3.1).

Shapes:
  B  examples in the batch      ph, pw  patch height and width
  H  image height, W width      gh, gw  the grid of patches, H / ph by W / pw
  C  image channels             N  tokens: class token, registers, then the
  D  model width                   gh * gw patches, row by row
  h  attention heads            M  hidden width of the MLPs
  d  width of a head, D / h     L  layers, K classes

VisionTransformer embeds patches, runs L Blocks and pools. The parts, and the
table that says how each is initialised, are in layers.py; what other models
share with it is in frame.py, and the ResNet of the hybrids in resnet.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from vit_jax.models import frame, posemb
from vit_jax.models.layers import GELU, INIT, Block, LayerNorm, MapHead
from vit_jax.models.positions import KINDS, PLACES, Positions
from vit_jax.models.resnet import Backbone
from vit_jax.models.variants import variant as variant


class VisionTransformer(nn.Module):
  """Images to logits.

  Attributes:
    width: D, also the width of the tokens between layers.
    depth: L.
    mlp_dim: M.
    num_heads: h; must divide the width.
    patch_size: side of a patch in pixels, or (ph, pw); of hybrids, in cells
      of the feature map.
    patch_stride: from a patch to the next, in the same, one number or two;
      below patch_size they overlap. None: side by side.
    num_classes: K; None or 0 for no head.
    pooling: 'token', the class token (paper); 'gap', the mean over patches;
      'map', one learned query that attends to the patches; 'none', each patch
      gets its own logits.
    class_token: whether there is one; None: with pooling 'token' only. Other
      poolings do not read it.
    mask_token: whether there is a learned vector that patches can be replaced
      by, see patch_sources below.
    representation_size: width of the tanh layer before the head, which the
      paper pre-trains with; None for no such layer.
    posemb: 'learned' (the paper's), 'learned2d' or 'relative', see
      positions.py; 'sincos2d' (fixed) or 'none'. Registers have none.
    posemb_at: where learned ones are added (table 8): at the 'stem' (paper), in
      all 'layers', each with its own table, or 'layers_shared', with one.
    posemb_init_std: of the learned ones; the paper's code has 0.02.
    dropout: after the positions, the attention output and both MLP layers.
    attention_dropout: of the attention weights.
    stochastic_depth: share of examples that skip a layer's branch, in the
      last layer; grows linearly from 0 in the first (AugReg).
    layerscale_init: initial scale of each branch; None for no LayerScale.
    num_registers: learned tokens beside the patches, which no pooling reads.
    qk_norm: LayerNorm of queries and keys, per head.
    head_bias_init: such as -10 for a sigmoid loss over many classes.
    gelu: 'tanh' (paper's code) or 'exact' (PyTorch models).
    dtype: of the computation, 'float32' or 'bfloat16'.
    scan: compile one layer and loop over stacked parameters, instead of L
      layers one after the other. Parameters are then blocks/... with a leading
      dimension L in place of block_0/..., block_1/... .
    remat: what to recompute in the backward pass to save memory: 'none';
      'dots', all but the results of matrix products without a batch
      dimension; 'full', each layer; or any name in jax.checkpoint_policies.
    attention: an implementation named in attention.py.
    resnet_stages: units in each stage of the post-activation ResNet whose
      feature map takes the image's place (hybrids); () for its root alone,
      None for no ResNet.
    norm_after_pooling: the final LayerNorm comes after the mean, not before
      it (timm's fc_norm); with pooling 'gap' only.
    norm_eps: of every LayerNorm; 1e-6 in the paper's code.
  """

  width: int
  depth: int
  mlp_dim: int
  num_heads: int
  patch_size: int | tuple[int, int]
  num_classes: int | None = None
  pooling: str = 'token'
  class_token: bool | None = None
  mask_token: bool = False
  representation_size: int | None = None
  posemb: str = 'learned'
  posemb_init_std: float = 0.02
  dropout: float = 0.0
  attention_dropout: float = 0.0
  stochastic_depth: float = 0.0
  layerscale_init: float | None = None
  num_registers: int = 0
  qk_norm: bool = False
  head_bias_init: float = 0.0
  gelu: str = 'tanh'
  dtype: Any = 'float32'
  scan: bool = False
  remat: str = 'none'
  attention: str = 'auto'
  resnet_stages: tuple[int, ...] | None = None
  norm_after_pooling: bool = False
  norm_eps: float = 1e-6
  posemb_at: str = 'stem'
  patch_stride: int | tuple[int, int] | None = None

  def __call__(
    self,
    images: jax.Array,
    *,
    train: bool = False,
    patch_sources: jax.Array | None = None,
  ) -> jax.Array:
    """Logits, or the pooled representation when there is no head.

    Args:
      images: [B, H, W, C], in [-1, 1].
      train: turns dropout and stochastic depth on; they need an rng 'dropout'.
      patch_sources: int32 [B, gh * gw]; the number of the patch whose embedding
        stands in each one's place, before positions are added; below 0 for the
        mask vector. None: each has its own.

    Returns:
      float32 [B, K]; pooling 'none': [B, gh * gw, K]. Without a head, what
      features() calls pre_logits, in dtype.

    Raises:
      ValueError: patches do not tile the image, or a field makes no sense.
    """
    out = self.features(
      images, train=train, per_layer=False, patch_sources=patch_sources
    )
    return out['logits'] if self.num_classes else out['pre_logits']

  @nn.compact
  def features(
    self,
    images: jax.Array,
    *,
    train: bool = False,
    per_layer: bool = True,
    patch_sources: jax.Array | None = None,
  ) -> dict[str, jax.Array]:
    """Everything on the way to the logits, by name.

    Called as model.apply(variables, images, method='features').

    Returns:
      feature_map: [B, ., ., F], of the ResNet of a hybrid.
      patches: [B, gh * gw, D], embedded patches before positions, each its own.
      block_0 ... block_{L-1}: [B, N, D], each layer's output (if per_layer).
      tokens: [B, N, D], after the final LayerNorm (if that precedes pooling),
        all N tokens.
      pooled: [B, D]; pooling 'none': [B, gh * gw, D].
      pre_logits: the same, or its tanh layer's output when there is one.
      logits: float32 [B, K]; pooling 'none': [B, gh * gw, K]. Not there
        without a head.
    """
    self._check()
    out = {}
    reduction = 1
    if self.resnet_stages is not None:
      backbone = Backbone(
        self.resnet_stages, dtype=self.dtype, remat=self.remat, name='resnet'
      )
      out['feature_map'] = backbone(images)[f'stage{len(self.resnet_stages)}']
      images, reduction = out['feature_map'], backbone.reduction
    out['patches'], grid = frame.embed_patches(
      images,
      self.patch_size,
      self.width,
      self.dtype,
      stride=self.patch_stride,
      reduction=reduction,
    )
    tokens = frame.replace_patches(self, out['patches'], patch_sources)
    positions = Positions(
      *(self.posemb, grid, self.posemb_init_std),
      *(self.has_class_token, self.num_registers),
    )
    tokens = self._position(tokens, positions)
    tokens = nn.Dropout(self.dropout, deterministic=not train)(tokens)
    tokens, layers = self._encode(tokens, positions, train, per_layer)
    norm = LayerNorm(self.norm_eps, dtype=self.dtype, name='norm')
    out |= layers
    out['tokens'] = tokens if self.norm_after_pooling else norm(tokens)
    x = self._pool(out['tokens'])
    x = norm(x) if self.norm_after_pooling else x
    return out | frame.read_out(self, x)

  def _position(self, patches, positions):
    """Equation 1: prepends the class token and adds positions, in float32."""
    batch, _, width = patches.shape
    x = patches.astype(jnp.float32)
    are_added = positions.are_added and self.posemb_at == 'stem'
    if are_added:
      x = x + positions.of_patches(self, width)
    elif self.posemb == 'sincos2d':
      x = x + posemb.sincos2d(positions.grid, width).reshape(1, -1, width)
    prefix = []
    if self.has_class_token:
      cls = self.param('cls', INIT['cls'], (1, 1, width))
      if are_added:
        cls = cls + positions.of_cls(self, width)
      prefix.append(cls)
    if self.num_registers:
      shape = (1, self.num_registers, width)
      prefix.append(self.param('registers', INIT['registers'], shape))
    prefix = [jnp.broadcast_to(p, (batch, *p.shape[1:])) for p in prefix]
    return jnp.concatenate([*prefix, x], axis=1).astype(self.dtype)

  @property
  def has_class_token(self) -> bool:
    default = self.pooling == 'token'
    return default if self.class_token is None else self.class_token

  def _encode(self, x, positions, train, per_layer):
    """Equations 2 and 3, L times; also each layer's output if per_layer."""
    shared = ()
    if self.posemb_at == 'layers_shared':
      shared = (positions.of_tokens(self, self.width),)
    has_own = self.posemb == 'relative' or self.posemb_at == 'layers'
    return frame.run_layers(
      Block,
      x,
      depth=self.depth,
      skip_rate=self.stochastic_depth if train else 0.0,
      scan=self.scan,
      remat=self.remat,
      per_layer=per_layer,
      shared=shared,
      positions=positions if has_own else None,
      num_heads=self.num_heads,
      mlp_dim=self.mlp_dim,
      dropout=self.dropout,
      attention_dropout=self.attention_dropout,
      layerscale_init=self.layerscale_init,
      qk_norm=self.qk_norm,
      gelu=self.gelu,
      dtype=self.dtype,
      attention=self.attention,
      norm_eps=self.norm_eps,
      train=train,
    )

  def _pool(self, tokens):
    """[B, N, D] -> [B, D]; pooling 'none': [B, gh * gw, D]."""
    if self.pooling == 'token':
      return tokens[:, 0]
    # Class token and registers are never pooled.
    patches = tokens[:, self.num_registers + self.has_class_token :]
    if self.pooling == 'gap':
      return patches.mean(axis=1)
    if self.pooling == 'none':
      return patches
    return MapHead(
      self.num_heads,
      self.mlp_dim,
      self.gelu,
      self.dtype,
      self.attention,
      self.norm_eps,
      name='map_head',
    )(patches)

  def _check(self):
    frame.check_choices(
      self,
      pooling=('token', 'gap', 'map', 'none'),
      posemb=(*KINDS, 'sincos2d', 'none'),
      posemb_at=PLACES,
      gelu=tuple(GELU),
      remat=frame.REMAT,
    )
    frame.check_rates(self, 'dropout', 'attention_dropout', 'stochastic_depth')
    if self.norm_after_pooling and self.pooling != 'gap':
      raise ValueError(
        f"norm_after_pooling with pooling {self.pooling!r}; expected 'gap'. "
        'Choose that, or leave norm_after_pooling out.'
      )
    if self.pooling == 'token' and not self.has_class_token:
      raise ValueError(
        "pooling 'token' with class_token=False; leave that out, or choose "
        "pooling 'gap', 'map' or 'none'."
      )
    if self.posemb_at != 'stem' and not self.posemb.startswith('learned'):
      raise ValueError(
        f'posemb_at is {self.posemb_at!r} with posemb {self.posemb!r}; '
        "expected 'stem', for only learned positions can be added elsewhere. "
        "Choose 'learned' or 'learned2d', or leave posemb_at out."
      )
    if self.width % self.num_heads:
      raise ValueError(
        f'width is {self.width} with {self.num_heads} heads; '
        'the number of heads must divide it.'
      )

"""MLP-Mixer ("MLP-Mixer: An all-MLP Architecture for Vision").

A ViT without attention: in its place an MLP works along the tokens. Shapes as
in vit.py: B examples, N tokens (the patches alone), D width, L layers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from vit_jax.models import frame
from vit_jax.models.layers import GELU, LayerNorm, Mlp, skip_examples
from vit_jax.models.mesh import keep_batch_split


class MixerBlock(nn.Module):
  """One layer: [B, N, D] -> [B, N, D], twice or with None, as Block."""

  tokens_mlp_dim: int
  channels_mlp_dim: int
  gelu: str = 'tanh'
  norm_eps: float = 1e-6
  dtype: Any = 'float32'
  per_layer: bool = False

  @nn.compact
  def __call__(self, x, skip_rate):
    """skip_rate: None, or this layer's share of examples to skip a branch."""
    x = keep_batch_split(x)
    norm = functools.partial(LayerNorm, self.norm_eps, dtype=self.dtype)
    mlp = functools.partial(
      Mlp, gelu=self.gelu, dtype=self.dtype, init='mixing'
    )
    y = jnp.swapaxes(norm(name='norm1')(x), 1, 2)  # [B, D, N]
    y = mlp(self.tokens_mlp_dim, name='token_mixing')(y)
    x = x + self._branch(jnp.swapaxes(y, 1, 2), skip_rate)
    y = norm(name='norm2')(x)
    y = mlp(self.channels_mlp_dim, name='channel_mixing')(y)
    x = x + self._branch(y, skip_rate)
    return x, x if self.per_layer else None

  def _branch(self, y, skip_rate):
    if skip_rate is None:
      return y
    return skip_examples(y, skip_rate, self.make_rng('dropout'))


class MlpMixer(nn.Module):
  """Images to logits.

  The MLPs along the tokens make the number of patches part of the parameters:
  a model takes images of one size only.

  Attributes:
    width: D.
    depth: L.
    tokens_mlp_dim: hidden width of the MLPs along the tokens.
    channels_mlp_dim: of those along the channels.
    patch_size: side of a patch in pixels, or (ph, pw).
    num_classes: K; None or 0 for no head.
    head_bias_init: such as -10 for a sigmoid loss over many classes.
    stochastic_depth: share of examples that skip a layer's branch, in the
      last layer; grows linearly from 0 in the first.
    gelu: 'tanh' (the released code) or 'exact' (PyTorch models).
    norm_eps: of every LayerNorm.
    dtype: of the computation, 'float32' or 'bfloat16'.
    scan, remat: as in VisionTransformer.
  """

  width: int
  depth: int
  tokens_mlp_dim: int
  channels_mlp_dim: int
  patch_size: int | tuple[int, int]
  num_classes: int | None = None
  head_bias_init: float = 0.0
  stochastic_depth: float = 0.0
  gelu: str = 'tanh'
  norm_eps: float = 1e-6
  dtype: Any = 'float32'
  scan: bool = False
  remat: str = 'none'

  def __call__(self, images: jax.Array, *, train: bool = False) -> jax.Array:
    """Logits, or the pooled representation when there is no head.

    Args:
      images: [B, H, W, C], in [-1, 1].
      train: turns stochastic depth on; it needs an rng 'dropout'.

    Returns:
      float32 [B, K]; without a head [B, D] in dtype.

    Raises:
      ValueError: patches do not tile the image, they are more or fewer than
        the parameters have rows for, or a field makes no sense.
    """
    out = self.features(images, train=train, per_layer=False)
    return out['logits'] if self.num_classes else out['pre_logits']

  @nn.compact
  def features(
    self, images: jax.Array, *, train: bool = False, per_layer: bool = True
  ) -> dict[str, jax.Array]:
    """Everything on the way to the logits, by name.

    Returns:
      patches: [B, N, D], embedded.
      block_0 ... block_{L-1}: [B, N, D], each layer's output (if per_layer).
      tokens: [B, N, D], after the final LayerNorm.
      pooled: [B, D], their mean.
      pre_logits: the same.
      logits: float32 [B, K]. Not there without a head.
    """
    frame.check_choices(self, gelu=tuple(GELU), remat=frame.REMAT)
    frame.check_rates(self, 'stochastic_depth')
    out = {}
    out['patches'], grid = frame.embed_patches(
      images, self.patch_size, self.width, self.dtype
    )
    self._check_tokens(grid)
    x, layers = frame.run_layers(
      MixerBlock,
      out['patches'],
      depth=self.depth,
      skip_rate=self.stochastic_depth if train else 0.0,
      scan=self.scan,
      remat=self.remat,
      per_layer=per_layer,
      tokens_mlp_dim=self.tokens_mlp_dim,
      channels_mlp_dim=self.channels_mlp_dim,
      gelu=self.gelu,
      norm_eps=self.norm_eps,
      dtype=self.dtype,
    )
    out |= layers
    norm = LayerNorm(self.norm_eps, dtype=self.dtype, name='norm')
    out['tokens'] = x = norm(x)
    out['pooled'] = out['pre_logits'] = x = x.mean(axis=1)
    if self.num_classes:
      out['logits'] = frame.classify(x, self.num_classes, self.head_bias_init)
    return out

  def _check_tokens(self, grid):
    layer = 'blocks' if self.scan else 'block_0'
    params = self.variables.get('params', {})
    if layer not in params:
      return  # being initialised
    tokens = params[layer]['token_mixing']['fc1']['kernel'].shape[-2]
    if tokens != grid[0] * grid[1]:
      raise ValueError(
        f'The image has {grid[0]}x{grid[1]} patches but token_mixing mixes '
        f'{tokens}. A Mixer takes images of one size: resize them to the one '
        'it was trained at.'
      )

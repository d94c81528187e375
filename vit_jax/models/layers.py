"""What a Vision Transformer is made of, and how each part is initialised.

Shapes as in vit.py: B examples, N tokens, D width, h heads of width d = D / h,
M hidden width of the MLP. Parameters are float32; `dtype` is what matrices are
multiplied in. LayerNorm statistics and softmax are float32 always.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from vit_jax.models.attention import attention

# The initialisation of the whole model. Biases start at zero and LayerNorms
# as the identity but where said. The paper leaves this open; these are the
# distributions of its released code. Fans are those of the matrix multiplied
# with: an attention kernel [D, h, d] counts as [D, D], the patch embedding
# [ph, pw, C, D] as [ph * pw * C, D].
INIT = {
  'embedding': nn.initializers.lecun_normal(),  # E of equation 1
  'cls': nn.initializers.zeros,  # x_class of equation 1
  'registers': nn.initializers.normal(0.02),
  'pos_embedding': nn.initializers.normal,  # E_pos; a field sets its std
  'attention': nn.initializers.xavier_uniform(),  # U_qkv, U_msa, appendix A
  'mlp': nn.initializers.xavier_uniform(),  # both layers of equation 3
  'mlp_bias': nn.initializers.normal(1e-6),
  'probe': nn.initializers.xavier_uniform(),  # the query of the MAP head
  'pre_logits': nn.initializers.lecun_normal(),  # tanh layer, section 3.1
  'head': nn.initializers.zeros,  # section 3.2; a field sets its bias
}

GELU = {
  'tanh': functools.partial(nn.gelu, approximate=True),
  'exact': functools.partial(nn.gelu, approximate=False),
}


# Functions of jax.checkpoint_policies that are policies; the others make one.
REMAT = (
  'none',
  'dots',
  'full',
  *(n for n in dir(jax.checkpoint_policies) if n.endswith('saveable')),
)


def remat_policy(name: str) -> Callable:
  """The policy of jax.checkpoint that a name in REMAT (not 'none') means."""
  aliases = {
    'dots': 'dots_with_no_batch_dims_saveable',
    'full': 'nothing_saveable',
  }
  return getattr(jax.checkpoint_policies, aliases.get(name, name))


def patchify(images: jax.Array, patch_size: int | tuple[int, int]) -> jax.Array:
  """Cuts images into patches: [B, H, W, C] -> [B, gh, gw, ph, pw, C].

  Raises:
    ValueError: patches do not tile the images.
  """
  if isinstance(patch_size, int):
    patch_size = patch_size, patch_size
  ph, pw = patch_size
  batch, height, width, channels = images.shape
  if height % ph or width % pw or not height * width:
    near = [max(round(s / p), 1) * p for s, p in ((height, ph), (width, pw))]
    raise ValueError(
      f'Images of {height}x{width} (height x width) cannot be cut into patches '
      f'of {ph}x{pw}; the nearest size that can is {near[0]}x{near[1]}. Resize '
      'or crop the images to it, or choose another patch_size.'
    )
  x = images.reshape(batch, height // ph, ph, width // pw, pw, channels)
  return x.swapaxes(2, 3)


class Affine(nn.Module):
  """x W + b over the last dimensions: [..., *inputs] -> [..., *outputs].

  The kernel is stored [*inputs, *outputs], but initialised and multiplied as
  the matrix [prod(inputs), prod(outputs)].
  """

  inputs: tuple[int, ...]
  outputs: tuple[int, ...]
  init: Callable
  bias_init: Callable = nn.initializers.zeros
  dtype: Any = 'float32'

  @nn.compact
  def __call__(self, x):
    matrix = math.prod(self.inputs), math.prod(self.outputs)
    kernel = self.param(
      'kernel',
      lambda rng: self.init(rng, matrix).reshape(*self.inputs, *self.outputs),
    )
    bias = self.param('bias', self.bias_init, self.outputs)
    batch = x.shape[: x.ndim - len(self.inputs)]
    # One large product: with batch and tokens apart, XLA's CPU back-end takes
    # 1.2 times as long for a training step of a small ViT.
    x = jnp.asarray(x, self.dtype).reshape(-1, matrix[0])
    x = x @ kernel.reshape(matrix).astype(self.dtype)
    x = x + bias.reshape(1, -1).astype(self.dtype)
    return x.reshape(*batch, *self.outputs)


class LayerNorm(nn.LayerNorm):
  """Flax's, with the epsilon of the paper's code."""

  epsilon: float = 1e-6


class Attention(nn.Module):
  """Multi-head attention (appendix A): [B, Q, D], [B, N, D] -> [B, Q, D].

  Queries and keys, as they enter the softmax but for the scale 1 / √d, are
  recorded as 'q' and 'k' [B, N, h, d] in the collection 'intermediates'.
  """

  num_heads: int
  dropout: float = 0.0
  qk_norm: bool = False
  implementation: str = 'auto'
  dtype: Any = 'float32'
  train: bool = False

  @nn.compact
  def __call__(self, queries, tokens):
    width = tokens.shape[-1]
    heads = self.num_heads, width // self.num_heads
    affine = functools.partial(Affine, init=INIT['attention'], dtype=self.dtype)
    q = affine((width,), heads, name='query')(queries)
    k = affine((width,), heads, name='key')(tokens)
    v = affine((width,), heads, name='value')(tokens)
    if self.qk_norm:
      q = LayerNorm(dtype=self.dtype, name='query_norm')(q)
      k = LayerNorm(dtype=self.dtype, name='key_norm')(k)
    self.sow('intermediates', 'q', q)
    self.sow('intermediates', 'k', k)
    drop = self.train and self.dropout > 0
    x = attention(
      q,
      k,
      v,
      implementation=self.implementation,
      dropout_rate=self.dropout if drop else 0.0,
      dropout_rng=self.make_rng('dropout') if drop else None,
    )
    return affine(heads, (width,), name='out')(x)


class Mlp(nn.Module):
  """Two layers with a GELU between them: [..., D] -> [..., D]."""

  mlp_dim: int
  dropout: float = 0.0
  gelu: str = 'tanh'
  dtype: Any = 'float32'
  train: bool = False

  @nn.compact
  def __call__(self, x):
    width = (x.shape[-1],)
    hidden = (self.mlp_dim,)
    affine = functools.partial(
      Affine, init=INIT['mlp'], bias_init=INIT['mlp_bias'], dtype=self.dtype
    )
    dropout = nn.Dropout(self.dropout, deterministic=not self.train)
    x = affine(width, hidden, name='fc1')(x)
    x = dropout(GELU[self.gelu](x))
    return dropout(affine(hidden, width, name='fc2')(x))


class Block(nn.Module):
  """One layer of the encoder (equations 2 and 3): [B, N, D] -> [B, N, D].

  Returns its output twice, or None the second time if not per_layer: a scan
  carries the one and stacks the other.
  """

  num_heads: int
  mlp_dim: int
  dropout: float = 0.0
  attention_dropout: float = 0.0
  layerscale_init: float | None = None
  qk_norm: bool = False
  gelu: str = 'tanh'
  dtype: Any = 'float32'
  attention: str = 'auto'
  train: bool = False
  per_layer: bool = False

  @nn.compact
  def __call__(self, x, skip_rate):
    """skip_rate: None, or this layer's share of examples to skip a branch."""
    norm = functools.partial(LayerNorm, dtype=self.dtype)
    y = norm(name='norm1')(x)
    y = Attention(
      self.num_heads,
      self.attention_dropout,
      self.qk_norm,
      self.attention,
      self.dtype,
      self.train,
      name='attn',
    )(y, y)
    y = nn.Dropout(self.dropout, deterministic=not self.train)(y)
    x = x + self._branch(y, 'ls1', skip_rate)
    y = norm(name='norm2')(x)
    y = Mlp(
      self.mlp_dim, self.dropout, self.gelu, self.dtype, self.train, name='mlp'
    )(y)
    x = x + self._branch(y, 'ls2', skip_rate)
    return x, x if self.per_layer else None

  def _branch(self, y, name, skip_rate):
    """LayerScale (DeiT III) and stochastic depth (AugReg)."""
    if self.layerscale_init is not None:
      init = nn.initializers.constant(self.layerscale_init)
      scale = self.param(name, init, y.shape[-1:])
      y = y * scale.reshape(1, 1, -1).astype(y.dtype)
    if skip_rate is not None:
      keep = 1 - skip_rate
      kept = jax.random.bernoulli(
        self.make_rng('dropout'), keep, (y.shape[0], 1, 1)
      )
      y = jnp.where(kept, y / jnp.asarray(keep, y.dtype), 0)
    return y


class MapHead(nn.Module):
  """Pooling by one learned query ("Scaling ViT"): [B, N, D] -> [B, D]."""

  num_heads: int
  mlp_dim: int
  gelu: str = 'tanh'
  dtype: Any = 'float32'
  implementation: str = 'auto'

  @nn.compact
  def __call__(self, tokens):
    batch, _, width = tokens.shape
    probe = self.param('probe', INIT['probe'], (1, 1, width))
    probe = jnp.broadcast_to(probe, (batch, 1, width))
    x = Attention(
      self.num_heads,
      implementation=self.implementation,
      dtype=self.dtype,
      name='attn',
    )(probe, tokens)
    y = LayerNorm(dtype=self.dtype, name='norm')(x)
    y = Mlp(self.mlp_dim, gelu=self.gelu, dtype=self.dtype, name='mlp')(y)
    return (x + y)[:, 0]

"""What a Vision Transformer is made of, and how each part is initialised.

INIT says the latter for the other models too. Shapes as in vit.py: B examples,
N tokens, D width, h heads of width d = D / h, M hidden width of the MLP.
Parameters are float32; `dtype` is what matrices are multiplied in. LayerNorm
statistics and softmax are float32 always.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from vit_jax.models.attention import attention
from vit_jax.models.mesh import keep_batch_split

# The initialisation of the whole model. Biases start at zero and LayerNorms
# as the identity but where said. The paper leaves this open; these are the
# distributions of its released code. Fans are those of the matrix multiplied
# with: an attention kernel [D, h, d] counts as [D, D], the patch embedding
# [ph, pw, C, D] as [ph * pw * C, D]. A convolution's fan-in is that, too.
INIT = {
  'embedding': nn.initializers.lecun_normal(),  # E of equation 1
  'cls': nn.initializers.zeros,  # x_class of equation 1
  'registers': nn.initializers.normal(0.02),
  'mask': nn.initializers.normal(0.02),  # appendix B.1.2; BERT's std
  'pos_embedding': nn.initializers.normal,  # E_pos; a field sets its std
  'attention': nn.initializers.xavier_uniform(),  # U_qkv, U_msa, appendix A
  'mlp': nn.initializers.xavier_uniform(),  # both layers of equation 3
  'mlp_bias': nn.initializers.normal(1e-6),
  'mixing': nn.initializers.lecun_normal(),  # both layers of a Mixer's MLPs
  'mixing_bias': nn.initializers.zeros,
  'conv': nn.initializers.lecun_normal(),  # of ResNets and hybrids
  'last_norm': nn.initializers.zeros,  # scale of norm3 in the hybrids' units
  'probe': nn.initializers.xavier_uniform(),  # the query of the MAP head
  'pre_logits': nn.initializers.lecun_normal(),  # tanh layer, section 3.1
  'head': nn.initializers.zeros,  # section 3.2; a field sets its bias
}

GELU = {
  'tanh': functools.partial(nn.gelu, approximate=True),
  'exact': functools.partial(nn.gelu, approximate=False),
}


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
    # In float32, for the gradient of the bias is then summed in float32: TPUs
    # without bfloat16 arithmetic take several times as long for the other.
    x = (x.astype(jnp.float32) + bias.reshape(1, -1)).astype(self.dtype)
    return x.reshape(*batch, *self.outputs)


class LayerNorm(nn.LayerNorm):
  """Flax's, with the epsilon of the paper's code."""

  epsilon: float = 1e-6


class Attention(nn.Module):
  """Multi-head attention (appendix A): [B, Q, D], [B, N, D] -> [B, Q, D].

  Queries and keys, as they enter the softmax but for the scale 1 / √d, are
  recorded as 'q' and 'k' [B, N, h, d] in the collection 'intermediates'; with
  relative positions what they add to q kᵀ, too: 'position_logits' [B, h, N, N].
  """

  num_heads: int
  dropout: float = 0.0
  qk_norm: bool = False
  implementation: str = 'auto'
  dtype: Any = 'float32'
  train: bool = False
  norm_eps: float = 1e-6
  positions: Any = None  # positions.Positions, of which 'relative' is heeded

  @nn.compact
  def __call__(self, queries, tokens):
    width = tokens.shape[-1]
    heads = self.num_heads, width // self.num_heads
    affine = functools.partial(Affine, init=INIT['attention'], dtype=self.dtype)
    q = affine((width,), heads, name='query')(queries)
    k = affine((width,), heads, name='key')(tokens)
    v = affine((width,), heads, name='value')(tokens)
    if self.qk_norm:
      norm = functools.partial(LayerNorm, self.norm_eps, dtype=self.dtype)
      q, k = norm(name='query_norm')(q), norm(name='key_norm')(k)
    self.sow('intermediates', 'q', q)
    self.sow('intermediates', 'k', k)
    position_logits = None
    if self.positions is not None and self.positions.kind == 'relative':
      position_logits = self.positions.logits(self, q)
      self.sow('intermediates', 'position_logits', position_logits)
    drop = self.train and self.dropout > 0
    x = attention(
      q,
      k,
      v,
      implementation=self.implementation,
      dropout_rate=self.dropout if drop else 0.0,
      dropout_rng=self.make_rng('dropout') if drop else None,
      position_logits=position_logits,
    )
    return affine(heads, (width,), name='out')(x)


class Mlp(nn.Module):
  """Two layers with a GELU between them: [..., D] -> [..., D].

  init names what INIT initialises the kernels with.
  """

  mlp_dim: int
  dropout: float = 0.0
  gelu: str = 'tanh'
  dtype: Any = 'float32'
  train: bool = False
  init: str = 'mlp'

  @nn.compact
  def __call__(self, x):
    width = (x.shape[-1],)
    hidden = (self.mlp_dim,)
    affine = functools.partial(
      Affine,
      init=INIT[self.init],
      bias_init=INIT[f'{self.init}_bias'],
      dtype=self.dtype,
    )
    dropout = nn.Dropout(self.dropout, deterministic=not self.train)
    x = affine(width, hidden, name='fc1')(x)
    x = dropout(GELU[self.gelu](x))
    return dropout(affine(hidden, width, name='fc2')(x))


def skip_examples(y: jax.Array, rate: Any, rng: jax.Array) -> jax.Array:
  """Stochastic depth (AugReg): drops a branch's output for some examples.

  Args:
    y: [B, N, D], what a branch adds.
    rate: share of the examples that it is not added to; the others get more.
    rng: key.
  """
  keep = 1 - rate
  kept = jax.random.bernoulli(rng, keep, (y.shape[0], 1, 1))
  return jnp.where(kept, y / jnp.asarray(keep, y.dtype), 0)


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
  norm_eps: float = 1e-6
  train: bool = False
  per_layer: bool = False
  positions: Any = None  # positions.Positions, if the layer has its own

  @nn.compact
  def __call__(self, x, skip_rate, added=None):
    """One layer.

    Args:
      x: [B, N, D].
      skip_rate: None, or this layer's share of examples to skip a branch.
      added: [1, N, D], positions that all layers add to what they get.
    """
    x = keep_batch_split(x)
    if self.positions is not None and self.positions.are_added:
      added = self.positions.of_tokens(self, x.shape[-1])
    if added is not None:
      x = x + added.astype(x.dtype)
    norm = functools.partial(LayerNorm, self.norm_eps, dtype=self.dtype)
    y = norm(name='norm1')(x)
    y = Attention(
      self.num_heads,
      self.attention_dropout,
      self.qk_norm,
      self.attention,
      self.dtype,
      self.train,
      self.norm_eps,
      self.positions,
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
    """LayerScale (DeiT III) and stochastic depth."""
    if self.layerscale_init is not None:
      init = nn.initializers.constant(self.layerscale_init)
      scale = self.param(name, init, y.shape[-1:])
      y = y * scale.reshape(1, 1, -1).astype(y.dtype)
    if skip_rate is not None:
      y = skip_examples(y, skip_rate, self.make_rng('dropout'))
    return y


class MapHead(nn.Module):
  """Pooling by one learned query ("Scaling ViT"): [B, N, D] -> [B, D]."""

  num_heads: int
  mlp_dim: int
  gelu: str = 'tanh'
  dtype: Any = 'float32'
  implementation: str = 'auto'
  norm_eps: float = 1e-6

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
    y = LayerNorm(self.norm_eps, dtype=self.dtype, name='norm')(x)
    y = Mlp(self.mlp_dim, gelu=self.gelu, dtype=self.dtype, name='mlp')(y)
    return (x + y)[:, 0]

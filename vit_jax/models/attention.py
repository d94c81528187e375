"""Multi-head attention, and one function for its implementations.

Shapes: B examples, Q queries, N keys, h heads of dimension d, D = h * d.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from vit_jax.models import layers, pallas_attention
from vit_jax.models.layers import BlockOptions, Dense
from vit_jax.models.posemb import Layout, PositionEmbedding
from vit_jax.types import UserError

Implementation = Literal['auto', 'xla', 'cudnn', 'einsum', 'pallas']


class Attention(nn.Module):
  """Multi-head attention (appendix A): [B, Q, D], [B, N, D] -> [B, Q, D].

  Records in the collection 'intermediates' queries and keys, as they enter the
  softmax except for its scale, as 'q' and 'k' [B, N, h, d]; and what the
  position embedding adds to q kᵀ as 'position_logits' [B, h, N, N].
  """

  num_heads: int
  options: BlockOptions = BlockOptions()
  posemb: PositionEmbedding | None = None  # if it acts in the layers
  layout: Layout = Layout((0, 0))
  implementation: str = 'auto'
  dtype: Any = 'float32'
  train: bool = False

  @nn.compact
  def __call__(
    self, queries: jax.Array, tokens: jax.Array, shared: Any = None
  ) -> jax.Array:
    width, options = tokens.shape[-1], self.options
    heads = self.num_heads, width // self.num_heads

    def dense(name, inputs, outputs):
      init = layers.initializer('attention', options.init_std)
      fields = {'dtype': self.dtype, 'bias': name in options.biases}
      return Dense(inputs, outputs, init, **fields, name=name)

    q = dense('query', (width,), heads)(queries)
    k = dense('key', (width,), heads)(tokens)
    v = dense('value', (width,), heads)(tokens)
    norm = functools.partial(options.make_norm, self.dtype)
    if options.qk_norm:
      q, k = norm('query_norm')(q), norm('key_norm')(k)
    position_logits = None
    if self.posemb:
      q, k = self.posemb.queries_and_keys(self, q, k, self.layout, shared)
      position_logits = self.posemb.logits(self, q, self.layout)
    self.sow('intermediates', 'q', q)
    self.sow('intermediates', 'k', k)
    if position_logits is not None:
      self.sow('intermediates', 'position_logits', position_logits)
    drop = self.train and options.attention_dropout > 0
    x = attention(
      *(q, k, v),
      implementation=self.implementation,
      dropout_rate=options.attention_dropout if drop else 0.0,
      dropout_rng=self.make_rng('dropout') if drop else None,
      position_logits=position_logits,
    )
    if 'attn' in options.sub_norm:
      merged = norm('norm')(x.reshape(*x.shape[:2], width))
      x = merged.reshape(x.shape)
    return dense('out', heads, (width,))(x)


def attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  implementation: str = 'auto',
  dropout_rate: float = 0.0,
  dropout_rng: jax.Array | None = None,
  position_logits: jax.Array | None = None,
) -> jax.Array:
  """Compute softmax(q kᵀ / √d) v with a float32 softmax (eq. 5 to 7).

  Args:
    q, k, v: [B, Q, h, d], and [B, N, h, d] each.
    implementation: 'xla' and 'cudnn' are those of
      jax.nn.dot_product_attention, 'cudnn' the fused one for NVIDIA GPUs;
      'einsum' is written out here, and the only one that can drop attention
      weights or add to the logits; 'pallas' is the kernel for TPUs in
      pallas_attention.py; 'auto' is `default`, unless a run has measured, see
      attention_choice.py.
    dropout_rate: fraction of the attention weights to drop, independently.
    dropout_rng: key for dropout, required if dropout_rate > 0.
    position_logits: [B, h, Q, N], added to q kᵀ (relative attention).

  Returns:
    [B, Q, h, d] in the dtype of v.
  """
  only_einsum = dropout_rate > 0 or position_logits is not None
  if implementation == 'auto':
    implementation = 'einsum' if only_einsum else default(q)
  if only_einsum and implementation != 'einsum':
    raise UserError(
      f'attention={implementation!r} can neither drop attention weights nor '
      "add position logits. Use 'einsum' or 'auto'."
    )
  # With one query, as in MAP pooling, scores are no matrix to keep on chip.
  if q.shape[1] == 1 and implementation == 'pallas':
    implementation = 'xla'
  if implementation == 'einsum':
    out = _einsum(q, k, v, dropout_rate, dropout_rng, position_logits)
  elif implementation == 'pallas':
    out = pallas_attention.attend(q, k, v)
  else:
    kind: Any = implementation
    out = jax.nn.dot_product_attention(q, k, v, implementation=kind)
  # Where the result is kept for the backward pass, heads are merged: TPUs pad
  # the last dimension to 128.
  merged = out.reshape(*out.shape[:2], -1)
  return checkpoint_name(merged, layers.ATTENTION).reshape(out.shape)


def default(q: jax.Array) -> str:
  """Return the implementation for queries of that shape and dtype."""
  # On a CPU, forward and backward of 'einsum' took 0.7 to 1.0 of the time of
  # 'xla' (36 tokens, 3 heads of 32; 197 tokens, 12 heads of 64; float32).
  platform = layers.platform()
  if platform == 'cpu':
    return 'einsum'
  head_dim = q.shape[-1]
  # With one query, as in MAP pooling, a fused kernel saves nothing.
  if platform != 'gpu' or q.shape[1] == 1 or head_dim % 8 or head_dim > 128:
    return 'xla'
  # CUDA devices report '8.0', AMD ones 'gfx90a'.
  capability = str(getattr(jax.devices()[0], 'compute_capability', ''))
  is_new = capability[:1].isdigit() and float(capability) >= 8
  return 'cudnn' if is_new and q.dtype in (jnp.bfloat16, jnp.float16) else 'xla'


def _einsum(q, k, v, dropout_rate, dropout_rng, position_logits):
  # Heads come first, by an explicit transpose: CPUs multiply contiguous
  # matrices far faster than strided ones; accelerators choose layouts anyway.
  q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
  scores = jnp.einsum(
    'bhqd,bhnd->bhqn', q, k, preferred_element_type=jnp.float32
  )
  if position_logits is not None:
    scores = scores + position_logits
  weights = jax.nn.softmax(scores * q.shape[-1] ** -0.5, axis=-1)
  if dropout_rate:
    keep = jax.random.bernoulli(dropout_rng, 1 - dropout_rate, weights.shape)
    weights = jnp.where(keep, weights / (1 - dropout_rate), 0)
  out = jnp.einsum('bhqn,bhnd->bhqd', weights.astype(v.dtype), v)
  return jnp.swapaxes(out, 1, 2)

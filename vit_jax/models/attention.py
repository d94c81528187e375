"""Softmax attention behind one function, the implementation chosen by name.

Shapes: B batch, Q queries, N keys, h heads, d width of one head.
"""

import jax
import jax.numpy as jnp

from vit_jax.models import pallas_attention

IMPLEMENTATIONS = ('auto', 'xla', 'cudnn', 'einsum', 'pallas')


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
  """softmax(q kᵀ / √d) v, with the softmax in float32 (paper eq. 5 to 7).

  Args:
    q: [B, Q, h, d].
    k: [B, N, h, d].
    v: [B, N, h, d].
    implementation: 'xla' and 'cudnn' are those of
      jax.nn.dot_product_attention, 'cudnn' being the fused one of NVIDIA GPUs;
      'einsum' is written out here and the only one that can drop attention
      weights or add to the logits. 'pallas' is the kernel for TPUs in
      pallas_attention.py. 'auto' takes the fastest that can do what is asked;
      not 'pallas', however, which no TPU has run yet.
    dropout_rate: share of the attention weights to drop, each one separately.
    dropout_rng: key for it, needed when dropout_rate > 0.
    position_logits: [B, h, Q, N], added to q kᵀ (relative attention).

  Returns:
    [B, Q, h, d] in the dtype of v.

  Raises:
    ValueError: the named implementation cannot do what is asked here.
  """
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f'Unknown attention implementation {implementation!r}; '
      f'choose one of {", ".join(IMPLEMENTATIONS)}.'
    )
  if not 0 <= dropout_rate < 1:
    raise ValueError(
      f'Attention dropout rate is {dropout_rate}, expected 0 <= rate < 1.'
    )
  if dropout_rate and dropout_rng is None:
    raise ValueError(
      f'Attention dropout rate is {dropout_rate} but dropout_rng is None; '
      'pass a key, or rate 0.'
    )
  if implementation == 'auto':
    only_einsum = dropout_rate or position_logits is not None
    implementation = 'einsum' if only_einsum else _fastest(q)
  if implementation == 'einsum':
    return _einsum(q, k, v, dropout_rate, dropout_rng, position_logits)
  if position_logits is not None:
    raise ValueError(
      f'Attention {implementation!r} is fused, and relative positions add to '
      "its logits; use 'einsum' or 'auto', or positions of another kind."
    )
  if dropout_rate:
    raise ValueError(
      f'Attention {implementation!r} cannot drop attention weights (rate '
      f"{dropout_rate}); use 'einsum' or 'auto', or set the rate to 0."
    )
  if implementation == 'cudnn' and (obstacle := _cudnn_obstacle(q)):
    raise ValueError(
      f"Attention 'cudnn' needs {obstacle}; use 'auto', 'xla' or 'einsum'."
    )
  if implementation == 'pallas':
    # One query, as in the MAP head, makes no matrix of scores to keep on chip.
    if q.shape[1] > 1:
      return pallas_attention.attend(q, k, v)
    implementation = 'xla'
  return jax.nn.dot_product_attention(q, k, v, implementation=implementation)


def _fastest(q):
  # On a CPU, forward and backward of 'einsum' took 0.7 to 1.0 of the time of
  # 'xla' (36 tokens, 3 heads of 32; 197 tokens, 12 heads of 64; float32).
  if jax.default_backend() == 'cpu':
    return 'einsum'
  # One query, as in the MAP head, leaves a fused kernel nothing to save.
  return 'xla' if q.shape[1] == 1 or _cudnn_obstacle(q) else 'cudnn'


def _cudnn_obstacle(q):
  """What the fused kernel lacks here, in words; None when it can run."""
  head_dim = q.shape[-1]
  if q.dtype not in (jnp.bfloat16, jnp.float16):
    return f'bfloat16 or float16, got {q.dtype}'
  if head_dim % 8 or head_dim > 128:
    return f'a head width that 8 divides, 128 at most, got {head_dim}'
  # CUDA devices report '8.0', AMD ones 'gfx90a', other platforms nothing.
  capability = str(getattr(jax.devices()[0], 'compute_capability', ''))
  if not capability[:1].isdigit() or float(capability) < 8:
    return (
      'an NVIDIA GPU of compute capability 8.0 or newer, '
      f'got {jax.devices()[0].device_kind!r}'
    )
  return None


def _einsum(q, k, v, dropout_rate, dropout_rng, position_logits):
  # Heads first, by an explicit transpose: CPUs multiply contiguous matrices
  # far faster than strided ones, and accelerators choose layouts anyway.
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

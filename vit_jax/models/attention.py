"""Softmax attention behind one function, the implementation chosen by name.

Shapes: B examples, Q queries, N keys, h heads of dimension d.
"""

from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.checks import one_of
from vit_jax.models import mesh, pallas_attention

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
  """Compute softmax(q kᵀ / √d) v with a float32 softmax (eq. 5 to 7).

  'auto' is chosen while the function is traced, by `mesh.platform`, so a
  program compiled for a mesh of other devices gets what suits these. On CPUs
  jax.lax.platform_dependent, which chooses when the program is lowered, gave
  the same bits and memory, but tracing took 1.2 to 1.5 times as long; and
  'cudnn' cannot be one of its branches on a machine without a GPU.

  Args:
    q: [B, Q, h, d].
    k: [B, N, h, d].
    v: [B, N, h, d].
    implementation: 'xla' and 'cudnn' are those of
      jax.nn.dot_product_attention, 'cudnn' the fused one for NVIDIA GPUs;
      'einsum' is written out here, and the only one that can drop attention
      weights or add to the logits; 'pallas' is the kernel for TPUs in
      pallas_attention.py; 'auto' is the fastest one that supports the
      arguments, except 'pallas', which has not run on a TPU yet.
    dropout_rate: fraction of the attention weights to drop, independently.
    dropout_rng: key for dropout, required if dropout_rate > 0.
    position_logits: [B, h, Q, N], added to q kᵀ (relative attention).

  Returns:
    [B, Q, h, d] in the dtype of v.

  Raises:
    ValueError: the named implementation does not support the arguments.
  """
  one_of('attention', implementation, IMPLEMENTATIONS)
  if not 0 <= dropout_rate < 1:
    raise ValueError(
      f'attention dropout_rate={dropout_rate} must be in [0, 1).'
    )
  if dropout_rate and dropout_rng is None:
    raise ValueError(
      f'attention dropout_rate={dropout_rate} needs a dropout_rng. Pass a key, '
      'or rate 0.'
    )
  if implementation == 'auto':
    only_einsum = dropout_rate or position_logits is not None
    implementation = 'einsum' if only_einsum else fastest(q)
  if implementation == 'einsum':
    return _einsum(q, k, v, dropout_rate, dropout_rng, position_logits)
  if position_logits is not None:
    raise ValueError(
      f'attention={implementation!r} is fused and cannot add position logits. '
      "Use 'einsum' or 'auto', or another position embedding."
    )
  if dropout_rate:
    raise ValueError(
      f'attention={implementation!r} cannot drop attention weights (rate '
      f"{dropout_rate}). Use 'einsum' or 'auto', or set the rate to 0."
    )
  if implementation == 'cudnn' and (obstacle := _cudnn_obstacle(q)):
    raise ValueError(
      f"attention='cudnn' needs {obstacle}. Use 'auto', 'xla' or 'einsum'."
    )
  if implementation == 'pallas':
    # With one query, as in MAP pooling, scores are no matrix to keep on chip.
    if q.shape[1] > 1:
      return pallas_attention.attend(q, k, v)
    implementation = 'xla'
  fused: Any = implementation
  return jax.nn.dot_product_attention(q, k, v, implementation=fused)


def fastest(q: jax.Array) -> str:
  """Return what 'auto' chooses for queries of that shape and dtype."""
  # On a CPU, forward and backward of 'einsum' took 0.7 to 1.0 of the time of
  # 'xla' (36 tokens, 3 heads of 32; 197 tokens, 12 heads of 64; float32).
  if mesh.platform() == 'cpu':
    return 'einsum'
  # With one query, as in MAP pooling, a fused kernel saves nothing.
  return 'xla' if q.shape[1] == 1 or _cudnn_obstacle(q) else 'cudnn'


def _cudnn_obstacle(q):
  """Return what the fused kernel needs and lacks, or None if it can run."""
  head_dim = q.shape[-1]
  if q.dtype not in (jnp.bfloat16, jnp.float16):
    return f'bfloat16 or float16, got {q.dtype}'
  if head_dim % 8 or head_dim > 128:
    return f'a head dimension that is a multiple of 8, at most 128: {head_dim}'
  need = 'an NVIDIA GPU of compute capability 8.0 or newer'
  if mesh.platform() != 'gpu':
    return f'{need}, got a {mesh.platform()}'
  # CUDA devices report '8.0', AMD ones 'gfx90a'.
  device = jax.devices()[0]
  capability = str(getattr(device, 'compute_capability', ''))
  if not capability[:1].isdigit() or float(capability) < 8:
    return f'{need}, got {device.device_kind!r}'
  return None


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

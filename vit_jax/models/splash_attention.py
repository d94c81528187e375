"""JAX's TPU kernel for long sequences, splash attention, for any length.

Shapes: B examples, N tokens, h heads of dimension d.
"""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.models.mesh import per_device, platform

_LANES = 128  # Numbers of tokens must be multiples of it.
_MAX_BLOCK = 1024  # Tokens; larger blocks of scores do not fit on chip.


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  """Compute softmax(q kᵀ / √d) v, each [B, N, h, d], with a float32 softmax.

  Tokens are padded to a multiple of 128, and the padding is masked. On CPUs the
  kernel is interpreted, which is slow and meant for tests.
  """
  return per_device(_attend_local, q, k, v)


def _attend_local(q, k, v):
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
  )
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
  )

  _, tokens, heads, head_dim = q.shape
  padded = -(-tokens // _LANES) * _LANES
  block = max(
    n for n in range(_LANES, _MAX_BLOCK + 1, _LANES) if padded % n == 0
  )
  kernel = splash.make_splash_mha_single_device(
    masks.MultiHeadMask([masks.FullMask((padded, padded))] * heads),
    block_sizes=splash.BlockSizes(
      block_q=block,
      block_kv=block,
      block_q_dkv=block,
      block_kv_dkv=block,
      block_q_dq=block,
      block_kv_dq=block,
    ),
    interpret=platform() == 'cpu',
  )
  # Tokens attend to tokens of the same segment: padding only to padding.
  segments = jnp.asarray(np.arange(padded) >= tokens, jnp.int32)
  ids = splash.SegmentIds(q=segments, kv=segments)

  def heads_first(x):
    x = jnp.pad(x, ((0, 0), (0, padded - tokens), (0, 0), (0, 0)))
    return jnp.swapaxes(x, 1, 2)

  q = (q.astype(jnp.float32) * head_dim**-0.5).astype(q.dtype)
  q, k, v = map(heads_first, (q, k, v))
  out = jax.vmap(lambda q, k, v: kernel(q, k, v, segment_ids=ids))(q, k, v)
  return jnp.swapaxes(out, 1, 2)[:, :tokens].astype(v.dtype)

"""Softmax attention behind one function, the implementation chosen by name.

Shapes: B examples, Q queries, N keys, h heads of dimension d.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from vit_jax.config.checks import one_of
from vit_jax.models import mesh, pallas_attention, splash_attention


class Projection(NamedTuple):
  """Queries, keys or values [B, N, h, d]: result = product + bias [h, d]."""

  result: jax.Array
  product: jax.Array
  bias: jax.Array


@dataclasses.dataclass(frozen=True)
class Implementation:
  """A way to compute attention without dropout and added logits.

  Attributes:
    name: in configs, logs and records.
    attend: function of q [B, Q, h, d] and k, v [B, N, h, d], which returns
      softmax(q kᵀ / √d) v, [B, Q, h, d] in the dtype of v.
    obstacle: function of the same arrays, or of their ShapeDtypeStructs. It
      returns what the implementation needs and lacks, or None if it can run.
    platforms: where it is meant to run, see `mesh.platform`.
    attend_biased: the same for (product, bias) in place of each of q, k and v,
      which computes the gradients of biases at less cost; None: not available.
  """

  name: str
  attend: Callable[..., jax.Array]
  obstacle: Callable[..., str | None] = lambda *_: None
  platforms: tuple[str, ...] = ('cpu', 'gpu', 'tpu')
  attend_biased: Callable[..., jax.Array] | None = None


ATTENTION = 'attention'  # name of the results, for rematerialization

# Chooses an implementation from q, k and v while attention is traced.
Chooser = Callable[[Any, Any, Any], Implementation]


def attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  implementation: str | Chooser = 'auto',
  dropout_rate: float = 0.0,
  dropout_rng: jax.Array | None = None,
  position_logits: jax.Array | None = None,
  projections: Sequence[Projection] = (),
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
      pallas_attention.py, 'splash' the one of JAX, 'tokamax' that of the
      package for GPUs and TPUs; 'auto' is `fastest`. A Chooser is asked where
      'auto' has a choice; training, evaluations and teachers have one that has
      measured, see autotune.py.
    dropout_rate: fraction of the attention weights to drop, independently.
    dropout_rng: key for dropout, required if dropout_rate > 0.
    position_logits: [B, h, Q, N], added to q kᵀ (relative attention).
    projections: those of which q, k and v are the results; ignored if one of
      these has been changed since.

  Returns:
    [B, Q, h, d] in the dtype of v.

  Raises:
    ValueError: the named implementation does not support the arguments.
  """
  if not callable(implementation):
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
  only_einsum = dropout_rate or position_logits is not None
  if callable(implementation):
    chosen = KERNELS['einsum'] if only_einsum else implementation(q, k, v)
  elif implementation == 'auto':
    chosen = KERNELS['einsum' if only_einsum else fastest(q)]
  else:
    chosen = KERNELS[implementation]
  if chosen.name == 'einsum':
    out = _einsum(q, k, v, dropout_rate, dropout_rng, position_logits)
    return _named(out)
  if position_logits is not None:
    raise ValueError(
      f'attention={chosen.name!r} is fused and cannot add position logits. '
      "Use 'einsum' or 'auto', or another position embedding."
    )
  if dropout_rate:
    raise ValueError(
      f'attention={chosen.name!r} cannot drop attention weights (rate '
      f"{dropout_rate}). Use 'einsum' or 'auto', or set the rate to 0."
    )
  # With one query, as in MAP pooling, scores are no matrix to keep on chip.
  if q.shape[1] == 1 and chosen.name in ('pallas', 'splash', 'tokamax'):
    chosen = KERNELS['xla']
  if obstacle := chosen.obstacle(q, k, v):
    raise ValueError(
      f'attention={chosen.name!r} needs {obstacle}. '
      "Use 'auto', 'xla' or 'einsum'."
    )
  results = [each.result for each in projections]
  unchanged = results and all(x is y for x, y in zip(results, (q, k, v)))
  if chosen.attend_biased and unchanged:
    pairs = ((p.product, p.bias) for p in projections)
    return _named(chosen.attend_biased(*pairs))
  return _named(chosen.attend(q, k, v))


def _named(x):
  """Name x, [B, Q, h, d], for rematerialization.

  Where it is kept, heads are merged: TPUs pad the last dimension to 128.
  """
  batch, queries, heads, head_dim = x.shape
  x = checkpoint_name(x.reshape(batch, queries, heads * head_dim), ATTENTION)
  return x.reshape(batch, queries, heads, head_dim)


def fastest(q: jax.Array) -> str:
  """Return what 'auto' chooses for queries of that shape and dtype.

  It is a table: nothing is measured, see autotune.py.
  """
  # On a CPU, forward and backward of 'einsum' took 0.7 to 1.0 of the time of
  # 'xla' (36 tokens, 3 heads of 32; 197 tokens, 12 heads of 64; float32).
  if mesh.platform() == 'cpu':
    return 'einsum'
  # With one query, as in MAP pooling, a fused kernel saves nothing.
  return 'xla' if q.shape[1] == 1 or _cudnn_obstacle(q) else 'cudnn'


def _cudnn_obstacle(q, *_):
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


def _einsum(q, k, v, dropout_rate=0.0, dropout_rng=None, position_logits=None):
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


def _tokamax(q, k, v):
  import tokamax

  # Without 'xla', to which it would turn for what its kernels do not support.
  kernels = ('mosaic', 'triton')
  attend = functools.partial(
    tokamax.dot_product_attention, implementation=kernels
  )
  try:
    return mesh.per_device(attend, q, k, v)
  except ExceptionGroup as group:  # a NotImplementedError of each kernel
    reasons = '; '.join(f'{error}' for error in group.exceptions)
    raise ValueError(
      f"attention='tokamax' cannot compute {q.dtype} {q.shape}: {reasons}. Use "
      "'auto', 'xla' or 'einsum'."
    ) from group


def _tokamax_obstacle(*_):
  if not importlib.util.find_spec('tokamax'):
    return 'the package tokamax'
  if mesh.platform() == 'cpu':
    return 'a GPU or TPU, got a cpu'
  return None


_jax_nn = jax.nn.dot_product_attention
KERNELS = {
  each.name: each
  for each in (
    Implementation('xla', functools.partial(_jax_nn, implementation='xla')),
    Implementation(
      'cudnn',
      functools.partial(_jax_nn, implementation='cudnn'),
      _cudnn_obstacle,
      ('gpu',),
    ),
    Implementation('einsum', _einsum),
    Implementation(
      'pallas',
      pallas_attention.attend,
      pallas_attention.obstacle,
      ('tpu',),
      pallas_attention.attend_biased,
    ),
    Implementation(
      'splash',
      splash_attention.attend,
      pallas_attention.obstacle_of_inputs,
      ('tpu',),
    ),
    Implementation('tokamax', _tokamax, _tokamax_obstacle, ('gpu', 'tpu')),
  )
}
IMPLEMENTATIONS = ('auto', *KERNELS)

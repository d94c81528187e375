"""Multi-head attention, and one function for its implementations.

Shapes: B examples, Q queries, N keys, h heads of dimension d, D = h * d.
"""

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from vit_jax.models import dense
from vit_jax.models.dense import BlockOptions, Dense, initializer
from vit_jax.models.pallas import attention as kernel
from vit_jax.models.posemb import Layout, PositionEmbedding
from vit_jax.types import Shape, UserError

ATTENTION = 'attention'  # name of the results of attention, for remat policies
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
  outputs: int | None = None  # first queries whose output is needed; None: all

  @nn.compact
  def __call__(
    self, queries: Array, tokens: Array, shared: Any = None, lengths: Any = None
  ) -> Array:
    width, options = tokens.shape[-1], self.options
    heads = self.num_heads, width // self.num_heads

    def dense(name, inputs, outputs):
      init = initializer('attention', options.init_std)
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
      position_logits = position_logits[:, :, : self.outputs]
    q, queries = q[:, : self.outputs], queries[:, : self.outputs]
    drop = self.train and options.attention_dropout > 0
    x = attention(
      *(q, k, v),
      implementation=self.implementation,
      dropout_rate=options.attention_dropout if drop else 0.0,
      dropout_rng=self.make_rng('dropout') if drop else None,
      position_logits=position_logits,
      lengths=lengths,
    )
    if 'attn' in options.sub_norm:
      merged = norm('norm')(x.reshape(*x.shape[:2], width))
      x = merged.reshape(x.shape)
    if options.gate:
      x = x * nn.sigmoid(dense('gate', (width,), heads)(queries))
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
  lengths: jax.Array | None = None,
) -> jax.Array:
  """Return softmax(q kᵀ / √d) v, [B, Q, h, d] in the dtype of v (eq. 5 to 7).

  Args:
    q, k, v: [B, Q, h, d], and [B, N, h, d] each; the softmax is float32.
    implementation: 'xla' and 'cudnn' (for NVIDIA GPUs) are JAX's; only 'einsum'
      can drop attention weights or add to the logits; 'pallas' is the kernel
      for TPUs; 'auto' is `default`, or what pallas/choice.py measured.
    dropout_rate, dropout_rng: fraction of the weights to drop, and its key.
    position_logits: [B, h, Q, N], added to q kᵀ (relative attention).
    lengths: int32 [B], the keys of each example, at least 1, before padding.
  """
  only_einsum = dropout_rate > 0 or position_logits is not None
  if implementation == 'auto':
    implementation = 'einsum' if only_einsum else default(q.shape[-1], q.dtype)
  if only_einsum and implementation != 'einsum':
    raise UserError(
      f'attention={implementation!r} can neither drop attention weights nor '
      "add position logits. Use 'einsum' or 'auto'."
    )
  # With one query, as in MAP pooling, or two, of DistillationToken, scores are
  # no matrix to keep on chip.
  if q.shape[1] <= 2 and implementation not in ('einsum', 'xla'):
    implementation = 'xla'
  if implementation == 'einsum':
    out = _einsum(q, k, v, dropout_rate, dropout_rng, position_logits, lengths)
  elif implementation == 'pallas':
    out = kernel.attend(q, k, v, lengths)
  elif implementation == 'cudnn':
    out = _cudnn(q, k, v, lengths)
  else:
    options: Any = {'implementation': implementation}
    options |= {} if lengths is None else {'key_value_seq_lengths': lengths}
    out = jax.nn.dot_product_attention(q, k, v, **options)
  # Heads are merged in what is kept: TPUs pad the last dimension to 128.
  merged = out.reshape(*out.shape[:2], -1)
  return checkpoint_name(merged, ATTENTION).reshape(out.shape)


def default(head_dim: int, dtype: Any) -> str:
  """Return the implementation for heads of that dimension and dtype."""
  # On a CPU, forward and backward of 'einsum' took 0.7 to 1.0 of the time of
  # 'xla' (36 tokens, 3 heads of 32; 197 tokens, 12 heads of 64; float32). On an
  # H100, B/16's train step takes 0.9 of the time, by the compiler's program.
  platform = dense.platform()
  is_half = np.dtype(dtype) in (jnp.bfloat16, jnp.float16)
  if platform != 'gpu' or not is_half or head_dim % 8 or head_dim > 128:
    return 'xla' if platform == 'tpu' else 'einsum'
  device, mesh = jax.local_devices()[0], jax.sharding.get_abstract_mesh()
  described = mesh.abstract_device or device
  if described.device_kind != device.device_kind:
    return 'cudnn'  # the GPUs are elsewhere
  return checked_cudnn(device, head_dim, np.dtype(dtype).name)


@functools.cache
def checked_cudnn(device: jax.Device, head_dim: int, dtype: str) -> str:
  """Return 'cudnn', or 'einsum' if it fails on a small input, and say so."""
  try:
    # A thread of its own computes, while this one may be tracing a program.
    with ThreadPoolExecutor(1) as pool:
      pool.submit(check, 'cudnn', (2, 5, 2, head_dim), dtype, device).result()
    taken = 'cudnn', 'which agrees with einsum'
  except Exception as e:  # Each version has its own errors.
    taken = 'einsum', f'because of cudnn: {type(e).__name__}: {e}'[:200]
  print(f'attention: {taken[0]}, {taken[1]} (heads of {head_dim}, {dtype})')
  return taken[0]


# Largest error that an implementation may have, see `check`. Measured on a CPU
# for 50 to 785 tokens: float32 6.1e-6, float16 0.0036, bfloat16 0.042, and
# 0.059 for float32 whose products are of bfloat16 numbers, as on accelerators
# by default. Attention to one token too many: 0.41 or more.
BOUNDS = {'float32': 0.1, 'float16': 0.02, 'bfloat16': 0.1}


def check(name: str, shape: Shape, dtype: Any, device: jax.Device) -> float:
  """Return the error of an implementation and its gradient, on a device.

  It is the largest difference from float32 einsum, relative to the element's
  size plus the root mean square of its array. Queries, keys and values have
  that shape [B, N, h, d] and dtype. Raises ArithmeticError above BOUNDS.
  """
  rng = np.random.default_rng(0)
  # Scores are about -4, so that keys of padding, with a score of 0, would show.
  shift = 2 * shape[-1] ** -0.25
  inputs = [
    jax.device_put(rng.standard_normal(shape, np.float32) + mean, device)
    for mean in (shift, -shift, 0, 0)
  ]

  @functools.partial(jax.jit, static_argnums=(0, 1))
  def results(name, dtype, *inputs):
    *qkv, gradient = (x.astype(dtype) for x in inputs)
    out, pull = jax.vjp(functools.partial(attention, implementation=name), *qkv)
    return [x.astype(jnp.float32) for x in (out, *pull(gradient))]

  with jax.set_mesh(mesh_of(device)):
    rounded = [x.astype(dtype).astype(jnp.float32) for x in inputs]
    found = results(name, np.dtype(dtype), *rounded)
    with jax.default_matmul_precision('highest'):
      expected = results('einsum', np.dtype('float32'), *rounded)
  return largest_error(found, expected, BOUNDS[np.dtype(dtype).name])


def largest_error(found: Any, expected: Any, bound: float) -> float:
  """Return the largest error, see `check`, or raise ArithmeticError."""
  errors = [
    jnp.max(jnp.abs(x - y) / (jnp.abs(y) + jnp.sqrt(jnp.mean(y**2))))
    for x, y in zip(found, expected, strict=True)
  ]
  if not (error := float(max(errors))) <= bound:
    raise ArithmeticError(f'error {error:.3g}, {bound:g} is allowed')
  return error


def mesh_of(device: jax.Device) -> jax.sharding.Mesh:
  """Return a mesh of one device."""
  axis_types = (jax.sharding.AxisType.Auto,)
  return jax.sharding.Mesh([device], ('data',), axis_types=axis_types)


def _cudnn(q, k, v, lengths):
  """Compute cuDNN's attention, with tokens of padding up to even numbers.

  JAX refuses to train on odd ones, for the sake of biases that there are not.
  """
  attend = functools.partial(
    jax.nn.dot_product_attention, implementation='cudnn'
  )
  batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
  if lengths is None:
    if queries % 2 == keys % 2 == 0:
      return attend(q, k, v)
    lengths = jnp.full(batch, keys, jnp.int32)
  pads = [((0, 0), (0, n % 2), (0, 0), (0, 0)) for n in (queries, keys, keys)]
  out = attend(
    *map(jnp.pad, (q, k, v), pads),
    query_seq_lengths=jnp.full(batch, queries, jnp.int32),
    key_value_seq_lengths=lengths,
  )
  return out[:, :queries]


def _einsum(q, k, v, dropout_rate, dropout_rng, position_logits, lengths):
  # Heads come first, by an explicit transpose: CPUs multiply contiguous
  # matrices far faster than strided ones; accelerators choose layouts anyway.
  q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
  scores = jnp.einsum('bhqd,bhnd->bhqn', q, k, preferred_element_type='float32')
  if position_logits is not None:
    scores = scores + position_logits
  if lengths is not None:
    key = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 3)
    is_key = key < lengths[:, None, None, None]
    scores = jnp.where(is_key, scores, -jnp.inf)
  weights = jax.nn.softmax(scores * q.shape[-1] ** -0.5, axis=-1)
  if dropout_rate:
    keep = jax.random.bernoulli(dropout_rng, 1 - dropout_rate, weights.shape)
    weights = jnp.where(keep, weights / (1 - dropout_rate), 0)
  out = jnp.einsum('bhqn,bhnd->bhqd', weights.astype(v.dtype), v)
  return jnp.swapaxes(out, 1, 2)

"""Attention of short sequences as one TPU kernel, written in Pallas.

    attend(q, k, v)

The scores of a head never leave the chip: one program of the grid processes all
tokens of one example, for some or all of its heads. It reads queries, keys and
values as the projections write them, [B, N, h * d], so that heads are not
transposed. Only q, k and v are saved for the backward pass, which computes the
attention weights again.

This kernel has never run on a TPU. We know that interpret mode agrees with
float64, that a simulation of a TPU's memory finds no race and no access out of
bounds, that the compiler accepts it for v4, v5e, v5p and v6e, and the cycles of
its schedule.

Shapes: B examples, N tokens, h heads of dimension d, W lanes of a block.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.models.mesh import per_device, platform

_LANES = 128  # of a vector register; matrix units have as many columns
# Bytes on chip that a program may hold, and that the compiler allows.
_BUDGET, _LIMIT = 14 * 2**20, 16 * 2**20
# How CPUs run the kernels: True, or pltpu.InterpretParams, which simulates the
# memory of a TPU and is much slower.
INTERPRET: Any = True


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  """Compute softmax(q kᵀ / √d) v, each [B, N, h, d], with a float32 softmax.

  Within `with jax.set_mesh(mesh)`, examples are sharded over the batch axes,
  and heads over the others (mesh.py), if these divide them. Without a mesh, the
  arrays must be on one device. On CPUs the kernels are interpreted, which is
  slow and meant for tests.

  Raises:
    ValueError: the kernel does not support the arguments.
  """
  if reason := obstacle(q, k, v):
    raise ValueError(
      f"attention='pallas' needs {reason}. Use 'auto', 'xla' or 'einsum'."
    )
  return per_device(_attend_local, q, k, v)


def _attend_local(q, k, v):
  batch, tokens, heads, width = q.shape
  flat = (x.reshape(batch, tokens, heads * width) for x in (q, k, v))
  return _attend(width, *flat).reshape(q.shape)


def obstacle_of_inputs(q: Any, k: Any, v: Any) -> str | None:
  """Return what TPU kernels need and these inputs lack, or None."""
  if platform() == 'gpu':
    return 'a TPU, got a GPU'
  if not q.shape == k.shape == v.shape:
    return (
      'queries, keys and values of one shape, '
      f'got {q.shape}, {k.shape} and {v.shape}'
    )
  if not q.dtype == k.dtype == v.dtype:
    return f'one dtype, got {q.dtype}, {k.dtype} and {v.dtype}'
  if q.dtype not in (jnp.bfloat16, jnp.float32):
    return f'bfloat16 or float32, got {q.dtype}'
  return None


def obstacle(q: Any, k: Any, v: Any) -> str | None:
  """Return what the kernel needs and lacks, or None if it can run."""
  if reason := obstacle_of_inputs(q, k, v):
    return reason
  _, tokens, heads, width = q.shape
  size = _held(tokens, _least(heads, width) * width, q.dtype)
  if size > _BUDGET:
    return (
      f'at most {_BUDGET / 2**20:.0f} MiB on chip for a few heads of an '
      f'example, got {size / 2**20:.1f} MiB for {tokens} tokens'
    )
  return None


def _least(heads, width):
  """Return the fewest heads that fill whole registers, else all heads."""
  least = _LANES // math.gcd(width, _LANES)
  return heads if heads % least else least


def _per_program(tokens, heads, width, dtype):
  """Return as many heads as fit, because each program has an overhead."""
  least = _least(heads, width)
  sizes = [n for n in range(least, heads + 1, least) if heads % n == 0]
  return max(
    n for n in sizes if n == least or _held(tokens, n * width, dtype) <= _BUDGET
  )


def _held(tokens, lanes, dtype):
  """Return bytes on chip in the backward pass: 7 double blocks, 5 scores."""
  rows = -(-tokens // 16) * 16
  lanes, columns = (-(-n // _LANES) * _LANES for n in (lanes, tokens))
  return 14 * rows * lanes * jnp.dtype(dtype).itemsize + 20 * rows * columns


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(width, q, k, v):
  return _call(_forward, width, (q, k, v), 1)[0]


def _attend_forward(width, q, k, v):
  return _attend(width, q, k, v), (q, k, v)


def _attend_backward(width, saved, gradient):
  return tuple(_call(_backward, width, (*saved, gradient), 3))


_attend.defvjp(_attend_forward, _attend_backward)


def _call(kernel, width, arrays, num_outputs):
  """Run a kernel over examples and groups of heads."""
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  like = arrays[0]
  batch, tokens, lanes = like.shape
  heads = _per_program(tokens, lanes // width, width, like.dtype)
  block = pl.BlockSpec(
    (None, tokens, heads * width), lambda example, group: (example, 0, group)
  )
  call = functools.partial(
    pl.pallas_call,
    functools.partial(kernel, width),
    grid=(batch, lanes // (heads * width)),
    in_specs=[block] * len(arrays),
    out_specs=[block] * num_outputs,
    out_shape=[jax.ShapeDtypeStruct(like.shape, like.dtype)] * num_outputs,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'parallel'), vmem_limit_bytes=_LIMIT
    ),
    cost_estimate=pl.CostEstimate(
      flops=(4 if num_outputs == 1 else 10) * batch * tokens**2 * lanes,
      transcendentals=batch * tokens**2 * lanes // width,
      bytes_accessed=(len(arrays) + num_outputs) * like.size * like.itemsize,
    ),
    name=f'attention{kernel.__name__}',
  )
  return jax.lax.platform_dependent(
    *arrays, tpu=call(), cpu=call(interpret=INTERPRET)
  )


def _forward(width, q_ref, k_ref, v_ref, out_ref):
  """Compute outputs of the heads of one example, [N, W] each."""

  def group(q, k, v):
    parts = {}
    for window, own in _heads(q.shape[-1], width):
      scores = _dot(q[:, window], _keep(k[:, window], own), 1, 1)
      weights, total = _softmax(scores, width, axis=1)
      out = _dot(weights.astype(v.dtype), _keep(v[:, window], own), 1, 0)
      _collect(parts, window, out / total)
    return (parts,)

  _for_groups(group, width, (q_ref, k_ref, v_ref), (out_ref,))


def _backward(width, q_ref, k_ref, v_ref, do_ref, dq_ref, dk_ref, dv_ref):
  """Compute gradients of the heads of one example, [N, W] each.

  Scores are transposed, [keys, queries]. Then sums over keys are sums of
  registers, and only one of the three gradients needs a transposed operand.
  """

  def group(*blocks):
    parts = {}, {}, {}
    for window, own in _heads(blocks[0].shape[-1], width):
      q, k, v, do = (x[:, window] for x in blocks)
      k = _keep(k, own)
      weights, total = _softmax(_dot(k, q, 1, 1), width, axis=0)
      weights /= total
      slopes = _dot(_keep(v, own), do, 1, 1)
      mean = jnp.sum(weights * slopes, axis=0, keepdims=True)
      slopes = (weights * (slopes - mean)).astype(q.dtype)
      scale = width**-0.5
      _collect(parts[0], window, _dot(slopes, k, 0, 0) * scale)
      _collect(parts[1], window, _dot(slopes, _keep(q, own), 1, 0) * scale)
      weights = weights.astype(q.dtype)
      _collect(parts[2], window, _dot(weights, _keep(do, own), 1, 0))
    return parts

  inputs = q_ref, k_ref, v_ref, do_ref
  _for_groups(group, width, inputs, (dq_ref, dk_ref, dv_ref))


def _for_groups(group, width, inputs, outputs):
  """Loop over the fewest heads that fill registers, for a short program."""
  from jax.experimental import pallas as pl

  lanes = inputs[0].shape[-1]
  heads = lanes // width
  step = _least(heads, width)
  while len(outputs) == 1 and step < 4 and heads % (2 * step) == 0:
    step *= 2
  step *= width

  def body(i, carry):
    begin = pl.multiple_of(i * step, step)
    parts = group(*(ref[:, pl.ds(begin, step)] for ref in inputs))
    for part, ref in zip(parts, outputs, strict=True):
      for offset, x in part.items():
        ref[:, pl.ds(begin + offset, x.shape[1])] = x.astype(ref.dtype)
    return carry

  jax.lax.fori_loop(0, lanes // step, body, 0)


def _heads(lanes, width):
  """Yield for each head the registers that contain it, and its own lanes.

  Products that include the lanes of other heads cost no more, because matrix
  units take whole registers. So the other lanes are set to 0 in one of the
  factors, and no lane is moved.
  """
  for begin in range(0, lanes, width):
    end = begin + width
    first = begin // _LANES * _LANES
    last = min(-(-end // _LANES) * _LANES, lanes)
    yield slice(first, last), (begin - first, end - first)


def _keep(x, own):
  """Set the lanes of other heads to 0."""
  if own == (0, x.shape[1]):
    return x
  lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
  return jnp.where((lane >= own[0]) & (lane < own[1]), x, jnp.zeros_like(x))


def _dot(a, b, a_dim, b_dim):
  return jax.lax.dot_general(
    a, b, (((a_dim,), (b_dim,)), ((), ())), preferred_element_type=jnp.float32
  )


def _softmax(scores, width, axis):
  """Return exp(scores / √d) up to a factor, and its sum over an axis."""
  scores -= jnp.max(scores, axis=axis, keepdims=True)
  weights = jnp.exp2(scores * (math.log2(math.e) * width**-0.5))
  return weights, jnp.sum(weights, axis=axis, keepdims=True)


def _collect(parts, window, x):
  """Add the result of a head to each register of lanes."""
  for begin in range(window.start, window.stop, _LANES):
    part = x[:, begin - window.start : begin - window.start + _LANES]
    parts[begin] = parts[begin] + part if begin in parts else part

"""LayerNorm, MLP and residual of a layer as two TPU kernels, written in Pallas.

    add_mlp(x, params, epsilon)

A program computes some tokens. What is normalised, the hidden units after GELU
and their gradients never leave the chip; the backward pass reads what entered
GELU, and sums the gradients of all parameters over its programs.

These kernels have never run on a TPU. Interpreted, they agree with the plain
layers. By the schedules of the compiler, they take 3/4 (B/16) and 5/9 (S/16) of
the time of these on v6e, and as long on v5e, see docs/compile.md.

Shapes: R tokens of all examples, D wide, M hidden units.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from vit_jax.meshes import batch_axes, is_model_axis
from vit_jax.models import pallas_attention
from vit_jax.models.attention import largest_error, mesh_of
from vit_jax.models.dense import GELU, platform
from vit_jax.models.pallas_attention import _dividing, _dot, _round_up
from vit_jax.types import UserError

# Bytes on chip that a program may hold, and that the compiler allows: v5e and
# v6e have 128 MiB.
_BUDGET, _LIMIT = 84 * 2**20, 100 * 2**20
# Largest error of `check`. Measured on a CPU: 2.6e-6 in float32, 0.098 in
# bfloat16, as products of float32 on accelerators; without half of M: 1.9.
_BOUND = 0.3
_ONES = 16  # rows of ones, whose product with gradients is their sum
_gelu = GELU['tanh']


def obstacle(x: Any, hidden: int) -> str | None:
  """Return what the kernels need and lack, or None if they can run."""
  if platform() == 'gpu':
    return 'a TPU, got a GPU'
  if x.dtype not in (jnp.bfloat16, jnp.float32):
    return f'bfloat16 or float32, got {x.dtype}'
  if x.shape[-1] % 128 or hidden % 128:
    return f'widths that 128 divides, got {x.shape[-1]} and {hidden}'
  mesh = jax.sharding.get_abstract_mesh()
  if any(is_model_axis(a) and n > 1 for a, n in mesh.shape.items()):
    return f'whole layers on each device, got {dict(mesh.shape)}'
  if not _rows(x.shape[-1], hidden, x.dtype):
    return f'narrower layers, got {x.shape[-1]} and {hidden}'
  return None


def _require(x, hidden):
  if reason := obstacle(x, hidden):
    raise UserError(
      f"attention='pallas_layer' needs {reason}. Use 'auto' or 'pallas'."
    )


def add_mlp(
  x: jax.Array, params: Mapping[str, Any], epsilon: float
) -> jax.Array:
  """Compute x + fc2(gelu(fc1(norm2(x)))) of x [B, N, D], GELU by tanh.

  `params` are those of a Block: 'norm2' with scale and bias, and 'mlp' with
  'fc1' and 'fc2'. Raises UserError if the kernels cannot run.
  """
  fc1, fc2 = params['mlp']['fc1'], params['mlp']['fc2']
  _require(x, fc1['kernel'].shape[1])
  vectors = params['norm2']['scale'], params['norm2']['bias'], fc1['bias']
  arrays = x, fc1['kernel'], fc2['kernel'], *vectors, fc2['bias']
  local: Any = functools.partial(_local, epsilon)
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.size > 1:  # the compiler cannot shard kernels
    spec = PartitionSpec(_dividing(mesh, batch_axes(mesh), len(x)))
    specs = spec, *(PartitionSpec() for _ in arrays[1:])
    local = jax.shard_map(
      local, in_specs=specs, out_specs=spec, check_vma=False
    )
  return local(*arrays)


def _local(epsilon, x, *params):
  # The compiler keeps the tokens of all examples next to each other.
  rows = x.swapaxes(0, 1)
  out = _add_mlp(epsilon, rows.reshape(-1, x.shape[-1]), *params)
  return out.reshape(rows.shape).swapaxes(0, 1)


def check(width: int, hidden: int, dtype: Any, device: jax.Device) -> float:
  """Return the error of the kernels and their gradients, as attention.check.

  It is that of few tokens, from the formula in float32. Raises UserError if the
  kernels cannot run on the mesh that is set.
  """
  _require(jax.ShapeDtypeStruct((1, 1, width), dtype), hidden)
  rng, std = np.random.default_rng(0), width**-0.5
  shapes = [(2, 13, width), (2, 13, width), (width, hidden), (hidden, width)]
  shapes += [(n,) for n in (width, width, hidden, width)]
  scales = [1, 1, std, std, 1, 1, 1, 1]
  inputs = [
    jax.device_put(scale * rng.standard_normal(shape, np.float32), device)
    for shape, scale in zip(shapes, scales)
  ]

  def formula(x, w1, w2, *vectors):
    scale, shift, b1, b2 = (a[None, None] for a in vectors)
    normalized, _ = _normalized(x, 1e-6)
    return x + _gelu((normalized * scale + shift) @ w1 + b1) @ w2 + b2

  @functools.partial(jax.jit, static_argnums=0)
  def results(function, x, gradient, *params):
    out, pull = jax.vjp(function, x, *params)
    found = out, *pull(gradient.astype(out.dtype))
    return [a.astype(jnp.float32) for a in found]

  with jax.set_mesh(mesh_of(device)):
    rounded = [x.astype(dtype) for x in inputs[:2]]
    exact = [x.astype(jnp.float32) for x in rounded]
    found = results(functools.partial(_local, 1e-6), *rounded, *inputs[2:])
    with jax.default_matmul_precision('highest'):
      expected = results(formula, *exact, *inputs[2:])
  return largest_error(found, expected, _BOUND)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _add_mlp(epsilon, x, *params):
  return _forward(epsilon, x, params, save=False)[0]


def _add_mlp_forward(epsilon, x, *params):
  y, hidden = _forward(epsilon, x, params, save=True)
  return y, (x, hidden, params)


def _add_mlp_backward(epsilon, saved, gradient):
  x, hidden, (w1, w2, scale, shift, b1, _) = saved
  (rows, width), dtype = x.shape, x.dtype
  constants = w1.astype(dtype), w2.astype(dtype), scale[None], shift[None]
  out = [
    jax.ShapeDtypeStruct(x.shape, dtype),
    *[jax.ShapeDtypeStruct(w1.shape, jnp.float32)] * 2,
    jax.ShapeDtypeStruct((_ONES, len(b1)), jnp.float32),
    jax.ShapeDtypeStruct((8, width), jnp.float32),
  ]
  kernel = functools.partial(_backward_kernel, epsilon, rows)
  dx, dw1, dw2, db1, others = _call(
    kernel, 'mlp_backward', (x, gradient, hidden), constants, out, 1
  )
  return dx, dw1, dw2.T, others[0], others[1], db1[0], others[2]


_add_mlp.defvjp(_add_mlp_forward, _add_mlp_backward)


def _forward(epsilon, x, params, save):
  w1, w2, scale, shift, b1, b2 = params
  constants = w1.astype(x.dtype), w2.astype(x.dtype)
  constants += scale[None], shift[None], b1[None], b2[None]
  out = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
  if save:
    out.append(jax.ShapeDtypeStruct((len(x), len(b1)), x.dtype))
  kernel = functools.partial(_forward_kernel, epsilon)
  return _call(kernel, 'mlp_forward', (x,), constants, out, len(out))


def _chunk(hidden):
  """Return the hidden units that are computed at a time."""
  return max(n for n in range(128, 769, 128) if hidden % n == 0)


def _rows(width, hidden, dtype):
  """Return the tokens of a program, or 0 if too few fit on the chip."""
  size = jnp.dtype(dtype).itemsize
  # Two buffers of kernels and their gradients; per token two of x, its gradient
  # and that of the result, of hidden units, and what a chunk computes.
  fixed = 4 * width * hidden * (size + 4)
  each = 8 * size * width + 4 * width + 2 * size * hidden + 16 * _chunk(hidden)
  return (
    min((_BUDGET - fixed) // each // 256 * 256, 1792) if fixed < _BUDGET else 0
  )


def _call(kernel, name, rows, constants, out, split):
  """Run a kernel on blocks of `rows` and of the first `split` results."""
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  x, hidden = rows[0], constants[0].shape[1]
  (count, width), size = x.shape, x.dtype.itemsize
  block = min(_rows(width, hidden, x.dtype), _round_up(count, 32 // size))

  def parts(array):
    return pl.BlockSpec((block, array.shape[1]), lambda i: (i, 0))

  def whole(array):
    return pl.BlockSpec(array.shape, lambda i: (0, 0))

  products = 2 if name == 'mlp_forward' else 4
  moved = (*rows, *constants, *out)
  call = functools.partial(
    pl.pallas_call,
    kernel,
    grid=(pl.cdiv(count, block),),
    in_specs=[*map(parts, rows), *map(whole, constants)],
    out_specs=[*map(parts, out[:split]), *map(whole, out[split:])],
    out_shape=out,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('arbitrary',), vmem_limit_bytes=_LIMIT
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * products * count * width * hidden,
      transcendentals=count * hidden,
      bytes_accessed=sum(a.size * a.dtype.itemsize for a in moved),
    ),
    name=name,
  )
  interpreted = call(interpret=pallas_attention.INTERPRET)
  return jax.lax.platform_dependent(
    *rows, *constants, tpu=call(), cpu=interpreted
  )


def _normalized(x, epsilon):
  """Return (x - mean) / std and 1 / std of float32 tokens [..., D]."""
  x -= jnp.mean(x, axis=-1, keepdims=True)
  inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
  return x * inverse, inverse


def _chunks(hidden):
  step = _chunk(hidden)
  return [slice(begin, begin + step) for begin in range(0, hidden, step)]


def _forward_kernel(epsilon, x_, w1, w2, scale, shift, b1, b2, y, *saved):
  """Compute y [R, D] of x, and write what enters GELU, [R, M], to `saved`."""
  dtype, x = x_.dtype, x_[...].astype(jnp.float32)
  tokens = (_normalized(x, epsilon)[0] * scale[...] + shift[...]).astype(dtype)
  total = x + b2[...]
  for part in _chunks(w1.shape[1]):
    hidden = (_dot(tokens, w1[:, part], 1, 0) + b1[:, part]).astype(dtype)
    for ref in saved:
      ref[:, part] = hidden
    total += _dot(_gelu(hidden), w2[part], 1, 0)
  y[...] = total.astype(dtype)


def _backward_kernel(
  epsilon, rows, x_, dy_, hidden_, w1, w2, scale, shift, *out
):
  """Compute dx [R, D], and add the gradients of the parameters.

  `out` are dx; those of the kernels, float32 [D, M] each; of the bias of fc1,
  in all rows of [_ONES, M]; of scale, shift and the bias of fc2, [8, D].
  """
  from jax.experimental import pallas as pl

  dx, dw1, dw2, db1, others = out

  @pl.when(pl.program_id(0) == 0)
  def _():
    for ref in out[1:]:
      ref[...] = jnp.zeros_like(ref)

  dtype, count = x_.dtype, len(x_)
  row = jax.lax.broadcasted_iota(jnp.int32, (count, 1), 0)
  is_token = row + pl.program_id(0) * count < rows

  def read(x):  # what lies after the last token may be anything
    x = x.astype(jnp.float32)
    return jnp.where(is_token, x, 0) if rows % count else x

  x, dy = read(x_[...]), read(dy_[...])
  normalized, inverse = _normalized(x, epsilon)
  tokens = (normalized * scale[...] + shift[...]).astype(dtype)
  ones = jnp.ones((_ONES, count), dtype)
  tokens = jnp.concatenate([tokens.T, ones])
  rounded = dy.astype(dtype)
  turned = rounded.T
  gradient = jnp.zeros_like(x)
  for part in _chunks(w1.shape[1]):
    active, pull = jax.vjp(_gelu, read(hidden_[:, part]).astype(dtype))
    dw2[:, part] += _dot(turned, active, 1, 0)
    (slope,) = pull(_dot(rounded, w2[part], 1, 1).astype(dtype))
    sums = _dot(tokens, slope, 1, 0)
    dw1[:, part] += sums[:-_ONES]
    db1[:, part] += sums[-_ONES:]
    gradient += _dot(slope, w1[:, part], 1, 1)

  def add(i, x):
    others[i : i + 1] += jnp.sum(x, axis=0, keepdims=True)

  add(0, gradient * normalized)
  add(1, gradient)
  add(2, dy)
  gradient *= scale[...]
  mean = jnp.mean(gradient, axis=1, keepdims=True)
  slope = jnp.mean(gradient * normalized, axis=1, keepdims=True)
  total = dy + inverse * (gradient - mean - normalized * slope)
  dx[...] = total.astype(dtype)

"""Attention of short sequences as one TPU kernel, written in Pallas.

    attend(q, k, v)

The scores of a head never leave the chip: one program of the grid processes all
tokens of one example, for some or all of its heads. It reads queries, keys and
values as the projections write them, [B, N, h * d], so that heads are not
transposed. Only q, k and v are saved for the backward pass, which computes the
attention weights again. About 730 tokens of bfloat16 fit: H/14 at 378 px.

This kernel has never run on a TPU. Interpret mode agrees with float64, a
simulation of a TPU's memory finds no race and no access out of bounds, and the
compiler accepts it for v4, v5e, v5p and v6e.

Shapes: B examples, N tokens, h heads of dimension d, W lanes of a program.
"""

import collections
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from vit_jax.meshes import batch_axes, is_model_axis
from vit_jax.models.dense import platform
from vit_jax.types import UserError

_LANES = 128  # of a vector register; matrix units have as many columns
# Bytes on chip that a program may hold, and that the compiler allows.
_BUDGET, _LIMIT = 14 * 2**20, 16 * 2**20
# Heads that begin before one ends, and scores of a program without a loop.
_AHEAD, _UNROLLED = 2, 2**20
# How CPUs run the kernels: True, or pltpu.InterpretParams, a slow simulation.
INTERPRET: Any = True


def attend(
  q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array | None = None
) -> jax.Array:
  """Compute softmax(q kᵀ / √d) v, each [B, N, h, d], with a float32 softmax.

  `lengths`, int32 [B], are the keys of each example before padding.

  Within `with jax.set_mesh(mesh)`, examples are sharded over the batch axes,
  and heads over the others, if these divide them. Without a mesh, the arrays
  must be on one device. On CPUs the kernels are interpreted, for tests.
  """
  if reason := obstacle(q, k, v):
    raise UserError(
      f"attention='pallas' needs {reason}. Use 'auto', 'xla' or 'einsum'."
    )
  *_, heads, width = q.shape
  # Heads are merged outside: within, the compiler would write the products
  # before and after in a layout with heads apart, and copy them.
  arrays = [x.reshape(*x.shape[:2], heads * width) for x in (q, k, v)]
  run: Any = functools.partial(_attend, width)
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.size > 1:  # the compiler cannot shard kernels
    names = tuple(a for a in mesh.axis_names if is_model_axis(a))
    examples = dividing(mesh, batch_axes(mesh), len(q))
    spec = PartitionSpec(examples, None, dividing(mesh, names, heads))
    # The check of replicated values (check_vma) does not support kernels.
    specs = spec, spec, spec, PartitionSpec(examples)
    run = jax.shard_map(run, in_specs=specs, out_specs=spec, check_vma=False)
  return run(*arrays, lengths).reshape(q.shape)


def dividing(mesh: Any, names: tuple[str, ...], size: int) -> tuple[str, ...]:
  """Return the axes, or () if they do not divide a size."""
  return names if size % math.prod(mesh.shape[n] for n in names) == 0 else ()


def obstacle(q: Any, k: Any, v: Any) -> str | None:
  """Return what the kernel needs and lacks, or None if it can run."""
  if platform() == 'gpu':
    return 'a TPU, got a GPU'
  if not q.shape == k.shape == v.shape:
    return f'arrays of one shape, got {q.shape}, {k.shape} and {v.shape}'
  if q.dtype not in (jnp.bfloat16, jnp.float32):
    return f'bfloat16 or float32, got {q.dtype}'
  _, tokens, heads, width = q.shape
  if _plan(tokens, heads, width, q.dtype).held > _BUDGET:
    return f'fewer tokens, got {tokens}, which do not fit on the chip'
  return None


class _Plan(NamedTuple):
  heads: int  # those of a program
  width: int  # head dimension of the arrays, which may be padded
  step: int  # heads of one iteration
  ahead: int  # heads that begin before one ends
  held: int  # bytes on chip in the backward pass


def _plan(tokens, heads, width, dtype):
  """Return the plan with the fewest programs that fits on the chip.

  If none fits, heads are padded to whole registers, which may not fit either.
  """
  rows, keys = round_up(tokens, 16), round_up(tokens, _LANES)

  def plans(width, ahead):
    least = _least(heads, width)
    counts = [n for n in range(least, heads + 1, least) if heads % n == 0]
    for n in reversed(counts):
      short = [x for x in counts if x * rows * keys <= _UNROLLED]
      step = max((x for x in short if n % x == 0), default=least)
      # Two buffers of q, do, dq, k, v, dk and dv, and arrays of scores.
      lanes = round_up(n * width, _LANES)
      held = 14 * jnp.dtype(dtype).itemsize * rows * lanes
      held += 4 * (5 + 2 * min(ahead, step - 1)) * rows * keys
      yield _Plan(n, width, step, ahead, held)

  aligned = _LANES % width == 0 and _least(heads, width) * width % _LANES == 0
  padded = width if aligned else round_up(width, _LANES)
  both = itertools.product((width, padded), (_AHEAD, 0))
  found = [plan for each, ahead in both for plan in plans(each, ahead)]
  return next((plan for plan in found if plan.held <= _BUDGET), found[-1])


def round_up(n: int, unit: int) -> int:
  """Return the least multiple of unit that is not below n."""
  return -(-n // unit) * unit


def _least(heads, width):
  """Return the fewest heads that fill whole registers, else all heads."""
  least = _LANES // math.gcd(width, _LANES)
  return heads if heads % least else least


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(width, q, k, v, lengths):
  return _call(_forward, width, (q, k, v), lengths)[0]


def _attend_forward(width, *arrays):
  return _attend(width, *arrays), arrays


def _attend_backward(width, saved, gradient):
  q, k, v, lengths = saved
  return *_call(_backward, width, (q, gradient, k, v), lengths), None


_attend.defvjp(_attend_forward, _attend_backward)


def _call(kernel, width, arrays, lengths):
  """Run _forward or _backward on [B, N, h * width] each."""
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  batch, tokens, lanes = arrays[0].shape
  dtype, heads = arrays[0].dtype, lanes // width
  plan = _plan(tokens, heads, width, dtype)
  arrays = [_pad_heads(x, width, plan.width) for x in arrays]
  block = pl.BlockSpec(
    (None, tokens, plan.heads * plan.width),
    lambda example, group, *_: (example, 0, group),
  )
  forward = kernel is _forward
  out = [jax.ShapeDtypeStruct(arrays[0].shape, dtype)] * (1 if forward else 3)
  flops = (4 if forward else 10) * batch * tokens**2
  prefetched = [] if lengths is None else [lengths]

  def program(*refs):
    first, count = len(prefetched), len(prefetched) + len(arrays)
    length = refs[0][pl.program_id(0)] if prefetched else None
    kernel(plan, width**-0.5, length, refs[first:count], refs[count:])

  call = functools.partial(
    pl.pallas_call,
    program,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(prefetched),
      grid=(batch, heads // plan.heads),
      in_specs=[block] * len(arrays),
      out_specs=[block] * len(out),
    ),
    out_shape=out,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'parallel'), vmem_limit_bytes=_LIMIT
    ),
    cost_estimate=pl.CostEstimate(
      flops=flops * heads * width,
      transcendentals=batch * tokens**2 * heads,
      bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*arrays, *out)),
    ),
    name=f'attention{kernel.__name__}',
  )
  found = jax.lax.platform_dependent(
    *prefetched, *arrays, tpu=call(), cpu=call(interpret=INTERPRET)
  )
  return [_pad_heads(x, plan.width, width) for x in found]


def _pad_heads(x, width, new):
  """Pad or cut head dimensions: [B, N, h * width] -> [B, N, h * new]."""
  if width == new:
    return x
  x = x.reshape(*x.shape[:2], -1, width)
  x = jnp.pad(x, ((0, 0),) * 3 + ((0, max(new - width, 0)),))[..., :new]
  return x.reshape(*x.shape[:2], -1)


def _forward(plan, scale, length, qkv, out):
  """Compute outputs of the heads of one example, [N, W] each."""

  def group(q, k, v):
    parts = {}

    def head(window, own):
      scores = dot(q[:, window], _keep(k[:, window], own), 1, 1)
      yield
      weights, total = _softmax(scores, scale, 1, length)
      out = dot(weights.astype(v.dtype), _keep(v[:, window], own), 1, 0)
      _collect(parts, window, out / total)

    _stagger(plan, head, q.shape[-1])
    return (parts,)

  _for_groups(group, plan, qkv, out)


def _backward(plan, scale, length, inputs, gradients):
  """Compute gradients of the heads of one example, [N, W] each.

  Scores are transposed, [keys, queries]. Then sums over keys are sums of
  registers, and only one of the three gradients needs a transposed operand.
  `inputs` are q, do, k and v, `gradients` those of q, k and v.
  """

  def group(q, do, k, v):
    parts = {}, {}, {}

    def head(window, own):
      q_, do_, k_, v_ = (x[:, window] for x in (q, do, k, v))
      k_ = _keep(k_, own)
      scores = dot(k_, q_, 1, 1)
      slopes = dot(_keep(v_, own), do_, 1, 1)
      yield
      weights, total = _softmax(scores, scale, 0, length)
      weights /= total
      mean = jnp.sum(weights * slopes, axis=0, keepdims=True)
      slopes = (weights * (slopes - mean)).astype(q.dtype)
      _collect(parts[0], window, dot(slopes, k_, 0, 0) * scale)
      _collect(parts[1], window, dot(slopes, _keep(q_, own), 1, 0) * scale)
      weights = weights.astype(q.dtype)
      _collect(parts[2], window, dot(weights, _keep(do_, own), 1, 0))

    _stagger(plan, head, q.shape[-1])
    return parts

  _for_groups(group, plan, inputs, gradients)


def _stagger(plan, head, lanes):
  """Run the generators head(...), which yield once, for all heads of lanes.

  Units compute products in the order of the program. So the first ones of a
  head come before the last ones of an earlier head, and hide its softmax.
  """
  begun = collections.deque[Any]()
  for each in itertools.starmap(head, _heads(lanes, plan.width)):
    next(each)
    begun.append(each)
    if len(begun) > plan.ahead:
      next(begun.popleft(), None)
  for each in begun:
    next(each, None)


def _for_groups(group, plan, inputs, outputs):
  """Loop over groups of heads, for a short program."""
  from jax.experimental import pallas as pl

  count, step = plan.heads // plan.step, plan.step * plan.width

  def body(i, carry):
    begin = pl.multiple_of(i * step, step)
    parts = group(*(ref[:, pl.ds(begin, step)] for ref in inputs))
    for part, ref in zip(parts, outputs, strict=True):
      for offset, x in part.items():
        ref[:, pl.ds(begin + offset, x.shape[1])] = x.astype(ref.dtype)
    return carry

  jax.lax.fori_loop(0, count, body, 0)


def _heads(lanes, width):
  """Yield for each head the registers that contain it, and its own lanes.

  Matrix units take whole registers, so products with the lanes of other heads
  cost no more: these lanes are 0 in one factor, and no lane is moved.
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


def dot(a: Any, b: Any, a_dim: int, b_dim: int) -> jax.Array:
  """Return the float32 product of two matrices, over these dimensions."""
  return jax.lax.dot_general(
    a, b, (((a_dim,), (b_dim,)), ((), ())), preferred_element_type=jnp.float32
  )


def _softmax(scores, scale, axis, length):
  """Return exp(scale * scores) up to a factor, and its sum over the keys."""
  if length is not None:
    key = jax.lax.broadcasted_iota(jnp.int32, scores.shape, axis)
    scores = jnp.where(key < length, scores, -1e30)
  scores -= jnp.max(scores, axis=axis, keepdims=True)
  weights = jnp.exp2(scores * (math.log2(math.e) * scale))
  return weights, jnp.sum(weights, axis=axis, keepdims=True)


def _collect(parts, window, x):
  """Add the result of a head to each register of lanes."""
  for begin in range(window.start, window.stop, _LANES):
    part = x[:, begin - window.start : begin - window.start + _LANES]
    parts[begin] = parts[begin] + part if begin in parts else part

"""Layers of the encoder as TPU kernels, written in Pallas.

    with_kernels(model)

Three kernels, and three for the gradients: norm and projections to queries,
keys and values; attention, see pallas_attention.py; and all that follows. What
is normalised, the hidden units after GELU and their gradients never leave the
chip; the backward pass reads what entered GELU. All arrays keep the order
[B, N, D], so that nothing is transposed, if 8 divides N.

These kernels have never run on a TPU. Interpreted, they agree with the plain
layers. What they take by the schedules of the compiler is in docs/compile.md.

Shapes: B examples, N tokens, R = B * N, D wide, M hidden units, h heads.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from vit_jax.meshes import batch_axes, is_model_axis
from vit_jax.models import pallas_attention
from vit_jax.models.attention import attention
from vit_jax.models.dense import (
  GELU,
  BlockOptions,
  keep_batch_split,
  platform,
)
from vit_jax.models.pallas_attention import _dividing, _dot, _round_up
from vit_jax.models.vit import Block, Layers
from vit_jax.types import UserError

# Bytes on chip that a program may hold, and that the compiler allows: v5e and
# v6e have 128 MiB.
_BUDGET, _LIMIT = 84 * 2**20, 100 * 2**20
_CHUNK = 768  # hidden units that are computed at a time, at most
_ONES = 16  # rows of ones, whose product with gradients is their sum
_gelu = GELU['tanh']


def with_kernels(model: Any) -> Any:
  """Return a ViT whose layers are kernels; UserError if it has other Layers."""
  if model.layers not in (None, KernelLayers()):
    raise _needs(f'layers one after the other, got {model.layers}')
  return model.clone(layers=KernelLayers(), attention='pallas')


@dataclasses.dataclass(frozen=True)
class KernelLayers(Layers):
  """Layers of kernels, whose tokens fill whole registers."""

  def layer(self, model: Any) -> type[nn.Module]:
    if model.layer is not Block:
      raise _needs(f'layers of the paper, got {model.layer.__name__}')
    return KernelBlock

  def __call__(
    self, model: Any, x: jax.Array, *, shared: Any = (), **options: Any
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    tokens = x.shape[1]
    x, shared = pad(x, *shared)
    x, outputs = super().__call__(model, x, shared=shared, **options)
    return jax.tree.map(lambda x: x[:, :tokens], (x, outputs))


class KernelBlock(Block):
  """A Block that is computed by kernels."""

  def __call__(
    self,
    x: jax.Array,
    drop_rate: Any = None,
    shared: Any = None,
    lengths: jax.Array | None = None,
  ) -> jax.Array:
    if self.is_initializing():
      return super().__call__(x, drop_rate, shared, lengths)
    free, plain = ('norm_eps', 'init_std', 'attention_dropout'), BlockOptions()
    given = {k: v for k, v in vars(self.options).items() if k not in free}
    other = {k: v for k, v in given.items() if v != getattr(plain, k)}
    if other or self.posemb:
      raise _needs(f'layers of the paper, got {other or self.posemb}')
    dropout = self.dropout or self.options.attention_dropout
    if drop_rate is not None or (dropout and self.train):
      raise _needs('a model without dropout and stochastic depth')
    params, epsilon = self.variables['params'], self.options.norm_eps
    x = keep_batch_split(x)
    return layer(x, params, self.num_heads, epsilon, lengths)


def _needs(what):
  return UserError(f'KernelLayers need {what}. Leave model.layers out.')


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
  width, size = x.shape[-1], x.dtype.itemsize
  if not _rows(width * (width + 2 * hidden), 5 * width + hidden, width, size):
    return f'narrower layers, got {width} and {hidden}'
  return None


def pad(
  x: jax.Array, shared: Any, lengths: jax.Array | None
) -> tuple[jax.Array, tuple[Any, jax.Array | None]]:
  """Pad x [B, N, D] to whole registers, of 8 tokens each.

  Returns x, and what layers also get: `shared`, and lengths.
  """
  batch, tokens, _ = x.shape
  if not (added := -tokens % 8):
    return x, (shared, lengths)
  lengths = jnp.full(batch, tokens, jnp.int32) if lengths is None else lengths
  return jnp.pad(x, ((0, 0), (0, added), (0, 0))), (shared, lengths)


def layer(
  x: jax.Array,
  params: Mapping[str, Any],
  heads: int,
  epsilon: float,
  lengths: jax.Array | None = None,
) -> jax.Array:
  """Compute a layer of the paper (equations 2 and 3): [B, N, D] -> [B, N, D].

  `params` are those of a Block, `lengths` int32 [B] the tokens of each example
  before padding. GELU is by tanh. Raises UserError if the kernels cannot run.
  """
  attn, fc1, fc2 = params['attn'], params['mlp']['fc1'], params['mlp']['fc2']
  if reason := obstacle(x, fc1['kernel'].shape[1]):
    raise _needs(reason)
  width = x.shape[-1]
  square, vector = (width, width), (width,)
  first = [attn[name] for name in ('query', 'key', 'value')]
  x, *qkv = _sharded(
    functools.partial(_project, epsilon),
    [x],
    *(each['kernel'].reshape(square) for each in first),
    *(params['norm1']['scale'], params['norm1']['bias']),
    *(each['bias'].reshape(vector) for each in first),
  )
  q, k, v = (y.reshape(*x.shape[:2], heads, -1) for y in qkv)
  y = attention(q, k, v, implementation='pallas', lengths=lengths)
  (y,) = _sharded(
    functools.partial(_finish, epsilon),
    [x, y.reshape(x.shape)],
    attn['out']['kernel'].reshape(square),
    *(fc1['kernel'], fc2['kernel']),
    *(params['norm2']['scale'], params['norm2']['bias']),
    *(attn['out']['bias'], fc1['bias'], fc2['bias']),
  )
  return y


def _sharded(function, arrays, *params):
  """Run function([R, D], ..., *params) on the examples of each device."""

  def local(arrays, *params):
    found = function(*(x.reshape(-1, x.shape[-1]) for x in arrays), *params)
    return [x.reshape(arrays[0].shape) for x in found]

  mesh = jax.sharding.get_abstract_mesh()
  if mesh.size > 1:  # the compiler cannot shard kernels
    spec = PartitionSpec(_dividing(mesh, batch_axes(mesh), len(arrays[0])))
    specs = spec, *(PartitionSpec() for _ in params)
    local = jax.shard_map(
      local, in_specs=specs, out_specs=spec, check_vma=False
    )
  return local(arrays, *params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(epsilon, x, *params):
  """Return x, whose gradient the kernel adds to its own, then q, k and v."""
  return x, *_call(_project_forward, epsilon, [x], params, [x] * 3)


def _project_saved(epsilon, x, *params):
  return _project(epsilon, x, *params), (x, params)


def _project_gradients(epsilon, saved, gradients):
  x, params = saved
  shapes = [shape for w in params[:3] for shape in _dense(w)]
  dx, *found, others = _call(
    _project_backward, epsilon, [x, *gradients], params[:5], [x], shapes
  )
  biases = [sums[0] for sums in found[1::2]]
  return dx, *found[::2], others[0], others[1], *biases


_project.defvjp(_project_saved, _project_gradients)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _finish(epsilon, x, y, *params):
  """Return the output of the layer, of x and what attention returned."""
  return _call(_mlp_forward, epsilon, [x, y], params, [x])


def _finish_saved(epsilon, x, y, *params):
  hidden = jax.ShapeDtypeStruct((len(x), len(params[6])), x.dtype)
  out, hidden = _call(_mlp_forward, epsilon, [x, y], params, [x, hidden])
  return [out], (x, y, hidden, params)


def _finish_gradients(epsilon, saved, gradients):
  x, y, hidden, (wo, w1, w2, *vectors) = saved
  shapes = [*_dense(wo), *_dense(w1), w1.shape]
  rows, constants = [x, y, *gradients, hidden], (wo, w1, w2, *vectors[:3])
  dx, dy, dwo, dbo, dw1, db1, dw2, others = _call(
    _mlp_backward, epsilon, rows, constants, [x, y], shapes
  )
  biases = dbo[0], db1[0], others[2]
  return dx, dy, dwo, dw1, dw2.T, others[0], others[1], *biases


_finish.defvjp(_finish_saved, _finish_gradients)


def _dense(kernel):
  """Return the shapes of the sums that `_add_dense` adds to."""
  return kernel.shape, (_ONES, kernel.shape[1])


def _chunks(hidden):
  """Return slices of the hidden units that are computed at a time."""
  step = max(n for n in range(128, _CHUNK + 1, 128) if hidden % n == 0)
  return [slice(begin, begin + step) for begin in range(0, hidden, step)]


def _rows(kernels, elements, width, size):
  """Return the tokens of a program, or 0 if too few fit on the chip.

  `kernels` are elements of kernels, which fit with their gradients; `elements`
  are those of a token in two buffers, with what is computed for it.
  """
  left = _BUDGET - kernels * (size + 4)
  each = 2 * size * elements + 20 * width + 16 * _CHUNK
  return max(0, min(left // each // 256 * 256, 1792))


def _call(kernel, epsilon, rows, params, out, sums=()):
  """Run a kernel on blocks of `rows`, with results like `out` and `sums`.

  `sums` are the shapes of float32 sums over all tokens; one more, [8, D], are
  those for parameters of one dimension.
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  x, (count, width) = rows[0], rows[0].shape
  kernels = sum(w.size for w in params if w.ndim == 2)
  elements, size = sum(a.shape[1] for a in (*rows, *out)), x.dtype.itemsize
  params = [w.astype(x.dtype) if w.ndim == 2 else w[None] for w in params]
  sums = [jax.ShapeDtypeStruct(s, jnp.float32) for s in sums]
  if sums:
    sums.append(jax.ShapeDtypeStruct((8, width), jnp.float32))
  most = _rows(kernels, elements, width, size)
  programs = pl.cdiv(count, most)
  block = min(most, _round_up(pl.cdiv(count, programs), 128))

  def parts(array):
    return pl.BlockSpec((block, array.shape[1]), lambda i: (i, 0))

  def whole(array):
    once = pl.Buffered(1)
    return pl.BlockSpec(array.shape, lambda i: (0, 0), pipeline_mode=once)

  moved = (*rows, *params, *out, *sums)
  out_shape = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*out, *sums)]
  call = functools.partial(
    pl.pallas_call,
    functools.partial(kernel, epsilon, *[count] * bool(sums)),
    grid=(pl.cdiv(count, block),),
    in_specs=[*map(parts, rows), *map(whole, params)],
    out_specs=[*map(parts, out), *map(whole, sums)],
    out_shape=out_shape,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('arbitrary',), vmem_limit_bytes=_LIMIT
    ),
    cost_estimate=pl.CostEstimate(
      flops=(4 if sums else 2) * count * kernels,
      transcendentals=0,  # few beside the products
      bytes_accessed=sum(a.size * a.dtype.itemsize for a in moved),
    ),
    name=kernel.__name__[1:],
  )
  interpreted = call(interpret=pallas_attention.INTERPRET)
  found = jax.lax.platform_dependent(
    *rows, *params, tpu=call(), cpu=interpreted
  )
  return list(found)  # within scan it is a tuple


def _norm(x, epsilon, scale, shift, dtype):
  """Return the norm of float32 tokens [R, D], (x - mean) / std and 1 / std."""
  x -= jnp.mean(x, axis=-1, keepdims=True)
  inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
  normalized = x * inverse
  tokens = (normalized * scale[...] + shift[...]).astype(dtype)
  return tokens, normalized, inverse


def _norm_gradient(gradient, normalized, inverse, scale, sums):
  """Return the gradient of what was normalised, and add those of the norm."""
  _add(sums, 0, gradient * normalized)
  _add(sums, 1, gradient)
  gradient *= scale[...]
  mean = jnp.mean(gradient, axis=1, keepdims=True)
  slope = jnp.mean(gradient * normalized, axis=1, keepdims=True)
  return inverse * (gradient - mean - normalized * slope)


def _add(sums, i, x):
  sums[i : i + 1] += jnp.sum(x, axis=0, keepdims=True)


def _turned(x):
  """Return x [R, D] transposed, and ones, [D + _ONES, R]."""
  return jnp.concatenate([x.T, jnp.ones((_ONES, len(x)), x.dtype)])


def _add_dense(kernel, bias, turned, slope, part=slice(None)):
  """Add the gradients of a kernel and its bias, in all rows of [_ONES, .]."""
  sums = _dot(turned, slope, 1, 0)
  kernel[:, part] += sums[:-_ONES]
  bias[:, part] += sums[-_ONES:]


def _begin(rows, x, sums):
  """Return a function that reads a block, and 0 after the last token.

  Before, set the sums to 0 in the first program.
  """
  from jax.experimental import pallas as pl

  @pl.when(pl.program_id(0) == 0)
  def _():
    for ref in sums:
      ref[...] = jnp.zeros_like(ref)

  count = len(x)
  row = jax.lax.broadcasted_iota(jnp.int32, (count, 1), 0)
  is_token = row + pl.program_id(0) * count < rows

  def read(x):  # what lies after the last token may be anything
    x = x.astype(jnp.float32)
    return jnp.where(is_token, x, 0) if rows % count else x

  return read


def _project_forward(epsilon, x, wq, wk, wv, scale, shift, bq, bk, bv, *out):
  """Compute queries, keys and values [R, D] of x [R, D]."""
  tokens, *_ = _norm(x[...].astype('float32'), epsilon, scale, shift, x.dtype)
  for kernel, bias, ref in zip((wq, wk, wv), (bq, bk, bv), out, strict=True):
    ref[...] = (_dot(tokens, kernel[...], 1, 0) + bias[...]).astype(ref.dtype)


def _project_backward(
  epsilon, rows, x, dx, dq, dk, dv, wq, wk, wv, scale, shift, total, *sums
):
  """Compute the gradient `total` [R, D] of x, and add those of parameters.

  `dx` is the gradient of x by what follows. `sums` are those of each kernel and
  its bias, [D, D] and [_ONES, D], and those of scale and shift, [8, D].
  """
  read = _begin(rows, x, sums)
  tokens, *norm = _norm(read(x[...]), epsilon, scale, shift, x.dtype)
  tokens, gradient = _turned(tokens), jnp.zeros(x.shape, jnp.float32)
  pairs = zip(sums[::2], sums[1::2])
  for slope, kernel, pair in zip((dq, dk, dv), (wq, wk, wv), pairs):
    slope = read(slope[...]).astype(x.dtype)
    _add_dense(*pair, tokens, slope)
    gradient += _dot(slope, kernel[...], 1, 1)
  gradient = _norm_gradient(gradient, *norm, scale, sums[-1])
  total[...] = (read(dx[...]) + gradient).astype(x.dtype)


def _mlp_forward(
  epsilon, x, y, wo, w1, w2, scale, shift, bo, b1, b2, out, *saved
):
  """Compute the output [R, D] of x and y [R, D], what attention returned.

  What enters GELU, [R, M], is written to `saved`, if there is one.
  """
  dtype = x.dtype
  total = x[...].astype(jnp.float32) + _dot(y[...], wo[...], 1, 0) + bo[...]
  tokens, *_ = _norm(total, epsilon, scale, shift, dtype)
  total += b2[...]
  for part in _chunks(w1.shape[1]):
    hidden = (_dot(tokens, w1[:, part], 1, 0) + b1[:, part]).astype(dtype)
    for ref in saved:
      ref[:, part] = hidden
    total += _dot(_gelu(hidden), w2[part], 1, 0)
  out[...] = total.astype(dtype)


def _mlp_backward(
  epsilon, rows, x, y, dout, hidden, wo, w1, w2, scale, shift, bo, dx, dy, *sums
):
  """Compute the gradients of x and y [R, D], and add those of parameters.

  `sums` are those of two kernels and biases, [D, D], [_ONES, D], [D, M] and
  [_ONES, M]; of the last one, [D, M]; of scale, shift and its bias, [8, D].
  """
  dwo, dbo, dw1, db1, dw2, others = sums
  read, dtype = _begin(rows, x, sums), x.dtype
  attended, dout = read(y[...]).astype(dtype), read(dout[...])
  total = read(x[...]) + _dot(attended, wo[...], 1, 0) + bo[...]
  tokens, *norm = _norm(total, epsilon, scale, shift, dtype)
  tokens, gradient = _turned(tokens), jnp.zeros_like(total)
  rounded = dout.astype(dtype)
  turned = rounded.T
  for part in _chunks(w1.shape[1]):
    active, pull = jax.vjp(_gelu, read(hidden[:, part]).astype(dtype))
    dw2[:, part] += _dot(turned, active, 1, 0)
    (slope,) = pull(_dot(rounded, w2[part], 1, 1).astype(dtype))
    _add_dense(dw1, db1, tokens, slope, part)
    gradient += _dot(slope, w1[:, part], 1, 1)
  _add(others, 2, dout)
  total = dout + _norm_gradient(gradient, *norm, scale, others)
  rounded = total.astype(dtype)
  dx[...] = rounded
  _add_dense(dwo, dbo, _turned(attended), rounded)
  dy[...] = _dot(rounded, wo[...], 1, 1).astype(dtype)

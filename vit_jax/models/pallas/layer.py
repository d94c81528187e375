"""Layers of the encoder as TPU kernels, written in Pallas.

    with_kernels(model)

Three kernels, and three for the gradients: norm and projections to queries,
keys and values; attention, see attention.py; and all that follows. What
is normalised, the hidden units after GELU and their gradients never leave the
chip; the backward pass reads what entered GELU. All arrays keep the order
[B, N, D], so that nothing is transposed, if 8 divides N.

These kernels have never run on a TPU. Interpreted, they agree with the plain
layers. What they take by the schedules of the compiler is in docs/compile.md.

Shapes: B examples, N tokens, R = B * N, D wide, M hidden units, h heads.
"""

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from vit_jax.meshes import batch_axes, is_model_axis
from vit_jax.models.attention import attention
from vit_jax.models.dense import GELU, BlockOptions, keep_batch_split, platform
from vit_jax.models.pallas import attention as attention_kernel
from vit_jax.models.pallas.attention import dividing, dot, round_up
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


class KernelLayers(Layers):
  """Layers of kernels, whose tokens fill whole registers of 8 each."""

  def layer(self, model: Any) -> type[nn.Module]:
    if model.layer is not Block:
      raise _needs(f'layers of the paper, got {model.layer.__name__}')
    return KernelBlock

  def __call__(
    self, model: Any, x: jax.Array, *, shared: Any = (), **options: Any
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    (batch, tokens, _), (positions, lengths) = x.shape, shared
    if added := -tokens % 8:
      if lengths is None:
        lengths = jnp.full(batch, tokens, jnp.int32)
      x = jnp.pad(x, ((0, 0), (0, added), (0, 0)))
    shared = positions, lengths
    x, outputs = super().__call__(model, x, shared=shared, **options)
    return jax.tree.map(lambda x: x[:, :tokens], (x, outputs))


class KernelBlock(Block):
  """A Block of the paper, with GELU by tanh, that is computed by kernels."""

  def __call__(
    self, x: Any, drop_rate: Any = None, shared: Any = None, lengths: Any = None
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
    return self._compute(keep_batch_split(x), lengths)

  def _compute(self, x, lengths):
    params, epsilon = self.variables['params'], self.options.norm_eps
    attn, fc1, fc2 = params['attn'], params['mlp']['fc1'], params['mlp']['fc2']
    if reason := obstacle(x, fc1['kernel'].shape[1]):
      raise _needs(reason)
    width = x.shape[-1]
    square, vector = (width, width), (width,)
    projections = [attn[name] for name in ('query', 'key', 'value')]
    first = _Project(
      *[each['kernel'].reshape(square) for each in projections],
      *[params['norm1'][name] for name in ('scale', 'bias')],
      *[each['bias'].reshape(vector) for each in projections],
    )
    x, *qkv = _sharded(functools.partial(_project, epsilon), [x], first)
    q, k, v = (y.reshape(*x.shape[:2], self.num_heads, -1) for y in qkv)
    y = attention(q, k, v, implementation='pallas', lengths=lengths)
    arrays = [x, y.reshape(x.shape)]
    out, norm = attn['out'], params['norm2']
    last = _Finish(
      *(out['kernel'].reshape(square), fc1['kernel'], fc2['kernel']),
      *(norm['scale'], norm['bias'], out['bias'], fc1['bias'], fc2['bias']),
    )
    (y,) = _sharded(functools.partial(_finish, epsilon), arrays, last)
    return y


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


# Parameters before and after attention, their gradients, or their references.
_Project = collections.namedtuple('_Project', 'wq wk wv scale shift bq bk bv')
_Finish = collections.namedtuple('_Finish', 'wo w1 w2 scale shift bo b1 b2')


def _sharded(function, arrays, params):
  """Run function([R, D], ..., params) on the examples of each device."""

  def run(arrays, params):
    found = function(*(x.reshape(-1, x.shape[-1]) for x in arrays), params)
    return [x.reshape(arrays[0].shape) for x in found]

  mesh = jax.sharding.get_abstract_mesh()
  if mesh.size > 1:  # the compiler cannot shard kernels
    spec = PartitionSpec(dividing(mesh, batch_axes(mesh), len(arrays[0])))
    specs = spec, PartitionSpec()
    run = jax.shard_map(run, in_specs=specs, out_specs=spec, check_vma=False)
  return run(arrays, params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(epsilon, x, params):
  """Return x, whose gradient the kernel adds to its own, then q, k and v."""
  out, _ = _call(_project_forward, epsilon, [x], params, [x] * 3)
  return x, *out


def _project_saved(epsilon, x, params):
  return _project(epsilon, x, params), (x, params)


def _project_gradients(epsilon, saved, gradients):
  x, params = saved
  rows, others = [x, *gradients], params._replace(bq=None, bk=None, bv=None)
  sums = [*map(_dense, params[:3]), _float32(8, x.shape[1])]
  (dx,), sums = _call(_project_backward, epsilon, rows, others, [x], sums)
  *dense, vectors = sums
  kernels, biases = zip(*((w, b[0]) for w, b in dense))
  return dx, _Project(*kernels, vectors[0], vectors[1], *biases)


_project.defvjp(_project_saved, _project_gradients)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _finish(epsilon, x, y, params):
  """Return the output of the layer, of x and what attention returned."""
  return _call(_mlp_forward, epsilon, [x, y], params, [x])[0]


def _finish_saved(epsilon, x, y, params):
  hidden = jax.ShapeDtypeStruct((len(x), len(params.b1)), x.dtype)
  out, _ = _call(_mlp_forward, epsilon, [x, y], params, [x, hidden])
  return out[:1], (x, y, out[1], params)


def _finish_gradients(epsilon, saved, gradients):
  x, y, hidden, params = saved
  rows, others = [x, y, *gradients, hidden], params._replace(b1=None, b2=None)
  sums = [
    *(_dense(params.wo), _dense(params.w1)),
    *(_float32(*params.w1.shape), _float32(8, x.shape[1])),
  ]
  (dx, dy), sums = _call(_mlp_backward, epsilon, rows, others, [x, y], sums)
  (wo, bo), (w1, b1), w2, vectors = sums
  biases = bo[0], b1[0], vectors[2]
  return dx, dy, _Finish(wo, w1, w2.T, vectors[0], vectors[1], *biases)


_finish.defvjp(_finish_saved, _finish_gradients)


def _dense(kernel):
  """Return the sums that `_add_dense` adds to, of a kernel and its bias."""
  return _float32(*kernel.shape), _float32(_ONES, kernel.shape[1])


def _float32(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


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
  """Run a kernel on blocks of `rows`; return arrays like `out` and `sums`.

  `sums` is a tree of float32 sums over all tokens. The kernel is called as
  (epsilon, number of tokens, *references to rows, params, out and sums).
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  x, (count, width) = rows[0], rows[0].shape
  kernels = sum(w.size for w in jax.tree.leaves(params) if w.ndim == 2)
  elements, size = sum(a.shape[1] for a in (*rows, *out)), x.dtype.itemsize
  params = jax.tree.map(
    lambda w: w.astype(x.dtype) if w.ndim == 2 else w[None], params
  )
  most = _rows(kernels, elements, width, size)
  programs = pl.cdiv(count, most)
  block = min(most, round_up(pl.cdiv(count, programs), 128))

  def parts(array):
    return pl.BlockSpec((block, array.shape[1]), lambda i: (i, 0))

  def whole(array):
    once = pl.Buffered(1)
    return pl.BlockSpec(array.shape, lambda i: (0, 0), pipeline_mode=once)

  moved = jax.tree.leaves((rows, params, out, sums))
  call = functools.partial(
    pl.pallas_call,
    functools.partial(kernel, epsilon, count),
    grid=(pl.cdiv(count, block),),
    in_specs=[jax.tree.map(parts, rows), jax.tree.map(whole, params)],
    out_specs=[jax.tree.map(parts, out), jax.tree.map(whole, sums)],
    out_shape=jax.tree.map(
      lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), [out, sums]
    ),
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
  interpreted = call(interpret=attention_kernel.INTERPRET)
  return jax.lax.platform_dependent(rows, params, tpu=call(), cpu=interpreted)


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
  sums = dot(turned, slope, 1, 0)
  kernel[:, part] += sums[:-_ONES]
  bias[:, part] += sums[-_ONES:]


def _begin(count, x, sums):
  """Return a function that reads a block, and 0 after the last token.

  Before, set the sums to 0 in the first program. `count` is that of all tokens.
  """
  from jax.experimental import pallas as pl

  @pl.when(pl.program_id(0) == 0)
  def _():
    for ref in jax.tree.leaves(sums):
      ref[...] = jnp.zeros_like(ref)

  block = len(x)
  row = jax.lax.broadcasted_iota(jnp.int32, (block, 1), 0)
  is_token = row + pl.program_id(0) * block < count

  def read(x):  # what lies after the last token may be anything
    x = x.astype(jnp.float32)
    return jnp.where(is_token, x, 0) if count % block else x

  return read


def _project_forward(epsilon, count, rows, params, out, _):
  """Compute queries, keys and values [R, D] of x [R, D]."""
  ((x,), p) = rows, params
  tokens, *_ = _norm(
    x[...].astype('float32'), epsilon, p.scale, p.shift, x.dtype
  )
  pairs = (p.wq, p.bq), (p.wk, p.bk), (p.wv, p.bv)
  for (kernel, bias), ref in zip(pairs, out, strict=True):
    ref[...] = (dot(tokens, kernel[...], 1, 0) + bias[...]).astype(ref.dtype)


def _project_backward(epsilon, count, rows, params, out, sums):
  """Compute the gradient [R, D] of x, and add those of parameters.

  `rows` are x, its gradient by what follows, and those of queries, keys and
  values. `sums` are those of each kernel and its bias, [D, D] and [_ONES, D],
  and those of scale and shift, [8, D].
  """
  (x, dx, *slopes), p, (total,), (*dense, vectors) = rows, params, out, sums
  read = _begin(count, x, sums)
  tokens, *norm = _norm(read(x[...]), epsilon, p.scale, p.shift, x.dtype)
  tokens, gradient = _turned(tokens), jnp.zeros(x.shape, jnp.float32)
  for slope, kernel, pair in zip(slopes, (p.wq, p.wk, p.wv), dense):
    slope = read(slope[...]).astype(x.dtype)
    _add_dense(*pair, tokens, slope)
    gradient += dot(slope, kernel[...], 1, 1)
  gradient = _norm_gradient(gradient, *norm, p.scale, vectors)
  total[...] = (read(dx[...]) + gradient).astype(x.dtype)


def _mlp_forward(epsilon, count, rows, params, out, _):
  """Compute the output [R, D] of x and y [R, D], what attention returned.

  What enters GELU, [R, M], is written to a second output, if there is one.
  """
  (x, y), p, (total, *saved), dtype = rows, params, out, rows[0].dtype
  x = x[...].astype(jnp.float32) + dot(y[...], p.wo[...], 1, 0) + p.bo[...]
  tokens, *_ = _norm(x, epsilon, p.scale, p.shift, dtype)
  x += p.b2[...]
  for part in _chunks(p.w1.shape[1]):
    hidden = (dot(tokens, p.w1[:, part], 1, 0) + p.b1[:, part]).astype(dtype)
    for ref in saved:
      ref[:, part] = hidden
    x += dot(_gelu(hidden), p.w2[part], 1, 0)
  total[...] = x.astype(dtype)


def _mlp_backward(epsilon, count, rows, params, out, sums):
  """Compute the gradients of x and y [R, D], and add those of parameters.

  `rows` are x, y, the gradient of the output, and what entered GELU. `sums` are
  those of two kernels and biases, [D, D], [_ONES, D], [D, M] and [_ONES, M]; of
  the last one, [D, M]; of scale, shift and its bias, [8, D].
  """
  (x, y, dout, hidden), p, (dx, dy) = rows, params, out
  out_sums, fc1_sums, dw2, vectors = sums
  read, dtype = _begin(count, x, sums), x.dtype
  attended, dout = read(y[...]).astype(dtype), read(dout[...])
  total = read(x[...]) + dot(attended, p.wo[...], 1, 0) + p.bo[...]
  tokens, *norm = _norm(total, epsilon, p.scale, p.shift, dtype)
  tokens, gradient = _turned(tokens), jnp.zeros_like(total)
  rounded = dout.astype(dtype)
  turned = rounded.T
  for part in _chunks(p.w1.shape[1]):
    active, pull = jax.vjp(_gelu, read(hidden[:, part]).astype(dtype))
    dw2[:, part] += dot(turned, active, 1, 0)
    (slope,) = pull(dot(rounded, p.w2[part], 1, 1).astype(dtype))
    _add_dense(*fc1_sums, tokens, slope, part)
    gradient += dot(slope, p.w1[:, part], 1, 1)
  _add(vectors, 2, dout)
  total = dout + _norm_gradient(gradient, *norm, p.scale, vectors)
  rounded = total.astype(dtype)
  dx[...] = rounded
  _add_dense(*out_sums, _turned(attended), rounded)
  dy[...] = dot(rounded, p.wo[...], 1, 1).astype(dtype)

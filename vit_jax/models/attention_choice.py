"""Choice of the implementation of attention='auto' by measurement.

    model = Chooser(batch_size=1024, mesh=mesh)(model, images)

On an accelerator, a whole layer of the model is compiled with each candidate
and timed on the examples that one device computes: attention alone misleads,
because its implementation decides how the compiler arranges the arrays around
it. Training measures the forward and the backward pass, evaluation the forward
pass. A candidate that fails, or differs from float32 einsum on random inputs,
is reported and left out. CPUs keep the default of attention.py. On TPUs one
candidate computes the whole layer by kernels, see pallas_layer.py.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.experimental import multihost_utils
from jax.flatten_util import ravel_pytree

from vit_jax.meshes import batch_axes
from vit_jax.models import pallas_layer
from vit_jax.models.attention import check, largest_error, mesh_of
from vit_jax.models.posemb import Layout, PositionEmbedding
from vit_jax.models.vit import remat
from vit_jax.types import Model

CANDIDATES = {
  'gpu': ('xla', 'cudnn', 'einsum'),
  'tpu': ('xla', 'einsum', 'pallas', 'pallas_layer'),
}
# Largest error of `check_layer`. Measured on a CPU for widths of 128, 384 and
# 768: 6.9e-6 in float32, 0.11 in bfloat16; without a part of M: 6.1.
_BOUND = 0.3
_ROUNDS, _ROUND_S = 5, 0.02  # Rounds of timing; the least seconds of one.


@dataclasses.dataclass
class Chooser:
  """Function that replaces attention='auto' of models.

  Attributes:
    batch_size: examples that all devices process at a time.
    record: {case: implementation} of choices that were made before. New ones
      are added, so that a resumed run can use them.
    report: gets the choices and times in words.
  """

  batch_size: int
  mesh: jax.sharding.Mesh
  record: dict[str, str] = dataclasses.field(default_factory=dict)
  report: Callable[[str], Any] = print

  def __call__(
    self, model: Model, images: jax.ShapeDtypeStruct, *, backward: bool = True
  ) -> Model:
    """Return the model with the fastest implementation on the first host.

    It is returned as it is if it leaves no choice, or no candidate is right.
    `images` describes a batch; `backward` says whether the model is trained.
    """
    device = self.mesh.local_devices[0]
    names = CANDIDATES.get(device.platform, ())
    if not names or getattr(model, 'attention', None) != 'auto':
      return model
    tokens, heads, head_dim = _heads(model, images)
    case = (
      f'{tokens} tokens, {heads} heads of {head_dim}, '
      f'{np.dtype(model.dtype).name}, forward{" and backward" * backward}, '
      f'{device.device_kind}'
    )
    if case not in self.record:
      seconds = self._measure(model, images, device, backward)
      fastest = names.index(min(seconds, key=seconds.get)) if seconds else -1
      fastest = int(multihost_utils.broadcast_one_to_all(np.int32(fastest)))
      if fastest < 0:
        return model
      self.record[case] = names[fastest]
    self.report(f'attention: {self.record[case]} for {case}')
    return model.clone(attention=self.record[case])

  def _measure(self, model, images, device, backward):
    """Return {name: seconds of a layer} of the candidates that are right."""
    parts = math.prod(self.mesh.shape[a] for a in batch_axes(self.mesh))
    batch = max(self.batch_size // parts, 1)
    rng = np.random.default_rng(0)

    def draw(like):
      array = 0.05 * rng.standard_normal(like.shape, np.float32)
      return jax.device_put(array.astype(like.dtype), device)

    seconds, shape = {}, (2, *_heads(model, images))
    for name in CANDIDATES[device.platform]:
      try:
        check(name, shape, model.dtype, device)
        if name == 'pallas_layer':
          with jax.set_mesh(self.mesh):
            check_layer(model, device)
        candidate = model.clone(attention=name)
        layer = compile_layer(candidate, images, batch, device, backward)
      except Exception as e:  # Each compiler has its own errors.
        reason = f'{type(e).__name__}: {e}'[:200]
        self.report(f'attention: {name} is left out, {reason}')
        continue
      args, _ = layer.in_avals
      seconds[name] = seconds_per_call(layer, *jax.tree.map(draw, args))
      self.report(f'attention: {name} {1e3 * seconds[name]:.3g} ms a layer')
    return seconds


def check_layer(model: Model, device: Any) -> float:
  """Return the error of a layer of kernels on a device, as attention.check.

  Its gradients are those of few tokens and of all parameters together, for that
  of the bias of keys is 0. Raises UserError if the kernels cannot run.
  """
  layout = model.pooling.layout((3, 4))
  rng, tokens = np.random.default_rng(0), layout.num_tokens
  make = functools.partial(_layer, model, layout, False)

  def draw(like):
    std = like.size**-0.25 if len(like.shape) > 1 else 1
    array = std * rng.standard_normal(like.shape, np.float32)
    return jax.device_put(array, device)

  @functools.partial(jax.jit, static_argnums=(0, 1))
  def results(name, dtype, params, x, gradient, lengths):
    layer = make(attention=name, dtype=dtype)
    x, gradient = x.astype(dtype), gradient.astype(dtype)
    out, pull = jax.vjp(
      lambda params, x: layer.apply(params, x, lengths), params, x
    )
    params, dx = pull(gradient)
    found = out, dx, ravel_pytree(params)[0]
    return [x.astype(jnp.float32) for x in found]

  x = jax.ShapeDtypeStruct((2, tokens, model.width), np.float32)
  shapes = jax.eval_shape(make(attention='einsum').init, jax.random.key(0), x)
  lengths = jax.device_put(np.array([tokens - 3, tokens], np.int32), device)
  with jax.set_mesh(mesh_of(device)):
    args = *jax.tree.map(draw, (shapes, x, x)), lengths
    found = results('pallas_layer', model.dtype, *args)
    with jax.default_matmul_precision('highest'):
      expected = results('einsum', 'float32', *args)
  return largest_error(found, expected, _BOUND)


class _Layer(nn.Module):
  """A layer of a model, with the positions that its layers share."""

  layer: Callable[..., nn.Module]
  posemb: PositionEmbedding | None
  layout: Layout
  width: int
  num_heads: int
  train: bool

  @nn.compact
  def __call__(self, x: jax.Array, *lengths: jax.Array) -> jax.Array:
    posemb = self.posemb or PositionEmbedding()
    shared = posemb.shared(self, self.layout, self.train)
    return self.layer(name='layer')(x, None, shared, *lengths)


def _layer(model, layout, train, **changed):
  fields = model.layer_fields(layout, train) | changed
  layer = functools.partial(remat(model.layer, model.remat), **fields)
  sizes = model.width, model.num_heads
  return _Layer(layer, model.posemb, layout, *sizes, train)


def compile_layer(
  model: Model,
  images: jax.ShapeDtypeStruct,
  batch: int,
  device: Any,
  backward: bool = True,
) -> jax.stages.Compiled:
  """Compile a layer of the model as it is in a train or evaluation step.

  The device has `batch` examples; it is present, or described. The result is a
  function of parameters and tokens [B, N, D]; `backward` says whether it
  returns the gradients of both, or the output.
  """
  layout = model.pooling.layout(model.embedding.grid(images.shape[1:]))
  module = _layer(model, layout, backward)
  sharding = jax.sharding.SingleDeviceSharding(device)
  count = layout.num_tokens
  if model.attention == 'pallas_layer' and model.layer.for_grids:
    count += pallas_layer.padding(count)  # as in run_layers
  shape = batch, count, model.width
  tokens = jax.ShapeDtypeStruct(shape, model.dtype, sharding=sharding)

  def step(params, x):
    rngs = {'dropout': jax.random.key(0)}
    out, pull = jax.vjp(
      lambda *args: module.apply({'params': args[0]}, args[1], rngs=rngs),
      *(params, x),
    )
    return pull(out) if backward else out

  # Outside of the mesh, whose device may only be described.
  rngs = {name: jax.random.key(0) for name in ('params', 'dropout')}
  with jax.set_mesh(mesh_of(device)):
    shapes = jax.eval_shape(module.init, rngs, tokens)['params']
    params = jax.tree.map(lambda x: x.update(sharding=sharding), shapes)
    return jax.jit(step).lower(params, tokens).compile()


def seconds_per_call(fn: Callable[..., Any], *arrays: Any) -> float:
  """Return the seconds of a call of a compiled function, the least of 5 rounds.

  Calls are queued, so that the device waits for none of them.
  """

  def seconds(calls):
    begin = time.perf_counter()
    for _ in range(calls):
      last = fn(*arrays)
    jax.block_until_ready(last)
    return (time.perf_counter() - begin) / calls

  calls = math.ceil(_ROUND_S / max(seconds(1), _ROUND_S / 50))
  return min(seconds(calls) for _ in range(_ROUNDS))


def _heads(model, images):
  """Return (tokens, heads, head dimension)."""
  layout = model.pooling.layout(model.embedding.grid(images.shape[1:]))
  return layout.num_tokens, model.num_heads, model.width // model.num_heads

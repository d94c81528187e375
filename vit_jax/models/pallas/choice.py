"""Choice of the implementation of attention='auto' by measurement.

    model = Chooser(batch_size=1024, mesh=mesh)(model, images)

On an accelerator, a whole layer of the model is compiled with each candidate
and timed on the examples that one device computes: attention alone misleads,
because its implementation decides how the compiler arranges the arrays around
it. Training measures the forward and the backward pass, evaluation the forward
pass. A candidate that fails, or differs from float32 einsum on random inputs,
is reported and left out. CPUs keep the default of attention.py.
"""

import dataclasses
import functools
import math
import operator
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
from vit_jax.models.attention import check, largest_error, mesh_of
from vit_jax.models.pallas.layer import with_kernels
from vit_jax.models.posemb import Layout, PositionEmbedding
from vit_jax.models.vit import Layers
from vit_jax.types import Model


def implementations(*names: str) -> dict[str, Callable[[Any], Any]]:
  """Return {name: function model -> model} of implementations of attention."""
  return {x: operator.methodcaller('clone', attention=x) for x in names}


# Functions model -> model, by name.
CANDIDATES = {
  'gpu': implementations('xla', 'cudnn', 'einsum'),
  'tpu': {
    **implementations('xla', 'einsum', 'pallas'),
    'layers of kernels': with_kernels,
  },
}
# Largest error of `check_layer`. Measured on a CPU for widths of 128, 384 and
# 768: 6.9e-6 in float32, 0.11 in bfloat16; without a part of M: 6.1.
_BOUND = 0.3
_ROUNDS, _ROUND_S = 5, 0.02  # Rounds of timing; the least seconds of one.


@dataclasses.dataclass
class Chooser:
  """Choice of the attention of models whose attention is 'auto'.

  Attributes:
    batch_size: examples that all devices process at a time.
    record: {case: candidate} of choices that were made before. New ones are
      added, so that a resumed run can use them.
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
    candidates = CANDIDATES.get(device.platform)
    if not candidates or getattr(model, 'attention', None) != 'auto':
      return model
    tokens, heads, head_dim = _heads(model, images)
    case = (
      f'{tokens} tokens, {heads} heads of {head_dim}, '
      f'{np.dtype(model.dtype).name}, forward{" and backward" * backward}, '
      f'{device.device_kind}'
    )
    if case not in self.record:
      seconds = self._measure(model, images, device, backward)
      names = [*candidates]
      fastest = names.index(min(seconds, key=seconds.get)) if seconds else -1
      fastest = int(multihost_utils.broadcast_one_to_all(np.int32(fastest)))
      if fastest < 0:
        return model
      self.record[case] = names[fastest]
    self.report(f'attention: {self.record[case]} for {case}')
    return candidates[self.record[case]](model)

  def _measure(self, model, images, device, backward):
    """Return {name: seconds of a layer} of the candidates that are right."""
    parts = math.prod(self.mesh.shape[a] for a in batch_axes(self.mesh))
    batch = max(self.batch_size // parts, 1)
    rng = np.random.default_rng(0)

    def draw(like):
      array = 0.05 * rng.standard_normal(like.shape, np.float32)
      return jax.device_put(array.astype(like.dtype), device)

    seconds, shape = {}, (2, *_heads(model, images))
    for name, change in CANDIDATES[device.platform].items():
      try:
        candidate = change(model)
        check(candidate.attention, shape, model.dtype, device)
        if candidate.layers != model.layers:
          with jax.set_mesh(self.mesh):
            check_layer(candidate, device)
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
  """Return the error of a layer of a model on a device, as attention.check.

  Its gradients are those of few tokens and of all parameters together, for that
  of the bias of keys is 0. Raises UserError if the layer cannot run.
  """
  layout = model.pooling.layout((3, 4))
  rng, tokens = np.random.default_rng(0), layout.num_tokens
  plain = model.clone(layers=None, attention='einsum', dtype='float32')

  def draw(like):
    std = like.size**-0.25 if len(like.shape) > 1 else 1
    array = std * rng.standard_normal(like.shape, np.float32)
    return jax.device_put(array, device)

  @functools.partial(jax.jit, static_argnums=0)
  def results(model, params, x, gradient, lengths):
    layer = _layer(model, layout, False)
    x, gradient = x.astype(model.dtype), gradient.astype(model.dtype)
    apply = functools.partial(layer.apply, lengths=lengths)
    out, pull = jax.vjp(apply, params, x)
    params, dx = pull(gradient)
    found = out, dx, ravel_pytree(params)[0]
    return [x.astype(jnp.float32) for x in found]

  x = jax.ShapeDtypeStruct((2, tokens, model.width), np.float32)
  init = _layer(plain, layout, False).init
  shapes = jax.eval_shape(init, jax.random.key(0), x)
  lengths = jax.device_put(np.array([tokens - 3, tokens], np.int32), device)
  with jax.set_mesh(mesh_of(device)):
    args = *jax.tree.map(draw, (shapes, x, x)), lengths
    found = results(model, *args)
    with jax.default_matmul_precision('highest'):
      expected = results(plain, *args)
  return largest_error(found, expected, _BOUND)


class _Layer(nn.Module):
  """A layer of a model, with the positions that its layers share."""

  layers: Callable[..., Any]
  posemb: PositionEmbedding | None
  layout: Layout
  width: int
  num_heads: int
  train: bool

  @nn.compact
  def __call__(self, x: jax.Array, lengths: Any = None) -> jax.Array:
    posemb = self.posemb or PositionEmbedding()
    shared = posemb.shared(self, self.layout, self.train), lengths
    return self.layers(x, shared=shared)[0]


def _layer(model, layout, train):
  one = model.clone(depth=1, scan=False, stochastic_depth=0.0)
  fields = model.layer_fields(layout, train)
  fields |= {'training': train, 'per_layer': False}
  layers = functools.partial(model.layers or Layers(), one, **fields)
  sizes = model.width, model.num_heads
  return _Layer(layers, model.posemb, layout, *sizes, train)


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
  shape = batch, layout.num_tokens, model.width
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
  """Return the seconds of a call, the least of 5 rounds of queued calls."""

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

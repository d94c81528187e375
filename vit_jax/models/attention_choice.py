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
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.models.attention import attention
from vit_jax.models.layers import batch_axes, remat
from vit_jax.types import Model

CANDIDATES = {
  'gpu': ('xla', 'cudnn', 'einsum'),
  'tpu': ('xla', 'einsum', 'pallas'),
}
# Largest error that a candidate may have, see `error`. Measured on a CPU for 50
# to 785 tokens: float32 6.1e-6, float16 0.0036, bfloat16 0.042, and 0.059 for
# float32 whose products are of bfloat16 numbers, as on accelerators by default.
# Attention to one token too many: 0.41 or more.
BOUNDS = {'float32': 0.1, 'float16': 0.02, 'bfloat16': 0.1}
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
    bound = BOUNDS[np.dtype(model.dtype).name]
    rng = np.random.default_rng(0)

    def draw(like):
      array = 0.05 * rng.standard_normal(like.shape, np.float32)
      return jax.device_put(array.astype(like.dtype), device)

    seconds = {}
    for name in CANDIDATES[device.platform]:
      try:
        if not (found := error(name, model, images, device)) <= bound:
          raise ArithmeticError(f'error {found:.3g}, {bound:g} is allowed')
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
  fields = model.layer_fields(layout, backward)
  module = remat(model.layer, model.remat)(**fields)
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
  with jax.set_mesh(_mesh_of(device)):
    shapes = jax.eval_shape(module.init, rngs, tokens)['params']
    params = jax.tree.map(lambda x: x.update(sharding=sharding), shapes)
    return jax.jit(step).lower(params, tokens).compile()


def error(
  name: str, model: Model, images: jax.ShapeDtypeStruct, device: Any
) -> float:
  """Return the error of an implementation and its gradient, on a device.

  It is the largest difference from float32 einsum, relative to the element's
  size plus the root mean square of its array.
  """
  shape = 2, *_heads(model, images)
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

  with jax.set_mesh(_mesh_of(device)):
    rounded = [x.astype(model.dtype).astype(jnp.float32) for x in inputs]
    found = results(name, np.dtype(model.dtype), *rounded)
    with jax.default_matmul_precision('highest'):
      expected = results('einsum', np.dtype('float32'), *rounded)
  sizes = [jnp.sqrt(jnp.mean(y**2)) for y in expected]
  errors = [
    jnp.max(jnp.abs(x - y) / (jnp.abs(y) + size))
    for x, y, size in zip(found, expected, sizes)
  ]
  return float(max(errors))


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


def _mesh_of(device):
  axis_types = (jax.sharding.AxisType.Auto,)
  return jax.sharding.Mesh([device], ('data',), axis_types=axis_types)

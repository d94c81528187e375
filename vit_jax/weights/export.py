"""Models as StableHLO: a file that runs without this code, or without Python.

The file is written by `jax.export`. Run it with

    run = jax.export.deserialize(open('model.stablehlo', 'rb').read()).call
    logits = run(images)

Its `mlir_module_serialized` is the portable StableHLO for other runtimes.
Parameters are constants in it; writing takes about eight times their memory.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from vit_jax.types import UserError
from vit_jax.weights import bundle, formats
from vit_jax.weights.bundle import Weights

PLATFORMS = ('cpu', 'cuda', 'tpu')
_LIMIT = 2**31 - 2**24  # of a flatbuffer, less what is not parameters


def stablehlo(
  weights: Weights,
  *,
  platforms: Sequence[str] = PLATFORMS,
  batch_size: int | None = None,
) -> tuple[bytes, dict[str, Any]]:
  """Return (bytes of a file, a dict that describes how to use it).

  The function in it takes uint8 images [B, H, W, C], after the transforms, and
  returns float32 logits [B, K], or features if the model has no head.
  'activation' in the dict converts logits to probabilities; 'identity': they
  are the numbers. `batch_size` is B, for runtimes that need it; None: any.
  """
  size = sum(x.nbytes for x in weights.params.values())
  if size > _LIMIT:
    raise UserError(
      f'The parameters take {size / 1e9:.1f} GB; a file of jax.export holds '
      'at most 2 GB. Convert to another format.'
    )
  weights = bundle.squeeze(weights)
  model, params = bundle.build(weights)
  if hasattr(model, 'attention'):  # fused kernels run on one platform only
    model = model.clone(attention='einsum')

  def forward(batch):
    images = weights.preprocess(batch)
    return model.apply({'params': params}, images).astype(jnp.float32)

  if batch_size is None:
    (batch_size,) = jax.export.symbolic_shape('batch')
  spec = jax.ShapeDtypeStruct(
    (batch_size, *weights.image_shape), weights.decode.dtype
  )
  exported = jax.export.export(jax.jit(forward), platforms=platforms)(spec)
  outputs = {'identity': 'numbers'}.get(weights.activation, 'logits')
  about = formats.describe_use(weights) | {
    'format': 'jax.export',
    'platforms': list(exported.platforms),
    'input': _describe(exported.in_avals[0]),
    'output': _describe(exported.out_avals[0])
    | {'is': outputs if model.num_classes else 'features'},
    'origin': weights.origin,
  }
  return bytes(exported.serialize(vjp_order=0)), about


def _describe(aval):
  shape = [d if isinstance(d, int) else str(d) for d in aval.shape]
  return {'shape': shape, 'dtype': str(aval.dtype)}

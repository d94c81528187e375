"""Models as StableHLO: a file that runs without this code, or Python at all.

The file is what `jax.export` writes. Where JAX is installed it is run by

    run = jax.export.deserialize(open('model.stablehlo', 'rb').read()).call
    logits = run(images)

and its `mlir_module_serialized` is the portable StableHLO that other runtimes
take. Parameters are constants in it; writing takes some eight times their size
of memory.
"""

import importlib.util

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from vit_jax import pretrained
from vit_jax.weights.bundle import make

PLATFORMS = ('cpu', 'cuda', 'tpu')
INPUTS = ('uint8', 'float')
_LIMIT = 2**31 - 2**24  # of a flatbuffer, less what is not parameters


def stablehlo(weights, *, images='uint8', platforms=PLATFORMS):
  """A model with its parameters and preprocessing as one function.

  Args:
    weights: Weights.
    images: what the function takes, of any batch size: 'uint8' pictures
      [B, H, W, C] as they are decoded, resized to H x W; or 'float' ones, as
      preprocessed.
    platforms: that the function can run on.

  Returns:
    (bytes of the file, what else is to be known in order to use it). The
    function returns float32 logits [B, K], or features where the model has no
    head. It computes in the dtype that the model has.

  Raises:
    ValueError: the package flatbuffers is missing; too many parameters.
  """
  _check(weights, images)
  model, params = pretrained.build(weights)
  if hasattr(model, 'attention'):  # the fused kernels are of one platform
    model = model.clone(attention='einsum')
  preprocess = make(weights.preprocess)

  def forward(batch):
    if images == 'uint8':
      batch = preprocess(batch)
    return model.apply({'params': params}, batch).astype(jnp.float32)

  (batch_size,) = jax.export.symbolic_shape('batch')
  dtype = jnp.uint8 if images == 'uint8' else jnp.float32
  spec = jax.ShapeDtypeStruct((batch_size, *weights.image_shape), dtype)
  exported = jax.export.export(jax.jit(forward), platforms=platforms)(spec)
  description = {
    'format': 'jax.export',
    'calling_convention_version': exported.calling_convention_version,
    'platforms': list(exported.platforms),
    'input': _describe(exported.in_avals[0]),
    'output': _describe(exported.out_avals[0])
    | {'is': 'logits' if model.num_classes else 'features'},
    'transforms': weights.transforms,
    'preprocess': weights.preprocess,
    'preprocess_included': images == 'uint8',
    'activation': weights.activation,
    'class_names': weights.class_names,
    'model': weights.settings,
    'origin': weights.origin,
  }
  return bytes(exported.serialize(vjp_order=0)), description


def _describe(aval):
  shape = [d if isinstance(d, int) else str(d) for d in aval.shape]
  return {'shape': shape, 'dtype': str(aval.dtype)}


def _check(weights, images):
  if images not in INPUTS:
    raise ValueError(f'images={images!r}; it can be {" or ".join(INPUTS)}.')
  if importlib.util.find_spec('flatbuffers') is None:
    raise ValueError(
      'jax.export needs the package flatbuffers, which is not installed: '
      'pip install flatbuffers'
    )
  size = sum(np.asarray(x).nbytes for x in weights.params.values())
  if size > _LIMIT:
    raise ValueError(
      f'The parameters take {size / 1e9:.1f} GB; a file of jax.export holds '
      '2 GB at most. Convert to another format.'
    )

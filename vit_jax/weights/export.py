"""Models as StableHLO: a file that runs without this code, or without Python.

The file is written by `jax.export`. The tool predict reads it. Without this
package, run it with

    run = jax.export.deserialize(open('model.stablehlo', 'rb').read()).call
    logits = run(images)

Its `mlir_module_serialized` is the portable StableHLO for other runtimes.
Parameters are constants in it; writing takes about eight times their memory.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from vit_jax import config, pretrained
from vit_jax.config.checks import integer, one_of
from vit_jax.runs.files import PathLike
from vit_jax.types import Array
from vit_jax.weights import files, formats
from vit_jax.weights.bundle import Weights

ENDING = '.stablehlo'
PLATFORMS = ('cpu', 'cuda', 'tpu')
INPUTS = ('uint8', 'float')
_LIMIT = 2**31 - 2**24  # of a flatbuffer, less what is not parameters


def stablehlo(
  weights: Weights,
  *,
  images: str = 'uint8',
  platforms: Sequence[str] = PLATFORMS,
  batch_size: int | None = None,
) -> tuple[bytes, dict[str, Any]]:
  """Export a model with its parameters and preprocessing as one function.

  Args:
    weights: Weights.
    images: input of the function: 'uint8', decoded images [B, H, W, C] after
      the transforms; or 'float', after preprocessing too.
    platforms: that the function can run on.
    batch_size: B, for runtimes that need to know it; None: any.

  Returns:
    (bytes of the file, a dict that describes how to use it). The function
    returns float32 logits [B, K], or features if the model has no head. It
    computes in the model's dtype.

  Raises:
    ValueError: the package flatbuffers is missing; too many parameters.
  """
  _check(weights, images, platforms, batch_size)
  model, params = pretrained.build(weights)
  if hasattr(model, 'attention'):  # fused kernels run on one platform only
    model = model.clone(attention='einsum')

  def forward(batch):
    if images == 'uint8':
      batch = weights.preprocess(batch)
    return model.apply({'params': params}, batch).astype(jnp.float32)

  if batch_size is None:
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
    'transforms': config.describe(weights.transforms),
    'preprocess': config.describe(weights.preprocess),
    'preprocess_included': images == 'uint8',
    'activation': weights.activation,
    'class_names': weights.class_names,
    'model': config.describe(weights.model),
    'origin': weights.origin,
  }
  return bytes(exported.serialize(vjp_order=0)), description


@dataclasses.dataclass(frozen=True, eq=False)
class Function:
  """An exported function, called like a model; it has no parameters.

  Attributes:
    call: images [B, H, W, C] -> float32 [B, ...].
    output: 'logits', or 'pre_logits' if the model had no head.
    num_classes: K; None without a head.
    batch_size: B, or None for any.
  """

  call: Callable[..., jax.Array]
  output: str
  num_classes: int | None
  batch_size: int | None

  def apply(
    self,
    variables: Any,
    images: Array,
    *,
    method: str = '__call__',
    **options: Any,
  ) -> Any:
    """Return the output; with method='features', {name of the output: it}."""
    del variables, options
    found = self.features(images)
    return found if method == 'features' else found[self.output]

  def features(self, images: Array) -> dict[str, jax.Array]:
    size, count = self.batch_size, images.shape[0]
    if size in (None, count):
      return {self.output: self.call(images)}
    groups = -(-count // size)
    padding = ((0, groups * size - count), *[(0, 0)] * (images.ndim - 1))
    images = jnp.pad(images, padding).reshape(groups, size, *images.shape[1:])
    found = jax.lax.map(self.call, images)
    return {self.output: found.reshape(-1, *found.shape[2:])[:count]}


def load(path: PathLike, *, trust: Sequence[str] = ()) -> Weights:
  """Return Weights whose model is the Function in a file of `stablehlo`.

  Args:
    path: NAME.stablehlo, local or remote, with NAME.stablehlo.json next to it.
    trust: packages whose classes the file may name, for transforms of your own.

  Raises:
    ValueError: a file is missing, broken or not of this machine's platform.
  """
  local = files.fetch(path)
  note = files.fetch(f'{path}.json', missing_ok=True)
  if note is None:
    raise ValueError(
      f'{path}.json is missing, which has the preprocessing and the class '
      'names. Copy both files, or convert the weights again.'
    )
  content = files.read_json(note)
  exported = _deserialize(path, local.read_bytes())
  try:
    spec, out = content['input'], content['output']
    if [spec, out['shape']] != [
      _describe(exported.in_avals[0]),
      _describe(exported.out_avals[0])['shape'],
    ]:
      raise ValueError(f'input {spec} and output {out} are those of another')
    batch_size, *shape = spec['shape']
    if content['preprocess_included']:
      content['preprocess'] = None
    use = formats.usage(content | {'image_shape': shape}, trust)
    has_head = out['is'] == 'logits'
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f'{path}.json does not describe {path}: {error}. Convert the weights '
      'again.'
    ) from error
  if content['preprocess_included']:
    use['preprocess'] = _identity
  model = Function(
    exported.call,
    output='logits' if has_head else 'pre_logits',
    num_classes=out['shape'][-1] if has_head else None,
    batch_size=batch_size if isinstance(batch_size, int) else None,
  )
  return Weights(model, {}, **use, origin=str(path))


def _identity(images):
  return images


def _deserialize(path, content):
  """Return the jax.export.Exported, if it can run on this machine."""
  try:
    exported = jax.export.deserialize(bytearray(content))
  except Exception as error:  # flatbuffers raises anything
    raise ValueError(
      f'{path} cannot be read as a function of jax.export: {error}. It is '
      'truncated, or of another version of JAX. Convert the weights again.'
    ) from error
  backend = jax.default_backend()
  names = ('cuda', 'rocm') if backend == 'gpu' else (backend,)
  if not set(names) & set(exported.platforms):
    raise ValueError(
      f'{path} was exported for {", ".join(exported.platforms)}, and this '
      f'machine has {names[0]}. Convert the weights again with '
      f'--platforms={",".join([*exported.platforms, names[0]])}.'
    )
  return exported


def _describe(aval):
  shape = [d if isinstance(d, int) else str(d) for d in aval.shape]
  return {'shape': shape, 'dtype': str(aval.dtype)}


def _check(weights, images, platforms, batch_size):
  one_of('images', images, INPUTS)
  for platform in platforms:
    one_of('platform', platform, PLATFORMS)
  if batch_size is not None:
    integer('batch_size', batch_size, 1)
  if importlib.util.find_spec('flatbuffers') is None:
    raise ValueError(
      'jax.export needs the package flatbuffers, which is not installed: '
      'pip install flatbuffers'
    )
  size = sum(np.asarray(x).nbytes for x in weights.params.values())
  if size > _LIMIT:
    raise ValueError(
      f'The parameters take {size / 1e9:.1f} GB; a file of jax.export holds '
      'at most 2 GB. Convert to another format.'
    )

"""NaN and Inf in the state of a run: found before it is saved or evaluated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax import tree
from vit_jax.parallel.sharding import in_host_memory, replicated
from vit_jax.types import PyTree, UserError

_ADVICE = (
  'Earlier checkpoints are finite. The same command resumes from the newest '
  'one and fails again. Lower the learning rate, warm up for longer, or clip '
  'the gradient: --config.optimizer.clip_norm=1 '
  '--allow_changes=optimizer.clip_norm'
)


class NonFiniteError(FloatingPointError, UserError):
  """A metric of a training step, or the state after it, is NaN or Inf.

  Attributes:
    cause: what is not finite, and in which step.
  """

  def __init__(self, cause: str) -> None:
    super().__init__(f'{cause} {_ADVICE}')
    self.cause = cause


def check(state: PyTree, step: int, mesh: Mesh) -> None:
  """Raise NonFiniteError if an array of the state after a step has NaN or Inf.

  All hosts must call this function together, with arrays on the mesh.
  """
  arrays = {
    path: array
    for path, array in tree.flatten(state).items()
    if jnp.issubdtype(array.dtype, jnp.inexact)
  }
  values = list(arrays.values())
  if all(map(in_host_memory, values)):  # saves a second of compilation
    finite = [np.isfinite(x).all() for x in jax.device_get(values)]
  else:
    finite = jax.device_get(_are_finite(mesh)(values))
  if bad := [path for path, ok in zip(arrays, finite) if not ok]:
    shown = ', '.join(bad[:3]) + ', ...' * (len(bad) > 3)
    raise NonFiniteError(
      f'NaN or Inf in {len(bad)} arrays ({shown}) of the state after step '
      f'{step}, which was not saved.'
    )


@functools.lru_cache(maxsize=8)
def _are_finite(mesh):
  def are_finite(arrays):
    return jnp.stack([jnp.isfinite(x).all() for x in arrays])

  return jax.jit(are_finite, out_shardings=replicated(mesh))

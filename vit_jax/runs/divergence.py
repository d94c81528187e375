"""Runs that meet NaN or Inf: how they notice, and what their users can do."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax import tree
from vit_jax.parallel.sharding import in_host_memory, replicated
from vit_jax.runs.files import PathLike
from vit_jax.types import PyTree

_SHOWN = 3  # arrays that a message names


class NonFiniteError(FloatingPointError):
  """A metric of a training step, or the state after it, is NaN or Inf.

  Attributes:
    cause: what is not finite.
    step: of the training, in which it was found.
  """

  def __init__(self, cause: str, advice: str = '', *, step: int = 0) -> None:
    super().__init__(f'{cause} {advice}'.rstrip())
    self.cause = cause
    self.step = step


def non_finite(state: PyTree, mesh: Mesh) -> str:
  """Return which arrays of a state have NaN or Inf; '' if none has.

  One program reduces the arrays on the devices that hold them. All hosts must
  call this function together, and all get the same answer. On the CPU of a
  single host NumPy does it, without a second of compilation.

  Args:
    state: TrainState, or any tree of arrays on the mesh.
    mesh: as returned by `sharding.make_mesh`.
  """
  arrays = {
    path: array
    for path, array in tree.flatten(state).items()
    if jnp.issubdtype(array.dtype, jnp.inexact)
  }
  values = list(arrays.values())
  if all(map(in_host_memory, values)):
    finite = [np.isfinite(x).all() for x in jax.device_get(values)]
  else:
    finite = jax.device_get(_are_finite(mesh)(values))
  bad = [path for path, ok in zip(arrays, finite) if not ok]
  if not bad:
    return ''
  shown = ', '.join(bad[:_SHOWN]) + ', ...' * (len(bad) > _SHOWN)
  return f'NaN or Inf in {len(bad)} of {len(arrays)} arrays ({shown})'


@functools.lru_cache(maxsize=8)
def _are_finite(mesh):
  def are_finite(arrays):
    return jnp.stack([jnp.isfinite(x).all() for x in arrays])

  return jax.jit(are_finite, out_shardings=replicated(mesh))


def advice(
  workdir: PathLike,
  newest: int | None,
  failed: int,
  config: Mapping[str, Any] | None,
  rollbacks: int = 0,
) -> str:
  """Return what the user can do when NaN or Inf ends a run.

  Args:
    workdir: of the run.
    newest: step of the newest checkpoint; None: there is none.
    failed: step in which NaN or Inf was found.
    config: the resolved config, if the run has one.
    rollbacks: number of rollbacks to that checkpoint, which did not help; 0 if
      rollbacks were not asked for.
  """
  if newest is None:
    text = 'None was written yet; the same command starts again at step 1'
  else:
    text = (
      f'The newest, of step {newest} in {workdir}, is finite; the same command '
      'resumes from it'
    )
  if rollbacks:
    text = f'Gave up after {rollbacks} rollbacks without a new one. {text}'
  flags = [
    f'--config.{key}={value:g} --allow_changes={key}  (now {now})'
    for key, value, now in _to_try(config or {})
  ]
  if not rollbacks:
    since = f'steps {(newest or 0) + 1} to {failed}'
    rollback = f'--config.on_nan=rollback  (skips the batches of {since})'
    flags.insert(0, rollback)
  return '\n  '.join(
    [f'{text} and fails again. Add one of these to it:', *flags]
  )


def _to_try(config):
  """Yield (key, value to try, value now) of a resolved config."""
  schedule, optimizer = (config.get(x) or {} for x in ('schedule', 'optimizer'))
  lr, clip_norm = schedule.get('lr'), optimizer.get('clip_norm')
  if lr:
    yield 'schedule.lr', lr / 10 if lr <= 1 else 1e-3, lr
  for key, value in schedule.items():
    if key.startswith('warmup_') and value:
      yield f'schedule.{key}', 2 * value, value
  yield 'optimizer.clip_norm', clip_norm / 10 if clip_norm else 1, clip_norm

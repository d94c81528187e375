"""Asynchronous Orbax checkpoints of a training run.

A run is initialised from the first of these that exists:

1. the newest checkpoint in its own workdir, from which it resumes bit for bit;
2. `init_from`: parameters of another run or of a weights file, adapted to the
   model (weights/surgery.py);
3. scratch.

A checkpoint at step n is the state after n steps. It is stored in
WORKDIR/checkpoints/n as the items 'params', 'ema' (if kept), 'train' (step,
optimizer state and rng), 'data' (position in the training data, partial means
of metrics) and 'checksums' (dtype, shape and checksum of each array). A run
resumes from the newest checkpoint that is whole.
"""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers

from vit_jax import tree
from vit_jax.optim.durations import Interval, Timeline, fraction
from vit_jax.parallel import hosts
from vit_jax.runs import checksums, terminal, workdirs
from vit_jax.runs.files import PathLike, read_json
from vit_jax.types import Count, UserError


@dataclasses.dataclass(frozen=True)
class Checkpoints:
  """Rules for writing and keeping checkpoints.

  Attributes:
    every: time between checkpoints; None for one at the end. A run that is
      stopped also writes one. A kill loses the steps since the last complete
      checkpoint: training waits for a checkpoint before it begins the next.
    keep_last: number of newest checkpoints to keep.
    keep_every: checkpoints at multiples of this are kept for good.
    best_metric: 'EVALUATOR/METRIC', by which the best checkpoint is kept.
    best_mode: whether the largest or the smallest value is the best.
    keep_best: number of best checkpoints to keep.
  """

  every: Interval | None = None
  keep_last: Count = 1
  keep_every: Interval | None = None
  best_metric: str | None = None
  best_mode: Literal['max', 'min'] = 'max'
  keep_best: Count = 1

  def open(
    self,
    workdir: PathLike,
    timeline: Timeline,
    eval_every: Mapping[str, int | None],
  ) -> tuple['Checkpointer', int]:
    """Return the Checkpointer of a run, and the steps between checkpoints.

    Args:
      workdir: directory of the run.
      timeline: Timeline of the run.
      eval_every: {name of each evaluator: steps between its runs, or None}.

    Raises:
      ValueError: a best_metric that not every checkpoint has, or a keep_every
        that falls between two checkpoints.
    """
    every = timeline.steps(self.every) or timeline.steps(fraction(1))
    keep_every = timeline.steps(self.keep_every)
    if keep_every and keep_every % every:
      raise UserError(
        f'checkpoints: keep_every is {keep_every} steps, and checkpoints are '
        f'written every {every} steps. Make keep_every a multiple of that.'
      )
    name = (self.best_metric or '').split('/')[0]
    if name and name not in eval_every:
      raise UserError(
        f'checkpoints.best_metric={self.best_metric!r}: there is no evaluator '
        f'{name!r}; there are {list(eval_every)}. Use EVALUATOR/METRIC.'
      )
    if name and every % (eval_every[name] or every + 1):
      raise UserError(
        f'checkpoints.best_metric={self.best_metric!r}: checkpoints are '
        f'written every {every} steps, but {name!r} runs every '
        f'{eval_every[name]}. Make the first a multiple of the second.'
      )
    return Checkpointer(workdir, self, keep_every_steps=keep_every), every


class Checkpointer:
  """Checkpoints in WORKDIR/checkpoints.

  Args:
    workdir: local, or any path that epath understands (gs://...).
    rules: which checkpoints are kept.
    keep_every_steps: checkpoints whose step is a multiple are kept for good.
  """

  def __init__(
    self,
    workdir: PathLike,
    rules: Checkpoints = Checkpoints(),
    *,
    keep_every_steps: int | None = None,
  ) -> None:
    self._best_metric = rules.best_metric
    policies = [checkpoint_managers.LatestN(rules.keep_last)]
    if keep_every_steps:
      policies.append(checkpoint_managers.EveryNSteps(keep_every_steps))
    best = None
    if rules.best_metric:
      best = checkpoint_managers.BestN(
        get_metric_fn=lambda metrics: metrics[rules.best_metric],
        n=rules.keep_best,
        reverse=rules.best_mode == 'min',
        keep_checkpoints_without_metrics=False,
      )
      policies.append(best)
    self.directory = epath.Path(workdir).absolute() / 'checkpoints'
    self._manager = ocp.CheckpointManager(
      self.directory,
      options=ocp.CheckpointManagerOptions(
        # The policies say what is kept, but only with best_fn does Orbax write
        # the metrics that it needs to know the best after a restart.
        best_fn=best and best.get_metric_fn,
        best_mode=rules.best_mode,
        preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
      ),
    )

  def latest_step(self) -> int | None:
    """Return the step of the newest complete checkpoint, or None."""
    return self._manager.latest_step()

  def save(
    self,
    step: int,
    state: Any,
    data: Mapping[str, Any],
    metrics: Mapping[str, float] | None = None,
  ) -> None:
    """Start to write a checkpoint; training can continue at once.

    Args:
      step: number of steps done.
      state: TrainState.
      data: position in the training data, as JSON values.
      metrics: evaluation results of this step.
    """
    if step == self.latest_step():
      return
    has_best = self._best_metric in (metrics or {})
    items = _items(state)
    self._manager.save(
      step,
      args=ocp.args.Composite(
        data=ocp.args.JsonSave({**data}),
        checksums=ocp.args.JsonSave(_record(items, data)),
        **{name: ocp.args.StandardSave(x) for name, x in items.items()},
      ),
      metrics={**metrics} if metrics and has_best else None,
      force=True,
    )

  def restore(self, abstract_state: Any) -> tuple[Any, dict[str, Any]]:
    """Return (state, data) of the newest whole checkpoint.

    Damaged checkpoints that are newer are reported and renamed. All hosts must
    call this function, and take the same decision.

    Args:
      abstract_state: TrainState of ShapeDtypeStructs with shardings, which need
        not be those that the checkpoint was written with.

    Raises:
      ValueError: the checkpoint has other arrays, with a diff; or no checkpoint
        is whole.
    """
    damaged: dict[int, str] = {}
    found: Any
    for step in sorted(self._manager.all_steps(), reverse=True):
      try:
        found, reason = self._read(step, abstract_state), ''
      except _Damaged as error:
        found, reason = None, str(error)
      if hosts.on_any(bool(reason)):
        damaged[step] = reason or 'another host cannot read it'
        continue
      for other, reason in damaged.items():
        self._set_aside(other, reason)
      return found
    reasons = '\n'.join(f'  {step}: {x}' for step, x in damaged.items())
    raise UserError(
      f'{self.directory} has no whole checkpoint:\n{reasons}\nPut a good copy '
      'of one there, or train in another workdir.'
    )

  def _read(self, step, abstract_state):
    path, items = self.directory / str(step), _items(abstract_state)
    try:
      recorded = _recorded(path)
      data = read_json(path / 'data' / 'metadata')
    except Exception as error:
      raise _Damaged(_line(error)) from error
    _check_fits(path, recorded['arrays'], items)
    restore = {k: ocp.args.StandardRestore(x) for k, x in items.items()}
    try:
      found = self._manager.restore(step, args=ocp.args.Composite(**restore))
    except (MemoryError, jax.errors.JaxRuntimeError):
      raise  # not the fault of the files
    except Exception as error:
      raise _Damaged(_line(error)) from error
    _verify(recorded, {name: found[name] for name in items})
    if checksums.of_json(data) != recorded['data']:
      raise _Damaged('its data position differs from its checksum')
    state = dataclasses.replace(
      abstract_state,
      params=found['params'],
      ema=found.get('ema'),
      **found['train'],
    )
    return state, data

  def _set_aside(self, step, reason):
    """Rename a damaged checkpoint, because the run will write this step."""
    name = f'damaged-{step}'
    if jax.process_index() == 0:
      (self.directory / str(step)).rename(self.directory / name)
    multihost_utils.sync_global_devices(name)
    self._manager.reload()
    terminal.say(
      f'{self.directory / str(step)} is damaged: {reason}. It was renamed to '
      f'{name}.'
    )

  def wait(self) -> None:
    """Wait until everything is written; raise the error if it failed."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Wait until everything is written, and release the directory.

    While another error is raised, several hosts do not wait: a host that has
    failed cannot finish a checkpoint with the others.
    """
    if sys.exception() is None or jax.process_count() == 1:
      self._manager.close()


class _Damaged(Exception):
  """Error of a damaged checkpoint; its text says what is wrong."""


def _items(state):
  """Return {item: tree} of a TrainState, as checkpoints have it."""
  train = {'step': state.step, 'opt_state': state.opt_state, 'rng': state.rng}
  items = {'params': state.params, 'train': train}
  return items if state.ema is None else {**items, 'ema': state.ema}


def _record(items, data):
  """Return the content of the item 'checksums'."""
  arrays = {}
  for name, item in items.items():
    flat = tree.flatten(item)
    shapes, sums = _shapes(flat), checksums.of_arrays(flat)
    arrays[name] = {
      path: (x.dtype.name, x.shape, sums[path]) for path, x in shapes.items()
    }
  content = {'arrays': arrays, 'data': checksums.of_json(data)}
  return {'content': content, 'checksum': checksums.of_json(content)}


def _recorded(path):
  """Return {'arrays': ..., 'data': ...} of the item 'checksums'."""
  found = read_json(path / 'checksums' / 'metadata')
  if found['checksum'] != checksums.of_json(found['content']):
    raise UserError('the checksums differ from their own checksum')
  return found['content']


def _verify(recorded, items):
  """Raise _Damaged if an array of {item: tree} differs from its checksum."""
  bad = [
    f'{name}/{path}'
    for name, item in items.items()
    for path, found in checksums.of_arrays(tree.flatten(item)).items()
    if recorded['arrays'][name][path][2] != found
  ]
  if bad:
    raise _Damaged(f'{len(bad)} arrays ({bad[0]}) differ from their checksum')


def _shapes(arrays):
  """Return {path: ShapeDtypeStruct} as checkpoints have it: ints for keys."""

  def stored(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x

  plain = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in arrays.items()}
  return jax.eval_shape(lambda x: jax.tree.map(stored, x), plain)


def _check_fits(path, arrays, items):
  """Raise ValueError, with a diff, if a checkpoint has other arrays."""
  for name in dict.fromkeys([*items, *arrays]):
    found = {
      path: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
      for path, (dtype, shape, _) in arrays.get(name, {}).items()
    }
    if lines := tree.diff(found, _shapes(tree.flatten(items.get(name, {})))):
      raise UserError(
        f'{path} does not fit this run. In {name!r} of the checkpoint (-), in '
        f'this run (+):\n{lines}\nUse the config that the run was started '
        'with, or another workdir. To start from its parameters only, set '
        'init_from in a new run.'
      )


def _line(error):
  """Return an error as one line."""
  text = ' '.join(str(error).split()).removesuffix('.')
  return f'{type(error).__name__}: {text:.300}'


# Parameters, without the run that wrote them.


def find(path: PathLike, step: int | None = None) -> epath.Path:
  """Return the directory of one checkpoint.

  Args:
    path: a workdir, its checkpoints folder, or one checkpoint (.../500).
    step: which checkpoint; None for the newest.

  Raises:
    ValueError: there is none; with what was found instead.
  """
  path = epath.Path(path)
  if workdirs.is_step(path.name) and (path / 'params').exists():
    return path
  folder = path / 'checkpoints' if (path / 'checkpoints').exists() else path
  steps = workdirs.steps(folder)
  if not steps:
    seen = 'does not exist' if not path.exists() else 'has none'
    raise UserError(
      f'No checkpoint: {path} {seen}. Use a workdir, a checkpoint in it '
      '(WORKDIR/checkpoints/STEP), or a weights file (.npz or .safetensors).'
    )
  if step is not None and step not in steps:
    raise UserError(f'{folder} has no step {step}; it has {steps}.')
  return folder / str(steps[-1] if step is None else step)


def load_params(
  path: PathLike,
  *,
  step: int | None = None,
  ema: bool | Literal['auto'] = 'auto',
) -> tuple[dict[str, np.ndarray], epath.Path]:
  """Return ({path: np.ndarray}, directory) of a checkpoint, verified.

  Args:
    path, step: see `find`.
    ema: True for the EMA of the parameters, False for the parameters, 'auto'
      for the EMA if the run kept one.
  """
  directory = find(path, step)
  has_ema = (directory / 'ema').exists()
  if ema is True and not has_ema:
    raise UserError(f'{directory} has no EMA. Leave out ema=True.')
  item = 'ema' if ema and has_ema else 'params'
  recorded = _recorded(directory)
  as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
    found = reader.restore(
      (directory / item).absolute(),
      args=ocp.args.PyTreeRestore(
        restore_args=tree.unflatten(
          {path: as_numpy for path in recorded['arrays'][item]}
        )
      ),
    )
  params = tree.flatten(found)
  try:
    _verify(recorded, {item: params})
  except _Damaged as error:
    raise UserError(
      f'{directory} is damaged: {error}. Use another step, or another copy.'
    ) from error
  return params, directory

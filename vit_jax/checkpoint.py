"""Asynchronous Orbax checkpoints of a training run.

A run is initialised from the first of these that exists:

1. the newest checkpoint in its own workdir, from which it resumes bit for bit;
2. `init_from`: parameters of another run or of a weights file, adapted to the
   model (weights/surgery.py);
3. scratch.

A checkpoint at step n is the state after n steps. It is stored in
workdir/checkpoints/n as the items 'params', 'ema' (if kept), 'train' (step,
optimizer state and rng) and 'data' (position in the training data), so that
parameters can be read without knowing what trained them.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers

from vit_jax import checks, tree
from vit_jax.durations import Duration, Timeline, fraction
from vit_jax.files import LARGEST_JSON, PathLike, check_remote


@dataclasses.dataclass(frozen=True)
class Checkpoints:
  """When checkpoints are written and which of them are kept.

  Attributes:
    every: time between checkpoints; None for one at the end. A run that is
      stopped also writes one.
    keep_last: number of newest checkpoints to keep.
    keep_every: checkpoints at multiples of this are kept for good.
    best_metric: 'EVALUATOR/METRIC', by which the best checkpoint is kept.
    best_mode: 'max' or 'min'.
    keep_best: number of best checkpoints to keep.

  Raises:
    ValueError: values that make no sense.
  """

  every: Duration | None = None
  keep_last: int = 1
  keep_every: Duration | None = None
  best_metric: str | None = None
  best_mode: str = 'max'
  keep_best: int = 1

  def __post_init__(self) -> None:
    if self.keep_last < 1:
      raise ValueError(f'keep_last={self.keep_last} must be at least 1.')
    checks.one_of('best_mode', self.best_mode, ('max', 'min'))

  def open(
    self,
    workdir: PathLike,
    timeline: Timeline,
    eval_every: Mapping[str, int | None],
  ) -> tuple['Checkpointer', int]:
    """Return the Checkpointer of a run, and the steps between checkpoints.

    Args:
      workdir: of the run.
      timeline: Timeline of the run.
      eval_every: {name of each evaluator: steps between its runs, or None}.

    Raises:
      ValueError: a best_metric that not every checkpoint has, or a keep_every
        that falls between two checkpoints.
    """
    every = timeline.steps(self.every) or timeline.steps(fraction(1))
    keep_every = timeline.steps(self.keep_every)
    if keep_every and keep_every % every:
      raise ValueError(
        f'checkpoint: keep_every is {keep_every} steps, and checkpoints are '
        f'written every {every} steps. Make keep_every a multiple of that.'
      )
    if self.best_metric:
      self._check_best_metric(every, eval_every)
    checkpointer = Checkpointer(
      workdir,
      keep_last=self.keep_last,
      keep_every_steps=keep_every,
      best_metric=self.best_metric,
      best_mode=self.best_mode,
      keep_best=self.keep_best,
    )
    return checkpointer, every

  def _check_best_metric(self, every, eval_every):
    name = self.best_metric.split('/')[0]
    if name not in eval_every:
      raise ValueError(
        f'checkpoint.best_metric={self.best_metric!r}: there is no evaluator '
        f'{name!r}; there are {list(eval_every)}. Use EVALUATOR/METRIC.'
      )
    if not eval_every[name] or every % eval_every[name]:
      raise ValueError(
        f'checkpoint.best_metric={self.best_metric!r}: checkpoints are written '
        f'every {every} steps, but {name!r} runs every {eval_every[name]}. '
        'Make the first a multiple of the second.'
      )


class Checkpointer:
  """Checkpoints in workdir/checkpoints.

  Args:
    workdir: local, or any path that epath understands (gs://...).
    keep_last, best_metric, best_mode, keep_best: see Checkpoints.
    keep_every_steps: checkpoints whose step is a multiple are kept for good.
  """

  def __init__(
    self,
    workdir: PathLike,
    *,
    keep_last: int = 1,
    keep_every_steps: int | None = None,
    best_metric: str | None = None,
    best_mode: str = 'max',
    keep_best: int = 1,
  ) -> None:
    self.best_metric = best_metric
    policies = [checkpoint_managers.LatestN(keep_last)]
    if keep_every_steps:
      policies.append(checkpoint_managers.EveryNSteps(keep_every_steps))
    best = None
    if best_metric:
      best = checkpoint_managers.BestN(
        get_metric_fn=lambda metrics: metrics[best_metric],
        n=keep_best,
        reverse=best_mode == 'min',
        keep_checkpoints_without_metrics=False,
      )
      policies.append(best)
    self.directory = epath.Path(workdir) / 'checkpoints'
    self._manager = ocp.CheckpointManager(
      self.directory.absolute(),
      options=ocp.CheckpointManagerOptions(
        # The policies say what is kept, but only with best_fn does Orbax write
        # the metrics that it needs to know the best after a restart.
        best_fn=best and best.get_metric_fn,
        best_mode=best_mode,
        preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
      ),
      item_handlers={
        'params': ocp.StandardCheckpointHandler(),
        'ema': ocp.StandardCheckpointHandler(),
        'train': ocp.StandardCheckpointHandler(),
        'data': ocp.JsonCheckpointHandler(),
      },
    )

  def latest_step(self) -> int | None:
    """Return the step of the newest complete checkpoint, or None."""
    return self._manager.latest_step()

  def restore(
    self, abstract_state: Any, step: int | None = None
  ) -> tuple[Any, dict[str, Any]]:
    """Return (state, position in the data) of a checkpoint.

    Args:
      abstract_state: TrainState of ShapeDtypeStructs with shardings, which need
        not be those that the checkpoint was written with.
      step: which checkpoint; None for the newest.

    Raises:
      ValueError: the checkpoint has other arrays; with a diff.
    """
    step = self.latest_step() if step is None else step
    items = _state_items(abstract_state)
    saved = self._manager.item_metadata(step)
    if (saved.get('ema') is None) != ('ema' not in items):
      has, needs = ('an', 'none') if 'ema' not in items else ('no', 'one')
      raise ValueError(
        f"{self.directory / str(step)} has {has} 'ema'; this run needs {needs} "
        f'(ema_decay). {_OTHER_RUN}'
      )
    for name, item in items.items():
      want = tree.flatten(jax.tree.map(_as_stored, item))
      have = tree.flatten(_abstract(saved[name]))
      if lines := tree.diff(have, want):
        raise ValueError(
          f'{self.directory / str(step)} does not fit this run. In {name!r} of '
          f'the checkpoint (-), in this run (+):\n{lines}\n{_OTHER_RUN}'
        )
    restored = self._manager.restore(
      step,
      args=ocp.args.Composite(
        data=ocp.args.JsonRestore(),
        **{k: ocp.args.StandardRestore(v) for k, v in items.items()},
      ),
    )
    state = dataclasses.replace(
      abstract_state,
      params=restored['params'],
      ema=restored.get('ema'),
      **restored['train'],
    )
    return state, restored['data']

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
      metrics: evaluation results of this step; should have `best_metric`.
    """
    if step == self.latest_step():
      return
    if self.best_metric and self.best_metric not in (metrics or {}):
      metrics = None  # kept by the other policies; cannot be the best
    self._manager.save(
      step,
      args=ocp.args.Composite(
        data=ocp.args.JsonSave(data),
        **{k: ocp.args.StandardSave(v) for k, v in _state_items(state).items()},
      ),
      metrics=metrics if self.best_metric else None,
      force=True,
    )

  def wait(self) -> None:
    """Wait until everything is written."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Wait until everything is written, and release the directory."""
    self.wait()
    self._manager.close()


_OTHER_RUN = (
  'Use the config that the run was started with, or another workdir. To start '
  'from its parameters only, set init_from in a new run.'
)


def _state_items(state):
  items = {
    'params': state.params,
    'train': {
      'step': state.step,
      'opt_state': state.opt_state,
      'rng': state.rng,
    },
  }
  if state.ema is not None:
    items['ema'] = state.ema
  return items


def _as_stored(leaf):
  """Return the abstract array that Orbax stores: integers for keys."""
  if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    return jax.eval_shape(jax.random.key_data, leaf)
  return leaf


def _abstract(metadata):
  """Return a tree of ShapeDtypeStructs from the metadata of an item."""
  return jax.tree.map(
    lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype), metadata.tree
  )


def find(path: PathLike, step: int | None = None) -> epath.Path:
  """Return the directory of one checkpoint.

  Args:
    path: a workdir, its checkpoints folder, or one checkpoint (.../500).
    step: which checkpoint; None for the newest.

  Raises:
    ValueError: there is none; with what was found instead.
  """
  if path is None:
    raise ValueError(
      'init_from.path is not set. Set it to a workdir, a checkpoint, or a '
      'weights file: --config.init_from.path=PATH'
    )
  check_remote(path)
  path = epath.Path(path)
  if path.name.isdigit() and (path / 'params').exists():
    return path
  folder = path / 'checkpoints' if (path / 'checkpoints').exists() else path
  steps = []
  if folder.exists():
    # A checkpoint gets its final name only when it is complete.
    steps = sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())
  if not steps:
    seen = 'does not exist' if not path.exists() else 'has none'
    raise ValueError(
      f'No checkpoint: {path} {seen}. Expected a workdir, a checkpoint in it '
      '(WORKDIR/checkpoints/STEP), a weights file (.npz or .safetensors), or a '
      'folder with one.'
    )
  if step is not None and step not in steps:
    raise ValueError(f'{folder} has no step {step}; it has {steps}.')
  return folder / str(steps[-1] if step is None else step)


def load_params(
  path: PathLike, *, step: int | None = None, ema: bool | str = 'auto'
) -> tuple[dict[str, np.ndarray], epath.Path]:
  """Return the parameters of a checkpoint as numpy arrays.

  Args:
    path, step: see `find`.
    ema: True for the EMA of the parameters, False for the parameters, 'auto'
      for the EMA if the run kept one.

  Returns:
    ({path: np.ndarray}, directory of the checkpoint).
  """
  directory = find(path, step)
  return saved_params(directory, ema=ema).read(), directory


@dataclasses.dataclass(frozen=True)
class SavedParams:
  """Parameters in a checkpoint, of which only shapes have been read.

  Attributes:
    shapes: {path: ShapeDtypeStruct}.
    size: bytes of their files.
    read: function () -> {path: np.ndarray}.
  """

  shapes: dict[str, jax.ShapeDtypeStruct]
  size: int
  read: Callable[[], dict[str, np.ndarray]]


def saved_params(
  directory: epath.Path, *, ema: bool | str = 'auto'
) -> SavedParams:
  """Return the parameters in the directory of one checkpoint.

  Raises:
    ValueError: it has no EMA, or cannot be read. So does `read`.
  """
  has_ema = (directory / 'ema').exists()
  if ema is True and not has_ema:
    raise ValueError(f'{directory} has no EMA. Leave out ema=True.')
  item = directory / ('ema' if ema and has_ema else 'params')
  with _readable(item), _handler() as handler:
    size = _size(item)
    abstract = _abstract(handler.metadata(item))
    shapes = tree.flatten(abstract)

  def read():
    restore_args = jax.tree.map(
      lambda _: ocp.RestoreArgs(restore_type=np.ndarray), abstract
    )
    with _readable(item), _handler() as handler:
      params = handler.restore(
        item, args=ocp.args.PyTreeRestore(restore_args=restore_args)
      )
      return tree.flatten(params)

  return SavedParams(shapes, size, read)


def _size(path):
  """Return the bytes of a file, or of all files in a folder.

  Raises:
    ValueError: a file of JSON is so large that parsing it takes all memory.
  """
  if path.is_dir():
    return sum(_size(inner) for inner in path.iterdir())
  size = path.stat().length
  is_json = path.name.startswith(('.z', 'zarr', '_', 'process_'))
  if is_json and size > LARGEST_JSON:
    raise ValueError(f'{path.name} has {size} bytes of JSON')
  return size


def _handler():
  return contextlib.closing(ocp.PyTreeCheckpointHandler())


@contextlib.contextmanager
def _readable(item):
  """Turn whatever Orbax raises on broken files into one ValueError."""
  try:
    yield
  except Exception as e:
    reason = ' '.join(str(e).split())
    raise ValueError(
      f'{item} cannot be read: {type(e).__name__}: {reason:.300}. It is '
      'incomplete or corrupt. Use another step, or another copy of it.'
    ) from e

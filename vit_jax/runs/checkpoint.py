"""Asynchronous Orbax checkpoints of a training run.

A run is initialised from the first of these that exists:

1. the newest checkpoint in its own workdir, from which it resumes bit for bit;
2. `init_from`: parameters of another run or of a weights file, adapted to the
   model (weights/surgery.py);
3. scratch.

A checkpoint at step n is the state after n steps. It is stored in
workdir/checkpoints/n as the items 'params', 'ema' (if kept), 'train' (step,
optimizer state and rng) and 'data' (position in the training data), so that
parameters can be read without knowing what trained them. The item 'checksums'
has the shape, dtype and checksum of each array.

A checkpoint is written while training continues. When it is begun, the one
before is complete, so that a kill loses at most two intervals between
checkpoints; with `max_lag`, at most one interval and the lag.

A checkpoint is verified when it is read. A run sets a damaged one aside, as
workdir/checkpoints/damaged-n, and resumes from the newest good one.
"""

import concurrent.futures.thread
import contextlib
import dataclasses
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Annotated, Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers

from vit_jax.config.domains import Count, OneOf, checked
from vit_jax.optim.durations import Duration, Interval, Timeline, fraction
from vit_jax.runs import checksums, storage, stored, terminal
from vit_jax.runs.files import PathLike

_ASIDE = 'damaged-'  # Prefix of the names of checkpoints that are set aside.


@checked
@dataclasses.dataclass(frozen=True)
class Checkpoints:
  """Rules for writing and keeping checkpoints.

  Attributes:
    every: time between checkpoints; None for one at the end. A run that is
      stopped also writes one.
    max_lag: training waits when a checkpoint is still being written after this
      time. A kill at any moment then loses at most `every` + `max_lag`, in
      steps; 0 waits for each checkpoint. None: at most twice `every`, because
      training waits only before the next checkpoint.
    keep_last: number of newest checkpoints to keep.
    keep_every: checkpoints at multiples of this are kept for good.
    best_metric: 'EVALUATOR/METRIC', by which the best checkpoint is kept.
    best_mode: 'max' or 'min'.
    keep_best: number of best checkpoints to keep.

  Raises:
    ValueError: values that make no sense.
  """

  every: Interval | None = None
  max_lag: Duration | None = None
  keep_last: Count = 1
  keep_every: Interval | None = None
  best_metric: str | None = None
  best_mode: Annotated[str, OneOf('max', 'min')] = 'max'
  keep_best: Count = 1

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
      max_lag_steps=timeline.steps(self.max_lag),
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
    max_lag_steps: see `must_wait`.
  """

  def __init__(
    self,
    workdir: PathLike,
    *,
    keep_last: int = 1,
    keep_every_steps: int | None = None,
    max_lag_steps: int | None = None,
    best_metric: str | None = None,
    best_mode: str = 'max',
    keep_best: int = 1,
  ) -> None:
    self.best_metric = best_metric
    self._max_lag = max_lag_steps
    self._writing: int | None = None  # Step of the checkpoint in progress.
    self._described = False  # Whether the workdir had its mark.
    self._threads: set[threading.Thread] = set()  # Of the save in progress.
    for name in ('absl', 'asyncio'):
      logging.getLogger(name).addFilter(_repeats_no_error)
    _ignore_closed_loops()
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
    self._mark = epath.Path(workdir) / storage.MARK
    self._manager: Any = None
    self._set_aside(_of_first_host(stored.not_checkpoints(self.directory)))
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
        'checksums': checksums.Handler(),
      },
    )
    if self.latest_step() is None:
      self._refuse_only_damaged()

  def latest_step(self) -> int | None:
    """Return the step of the newest complete checkpoint, or None."""
    return self._manager.latest_step()

  def restore(
    self,
    abstract_state: Any,
    step: int | None = None,
    *,
    batch_size: int | None = None,
  ) -> tuple[Any, dict[str, Any]]:
    """Return (state, position in the data) of the newest good checkpoint.

    Damaged checkpoints are set aside under another name, with a line that says
    so. All hosts must call this function, and take the same decision.

    Args:
      abstract_state: TrainState of ShapeDtypeStructs with shardings, which need
        not be those that the checkpoint was written with.
      step: which checkpoint, if not the newest.
      batch_size: examples per step, to check positions of checkpoints that
        have no checksums.

    Raises:
      ValueError: the checkpoint has other arrays, with a diff; it cannot be
        read; or no checkpoint is good.
    """
    self.wait()
    steps = sorted(self._manager.all_steps(), reverse=True)
    bad: dict[str, str] = {}  # {name: reason}
    for chosen in steps if step is None else [step]:
      path, found, reason = self.directory / str(chosen), None, ''
      try:
        with stored.quiet():
          found = stored.read_state(path, abstract_state, batch_size)
      except stored.Damaged as error:
        reason = str(error)
      reason = _first_reason(reason)
      if found and not reason:
        state, saved, recorded = found
        if recorded:
          reason = recorded.difference(stored.flat_items_of(state))
        if not reason:
          # Only now: what fails for all checkpoints may not be their fault.
          self._set_aside(bad)
          return state, saved
      bad[path.name] = reason
      found = state = None  # The next one needs their memory.
    reasons = '\n'.join(f'  {name}: {reason}' for name, reason in bad.items())
    raise ValueError(
      f'{self.directory} has no good checkpoint:\n{reasons}\nNothing was '
      'changed. Put a good copy of a checkpoint there, under the number of its '
      'step, or train in another workdir.'
    )

  def _set_aside(self, reasons):
    """Rename checkpoints; each gets a line with the reason."""
    for name, reason in reasons.items():
      target, number = self.directory / f'{_ASIDE}{name}', 1
      if jax.process_index() == 0:
        while target.exists():
          number += 1
          target = self.directory / f'{_ASIDE}{name}-{number}'
        (self.directory / name).rename(target)
      _of_first_host('renamed')  # All hosts wait for it.
      terminal.say(
        f'{self.directory / name} is damaged: {reason}. It is set aside as '
        f'{target.name}.'
      )
    if reasons and self._manager:
      self._manager.reload()

  def _refuse_only_damaged(self):
    """Raise ValueError if all checkpoints of the run have been set aside."""
    if not self.directory.exists():
      return
    names = [path.name for path in self.directory.iterdir()]
    names = sorted(name for name in names if name.startswith(_ASIDE))
    if names:
      raise ValueError(
        f'{self.directory} has no good checkpoint left. Damaged and set aside: '
        f'{", ".join(names)}. Put a good copy of a checkpoint there, under the '
        'number of its step, or use another workdir to train from scratch. To '
        f'train from scratch in this one, delete {names[0]}'
        f'{" and the others" * (len(names) > 1)}.'
      )

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
    metrics = metrics if self.best_metric else None
    if self._described and not self._mark.exists():
      raise storage.WorkdirError(
        storage.gone(self.directory.parent, self.complete_step())
      )
    self._described = self._mark.exists()
    self.wait()
    self._writing = step
    before = _writers()
    try:
      self._start(step, state, data, metrics)
    except Exception:
      self._remove_remains()
      raise
    finally:
      self._threads = _writers() - before

  def _start(self, step, state, data, metrics):
    items = stored.items_of(state)
    self._manager.save(
      step,
      args=ocp.args.Composite(
        checksums=checksums.SaveArgs(
          # Dispatched before the next step, which donates the state.
          checksums.Checksums.of(stored.flat_items_of(state), data, metrics)
        ),
        data=ocp.args.JsonSave(data),
        **{k: ocp.args.StandardSave(v) for k, v in items.items()},
      ),
      metrics=metrics,
      force=True,
    )

  def must_wait(self, step: int) -> bool:
    """Return whether to call `wait` after this step.

    The checkpoint that is being written began `max_lag_steps` ago; or it is
    written, perhaps with an error, which `wait` then raises.
    """
    if self._writing is None:
      return False
    is_late = (
      self._max_lag is not None and step - self._writing >= self._max_lag
    )
    return is_late or not self._manager.is_saving_in_progress()

  def complete_step(self) -> int | None:
    """Return the step of the newest checkpoint that is written, or None."""
    steps = [x for x in self._manager.all_steps() if x != self._writing]
    return max(steps, default=None)

  def wait(self) -> None:
    """Wait until everything is written; raise the error if it failed."""
    try:
      self._manager.wait_until_finished()
    except Exception:
      self._remove_remains()
      raise
    self._writing = None

  def _remove_remains(self):
    """Remove what a failed save has left, which may fill the disk.

    If the workdir was moved meanwhile, TensorStore has created its folders
    again, and Orbax may have renamed the incomplete checkpoint.
    """
    if self._writing is None or jax.process_index():
      return
    end = time.monotonic() + 60
    for thread in self._threads:  # Others still write.
      thread.join(max(0, end - time.monotonic()))
    is_gone = self._described and not self._mark.exists()
    name = str(self._writing)
    with contextlib.suppress(OSError):
      for path in self.directory.iterdir():
        is_begun = path.name.startswith(f'{name}.orbax-checkpoint-tmp')
        if is_begun or (is_gone and path.name == name):
          storage.remove(path)

  def close(self) -> None:
    """Wait until everything is written, and release the directory.

    While another error is raised, errors are ignored, and several hosts do not
    wait: a host that has failed cannot finish a checkpoint with the others.
    """
    is_failing = sys.exception() is not None
    if is_failing and jax.process_count() > 1:
      return
    try:
      self.wait()
    except Exception:
      if not is_failing:
        raise
    finally:
      self._manager.close()


def _writers():
  """Return the threads that may write and then end; those of pools do not."""
  pools = concurrent.futures.thread._threads_queues  # type: ignore[attr-defined]
  return {*threading.enumerate()} - {*pools}


def _repeats_no_error(record):
  """Return whether to print a log record: no errors that Orbax also raises.

  Threads and coroutines that a failed save leaves behind log them even when the
  interpreter ends.
  """
  if not record.exc_info:
    return True
  marks = (f'{os.sep}orbax{os.sep}', 'OCDBT', 'TensorStore')
  texts = record.pathname, record.getMessage()
  return not any(mark in text for mark in marks for text in texts)


def _ignore_closed_loops():
  """Keep TensorStore's threads silent that outlive the loop of a failed save.

  Each would print a traceback when it has finished.
  """
  before = sys.unraisablehook
  if getattr(before, 'ignores_closed_loops', False):
    return

  def hook(unraisable):
    if str(unraisable.exc_value) != 'Event loop is closed':
      before(unraisable)

  hook.ignores_closed_loops = True  # type: ignore[attr-defined]
  sys.unraisablehook = hook


def _of_first_host(value):
  """Return the JSON value that the first host passes, on all hosts."""
  if jax.process_count() == 1:
    return value
  text = np.frombuffer(json.dumps(value).encode(), np.uint8)
  size = int(multihost_utils.broadcast_one_to_all(np.array(len(text))))
  if jax.process_index():
    text = np.zeros(size, np.uint8)
  return json.loads(bytes(multihost_utils.broadcast_one_to_all(text)))


def _first_reason(reason):
  """Return the first text that is not empty of those that the hosts pass."""
  if jax.process_count() == 1:
    return reason
  text = np.frombuffer(reason.encode()[:400].ljust(400), np.uint8)
  texts = [
    bytes(x).decode(errors='ignore').strip()
    for x in multihost_utils.process_allgather(text)
  ]
  return next(filter(None, texts), '')

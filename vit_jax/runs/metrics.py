"""Metrics of a run: collected, checked, and written where users read them.

Monitor never makes the host wait for the step that was just dispatched: it
fetches the metrics of the step before. It stops the run at the first NaN or
Inf. Once per log interval it writes a record to metrics.jsonl, to TensorBoard,
to other writers and to the terminal. Each record says what the wall time of the
run so far was spent on.
"""

import collections
import contextlib
import datetime
import math
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from vit_jax.runs import records, terminal
from vit_jax.runs.divergence import NonFiniteError as NonFiniteError
from vit_jax.runs.files import PathLike
from vit_jax.runs.records import read_records as read_records
from vit_jax.runs.terminal import Terminal
from vit_jax.types import Metrics, Params

# Dense bfloat16 FLOP/s of a device by a part of its device_kind, from memory of
# the vendors' data sheets. The first match counts. A device of a TPU v2 or v3
# is a core; a chip has two.
PEAK_FLOPS = {
  'TPU v2': 23e12,
  'TPU v3': 61.5e12,
  'TPU v4': 275e12,
  'TPU v5 lite': 197e12,
  'TPU v5e': 197e12,
  'TPU v5p': 459e12,
  'TPU v5': 459e12,  # of a v5p, too
  'TPU v6 lite': 918e12,
  'TPU v6e': 918e12,
  'B200': 2250e12,
  'H200': 989e12,
  'H100 PCIe': 756e12,
  'H100': 989e12,
  'A100': 312e12,
  'L40S': 362e12,
  'L40': 181e12,
  'L4': 121e12,
  'V100': 125e12,  # float16
  'T4': 65e12,  # float16
  'RTX 4090': 165e12,
  'RTX 3090': 71e12,
}


def peak_flops(device_kind: str) -> float | None:
  """Return a device's peak bfloat16 FLOP/s, or None if it is not known."""
  return next(
    (
      flops
      for name, flops in PEAK_FLOPS.items()
      if re.search(rf'{name}\b', device_kind)  # L40 is no L4, GH200 an H200
    ),
    None,
  )


# Phases of the wall time of a training run, as a user reads them.
_PHASES = {
  'steps': 'goodput (steps)',
  'compile': 'compiling',
  'data': 'waiting for data',
  'evals': 'evaluating',
  'saving': 'saving',
  'restoring': 'restoring',
  'setup': 'setup',
  'profile': 'profiling',
  'lost': 'lost',
}


class Stopwatch:
  """Wall time of a run, divided into phases. It starts at once."""

  def __init__(self) -> None:
    self._seconds: dict[str, float] = {}
    self._begin = time.perf_counter()

  def lap(self, phase: str) -> None:
    """Count the time since the last lap as this phase."""
    now = time.perf_counter()
    self.add({phase: now - self._begin})
    self._begin = now

  def add(self, seconds: Mapping[str, float]) -> None:
    """Add {phase: seconds}, such as those before the run was resumed."""
    for phase, more in seconds.items():
      self._seconds[phase] = self._seconds.get(phase, 0.0) + more

  def record(self) -> dict[str, float]:
    """Return {'seconds/PHASE': wall time so far}."""
    return {f'seconds/{k}': round(v, 3) for k, v in self._seconds.items()}

  def total(self) -> float:
    """Return the seconds of all phases, and those since the last lap."""
    now = time.perf_counter()
    return sum(self._seconds.values()) + now - self._begin


class Monitor:
  """Metrics of a training run.

  Records have the seconds since the start of the run, including the time before
  it was resumed, in each phase:

  setup: from the call of train() to the loop: data, shapes, initialisation.
  restoring: reading a checkpoint.
  compile: the first step, which includes compilation.
  steps: training steps.
  data: waiting for a batch after all dispatched steps were finished.
  evals, saving, profile: evaluations, checkpoints, writing a trace.
  lost: all of that since the last checkpoint of a run that was killed.

  `goodput` is steps / sum, and `progress` the fraction of steps that are done.

  Args:
    workdir: directory for metrics.jsonl and TensorBoard's event file.
    total_steps: length of the training, for the ETA.
    batch_size: global batch size, for images per second.
    log_every_steps: length of a log interval.
    flops_per_step: FLOPs of the model (3 x forward), for the MFU; or a function
      that returns them, which is called for the first record; or None.
    start_step: step from which the run resumes. Later records, which the
      interrupted run wrote, are removed.
    learning_rate: function of the step, to be logged; or None.
    stopwatch: Stopwatch that started with the run; None starts one.
    writers: {name: writer}, see writers.py; they get all records.
    record: JSON values of the config, for the writers.
    carried: what `carry` returned when the checkpoint was saved, from which the
      run resumes; None: its next record averages the new steps only.
    counts: {name: number}, such as the rollbacks so far; records have them.
    before_write: called before each record; raises if it must not be written.
  """

  def __init__(
    self,
    workdir: PathLike,
    *,
    total_steps: int,
    batch_size: int,
    log_every_steps: int,
    flops_per_step: float | Callable[[], float] | None = None,
    start_step: int = 0,
    learning_rate: Callable[[Any], Any] | None = None,
    stopwatch: Stopwatch | None = None,
    writers: Mapping[str, Any] | None = None,
    record: Mapping[str, Any] | None = None,
    carried: Mapping[str, Any] | None = None,
    counts: Mapping[str, int] | None = None,
    before_write: Callable[[], None] = lambda: None,
  ) -> None:
    self.total_steps: int = total_steps
    self._before_write = before_write
    self._counts = counts or {}
    self._batch_size = batch_size
    self._log_every = log_every_steps
    # Compiled: without that, each operation of it would be a program.
    self._learning_rate = learning_rate and jax.jit(learning_rate)
    self._flops = flops_per_step
    self.writer = Writer(workdir, start_step, writers=writers, record=record)
    self._beaten, self._is_finished = -math.inf, False
    self._stopwatch = stopwatch or Stopwatch()
    self._stopwatch.add(self.writer.spent)
    self._stopwatch.lap('setup')
    self._phase = 'compile'  # what time counts as, if nothing else is stated
    self._terminal = Terminal(start_step, total_steps)
    self._compiling = contextlib.ExitStack()
    self._pending = None  # (step, metrics, skipped): dispatched, not fetched
    self._last_finite = start_step
    self._sums: dict[str, float] = collections.defaultdict(float)
    self._sums |= (carried or {}).get('sums', {})
    self._logged = (carried or {}).get('logged', start_step)
    self.restart_clock(start_step)
    self._beat(after_s=0)

  def carry(self, step: int) -> dict[str, Any]:
    """Return what the checkpoint of a step has to save, as JSON values.

    A resumed run then writes the same means as one that was never stopped, also
    over the log interval that the checkpoint divides. Call `flush` before.
    """
    self.writer.heartbeat.save(step, _by_phase(self._stopwatch.record()))
    # Sums since the last record, and its step.
    return {'sums': dict(self._sums), 'logged': self._logged}

  def restart_clock(self, step: int) -> None:
    """Measure rates from this step on."""
    self._clock_step, self._clock = step, time.perf_counter()
    self._waited: dict[str, float] = collections.defaultdict(float)
    self._paused = 0.0

  @contextlib.contextmanager
  def waiting(self, cause: str | Mapping[str, float]) -> Iterator[None]:
    """Context manager that counts its time as waiting for data.

    Args:
      cause: name of the cause, or {name: a number that grows}: the time is
        divided among several causes in proportion to how much they grow.
    """
    self._stopwatch.lap(self._phase)
    before = {} if isinstance(cause, str) else dict(cause)
    begin = time.perf_counter()
    yield
    seconds = time.perf_counter() - begin
    if isinstance(cause, str):
      grown = {cause: 1.0}
    else:
      grown = {name: cause[name] - before[name] for name in cause}
    total = sum(grown.values()) or 1.0
    self._waited['data_wait'] += seconds
    for name, growth in grown.items():
      self._waited[f'data_wait/{name}'] += seconds * growth / total
    self._stopwatch.lap(self._phase if self._is_computing() else 'data')

  def _is_computing(self):
    """Return whether the last dispatched step still runs on the device."""
    metrics = self._pending[1] if self._pending else {}
    arrays = [x for x in metrics.values() if isinstance(x, jax.Array)]
    return not all(x.is_ready() for x in arrays)

  @contextlib.contextmanager
  def pause(self, phase: str = 'evals') -> Iterator[None]:
    """Context manager whose time (evaluation, saving) is not training time."""
    self._stopwatch.lap(self._phase)
    begin = time.perf_counter()
    yield
    self._paused += time.perf_counter() - begin
    self._stopwatch.lap(phase)
    self._beat()

  def step(self, step: int, metrics: Metrics, *, skipped: int = 0) -> None:
    """Take the metrics of a dispatched step; log those of the step before.

    Args:
      step: number of steps, including this one.
      metrics: {name: scalar array}, still being computed.
      skipped: number of unreadable examples replaced so far.
    """
    self._finish((step, metrics, skipped))

  def flush(self) -> None:
    """Wait for the last dispatched step and log its metrics."""
    self._finish(None)

  def _finish(self, new):
    """Log the pending step and make the new one pending."""
    pending, self._pending = self._pending, new
    if pending is None:
      return
    step, metrics, skipped = pending
    values = {k: float(v) for k, v in jax.device_get(metrics).items()}
    self._check_finite(step, values)
    for name, value in values.items():
      self._sums[name] += value
    self._terminal.advance(step)
    self._beat()
    if step % self._log_every == 0 or step == self.total_steps:
      self._log(step, skipped)

  def _check_finite(self, step, values):
    bad = {k: v for k, v in values.items() if not math.isfinite(v)}
    if not bad:
      self._last_finite = step
      return
    steps = [step]
    if self._pending is not None:
      later, metrics, _ = self._pending
      if not all(np.isfinite(v) for v in jax.device_get(metrics).values()):
        steps.append(later)
    self._pending = None
    self._compiling.close()
    self._terminal.close()
    shown = ', '.join(f'{k}={v}' for k, v in bad.items())
    raise NonFiniteError(
      f'{shown} in step {" and ".join(map(str, steps))} (of '
      f'{self.total_steps}). The last finite step was {self._last_finite}. '
      'Earlier checkpoints are kept.',
      step=step,
    )

  def _log(self, step, skipped):
    self._count_flops()
    averaged = step - self._logged
    record = {f'train/{k}': v / averaged for k, v in self._sums.items()}
    if self._learning_rate is not None:
      # The optimizer counts updates from 0.
      with jax.transfer_guard('allow'):
        record['train/lr'] = float(self._learning_rate(step - 1))
    if step > self._clock_step:
      record |= self._rates(step)
    record['memory_gb'] = memory_gb()
    if self._flops:  # of the run so far, as in the paper's table 6
      record['exaflops'] = step * self._flops / 1e18
    if skipped:
      record['data_skipped'] = skipped
    record |= self._counts
    self.write(step, record)
    self._sums.clear()
    self._logged = step
    self.restart_clock(step)

  def _count_flops(self):
    if callable(self._flops):
      with jax.transfer_guard('allow'):
        self._flops = self._flops()

  def _rates(self, step):
    steps, devices = step - self._clock_step, jax.device_count()
    seconds = time.perf_counter() - self._clock - self._paused
    images_per_s = steps * self._batch_size / seconds
    rates = {
      'images_per_s': images_per_s,
      'images_per_s_per_device': images_per_s / devices,
      'eta_s': (self.total_steps - step) * seconds / steps,
    }
    rates |= {k: min(1.0, v / seconds) for k, v in self._waited.items()}
    peak = peak_flops(jax.devices()[0].device_kind)
    if self._flops and peak:
      flops_per_s = steps * self._flops / seconds
      rates['mfu'] = flops_per_s / (peak * devices)
    return rates

  def write(self, step: int, record: Mapping[str, float]) -> None:
    """Write a record of the step to the files and the terminal."""
    self._before_write()
    self.writer.write(step, record | self._spent(step))
    self._terminal.show(step, record)

  def finish(self, step: int) -> None:
    """Write and print the account of the time, after the last checkpoint."""
    self._before_write()
    spent = self._spent(step)
    self.writer.write(step, spent)
    self.writer.heartbeat.remove()
    self._is_finished = True
    self.say(_account(_by_phase(spent)))

  def _spent(self, step):
    self._stopwatch.lap(self._phase)
    found = self._stopwatch.record()
    total = sum(found.values())
    goodput = found.get('seconds/steps', 0.0) / total if total else 0.0
    return {'progress': step / self.total_steps, 'goodput': goodput, **found}

  def _beat(self, after_s=1):
    """Record how long the run has lived, once a second."""
    now = time.perf_counter()
    if now - self._beaten >= after_s:
      self._beaten = now
      self.writer.heartbeat.beat(self._stopwatch.total())

  def compiling(self) -> None:
    """Show that the first step is being compiled, until `compiled`."""
    self._compiling.enter_context(terminal.waiting('compiling ...'))

  def compiled(self, step: int) -> None:
    """Report how long the first step took, and measure rates from here on."""
    begin = self._clock
    self._compiling.close()
    self._count_flops()  # while the device computes
    self.flush()
    self._stopwatch.lap('compile')
    self._phase = 'steps'
    seconds = time.perf_counter() - begin
    self.say(f'first step, including compilation: {seconds:.1f} s')
    self.restart_clock(step)

  def introduce(
    self, model: Any, params: Params, image_spec: Any, mesh: Mesh, origin: str
  ) -> None:
    """Print the model, the data, the devices and the origin of the weights."""
    num_params = sum(x.size for x in jax.tree.leaves(params))
    self.say(
      f'{type(model).__name__}, {num_params:,} parameters; batches of '
      f'{self._batch_size} images {"x".join(map(str, image_spec))}; '
      f'{self.total_steps} steps on {mesh.size} x '
      f'{jax.devices()[0].device_kind}'
    )
    self.say(origin)

  def say(self, text: str) -> None:
    """Print a line on the first host."""
    self._terminal.say(text)

  def close(self) -> None:
    """Close the files. A step that was not flushed is dropped."""
    self._compiling.close()
    self._terminal.close()
    if not self._is_finished:
      self._beat(after_s=0)
    self.writer.close()


class Writer:
  """Records in metrics.jsonl, TensorBoard and more; host 0 writes them.

  Args:
    workdir: directory of the run.
    start_step: records of later steps are removed; None keeps all.
    writers: {name: writer}, see writers.py. An error while one of them writes
      is reported once and does not stop the run.
    record: JSON values of the config, for the writers.

  Attributes:
    spent: {phase: seconds} of the run before start_step. What a killed run has
      spent since is in the phase 'lost'.
    heartbeat: Heartbeat of the run, on the first host.
  """

  def __init__(
    self,
    workdir: PathLike,
    start_step: int | None = None,
    *,
    writers: Mapping[str, Any] | None = None,
    record: Mapping[str, Any] | None = None,
  ) -> None:
    self.spent = {}
    self._active = jax.process_index() == 0
    self.heartbeat = records.Heartbeat(workdir, active=self._active)
    if not self._active:
      return
    self._log, found = records.open_log(workdir, start_step)
    for message in found.messages:
      terminal.say(message)
    purge = None
    if start_step is not None:
      self.spent = _spent(found, self.heartbeat, start_step)
      purge = start_step + 1
    self._events = records.Events(workdir, purge)
    self._writers = dict(writers or {})
    self._failed: set[str] = set()
    for writer in self._writers.values():
      if start := getattr(writer, 'start', None):
        start(epath.Path(workdir), record or {})

  def write(self, step: int, record: Mapping[str, float]) -> None:
    if not self._active:
      return
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
    self._log.append({'step': step, 'time': now, **record})
    self._events.write(step, record)
    self._each('write', step, record)

  def image(self, name: str, path: PathLike) -> None:
    """Pass a PNG file to the writers that take images."""
    if self._active:
      self._each('image', name, path)

  def _each(self, method, *args):
    """Call a method of each writer that has it."""
    for name, writer in self._writers.items():
      try:
        if call := getattr(writer, method, None):
          call(*args)
      except Exception as error:  # a server that is down must not stop a run
        if name not in self._failed:
          self._failed.add(name)
          print(
            f'writers.{name} failed: {type(error).__name__}: {error}. The run '
            'continues; metrics.jsonl has everything.',
            file=sys.stderr,
          )

  def close(self) -> None:
    if self._active:
      self._each('close')


def _spent(found, heartbeat, step):
  """Return {phase: seconds} of a run up to a checkpoint, and what was lost.

  Args:
    found: records.Found, up to the checkpoint and after it.
    heartbeat: Heartbeat of the run before it was stopped.
    step: of the checkpoint.
  """
  saved = heartbeat.spent.get(step, {})
  recorded, last = (
    _by_phase({k: v for record in part for k, v in record.items()})
    for part in (found.kept, found.kept + found.removed)
  )
  spent = dict(max(recorded, saved, key=_total))  # the later one
  lost = max(_total(last), heartbeat.lived) - _total(spent)
  if lost > 0:
    spent['lost'] = spent.get('lost', 0.0) + lost
  return spent


def _total(seconds):
  return sum(seconds.values())


def _by_phase(record):
  """Return {phase: seconds} of a record."""
  prefix = 'seconds/'
  return {
    k.removeprefix(prefix): v for k, v in record.items() if k.startswith(prefix)
  }


def _account(seconds):
  """Return {phase: seconds} as a line of fractions."""
  total = _total(seconds)
  shown = [
    f'{name} {seconds.get(phase, 0) / (total or 1):.1%}'
    for phase, name in _PHASES.items()
    if seconds.get(phase) or phase not in ('profile', 'lost')
  ]
  return ' | '.join([f'wall time {terminal.duration(total)}', *shown])


def memory_gb() -> float:
  """Return the peak memory in GB of the fullest device; on a CPU, of Python."""
  stats = [d.memory_stats() for d in jax.local_devices()]
  peaks = [s['peak_bytes_in_use'] for s in stats if s]
  if peaks:
    return max(peaks) / 1e9
  unit = 1 if sys.platform == 'darwin' else 1024  # getrusage: bytes or KiB
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9

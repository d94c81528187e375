"""The monitor of a run: means of metrics, rates, times, and the stop at NaN."""

import collections
import contextlib
import dataclasses
import pathlib
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import tree
from vit_jax.analysis import chips
from vit_jax.durations import Interval, Timeline, fraction
from vit_jax.io import terminal
from vit_jax.io.files import is_local
from vit_jax.parallel import sharding
from vit_jax.runs import compiled
from vit_jax.runs.records import OF_A_RUN, Writer
from vit_jax.runs.writers import MetricsWriter
from vit_jax.types import Kinds, PathLike, UserError


class NonFiniteError(FloatingPointError, UserError):
  """NaN or Inf in metrics of a step or in the state after it, see `cause`."""

  def __init__(self, cause: str) -> None:
    super().__init__(
      f'{cause} Earlier checkpoints are finite. Lower the learning rate, warm '
      'up for longer, or clip the gradient: --config.optimizer.clip_norm=1 '
      '--allow_changes=optimizer.clip_norm'
    )
    self.cause = cause


def check_finite(state: Any, step: int) -> None:
  """Raise NonFiniteError for NaN or Inf in a state. All hosts must call it."""
  arrays = {
    path: array
    for path, array in tree.flatten(state).items()
    if jnp.issubdtype(array.dtype, jnp.inexact)
  }
  finite = sharding.reduce(_is_finite, arrays)
  if bad := [path for path, ok in finite.items() if not ok]:
    shown = ', '.join(bad[:3]) + ', ...' * (len(bad) > 3)
    raise NonFiniteError(
      f'NaN or Inf in {len(bad)} arrays ({shown}) of the state after step '
      f'{step}, which was not saved.'
    )


def _is_finite(array, xp):
  return xp.isfinite(array).all()


@dataclasses.dataclass(frozen=True)
class Logging:
  """Records of a run: how often, and where else they go.

  Attributes:
    every: time between records. None: 50 steps, or a 20th of a shorter run.
    writers: more writers of metrics by name, see writers.py.
    profile: steps that jax.profiler traces, '10:15' (both included) or '10',
      counted from where the run resumes; into WORKDIR/profile if it is local.
  """

  every: Interval | None = None
  writers: Mapping[str, MetricsWriter] = dataclasses.field(default_factory=dict)
  profile: str | int | None = None

  def __post_init__(self) -> None:
    self.profiled()

  def profiled(self) -> tuple[int, int]:
    """Return the first and the last step of the trace; (0, 0) for no trace."""
    if self.profile is None:
      return 0, 0
    first, _, last = str(self.profile).partition(':')
    with contextlib.suppress(ValueError):
      if 2 <= int(first) <= int(last or first):
        return int(first), int(last or first)
    raise UserError(
      f'profile={self.profile!r} must be a step or FIRST:LAST, such as 10:15, '
      'from step 2 on: step 1 includes compilation.'
    )


class Stopwatch:
  """Wall time of a run, divided into phases. It starts at once.

  `cpu_seconds` is the CPU time of this process in the phases steps and data.
  """

  def __init__(self) -> None:
    self.seconds: dict[str, float] = collections.defaultdict(float)
    self.cpu_seconds = 0.0
    self._begin, self._cpu = time.perf_counter(), time.process_time()

  def lap(self, phase: str) -> float:
    """Count the time since the last lap as this phase, and return it."""
    now, cpu = time.perf_counter(), time.process_time()
    seconds, self._begin = now - self._begin, now
    self.seconds[phase] += seconds
    if phase in ('steps', 'data'):
      self.cpu_seconds += cpu - self._cpu
    self._cpu = cpu
    return seconds

  def record(self) -> dict[str, float]:
    """Return {'seconds/PHASE': wall time so far}; 'cpu_seconds' of training."""
    found = {f'seconds/{k}': round(v, 3) for k, v in self.seconds.items()}
    if self.cpu_seconds:
      found['cpu_seconds'] = round(self.cpu_seconds, 3)
    return found


class Monitor:
  """Metrics of a training run.

  It fetches the metrics of a step when the next one has been dispatched, so the
  host never waits for the device. Records have the seconds so far in each
  phase: setup (until the loop), compile (first steps), steps, data (waiting
  for batches), evals, saving, profile.

  Args:
    start_step: step from which the run resumes; later records are removed.
    carried: what `carry` returned when the checkpoint of that step was saved.
    learning_rate: function of the step, to be logged; or None.
    flops_per_step: FLOPs of a step (3 x forward), or of each part; 0: unknown.
    parts, of_step: names of parts of the run with different programs, and the
      part of each step; losses distinguish them.
    stopwatch: Stopwatch that started with the run; None starts one.
    config: JSON values of the config, for the writers.
    kinds: what the metrics of steps and evaluators are.
    before_write: called before each record; raises if it must not be written.
  """

  def __init__(
    self,
    workdir: PathLike,
    timeline: Timeline,
    logging: Logging = Logging(),
    *,
    start_step: int = 0,
    carried: Mapping[str, Any] | None = None,
    learning_rate: Callable[[Any], Any] | None = None,
    flops_per_step: Any = 0.0,
    parts: Sequence[str] = ('',),
    of_step: Any = 0,
    stopwatch: Stopwatch | None = None,
    config: Mapping[str, Any] | None = None,
    kinds: Kinds | None = None,
    before_write: Callable[[], None] = lambda: None,
  ) -> None:
    self._before_write = before_write
    self._total_steps = timeline.steps(fraction(1))
    self._batch_size = timeline.batch_size
    usual = min(50, max(1, self._total_steps // 20))
    self._log_every = timeline.steps(logging.every) or usual
    self._profiled = [start_step + step for step in logging.profiled()]
    folder = workdir if is_local(workdir) else tempfile.gettempdir()
    self._traces = pathlib.Path(folder, 'profile', f'{jax.process_index()}')
    # Otherwise each operation compiles separately.
    self._learning_rate = learning_rate and jax.jit(learning_rate)
    self._parts = parts
    self._of_step = np.broadcast_to(of_step, self._total_steps)
    self._compiled: set[int] = set()
    flops = np.broadcast_to(flops_per_step, len(parts))[self._of_step]
    self._flops = np.concatenate([[0.0], np.cumsum(flops)])  # of the run so far
    known = {**(kinds or {}), **OF_A_RUN}
    self._writer = Writer(
      workdir, start_step, writers=logging.writers, config=config, kinds=known
    )
    self._terminal = terminal.Terminal(start_step, self._total_steps, known)
    carried = carried or {}
    self._sums: Any = collections.Counter(carried.get('sums', {}))
    self._counts: Any = collections.Counter(carried.get('counts', {}))
    self._before = carried.get('before', ({}, {}))  # sums, counts of a record
    self._stopwatch = stopwatch or Stopwatch()
    for phase, seconds in carried.get('seconds', {}).items():
      self._stopwatch.seconds[phase] += seconds
    self._stopwatch.cpu_seconds += carried.get('cpu_seconds', 0.0)
    self._stopwatch.lap('setup')
    self._phase = 'compile'  # Phase of the time outside of `pause`.
    self._pending = None  # (step, metrics, skipped): dispatched, not fetched.
    self._restart_rates(start_step)

  def carry(self) -> dict[str, Any]:
    """Return JSON values for a checkpoint, so that means continue after it."""
    # Copies, because checkpoints are written while training continues.
    return {
      'sums': dict(self._sums),
      'counts': dict(self._counts),
      'before': self._before,
      'seconds': dict(self._stopwatch.seconds),
      'cpu_seconds': self._stopwatch.cpu_seconds,
    }

  def _restart_rates(self, step):
    """Measure rates from this step on."""
    self._rates_from = step, dict(self._stopwatch.seconds)
    self._waited: dict[str, float] = collections.defaultdict(float)

  @contextlib.contextmanager
  def traced(self, step: int) -> Iterator[None]:
    """Context manager of a whole step: load the batch, dispatch, log."""
    first, last = self._profiled
    if step == first:
      self.flush()  # earlier steps are not part of the trace
      jax.profiler.start_trace(self._traces, create_perfetto_trace=True)
    is_new = self._of_step[step - 1] not in self._compiled
    saying = compiled.waiting() if is_new else contextlib.nullcontext()
    with saying, jax.profiler.StepTraceAnnotation('train', step_num=step):
      yield
    if step == last:
      self.flush()
      with self.pause('profile'):
        jax.profiler.stop_trace()
      terminal.say(
        f'profile of steps {first} to {last} in {self._traces}. Open its '
        'perfetto_trace.json.gz at https://ui.perfetto.dev.'
      )

  @contextlib.contextmanager
  def waiting(self, causes: Mapping[str, float]) -> Iterator[None]:
    """Context manager that counts its time as waiting for data.

    It is divided among the causes in proportion to how much they grow.
    """
    self._stopwatch.lap(self._phase)
    before = dict(causes)
    yield
    seconds = self._stopwatch.lap('data')
    grown = {name: causes[name] - before[name] for name in causes}
    total = sum(grown.values()) or 1.0
    self._waited['data_wait'] += seconds
    for name, growth in grown.items():
      self._waited[f'data_wait/{name}'] += seconds * growth / total

  @contextlib.contextmanager
  def pause(self, phase: str) -> Iterator[None]:
    """Context manager whose time (evaluation, saving) is not training time."""
    self._stopwatch.lap(self._phase)
    yield
    self._stopwatch.lap(phase)

  def step(
    self, step: int, metrics: Mapping[str, jax.Array], *, skipped: int = 0
  ) -> None:
    """Take the metrics of a dispatched step, and log the step before.

    `skipped` is the number of different unreadable examples so far.
    """
    if (part := self._of_step[step - 1]) not in self._compiled:
      self._compiled.add(part)
      self._stopwatch.lap('compile')
    self._finish((step, metrics, skipped))
    if self._phase == 'compile':
      self.flush()
      self._stopwatch.lap('compile')
      self._phase = 'steps'
      self._restart_rates(step)

  def flush(self) -> None:
    """Wait for the last dispatched step and log its metrics."""
    self._finish(None)

  def _finish(self, new):
    pending, self._pending = self._pending, new
    if pending is None:
      return
    step, metrics, skipped = pending
    probes = metrics.get('probes', {})
    seen = {k: x for k, (due, x) in probes.items() if jax.device_get(due)}
    seen = jax.device_get(tree.flatten({'train': {'probes': seen}}))
    metrics = {k: v for k, v in metrics.items() if k != 'probes'}
    values = {k: float(v) for k, v in jax.device_get(metrics).items()}
    both = [*values.items(), *seen.items()]
    if bad := [f'{k}={v}' for k, v in both if not np.isfinite(v).all()]:
      shown = ', '.join(bad[:3]) + ', ...' * (len(bad) > 3)
      raise NonFiniteError(f'{shown} in step {step} of {self._total_steps}.')
    if name := self._parts[self._of_step[step - 1]]:
      values[f'{name}/loss'] = values['loss']
    self._sums.update(values)
    self._counts.update(values.keys())
    if seen:
      self._before_write()
      self._writer.write(step, seen)
    self._terminal.advance(step)
    if step % self._log_every == 0 or step == self._total_steps:
      self._log(step, skipped)

  def _log(self, step, skipped):
    own = dict(self._sums), dict(self._counts)
    if step % self._log_every:  # the last interval, made as long as the others
      self._sums.update(self._before[0])
      self._counts.update(self._before[1])
    self._before = own
    values = {f'train/{k}': v / self._counts[k] for k, v in self._sums.items()}
    if self._learning_rate is not None:
      # The optimizer counts updates from 0.
      with jax.transfer_guard('allow'):
        values['train/lr'] = float(self._learning_rate(step - 1))
    record = {k: values[k] for k in OF_A_RUN if k in values} | values
    record |= self._rates(step)
    record['memory_gb'] = _memory_gb()
    if flops := self._flops[step]:  # as in the paper's table 6
      record['exaflops'] = flops / 1e18
    if skipped:
      record['data_skipped'] = skipped
    self.write(step, record)
    self._sums.clear()
    self._counts.clear()
    self._restart_rates(step)

  def _rates(self, step):
    self._stopwatch.lap(self._phase)
    now, (start, before) = self._stopwatch.seconds, self._rates_from
    seconds = sum(now[x] - before.get(x, 0.0) for x in ('steps', 'data'))
    if self._phase == 'compile' or not seconds:
      return {}
    mean = seconds / (step - start)
    rates = {
      'images_per_s': self._batch_size / mean,
      'eta_s': mean * (self._total_steps - step),
    }
    rates |= {k: min(1.0, v / seconds) for k, v in self._waited.items()}
    chip = chips.find(jax.devices()[0].device_kind)
    flops = self._flops[step] - self._flops[start]
    if flops and chip:
      rates['mfu'] = flops / seconds / chip.peak_flops / jax.device_count()
    return rates

  def write(self, step: int, record: Mapping[str, float]) -> None:
    """Write a record of the step to the files and the terminal."""
    self._before_write()
    self._stopwatch.lap(self._phase)
    more = {'progress': step / self._total_steps, **self._stopwatch.record()}
    self._writer.write(step, {**record, **more})
    self._terminal.show(step, record)

  def finish(self, step: int) -> None:
    """Write and print the account of the time, after the last checkpoint."""
    self._stopwatch.lap(self._phase)
    self._writer.write(step, self._stopwatch.record())
    seconds = self._stopwatch.seconds
    total = sum(seconds.values())
    parts = [f'{phase} {s / total:.1%}' for phase, s in seconds.items()]
    wall_time = terminal.duration(total)
    terminal.say(' | '.join([f'wall time {wall_time}', *parts]))

  def close(self) -> None:
    """Close the files. A step that was not flushed is dropped."""
    self._terminal.close()
    self._writer.close()


def _memory_gb():
  """Return the peak memory in GB of the fullest device; on a CPU, of Python."""
  stats = [d.memory_stats() for d in jax.local_devices()]
  peaks = [s['peak_bytes_in_use'] for s in stats if s]
  if peaks:
    return max(peaks) / 1e9
  unit = 1 if sys.platform == 'darwin' else 1024  # getrusage: bytes or KiB
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9

"""--profile=STEPS: a trace of some training steps, by jax.profiler."""

import contextlib
import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
from etils import epath

from vit_jax.runs import terminal
from vit_jax.runs.files import PathLike


@dataclasses.dataclass(frozen=True)
class Steps:
  """First and last step to trace, counted from where this process starts.

  A run that resumes at step 500 counts its step 501 as 1.
  """

  first: int
  last: int

  @classmethod
  def parse(cls, text: str) -> 'Steps':
    """Return the Steps of '10:15' (both included) or of '10', a single step.

    Raises:
      ValueError: another text, or step 1, which includes compilation.
    """
    found = re.fullmatch(r'(\d+)(?::(\d+))?', str(text).strip())
    if not found:
      raise ValueError(
        f'profile={text!r} is neither a step nor FIRST:LAST. Use for example '
        '--profile=10:15.'
      )
    first, last = int(found[1]), int(found[2] or found[1])
    if first < 2 or last < first:
      raise ValueError(
        f'profile={text!r}: expected 2 <= FIRST <= LAST, because step 1 '
        'includes compilation. Use for example --profile=10:15.'
      )
    return cls(first, last)


class Profiler:
  """Trace of some steps in WORKDIR/profile, for TensorBoard and Perfetto.

  With several hosts, each writes its own WORKDIR/profile/host_N.

  Args:
    workdir: of the run; local or gs://...
    steps: text for `Steps.parse`, or None for no trace.
    start: step from which the run starts or resumes.
    total: last step of the run.

  A run that resumes with fewer steps left than that traces nothing and says so,
  because schedulers restart jobs with the same command.

  Raises:
    ValueError: steps that this run does not have.
  """

  def __init__(
    self, workdir: PathLike, steps: str | None, *, start: int, total: int
  ) -> None:
    self._first = self._last = None
    # Local directory of a running trace.
    self._trace: tempfile.TemporaryDirectory | None = None
    self._workdir = epath.Path(workdir)
    self._path = self._workdir / 'profile'
    if jax.process_count() > 1:
      self._path /= f'host_{jax.process_index()}'
    if steps is None:
      return
    wanted = Steps.parse(steps)
    if wanted.last > total:
      raise ValueError(
        f'profile={steps!r} ends after the {total} steps of this run. Choose '
        'earlier steps.'
      )
    self._first, self._last = start + wanted.first, start + wanted.last
    if self._last > total:
      self._first = self._last = None
      terminal.say(
        f'--profile={steps}: nothing will be traced, because the run resumes '
        f'at step {start} of {total} and steps count from there. Choose from '
        f'the {total - start} steps that are left, or leave it out.'
      )

  @contextlib.contextmanager
  def step(self, step: int, monitor: Any) -> Iterator[None]:
    """Context manager of one step: load the batch, dispatch, log.

    Args:
      step: number of the step.
      monitor: Monitor of the run, which can wait for dispatched steps.
    """
    if step == self._first:
      monitor.flush()  # earlier steps are not part of the trace
      self._trace = tempfile.TemporaryDirectory(prefix='vit_jax_profile_')
      jax.profiler.start_trace(self._trace.name, create_perfetto_trace=True)
    with jax.profiler.StepTraceAnnotation('train', step_num=step):
      yield
      if step == self._last:
        monitor.flush()
    if step == self._last:
      with monitor.pause('profile'):
        self.close()
      monitor.say(self._message())

  def close(self) -> None:
    """Stop a running trace, and move its files to the workdir."""
    if self._trace is None:
      return
    with self._trace as folder:
      self._trace = None
      jax.profiler.stop_trace()
      if not self._workdir.exists():
        return  # It was moved; do not create it again.
      for file in sorted(pathlib.Path(folder).rglob('*')):
        if file.is_file():
          target = self._path / file.relative_to(folder)
          target.parent.mkdir(parents=True, exist_ok=True)
          target.write_bytes(file.read_bytes())

  def _message(self):
    traces = self._path.glob('plugins/profile/*/perfetto_trace.json.gz')
    newest = max(str(path) for path in traces)  # folders are named by date
    return (
      f'profile of steps {self._first} to {self._last}:\n'
      f'  tensorboard --logdir={self._path}  (pip install tensorboard xprof)\n'
      f'  or open it at https://ui.perfetto.dev: {newest}'
    )

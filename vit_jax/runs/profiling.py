"""logging.profile: a trace of some training steps, by jax.profiler."""

import contextlib
import pathlib
import re
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
from etils import epath

from vit_jax.runs.files import PathLike


def parse(steps: str | int) -> tuple[int, int]:
  """Return (first, last) of '10:15' (both included) or of '10', a single step.

  Raises:
    ValueError: another text, or step 1, which includes compilation.
  """
  found = re.fullmatch(r'(\d+)(?::(\d+))?', str(steps).strip())
  first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
  if first < 2 or last < first:
    raise ValueError(
      f'profile={steps!r} must be a step or FIRST:LAST, from step 2 on: step 1 '
      'includes compilation. Use for example '
      '--config.logging.profile=10:15.'
    )
  return first, last


class Profiler:
  """Trace of some steps in WORKDIR/profile, for TensorBoard and Perfetto.

  With several hosts, each writes its own WORKDIR/profile/host_N.

  Args:
    workdir: of the run; local or gs://...
    steps: text for `parse`, counted from `start`; None for no trace.
    start: step from which the run starts or resumes.
  """

  def __init__(
    self, workdir: PathLike, steps: str | int | None, start: int
  ) -> None:
    self._first = self._last = None
    if steps is not None:
      self._first, self._last = (start + step for step in parse(steps))
    self._path = epath.Path(workdir) / 'profile'
    if jax.process_count() > 1:
      self._path /= f'host_{jax.process_index()}'

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
      with monitor.pause('profile'):
        jax.profiler.stop_trace()
        newest = self._copy()
      monitor.say(
        f'profile of steps {self._first} to {self._last}:\n'
        f'  tensorboard --logdir={self._path}  (pip install tensorboard xprof)'
        f'\n  or open it at https://ui.perfetto.dev: {newest}'
      )

  def _copy(self):
    """Copy the trace to the workdir; return the file for Perfetto."""
    newest = None
    with self._trace as folder:
      for file in sorted(pathlib.Path(folder).rglob('*')):
        if file.is_file():
          target = self._path / file.relative_to(folder)
          target.parent.mkdir(parents=True, exist_ok=True)
          target.write_bytes(file.read_bytes())
          newest = target if 'perfetto' in file.name else newest
    return newest

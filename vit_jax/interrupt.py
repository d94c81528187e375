"""SIGTERM and Ctrl-C as a request: finish the step, save, and go."""

import contextlib
import signal

import jax

from vit_jax import distributed


class Stopped(SystemExit):
  """A run was told to stop, and has saved. Exit status: 128 + signal."""

  def __init__(self, stop):
    super().__init__(128 + stop.number)


class StopSignal:
  """Context that turns SIGTERM and SIGINT into a question to be asked.

  A second signal of the kind acts as ever. On several hosts all of them get
  the same answer at the same step, whichever of them has the signal.
  """

  def __init__(self):
    self.number = None
    self._previous = {}

  def __enter__(self):
    for number in (signal.SIGTERM, signal.SIGINT):
      with contextlib.suppress(ValueError):  # not in the main thread
        self._previous[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *_):
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _handle(self, number, _):
    self.number = number
    signal.signal(number, self._previous[number])

  def requested(self, step):
    """Whether to stop after this step."""
    if jax.process_count() > 1:
      stops = distributed.agree_to_stop(step, self.number is not None)
      if stops and self.number is None:
        self.number = signal.SIGTERM  # another host's
      return stops
    return self.number is not None

  def message(self, step, total_steps, workdir):
    return (
      f'{signal.Signals(self.number).name}: saved step {step} of '
      f'{total_steps} in {workdir}; the same command resumes there.'
    )

"""Several hosts as one run: they start, agree, stop and fail together.

jax.distributed connects the hosts. If one of them is lost, its coordinator
ends the others within two minutes, with a message that says what it has found.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.types import UserError

_HEARTBEAT_S = 60  # A host that is silent for this long counts as lost.


def initialize(
  coordinator_address: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
) -> None:
  """Join the other hosts of this run; arguments as of the flags of main.py."""
  if num_processes is None and 'JAX_NUM_PROCESSES' in os.environ:
    num_processes = int(os.environ['JAX_NUM_PROCESSES'])
  if process_id is None and 'JAX_PROCESS_ID' in os.environ:
    process_id = int(os.environ['JAX_PROCESS_ID'])
  ids = coordinator_address, num_processes, process_id
  text = 'Still waiting for hosts. End all, and run doctor --hosts on all.'
  note = threading.Timer(30, print, (text,), {'file': sys.stderr})
  note.start()
  try:
    jax.distributed.initialize(*ids, heartbeat_timeout_seconds=_HEARTBEAT_S)
  except ValueError as error:
    raise UserError(
      f'--distributed: {error} Pass --coordinator_address=HOST:PORT of process '
      '0, --num_processes=N and --process_id=0 to N-1 to every process.'
    ) from error
  finally:
    note.cancel()


def broadcast(value: Any) -> Any:
  """Return the JSON value of the first host. All hosts must call this."""
  if jax.process_count() == 1:
    return value
  data = np.frombuffer(json.dumps(value).encode(), np.uint8)
  size = int(multihost_utils.broadcast_one_to_all(np.array(len(data))))
  if jax.process_index():
    data = np.zeros(size, np.uint8)
  return json.loads(bytes(multihost_utils.broadcast_one_to_all(data)))


def on_any(flag: bool) -> list[int]:
  """Return the numbers of hosts that pass True. All hosts must call this."""
  flags = np.atleast_1d(multihost_utils.process_allgather(np.array(flag)))
  return np.flatnonzero(flags).tolist()


def refuse_differences(facts: Mapping[str, str]) -> None:
  """Raise UserError, with a diff, unless all hosts pass equal {name: text}."""
  first = broadcast(dict(facts))
  lines = [
    f'  {name}: {first.get(name)} on host 0, {facts.get(name)} here'
    for name in sorted({*first, *facts})
    if first.get(name) != facts.get(name)
  ]
  if others := on_any(bool(lines)):
    diff = '\n'.join(lines) or '  Their messages show the differences.'
    raise UserError(
      f'Hosts {others} differ from host 0:\n{diff}\nStart the same command '
      'with the same code and packages on all hosts.'
    )


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
  """Context manager that ends this process at once if it fails.

  The normal end of a process waits for other hosts, which wait for this one in
  a collective, and may crash while a step is still running on a device. Status
  1 is for mistakes of the user, which a cluster should not repeat.
  """
  try:
    yield
  except BaseException as error:
    code = error.code if isinstance(error, SystemExit) else os.EX_SOFTWARE
    if isinstance(error, Stopped) or not code:
      raise
    if isinstance(code, str):
      print(code, file=sys.stderr)
    elif not isinstance(error, SystemExit):
      traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


class Stopped(SystemExit):
  """Exit of a run that a signal stopped, after saving. Status: 128 + signal."""


class StopSignal:
  """Context manager that turns SIGTERM and SIGINT into a request to stop.

  A second signal acts as without this class. On several hosts, JAX notices
  SIGTERM on any of them, and all hosts stop after the same step.
  """

  def __init__(self) -> None:
    self._received: signal.Signals | None = None
    self._previous: dict[int, Any] = {}

  def __enter__(self) -> 'StopSignal':
    is_main = threading.current_thread() is threading.main_thread()
    if jax.process_count() == 1 and is_main:
      for number in (signal.SIGINT, signal.SIGTERM):
        self._previous[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *_: Any) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _handle(self, number, _):
    self._received = signal.Signals(number)
    signal.signal(number, self._previous[number])
    again = 'Press Ctrl-C' if number == signal.SIGINT else 'Send it'
    name = self._received.name
    text = f'{name}: saving after this step. {again} again to stop at once.'
    # A bar that is shown has replaced sys.stderr, and prints it above itself.
    print(text, file=sys.stderr, flush=True)

  def requested(self, step: int) -> signal.Signals | None:
    """Return the signal to stop at. All hosts must ask once after each step."""
    if multihost_utils.reached_preemption_sync_point(step):
      self._received = signal.SIGTERM
    return self._received

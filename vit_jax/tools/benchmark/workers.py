"""Worker processes, each of which runs one implementation round by round.

A worker reads requests from stdin and answers on stdout, with a line of JSON
each:

  {"do": "start", **settings}     -> {"compile_s": ..., "param_count": ..., ...}
  {"do": "round", "steps": 6}     -> {"seconds": ..., "cpu_seconds": ...}
  {"do": NAME, ...}               -> what the method NAME of its object returns

or {"error": "out of memory" or "failed", "message": ...}. So implementations
with other packages, or in another interpreter, take turns on one device, each
with its own memory, and fail alone. A peer is a script that calls `serve`; this
module imports the standard library only.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[3]
OUT_OF_MEMORY = 'out of memory'
_SIGNS = ('MemoryError', 'RESOURCE_EXHAUSTED', 'out of memory', 'OutOfMemory')


class WorkerError(RuntimeError):
  """A worker's error: 'out of memory: ...' or 'failed: ...'."""


class Worker:
  """The client of a worker process; a context manager that ends the process.

  Args:
    command: of the process, a list.
    env: environment variables to add to those of this process.
  """

  def __init__(
    self, command: Sequence[str], env: Mapping[str, str] | None = None
  ) -> None:
    path = [str(ROOT), os.environ.get('PYTHONPATH')]
    own = {'PYTHONPATH': os.pathsep.join(filter(None, path))}
    # Its pipes are not None.
    self._process: Any = subprocess.Popen(
      command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env={**os.environ, **own, **(env or {})},
    )

  def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
    """Return the answer, a dict. Raise WorkerError if it is an error."""
    try:
      self._process.stdin.write(json.dumps({'do': do, **arguments}) + '\n')
      self._process.stdin.flush()
      line = self._process.stdout.readline()
    except BrokenPipeError:
      line = ''
    if not line:
      code = self._process.wait()
      # Linux kills the process that uses most memory by SIGKILL.
      kind = OUT_OF_MEMORY if code == -signal.SIGKILL else 'failed'
      raise WorkerError(f'{kind}: the process ended with status {code}')
    answer = json.loads(line)
    if 'error' in answer:
      raise WorkerError(f'{answer["error"]}: {answer["message"]}')
    return answer

  def __enter__(self) -> 'Worker':
    return self

  def __exit__(self, *exception: Any) -> None:
    self._process.stdin.close()  # tells the worker to end
    try:
      self._process.wait(timeout=30)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()
    self._process.stdout.close()


def serve(make: Callable[[Any], Any]) -> None:
  """Answer requests on stdin until it is closed.

  Args:
    make: settings -> object with `started`, the answer to 'start', and a
      method `round(steps)` that returns seconds, or the whole answer to
      'round'. Its other methods return dicts.
  """
  # Libraries may print to stdout: send that to stderr.
  answers = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)
  worker: Any = None
  for line in sys.stdin:
    request = json.loads(line)
    do = request.pop('do')
    try:
      if do == 'start':
        worker = make(request)
        answer = worker.started
      elif do == 'round':
        cpu = time.process_time()
        answer = worker.round(**request)
        if not isinstance(answer, dict):
          used = time.process_time() - cpu
          answer = {'seconds': answer, 'cpu_seconds': used}
      else:
        answer = getattr(worker, do)(**request)
    except Exception as error:
      answer = {'error': kind_of(error), 'message': first_line(error)}
    try:
      answers.write(json.dumps(answer) + '\n')
      answers.flush()
    except BrokenPipeError:  # the client has ended
      os._exit(1)


def kind_of(error: BaseException) -> str:
  """Return 'out of memory' or 'failed'."""
  text = f'{type(error).__name__}: {error}'
  return OUT_OF_MEMORY if any(s in text for s in _SIGNS) else 'failed'


def first_line(error: BaseException) -> str:
  """Return an exception as one line of at most 300 characters."""
  text = f'{type(error).__name__}: {error}'.strip()
  return text.splitlines()[0][:300]

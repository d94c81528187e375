"""What is timed runs in a process of its own and is asked for single rounds.

A worker reads requests from stdin and answers on stdout, a line of JSON each:

  {"do": "start", **settings}     -> {"compile_s": ..., "param_count": ..., ...}
  {"do": "round", "steps": 6}     -> {"seconds": ..., "cpu_seconds": ...}
  any other name its object has   -> what that method returns

and {"error": "oom" or "failed", "message": ...} where that went wrong. So that
ours and a peer, of other packages or of another interpreter, take turns on one
device, each with its own memory, and what fails fails alone. A peer is a script
that calls `serve`; nothing here is imported beyond the standard library.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
_OUT_OF_MEMORY = ('RESOURCE_EXHAUSTED', 'out of memory', 'OutOfMemory')


class WorkerError(RuntimeError):
  """A worker could not do what it was asked; `kind` is 'oom' or 'failed'."""

  def __init__(self, kind, message):
    super().__init__(message)
    self.kind = kind


class Worker:
  """The other end of `serve`; a context manager that ends the process.

  Args:
    command: of the process, a list.
    env: variables beside those of this process; None takes one away.
  """

  def __init__(self, command, env=None):
    env = env or {}
    path = os.pathsep.join(
      p for p in (str(ROOT), os.environ.get('PYTHONPATH')) if p
    )
    self._process = subprocess.Popen(
      command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env={
        name: value
        for name, value in (os.environ | {'PYTHONPATH': path} | env).items()
        if value is not None
      },
    )

  def ask(self, do, **arguments):
    """The answer, a dict. Raises WorkerError if there is none but an error."""
    try:
      self._process.stdin.write(json.dumps({'do': do, **arguments}) + '\n')
      self._process.stdin.flush()
      line = self._process.stdout.readline()
    except BrokenPipeError:
      line = ''
    if not line:
      code = self._process.wait()
      # The kernel ends by SIGKILL the process that has taken all memory.
      kind = 'oom' if code == -signal.SIGKILL else 'failed'
      raise WorkerError(kind, f'the process ended with status {code}')
    answer = json.loads(line)
    if 'error' in answer:
      raise WorkerError(answer['error'], answer['message'])
    return answer

  def __enter__(self):
    return self

  def __exit__(self, *exception):
    self._process.stdin.close()  # the end of its requests
    try:
      self._process.wait(timeout=30)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()
    self._process.stdout.close()


def serve(make):
  """Answers requests on stdin until it ends.

  Args:
    make: settings -> object with `started`, the answer to 'start', and a
      method `round(steps) -> seconds`; methods of other names return a dict.
  """
  # Libraries may print; the answers have stdout for themselves.
  answers = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)
  worker = None
  for line in sys.stdin:
    request = json.loads(line)
    do = request.pop('do')
    try:
      if do == 'start':
        worker = make(request)
        answer = worker.started
      elif do == 'round':
        cpu = time.process_time()
        answer = {'seconds': worker.round(**request)}
        answer['cpu_seconds'] = time.process_time() - cpu
      else:
        answer = getattr(worker, do)(**request)
    except Exception as error:
      answer = {'error': kind_of(error), 'message': first_line(error)}
    try:
      answers.write(json.dumps(answer) + '\n')
      answers.flush()
    except BrokenPipeError:  # whoever asked has gone
      os._exit(1)


def kind_of(error):
  """'oom' of an exception that tells of too little memory, else 'failed'."""
  text = f'{type(error).__name__}: {error}'
  found = isinstance(error, MemoryError)
  found = found or any(sign in text for sign in _OUT_OF_MEMORY)
  return 'oom' if found else 'failed'


def first_line(error):
  """An exception in one line of at most 300 characters."""
  text = f'{type(error).__name__}: {error}'.strip()
  return text.splitlines()[0][:300]

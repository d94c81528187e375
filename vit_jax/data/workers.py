"""Values read ahead, in order, by threads or by worker processes.

Each worker process sends what it reads through a socket of its own. The kernel
closes the socket when either end dies, so a dead worker is noticed at once, and
neither shared memory nor semaphores can outlive a run. A worker ends when its
parent does. One that dies is replaced, and reads on from where it was.
"""

import atexit
import collections
import concurrent.futures
import contextlib
import math
import multiprocessing
import multiprocessing.resource_tracker
import os
import pathlib
import pickle
import signal
import socket
import struct
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import numpy as np
from absl import logging

from vit_jax.config import checks

_POLL_S = 1.0  # between two looks at the parent, or at a worker that is silent
_STOPPED_S = 5  # silence after which a worker may be reported as stopped
_SLOW_S = 60  # silence after which the wait for data is reported
_WORKER_BYTES = 2**27  # least memory of a worker
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

Read = Callable[[int], Any]


def cores() -> int:
  """Return the number of cores that this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def memory() -> int:
  """Return the bytes of memory of this machine."""
  return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')


def check_count(name: str, value: Any) -> None:
  """Raise ValueError unless `value` is a sensible number of processes.

  The most is 64, or 4 for each core if that is more, as far as they fit in the
  memory of this machine.
  """
  checks.integer(name, value, 0)
  most = min(max(64, 4 * cores()), memory() // _WORKER_BYTES)
  if value > most:
    raise ValueError(
      f'{name}={value} must be at most {most} on this machine, which has'
      f' {cores()} cores and {memory() / 2**30:.1f} GiB of memory. More'
      ' processes than cores do not read faster, unless they wait for a'
      ' network.'
    )


class Threads:
  """Iterator over read(i) for `indices` in order, read ahead by threads.

  Args:
    read: function of an index.
    indices: of the values.
    threads: number of threads.
    ahead: number of values that are read in advance.
  """

  def __init__(
    self, read: Read, indices: range, *, threads: int, ahead: int
  ) -> None:
    self._read, self._indices = read, iter(indices)
    self._pool = concurrent.futures.ThreadPoolExecutor(threads)
    self._pending: collections.deque[Any] = collections.deque()
    for _ in range(ahead):
      self._submit()

  def _submit(self):
    for index in self._indices:
      self._pending.append(self._pool.submit(self._read, index))
      return

  def __iter__(self) -> Iterator[Any]:
    return self

  def __next__(self) -> Any:
    if not self._pending:
      raise StopIteration
    self._submit()
    return self._pending.popleft().result()

  def close(self) -> None:
    """Stop the threads; a `next` in another thread fails."""
    self._pool.shutdown(cancel_futures=True)


class Processes:
  """Iterator over read(i) for `indices` in order, read ahead by processes.

  Process w of n reads each n-th value from the w-th on, by `Threads`. A process
  that dies, for example by the system's want of memory, is replaced.

  Args:
    read: function of an index, picklable by cloudpickle.
    indices: of the values.
    processes: number of processes.
    threads, ahead: of `Threads` in each process.
    max_restarts: number of dead processes that are replaced.

  Raises:
    ValueError: `read` cannot be pickled; by `next`: one more process died.
  """

  def __init__(
    self,
    read: Read,
    indices: range,
    *,
    processes: int,
    threads: int,
    ahead: int,
    max_restarts: int,
  ) -> None:
    self._read, self._indices, self._count = read, indices, processes
    self._options = {'threads': threads, 'ahead': ahead}
    self._max_restarts, self._restarts = max_restarts, 0
    self._next = 0  # the place in `indices` of the next value
    self._closed = False
    self._lock = threading.Lock()  # held while a value is received
    # The end of multiprocessing, which waits for processes, comes later.
    atexit.register(self.close)
    self._workers: list[_Worker] = []
    try:
      for number in range(processes):
        self._workers.append(self._start(number, number))
    except BaseException:
      self.close()
      raise

  def __iter__(self) -> Iterator[Any]:
    return self

  def __next__(self) -> Any:
    with self._lock:
      number = self._next % self._count
      while self._next < len(self._indices) and not self._closed:
        try:
          value = self._workers[number].receive()
        except _DiedError as error:
          if not self._closed:
            self._replace(number, str(error))
        else:
          self._next += 1
          return value
      raise StopIteration

  def close(self) -> None:
    """End the processes. A `next` in another thread stops."""
    atexit.unregister(self.close)
    self._closed = True
    for worker in self._workers:
      worker.process.kill()
    with self._lock:
      for worker in self._workers:
        worker.close()

  def _start(self, number, first):
    name = f'data worker {number + 1} of {self._count}'
    task = self._read, self._indices[first :: self._count], self._options
    return _Worker(name, task)

  def _replace(self, number, what):
    """Replace a worker that died, at the place of its next value."""
    self._workers[number].close()
    if self._restarts == self._max_restarts:
      raise ValueError(
        f'{what} Gave up after {self._restarts} restarts of workers'
        f' (max_worker_restarts={self._max_restarts}). Run the same command to'
        ' resume from the last checkpoint, with fewer workers (num_workers) if'
        ' the memory was full.'
      )
    self._restarts += 1
    logging.warning(
      f'{what} Restarted it where it was (restart {self._restarts} of'
      f' {self._max_restarts}).'
    )
    self._workers[number] = self._start(number, self._next)


class _DiedError(Exception):
  """A worker died; the message says which, and how."""


class _Worker:
  """A worker process, as its parent sees it."""

  def __init__(self, name: str, task: tuple[Any, ...]) -> None:
    try:
      pickled = cloudpickle.dumps(task)
    except Exception as error:  # of any type, from the source
      raise ValueError(
        'the source and the transforms cannot be pickled for worker'
        f' processes: {type(error).__name__}: {error} Set num_workers=0 to'
        ' read on threads.'
      ) from error
    self._socket, remote = socket.socketpair()
    self._socket.settimeout(_POLL_S)
    # The task is not an argument of the process: multiprocessing would wait
    # for ever if the process died before it had read one of 64 kB.
    self.process = multiprocessing.get_context('spawn').Process(
      target=_work, args=(remote, os.getpid()), name=name, daemon=True
    )
    with remote, _starting():
      self.process.start()
    task = struct.pack('<Q', len(pickled)) + pickled
    threading.Thread(target=self._send_task, args=(task,), daemon=True).start()

  def _send_task(self, task):
    rest = memoryview(task)
    while rest:
      try:
        rest = rest[self._socket.send(rest) :]
      except TimeoutError:  # it is still starting
        continue
      except OSError:  # it is dead, as `receive` will find, or closed
        return

  def receive(self) -> Any:
    """Return the next value from the worker; raise _DiedError at its end."""
    self._since, self._report_after = time.monotonic(), _STOPPED_S
    (count,) = struct.unpack('<Q', self._receive(8))
    sizes = struct.unpack(f'<{count}Q', self._receive(8 * count))
    pickled, *buffers = map(self._receive, sizes)
    value = pickle.loads(pickled, buffers=buffers)
    if isinstance(value, Exception):
      raise value
    return value

  def close(self) -> None:
    """End the process, if it still runs."""
    self.process.kill()
    self.process.join(_STOPPED_S)
    self._socket.close()

  def _receive(self, size):
    received = np.empty(size, np.uint8)
    rest = memoryview(received)
    while rest:
      try:
        count = self._socket.recv_into(rest)
      except TimeoutError:
        self._check()
        continue
      except OSError:
        count = 0
      if not count:
        raise self._died()
      rest = rest[count:]
    return received

  def _check(self):
    """Raise _DiedError if the silent worker is dead; report a long silence."""
    if not self.process.is_alive():
      raise self._died()
    silence = time.monotonic() - self._since
    if silence < self._report_after:
      return
    what = f'Waiting for data for {silence:.0f} s: {self._name()}'
    if _is_stopped(self.process.pid):
      hint = f'continue it with kill -CONT {self.process.pid}'
      logging.warning(f'{what} is stopped by a signal; {hint}.')
      self._report_after = math.inf
    elif silence >= _SLOW_S:
      logging.warning(f'{what} is still reading.')
      self._report_after = 2 * silence

  def _name(self):
    return f'{self.process.name} (process {self.process.pid})'

  def _died(self):
    self.process.join(_STOPPED_S)  # its socket closes a moment before its end
    code = self.process.exitcode
    how = f'ended with exit code {code}'
    if code is not None and code < 0:
      names = {number.value: number.name for number in signal.Signals}
      how = f'was killed by {names.get(-code, f"signal {-code}")}'
    if code == -signal.SIGKILL:
      how += ', as the system does when memory is full'
    return _DiedError(f'{self._name()} {how}.')


def _is_stopped(pid):
  """Return whether a signal stopped the process; False if this is unknown."""
  try:
    stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except OSError:
    return False
  return stat.rpartition(')')[2].split()[0] in ('T', 't')


_start_lock = threading.Lock()


@contextlib.contextmanager
def _starting():
  """Context manager in which a worker process is started.

  The worker inherits blocked signals: they are sent to all processes of a
  group, and it is the parent who ends the workers, after its last batch. The
  main module is hidden, because the worker would import it again, with jax and
  all that it needs.
  """
  with _start_lock:
    main = sys.modules['__main__']
    # Python 3.11 unblocks signals when it starts its resource tracker.
    multiprocessing.resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    sys.modules['__main__'] = types.ModuleType('__main__')
    try:
      yield
    finally:
      sys.modules['__main__'] = main
      signal.pthread_sigmask(signal.SIG_SETMASK, mask)


# In the worker process.


def _work(remote, parent):
  """Read a task, and send what it reads until the parent closes the socket."""
  threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
  try:
    try:
      with remote.makefile('rb') as file:
        (size,) = struct.unpack('<Q', file.read(8))
        read, indices, options = cloudpickle.loads(file.read(size))
    except Exception as error:  # of any type, from the source
      what = f'{type(error).__name__}: {error}'
      _send(
        remote, ValueError(f'a worker process cannot load the source: {what}')
      )
      return
    for value in Threads(read, indices, **options):
      _send(remote, value)
  except ConnectionError:
    os._exit(1)  # without a wait for the threads


def _end_with(parent):
  """End this process when it has lost its parent."""
  while os.getppid() == parent:
    time.sleep(_POLL_S)
  os._exit(1)


def _send(remote, value):
  """Send a value: the number of its parts, their sizes, the parts.

  The parts are the pickled value and its arrays, which are not copied.
  """
  arrays: list[pickle.PickleBuffer] = []
  pickled = pickle.dumps(value, protocol=5, buffer_callback=arrays.append)
  parts = [pickled, *(array.raw() for array in arrays)]
  remote.sendall(
    struct.pack(f'<{1 + len(parts)}Q', len(parts), *map(len, parts))
  )
  for part in parts:
    remote.sendall(part)

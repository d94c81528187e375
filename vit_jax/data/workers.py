"""Values read ahead, in order, by threads or by worker processes.

Each worker process sends what it reads through a pipe of its own. The kernel
closes the pipe when either end dies, so a dead worker is noticed at its own
place and replaced there, and nothing outlives the run.
"""

import atexit
import collections
import concurrent.futures
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import traceback
import types
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import cloudpickle
from absl import logging

from vit_jax.types import UserError

Read = Callable[[Any], Any]  # index -> value
_MAX_RESTARTS = 3  # of dead workers, by one iterator
_SPAWN = multiprocessing.get_context('spawn')


def cores() -> int:
  """Return the number of cores that this process, or container, may use."""
  import joblib  # not in worker processes

  return joblib.cpu_count()


def read_ahead(
  read: Read, indices: Iterable[Any], ahead: int
) -> Generator[Any, None, None]:
  """Yield read(i) for `indices` in order, read ahead by so many threads."""
  pool = concurrent.futures.ThreadPoolExecutor(ahead)
  rest = iter(indices)
  try:
    pending = collections.deque(
      pool.submit(read, i) for i in itertools.islice(rest, ahead)
    )
    while pending:
      value = pending.popleft().result()
      pending.extend(pool.submit(read, i) for i in itertools.islice(rest, 1))
      yield value
  finally:
    pool.shutdown(cancel_futures=True)


class Processes(Iterator[Any]):
  """Iterator over read(i) for `indices` in order, read ahead by processes.

  Process w of n reads each n-th value from the w-th on, by `read_ahead`. A
  process that dies is replaced, three times in all.
  """

  def __init__(
    self, read: Read, indices: Sequence[int], processes: int, ahead: int
  ) -> None:
    self._task = cloudpickle.dumps((read, ahead))
    self._indices, self._count = indices, processes
    self._next, self._restarts = 0, 0
    # Before multiprocessing waits for its processes at the end of Python.
    atexit.register(self.close)
    self._workers = [self._start(first) for first in range(processes)]

  def __next__(self) -> Any:
    if self._next >= len(self._indices):
      raise StopIteration
    number = self._next % self._count
    try:
      value = _receive(self._workers[number][1])
    except (EOFError, OSError):
      self._replace(number)
      return next(self)
    self._next += 1
    if isinstance(value, Exception):
      raise value
    return value

  def close(self) -> None:
    """End the processes."""
    atexit.unregister(self.close)
    for worker in self._workers:
      _end(*worker)

  def _start(self, first):
    """Return a process that reads from place `first` on, and its pipe."""
    connection, remote = _SPAWN.Pipe(duplex=False)
    task = remote, self._task, self._indices[first :: self._count]
    process = _SPAWN.Process(target=_work, args=task, daemon=True)
    # The worker would import the main module, and with it jax.
    main = sys.modules['__main__']
    sys.modules['__main__'] = types.ModuleType('__main__')
    try:
      process.start()
    finally:
      sys.modules['__main__'] = main
      remote.close()
    return process, connection

  def _replace(self, number):
    process, connection = self._workers[number]
    _end(process, connection)
    message = (
      f'Data worker {number} died with exit code {process.exitcode} (-9 is'
      ' often a lack of memory).'
    )
    if self._restarts == _MAX_RESTARTS:
      raise UserError(
        f'{message} {_MAX_RESTARTS} workers were replaced before. Use a smaller'
        ' num_workers, and run the same command to resume.'
      )
    self._restarts += 1
    logging.warning(f'{message} Another one replaces it.')
    self._workers[number] = self._start(self._next)


def _end(process, connection):
  process.kill()
  process.join()
  connection.close()


def _receive(connection):
  """Return a value that `_send` has sent."""
  sizes, pickled = connection.recv()
  buffers = [bytearray(size) for size in sizes]
  for buffer in buffers:
    connection.recv_bytes_into(buffer)
  return pickle.loads(pickled, buffers=buffers)


# In the worker process.


def _work(remote, task, indices):
  """Read a task, and send what it reads until the parent closes the pipe."""
  for number in (signal.SIGINT, signal.SIGTERM):  # the parent ends its workers
    signal.signal(number, signal.SIG_IGN)
  try:
    for value in _values(task, indices):
      _send(remote, value)
  except ConnectionError:
    os._exit(1)  # without a wait for the threads


def _values(task, indices):
  """Yield the values of a task; after an error, the error as the last one."""
  try:
    read, ahead = cloudpickle.loads(task)
    yield from read_ahead(read, indices, ahead)
  except ValueError as error:  # not all of its subclasses can be pickled
    yield UserError(str(error))
  except Exception:
    yield RuntimeError('In a data worker:\n' + traceback.format_exc())


def _send(remote, value):
  """Send a value; its arrays are not copied."""
  arrays: list[pickle.PickleBuffer] = []
  pickled = pickle.dumps(value, protocol=5, buffer_callback=arrays.append)
  buffers = [array.raw() for array in arrays]
  remote.send(([len(buffer) for buffer in buffers], pickled))
  for buffer in buffers:
    remote.send_bytes(buffer)

"""Worker processes: they end with their parent, and can be replaced."""

import itertools
import multiprocessing
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from vit_jax.data import pipeline

ROOT = pathlib.Path(__file__).parents[2]


class Noisy:
  """Images that are functions of the index; 32 fill the buffer of a socket."""

  num_classes = 10

  def __len__(self):
    return 100

  def __getitem__(self, index):
    image = np.random.default_rng(index).integers(256, size=(64, 64, 3))
    return {'image': image.astype(np.uint8), 'label': index % 10}


def _add_noise(image, rng):
  return image + rng.integers(256, size=image.shape, dtype=np.uint8)


def _open(**options):
  data = pipeline.Data(Noisy(), 64, (_add_noise,), **options)
  return data.train_batches(seed=1, start=80)


def _workers():
  """Return the worker processes, sorted by name."""
  children = multiprocessing.active_children()
  return sorted(children, key=lambda child: child.name)


def _assert_equal(ours, theirs):
  assert ours.keys() == theirs.keys()
  for key in ours:
    np.testing.assert_array_equal(ours[key], theirs[key])


def test_killed_workers_are_replaced_where_they_were(caplog):
  threads, workers = _open(), _open(num_workers=2, max_worker_restarts=2)
  _assert_equal(next(workers), next(threads))
  for worker in _workers():
    worker.kill()
  for _ in range(20):  # more than what is read ahead
    _assert_equal(next(workers), next(threads))
  assert workers.position == threads.position == 80 + 21 * 64
  first, second = sorted(record.message for record in caplog.records)
  what = r'data worker {} of 2 \(process \d+\) was killed by SIGKILL'
  assert re.match(what.format(1), first) and re.match(what.format(2), second)
  assert 'restart 2 of 2' in first + second
  for worker in _workers():
    worker.kill()
  message = r'Gave up after 2 restarts .*max_worker_restarts=2'
  with pytest.raises(ValueError, match=message):
    list(itertools.islice(workers, 20))
  assert not _workers()
  threads.close()


def _children(pid):
  """Return the live processes whose parent is `pid`."""
  found = []
  for stat in pathlib.Path('/proc').glob('[0-9]*/stat'):
    try:
      state, parent = stat.read_text().rpartition(')')[2].split()[:2]
    except OSError:
      continue
    if int(parent) == pid and state != 'Z':
      found.append(int(stat.parent.name))
  return found


@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
def test_workers_end_with_a_killed_parent():
  code = """
import time
from tests.data.test_workers import _open
batches = _open(num_workers=1)
next(batches)
print('ready', flush=True)
time.sleep(100)
"""
  with subprocess.Popen(
    [sys.executable, '-c', code], cwd=ROOT, stdout=subprocess.PIPE, text=True
  ) as parent:
    assert parent.stdout.readline() == 'ready\n'
    children = _children(parent.pid)
    assert children
    parent.kill()
  end = time.monotonic() + 30
  while alive := [x for x in children if pathlib.Path(f'/proc/{x}').exists()]:
    assert time.monotonic() < end, alive
    time.sleep(0.1)


@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
def test_ctrl_c_does_not_reach_a_worker_that_starts():
  code = """
import pathlib, re
from vit_jax.data import workers
worker = workers._Worker('first', ())
status = pathlib.Path(f'/proc/{worker.process.pid}/status').read_text()
print(re.search(r'SigBlk:(.*)', status)[1])
worker.close()
"""
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, stdout=subprocess.PIPE, check=True
  )
  blocked = int(done.stdout, 16)
  for number in (signal.SIGINT, signal.SIGTERM):
    assert blocked >> (number - 1) & 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
def test_a_stopped_worker_is_reported(caplog):
  batches = _open(num_workers=1)
  next(batches)
  (worker,) = _workers()
  os.kill(worker.pid, signal.SIGSTOP)
  try:
    for _ in range(20):
      end = time.monotonic() + 60
      while not batches._iterator[0]._next[0].done():
        if caplog.records or time.monotonic() > end:
          break
        time.sleep(0.1)
      if caplog.records:
        break
      next(batches)
  finally:
    os.kill(worker.pid, signal.SIGCONT)
  (record,) = caplog.records
  expected = rf'data worker 1 of 1 \(process {worker.pid}\) is stopped'
  assert re.search(expected, record.message)
  for _ in range(20):
    next(batches)
  batches.close()


@pytest.mark.parametrize('num_workers', [10_000, True, -1, 1.5, '2'])
def test_number_of_workers(num_workers):
  with pytest.raises(ValueError, match=rf'num_workers={num_workers!r} must be'):
    pipeline.Data(Noisy(), 40, num_workers=num_workers)


def test_what_cannot_be_pickled():
  lock = multiprocessing.get_context('spawn').Lock()

  def transform(image, rng):
    with lock:
      return image

  data = pipeline.Data(Noisy(), 40, (transform,), num_workers=1)
  with pytest.raises(ValueError, match=r'cannot be pickled .* num_workers=0'):
    data.train_batches()


class Unloadable(Noisy):
  """A source that only its own process can load."""

  def __reduce__(self):
    return _load, (os.getpid(),)


def _load(pid):
  if os.getpid() != pid:
    raise RuntimeError('no such file')
  return Unloadable()


def test_source_that_a_worker_cannot_load():
  batches = pipeline.Data(Unloadable(), 40, num_workers=1).train_batches()
  message = 'worker process cannot load the source: RuntimeError: no such file'
  with pytest.raises(ValueError, match=message):
    next(batches)

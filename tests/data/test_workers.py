"""Worker processes: they end with their parent, and can be replaced."""

import itertools
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from vit_jax.data import pipeline, workers

ROOT = pathlib.Path(__file__).parents[2]


class Noisy:
  """Images that are functions of the index; a batch fills the pipe."""

  num_classes = 10

  def __len__(self):
    return 100

  def __getitem__(self, index):
    if index == 7:
      return {'image': b'not an image', 'label': 0}
    image = np.random.default_rng(index).integers(256, size=(64, 64, 3))
    return {'image': image.astype(np.uint8), 'label': index % 10}


def _add_noise(image, rng):
  return image + rng.integers(256, size=image.shape, dtype=np.uint8)


def _open(**options):
  options = {'on_error': 'skip', **options}
  data = pipeline.Data(Noisy(), 64, (_add_noise,), **options)
  return data.train_batches(seed=1, start=80)


def _assert_equal(ours, theirs):
  assert ours.keys() == theirs.keys()
  for key in ours:
    np.testing.assert_array_equal(ours[key], theirs[key])


def test_killed_workers_are_replaced_where_they_were(caplog):
  threads, processes = _open(), _open(num_workers=2)
  _assert_equal(next(processes), next(threads))
  for worker in multiprocessing.active_children():
    worker.kill()
  for _ in range(12):  # more than what is read ahead
    _assert_equal(next(processes), next(threads))
  assert processes.position == threads.position == 80 + 13 * 64
  assert processes.skipped == threads.skipped > set()
  assert [x.message[:11] for x in caplog.records] == ['Data worker'] * 2
  # Batches can be changed in place.
  next(processes)['image'][:] = 0
  with pytest.raises(ValueError, match='num_workers'):
    for _ in range(40):
      for worker in multiprocessing.active_children():
        worker.kill()
      next(processes)
  assert not multiprocessing.active_children()
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
def test_signals_reach_the_parent_only_and_workers_end_with_it():
  code = """
import sys, time
from tests.data.test_workers import _open
batches = _open(num_workers=1)
next(batches)
print('ready', 'jax' in sys.modules, flush=True)
sys.stdin.readline()
next(batches)
print('read', flush=True)
time.sleep(100)
"""
  with subprocess.Popen(
    [sys.executable, '-c', code],
    cwd=ROOT,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  ) as parent:
    assert parent.stdout.readline() == 'ready False\n'
    children = _children(parent.pid)
    for child in children:
      os.kill(child, signal.SIGINT)
      os.kill(child, signal.SIGTERM)
    parent.stdin.write('\n')
    parent.stdin.flush()
    assert parent.stdout.readline() == 'read\n'
    assert _children(parent.pid) == children
    parent.kill()
  end = time.monotonic() + 30
  while alive := [x for x in children if pathlib.Path(f'/proc/{x}').exists()]:
    assert time.monotonic() < end, alive
    time.sleep(0.1)


class OwnError(Exception):
  """Cannot be pickled: its constructor takes other arguments than its args."""

  def __init__(self, one, two):
    super().__init__(f'{one} {two}')


def _own_error(image, rng):
  raise OwnError('far', 'away')


class Unloadable(Noisy):
  """A source that only its own process can load."""

  def __reduce__(self):
    return _load, (os.getpid(),)


def _load(pid):
  if os.getpid() != pid:
    raise ValueError('no such file')
  return Unloadable()


@pytest.mark.parametrize(
  'source, transforms, kind, message',
  [
    (Noisy(), (), ValueError, 'Cannot read example 7 of Noisy'),
    (Noisy(), (_own_error,), RuntimeError, '_own_error\n(.|\n)*far away'),
    (Unloadable(), (), ValueError, 'no such file'),
  ],
)
def test_errors_arrive_in_order(source, transforms, kind, message):
  data = pipeline.Data(source, 4, transforms, num_workers=1)
  batches = iter(data.eval_batches())
  with pytest.raises(kind, match=message):
    next(batches)  # examples 0 to 3
    next(batches)


def test_values_are_read_ahead_in_order():
  read = []
  values = workers.read_ahead(lambda i: read.append(i) or i, range(9), ahead=3)
  assert list(itertools.islice(values, 5)) == [0, 1, 2, 3, 4]
  while len(read) < 8:
    time.sleep(0.01)
  values.close()
  assert sorted(read) == list(range(8))


def test_cores_are_those_of_this_process(monkeypatch):
  monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: {0})
  assert workers.cores() == 1

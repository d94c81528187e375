"""Signals as requests, and working directories that cannot be."""

import os
import pathlib
import signal

import pytest

from vit_jax import workdirs
from vit_jax.interrupt import Stopped, StopSignal


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_the_second_acts(number):
  received = []
  before = signal.signal(number, lambda *_: received.append('old handler'))
  try:
    with StopSignal() as stop:
      assert not stop.requested(1)
      os.kill(os.getpid(), number)
      assert stop.requested(2) and stop.requested(3)
      assert not received
      os.kill(os.getpid(), number)
      assert received == ['old handler']
    assert stop.message(2, 9, '/run') == (
      f'{number.name}: saved step 2 of 9 in /run; the same command resumes '
      'there.'
    )
    assert Stopped(stop).code == 128 + number
    # Outside, all is as it was.
    os.kill(os.getpid(), number)
    assert received == ['old handler'] * 2
  finally:
    signal.signal(number, before)


def test_handlers_are_put_back_after_an_error():
  before = signal.getsignal(signal.SIGTERM)
  with pytest.raises(KeyError), StopSignal():
    raise KeyError
  assert signal.getsignal(signal.SIGTERM) is before


def test_prepare_makes_the_directory_and_leaves_nothing(tmp_path):
  for _ in range(2):
    workdirs.prepare(tmp_path / 'a' / 'b')
  assert list((tmp_path / 'a' / 'b').iterdir()) == []


def test_prepare_on_what_cannot_be_written(tmp_path):
  (tmp_path / 'file').write_text('')
  for path in (tmp_path / 'file', tmp_path / 'file' / 'x', '/proc/vit_jax'):
    message = f'--workdir={path} cannot be written to: .*Choose another'
    with pytest.raises(ValueError, match=message):
      workdirs.prepare(path)
  assert pathlib.Path(tmp_path / 'file').read_text() == ''


def test_description_is_found_from_a_checkpoint(tmp_path):
  (tmp_path / 'model.json').write_text('{"image_shape": [8, 8, 3]}')
  for path in (tmp_path, tmp_path / 'checkpoints' / '500'):
    assert workdirs.description(path) == {'image_shape': [8, 8, 3]}
  with pytest.raises(ValueError, match='is not the workdir of a training run'):
    workdirs.description(tmp_path / 'a' / 'b' / 'c' / 'd')

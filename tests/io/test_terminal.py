"""Output on a terminal and to a file, and messages that end a command."""

import errno
import re
import subprocess
import sys

import pytest

from vit_jax import config
from vit_jax.io import terminal
from vit_jax.runs.records import OF_A_RUN
from vit_jax.types import DETAIL, UserError


def test_terminal_line():
  record = {
    'train/loss': 1.23456,
    'train/lr': 3e-4,
    'train/grad_norm': 0.98765,
    'images_per_s': 12345.6,
    'mfu': 0.4321,
    'data_wait': 0.25,
    'data_wait/reading': 0.2,
    'data_wait/decoding': 0.05,
    'memory_gb': 1.26,
    'val/accuracy': 0.98765,
    'few/5shot_seed0': 0.1,
    'exaflops': 0.1,
    'eta_s': 3725.4,
  }
  kinds = OF_A_RUN | {'few/': DETAIL}
  assert terminal.line(record, kinds) == (
    'loss 1.235 | lr 3.00e-04 | grad 0.988 | img/s 12,346 | mfu 43.2% | '
    'data wait 25% | mem 1.3GB | val/accuracy 0.9877 | eta 1:02:05'
  )


def test_a_terminal_shows_a_bar(capsys, monkeypatch):
  for name, value in (('FORCE_COLOR', '1'), ('TERM', 'xterm')):
    monkeypatch.setenv(name, value)
  monkeypatch.setenv('COLUMNS', '80')
  shown = terminal.Terminal(0, 100_000, {})
  shown.advance(99_000)
  terminal.say('a line')
  shown.close()
  out = re.sub(r'\x1b\[[0-9;?]*[a-zA-Z]', '', capsys.readouterr().out)
  *_, bar = [x for x in re.split('[\r\n]', out) if 'training' in x]
  assert '99000/100000' in bar and len(bar) <= 80
  assert 'a line' in out


def test_a_file_gets_lines_of_progress(capsys, monkeypatch):
  monkeypatch.setattr(terminal, '_LINE_EVERY_S', 0)
  assert [*terminal.track('ab', 1_002, unit='images', done=1_000)] == ['a', 'b']
  last = capsys.readouterr().err.splitlines()[-1]
  assert last == '1,002 of 1,002 images | eta 0:00:00'


def test_a_full_stdout_does_not_end_a_run():
  code = 'from vit_jax.io import terminal as t; t.say("a"); t.heading("b"); '
  code += 't.table("c", ["d"], [["e"]]); t.sys.exit("the end")'
  command = ['sh', '-c', '"$0" -c "$1" >/dev/full', sys.executable, code]
  done = subprocess.run(command, capture_output=True)
  assert done.stderr == b'the end\n'


def test_names_from_files_cannot_control_the_terminal(capsys):
  name = 'ü\x1b[2J\x9b\r\ud800[/]'
  terminal.say(name)
  terminal.table('', ['a'], [[name]])
  with pytest.raises(SystemExit) as stop, terminal.one_message():
    raise UserError(name)
  out = capsys.readouterr().out + stop.value.code
  assert out.count(r'ü\x1b[2J\x9b\r\ud800[/]') == 3


def test_mistakes_of_the_user_are_one_line():
  """Other errors keep their traceback, also those of Python in our code."""
  with pytest.raises(TypeError), terminal.one_message():
    terminal.duration('x')
  with pytest.raises(ValueError, match='month'), terminal.one_message():
    terminal.datetime.date(1, 13, 1)
  with pytest.raises(SystemExit) as stop, terminal.one_message():
    config.locate('no path')
  assert stop.value.code.startswith("\nConfigError: 'no path' cannot")
  with pytest.raises(SystemExit) as stop, terminal.one_message():
    raise RuntimeError('write() failed: No space left on device')  # of TFDS
  assert stop.value.code.startswith('\nA disk is full. Free some space')
  with pytest.raises(SystemExit) as stop, terminal.one_message():
    raise OSError(errno.EROFS, 'Read-only file system')  # of a semaphore
  assert stop.value.code.startswith('\nMake /dev/shm writable')

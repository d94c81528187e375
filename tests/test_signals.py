"""Signals to the process of a command: answered at once, by one line."""

import pathlib
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# The main thread waits in C, so that Python calls no signal handler there.
WAIT = """
import ctypes
while True:
  print('waiting', flush=True)
  ctypes.CDLL(None).sleep(1000)
"""
PRESSED = 'Press Ctrl-C again to stop at once.'
ENDED = 'stopped at once. The same command resumes from the last checkpoint.'


def start(code):
  process = subprocess.Popen(
    [sys.executable, '-c', f'from vit_jax import signals\n{code}{WAIT}'],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  assert process.stdout.readline() == 'waiting\n'
  return process


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_at_once(number):
  process = start('signals.watch()')
  process.send_signal(number)
  output, _ = process.communicate(timeout=60)
  assert output.replace('waiting\n', '').strip() == f'{number.name}: {ENDED}'
  assert process.returncode == 128 + number


def test_the_first_signal_is_acknowledged_while_the_main_thread_waits():
  process = start('signals.watch()\nsignals.defer(True)')
  process.send_signal(signal.SIGINT)
  lines = [process.stdout.readline()]
  while lines[-1] == 'waiting\n':
    lines.append(process.stdout.readline())
  assert lines[-1] == f'SIGINT: saving after this step. {PRESSED}\n', lines
  process.send_signal(signal.SIGINT)
  output, _ = process.communicate(timeout=60)
  assert f'SIGINT: {ENDED}' in output and 'Traceback' not in output
  assert process.returncode == 130


def test_a_signal_between_two_programs_is_not_lost():
  """main replaces its process by one with huge pages for malloc."""
  code = """
import os, signal, sys, time
from vit_jax import signals

if len(sys.argv) == 1:
  signals.block()
  os.kill(os.getpid(), signal.SIGTERM)
  os.execv(sys.executable, [*sys.orig_argv, 'again'])
signals.watch()
time.sleep(100)
"""
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True
  )
  assert done.returncode == 128 + signal.SIGTERM
  assert done.stderr.strip() == f'SIGTERM: {ENDED}'

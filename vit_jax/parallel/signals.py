"""SIGINT and SIGTERM: one line at once, and never a traceback.

Python calls its signal handlers in the main thread, between two bytecodes. That
takes minutes while a program is compiled, and an exception that a handler
raises can hit any line of any library. So in a process of a command, a thread
reads the signals, by `signal.set_wakeup_fd`, and answers them.

This module uses the standard library only, because a command watches its
signals before it imports anything else.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading

NUMBERS = (signal.SIGINT, signal.SIGTERM)


class _Process:
  """State of the signals of this process.

  Attributes:
    writer: file descriptor of which the thread has the other end, or None.
    deferring: whether the first signal only asks to stop; else it ends all.
    asked: number of the signal that has asked to stop, or None.
  """

  def __init__(self) -> None:
    self.writer: int | None = None
    self.deferring = False
    self.asked: int | None = None


_process = _Process()


def watch() -> None:
  """Answer the signals of this process by a thread, from now on.

  For the main thread of a command, not for a library.
  """
  reader, _process.writer = os.pipe()
  os.set_blocking(_process.writer, False)
  threading.Thread(target=_answer, args=(reader,), daemon=True).start()
  atexit.register(_ignore)
  install()
  signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)


def install() -> None:
  """Install the handlers again, after a library that has installed its own."""
  if _process.writer is not None:
    signal.set_wakeup_fd(_process.writer, warn_on_full_buffer=False)
    for number in NUMBERS:
      signal.signal(number, _do_nothing)


def block() -> None:
  """Keep signals pending until `watch`, even if that is after os.execv."""
  signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)


def _do_nothing(*_):
  """Handle a signal in Python, so that it does not end the process."""


def _ignore():
  """Ignore signals while the interpreter ends.

  It would restore the default handlers, and a second Ctrl-C would then kill a
  process that has just saved and said so.
  """
  for number in NUMBERS:
    signal.signal(number, signal.SIG_IGN)


def _answer(reader):
  while number := os.read(reader, 1)[0]:
    if number not in NUMBERS:
      continue
    if _process.deferring and _process.asked is None:
      _process.asked = number
      acknowledge(number)
    else:
      end(number)


def defer(on: bool) -> bool:
  """Let the first signal only ask to stop, or no longer; see `asked`.

  Returns:
    Whether the signals of this process are watched. If not, nothing changes.
  """
  is_watched = _process.writer is not None
  _process.deferring = on and is_watched
  return is_watched


def asked() -> int | None:
  """Return the number of the signal that has asked to stop, or None."""
  return _process.asked


def acknowledge(number: int) -> None:
  """Print that the run will stop."""
  again = 'Press Ctrl-C' if number == signal.SIGINT else 'Send it'
  text = f'saving after this step. {again} again to stop at once.'
  # A bar that is shown has replaced sys.stderr, and prints it above itself.
  with contextlib.suppress(OSError, ValueError):
    print(f'{_name(number)}: {text}', file=sys.stderr, flush=True)


def end(number: int) -> None:
  """End the process at once, with one line and the status 128 + number."""
  with contextlib.suppress(OSError, ValueError):
    if sys.stdout.isatty():  # remove a bar, and show the cursor that it hid
      os.write(1, b'\r\x1b[K\x1b[?25h')
    text = 'stopped at once. The same command resumes from the last checkpoint.'
    os.write(2, f'\n{_name(number)}: {text}\n'.encode())
  os._exit(128 + number)


def _name(number):
  return signal.Signals(number).name

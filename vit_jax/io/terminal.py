"""Output of commands: progress, tables, and mistakes of the user.

A UserError, a full disk, or an OSError that names a file, is printed without a
traceback. All other errors are bugs, here or in a library, and keep theirs.
"""

import contextlib
import datetime
import errno
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import rich.console
import rich.rule
import rich.table
import rich.text
from rich.progress import MofNCompleteColumn, Progress

from vit_jax.io.files import is_full
from vit_jax.types import Kinds, UserError, kind_of

T = TypeVar('T')
_LINE_EVERY_S = 60  # of progress in a file


class Terminal:
  """Progress of a training run, shown on the first host only."""

  def __init__(self, start_step: int, total_steps: int, kinds: Kinds) -> None:
    self._total, self._kinds = total_steps, kinds
    self._console = console()
    self._bar = _bar(self._console)
    self._task = self._bar.add_task(
      'training', total=total_steps, completed=start_step
    )

  def advance(self, step: int) -> None:
    """Move the bar to this step. A file gets no bar."""
    if self._console.is_terminal:
      self._bar.start()
      self._bar.update(self._task, completed=step)

  def show(self, step: int, record: Mapping[str, Any]) -> None:
    """Print a record of metrics as one line."""
    shown = line(record, self._kinds)
    say(f'{step:>{len(str(self._total))}}/{self._total} {shown}')

  def close(self) -> None:
    """Remove the bar, if it was shown."""
    if self._bar.live.is_started:
      self._bar.stop()


def line(record: Mapping[str, Any], kinds: Kinds) -> str:
  """Return a record as one line, without details and accounts: the ETA ends."""
  found = {name: kind_of(name, kinds) for name in record}
  parts = [
    f'{kind.heading or name.removeprefix("train/")} '
    f'{kind.form.format(record[name])}'
    for name, kind in found.items()
    if (kind.group or kind.main) and not kind.detail
  ]
  if 'eta_s' in record:
    parts.append(f'eta {duration(record["eta_s"])}')
  return ' | '.join(parts)


def say(text: str) -> None:
  """Print text on the first host; a file gets it without line breaks."""
  wraps = console().is_terminal
  options = {'highlight': False, 'markup': False, 'soft_wrap': not wraps}
  _print(printable(text), **options)


def heading(text: str) -> None:
  """Print a heading on the first host."""
  _print(rich.rule.Rule(rich.text.Text(text), align='left'))


def _print(what, **options):
  """Print on the first host. A run continues without a stdout."""
  try:
    console().print(what, **options)
  except OSError:
    _drop_stdout()


def _drop_stdout():
  os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def printable(text: str) -> str:
  """Return text with control characters, such as ESC, escaped."""
  control = r'[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]'
  return re.sub(control, lambda match: repr(match[0])[1:-1], text)


def console(**kwargs: Any) -> rich.console.Console:
  """Return a rich console that prints on the first host only."""
  if 'ipykernel' in sys.modules:
    # A notebook's stdout claims to be a terminal, but bars would fill the page.
    kwargs |= {'force_jupyter': False, 'force_terminal': False}
  # A process that has not loaded jax, such as one that reads data, is alone.
  jax = sys.modules.get('jax')
  is_first = jax is None or jax.process_index() == 0
  return rich.console.Console(quiet=not is_first, **kwargs)


def table(
  title: str | None,
  columns: Sequence[str],
  rows: Iterable[Sequence[str]],
  **options: Any,
) -> None:
  """Print a table whose first column holds the names of the rows."""
  made = rich.table.Table(title=title, title_justify='left', **options)
  for i, column in enumerate(columns):
    heading = rich.text.Text(printable(column))  # without markup
    made.add_column(heading, justify='right' if i else 'left')
  for row in rows:
    made.add_row(*(rich.text.Text(printable(x)) for x in row))
  _print(made)


@contextlib.contextmanager
def one_message() -> Iterator[None]:
  """Context manager that prints only the message of a mistake of the user.

  It prints nothing if the reader of stdout is gone, as with `| head`.
  """
  try:
    yield
  except BrokenPipeError:
    _drop_stdout()
    sys.exit(1)
  except KeyboardInterrupt:
    print('\nInterrupted.', file=sys.stderr)
    sys.exit(128 + signal.SIGINT)
  except Exception as error:
    text = f'{type(error).__name__}: {error}'
    file = isinstance(error, OSError) and error.filename
    if is_full(error):
      text = f'A disk is full. Free some space, and try again. ({text})'
    elif getattr(error, 'errno', None) == errno.EROFS and not file:
      text = f'Make /dev/shm writable, where semaphores are. ({text})'
    elif not file and not isinstance(error, UserError):
      raise
    sys.exit(printable(f'\n{text}'))


def track(
  items: Iterable[T], total: int, *, unit: str, done: int = 0
) -> Iterator[T]:
  """Yield the items after the first `done`, and show the time left on stderr.

  A terminal shows a bar, a file gets a line each minute.
  """
  # redirect_stdout=False: stdout may be a file.
  bar = _bar(console(stderr=True), redirect_stdout=False)
  if bar.console.is_terminal:
    with bar:
      options = {'total': total, 'completed': done, 'description': unit}
      yield from bar.track(items, **options)
    return
  begin = shown = time.monotonic()
  for count, item in enumerate(items, 1):
    yield item
    if (now := time.monotonic()) >= shown + _LINE_EVERY_S:
      eta = duration((now - begin) / count * (total - done - count))
      text = f'{done + count:,} of {total:,} {unit} | eta {eta}'
      print(text, file=sys.stderr, flush=True)
      shown = now


def _bar(on, **kwargs):
  columns = *Progress.get_default_columns(), MofNCompleteColumn()
  return Progress(*columns, console=on, transient=True, **kwargs)


def duration(seconds: float) -> datetime.timedelta:
  """Return the duration in whole seconds, which prints as H:MM:SS."""
  return datetime.timedelta(seconds=round(seconds))

"""Progress in the terminal: a live bar for people, plain lines for files."""

import contextlib
import datetime
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import rich.console
import rich.progress
import rich.table
import rich.text

T = TypeVar('T')


_COLUMNS = {  # name in the record: heading, format
  'train/loss': ('loss', '{:.4g}'),
  'train/lr': ('lr', '{:.2e}'),
  'train/grad_norm': ('grad', '{:.3g}'),
  'images_per_s': ('img/s', '{:,.0f}'),
  'images_per_s_per_device': ('img/s/dev', '{:,.0f}'),
  'mfu': ('mfu', '{:.1%}'),
  'data_wait': ('data wait', '{:.0%}'),
  'memory_gb': ('mem', '{:.1f}GB'),
  'data_skipped': ('skipped', '{:.0f}'),
}
_NOTABLE = 0.1  # Share of waiting from which on its main cause is shown.
# Left out: details that only metrics.jsonl and TensorBoard have.
_HIDDEN = re.compile(
  'eta_s|exaflops|train/.*|data_wait/.*|'
  r'.*(/class_accuracy/.*|/mean_per_class_accuracy|/ece|_std|_seed\d+)'
)


class Terminal:
  """Progress of a training run, shown on the first host only."""

  def __init__(self, start_step: int, total_steps: int) -> None:
    self._total = total_steps
    self._console = console()
    self._bar = None
    if self._console.is_terminal:
      self._bar = _bar(self._console)
      self._task = self._bar.add_task(
        'training', total=total_steps, completed=start_step
      )

  def advance(self, step: int) -> None:
    if self._bar is None:
      return
    if not self._bar.live.is_started:
      self._bar.start()
    self._bar.update(self._task, completed=step)

  def show(self, step: int, record: Mapping[str, Any]) -> None:
    self.say(f'{step:>{len(str(self._total))}}/{self._total} {line(record)}')

  def say(self, text: str) -> None:
    say(text, self._console)

  def close(self) -> None:
    if self._bar is not None:
      self._bar.stop()


def line(record: Mapping[str, Any]) -> str:
  """Return a record as one line: known columns, other metrics, the ETA."""
  columns = dict(_COLUMNS)
  per_device = 'images_per_s_per_device'
  if record.get(per_device) == record.get('images_per_s'):  # one device
    del columns[per_device]
  parts = [
    f'{heading} {form.format(record[name])}{_cause(record, name)}'
    for name, (heading, form) in columns.items()
    if name in record
  ]
  parts += [
    f'{name} {value:.4g}'
    for name, value in record.items()
    if name not in _COLUMNS and not _HIDDEN.fullmatch(name)
  ]
  if 'eta_s' in record:
    parts.append(f'eta {duration(record["eta_s"])}')
  return ' | '.join(parts)


def _cause(record, name):
  """Return the main cause of a share that is large, in brackets."""
  parts = {k: v for k, v in record.items() if k.startswith(f'{name}/')}
  if not parts or record[name] < _NOTABLE:
    return ''
  return f' ({max(parts, key=parts.__getitem__).removeprefix(f"{name}/")})'


def say(text: str, on: rich.console.Console | None = None) -> None:
  """Print text on the first host.

  A terminal gets lines that fit its width, see `wrap`. A file gets the text as
  it is, so that each record stays on one line.
  """
  on = on or console()
  if on.is_terminal:
    text = wrap(text, on.width)
  on.print(text, highlight=False, markup=False, soft_wrap=True)


def wrap(text: str, width: int) -> str:
  """Return text in lines of at most `width` columns, the rest indented.

  Lines are broken after the separator ' | ' of fields if a line has any, else
  between words. A word that is longer than a line, such as a path, stays whole.
  """
  return '\n'.join(_wrap_line(x, width) for x in text.split('\n'))


def _wrap_line(text: str, width: int) -> str:
  if len(text) <= width:
    return text
  indent = ' ' * (len(text) - len(text.lstrip()))
  fields, nbsp = text.strip().split(' | '), '\N{NO-BREAK SPACE}'
  if max(map(len, fields)) + len(indent) + 6 <= width:
    fields = [field.replace(' ', nbsp) for field in fields]
  lines = textwrap.wrap(
    f'{nbsp}| '.join(fields),
    width,
    initial_indent=indent,
    subsequent_indent=indent + '    ',
    break_long_words=False,
    break_on_hyphens=False,
  )
  return '\n'.join(lines).replace(nbsp, ' ')


def heading(text: str) -> None:
  """Print a heading of one line on the first host."""
  on = console()
  if len(text) + 2 <= on.width:
    on.rule(rich.text.Text(text), align='left')
  else:
    say(text, on)


def console(**kwargs: Any) -> rich.console.Console:
  """Return a rich console that prints on the first host only."""
  if 'ipykernel' in sys.modules:
    # A notebook's stdout claims to be a terminal, but bars would fill the page.
    kwargs |= {'force_jupyter': False, 'force_terminal': False}
  return rich.console.Console(quiet=jax.process_index() != 0, **kwargs)


def table(
  title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]
) -> Any:
  """Return a rich table whose first column holds the names of the rows."""
  made = rich.table.Table(title=title, title_justify='left')
  for i, column in enumerate(columns):
    made.add_column(column, justify='right' if i else 'left')
  for row in rows:
    made.add_row(*row)
  return made


@contextlib.contextmanager
def one_message() -> Iterator[None]:
  """Context manager that prints only the message of an error of this project.

  The message goes to stderr and the exit status is 1. Errors that other
  packages raise keep their traceback. If the reader of stdout is gone, as with
  `| head`, the process ends without a message.
  """
  try:
    yield
  except BrokenPipeError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)
  except KeyboardInterrupt:
    print('\nInterrupted.', file=sys.stderr)
    sys.exit(128 + signal.SIGINT)
  except (ValueError, FloatingPointError, MemoryError) as error:
    if not _raised_by_vit_jax(error):
      raise
    text = f'\n{type(error).__name__}: {error}'
    if sys.stderr.isatty():
      text = wrap(text, shutil.get_terminal_size().columns)
    sys.exit(text)


def _raised_by_vit_jax(error):
  *_, (frame, _) = traceback.walk_tb(error.__traceback__)
  # The __name__ of a module run by `python -m` is '__main__'; its spec knows.
  spec = frame.f_globals.get('__spec__')
  name = spec.name if spec else frame.f_globals.get('__name__', '')
  return name.startswith('vit_jax.')


def track(
  items: Iterable[T],
  total: int,
  *,
  unit: str,
  shown: bool = False,
  live: bool = True,
  every_s: int = 60,
) -> Iterator[T]:
  """Yield the items, and report progress on stderr if they take long.

  A terminal shows a bar with the time left, a file gets a line from time to
  time. Only the first host reports.

  Args:
    items: iterable.
    total: number of items.
    unit: what the items are, in the plural.
    shown: whether the items are printed in the terminal anyway: no bar then.
    live: whether to show a bar; False where another one may be shown.
    every_s: seconds between lines.
  """
  if jax.process_index():
    yield from items
    return
  err = console(stderr=True)
  # redirect_stdout=False: stdout may be a file.
  bar = _bar(err, redirect_stdout=False)
  task = bar.add_task(unit, total=total)
  start = reported = time.monotonic()
  try:
    for done, item in enumerate(items, 1):
      yield item
      now = time.monotonic()
      if err.is_terminal and live:
        bar.update(task, completed=done)
        if now - start > 2 and not shown and not bar.live.is_started:
          bar.start()
      elif now - reported > every_s:
        reported, rate = now, done / (now - start)
        eta = duration((total - done) / rate)
        print(
          f'{done}/{total} {unit} | {rate:.3g}/s | eta {eta}', file=sys.stderr
        )
  finally:
    if bar.live.is_started:
      bar.stop()


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
  """Context manager that shows what is waited for, and for how long.

  A terminal shows a line with the elapsed time. A file gets a line at once, and
  one with the elapsed time after 10, 20, 40, ... seconds.

  Args:
    text: what takes long, such as 'compiling ...'.
  """
  on = console()
  if on.is_terminal:
    with rich.progress.Progress(
      '{task.description}', _Elapsed(), console=on, transient=True
    ) as bar:
      bar.add_task(text)
      yield
    return
  say(text, on)
  done = threading.Event()
  thread = threading.Thread(target=_remind, args=(text, done, on), daemon=True)
  thread.start()
  try:
    yield
  finally:
    done.set()
    thread.join()


def _remind(text, done, on):
  begin, after = time.monotonic(), 10
  while not done.wait(begin + after - time.monotonic()):
    say(f'{text} {after} s', on)
    after *= 2


class _Elapsed(rich.progress.TimeElapsedColumn):
  def render(self, task):
    return rich.text.Text('elapsed ') + super().render(task)


class _Left(rich.progress.TimeRemainingColumn):
  def render(self, task):
    return rich.text.Text('left ') + super().render(task)


def _bar(on, **kwargs):
  return rich.progress.Progress(
    '{task.description}',
    # The other columns take 60 of the 80 columns of a small terminal.
    rich.progress.BarColumn(min(40, max(5, on.width - 62))),
    rich.progress.MofNCompleteColumn(),
    _Elapsed(),
    _Left(),
    console=on,
    transient=True,
    **kwargs,
  )


def duration(seconds: float) -> datetime.timedelta:
  """Return the duration in whole seconds, which prints as H:MM:SS."""
  return datetime.timedelta(seconds=round(seconds))

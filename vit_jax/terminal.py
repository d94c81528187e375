"""Progress on the terminal: a live bar for a person, plain lines for a file."""

import contextlib
import datetime
import os
import re
import sys
import time
import traceback

import jax
import rich.console
import rich.progress
import rich.table

_COLUMNS = (  # name in the record, heading, format
  ('train/loss', 'loss', '{:.4g}'),
  ('train/lr', 'lr', '{:.2e}'),
  ('train/grad_norm', 'grad', '{:.3g}'),
  ('images_per_s', 'img/s', '{:,.0f}'),
  ('images_per_s_per_device', 'img/s/dev', '{:,.0f}'),
  ('mfu', 'mfu', '{:.1%}'),
  ('data_wait', 'data wait', '{:.0%}'),
  ('memory_gb', 'mem', '{:.1f}GB'),
  ('data_skipped', 'skipped', '{:.0f}'),
)


# Details of evaluations, which metrics.jsonl and TensorBoard have.
_DETAILS = re.compile(
  r'.*(/class_accuracy/.*|/mean_per_class_accuracy|/ece|_std|_seed\d+)'
)


class Terminal:
  """Shows how far a run is; silent on all hosts but the first."""

  def __init__(self, start_step, total_steps):
    self._total = total_steps
    self._console = console()
    self._bar = None
    if self._console.is_terminal:
      self._bar = rich.progress.Progress(
        '{task.description}',
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TimeRemainingColumn(),
        console=self._console,
        transient=True,
      )
      self._task = self._bar.add_task(
        'training', total=total_steps, completed=start_step
      )

  def advance(self, step):
    if self._bar is None:
      return
    if not self._bar.live.is_started:
      self._bar.start()
    self._bar.update(self._task, completed=step)

  def show(self, step, record):
    self.say(f'{step:>{len(str(self._total))}}/{self._total} {line(record)}')

  def say(self, text):
    self._console.print(text, highlight=False, markup=False, soft_wrap=True)

  def close(self):
    if self._bar is not None:
      self._bar.stop()


def line(record):
  """One line of a record: known columns, then most else that was measured."""
  known = {name for name, _, _ in _COLUMNS} | {'eta_s', 'exaflops'}
  parts = [
    f'{heading} {form.format(record[name])}'
    for name, heading, form in _COLUMNS
    if name in record
  ]
  parts += [
    f'{name} {value:.4g}'
    for name, value in record.items()
    if name not in known
    and not name.startswith('train/')
    and not _DETAILS.fullmatch(name)
  ]
  if 'eta_s' in record:
    eta = datetime.timedelta(seconds=round(record['eta_s']))
    parts.append(f'eta {eta}')
  return ' | '.join(parts)


def console():
  """A console that speaks on the first host only."""
  return rich.console.Console(quiet=jax.process_index() != 0, **_plain())


def _plain():
  """In a notebook: plain lines, although its stdout says it is a terminal."""
  if 'ipykernel' not in sys.modules:
    return {}
  return {'force_jupyter': False, 'force_terminal': False}


def table(title, columns, rows):
  """A rich table; the first column is the rows' name."""
  made = rich.table.Table(title=title, title_justify='left')
  for i, column in enumerate(columns):
    made.add_column(column, justify='right' if i else 'left')
  for row in rows:
    made.add_row(*row)
  return made


@contextlib.contextmanager
def one_message():
  """Ends the process with the message alone of an error that our code raised.

  On stderr, with exit status 1; other errors keep their traceback. Where
  whoever read stdout has gone, as `head` does, it ends without a word.
  """
  try:
    yield
  except BrokenPipeError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)
  except (ValueError, FloatingPointError) as error:
    if not _ours(error):
      raise
    sys.exit(f'\n{type(error).__name__}: {error}')


def _ours(error):
  """Whether our own code raised it: then the message says all there is."""
  *_, (frame, _) = traceback.walk_tb(error.__traceback__)
  # A module that is run by `python -m` has its name in its spec only.
  spec = frame.f_globals.get('__spec__')
  name = spec.name if spec else frame.f_globals.get('__name__', '')
  return name.startswith('vit_jax.')


def track(items, total, *, unit, shown=False, live=True, after_s=2, every_s=60):
  """Yields the items, and tells on stderr how far it is where it takes long.

  A person gets a bar with the time left, a file gets a line now and then; all
  hosts but the first are silent.

  Args:
    items: iterable.
    total: number of them.
    unit: what they are, in the plural.
    shown: whether the items appear on the terminal anyway; no bar then.
    live: False for lines on a terminal too, where another bar may be shown.
    after_s: of what is over by then nothing is shown.
    every_s: between lines.
  """
  if jax.process_index():
    yield from items
    return
  err = rich.console.Console(stderr=True, **_plain())
  bar = rich.progress.Progress(
    rich.progress.BarColumn(),
    rich.progress.MofNCompleteColumn(),
    '{task.description}',
    rich.progress.TimeElapsedColumn(),
    rich.progress.TimeRemainingColumn(),
    console=err,
    transient=True,
    redirect_stdout=False,  # stdout may be a file
  )
  task = bar.add_task(unit, total=total)
  start = said = time.monotonic()
  try:
    for done, item in enumerate(items, 1):
      yield item
      now = time.monotonic()
      if err.is_terminal and live:
        bar.update(task, completed=done)
        if now - start > after_s and not shown and not bar.live.is_started:
          bar.start()
      elif now - said > every_s:
        said, rate = now, done / (now - start)
        eta = datetime.timedelta(seconds=round((total - done) / rate))
        print(
          f'{done}/{total} {unit} | {rate:.3g}/s | eta {eta}', file=sys.stderr
        )
  finally:
    if bar.live.is_started:
      bar.stop()

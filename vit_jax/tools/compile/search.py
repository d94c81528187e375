"""Search for the largest batch that fits, and the cheapest remat for it."""

import datetime
import json
import pathlib
import statistics

from vit_jax import terminal
from vit_jax.tools.compile import report

# Least recomputation first. Other names of policies are aliases of these.
POLICIES = ('none', 'dots_saveable', 'dots', 'full')


def search(fits, sizes):
  """Return (batch size, remat) of the best program that fits, or None.

  Find the largest batch that fits with full rematerialisation by bisection,
  then the cheapest policy with which this batch still fits.

  Args:
    fits: (batch size, remat) -> bool; it compiles, so it is called rarely.
    sizes: batch sizes, ascending.
  """
  below, above = -1, len(sizes)
  while above - below > 1:
    middle = (below + above) // 2
    if fits(sizes[middle], 'full'):
      below = middle
    else:
      above = middle
  if below < 0:
    return None
  size = sizes[below]
  return size, next(r for r in POLICIES if r == 'full' or fits(size, r))


def run(compile_one, about, smallest, largest, file=None):
  """Search the batch sizes from `smallest` to `largest`, and print each trial.

  Args:
    compile_one: (batch size, remat) -> row.
    about, file: see Trials.

  Returns:
    (the best row, all rows, those of earlier searches in `file` included).
  """
  sizes = batch_sizes(smallest, largest)
  if not sizes:
    raise ValueError(
      f'--max_batch={largest}: the smallest batch is {smallest}, one example '
      'per device and micro-batch.'
    )
  trials = Trials(compile_one, about, len(sizes), file)
  best = search(trials.fits, sizes)
  if best is None:
    report.show(trials.last)
    raise ValueError(
      f'--search: nothing fits, not even batch {smallest} with remat=full. '
      'Shard parameters and optimizer state (config.mesh and config.sharding), '
      'or take more devices.'
    )
  terminal.console().print(
    'Best: --config.data.batch_size={} --config.model.remat={}'.format(*best),
    highlight=False,
  )
  return trials.find(*best), trials.rows


def batch_sizes(smallest, largest):
  """Return smallest, 2 * smallest, 4 * smallest, ... up to `largest`."""
  sizes = []
  while smallest <= largest:
    sizes.append(smallest)
    smallest *= 2
  return sizes


class Trials:
  """Programs of a search, each compiled at most once.

  Args:
    compile_one: (batch size, remat) -> row.
    about: first columns of all rows, which identify the search in `file`.
    num_sizes: number of batch sizes in the search.
    file: JSON file that keeps the rows, and may have those of earlier
      searches; None keeps none.
  """

  def __init__(self, compile_one, about, num_sizes, file=None):
    self._compile, self._about = compile_one, about
    self._file = file and pathlib.Path(file)
    self._left = num_sizes.bit_length() + len(POLICIES) - 1
    self._seconds = []
    self.rows, self.last = [], None
    if self._file and self._file.exists():
      self.rows = json.loads(self._file.read_text())

  def find(self, batch_size, remat):
    """Return the row, or None."""
    wanted = self._about | {'batch_size': batch_size, 'remat': remat}
    return next((r for r in self.rows if wanted.items() <= r.items()), None)

  def fits(self, batch_size, remat):
    """Return whether the program fits; compile it if there is no row of it."""
    say = terminal.console().print
    say(f'batch {batch_size}, remat {remat}: ', end='', highlight=False)
    self.last = self.find(batch_size, remat) or self._add(batch_size, remat)
    self._left -= 1
    left = f'at most {self._left} to go'
    if self._seconds:
      seconds = round(self._left * statistics.mean(self._seconds))
      left += f', {datetime.timedelta(seconds=seconds)}'
    say(f'{report.fits(self.last)} ({left})', highlight=False)
    return self.last['fits']

  def _add(self, batch_size, remat):
    row = self._about | self._compile(batch_size, remat)
    if row['fits'] is None:
      raise ValueError(
        f'--search needs the memory size of a {row["device_kind"]}, which is '
        'not known here. Search for a TPU topology.'
      )
    self._seconds.append(row['compile_s'])
    self.rows.append(row)
    if self._file:
      report.write_json(self._file, self.rows)
    return row

"""Finds the largest batch that fits, and the cheapest remat policy for it."""

import copy
import datetime
import json
import pathlib
import statistics

from vit_jax import terminal
from vit_jax.tools.compile import report

# Cheapest in time first; other names in common.REMAT mean one of these.
POLICIES = ('none', 'dots_saveable', 'dots', 'full')


def search(fits, sizes):
  """(batch size, remat) of the best program that fits, or None.

  First the largest batch that fits under full rematerialisation, then the
  cheapest policy under which it still does.

  Args:
    fits: (batch size, remat) -> bool; it is asked as little as possible.
    sizes: of batches, ascending.
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


def batch_sizes(smallest, largest):
  """From `smallest` on, each twice the one before it."""
  sizes = []
  while smallest <= largest:
    sizes.append(smallest)
    smallest *= 2
  return sizes


class Tries:
  """The programs of a search: compiles, keeps and tells of each.

  Args:
    file: JSON to keep rows in, and to take those of an earlier search from; or
      None.
    about: what a row begins with, and is known by.
    config: of the training.
    compile_one: config -> row.
    num_sizes: how many batch sizes are searched.
  """

  def __init__(self, file, about, config, compile_one, num_sizes):
    self._file = file and pathlib.Path(file)
    self._about, self._config, self._compile = about, config, compile_one
    self._left = num_sizes.bit_length() + len(POLICIES) - 1
    self._seconds = []
    self.rows, self.last = [], None
    if self._file and self._file.exists():
      self.rows = json.loads(self._file.read_text())

  def find(self, batch_size, remat):
    """The row, or None."""
    wanted = self._about | {'batch_size': batch_size, 'remat': remat}
    return next((r for r in self.rows if wanted.items() <= r.items()), None)

  def fits(self, batch_size, remat):
    """Whether it fits, by its row; compiles it if there is none."""
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
    config = copy.deepcopy(self._config)
    config.data.batch_size, config.model.remat = batch_size, remat
    row = self._about | self._compile(config)
    if row['fits'] is None:
      raise ValueError(
        f'--search: how much memory a {row["device_kind"]} has is not known.'
      )
    self._seconds.append(row['compile_s'])
    self.rows.append(row)
    if self._file:
      report.write_json(self._file, self.rows)
    return row

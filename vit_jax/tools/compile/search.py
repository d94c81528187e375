"""Search for the largest batch that fits, and the cheapest remat for it."""

import bisect
import datetime
import functools
import json
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vit_jax.runs import terminal
from vit_jax.runs.files import PathLike
from vit_jax.tools import outputs
from vit_jax.tools.compile import report

# Least recomputation first. Other names of policies are aliases of these.
POLICIES = ('none', 'dots_saveable', 'dots', 'full')
# A loop over layers writes what it keeps to memory once more: with 'none' it
# takes more cycles than with 'dots', see docs/compile.md.
POLICIES_OF_LOOPS = ('dots', 'full')


def search(
  fits: Callable[[int, str], bool],
  sizes: Sequence[int],
  policies: Sequence[str] = POLICIES,
) -> tuple[int, str] | None:
  """Return (batch size, remat) of the best program that fits, or None.

  Find the largest batch that fits with full rematerialization by bisection,
  then the cheapest policy with which this batch still fits.

  Args:
    fits: (batch size, remat) -> bool; it compiles, so it is called rarely.
    sizes: batch sizes, ascending.
    policies: names in REMAT, the cheapest first and 'full' last.
  """
  count = bisect.bisect(sizes, False, key=lambda x: not fits(x, 'full'))
  if not count:
    return None
  size = sizes[count - 1]
  return size, next(r for r in policies if r == 'full' or fits(size, r))


def batch_sizes(smallest: int, largest: int) -> list[int]:
  """Return smallest, 2 * smallest, 4 * smallest, ... up to `largest`."""
  count = (largest // smallest).bit_length()
  return [smallest << i for i in range(count)]


def run(
  compile_one: Callable[[int, str], dict[str, Any]],
  about: Mapping[str, Any],
  smallest: int,
  largest: int,
  file: PathLike | None = None,
  policies: Sequence[str] = POLICIES,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
  """Search the batch sizes from `smallest` to `largest`, and print each trial.

  Args:
    compile_one: (batch size, remat) -> row.
    about: first columns of all rows, which identify the search in `file`.
    smallest, largest: batch sizes.
    file: JSON file of rows, which are not compiled again; or None.
    policies: as in `search`.

  Returns:
    (the best row, all rows).
  """
  sizes = batch_sizes(smallest, largest)
  if not sizes:
    raise ValueError(
      f'--max_batch={largest}: the smallest batch is {smallest}, one example '
      'per device and micro-batch.'
    )
  file = pathlib.Path(file) if file else None
  rows = json.loads(file.read_text()) if file and file.exists() else []
  tried, seconds = {}, []  # rows of this search, and how long they took
  say = functools.partial(terminal.console().print, highlight=False)
  at_most = len(sizes).bit_length() + len(policies) - 1

  def fits(batch_size, remat):
    case = {'batch_size': batch_size, 'remat': remat}
    say(f'batch {batch_size}, remat {remat}: ', end='')
    row = report.find(rows, about | case)
    if row is None:
      row = about | compile_one(batch_size, remat)
      if row['fits'] is None:
        raise ValueError(
          f'--search needs the memory size of a {row["device_kind"]}, which is '
          'not known here. Search for a TPU topology.'
        )
      seconds.append(row['compile_s'])
      rows.append(row)
      if file:
        outputs.write_values(file, rows)
    tried[batch_size, remat] = row
    left = at_most - len(tried)
    text = f'at most {left} to go'
    if seconds:
      expected = round(left * statistics.mean(seconds))
      text += f', {datetime.timedelta(seconds=expected)}'
    say(f'{report.fits(row)} ({text})')
    return row['fits']

  best = search(fits, sizes, policies)
  if best is None:
    report.show(tried[smallest, 'full'])
    raise ValueError(
      f'--search: nothing fits, not even batch {smallest} with remat=full. '
      'Shard parameters and optimizer state (--config.mesh.fsdp=-1), or take '
      'more devices.'
    )
  size, remat = best
  say(f'Best: --config.data.batch_size={size} --config.model.remat={remat}')
  return tried[best], rows

"""Steps that runs take to a target, as a table."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.reports import curves, table
from vit_jax.reports.results import Results, half_width


@dataclasses.dataclass
class Targets:
  """First evaluated step at which a metric is at least a target.

  A cell with several runs shows their mean and its 95% interval, by Student's
  t. If not all runs have reached the target, it shows how many, and no mean.

  Args:
    cells: dicts of row, column, runs, metric (regular expressions) and
      at_least, the target as a fraction.
    title: of the table.
    name: of the files NAME.md and NAME.json in the study's workdir.
  """

  cells: tuple[Mapping[str, Any], ...]
  title: str = 'Steps to a target'
  name: str = 'targets'

  def check(self, results: Results) -> None:
    """Raise ValueError for a cell that no run can fill."""
    for cell in self.cells:
      results.check({'runs': cell['runs'], 'metric': cell['metric']})

  def __call__(self, results: Results) -> list[dict[str, Any]]:
    """Print and write it.

    Returns:
      list of dicts of row, column, at_least and steps, {run: step}, in which
      None is a run that has not reached the target.
    """
    texts: dict[str, dict[str, str]] = {x['row']: {} for x in self.cells}
    titles, found = {}, []
    for cell in self.cells:
      steps = {
        name: _first_step(curve, cell['at_least'])
        for name in results.matching(cell['runs'])
        if (curve := curves.curve(results.records[name], cell['metric']))
      }
      title = f'{cell["column"]}: {100 * cell["at_least"]:g}%'
      titles[title] = None
      texts[cell['row']][title] = _text(list(steps.values()))
      keys = ('row', 'column', 'at_least')
      found.append({key: cell[key] for key in keys} | {'steps': steps})
    rows = [[k, *(x.get(c, '') for c in titles)] for k, x in texts.items()]
    columns = ['', *titles]
    table.publish(results.workdir, self.name, self.title, columns, rows, found)
    return found


def _first_step(curve, target):
  return min((x for x, value in curve.items() if value >= target), default=None)


def _text(steps):
  reached = [x for x in steps if x is not None]
  if not steps:
    return ''
  if not reached:
    return 'not reached'
  if len(reached) < len(steps):
    return f'reached by {len(reached)} of {len(steps)}'
  text = f'{np.mean(reached):.0f}'
  if (width := half_width(reached)) is not None:
    text += f' ± {width:.0f}'
  return text

"""Differences to a baseline within each seed: a table and a figure."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.reports import pictures, table
from vit_jax.reports.results import Results, half_width


@dataclasses.dataclass
class Paired:
  """Differences of each row to the first one, with 95% intervals, in percent.

  A difference is taken within each seed, so that what the seed decides (data,
  order, initialisation) cancels. The interval is that of Student's t. The first
  row shows its own mean and interval.

  Args:
    cells: dicts of row, column, runs and metric, as of Table; runs has a group
      called `seed`. Each column has a cell of the first row.
    title: of the table.
    name: of the files NAME.png, NAME.md and NAME.json in the study's workdir.
  """

  cells: tuple[Mapping[str, Any], ...]
  title: str = 'Differences to the baseline'
  name: str = 'paired'

  def check(self, results: Results) -> None:
    """Raise ValueError for a cell that no run can fill, or without a pair."""
    for cell in self.cells:
      results.check(_spec(cell))
      if 'seed' not in re.compile(cell['runs']).groupindex:
        raise ValueError(
          f'runs={cell["runs"]!r} has no group `seed`, by which runs are '
          r'paired. Write e.g. mixup_seed(?P<seed>\d+).'
        )
      if cell['column'] not in self._baselines():
        raise ValueError(
          f'The column {cell["column"]!r} has no cell of the first row, '
          f'{self.cells[0]["row"]!r}, with which the others are compared.'
        )

  def __call__(self, results: Results) -> list[dict[str, Any]]:
    """Print, write and draw it.

    Returns:
      list of dicts of row, column, mean, half_width (None for one seed) and
      values, {seed: value}: differences, or accuracies of the first row.
    """
    found = [_compare(each, self._baselines(), results) for each in self.cells]
    found = [each for each in found if each['values']]
    columns = list(self._baselines())
    texts = {cell['row']: dict.fromkeys(columns, '') for cell in self.cells}
    for each in found:
      texts[each['row']][each['column']] = _text(each)
    lines = [[row, *of_row.values()] for row, of_row in texts.items()]
    title = f'{self.title} (%, 95% intervals)'
    columns = ['', *columns]
    table.publish(results.workdir, self.name, title, columns, lines, found)
    path = results.workdir / f'{self.name}.png'
    pictures.save(self._figure(found), path)
    pictures.report(self.title, path)
    return found

  def _baselines(self):
    """Return {column: cell} of the first row."""
    first = self.cells[0]['row']
    return {x['column']: x for x in self.cells if x['row'] == first}

  def _figure(self, found):
    """Draw the differences of each column as a panel, row by row."""
    columns = list(self._baselines())
    rows = list(dict.fromkeys(x['row'] for x in self.cells))[1:]
    figure = pictures.canvas(1.2 + 2.6 * len(columns), 1.2 + 0.35 * len(rows))
    panels = figure.subplots(1, len(columns), squeeze=False, sharey=True)[0]
    for axes, column in zip(panels, columns):
      axes.axvline(0, color='black', linewidth=1)
      for each in found:
        if each['column'] != column or each['row'] not in rows:
          continue
        y = rows.index(each['row'])
        width = each['half_width']
        # Green and red only where the interval is on one side of 0.
        clear = width is not None and abs(each['mean']) > width
        color = ('C3', 'C2')[int(each['mean'] > 0)] if clear else 'C7'
        axes.errorbar(
          100 * each['mean'],
          y,
          xerr=100 * (width or 0),
          fmt='o',
          color=color,
          capsize=3,
        )
        values = [100 * x for x in each['values'].values()]
        axes.plot(values, [y + 0.25] * len(values), '|', color=color, alpha=0.6)
      axes.set(title=column, xlabel='difference (points)')
      axes.set_yticks(range(len(rows)), rows)
      axes.grid(alpha=0.3)
      axes.spines[['top', 'right']].set_visible(False)
    panels[0].set_ylim(len(rows) - 0.4, -0.6)
    return figure


def _spec(cell):
  return {k: v for k, v in cell.items() if k not in ('row', 'column')}


def _compare(cell, baselines, results):
  """Return what `Paired.__call__` does, of a cell."""
  values = results.sample(_spec(cell))
  baseline = baselines[cell['column']]
  if cell is not baseline:
    base = results.sample(_spec(baseline))
    values = {k: x - base[k] for k, x in values.items() if k in base}
  numbers = list(values.values())
  return {
    'row': cell['row'],
    'column': cell['column'],
    'difference': cell is not baseline,
    'mean': float(np.mean(numbers)) if numbers else None,
    'half_width': half_width(numbers),
    'values': values,
  }


def _text(each):
  sign = '+' if each['difference'] else ''
  text = f'{100 * each["mean"]:{sign}.1f}'
  if each['half_width'] is not None:
    text += f' ± {100 * each["half_width"]:.1f}'
  return text

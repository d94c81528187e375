"""Tables of a study: in the terminal, as Markdown and as JSON."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax.reports.results import Results, half_width
from vit_jax.runs import terminal
from vit_jax.runs.files import write_atomically
from vit_jax.types import Natural, UserError


@dataclasses.dataclass
class Table:
  """Rows and columns of values, in percent.

  Args:
    cells: dicts of row, column, and the keys that `Results.find` takes.
    title: of the table.
    digits: number of decimals.
    name: of the files NAME.md and NAME.json in the study's workdir.
  """

  cells: tuple[Mapping[str, Any], ...]
  title: str = 'Results'
  digits: Natural = 1
  name: str = 'table'

  unit = '%'

  def check(self, results: Results) -> None:
    """Raise ValueError for a cell that no run can fill."""
    for cell in self.cells:
      if missing := {'row', 'column'} - set(cell):
        raise UserError(f'A cell lacks its {min(missing)}: {dict(cell)}.')
      results.check(_spec(cell))

  def __call__(self, results: Results) -> dict[str, dict[str, Any]]:
    """Print and write it. Return {row: {column: the numbers of the cell}}."""
    columns = dict.fromkeys(cell['column'] for cell in self.cells)
    data: dict[str, dict[str, Any]] = {cell['row']: {} for cell in self.cells}
    texts = {row: dict.fromkeys(columns, '') for row in data}
    for cell in self.cells:
      if found := self.find(cell, results):
        row, column = cell['row'], cell['column']
        texts[row][column], data[row][column] = found
    lines = [[row, *text.values()] for row, text in texts.items()]
    title = f'{self.title} ({self.unit})'
    publish(results.workdir, self.name, title, ['', *columns], lines, data)
    return data

  def find(
    self, cell: Mapping[str, Any], results: Results
  ) -> tuple[str, dict[str, Any]] | None:
    """Return the text of a cell and {'mean', 'std', 'values'}, or None."""
    if (value := results.find(_spec(cell))) is None:
      return None
    return value.percent(self.digits), dataclasses.asdict(value)


@dataclasses.dataclass
class Paired(Table):
  """Differences of each row to the first one, with 95% intervals, in percent.

  A difference is taken within each seed, so that what the seed decides (data,
  order, initialisation) cancels. The interval is Student's t. The first row
  shows its own mean and interval.

  The runs of cells have a group called `seed`. Each column has a cell of the
  first row.
  """

  title: str = 'Differences to the baseline'
  name: str = 'paired'

  unit = '%, 95% intervals'

  def check(self, results: Results) -> None:
    """Raise ValueError for a cell that no run can fill, or without a pair."""
    super().check(results)
    for cell in self.cells:
      if cell['column'] not in self._baselines():
        raise UserError(
          f'The column {cell["column"]!r} has no cell of the first row, '
          f'{self.cells[0]["row"]!r}, with which the others are compared.'
        )

  def find(
    self, cell: Mapping[str, Any], results: Results
  ) -> tuple[str, dict[str, Any]] | None:
    """Return the text of a cell and {'mean', 'half_width', 'values'}, or None.

    Values are differences by seed, or accuracies of the first row; half_width
    is None for one seed.
    """
    baseline = self._baselines()[cell['column']]
    values, sign = results.sample(_spec(cell)), ''
    if cell is not baseline:
      base, sign = results.sample(_spec(baseline)), '+'
      values = {k: x - base[k] for k, x in values.items() if k in base}
    if not values:
      return None
    mean = float(np.mean(list(values.values())))
    width = half_width(list(values.values()))
    text = f'{100 * mean:{sign}.{self.digits}f}'
    if width is not None:
      text += f' ± {100 * width:.{self.digits}f}'
    return text, {'mean': mean, 'half_width': width, 'values': values}

  def _baselines(self):
    """Return {column: cell} of the first row."""
    first = self.cells[0]['row']
    return {x['column']: x for x in self.cells if x['row'] == first}


def publish(
  workdir: epath.Path,
  name: str,
  title: str,
  columns: Sequence[str],
  rows: Sequence[Sequence[str]],
  data: Any,
) -> None:
  """Print a table; write it as NAME.md, and `data` as NAME.json (host 0).

  Rows are lists of texts, of which the first is the name of the row.
  """
  terminal.console().print(terminal.table(title, columns, rows))
  if jax.process_index() == 0:
    lines = [f'| {" | ".join(row)} |' for row in (columns, *rows)]
    lines.insert(1, '|---' * len(columns) + '|')
    text = '\n'.join([f'# {title}', '', *lines, ''])
    write_atomically(workdir / f'{name}.md', text)
    text = json.dumps(data, indent=2) + '\n'
    write_atomically(workdir / f'{name}.json', text)


def _spec(cell):
  return {k: v for k, v in cell.items() if k not in ('row', 'column')}

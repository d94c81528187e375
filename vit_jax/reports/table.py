"""Tables of a study: in the terminal, as Markdown and as JSON."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax.io import terminal
from vit_jax.io.files import write_atomically, write_json
from vit_jax.reports import pictures
from vit_jax.reports.results import Results, Value, half_width
from vit_jax.reports.workdir import Workdir
from vit_jax.types import Natural


@dataclasses.dataclass
class Table:
  """Rows and columns of values, in NAME.md and NAME.json.

  Cells are dicts of row, column, and the keys that `Results.find` takes. A
  column of fractions, such as accuracies, is in percent.
  """

  cells: tuple[Mapping[str, Any], ...]
  title: str = 'Results'
  digits: Natural = 1
  name: str = 'table'

  about = ''

  def check(self, results: Results) -> None:
    """Raise ValueError for a cell that no run can fill."""
    for cell in self.cells:
      results.check(_parts(cell)[2])

  def __call__(self, results: Results) -> dict[str, dict[str, Any]]:
    """Print and write it. Return {row: {column: the numbers of the cell}}."""
    cells = [_parts(cell) for cell in self.cells]
    columns = {column: '' for _, column, _ in cells}
    texts = {row: dict(columns) for row, *_ in cells}
    data: dict[str, dict[str, Any]] = {row: {} for row in texts}
    for row, column, spec in cells:
      if found := self.find(column, spec, results):
        texts[row][column], data[row][column] = found
    lines = [[row, *text.values()] for row, text in texts.items()]
    in_percent = {x for _, x, spec in cells if results.scale(spec) == 100}
    head = ['', *(f'{x} (%)' if x in in_percent else x for x in columns)]
    ema = {k: results.has_ema(spec) for k, _, spec in cells if 'runs' in spec}
    title = self.title + self.about
    if len({*ema.values()}) == 2:
      rows = ', '.join(row for row, has_one in ema.items() if has_one)
      title += f'. With an EMA of the parameters, others without: {rows}'
    publish(results.workdir, self.name, title, head, lines, data)
    return data

  def find(
    self, column: str, spec: Mapping[str, Any], results: Results
  ) -> tuple[str, dict[str, Any]] | None:
    """Return the text of a cell and {'mean', 'std', 'values'}, or None."""
    if (value := results.find(spec)) is None:
      return None
    text = value.text(results.scale(spec), self.digits)
    return text, dataclasses.asdict(value)


@dataclasses.dataclass
class Paired(Table):
  """Differences of each row to the first one, with 95% intervals.

  A difference is taken within each seed, the group `seed` of the runs, so that
  what the seed decides (data, order, initialisation) cancels. The interval is
  Student's t. The first row has a cell in each column, its mean and interval.
  NAME.png has the differences, a panel for each column.
  """

  title: str = 'Differences to the baseline'
  name: str = 'paired'

  about = ' (95% intervals)'

  def __call__(self, results: Results) -> dict[str, dict[str, Any]]:
    """Print, write and draw it. Return what a Table returns."""
    data = super().__call__(results)
    columns = list(dict.fromkeys(x for cells in data.values() for x in cells))
    if len(data) < 2 or not columns:
      return data
    made, panels = pictures.figure(len(columns))
    _, *rows = data
    for column, axes in zip(columns, panels):
      found = [data[row].get(column, {}) for row in rows]
      scale = results.scale(self._baseline(column))
      unit = 'difference (points)' if scale == 100 else 'difference'
      x, bars = (
        scale * np.array([cell.get(key) for cell in found], float)
        for key in ('mean', 'half_width')
      )
      axes.errorbar(x, range(len(rows)), xerr=bars, fmt='o', capsize=3)
      axes.axvline(0, color='grey', linewidth=1)
      axes.set_yticks(range(len(rows)), rows if column == columns[0] else [])
      axes.set_ylim(len(rows) - 0.5, -0.5)
      axes.set(title=column, xlabel=unit)
    pictures.save(made, results.workdir / f'{self.name}.png')
    return data

  def find(
    self, column: str, spec: Mapping[str, Any], results: Results
  ) -> tuple[str, dict[str, Any]] | None:
    """Return a cell's text and {'mean', 'half_width', 'values'}, or None."""
    baseline, scale = self._baseline(column), results.scale(spec)
    values, sign = results.sample(**spec), ''
    if spec != baseline:
      base, sign = results.sample(**baseline), '+'
      values = {k: x - base[k] for k, x in values.items() if k in base}
    if not values:
      return None
    sample = tuple(values.values())
    mean, width = float(np.mean(sample)), half_width(sample)
    text = Value(mean, width, sample).text(scale, self.digits, sign)
    return text, {'mean': mean, 'half_width': width or None, 'values': values}

  def _baseline(self, column):
    """Return the spec of the first cell of a column."""
    return next(x for _, name, x in map(_parts, self.cells) if name == column)


def publish(
  workdir: epath.Path,
  name: str,
  title: str,
  columns: Sequence[str],
  rows: Sequence[Sequence[str]],
  data: Any,
) -> None:
  """Print a table; write it as NAME.md, and `data` as NAME.json (host 0)."""
  title = '. '.join(filter(None, (title, Workdir(workdir).caution)))
  terminal.table(title, columns, rows)
  if jax.process_index() == 0:
    lines = [f'| {" | ".join(row)} |' for row in (columns, *rows)]
    lines.insert(1, '|---' * len(columns) + '|')
    text = '\n'.join([f'# {title}', '', *lines, ''])
    write_atomically(workdir / f'{name}.md', text)
    write_json(workdir / f'{name}.json', data)


def _parts(cell):
  """Return (row, column, spec) of a cell."""
  spec = dict(cell)
  return spec.pop('row'), spec.pop('column'), spec

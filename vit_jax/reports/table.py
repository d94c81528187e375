"""A table of a study, on the terminal, as Markdown and as data."""

import dataclasses
import json

import jax

from vit_jax import terminal


@dataclasses.dataclass
class Table:
  """Rows and columns of values, in percent.

  Args:
    cells: dicts of row, column, and what `Results.find` takes.
    title: of the table.
    digits: after the decimal point.
    name: of the files, NAME.md and NAME.json, in the study's workdir.
  """

  cells: tuple
  title: str = 'Results'
  digits: int = 1
  name: str = 'table'

  def check(self, results):
    """Raises ValueError for a cell that no run can fill."""
    for cell in self.cells:
      for key in ('row', 'column'):
        if key not in cell:
          raise ValueError(f'A cell lacks its {key}: {dict(cell)}.')
      results.check(_spec(cell))

  def __call__(self, results):
    """Shows and writes it; {row: {column: {'mean', 'std', 'values'}}}."""
    found = {}
    for cell in self.cells:
      row = found.setdefault(cell['row'], {})
      if (value := results.find(_spec(cell))) is not None:
        row[cell['column']] = value
    columns = list(dict.fromkeys(cell['column'] for cell in self.cells))
    rows = [
      [name, *(self._show(row.get(column)) for column in columns)]
      for name, row in found.items()
    ]
    title = f'{self.title} (%)'
    terminal.console().print(terminal.table(title, ['', *columns], rows))
    data = {
      name: {column: dataclasses.asdict(x) for column, x in row.items()}
      for name, row in found.items()
    }
    if jax.process_index() == 0:
      text = markdown(title, ['', *columns], rows)
      (results.workdir / f'{self.name}.md').write_text(text)
      text = json.dumps(data, indent=2) + '\n'
      (results.workdir / f'{self.name}.json').write_text(text)
    return data

  def _show(self, value):
    return '' if value is None else value.percent(self.digits)


def markdown(title, columns, rows):
  """A Markdown table; the first column is the rows' name."""
  lines = [f'# {title}', '', f'| {" | ".join(columns)} |']
  lines += ['|---' * len(columns) + '|']
  lines += [f'| {" | ".join(row)} |' for row in rows]
  return '\n'.join(lines) + '\n'


def _spec(cell):
  return {k: v for k, v in cell.items() if k not in ('row', 'column')}

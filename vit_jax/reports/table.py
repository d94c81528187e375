"""A table of a study: in the terminal, as Markdown and as JSON."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import jax
from etils import epath

from vit_jax.config.domains import Range
from vit_jax.reports.results import Results, Value
from vit_jax.runs import terminal
from vit_jax.runs.files import write_atomically


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
  digits: Annotated[int, Range(0, 15)] = 1
  name: str = 'table'

  def check(self, results: Results) -> None:
    """Raise ValueError for a cell that no run can fill."""
    for cell in self.cells:
      if missing := {'row', 'column'} - set(cell):
        raise ValueError(f'A cell lacks its {min(missing)}: {dict(cell)}.')
      results.check(_spec(cell))

  def __call__(self, results: Results) -> dict[str, dict[str, Any]]:
    """Print and write it. Return {row: {column: {'mean', 'std', 'values'}}}."""
    columns = list(dict.fromkeys(cell['column'] for cell in self.cells))
    found: dict[str, dict[str, Value]] = {
      cell['row']: {} for cell in self.cells
    }
    for cell in self.cells:
      if (value := results.find(_spec(cell))) is not None:
        found[cell['row']][cell['column']] = value
    texts, data = [], {}
    for row, of_row in found.items():
      text = {c: value.percent(self.digits) for c, value in of_row.items()}
      texts.append([row, *(text.get(c, '') for c in columns)])
      data[row] = {c: dataclasses.asdict(value) for c, value in of_row.items()}
    title = f'{self.title} (%)'
    publish(results.workdir, self.name, title, ['', *columns], texts, data)
    return data


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

"""Results of a study: its own reports, and a table of its runs."""

import urllib.parse
from collections.abc import Sequence

from vit_jax.reports import markup, texts
from vit_jax.reports.markup import Html, section, table, tag
from vit_jax.reports.sections import summary
from vit_jax.reports.workdir import NAME, Workdir


def table_of(runs: Sequence[Workdir]) -> Html | None:
  """Return a table of the runs with links to their pages."""
  count: dict[str, int] = {}
  for run in runs:
    for name in summary.main_metrics(run.last, limit=8):
      count[name] = count.get(name, 0) + 1
  columns = sorted(count, key=lambda x: -count[x])[:10]
  head = ['run', 'status', 'steps', 'time', *columns]
  rows = []
  for run in runs:
    status, color = run.status
    name = run.name
    if (run.path / NAME).exists():
      href = f'{urllib.parse.quote(name)}/{NAME}'
      name = tag('a', name, href=href)
    seconds = run.seconds
    cells = [
      name,
      tag('span', status, class_=f'status {color}'),
      (f'{run.step:,}', run.step) if run.records else '',
      (texts.duration(seconds), seconds) if seconds else '',
    ]
    for metric in columns:
      value = run.last.get(metric)
      cells.append(
        '' if value is None else (texts.percent(metric, value), value)
      )
    rows.append(cells)
  numbers = range(2, len(head))
  return section('Runs', table(head, rows, numbers=numbers, sortable=True))


def reports(study: Workdir) -> Html | None:
  """Return the tables and figures that the study's own reports wrote."""
  parts = []
  for file in sorted(study.path.glob('*.md')):
    parts += _markdown(file.read_text())
  for file in sorted(study.path.glob('*.png')):
    if file.stat().length > markup.MAX_BYTES:
      parts.append(tag('p', f'{file.name} is too large for this page.'))
      continue
    picture = markup.image(file.read_bytes(), 'png', alt=file.stem)
    parts.append(tag('div', tag('h3', file.stem), picture, class_='figure'))
  return section('Results', *parts)


def _markdown(text):
  """Return headings and tables of text that `table.publish` has written."""
  parts, rows = [], []
  for line in [*text.splitlines(), '']:
    if line.startswith('|'):
      rows.append([cell.strip() for cell in line.strip('|').split('|')])
      continue
    if rows:
      head, *body = (row for row in rows if set(''.join(row)) != {'-'})
      parts.append(table(head, body, numbers=range(1, len(head))))
      rows = []
    if line.startswith('#'):
      parts.append(tag('h3', line.lstrip('# ')))
    elif line.strip():
      parts.append(tag('p', line))
  return parts

"""Learning curves, and a table per evaluator."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.reports import series, texts
from vit_jax.reports.markup import Html, fold, section, table, tag
from vit_jax.reports.workdir import Workdir

_SMALLER_IS_BETTER = re.compile(r'.*(loss|ece|error)')


def curves(
  charts: Sequence[Mapping[str, Any]], *, shared: bool = False
) -> Html | None:
  """Return the place of the charts, which page.js draws.

  Args:
    charts: see reports/series.py.
    shared: whether several runs share a legend.
  """
  if not charts:
    return None
  shown = []
  for group, title in (
    ('results', None),
    ('optimizer', 'Optimizer'),
    ('speed', 'Speed and memory'),
  ):
    if any(chart['group'] == group for chart in charts):
      holder = tag('div', class_='charts', data_charts=group)
      shown.append(tag('h3', title) if title else None)
      shown.append(holder)
  help = (
    'Point at a curve for its values; drag to zoom in, double-click to zoom '
    'out. With the keyboard, focus a chart and use the arrow keys.'
  )
  reset = tag(
    'button', 'Show all steps', id='reset', class_='toggle', hidden='hidden'
  )
  return section(
    'Learning curves',
    tag('p', help, ' ', reset, class_='muted'),
    tag('noscript', tag('p', 'The curves need JavaScript.')),
    tag('div', id='shared') if shared else None,
    *shown,
  )


def evaluations(run: Workdir) -> Html | None:
  """Return a table per evaluator: last and best value, and its interval."""
  found = series.curves(run.records)
  splits: dict[str, list[str]] = {}
  for name in found:
    split, _, stem = name.rpartition('/')
    if '/class_accuracy/' in name:
      split, stem = name.split('/class_accuracy/')[0], None
    if split and split not in ('train', 'seconds'):
      stems = splits.setdefault(split, [])
      if stem and not re.search(r'_(low|high|std)$', stem):
        stems.append(stem)
  parts = []
  for split, stems in splits.items():
    rows: list[list[str]] = []
    details: list[list[str]] = []
    for stem in stems:
      name = f'{split}/{stem}'
      row = [stem, *_value_cells(name, found)]
      (details if series.DETAIL.fullmatch(name) else rows).append(row)
    head = ['', 'last', 'interval', 'best', 'at step']
    # Columns without a value are left out.
    used = [i for i in range(5) if i < 2 or any(row[i] for row in rows)]

    def shown(rows, head=head, used=used):
      cells = [[row[i] for i in used] for row in rows]
      return table([head[i] for i in used], cells, numbers=(1, 2, 3, 4))

    parts.append(tag('h3', split))
    parts.append(shown(rows))
    if details:
      parts.append(fold('Single draws', shown(details)))
    parts.append(_classes(split, found))
  return section('Evaluation', *parts)


def _value_cells(name, found):
  """Return last value, interval, best value and its step of a metric."""
  curve = found[name]
  step = max(curve)

  def bound(end):
    return found.get(f'{name}_{end}', {}).get(step)

  interval = ''
  if bound('low') is not None and bound('high') is not None:
    interval = f'[{texts.number(bound("low"))}, {texts.number(bound("high"))}]'
  elif bound('std') is not None:
    interval = f'± {texts.number(bound("std"))} (std)'
  cells = [texts.number(curve[step]), interval]
  finite = {k: v for k, v in curve.items() if math.isfinite(v)}
  if len(set(finite.values())) < 2:
    return [*cells, '', '']
  better = min if _SMALLER_IS_BETTER.fullmatch(name) else max
  best = better(finite, key=finite.get)
  return [*cells, texts.number(finite[best]), f'{best:,}']


def _classes(split, found):
  """Return the accuracy of each class, lowest first, folded."""
  prefix = f'{split}/class_accuracy/'
  values = {
    name.removeprefix(prefix): curve[max(curve)]
    for name, curve in found.items()
    if name.startswith(prefix)
  }
  if not values:
    return None
  rows = [
    [name, f'{100 * value:.1f}%']
    for name, value in sorted(values.items(), key=lambda x: x[1])
  ]
  inner = table(['class', 'accuracy'], rows, numbers=(1,), sortable=True)
  return fold(f'Accuracy of {len(rows)} classes', inner)

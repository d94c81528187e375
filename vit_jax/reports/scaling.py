"""Accuracy against scale, as the paper draws it: figures 3, 4, 5 and 8."""

import dataclasses
import json

import jax

from vit_jax import terminal
from vit_jax.reports import pictures
from vit_jax.reports.table import markdown

_MARKERS = 'os^Dv*'
# Where names of points are, in points, line by line: neighbours' do not meet.
_NAMES_AT = ((5, 3, 'left'), (5, -9, 'left'), (-5, 3, 'right'))


@dataclasses.dataclass
class Scaling:
  """A picture of points (x, mean of y, bar of one std), and their table.

  Args:
    panels: dicts of title, xlabel, ylabel and lines, {label: points}; each
      point is a dict of x, a number or what `Results.find` takes; y, what it
      takes; and if wished name, which is written beside the point. Further
      keys: `log_x` (True by default); `joined`, whether a line joins the points
      (True by default; False is the style of figure 5); `ticks`, {x: text};
      `relative_to`, what `Results.find` takes, by whose mean x is divided.
    title: of the table.
    name: of the files, NAME.png, NAME.md and NAME.json, in the workdir.
  """

  panels: tuple
  title: str = 'Accuracy against scale'
  name: str = 'scaling'

  def check(self, results):
    """Raises ValueError for a point that no run can fill."""
    for panel in self.panels:
      if 'relative_to' in panel:
        results.check(panel['relative_to'])
      for points in panel['lines'].values():
        for point in points:
          results.check(point['y'])
          if isinstance(point['x'], dict):
            results.check(point['x'])

  def __call__(self, results):
    """Draws what is measured; [{'panel', 'line', 'name', 'x', 'y'...}]."""
    rows = [
      _row(panel, label, point, results)
      for panel in self.panels
      for label, points in panel['lines'].items()
      for point in points
    ]
    rows = [row for row in rows if row]
    self._show(rows)
    made, all_axes = pictures.figure(len(self.panels))
    for panel, axes in zip(self.panels, all_axes):
      _draw(panel, axes, [r for r in rows if r['panel'] == panel['title']])
    path = results.workdir / f'{self.name}.png'
    pictures.save(made, path)
    pictures.tell(self.title, path)
    if jax.process_index() == 0:
      text = markdown(self.title, *self._table(rows))
      (results.workdir / f'{self.name}.md').write_text(text)
      text = json.dumps(rows, indent=2) + '\n'
      (results.workdir / f'{self.name}.json').write_text(text)
    return rows

  def _table(self, rows):
    columns = ['', 'model', 'x', 'accuracy (%)', 'runs']
    return columns, [
      [r['panel'], r['name'], f'{r["x"]:.6g}', r['text'], str(len(r['values']))]
      for r in rows
    ]

  def _show(self, rows):
    columns, lines = self._table(rows)
    terminal.console().print(terminal.table(self.title, columns, lines))


def _row(panel, label, point, results):
  """A point as data, or None where it is not measured yet."""
  x, y = point['x'], results.find(point['y'])
  if isinstance(x, dict):
    x = _mean(x, results)
  unit = 1.0
  if 'relative_to' in panel:
    unit = _mean(panel['relative_to'], results)
  if None in (x, y, unit):
    return None
  return {
    'panel': panel['title'],
    'line': label,
    'name': point.get('name', label),
    'x': x / unit,
    'text': y.percent(),
    **dataclasses.asdict(y),
  }


def _mean(spec, results):
  found = results.find(spec)
  return found and found.mean


def _draw(panel, axes, rows):
  joined = panel.get('joined', True)
  for i, label in enumerate(panel['lines']):
    of_line = sorted((r for r in rows if r['line'] == label), key=_x)
    axes.errorbar(
      [r['x'] for r in of_line],
      [100 * r['mean'] for r in of_line],
      yerr=[100 * r['std'] for r in of_line],
      label=label,
      marker=_MARKERS[i % len(_MARKERS)],
      linestyle='-' if joined else 'none',
      linewidth=1.8,
      capsize=3,
    )
    for r in of_line:
      if r['name'] != label:
        *offset, side = _NAMES_AT[i % len(_NAMES_AT)]
        axes.annotate(
          r['name'],
          (r['x'], 100 * r['mean']),
          xytext=offset,
          textcoords='offset points',
          horizontalalignment=side,
          fontsize=7,
        )
  if panel.get('log_x', True):
    from matplotlib import ticker

    axes.set_xscale('log')
    # By default all minor ticks of a short axis have labels, which meet.
    low, high = axes.get_xlim()
    subs = (1, 2, 5) if high < 20 * low else (1,)
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=subs))
    axes.xaxis.set_major_formatter(
      ticker.LogFormatterSciNotation(minor_thresholds=(99, 99))
    )
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
  if ticks := panel.get('ticks'):
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
  axes.set(title=panel['title'], xlabel=panel['xlabel'], ylabel=panel['ylabel'])
  axes.legend(frameon=False, fontsize=8)


def _x(row):
  return row['x']

"""Accuracy against scale, as in the paper's figures 3, 4, 5 and 8."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.io import terminal
from vit_jax.reports import pictures, table
from vit_jax.reports.results import Results, half_width

_MARKERS = 'os^Dv*'
# Offset and alignment of the names of points per line, against overlaps.
_NAMES_AT = ((5, 3, 'left'), (5, -9, 'left'), (-5, 3, 'right'))


@dataclasses.dataclass
class Scaling:
  """A figure of points (x, mean of y, error bar), and their table.

  Args:
    panels: dicts of title, xlabel, ylabel and lines, {label: points}. A point
      is a dict of x (a number or what `Results.find` takes), y (what
      `Results.find` takes), and optionally the name written next to it. More
      keys of a panel: `joined`, whether a line joins the points (default True;
      False is the style of figure 5); `log`, whether x is logarithmic (default
      True); `ticks`, {x: text}; `relative_to`, what `Results.find` takes: x is
      divided by it; `correlate`, whether the rank correlation of x and y
      (Spearman's) is shown, of each line and of all.
    title, name: title of the table; base name of the .png, .md and .json files.
    intervals: whether bars are 95% intervals of the mean, else one std.
  """

  panels: tuple[Mapping[str, Any], ...]
  title: str = 'Accuracy against scale'
  name: str = 'scaling'
  intervals: bool = False

  def check(self, results: Results) -> None:
    """Raise ValueError for a point that no run can fill."""
    for panel in self.panels:
      for point in itertools.chain(*panel['lines'].values()):
        for spec in _specs(panel, point):
          results.check(spec)

  def __call__(self, results: Results) -> list[dict[str, Any]]:
    """Draw what is measured. Return [{'panel', 'line', 'name', 'x', ...}]."""
    rows = []
    figure, all_axes = pictures.figure(len(self.panels))
    for panel, axes in zip(self.panels, all_axes):
      found = [
        row
        for label, points in panel['lines'].items()
        for point in points
        if (row := self._row(panel, label, point, results))
      ]
      _draw(panel, axes, found)
      rows += found
    path = results.workdir / f'{self.name}.png'
    pictures.save(figure, path)
    labels = {panel['xlabel'] for panel in self.panels}
    x = labels.pop() if len(labels) == 1 else 'x'
    columns = ['', 'model', x, 'accuracy (%)', 'runs']
    lines = [
      [r['panel'], r['name'], f'{r["x"]:.6g}', r['text'], str(len(r['values']))]
      for r in rows
    ]
    table.publish(results.workdir, self.name, self.title, columns, lines, rows)
    terminal.say(f'{self.title}: {path}')
    return rows

  def _row(self, panel, label, point, results):
    """Return a point as a dict, or None if it is not measured yet."""
    x, y, unit = map(results.find, _specs(panel, point))
    if None in (x, y, unit):
      return None
    bar = half_width(y.values) if self.intervals else y.std
    return {
      'panel': panel['title'],
      'line': label,
      'name': point.get('name', label),
      'x': x.mean / unit.mean,
      'bar': bar,
      'text': dataclasses.replace(y, std=bar).text(),
      **dataclasses.asdict(y),
    }


def _specs(panel, point):
  """Return the specs of x, y and the unit of x."""
  x = point['x'] if isinstance(point['x'], dict) else {'value': point['x']}
  return x, point['y'], panel.get('relative_to', {'value': 1.0})


def _correlation(panel, rows):
  """Return the rank correlation of x and y as a text; '' without."""
  x, y = ([row[k] for row in rows] for k in ('x', 'mean'))
  has_ranks = len(rows) > 2 and min(len({*x}), len({*y})) > 1
  if not panel.get('correlate') or not has_ranks:
    return ''
  import scipy.stats  # takes half a second

  return f' (ρ = {scipy.stats.spearmanr(x, y).statistic:.2f})'


def _draw(panel, axes, rows):
  from matplotlib import ticker

  style = {'linestyle': '-' if panel.get('joined', True) else 'none'}
  style |= {'linewidth': 1.8, 'capsize': 3}
  for i, label in enumerate(panel['lines']):
    points = [r for r in rows if r['line'] == label]
    points.sort(key=lambda r: r['x'])
    shown = label + _correlation(panel, points)
    x, y, bar = (np.array([r[k] for r in points]) for k in ('x', 'mean', 'bar'))
    style['marker'] = _MARKERS[i % len(_MARKERS)]
    axes.errorbar(x, 100 * y, yerr=100 * bar, label=shown, **style)
    for r in points:
      if r['name'] != label:
        *offset, side = _NAMES_AT[i % len(_NAMES_AT)]
        where = {'xytext': offset, 'textcoords': 'offset points', 'ha': side}
        axes.annotate(r['name'], (r['x'], 100 * r['mean']), fontsize=7, **where)
  if panel.get('log', True):
    axes.set_xscale('log')
    # By default, all minor ticks of a short axis have labels, which overlap.
    low, high = axes.get_xlim()
    subs = (1, 2, 5) if high < 20 * low else (1,)
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=subs))
    form = ticker.LogFormatterSciNotation(minor_thresholds=(99, 99))
    axes.xaxis.set_major_formatter(form)
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
  if ticks := panel.get('ticks'):
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
  title = panel['title'] + _correlation(panel, rows)
  axes.set(title=title, xlabel=panel['xlabel'], ylabel=panel['ylabel'])
  beside = {'loc': 'center left', 'bbox_to_anchor': (1, 0.5)}
  many = len(panel['lines']) > 4  # names that would hide points
  axes.legend(frameon=False, fontsize=8, **(beside if many else {}))

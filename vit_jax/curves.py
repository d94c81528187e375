"""Learning curves of several runs as one picture."""

import io
import re

import numpy as np


def plot(records, path, *, panels):
  """Writes a PNG with a panel per metric.

  Args:
    records: {run: list of records, each with 'step'}.
    path: epath of the PNG.
    panels: dicts of title, ylabel, and lines: {label: (runs, metric)}, both
      regular expressions. Several runs of one line are drawn as their mean
      and a band of one standard deviation. `log` for a logarithmic y axis.
  """
  # The object interface: pyplot would look for a display.
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  figure = Figure(figsize=(5.2 * len(panels), 3.8), layout='constrained')
  FigureCanvasAgg(figure)
  all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
  for panel, axes in zip(panels, all_axes):
    for label, (runs, metric) in panel['lines'].items():
      found = [
        curve(of_run, metric)
        for name, of_run in records.items()
        if re.fullmatch(runs, name)
      ]
      steps, mean, std = band([c for c in found if c])
      (line,) = axes.plot(steps, mean, label=label, linewidth=1.8)
      if len(found) > 1:
        axes.fill_between(
          steps, mean - std, mean + std, alpha=0.2, color=line.get_color()
        )
    axes.set(title=panel['title'], xlabel='step', ylabel=panel['ylabel'])
    if panel.get('log'):
      axes.set_yscale('log')
    axes.grid(alpha=0.3)
    axes.spines[['top', 'right']].set_visible(False)
    axes.legend(frameon=False)
  png = io.BytesIO()
  figure.savefig(png, dpi=130, format='png')
  path.write_bytes(png.getvalue())


def curve(records, metric):
  """{step: value} of the records that have the metric (regular expression)."""
  return {
    record['step']: value
    for record in records
    for name, value in record.items()
    if re.fullmatch(metric, name)
  }


def band(found):
  """Steps that all curves share, and the mean and std there."""
  steps = sorted(set.intersection(*(set(c) for c in found))) if found else []
  values = np.array([[c[step] for step in steps] for c in found])
  if not found:
    return np.array([]), np.array([]), np.array([])
  return np.array(steps), values.mean(axis=0), values.std(axis=0)

"""Learning curves of several runs in one figure."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.io import terminal
from vit_jax.reports import pictures
from vit_jax.reports.results import Results


@dataclasses.dataclass
class Curves:
  """A figure NAME.png with one panel per metric, over training steps.

  Panels are dicts of title, ylabel and lines: {label: (runs, metric)}, both
  regular expressions. Several runs of a line are drawn as their mean and a band
  of one standard deviation. `levels`, like lines, are the means of last values,
  as dashed lines. With % in the ylabel, values are drawn in percent.
  """

  panels: tuple[Mapping[str, Any], ...]
  name: str = 'curves'

  def check(self, results: Results) -> None:
    """Raise ValueError for a line that matches no run."""
    for panel in self.panels:
      for runs, metric in (panel['lines'] | panel.get('levels', {})).values():
        results.check({'runs': runs, 'metric': metric})

  def __call__(self, results: Results) -> None:
    """Write NAME.png and print its path."""
    figure, all_axes = pictures.figure(len(self.panels))
    for panel, axes in zip(self.panels, all_axes):
      scale = 100 if '%' in panel['ylabel'] else 1
      for label, (runs, metric) in panel['lines'].items():
        names = results.matching(runs)
        found = [curve(results.records[name], metric) for name in names]
        steps, *shown = band([c for c in found if c])
        mean, std = (scale * x for x in shown)
        (line,) = axes.plot(steps, mean, label=label, linewidth=1.8)
        style = {'alpha': 0.2, 'color': line.get_color()}
        axes.fill_between(steps, mean - std, mean + std, **style)
      for label, (runs, metric) in panel.get('levels', {}).items():
        if value := results.find({'runs': runs, 'metric': metric}):
          style = {'label': label, 'color': 'grey', 'linestyle': '--'}
          axes.axhline(scale * value.mean, **style)
      axes.set(title=panel['title'], xlabel='step', ylabel=panel['ylabel'])
      axes.xaxis.get_major_locator().set_params(integer=True)
      low = axes.get_ylim()[0]  # the axis starts at a tick, which says where
      below = [tick for tick in axes.get_yticks() if tick <= low]
      axes.set_ylim(max(below, default=low))
      axes.legend(frameon=False)
    path = results.workdir / f'{self.name}.png'
    pictures.save(figure, path)
    terminal.say(f'Learning curves: {path}')


def curve(
  records: Sequence[Mapping[str, Any]], metric: str
) -> dict[int, float]:
  """Return {step: value} of the records with the metric, a regex."""
  return {
    record['step']: value
    for record in records
    for name, value in record.items()
    if re.fullmatch(metric, name)
  }


def band(
  found: Sequence[Mapping[int, float]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Return the steps that all curves share, and the mean and std there."""
  steps = sorted(set.intersection(*map(set, found))) if found else []
  values = np.array([[c[step] for step in steps] for c in found or [{}]])
  return np.array(steps), values.mean(axis=0), values.std(axis=0)

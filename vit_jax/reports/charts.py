"""Learning curves of a page: what is drawn, and few enough points of it."""

import collections
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.reports.curves import band
from vit_jax.types import Kind, Kinds, kind_of

_GROUPS = 'Results', 'Optimizer', 'Layers', 'Speed and memory'  # come first
_POINTS = 40_000  # of a chart, at most
POINTS = 1000  # of a line, at most; more than its pixels
WORDS = {  # for metrics whose names are not words
  'data_wait': 'waiting for data',
  'ece': 'calibration error',
  'grad_norm': 'gradient norm',
  'images_per_s': 'images per second',
  'lr': 'learning rate',
  'memory_gb': 'memory (GB)',
  'mfu': 'MFU',
}
_LAYER = r'((?:block|unit)_?\d+)/'  # folder of a parameter

Records = Sequence[Mapping[str, Any]]


def of_run(records: Records, kinds: Kinds) -> list[dict[str, Any]]:
  """Return the charts of a run: a line per split, such as train and val."""
  found: dict[str, dict[str, Any]] = collections.defaultdict(dict)
  known: dict[str, Kind] = {}
  for name, kind, curve in _drawn(records, kinds):
    split, _, stem = name.rpartition('/')
    if kind.group == 'Layers':  # a line for each layer
      path = name.removeprefix('train/probes/')
      layers = re.findall(_LAYER, path)
      split, stem = '/'.join(layers), re.sub(_LAYER, '', path)
      if not layers:  # one chart of what occurs once
        stem, split = path.partition('/')[::2]
    found[stem][split or stem] = [curve]
    known.setdefault(stem, kind)
  return _charts(found, known)


def of_study(
  runs: Iterable[tuple[str, str, Records, Kinds]],
) -> list[dict[str, Any]]:
  """Return the charts of results of (run, sort, records, kinds), one per sort.

  Sorts are runs that can be compared, such as those with the same evaluators.
  A line is the mean over the runs of one name.
  """
  sorts: dict[str, Any] = {}
  known: dict[str, Kind] = {}
  for run, sort, records, kinds in runs:
    for metric, kind, curve in _drawn(records, kinds):
      known[metric] = kind
      if kind.group == 'Results':
        lines = sorts.setdefault(sort, {}).setdefault(metric, {})
        lines.setdefault(run, []).append(curve)
  made = []
  for metrics in sorts.values():
    names = [x.partition('_')[0] for lines in metrics.values() for x in lines]
    group = ', '.join([*dict.fromkeys(names)][:5])
    made += [chart | {'group': group} for chart in _charts(metrics, known)]
  return made


def _drawn(records, kinds):
  """Yield (metric, kind, {step: value}); the last value of a step counts."""
  found = collections.defaultdict(dict)
  for record in records:
    for name, value in record.items():
      if isinstance(value, int | float) and math.isfinite(value):
        found[name][record['step']] = float(f'{value:.6g}')
  found.pop('step', None)
  for name, values in found.items():
    kind = kind_of(name, kinds)
    if len(values) > 1 and kind.group and not kind.detail:
      yield name, kind, values


def _charts(lines_of, kinds):
  """Return [{'title', 'group', 'log', 'lines'}] of {title: {line: curves}}.

  A line is (steps, values), with the stds of several curves, too.
  """
  made: list[Any] = []
  for title, lines in lines_of.items():
    kind = kinds[title]
    limit = min(POINTS, max(40, _POINTS // len(lines)))
    drawn = {}
    scale = 100 if kind.unit == '%' else 1
    for name, curves in lines.items():
      steps, mean, std = band(curves)
      shown = steps, scale * mean, scale * std
      shown = shown if len(curves) > 1 else shown[:2]
      places = thinned(mean, limit)
      drawn[name] = tuple(x[places].tolist() for x in shown)
    values = [y for _, found, *_ in drawn.values() for y in found]
    is_log = bool(values) and 0 < 1000 * min(values) < max(values)
    title = WORDS.get(title, title) + ' (%)' * (kind.unit == '%')
    chart = {'title': title, 'group': kind.group, 'log': is_log}
    made.append(chart | {'lines': drawn})
  order = [*_GROUPS, *(chart['group'] for chart in made)]
  return sorted(made, key=lambda chart: order.index(chart['group']))


def thinned(values: np.ndarray, limit: int) -> np.ndarray:
  """Return about `limit` places, of the least and largest of an interval."""
  places = np.arange(len(values))
  if len(values) <= limit:
    return places
  parts = np.array_split(places, limit // 2)
  kept = [part[np.argsort(values[part])[[0, -1]]] for part in parts]
  return np.unique([0, *np.ravel(kept), len(values) - 1])

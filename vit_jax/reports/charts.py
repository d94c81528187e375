"""Learning curves of a page: what is drawn, and few enough points of it."""

import collections
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.reports.curves import band

# Not drawn: accounts, constants, and details that tables show.
_NOT_DRAWN = re.compile(
  'step|seconds/.*|data_wait/.*|progress|eta_s|exaflops'
  r'|.*/(num_examples|num_unlabelled|skipped)'
  r'|.*/class_accuracy/.*|.*_(low|high|std)|.*_seed\d+'
)
# The order of charts, {metric: group}; '' are all others.
_GROUPS = {
  **dict.fromkeys(('loss', 'accuracy', 'top5_accuracy', ''), 'Results'),
  **dict.fromkeys(('lr', 'grad_norm'), 'Optimizer'),
  **dict.fromkeys(
    ('images_per_s', 'mfu', 'data_wait', 'memory_gb'), 'Speed and memory'
  ),
}
_POINTS = 40_000  # of a chart, at most
POINTS = 1000  # of a line, at most; more than its pixels

Records = Sequence[Mapping[str, Any]]
Curve = Mapping[int, float]


def of_run(records: Records) -> list[dict[str, Any]]:
  """Return the charts of a run: a line per split, such as train and val."""
  found: dict[str, dict[str, list[Curve]]] = collections.defaultdict(dict)
  for name, curve in _drawn(records):
    split, _, stem = name.rpartition('/')
    found[stem][split or stem] = [curve]
  return _charts(found)


def of_study(runs: Iterable[tuple[str, str, Records]]) -> list[dict[str, Any]]:
  """Return the charts of results of (run, kind, records), one per kind.

  Kinds are runs that can be compared, such as those with the same evaluators.
  A line is the mean over runs whose names differ in `_seed0` only.
  """
  kinds: dict[str, Any] = {}
  for run, kind, records in runs:
    for metric, curve in _drawn(records):
      if _GROUPS.get(metric.rpartition('/')[2], 'Results') == 'Results':
        lines = kinds.setdefault(kind, {}).setdefault(metric, {})
        lines.setdefault(re.sub(r'_seed\d+$', '', run), []).append(curve)
  made = []
  for metrics in kinds.values():
    names = [x.partition('_')[0] for lines in metrics.values() for x in lines]
    group = ', '.join([*dict.fromkeys(names)][:5])
    made += [chart | {'group': group} for chart in _charts(metrics)]
  return made


def _drawn(records):
  """Return (metric, {step: value}); of several records of a step the last."""
  found = collections.defaultdict(dict)
  for record in records:
    for name, value in record.items():
      if isinstance(value, int | float) and math.isfinite(value):
        found[name][record['step']] = float(f'{value:.6g}')
  return [
    (name, curve)
    for name, curve in found.items()
    if len(curve) > 1 and not _NOT_DRAWN.fullmatch(name)
  ]


def _charts(lines_of):
  """Return [{'title', 'group', 'log', 'lines'}] of {title: {line: curves}}.

  A line is (steps, values), with the stds of several curves, too.
  """
  made: dict[str, list[Any]] = {stem: [] for stem in _GROUPS}
  for title, lines in lines_of.items():
    stem = title.rpartition('/')[2]
    is_fraction = re.search(r'accuracy$|\dshot$', stem)
    limit = min(POINTS, max(40, _POINTS // len(lines)))
    drawn = {}
    for name, curves in lines.items():
      arrays = band(curves)
      if is_fraction:
        arrays = arrays[0], *(100 * x for x in arrays[1:])
      steps, *rows = (x.tolist() for x in arrays)
      mean, std = (dict(zip(steps, row)) for row in rows)
      steps, values = thinned(mean, limit)
      stds = [[std[step] for step in steps]] if len(curves) > 1 else []
      drawn[name] = (steps, values, *stds)
    values = [y for _, found, *_ in drawn.values() for y in found]
    is_log = bool(values) and 0 < 1000 * min(values) < max(values)
    title += ' (%)' if is_fraction else ''
    stem = stem if stem in _GROUPS else ''
    chart = {'title': title, 'group': _GROUPS[stem], 'log': is_log}
    made[stem].append(chart | {'lines': drawn})
  return [chart for charts in made.values() for chart in charts]


def thinned(curve: Curve, limit: int) -> tuple[list[int], list[float]]:
  """Return (steps, values) of about `limit` points.

  Each of equal intervals keeps its smallest and its largest value, so that no
  spike is lost.
  """
  steps = sorted(curve)
  if len(steps) > limit:
    kept = {steps[0], steps[-1]}
    for part in np.array_split(steps, limit // 2):
      of_part = part.tolist()
      kept |= {pick(of_part, key=curve.__getitem__) for pick in (min, max)}
    steps = sorted(kept)
  return steps, [curve[step] for step in steps]

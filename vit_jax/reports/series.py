"""Curves of metrics for a page: which there are, and few enough points."""

import collections
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

# Not drawn: accounts, constants, and details that tables show.
_NOT_DRAWN = re.compile(
  '(seconds|data_wait)/.*|progress|eta_s|exaflops'
  r'|.*/(num_examples|num_unlabelled|skipped)'
  r'|.*/class_accuracy/.*|.*_(low|high|std)|.*_seed\d+'
)
# Details that only tables show.
DETAIL = re.compile(r'.*/class_accuracy/.*|.*_seed\d+')
# Charts in the order of this list, and the group that each belongs to.
_GROUPS = {
  'speed': (
    *('images_per_s', 'images_per_s_per_device', 'mfu', 'goodput'),
    *('data_wait', 'memory_gb', 'data_skipped'),
  ),
  'optimizer': ('lr', 'grad_norm'),
}
_FIRST = ('loss', 'accuracy', 'top5_accuracy')
POINTS = 1000  # of a series; more than the pixels of a chart


def curves(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
  """Return {metric: {step: value}} of the metrics that are drawn.

  Of several records of a step the last counts. Values are floats.
  """
  found: dict[str, dict[int, float]] = collections.defaultdict(dict)
  for record in records:
    for name, value in record.items():
      if name in ('step', 'time') or not isinstance(value, int | float):
        continue
      found[name][record['step']] = float(value)
  return found


def is_drawn(name: str, curve: Mapping[int, float]) -> bool:
  """Return whether a metric is worth a curve."""
  return len(curve) > 1 and not _NOT_DRAWN.fullmatch(name)


def of_run(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Return the charts of a run: a series per split, such as train and val."""
  found = curves(records)
  if found['images_per_s'] == found['images_per_s_per_device']:
    found.pop('images_per_s_per_device')
  charts = collections.defaultdict(list)
  for name, curve in found.items():
    if is_drawn(name, curve):
      split, _, stem = name.rpartition('/')
      bounds = [found.get(f'{name}_{end}') for end in ('low', 'high')]
      charts[stem].append(series(split or stem, curve, bounds))
  return _sorted(charts)


def of_study(
  records: Mapping[str, Sequence[Mapping[str, Any]]],
) -> list[dict[str, Any]]:
  """Return the charts of a study, one per metric: a series per run.

  Args:
    records: {name of the run: its records}.
  """
  charts = collections.defaultdict(list)
  points = max(40, 20_000 // max(1, len(records)))
  for run, of_one in records.items():
    for name, curve in curves(of_one).items():
      if is_drawn(name, curve) and name != 'images_per_s_per_device':
        charts[name].append(series(run, curve, points=min(POINTS, points)))
  return _sorted(charts)


def _sorted(charts):
  made = []
  for title, found in charts.items():
    stem = title.rpartition('/')[2]
    group = next((k for k, v in _GROUPS.items() if stem in v), 'results')
    order = (*_FIRST, *_GROUPS.get(group, ()))
    rank = order.index(stem) if stem in order else len(order)
    chart = {'title': title, 'group': group, 'series': found}
    values = [y for s in found for y in s['y'] if y is not None]
    if values and min(values) > 0 and group == 'results':
      chart['log'] = max(values) / min(values) > 1000
    made.append((rank, chart))
  return [chart for _, chart in sorted(made, key=lambda x: x[0])]


def series(
  name: str,
  curve: Mapping[int, float],
  bounds: Sequence[Mapping[int, float] | None] = (None, None),
  *,
  points: int = POINTS,
) -> dict[str, Any]:
  """Return {'name', 'x', 'y'} (and 'low', 'high') of {step: value}, as JSON.

  Values that are not finite become None. See `thin` for `points`.
  """
  steps = sorted(curve)
  kept = thin([curve[step] for step in steps], points)
  steps = [steps[i] for i in kept]
  made = {'name': name, 'x': steps, 'y': [_json(curve[x]) for x in steps]}
  low, high = bounds
  if low and high:
    made['low'] = [_json(low.get(step)) for step in steps]
    made['high'] = [_json(high.get(step)) for step in steps]
  return made


def thin(values: Sequence[float], points: int) -> list[int]:
  """Return the indices of at most `points` values that keep the shape.

  Each of equal intervals keeps its smallest and its largest value, so that no
  spike is lost; a value that is not finite is kept in their place. The first
  and the last value stay.
  """
  count = len(values)
  if count <= points:
    return list(range(count))
  kept, intervals = {0, count - 1}, max(1, (points - 2) // 2)
  for i in range(intervals):
    inside = range(i * count // intervals, (i + 1) * count // intervals)
    kept.add(min(inside, key=lambda j: (math.isfinite(values[j]), values[j])))
    kept.add(max(inside, key=lambda j: (math.isfinite(values[j]), values[j])))
  return sorted(kept)


def _json(value):
  """Six significant digits are more than a chart shows."""
  if value is None or not math.isfinite(value):
    return None
  return float(f'{value:.6g}')

"""Learning curves of a page: what is drawn, and few enough points of it."""

import collections
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Not drawn: accounts, constants, and details that tables show.
_NOT_DRAWN = re.compile(
  'seconds/.*|data_wait/.*|progress|eta_s|exaflops|images_per_s_per_device'
  r'|.*/(num_examples|num_unlabelled|skipped)'
  r'|.*/class_accuracy/.*|.*_(low|high|std)|.*_seed\d+'
)
# Groups of charts, and metrics in their order; all others are results.
_GROUPS = {
  'Results': ('loss', 'accuracy', 'top5_accuracy'),
  'Optimizer': ('lr', 'grad_norm'),
  'Speed and memory': ('images_per_s', 'mfu', 'data_wait', 'memory_gb'),
}
STEPS, _VALUES = 1000, 40_000  # of a chart, at most; more than its pixels

Records = Sequence[Mapping[str, Any]]


def curves(records: Records) -> dict[str, dict[int, float]]:
  """Return {metric: {step: value}}; of several records of a step the last."""
  found: dict[str, dict[int, float]] = collections.defaultdict(dict)
  for record in records:
    for name, value in record.items():
      if name not in ('step', 'time') and isinstance(value, int | float):
        found[name][record['step']] = float(value)
  return found


def of_run(records: Records) -> list[dict[str, Any]]:
  """Return the charts of a run: a line per split, such as train and val."""
  found: dict[str, dict[str, Any]] = collections.defaultdict(dict)
  for name, curve in _drawn(records):
    split, _, stem = name.rpartition('/')
    found[stem][split or stem] = curve
  return _charts(found)


def of_study(records: Mapping[str, Records]) -> list[dict[str, Any]]:
  """Return the charts of {run: records}, one per metric: a line per run."""
  found: dict[str, dict[str, Any]] = collections.defaultdict(dict)
  for run, of_one in records.items():
    for name, curve in _drawn(of_one):
      found[name][run] = curve
  return _charts(found)


def _drawn(records):
  for name, curve in curves(records).items():
    if len(curve) > 1 and not _NOT_DRAWN.fullmatch(name):
      yield name, curve


def _charts(lines_of):
  """Return [{'title', 'group', 'log', 'x', 'lines'}] of {title: lines}."""
  made = []
  for title, lines in lines_of.items():
    stem = title.rpartition('/')[2]
    group = next((k for k, v in _GROUPS.items() if stem in v), 'Results')
    known = _GROUPS[group]
    rank = known.index(stem) if stem in known else len(known)
    x = steps(list(lines.values()))
    drawn = {k: [_json(y.get(step)) for step in x] for k, y in lines.items()}
    values = [v for y in drawn.values() for v in y if v is not None]
    is_log = bool(values) and 0 < 1000 * min(values) < max(values)
    chart = {'title': title, 'group': group, 'log': is_log, 'x': x}
    made.append((list(_GROUPS).index(group), rank, chart | {'lines': drawn}))
  return [chart for *_, chart in sorted(made, key=lambda x: x[:2])]


def steps(
  lines: Sequence[Mapping[int, float]], limit: int = STEPS
) -> list[int]:
  """Return the steps to draw, about `limit` at most.

  Short lines keep all of their steps. Of others, each of equal intervals keeps
  the steps with the smallest and the largest value, so that no spike is lost.
  """
  limit = min(limit, max(40, _VALUES // len(lines)))
  found = sorted(set().union(*lines))
  if len(found) <= limit:
    return found

  def finite(step):
    values = (line.get(step, math.nan) for line in lines)
    return [value for value in values if math.isfinite(value)]

  kept = {found[0], found[-1]}
  for part in np.array_split(found, limit // 2):
    interval = part.tolist()
    kept.add(min(interval, key=lambda x: min(finite(x), default=math.inf)))
    kept.add(max(interval, key=lambda x: max(finite(x), default=-math.inf)))
  short = [line for line in lines if len(line) <= limit // len(lines)]
  return sorted(kept.union(*short))


def _json(value):
  """Return six significant digits; None for a value that is not finite."""
  if value is None or not math.isfinite(value):
    return None
  return float(f'{value:.6g}')

"""Results, size and speed of a run, in a few tiles."""

import re
from collections.abc import Mapping
from typing import Any

from vit_jax.reports import series, texts
from vit_jax.reports.workdir import Workdir

# Metrics that a summary shows, best first; the rest is in tables.
_MAIN = ('accuracy', r'\d+shot', 'mean_average_precision', 'loss')


def tiles(run: Workdir) -> list[tuple[str, str, str | None]]:
  """Return [(name, value, note)]: results first, then size and speed."""
  last = run.last
  found: list[tuple[str, str, str | None]] = []
  for name in main_metrics(run.last):
    low, high = (last.get(f'{name}_{end}') for end in ('low', 'high'))
    note = None
    if low is not None:
      note = f'95%: {texts.percent(name, low)} to {texts.percent(name, high)}'
    elif f'{name}_std' in last:
      note = f'± {texts.percent(name, last[f"{name}_std"])} (std)'
    found.append((name, texts.percent(name, last[name]), note))
  if run.kind == 'evaluate':
    found.append(('Checkpoint of step', f'{run.step:,}', None))
  elif run.records:
    total = run.total_steps
    of = f'of {total:,}' if total and total != run.step else None
    found.append(('Steps', f'{run.step:,}', of))
  if run.seconds:
    note = None if run.goodput is None else f'{run.goodput:.0%} in steps'
    found.append(('Wall time', texts.duration(run.seconds), note))
  if 'images_per_s' in last:
    mfu = f'MFU {last["mfu"]:.1%}' if 'mfu' in last else None
    found.append(('Images per second', f'{last["images_per_s"]:,.0f}', mfu))
  if 'memory_gb' in last:
    found.append(('Peak memory', f'{last["memory_gb"]:.1f} GB', None))
  devices = run.environment.get('devices') or []
  if devices:
    kind = run.environment.get('device_kind')
    hosts = run.environment.get('process_count', 1)
    note = f'on {hosts} hosts' if hosts > 1 else None
    found.append(('Devices', f'{len(devices)} × {kind}', note))
  return found


def main_metrics(last: Mapping[str, Any], limit: int = 4) -> list[str]:
  """Return the metrics of a summary: the best kind of each evaluator.

  Args:
    last: {metric: last value}.
    limit: number of metrics at most.
  """
  splits: dict[str, list[str]] = {}
  for name in last:
    split, _, stem = name.rpartition('/')
    is_result = split and split not in ('train', 'seconds')
    if is_result and not series.DETAIL.match(name):
      splits.setdefault(split, []).append(stem)
  found: list[str] = []
  for split, stems in splits.items():
    for kind in _MAIN:
      if chosen := [x for x in stems if re.fullmatch(kind, x)]:
        found += [f'{split}/{x}' for x in chosen]
        break
  if not found and 'train/loss' in last:
    found = ['train/loss']
  return found[:limit]

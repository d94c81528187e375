"""Metrics of the runs of a study, and the numbers that reports show."""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from vit_jax.runs import workdirs
from vit_jax.runs.records import read_kinds, read_records
from vit_jax.types import UserError, kind_of


@dataclasses.dataclass(frozen=True)
class Value:
  """A number of a report: mean and population standard deviation."""

  mean: float
  std: float
  values: tuple[float, ...]

  def text(self, scale: int = 100, digits: int = 1, sign: str = '') -> str:
    """Return '93.1 ± 0.4' or '93.1'; four digits with a scale of 1."""
    form = f'.{digits}f' if scale == 100 else '.4g'
    text = f'{scale * self.mean:{sign}{form}}'
    if len(self.values) > 1 or self.std:
      text += f' ± {scale * self.std:{form}}'
    return text


def half_width(sample: Sequence[float]) -> float:
  """Return half of Student's 95% interval of the mean; 0 without one."""
  import scipy.special  # takes a quarter of a second

  if len(sample) < 2:
    return 0.0
  error = np.std(sample, ddof=1) / len(sample) ** 0.5
  return float(scipy.special.stdtrit(len(sample) - 1, 0.975) * error)


def wilson(share: float, count: float) -> tuple[float, float]:
  """Return (low, high), the Wilson score 95% interval of a share of counts."""
  more = 1.959964**2 / count
  middle = share + more / 2
  half = math.sqrt(more * (share * (1 - share) + more / 4))
  return (middle - half) / (1 + more), (middle + half) / (1 + more)


class Results:
  """Records of all runs of a study; only runs in `done` have some."""

  def __init__(
    self, names: Iterable[str], workdir: epath.Path, done: Collection[str]
  ) -> None:
    self.names, self.workdir = list(names), workdir
    self.records: Mapping[str, list[dict[str, Any]]] = {
      name: read_records(workdir / name) if name in done else []
      for name in self.names
    }
    self._kinds = {name: read_kinds(workdir / name) for name in self.names}

  def matching(self, pattern: str) -> list[str]:
    """Return the names of the runs that the regex matches in full."""
    return [name for name in self.names if re.fullmatch(pattern, name)]

  def find(self, spec: Mapping[str, Any]) -> Value | None:
    """Return the Value that `spec` describes, or None if it is not measured.

    It is {'value': x} or {'value': (mean, std)} for a given number, such as a
    published one; or the arguments of `sample`.
    """
    if 'value' in spec:
      mean, *std = np.atleast_1d(spec['value']).tolist()
      return Value(mean, std[0] if std else 0.0, (mean,))
    if values := tuple(self.sample(**spec).values()):
      return Value(float(np.mean(values)), float(np.std(values)), values)
    return None

  def scale(self, spec: Mapping[str, Any]) -> int:
    """Return 100 for fractions, which are shown in percent; 1 for others."""
    units = {
      kind_of(metric, self._kinds[name]).unit
      for name in self.matching(spec.get('runs', ''))
      for metric in itertools.chain(*self.records[name])
      if re.fullmatch(spec['metric'], metric)
    }
    return 100 if 'value' in spec or units == {'%'} else 1

  def has_ema(self, spec: Mapping[str, Any]) -> bool:
    """Return whether a run of a spec evaluates an EMA of its parameters."""
    found = (self.workdir / name for name in self.matching(spec['runs']))
    return any(workdirs.read(x, 'config.json').get('ema') for x in found)

  def sample(
    self, *, runs: str, metric: str, best: str | None = None
  ) -> dict[Any, float]:
    """Return {seed: number}, or {(run, metric): number}.

    If a regex has a group called `seed`, the numbers of one seed are averaged,
    and a seed is left out while one of its runs is missing.

    Args:
      runs, metric: regexes that match full names.
      best: None, the last record of a run counts; or the name of a metric, the
        record with its best value counts (early stopping).
    """
    groups = collections.defaultdict(list)
    missing = []
    for name in self.matching(runs):
      records, seed = self.records[name], _seed(runs, name)
      if best:
        kind = kind_of(best, self._kinds[name])
        scores = {i: r[best] for i, r in enumerate(records) if best in r}
        records = [records[kind.best(scores)]] if scores else []
      last = {k: v for record in records for k, v in record.items()}
      found = [x for x in last if re.fullmatch(metric, x)]
      if not found:
        missing.append(seed)
      for x in found:
        groups[seed or _seed(metric, x) or (name, x)].append(last[x])
    if 'seed' in re.compile(metric).groupindex and missing:
      return {}  # Every seed lacks that run.
    return {k: float(np.mean(x)) for k, x in groups.items() if k not in missing}

  def check(self, spec: Mapping[str, Any]) -> None:
    """Raise ValueError if a spec names no run."""
    self.find(spec)
    if 'runs' in spec and not self.matching(spec['runs']):
      raise UserError(
        f'{spec["runs"]!r} matches none of the runs: {", ".join(self.names)}.'
      )


def _seed(pattern, name):
  """Return what the group `seed` of the regex matches, or None."""
  return re.fullmatch(pattern, name).groupdict().get('seed')

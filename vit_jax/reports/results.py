"""Metrics of the runs of a study, and the numbers that reports show."""

import collections
import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from vit_jax.runs.metrics import read_records
from vit_jax.types import UserError


@dataclasses.dataclass(frozen=True)
class Value:
  """A number of a report: mean and population standard deviation."""

  mean: float
  std: float
  values: tuple[float, ...]

  def percent(self, digits: int = 1) -> str:
    """Return fractions as '93.1 ± 0.4', or '93.1' for a single value."""
    text = f'{100 * self.mean:.{digits}f}'
    if len(self.values) > 1 or self.std:
      text += f' ± {100 * self.std:.{digits}f}'
    return text


def half_width(values: Sequence[float]) -> float | None:
  """Return half of the 95% interval of the mean (Student's t), or None."""
  if len(values) < 2:
    return None
  import scipy.special  # takes a quarter of a second

  quantile = scipy.special.stdtrit(len(values) - 1, 0.975)
  return float(quantile * np.std(values, ddof=1) / len(values) ** 0.5)


class Results:
  """Records of all runs of a study; only runs in `done` have some.

  Run NAME is in workdir/NAME, where workdir is an epath.
  """

  def __init__(
    self, names: Iterable[str], workdir: epath.Path, done: Collection[str]
  ) -> None:
    self.names, self.workdir = list(names), workdir
    self.records = {
      name: read_records(workdir / name) if name in done else []
      for name in names
    }

  def matching(self, pattern: str) -> list[str]:
    """Return the names of the runs that the regex matches in full."""
    return [name for name in self.names if re.fullmatch(pattern, name)]

  def find(self, spec: Mapping[str, Any]) -> Value | None:
    """Return the Value that `spec` describes, or None if it is not measured.

    Each number found is one value of the sample. If a regex has a group called
    `seed`, the numbers of one seed are averaged first, and a seed is left out
    while one of its runs is missing.

    Args:
      spec: {'value': x} or {'value': (mean, std)} for a given number, such as a
        published one. Or {'runs', 'metric'}: regexes that match full names. The
        last record of a run counts, or with {'best': METRIC} the one with the
        highest METRIC (early stopping).
    """
    if 'value' in spec:
      mean, *std = np.atleast_1d(spec['value']).tolist()
      return Value(mean, std[0] if std else 0.0, (mean,))
    values = tuple(self.sample(spec).values())
    if not values:
      return None
    return Value(float(np.mean(values)), float(np.std(values)), values)

  def sample(self, spec: Mapping[str, Any]) -> dict[Any, float]:
    """Return {seed: number} of a spec with runs, see `find`.

    Without a group `seed` the key is what identifies the number.
    """
    groups = collections.defaultdict(list)
    missing = []
    for name in self.matching(spec['runs']):
      records, seed = self.records[name], _seed(spec['runs'], name)
      if 'best' in spec:
        scored = [r for r in records if spec['best'] in r]
        records = sorted(scored, key=lambda r: -r[spec['best']])[:1]
      last = {k: v for record in records for k, v in record.items()}
      found = [x for x in last if re.fullmatch(spec['metric'], x)]
      if not found:
        missing.append(seed)
      for metric in found:
        group = seed or _seed(spec['metric'], metric) or (name, metric)
        groups[group].append(last[metric])
    if 'seed' in re.compile(spec['metric']).groupindex and missing:
      return {}  # Every seed lacks that run.
    return {k: float(np.mean(x)) for k, x in groups.items() if k not in missing}

  def check(self, spec: Mapping[str, Any]) -> None:
    """Raise ValueError for a spec that no run can fill."""
    if sorted(spec) == ['value']:
      return
    if sorted(spec) not in (['metric', 'runs'], ['best', 'metric', 'runs']):
      raise UserError(
        f'{dict(spec)} must have runs and metric (and may have best), or only '
        'a value.'
      )
    if not self.matching(spec['runs']):
      raise UserError(
        f'{spec["runs"]!r} matches none of the runs: {", ".join(self.names)}.'
      )


def _seed(pattern, name):
  """Return what the group `seed` of the regex matches, or None."""
  return re.fullmatch(pattern, name).groupdict().get('seed')

"""What the runs of a study have measured so far, and values made of it."""

import dataclasses
import re

import numpy as np

from vit_jax.metrics import read_records


@dataclasses.dataclass(frozen=True)
class Value:
  """A number of a report: mean and population standard deviation."""

  mean: float
  std: float
  values: tuple[float, ...]

  def percent(self, digits=1):
    """As '93.1 ± 0.4' of fractions; without '±' where there is one value."""
    text = f'{100 * self.mean:.{digits}f}'
    if len(self.values) > 1 or self.std:
      text += f' ± {100 * self.std:.{digits}f}'
    return text


class Results:
  """The records of all runs of a study; of those not begun there are none.

  Args:
    names: of the runs, in order.
    workdir: epath of the study; run NAME is in workdir/NAME.
    done: names of those that are.
  """

  def __init__(self, names, workdir, done):
    self.names, self.workdir = list(names), workdir
    self.records = {
      name: read_records(workdir / name) if name in done else []
      for name in names
    }

  def matching(self, pattern):
    """Names of the runs that a regular expression matches whole."""
    return [name for name in self.names if re.fullmatch(pattern, name)]

  def find(self, spec):
    """The Value that spec tells of; None where nothing is measured yet.

    Args:
      spec: {'value': x} or {'value': (mean, std)} for a number from elsewhere
        (a published one); or {'runs', 'metric'}, regular expressions that match
        whole names. The last record of a run counts; with {'best': METRIC} the
        one in which METRIC is highest (early stopping).

    Each value found is one of the sample, unless an expression has a group
    called `seed`: then all values of a seed are averaged first, and a seed of
    which a run is missing does not count.
    """
    if 'value' in spec:
      mean, *std = np.atleast_1d(spec['value']).tolist()
      return Value(mean, std[0] if std else 0.0, (mean,))
    groups, missing = {}, []
    for name in self.matching(spec['runs']):
      seed = re.fullmatch(spec['runs'], name).groupdict().get('seed')
      found = _measured(self.records[name], spec['metric'], spec.get('best'))
      if not found:
        missing.append(seed)
      for metric, value in found.items():
        of_run = seed or _seed_of(spec['metric'], metric)
        key = (name, metric) if of_run is None else of_run
        groups.setdefault(key, []).append(value)
    if 'seed' in re.compile(spec['metric']).groupindex and missing:
      return None  # each seed lacks that run
    means = [float(np.mean(x)) for k, x in groups.items() if k not in missing]
    if not means:
      return None
    return Value(float(np.mean(means)), float(np.std(means)), tuple(means))

  def check(self, spec):
    """Raises ValueError for a spec that no run can ever fill."""
    if sorted(spec) == ['value']:
      return
    if not {'runs', 'metric'} <= set(spec) <= {'runs', 'metric', 'best'}:
      raise ValueError(
        f'{dict(spec)} must have runs and metric (and may have best), or a '
        'value only.'
      )
    if not self.matching(spec['runs']):
      raise ValueError(
        f'{spec["runs"]!r} matches none of the runs: {", ".join(self.names)}.'
      )


def _measured(records, metric, best=None):
  """{name: value} of the metrics that match, as they were last."""
  if best is not None:
    scored = [r for r in records if best in r]
    records = [max(scored, key=lambda r: r[best])] if scored else []
  last = {k: v for record in records for k, v in record.items()}
  return {k: v for k, v in last.items() if re.fullmatch(metric, k)}


def _seed_of(pattern, metric):
  return re.fullmatch(pattern, metric).groupdict().get('seed')

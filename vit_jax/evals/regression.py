"""Errors of predicted numbers on a whole split."""

import dataclasses
from typing import ClassVar

import numpy as np

from vit_jax.evals.collect import COUNTS, OutputEvaluator
from vit_jax.reports import vectors
from vit_jax.types import Kind, Kinds, Params


def _absolute(true, output, axis=-1):
  return np.mean(np.abs(output - true), axis=axis)


def _root_mean_square(true, output, axis=-1):
  return np.sqrt(np.mean((output - true) ** 2, axis=axis))


def _r2(true, output, axis=-1):
  variance = np.maximum(np.var(true, axis=axis), 1e-30)  # 0 in a sample of few
  return 1 - np.mean((output - true) ** 2, axis=axis) / variance


_METRICS = {
  'mean_absolute_error': (_absolute, Kind(better='lower', main=True)),
  'rmse': (_root_mean_square, Kind(better='lower')),
  'r2': (_r2, Kind(better='higher', main=True)),
}
_KINDS = {name: kind for name, (_, kind) in _METRICS.items()}


class Regression(OutputEvaluator):
  """Mean absolute error, root mean square error and R^2, with 95% intervals.

  Errors are in the units of the labels. An interval is between percentiles of
  1,000 bootstrap samples of the examples.
  """

  metrics: ClassVar[Kinds] = {
    **_KINDS,
    **{f'{k}/': dataclasses.replace(x, detail=True) for k, x in _KINDS.items()},
    **{f'{k}_{x}': Kind(group='') for k in _KINDS for x in ('low', 'high')},
    **COUNTS,
  }

  def run(self, params: Params) -> dict[str, float]:
    """Return {metric: float}.

    METRIC_low and METRIC_high are its interval. Of several numbers, METRIC/NAME
    is of each, and r2 their mean; means of errors would mix units. Metrics of
    fewer than two different numbers are NaN.
    """
    import scipy.stats  # takes half a second

    columns = self.collect(params)
    labels = columns['label'].astype(np.float64)
    outputs = columns['outputs'].astype(np.float64)
    results: dict[str, float] = {}
    for metric, (statistic, _) in _METRICS.items():
      values = []
      for name, true, output in zip(self.names, labels.T, outputs.T):
        pair = [x[~np.isnan(true)] for x in (true, output)]
        key = f'{metric}/{name}' if len(self.names) > 1 else metric
        if len({*pair[0]}) < 2:
          results |= dict.fromkeys((key, f'{key}_low', f'{key}_high'), np.nan)
          continue
        values.append(float(statistic(*pair)))
        found = scipy.stats.bootstrap(
          pair, statistic, n_resamples=1000, batch=50, paired=True,
          method='percentile', rng=0,
        )  # fmt: skip
        low, high = map(float, found.confidence_interval)
        results |= {key: values[-1], f'{key}_low': low, f'{key}_high': high}
      if metric == 'r2':
        results[metric] = float(np.mean(values)) if values else np.nan
    self.predictions = vectors.Numbers(
      columns['index'], labels, outputs, self.names
    )
    return results | self.collect.counts(columns)

"""Ranking and thresholds of several labels of each example."""

import dataclasses
import math
from typing import ClassVar

import numpy as np

from vit_jax.data.pipeline import Data
from vit_jax.evals.classification import wilson
from vit_jax.evals.collect import COUNTS, Collector, OutputEvaluator
from vit_jax.reports import vectors
from vit_jax.types import ACCURACY, DETAIL, LOSS, RATE, Kind, Kinds, Params


@dataclasses.dataclass(eq=False, kw_only=True)
class MultiLabel(OutputEvaluator):
  """Average precision, AUC, F1 and exact match of labels of 0 and 1.

  Missing labels (NaN) do not count. Means over labels leave out those that are
  always 0 or always 1.

  Attributes:
    train: examples of the training part; the thresholds with the best F1 of
      each label there are the 'tuned' ones. None: 0.5 only.
  """

  train: Data | None = None

  metrics: ClassVar[Kinds] = {
    'mean_average_precision': ACCURACY,
    'auc': ACCURACY,
    **dict.fromkeys(('f1_macro', 'f1_micro', 'exact_match'), RATE),
    **dict.fromkeys(('tuned_f1_macro', 'tuned_f1_micro'), RATE),
    **{f'exact_match_{end}': Kind('%', group='') for end in ('low', 'high')},
    **{
      f'{name}/': dataclasses.replace(RATE, detail=True)
      for name in ('average_precision', 'auc', 'f1', 'tuned_f1')
    },
    'threshold/': DETAIL,
    'loss': LOSS,
    **COUNTS,
  }

  def __post_init__(self) -> None:
    super().__post_init__()
    self._of_training = self.train and Collector(
      self.measure, data=self.train, mesh=self.mesh, what='train'
    )

  def run(self, params: Params) -> dict[str, float]:
    """Return {metric: float}.

    average_precision, auc, f1 (at 0.5), tuned_f1 and threshold have a value for
    each label, METRIC/NAME. mean_average_precision, auc, METRIC_macro are means
    over labels, METRIC_micro counts all labels together. exact_match: fraction
    of examples with all labels right at 0.5, and its Wilson interval.
    """
    from sklearn import metrics  # takes a second

    columns = self.collect(params)
    labels, logits, p = _columns(columns)
    known = ~np.isnan(labels)
    found: dict[str, dict[str, float]] = {'average_precision': {}, 'auc': {}}
    used = []
    for name, true, score, is_known in zip(self.names, labels.T, p.T, known.T):
      true, score = true[is_known], score[is_known]
      used.append(len({*true}) == 2)
      if used[-1]:
        found['average_precision'][name] = metrics.average_precision_score(
          true, score
        )
        found['auc'][name] = metrics.roc_auc_score(true, score)
    results = {
      'mean_average_precision': _mean(found['average_precision']),
      'auc': _mean(found['auc']),
    }
    thresholds = {'f1': np.full(len(self.names), 0.5)}
    if self._of_training:
      tuned = best_thresholds(*_columns(self._of_training(params))[::2])
      thresholds['tuned_f1'] = tuned
      found['threshold'] = dict(zip(self.names, tuned))
    for metric, values in thresholds.items():
      of_each, micro = f1(labels, p, values)
      pairs = zip(self.names, of_each, used)
      found[metric] = {name: float(x) for name, x, is_used in pairs if is_used}
      results[f'{metric}_macro'] = _mean(found[metric])
      results[f'{metric}_micro'] = micro
    right = (((p >= 0.5) == (labels == 1)) | ~known).all(axis=1)
    low, high = wilson(right)
    results |= {'exact_match': float(right.mean())}
    results |= {'exact_match_low': low, 'exact_match_high': high}
    losses = np.where(known, np.logaddexp(0, logits) - labels * logits, 0)
    results['loss'] = float(losses.sum(axis=1).mean())
    self.predictions = vectors.Labels(columns['index'], labels, p, self.names)
    details = {f'{k}/{x}': y for k, xs in found.items() for x, y in xs.items()}
    return results | self.collect.counts(columns) | details


def _columns(columns):
  """Return labels, logits and probabilities, float64 [N, K]."""
  logits = np.float64(columns['outputs'])
  return np.float64(columns['label']), logits, 1 / (1 + np.exp(-logits))


def _mean(values):
  return float(np.mean([*values.values()])) if values else math.nan


def f1(
  labels: np.ndarray, p: np.ndarray, thresholds: np.ndarray
) -> tuple[np.ndarray, float]:
  """Return (F1 of each label [K], F1 of all together) of p >= thresholds [K].

  `labels` [N, K] are 0, 1 or NaN, and `p` are probabilities [N, K].
  """
  true, predicted = labels == 1, (p >= thresholds) & ~np.isnan(labels)
  hits = (true & predicted).sum(axis=0)
  all_ = true.sum(axis=0) + predicted.sum(axis=0)
  return 2 * hits / np.maximum(all_, 1), 2 * hits.sum() / max(all_.sum(), 1)


def best_thresholds(labels: np.ndarray, p: np.ndarray) -> np.ndarray:
  """Return the threshold [K] of each label with the best F1."""
  found = []
  for true, score in zip(labels.T, p.T):
    score, true = score[~np.isnan(true)], true[~np.isnan(true)]
    order = np.argsort(-score, kind='stable')
    hits = np.cumsum(true[order])
    values = 2 * hits / (np.arange(1, len(hits) + 1) + true.sum())
    found.append(score[order][np.argmax(values)])
  return np.array(found)

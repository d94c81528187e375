"""Ranking and thresholds of several labels of each example."""

import dataclasses
from typing import Any, ClassVar

import numpy as np

from vit_jax.data.sources.tables import say_once, some
from vit_jax.data.subsets import Source
from vit_jax.evals.classification import BOUND
from vit_jax.evals.collect import COUNTS, Collector, OutputEvaluator
from vit_jax.reports import vectors
from vit_jax.reports.results import wilson
from vit_jax.types import ACCURACY, DETAIL, LOSS, RATE, Kinds, Params

_OF_EACH = ('average_precision', 'auc', 'f1', 'tuned_f1', 'threshold')
_MEANS = ('mean_average_precision', 'auc', 'f1_macro', 'tuned_f1_macro')


@dataclasses.dataclass(eq=False, kw_only=True)
class MultiLabel(OutputEvaluator):
  """Average precision, AUC, F1 and exact match of labels of 0 and 1.

  Missing labels (NaN) do not count. Means over labels leave out labels that are
  0, or 1, in all examples.

  Attributes:
    train: training source; each label's threshold with the best F1 there is
      'tuned'. None: 0.5 only.
  """

  train: Source | None = None

  metrics: ClassVar[Kinds] = {
    **dict.fromkeys(('mean_average_precision', 'auc'), ACCURACY),
    **dict.fromkeys(('f1_macro', 'f1_micro', 'exact_match'), RATE),
    **dict.fromkeys(('tuned_f1_macro', 'tuned_f1_micro'), RATE),
    **dict.fromkeys(('exact_match_low', 'exact_match_high'), BOUND),
    'loss': LOSS,
    **COUNTS,
    **{f'{x}/': dataclasses.replace(RATE, detail=True) for x in _OF_EACH},
    'threshold/': DETAIL,
  }

  def __post_init__(self) -> None:
    super().__post_init__()
    self._of_training: Any = None
    if self.train is not None:
      data = dataclasses.replace(self.data, source=self.train)
      self._of_training = Collector(self.measure, data=data, mesh=self.mesh)

  def run(self, params: Params) -> dict[str, float]:
    """Return {metric: float}.

    average_precision, auc, f1 (at 0.5), tuned_f1 and threshold have a value for
    each label, METRIC/NAME. mean_average_precision, auc and METRIC_macro are
    means over labels, METRIC_micro counts all labels together. exact_match:
    fraction of examples with all labels right at 0.5, and its Wilson interval.
    """
    from sklearn import metrics  # takes a second

    columns = self.collect(params)
    labels, p = _labels_and_probabilities(columns)
    known, thresholds = ~np.isnan(labels), {'f1': np.full(p.shape[1], 0.5)}
    if self._of_training:
      found = _labels_and_probabilities(self._of_training(params))
      thresholds['tuned_f1'] = best_thresholds(*found)
    of_each: dict[str, dict[str, float]] = {x: {} for x in _OF_EACH}
    one_sided: list[str] = []
    for i, name in enumerate(self.names):
      true, score = labels[known[:, i], i], p[known[:, i], i]
      if len({*true}) < 2:
        one_sided.append(name)
        continue
      values = {
        'average_precision': metrics.average_precision_score(true, score),
        'auc': metrics.roc_auc_score(true, score),
      }
      for metric, of_label in thresholds.items():
        values[metric] = metrics.f1_score(true, score >= of_label[i])
        if metric == 'tuned_f1':
          values['threshold'] = of_label[i]
      for metric, value in values.items():
        of_each[metric][name] = float(value)
    if one_sided:
      say_once(
        'labels without positives or without negatives in the data of this '
        f'evaluator have no metrics {some(one_sided)}'
      )
    means = (float(np.mean([*x.values()])) for x in of_each.values() if x)
    results = dict(zip(_MEANS, means))
    for metric, of_label in thresholds.items():
      both = labels[known], (p >= of_label)[known]
      micro = metrics.f1_score(*both, zero_division=0.0)
      results[f'{metric}_micro'] = float(micro)
    right = (((p >= 0.5) == labels) | ~known).all(axis=1)
    results['exact_match'] = exact = float(right.mean())
    ends = wilson(exact, len(right))
    results['exact_match_low'], results['exact_match_high'] = ends
    logits = columns['outputs'].astype(np.float64)
    losses = np.where(known, np.logaddexp(0, logits) - labels * logits, 0)
    results['loss'] = float(losses.sum(axis=1).mean())
    self.predictions = vectors.Labels(columns['index'], labels, p, self.names)
    details = {f'{k}/{x}': y for k, v in of_each.items() for x, y in v.items()}
    return results | self.collect.counts(columns) | details


def _labels_and_probabilities(columns):
  """Return two arrays float64 [N, K]."""
  p = 1 / (1 + np.exp(-columns['outputs'].astype(np.float64)))
  return columns['label'].astype(np.float64), p


def best_thresholds(labels: np.ndarray, p: np.ndarray) -> np.ndarray:
  """Return thresholds [K] of the best F1 on [N, K], midway between scores."""
  from sklearn import metrics

  found = []
  for true, score in zip(labels.T, p.T):
    known = ~np.isnan(true)
    if not (true == 1).any():
      found.append(1.0)
      continue
    precision, recall, thresholds = metrics.precision_recall_curve(
      true[known], score[known]
    )
    both = np.maximum(precision + recall, 1e-12)
    best = np.argmax((2 * precision * recall / both)[:-1])
    found.append(np.mean(thresholds[max(best - 1, 0) : best + 1]))
  return np.array(found)

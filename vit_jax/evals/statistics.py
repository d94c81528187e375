"""Intervals, calibration and ranking metrics, in numpy and float64.

They take one number for each example, as the evaluators collect them, and know
nothing of devices, hosts or batches.
"""

import math

import numpy as np

_Z = 1.959963984540054  # 97.5% of a standard normal lie below it


def wilson(hits, count):
  """(low, high): 95% score interval of a proportion (Wilson, 1927).

  Unlike accuracy +- 2 standard errors it stays within [0, 1], and is no point
  where every example is a hit, or none.
  """
  share = hits / count
  scale = 1 + _Z**2 / count
  centre = (share + _Z**2 / (2 * count)) / scale
  spread = share * (1 - share) / count + _Z**2 / (4 * count**2)
  half = _Z * math.sqrt(spread) / scale
  low, high = max(0.0, centre - half), min(1.0, centre + half)
  # Rounding must not put the share itself outside, where it is 0 or 1.
  return min(share, low), max(share, high)


def bootstrap(statistic, columns, *, resamples=1000, seed=0):
  """{name: (low, high)}: 95% percentile intervals over resampled examples.

  Args:
    statistic: {name: [n, ...]} -> {name: float}.
    columns: {name: [n, ...]}; rows are drawn with replacement, the same of all
      columns.
    resamples: number of draws.
    seed: of the draws.
  """
  count = len(next(iter(columns.values())))
  rng = np.random.default_rng(seed)
  found = []
  for _ in range(resamples):
    rows = rng.integers(count, size=count)
    found.append(statistic({name: x[rows] for name, x in columns.items()}))
  return {
    name: tuple(np.percentile([x[name] for x in found], (2.5, 97.5)).tolist())
    for name in found[0]
  }


def calibration_error(confidence, hit, bins):
  """Expected calibration error (Guo et al., 2017, equation 3).

  |accuracy - mean confidence| within each of `bins` bins of equal width,
  weighted by the share of the examples in it. The upper edge belongs to a bin,
  the lower one does not.

  Args:
    confidence: [n] in [0, 1], the probability of the predicted class.
    hit: bool [n], whether it was right.
    bins: their number.
  """
  confidence = np.asarray(confidence, np.float64)
  # A probability that float32 rounds to above 1 is in the last bin.
  index = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
  gaps = np.bincount(index, hit - confidence, bins)
  return float(np.abs(gaps).sum() / len(confidence))


def per_class_accuracy(labels, hit):
  """{class: share of hits among its examples} of the classes that occur.

  Args:
    labels: int [n].
    hit: bool [n].
  """
  counts, hits = np.bincount(labels), np.bincount(labels, hit)
  return {int(c): float(hits[c] / counts[c]) for c in np.flatnonzero(counts)}


def average_precision(scores, positive):
  """Sum over distinct scores, falling, of precision times the gain in recall.

  It does not interpolate, and examples of equal scores enter together.

  Args:
    scores: [n].
    positive: bool [n], at least one True.
  """
  order = np.argsort(-scores, kind='stable')
  scores, positive = scores[order], positive[order]
  # The last example of each run of equal scores.
  (last,) = np.nonzero(np.append(scores[1:] != scores[:-1], True))
  hits = np.cumsum(positive)[last]
  recall = hits / hits[-1]
  return float(np.sum(np.diff(recall, prepend=0.0) * hits / (last + 1)))


def f1(predicted, positive):
  """{'micro': of all decisions alike, 'macro': mean over classes}.

  2 TP / (2 TP + FP + FN); 0 where nothing is predicted and nothing is there.

  Args:
    predicted, positive: bool [n, K].
  """
  hits = np.sum(predicted & positive, axis=0)
  total = np.sum(predicted, axis=0) + np.sum(positive, axis=0)
  each = 2 * hits / np.maximum(total, 1)
  micro = 2 * hits.sum() / max(total.sum(), 1)
  return {'micro': float(micro), 'macro': float(each.mean())}

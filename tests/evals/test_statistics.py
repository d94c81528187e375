"""Against scipy, scikit-learn, and a few lines of numpy."""

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics

from vit_jax.evals import statistics

RNG = np.random.default_rng(0)


@pytest.mark.parametrize('count', [1, 7, 50_000])
def test_wilson(count):
  for hits in {0, 1, count // 3, count}:
    test = scipy.stats.binomtest(hits, count)
    interval = test.proportion_ci(0.95, method='wilson')
    low, high = statistics.wilson(hits, count)
    assert (low, high) == pytest.approx((interval.low, interval.high), abs=1e-9)
    assert 0 <= low <= hits / count <= high <= 1


def test_bootstrap_is_that_of_scipy():
  """Up to the draws: 3% of the interval's width with this many."""
  x = RNG.exponential(size=400)
  found = statistics.bootstrap(
    lambda c: {'mean': c['x'].mean(), 'top': np.percentile(c['x'], 90)},
    {'x': x},
    resamples=20_000,
  )
  for name, fn in (('mean', np.mean), ('top', lambda a: np.percentile(a, 90))):
    interval = scipy.stats.bootstrap(
      (x,),
      fn,
      method='percentile',
      n_resamples=20_000,
      vectorized=False,
      rng=np.random.default_rng(1),
    ).confidence_interval
    width = interval.high - interval.low
    assert found[name] == pytest.approx(tuple(interval), abs=0.03 * width)


def test_bootstrap_draws_rows_and_repeats_itself():
  columns = {'x': np.arange(50), 'twice': 2 * np.arange(50)}

  def statistic(c):
    np.testing.assert_array_equal(2 * c['x'], c['twice'])
    return {'mean': c['x'].mean()}

  assert statistics.bootstrap(statistic, columns) == statistics.bootstrap(
    statistic, columns
  )
  other = statistics.bootstrap(statistic, columns, seed=1)
  assert other != statistics.bootstrap(statistic, columns)


def test_calibration_error():
  confidence = RNG.random(1000)
  hit = RNG.random(1000) < confidence**2
  expected = 0
  for i in range(15):
    rows = (confidence > i / 15) & (confidence <= (i + 1) / 15)
    gap = abs(hit[rows].mean() - confidence[rows].mean())
    expected += rows.mean() * gap
  found = statistics.calibration_error(confidence, hit, 15)
  assert found == pytest.approx(expected, rel=1e-12)
  assert found > 0.1  # such examples are overconfident


def test_calibration_of_what_is_sure():
  ones, yes = np.ones(4), np.ones(4, bool)
  assert statistics.calibration_error(ones, yes, 15) == 0
  assert statistics.calibration_error(ones, ~yes, 15) == 1
  # The edge between two bins belongs to the lower one: 0.5 +- errors cancel.
  edge, mixed = np.array([0.5, 0.25]), np.array([True, False])
  found = statistics.calibration_error(edge, mixed, 2)
  assert found == pytest.approx(abs(0.5 - 0.25) / 2)


def test_per_class_accuracy():
  labels, hit = np.array([4, 1, 4, 1, 1]), np.array([1, 0, 0, 1, 1]) > 0
  found = statistics.per_class_accuracy(labels, hit)
  assert found == {1: 2 / 3, 4: 1 / 2}
  recalls = sklearn.metrics.recall_score(
    labels, np.where(hit, labels, 0), labels=[1, 4], average=None
  )
  assert list(found.values()) == pytest.approx(list(recalls))


@pytest.mark.parametrize('decimals', [None, 1])  # 1: many equal scores
def test_average_precision(decimals):
  for share in (0.02, 0.5, 1.0):
    positive = RNG.random(300) < share
    positive[7] = True
    scores = RNG.normal(size=300) + positive
    scores = scores if decimals is None else scores.round(decimals)
    expected = sklearn.metrics.average_precision_score(positive, scores)
    found = statistics.average_precision(scores, positive)
    assert found == pytest.approx(expected, rel=1e-12)


def test_f1():
  positive = RNG.random((60, 5)) < 0.3
  predicted = positive ^ (RNG.random((60, 5)) < 0.2)
  positive[:, 4] = predicted[:, 4] = False
  found = statistics.f1(predicted, positive)
  for average, value in found.items():
    expected = sklearn.metrics.f1_score(
      positive, predicted, average=average, zero_division=0
    )
    assert value == pytest.approx(expected, rel=1e-12)

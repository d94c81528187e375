"""Metrics of several labels, numbers and grades against scikit-learn's."""

import numpy as np
import pytest
import sklearn.metrics as reference
from splits import Source, make

from vit_jax.data.pipeline import Data
from vit_jax.evals.grades import Grades
from vit_jax.evals.multi_label import MultiLabel, best_thresholds
from vit_jax.evals.regression import Regression
from vit_jax.reports import vectors, worst

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (50, 1, 2, 3), np.uint8)
KERNEL = RNG.normal(0, 2, (6, 3)).astype(np.float32)
OUTPUTS = (IMAGES.reshape(50, 6) / 255).astype(np.float64) @ KERNEL


def data(labels, num_classes=3):
  return Data(Source(IMAGES, labels, num_classes), batch_size=16)


def run(cls, labels, **options):
  evaluator, params = make(cls, data(labels), KERNEL, **options)
  found = evaluator.run(params)
  assert all(evaluator.metrics.get(x) for x in found if '/' not in x)
  return evaluator, found


def labels_of(outputs):
  noisy = outputs + RNG.normal(0, 1, outputs.shape)
  found = (noisy > np.median(noisy, axis=0)).astype(np.float32)
  found[::7, 0] = np.nan
  return found


def test_labels():
  labels, train = labels_of(OUTPUTS), labels_of(OUTPUTS)
  evaluator, found = run(MultiLabel, labels, train=data(train).source)
  p = 1 / (1 + np.exp(-OUTPUTS))
  known, tuned = ~np.isnan(labels), []
  thresholds = [found[f'threshold/{i}'] for i in range(3)]
  assert thresholds == pytest.approx(best_thresholds(train, p), abs=1e-6)
  assert best_thresholds(0 * labels, p).tolist() == [1.0] * 3  # none positive
  for i, threshold in enumerate(thresholds):
    true, score = labels[known[:, i], i], p[known[:, i], i]
    expected = {
      'average_precision': reference.average_precision_score(true, score),
      'auc': reference.roc_auc_score(true, score),
      'f1': reference.f1_score(true, score >= 0.5),
    }
    expected['tuned_f1'] = reference.f1_score(true, score >= threshold)
    near = score[score < threshold].max(), score[score > threshold].min()
    assert threshold == pytest.approx(np.mean(near), abs=1e-6)
    for metric, value in expected.items():
      assert found[f'{metric}/{i}'] == pytest.approx(value, abs=1e-6)
    tuned.append(expected)
  for name, metric in (
    *(('mean_average_precision', 'average_precision'), ('auc', 'auc')),
    *(('f1_macro', 'f1'), ('tuned_f1_macro', 'tuned_f1')),
  ):
    mean = np.mean([x[metric] for x in tuned])
    assert found[name] == pytest.approx(mean, abs=1e-6)
  for name, above in ('f1', p >= 0.5), ('tuned_f1', p >= thresholds):
    micro = reference.f1_score(labels[known], above[known])
    assert found[f'{name}_micro'] == pytest.approx(micro, abs=1e-6)
  right = [((p >= 0.5) == labels)[i][known[i]].all() for i in range(50)]
  assert found['exact_match'] == pytest.approx(np.mean(right))
  assert found['exact_match_low'] < found['exact_match']
  of_truth = np.where(labels == 1, p, 1 - p)
  loss = -np.log(of_truth[known]).sum() / 50
  assert found['loss'] == pytest.approx(loss, abs=1e-6)
  wrong = np.where(known & (of_truth < 0.5), 1 - of_truth, np.nan)
  np.testing.assert_allclose(evaluator.predictions.errors(), wrong, atol=1e-6)


def test_probabilities_of_0_and_1_are_drawn():
  p = np.array([[0.0], [1.0], [0.96], [0.14]])
  made = vectors.Labels(np.arange(4), p.round(), p, ['a']).draw()
  _, line = made.axes[0].lines
  assert line.get_xydata()[[0, 1, 9]].tolist() == [[0, 0], [0.14, 0], [0.98, 1]]


def test_a_label_that_never_occurs_is_left_out_of_means(capsys):
  labels = labels_of(OUTPUTS)
  _, all_ = run(MultiLabel, labels)
  labels[:, 2] = 0
  _, found = run(MultiLabel, labels)
  assert 'no metrics (1): 2' in capsys.readouterr().out
  assert 'auc/2' not in found and 'tuned_f1_macro' not in found
  mean = (all_['auc/0'] + all_['auc/1']) / 2
  assert found['auc'] == pytest.approx(mean, abs=1e-12)


def test_numbers(tmp_path):
  labels = (OUTPUTS + RNG.normal(0, 1, OUTPUTS.shape)).astype(np.float32)
  labels[3, 1] = np.nan
  evaluator, found = run(Regression, labels)
  r2 = []
  for i in range(3):
    true, output = labels[:, i], OUTPUTS[:, i]
    known = ~np.isnan(true)
    pair = true[known], output[known]
    error = reference.mean_absolute_error(*pair)
    assert found[f'mean_absolute_error/{i}'] == pytest.approx(error, rel=1e-6)
    error = reference.root_mean_squared_error(*pair)
    assert found[f'rmse/{i}'] == pytest.approx(error, rel=1e-6)
    r2.append(reference.r2_score(*pair))
    assert found[f'r2/{i}'] == pytest.approx(r2[-1], rel=1e-6)
    assert found[f'rmse/{i}_low'] < error < found[f'rmse/{i}_high']
  assert found['r2'] == pytest.approx(np.mean(r2), rel=1e-6)
  assert 'rmse' not in found  # a mean of different units
  paths = worst.write_all(tmp_path, {'test': evaluator})
  assert [x.name for x in paths] == [
    'sheet-test-true-and-predicted-numbers.png',
    'worst-test.csv',
  ]
  first = paths[1].read_text().splitlines()[1].split(',')
  errors = np.abs(OUTPUTS - labels) / np.nanstd(labels, axis=0)
  row, column = divmod(int(np.nanargmax(errors)), 3)
  assert (first[0], first[1]) == (f'image {row}', str(column))
  assert float(first[2]) == pytest.approx(labels[row, column], abs=1e-3)
  assert (tmp_path / 'thumbnails-test.json').exists()


def test_one_number_has_no_metrics_of_columns():
  one = data(np.float32(OUTPUTS[:, :1]) + 1, num_classes=1)
  evaluator, params = make(Regression, one, KERNEL[:, :1])
  found = evaluator.run(params)
  assert found == evaluator.run(params)  # with the same intervals
  assert found['mean_absolute_error'] == pytest.approx(1, abs=1e-5)
  names = 'mean_absolute_error', 'rmse', 'r2'
  ends = '', '_low', '_high'
  assert {*found} == {'num_examples', *(x + y for x in names for y in ends)}


@pytest.mark.parametrize('known', [0, 1, 50])
def test_fewer_than_two_numbers_have_no_metrics(known, tmp_path):
  labels = np.full((50, 1), np.nan, np.float32)
  labels[:known] = 3
  evaluator, params = make(Regression, data(labels, 1), KERNEL[:, :1])
  found = evaluator.run(params)
  assert all(np.isnan(found[x]) for x in ('rmse', 'r2', 'r2_low'))
  worst.write_all(tmp_path, {'test': evaluator})


def test_few_examples_give_no_warnings():
  few = np.full((50, 1), np.nan, np.float32)
  few[:3, 0] = 1, 2, 2
  none, same = np.zeros((50, 3), np.float32), [1] * 50
  kernel = -np.abs(KERNEL) * np.float32([1, 0.001, 1])  # the largest is 1
  for cls, labels in (Regression, few), (MultiLabel, none), (Grades, same):
    columns = np.shape(few)[1] if cls is Regression else 3
    evaluator, params = make(cls, data(labels, columns), kernel[:, :columns])
    evaluator.run(params)


def test_grades():
  grades = np.clip(OUTPUTS.argmax(1) + RNG.integers(-1, 2, 50), 0, 2)
  _, found = run(Grades, grades.tolist())
  predicted = OUTPUTS.argmax(axis=1)
  kappa = reference.cohen_kappa_score(grades, predicted, weights='quadratic')
  assert found['quadratic_weighted_kappa'] == pytest.approx(kappa, abs=1e-12)
  error = reference.mean_absolute_error(grades, predicted)
  assert found['mean_absolute_error'] == pytest.approx(error)
  assert found['accuracy'] == pytest.approx(np.mean(grades == predicted))

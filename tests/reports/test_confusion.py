"""What a classifier got wrong, as files, compared with sklearn and numpy."""

import csv
import types

import numpy as np
import pytest
import sklearn.metrics
from nightly import nightly
from PIL import Image

from vit_jax.reports import confusion, worst


def predictions(num_classes=5, count=300, names=None, **fields):
  rng = np.random.default_rng(num_classes)
  true = rng.integers(0, num_classes, count)
  guess = rng.integers(0, num_classes, count)
  values = {
    'index': np.sort(rng.choice(2 * count, count, replace=False)),
    'true': true,
    'predicted': np.where(rng.random(count) < 0.7, true, guess),
    'true_log_probability': np.log(rng.uniform(1e-4, 0.4, count)),
    'predicted_probability': rng.uniform(0.4, 1, count),
    'classes': np.arange(num_classes),
    'class_names': names,
  }
  return confusion.Predictions(**values | fields)


class Images:
  def __getitem__(self, index):
    return {'image': np.zeros((8, 8, 1), np.uint8)}

  def describe(self, index):
    return f'/a b/ü,{index}.png'


def write(folder, name, found, **options):
  data = types.SimpleNamespace(source=Images())
  evaluator = types.SimpleNamespace(predictions=found, data=data)
  evaluators = {name: evaluator, 'no': object()}
  return worst.write_all(folder, evaluators, **options)


def read(path):
  with open(path, encoding='utf-8', newline='') as file:
    return list(csv.reader(file))


def test_files(tmp_path):
  names = ['cat', 'dog, small', 'Katze "3"', 'Übung', '猫\n$x$']
  found = predictions(names=names)
  paths = write(tmp_path, 'test', found)
  assert [path.name for path in paths] == [
    'confusion-test.csv',
    'confusion-test.png',
    'misclassified-test.csv',
  ]
  header, *rows = read(paths[0])
  assert header == ['true_class', *names]
  assert [row[0] for row in rows] == names
  counts = np.array([row[1:] for row in rows], int)
  wanted = sklearn.metrics.confusion_matrix(found.true, found.predicted)
  np.testing.assert_array_equal(counts, wanted)
  header, *rows = read(paths[2])
  assert tuple(header) == confusion.MISCLASSIFIED
  (wrong,) = np.nonzero(found.true != found.predicted)
  wrong = wrong[np.argsort(found.true_log_probability[wrong])]
  assert [int(row[5]) for row in rows] == found.index[wrong].tolist()
  for row, i in zip(rows, wrong, strict=True):
    assert row[0] == f'/a b/ü,{found.index[i]}.png'
    assert row[1:3] == [names[found.true[i]], names[found.predicted[i]]]
    probability = np.exp(found.true_log_probability[i])
    assert float(row[3]) == pytest.approx(probability, rel=1e-5)
    assert float(row[4]) == pytest.approx(
      found.predicted_probability[i], rel=1e-5
    )
  with Image.open(paths[1]) as image:
    assert np.asarray(image.convert('L')).std() > 10


def test_names_of_classes(tmp_path):
  """Names are made unique; those of the model are a fallback."""
  crane = ['crane', 'owl', 'crane']
  assert confusion.label([0, 1, 2], crane) == ['crane (0)', 'owl', 'crane (2)']
  assert confusion.label([1, 2, 5]) == ['1', '2', '5']
  assert confusion.label([0, 3], crane) == ['0', '3']
  names = list('abcde')
  write(tmp_path, 'x', predictions(), class_names=names)
  assert read(tmp_path / 'confusion-x.csv')[0][1:] == names
  _, *rows = read(tmp_path / 'misclassified-x.csv')
  assert {row[1] for row in rows} == {*names}


def test_only_some_classes_can_be_predicted(tmp_path):
  some = np.array([3, 7, 150])
  found = predictions(3)
  found = predictions(
    3, classes=some, true=some[found.true], predicted=some[found.predicted]
  )
  write(tmp_path, 'x', found)
  header, *rows = read(tmp_path / 'confusion-x.csv')
  assert header[1:] == ['3', '7', '150']
  assert sum(int(x) for row in rows for x in row[1:]) == 300


@pytest.mark.parametrize('num_classes', [1000, *nightly([2, 60])])
def test_figure_of_any_number_of_classes(tmp_path, num_classes):
  """No figure is larger than a page."""
  names = [f'a rather long name of class {i}' for i in range(num_classes)]
  found = predictions(num_classes, count=5000)
  matrix = sklearn.metrics.confusion_matrix(found.true, found.predicted)
  confusion.draw(matrix, names, tmp_path / 'x.png', title='$1 and $2')
  with Image.open(tmp_path / 'x.png') as image:
    assert min(image.size) > 300 and max(image.size) < 3000
    dark = np.asarray(image.convert('L')) < 100
  assert 100 < dark.sum() < 0.5 * dark.size


def test_more_classes_than_a_matrix_can_show(tmp_path):
  found = predictions(20_000)
  (path,) = write(tmp_path, 'x', found)
  assert path.name == 'misclassified-x.csv' and len(read(path)) > 50

"""Each rule of docs/labels.md on what a cell means, and what is refused."""

import numpy as np
import pytest

from vit_jax.data.targets import Classes, Grades, Labels, Numbers

NAN, EYE, TEN = np.nan, np.eye(11), [*map(str, range(1, 11))]
LABELS, CLASSES, NUMBERS = Labels(('x',)), Classes(), Numbers(('x',))
READ = [
  # One label, named by its column.
  (LABELS, ['0', '1', 'NA'], ['x'], [[0], [1], [NAN]]),
  (LABELS, ['yes', 'No', ''], ['x'], [[1], [0], [NAN]]),
  (LABELS, [True, False, None], ['x'], [[1], [0], [NAN]]),
  (LABELS, [1.0, 0.0, NAN], ['x'], [[1], [0], [NAN]]),
  (LABELS, ['-1', '1', '1'], ['x'], [[0], [1], [1]]),  # CelebA
  (LABELS, [-1, 0, 1], ['x'], [[NAN], [0], [1]]),  # CheXpert
  # Lists of names.
  (LABELS, ["['b', 'a']", "['b']", '[]'], 'ab', [[1, 1], [0, 1], [0, 0]]),
  (
    LABELS,
    ['["a, c"]', '["b"]', ''],
    ['a, c', 'b'],
    [[1, 0], [0, 1], [NAN] * 2],
  ),
  (LABELS, [['a'], [], None], 'a', [[1], [0], [NAN]]),
  (LABELS, ['a;b', 'b', ' a ;b'], 'ab', [[1, 1], [0, 1], [1, 1]]),
  (Labels(('x',), separator=' '), ['a b', 'b'], 'ab', [[1, 1], [0, 1]]),
  (Labels(('x',), separator='|'), ['a b', 'c'], ['a b', 'c'], [[1, 0], [0, 1]]),
  (LABELS, ['10|2', '2'], [*map(str, range(11))], [EYE[10] + EYE[2], EYE[2]]),
  # As many zeros and ones as labels.
  (LABELS, ['0 1 0', '1 1 0'], '012', [[0, 1, 0], [1, 1, 0]]),
  (LABELS, ['0,1', '1,1'], '01', [[0, 1], [1, 1]]),
  (LABELS, [[0, 1], [1, 0]], '01', [[0, 1], [1, 0]]),
  (LABELS, [[0, 1], [1, 1]], '01', [[0, 1], [1, 1]]),
  (LABELS, ['[0, 1]', '[1, 0]'], '01', [[0, 1], [1, 0]]),
  # Classes.
  (CLASSES, ['cat', 'NA', 'dog'], ['cat', 'dog'], [0, -1, 1]),
  (CLASSES, ['None', 'b', 'a'], 'ab', [-1, 1, 0]),
  (CLASSES, [1, 3, 2, 1], '123', [0, 2, 1, 0]),
  (CLASSES, TEN[::-1], TEN, [*range(9, -1, -1)]),
  (CLASSES, [1.0, 2.0, NAN], '12', [0, 1, -1]),
  (
    Grades(order=('<18', '18+')),
    ['18+', '<18', 'NA'],
    ['<18', '18+'],
    [1, 0, -1],
  ),
  (NUMBERS, ['1.5', 'NA', 2], ['x'], [[1.5], [NAN], [2]]),
]
REFUSED = [
  (LABELS, ['a;b', 'a, b'], r"cut at ';' .*at ','.*separator"),
  (LABELS, ['golden retriever', 'great dane'], r"cut at ' ' .*at '\|'"),
  (LABELS, ['[a, b]', '[c]'], r'\[a, b\].*list of JSON or Python'),
  (LABELS, ["('a', 'b')"], 'list of JSON or Python'),
  (LABELS, ['0 1 0', '1 1'], 'as many zeros and ones'),
  (LABELS, ['1|1000', '3'], 'up to 1,000 of 2 images'),
  (LABELS, ['1|2000000000', '3'], 'up to 2,000,000,000 of 2'),
  *(
    (CLASSES, ['0.12', x], r'two readings.*number=x.*class_names')
    for x in ('1e-05', 'NA', '+1.5', '.5', '2,5', 'cat')
  ),
  (CLASSES, [['a', 'b'], ['c']], 'labels=x'),
  (CLASSES, [*map(str, range(11))], 'another cell in each of 11 rows'),
  (NUMBERS, ['1,5', '2'], "'1,5' in row 1.*decimal point"),
  (NUMBERS, ['2', '1e39'], "'1e39' in row 2"),  # of float32
]


@pytest.mark.parametrize(('targets', 'cells', 'names', 'expected'), READ)
def test_a_cell_has_one_reading(targets, cells, names, expected):
  labels, found = targets.encode('t', {'x': cells})
  assert found == [*names]
  np.testing.assert_array_equal(labels, expected)
  # Another split of the table is read alike.
  some, _ = targets.encode('t', {'x': [*cells[:1] * 2, cells[1]]}, found)
  np.testing.assert_array_equal(some[0], labels[0])


@pytest.mark.parametrize(('targets', 'cells', 'message'), REFUSED)
def test_two_readings_are_refused(targets, cells, message):
  with pytest.raises(ValueError, match=message):
    targets.encode('t', {'x': cells})


def test_names_decide(capsys):
  """Words for missing values, and numbers, are classes if they are named."""
  labels, _ = CLASSES.encode('t', {'x': ['NA', '0.5']}, ['0.5', 'NA'])
  assert labels.tolist() == [1, 0] and not capsys.readouterr().out
  CLASSES.encode('t', {'x': ['NA', 'a', 'n/a']})
  LABELS.encode('t', {'x': ['-1', '1']})
  said = capsys.readouterr().out
  assert 't: x: read as missing: NA, n/a' in said
  assert 't: x: -1 is absent, as 0 does not occur' in said

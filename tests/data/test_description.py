"""The description of a source, and what it says to look at."""

import types

import numpy as np
import packed
import pytest
import tiny
from listed import Listed

from vit_jax.data.description import Description, copies
from vit_jax.data.pipeline import Data
from vit_jax.data.sources.digits import Digits
from vit_jax.data.sources.named import open_source
from vit_jax.data.subsets import Subset, Unlabelled, changed_rows, fingerprint
from vit_jax.data.targets import Grades, Labels, Numbers
from vit_jax.reports.data import Shown

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (12, 4, 6, 3)).astype(np.uint8)
FILES = [tiny.encode(x[None]) for x in PIXELS]


@pytest.mark.parametrize(
  ('labels', 'names', 'targets', 'said', 'look'),
  [
    ([0, 1, 1], 'ab', None, '2 classes: a 1, b 2', ['classes of one image']),
    (
      *([*range(5), *[5] * 6], ['NA', '[x', *'cdef'], None),
      '6 classes: NA 1, [x 1, c 1, d 1, e 1, f 6',
      ['names like missing values or lists (2): NA, [x', '6 classes of 11'],
    ),
    ([0, 2], 'abc', Grades(order='abc'), 'a 1, b 0, c 1', ['of one image']),
    (
      *([[1, 0], [np.nan, 0], [1, 1]], 'ab', Labels()),
      '2 labels: a 2 of 2 (1 missing), b 1 of 3',
      ['labels with one positive (1): b', 'without a negative (1): a'],
    ),
    ([[0], [0]], 'a', Labels(), 'a 0 of 2', ['labels with no positive']),
    (
      *([[1], [np.nan], [4]], ['age'], Numbers()),
      '1 number: age 1 to 4, mean 2.5 ± 1.5 (1 missing)',
      [],
    ),
    ([[7]] * 9, ['age'], Numbers(), 'age 7 to 7', ['two different']),
    ([[7]] * 9 + [[8]] * 3, ['age'], Numbers(), 'age 7 to 8', ['7 in 9 of 12']),
    ([[np.nan]] * 2, ['age'], Numbers(), 'age - to -', ['two different']),
  ],
)
def test_lines(labels, names, targets, said, look):
  source = Listed(FILES, labels, names and [*names], targets)
  first, kind, sizes, *others = Description.of(source).lines()
  assert first == f'{len(labels)} images in Listed' and said in kind
  assert sizes == 'size 6x4 (all)'
  assert all(x.startswith('look: ') for x in others)
  assert len([x for x in look if any(x in y for y in others)]) == len(look)
  assert bool(look) == bool(others)


def test_many_classes_are_shortened_and_none_need_be_known():
  labels = np.repeat(np.arange(20), [3] * 19 + [4])
  many = Listed(FILES * 8, labels, [*map(str, range(20))])
  line = Description.of(many).lines()[1]
  assert line == '20 classes: 19 4, 0 3, 1 3, 2 3, ..., 15 3, 16 3, 17 3, 18 3'
  lines = Description.of(Unlabelled(Listed(FILES, [0, 1]))).lines()
  assert lines == ['2 images in Listed', 'size 6x4 (all)']
  digits = Subset(Digits(split='test'), per_class=1)
  assert Description.of(digits).lines()[0] == '10 images in Digits'
  broken = Description.of(Listed([b'x', FILES[0]]))
  assert broken.sizes == 'size 6x4 (all, 1 unreadable)'


def test_a_test_set_is_compared_with_the_training():
  train = Listed(FILES, [0, 0, 1, 1], ['a', 'b'])
  test = Listed(FILES[3:], [0, 2], ['a', 'b', 'c'])
  look = Description.of(test, Description.of(train)).look
  assert any('also has images of these (1): b' in x for x in look)
  assert any('has no image of these (1): c' in x for x in look)
  assert copies(test, train) == [
    'exact copies of images of the training (1): index 0; python -m '
    'vit_jax.tools.curate lists near copies, too'
  ]
  assert copies(Listed(FILES[8:], [0]), train) == []


def test_a_table_says_what_it_has_chosen(tmp_path, capsys):
  files = {f'{i}.png': x for i, x in enumerate(FILES)}
  root = packed.write_folder(tmp_path, files | {'copy.png': FILES[0]})
  rows = [f'{i},{8 - i}.png,{"ab"[i % 2]},{i // 3},{i < 6}' for i in range(9)]
  table = '\n'.join(['id,image,label,patient,split', *rows, '9,copy.png,a,,no'])
  (root / 't.csv').write_text(table)
  options = {'csv': root / 't.csv', 'group_key': 'patient'}
  train, test = (open_source(split=x, **options) for x in ('true', 'False'))
  found = Description.of(train)
  assert found.used == {
    **{'image': 'image', 'label': 'label', 'split': 'split'},
    'group': 'patient',
  }
  assert found.lines()[0].endswith("group 'patient')")
  assert copies(test, train) == []
  assert train.groups == {'0', '1'} and test.groups == {'2'}
  # A reader cannot know the other splits, so a run compares its sources.
  of_all, evaluator = open_source(csv=root / 't.csv'), types.SimpleNamespace()
  of_all.groups, evaluator.data = {'2', '3'}, Data(test, 2)
  with pytest.raises(ValueError, match=r'evals\.val: .* the training \(1\): 2'):
    Shown.of(Data(of_all, 2), {'val': evaluator})
  with pytest.raises(
    ValueError, match=r"'id': 1 groups of 'true' are in other"
  ):
    options = {'split': 'true', 'label_key': 'label', 'group_key': 'id'}
    (root / 't.csv').write_text(table.replace('9,copy', '0,copy'))
    open_source(csv=root / 't.csv', **options)
  with pytest.raises(ValueError, match="no column 'doctor'"):
    open_source(csv=root / 't.csv', group_key='doctor')
  # A run that resumes sees each label, not those of some examples.
  before = fingerprint(open_source(csv=root / 't.csv'))
  (root / 'u.csv').write_text(table.replace('4,4.png,a', '4,4.png,b'))
  now = fingerprint(open_source(csv=root / 'u.csv'))
  said = '0 images added, 0 removed, 1 labels changed'
  assert changed_rows(before['rows'], now['rows']) == said
  assert "'split' is a column, and all its rows" in capsys.readouterr().out

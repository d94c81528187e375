"""Paired differences with intervals."""

import json

import pytest
from etils import epath

from vit_jax.reports.results import Results, half_width
from vit_jax.reports.table import Paired

SCORES = {
  'base': (0.50, 0.60, 0.70),
  'better': (0.51, 0.62, 0.73),  # by 1, 2 and 3 points
  'same': (0.49, 0.60, 0.71),
}


def make(path, curves, done=None):
  """Results of {run: accuracies in steps 10, 20, ...}."""
  for name, values in curves.items():
    (path / name).mkdir()
    lines = [
      json.dumps({'step': 10 * (i + 1), 'acc': value})
      for i, value in enumerate(values)
    ]
    (path / name / 'metrics.jsonl').write_text('\n'.join(lines) + '\n')
  return Results(curves, epath.Path(path), curves if done is None else done)


def cells(rows=SCORES, column='digits'):
  return tuple(
    {
      'row': row,
      'column': column,
      'runs': rf'{row}_seed(?P<seed>\d)',
      'metric': 'acc',
    }
    for row in rows
  )


def scores(path, done=None):
  curves = {
    f'{row}_seed{seed}': [value]
    for row, values in SCORES.items()
    for seed, value in enumerate(values)
  }
  return make(path, curves, done)


def test_intervals_of_student():
  """Mean 2, deviation 1, and the 97.5% quantile of 2 degrees is 4.3027."""
  assert half_width([1, 2, 3]) == pytest.approx(4.302653 / 3**0.5, rel=1e-6)
  # Two values: 12.7062 with 1 degree of freedom.
  assert half_width([0, 2]) == pytest.approx(12.706205, rel=1e-6)
  assert half_width([5.0]) is None


def test_differences_are_taken_within_a_seed(tmp_path):
  report = Paired(cells(), title='Recipes', name='recipes')
  results = scores(tmp_path)
  report.check(results)
  found = report(results)
  base, better, same = (found[row]['digits'] for row in SCORES)
  # The spread of the seeds, 10 points, cancels.
  assert better['mean'] == pytest.approx(0.02)
  assert better['half_width'] == pytest.approx(0.024841, abs=1e-6)
  assert better['values'] == pytest.approx({'0': 0.01, '1': 0.02, '2': 0.03})
  assert same['mean'] == pytest.approx(0)
  assert base['mean'] == pytest.approx(0.6)
  lines = (tmp_path / 'recipes.md').read_text().splitlines()
  assert lines[-3:] == [
    '| base | 60.0 ± 24.8 |',
    '| better | +2.0 ± 2.5 |',
    f'| same | {100 * same["mean"]:+.1f} ± 2.5 |',
  ]
  assert json.loads((tmp_path / 'recipes.json').read_text()) == found


def test_only_pairs_that_are_done_count(tmp_path):
  done = {'base_seed0', 'base_seed1', 'better_seed1', 'better_seed2'}
  found = Paired(cells())(scores(tmp_path, done))
  assert found['same'] == {}
  better = found['better']['digits']
  assert list(better['values']) == ['1'] and better['half_width'] is None
  lines = (tmp_path / 'paired.md').read_text().splitlines()
  assert lines[-2:] == ['| better | +2.0 |', '| same |  |']


def test_cells_without_a_pair_are_refused(tmp_path):
  results = scores(tmp_path)
  other = cells(['better'], column='glyphs')
  with pytest.raises(ValueError, match="'glyphs' has no cell of the first row"):
    Paired(cells() + other).check(results)
  with pytest.raises(ValueError, match='matches none of the runs'):
    Paired(cells(['worse'])).check(results)

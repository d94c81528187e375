"""Values of a study: which records count, their means and differences."""

import json

import numpy as np
import pytest
from etils import epath

from vit_jax.reports.results import Results
from vit_jax.reports.table import Paired, Table

RUNS = {
  'cars_seed0': [{'step': 1, 'acc': 0.1}, {'step': 2, 'acc': 0.2, 'val': 0.9}],
  'cars_seed1': [{'step': 2, 'acc': 0.4}],
  'pets_seed0': [{'step': 2, 'acc': 0.6}],
  'pets_seed1': [{'step': 2, 'acc': 1.0}],
  'shots': [{'step': 1, 'k_seed0': 0.1, 'k_seed1': 0.3, 'k_seed12': 1.0}],
  'stopped': [
    {'step': 1, 'val': 0.5, 'acc': 0.7},
    {'step': 2, 'val': 0.8, 'acc': 0.6},
    {'step': 3, 'val': 0.7, 'acc': 0.9},
  ],
}


@pytest.fixture
def results(tmp_path):
  return make(tmp_path, done=RUNS)


def make(path, done, runs=RUNS):
  for name, records in runs.items():
    (path / name).mkdir()
    lines = [json.dumps(record) for record in records]
    (path / name / 'metrics.jsonl').write_text('\n'.join(lines))
    (path / name / 'kinds.json').write_text('{"acc": {"unit": "%"}}')
  return Results(runs, epath.Path(path), done)


def find(results, runs, metric='acc', **more):
  value = results.find({'runs': runs, 'metric': metric, **more})
  return value and value.values


def test_the_last_records_count_and_whole_names(results):
  assert find(results, 'cars_seed.') == (0.2, 0.4)
  assert find(results, 'cars') is None
  assert find(results, 'shots', r'k_seed\d') == (0.1, 0.3)
  value = results.find({'runs': 'cars_seed.', 'metric': 'acc'})
  assert value.mean == pytest.approx(0.3) and value.std == pytest.approx(0.1)
  assert value.text() == '30.0 ± 10.0' and value.text(digits=0) == '30 ± 10'
  assert find(results, 'stopped') == (0.9,)
  assert find(results, 'stopped', best='val') == (0.6,)
  assert find(results, 'pets_seed0', best='val') is None


def test_a_seed_is_averaged_over_its_runs(results):
  found = find(results, r'(cars|pets)_seed(?P<seed>\d)')
  np.testing.assert_allclose(found, [0.4, 0.7])
  assert find(results, 'shots', r'k_seed(?P<seed>\d)') == (0.1, 0.3)


def test_a_seed_that_lacks_a_run_does_not_count(tmp_path):
  results = make(tmp_path, done=set(RUNS) - {'pets_seed1'})
  found = find(results, r'(cars|pets)_seed(?P<seed>\d)')
  np.testing.assert_allclose(found, [0.4])
  assert find(results, '.*_seed.') == (0.2, 0.4, 0.6)
  assert find(results, 'pets_seed1') is None
  assert find(results, 'shots|pets_seed1', r'k_seed(?P<seed>\d)') is None


def test_published_values(results):
  assert results.find({'value': 0.77}).text() == '77.0'
  value = results.find({'value': (0.7763, 0.0023)})
  assert value.text(digits=2) == '77.63 ± 0.23'


def test_specs_that_nothing_can_fill(results):
  with pytest.raises(ValueError, match="'cars' matches none of the runs: cars"):
    results.check({'runs': 'cars', 'metric': 'a'})
  for keys in ({'runs': 'cars'}, {'runs': '.*', 'metric': 'a', 'beste': 'b'}):
    with pytest.raises(TypeError, match=r'metric|beste'):
      results.check(keys)


SCORES = {
  'base': (0.50, 0.60, 0.70),
  'better': (0.51, 0.62, 0.73),  # by 1, 2 and 3 points
  'same': (0.49, 0.60, 0.71),
}


def cells(rows=SCORES, column='digits'):
  same = {'column': column, 'metric': 'acc'}
  return tuple(
    {**same, 'row': row, 'runs': rf'{row}_seed(?P<seed>\d)'} for row in rows
  )


def scores(path, done=None):
  runs = {
    f'{row}_seed{seed}': [{'step': 1, 'acc': value}]
    for row, values in SCORES.items()
    for seed, value in enumerate(values)
  }
  return make(path, runs if done is None else done, runs)


def test_differences_are_taken_within_a_seed(tmp_path):
  report = Paired(cells(), title='Recipes', name='recipes')
  results = scores(tmp_path)
  report.check(results)
  found = report(results)
  base, better, same = (found[row]['digits'] for row in SCORES)
  # The spread of the seeds, 10 points, cancels. The deviation is 1 point, and
  # the 97.5% quantile of Student's t for 2 degrees of freedom is 4.3027.
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
  assert (tmp_path / 'recipes.png').exists()


def test_only_pairs_that_are_done_count(tmp_path):
  done = {'base_seed0', 'base_seed1', 'better_seed1', 'better_seed2'}
  found = Paired(cells())(scores(tmp_path, done))
  assert found['same'] == {}
  better = found['better']['digits']
  assert list(better['values']) == ['1'] and better['half_width'] is None
  lines = (tmp_path / 'paired.md').read_text().splitlines()
  assert lines[-2:] == ['| better | +2.0 |', '| same |  |']


def test_units_and_an_ema_of_some_rows(tmp_path):
  """A metric without a unit is not in percent."""
  runs = {
    f'{row}_seed{seed}': [{'step': 1, 'acc': 0.5, 'rank': rank + seed}]
    for row, rank in {'base': 16.0, 'more': 21.25}.items()
    for seed in (0, 1)
  }
  rank = {'column': 'rank', 'metric': 'rank'}
  both = [x | y for x in cells(['base', 'more']) for y in ({}, rank)]
  results = make(tmp_path, runs, runs)
  (tmp_path / 'more_seed0/config.json').write_text('{"ema": {"decay": 0.9}}')
  for report, *rows in (
    (Table, '| base | 50.0 ± 0.0 | 16.5 ± 0.5 |', '21.75 ± 0.5 |'),
    (Paired, '| base | 50.0 ± 0.0 | 16.5 ± 6.353 |', '+5.25 ± 0 |'),
  ):
    report(both, name='x')(results)
    title, _, head, _, *lines = (tmp_path / 'x.md').read_text().splitlines()
    assert title.endswith('EMA of the parameters, others without: more')
    assert head == '|  | digits (%) | rank |' and lines[0] == rows[0]
    assert lines[1].endswith(rows[1])

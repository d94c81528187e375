"""Values of a study: which records count, and how they are averaged."""

import json

import numpy as np
import pytest
from etils import epath

from vit_jax.reports.results import Results

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


def make(path, done):
  for name, records in RUNS.items():
    (path / name).mkdir()
    lines = [json.dumps(record) for record in records]
    (path / name / 'metrics.jsonl').write_text('\n'.join(lines))
  return Results(RUNS, epath.Path(path), done)


def find(results, runs, metric='acc', **more):
  value = results.find({'runs': runs, 'metric': metric, **more})
  return value and value.values


def test_the_last_records_count_and_whole_names(results):
  assert find(results, 'cars_seed.') == (0.2, 0.4)
  assert find(results, 'cars') is None
  assert find(results, 'shots', r'k_seed\d') == (0.1, 0.3)
  value = results.find({'runs': 'cars_seed.', 'metric': 'acc'})
  assert value.mean == pytest.approx(0.3) and value.std == pytest.approx(0.1)
  assert value.percent() == '30.0 ± 10.0' and value.percent(0) == '30 ± 10'
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
  assert results.find({'value': 0.77}).percent() == '77.0'
  assert results.find({'value': (0.7763, 0.0023)}).percent(2) == '77.63 ± 0.23'


@pytest.mark.parametrize(
  ('spec', 'message'),
  [
    ({'runs': 'cars'}, 'must have runs and metric'),
    ({'runs': 'cars', 'metric': 'a'}, "'cars' matches none of the runs: cars_"),
    ({'value': 1.0, 'metric': 'a'}, 'must have runs and metric'),
    ({'runs': 'shots', 'metric': 'a', 'beste': 'b'}, 'may have best'),
  ],
)
def test_specs_that_nothing_can_fill(spec, message, results):
  with pytest.raises(ValueError, match=message):
    results.check(spec)

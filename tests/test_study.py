"""Studies: which runs are run, in which order, and the table they make."""

import json

import jax
import ml_collections
import pytest

from vit_jax import study
from vit_jax.build import ConfigError
from vit_jax.metrics import Writer, read_records
from vit_jax.study import tabulate

CALLS = []


def fake_run(config, workdir):
  """Stands for train(): leaves two records of an accuracy."""
  CALLS.append(config.name)
  if config.get('fails'):
    raise RuntimeError('out of memory')
  writer = Writer(workdir)
  writer.write(1, {'test/accuracy': 0.0})
  writer.write(2, {'test/accuracy': config.value, 'test/loss': 1.0})
  writer.close()


@pytest.fixture(autouse=True)
def clean_slate():
  CALLS.clear()
  names = (
    'jax_compilation_cache_dir',
    'jax_persistent_cache_min_compile_time_secs',
  )
  before = {name: getattr(jax.config, name) for name in names}
  yield
  for name, value in before.items():
    jax.config.update(name, value)


def make_run(tmp_path, name, value, **more):
  (tmp_path / name).mkdir(parents=True, exist_ok=True)
  run = f'{__name__}.fake_run'
  return {'run': run, 'name': name, 'value': value, **more}


def make_config(tmp_path, **changes):
  runs = {
    'pretrain': make_run(tmp_path, 'pretrain', 0.5),
    'b_seed0': make_run(tmp_path, 'b_seed0', 0.25, path='{workdir}/pretrain'),
    'a_seed1': make_run(tmp_path, 'a_seed1', 0.75),
  }
  settings = {
    'title': 'Accuracy',
    'runs': runs,
    'order': ('pretrain', 'b_seed0', 'a_seed1'),
    'cells': (
      cell('transfer', '5 shots', r'._seed\d'),
      cell('pre-training', '5 shots', 'pretrain'),
      cell('pre-training', 'all', 'pretrain'),
    ),
  }
  return ml_collections.ConfigDict(settings | changes)


def cell(row, column, runs, metric='test/accuracy'):
  return {'row': row, 'column': column, 'runs': runs, 'metric': metric}


def test_runs_in_order_and_reports(tmp_path, capsys):
  panels = [
    {'title': 't', 'ylabel': 'y', 'lines': {'a': ['.*', 'test/accuracy']}}
  ]
  config = make_config(tmp_path, figure={'panels': panels})
  table = study.study(config, str(tmp_path))
  assert CALLS == ['pretrain', 'b_seed0', 'a_seed1']
  assert list(table) == ['transfer', 'pre-training']
  # The last record of each run: 0.25 and 0.75.
  expected = {'mean': 0.5, 'std': 0.25, 'values': [0.25, 0.75]}
  assert table['transfer'] == {'5 shots': expected}
  assert json.loads((tmp_path / 'table.json').read_text()) == table
  assert (tmp_path / 'table.md').read_text() == (
    '# Accuracy\n\n'
    '| | 5 shots | all |\n'
    '|---|---|---|\n'
    '| transfer | 50.0 ± 25.0% |  |\n'
    '| pre-training | 50.0% | 50.0% |\n'
  )
  assert (tmp_path / 'curves.png').read_bytes().startswith(b'\x89PNG')
  shown = capsys.readouterr().out
  assert '2/3 b_seed0' in shown and '50.0 ± 25.0%' in shown
  assert f'Learning curves: {tmp_path}/curves.png' in shown


def test_done_runs_are_skipped_and_failed_ones_repeated(tmp_path):
  config = make_config(tmp_path)
  config.runs.b_seed0.fails = True
  with pytest.raises(RuntimeError, match='out of memory'):
    study.study(config, tmp_path)
  assert CALLS == ['pretrain', 'b_seed0']
  assert json.loads((tmp_path / 'pretrain' / 'done.json').read_text())
  CALLS.clear()
  del config.runs.b_seed0.fails
  assert study.study(config, tmp_path) is not None
  assert CALLS == ['b_seed0', 'a_seed1']
  CALLS.clear()
  assert study.study(config, tmp_path) is not None  # the report alone
  assert CALLS == []
  assert len(read_records(tmp_path / 'pretrain')) == 2


@pytest.mark.parametrize('number', [False, True])
def test_only_does_one_and_the_last_reports(number, tmp_path, capsys):
  order = ['pretrain', 'b_seed0', 'a_seed1']
  for i in (2, 0, 1):
    only = i if number else order[i]
    table = study.study(make_config(tmp_path, only=only), tmp_path)
    assert CALLS.pop() == order[i] and not CALLS
    assert (table is not None) == (i == 1)
  assert 'not done: pretrain, b_seed0' in capsys.readouterr().out


def test_workdir_is_filled_in(tmp_path, monkeypatch):
  seen = {}

  def spy(config, workdir):
    seen[config.name] = (config.get('path'), workdir)
    fake_run(config, workdir)

  monkeypatch.setattr(study, 'locate', lambda path: spy)
  config = make_config(tmp_path)
  study.study(config, tmp_path)
  assert seen['b_seed0'] == (f'{tmp_path}/pretrain', f'{tmp_path}/b_seed0')
  assert config.runs.b_seed0.path == '{workdir}/pretrain'  # unharmed


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'order': ('pretrain',)}, r"order=.* must name each of \['a_seed1'"),
    ({'only': 'pretrian'}, r"only='pretrian' is none of the runs.*1 b_seed0"),
    ({'only': 3}, r'only=3 is none of the runs'),
    (
      {'cells': [cell('r', 'c', 'seed')]},
      r"'seed' .* matches none of the runs",
    ),
    ({'titel': 'x'}, r"'titel' \(did you mean 'title'"),
  ],
)
def test_mistakes_are_found_before_the_first_run(changes, message, tmp_path):
  with pytest.raises(ConfigError, match=message):
    study.study(make_config(tmp_path, **changes), tmp_path)
  assert CALLS == []


def test_a_cell_without_a_value():
  records = {'a': [{'step': 1, 'test/accuracy': 0.5}], 'b': []}
  with pytest.raises(ConfigError, match=r'No run has a value for .*val/acc'):
    tabulate([cell('r', 'c', '.*', 'val/accuracy')], records)
  # Whole names count, and a metric may have several values in a run.
  records['ab'] = [{'step': 1, 'k_seed0': 0.1, 'k_seed1': 0.3, 'k_seed12': 1}]
  made = tabulate([cell('r', 'c', 'a.', r'k_seed\d')], records)
  assert made['r']['c']['values'] == [0.1, 0.3]
  assert made['r']['c']['mean'] == pytest.approx(0.2)
  assert made['r']['c']['std'] == pytest.approx(0.1)

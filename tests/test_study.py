"""Studies: which runs are run, in which order, on what they build."""

import dataclasses
import json

import ml_collections
import pytest

from vit_jax import config as configs
from vit_jax.runs import workdirs
from vit_jax.runs.monitor import NonFiniteError
from vit_jax.runs.records import Writer, read_records
from vit_jax.types import ACCURACY, UserError

CALLS = []
SEEN = {}


def fake_run(
  workdir,
  *,
  name,
  value,
  fails=False,
  diverges=False,
  provenance=None,
  dry_run=False,
  **others,
):
  """Stand in for train(): leave two records of an accuracy, and a later one."""
  CALLS.append(name)
  if dry_run:
    return
  SEEN[name] = {'workdir': workdir, 'provenance': provenance, **others}
  if fails:
    raise RuntimeError('out of memory')
  writer = Writer(workdir, kinds={'test/accuracy': ACCURACY})
  workdirs.record_start(workdir, workdirs.basis_of(provenance.entries))
  writer.write(1, {'test/accuracy': 0.0})
  writer.write(2, {'test/accuracy': value})
  writer.write(3, {'test/loss': 1.0})
  writer.close()
  if diverges:
    raise NonFiniteError('loss=nan in step 2')


def study(config, workdir, **supplied):
  """Do a study from its config, as main does it."""
  config = ml_collections.ConfigDict({**config, 'run': 'vit_jax.study.study'})
  return configs.run(config, workdir, **supplied)


@pytest.fixture(autouse=True)
def clean_slate():
  CALLS.clear()


def make_run(name, value, **more):
  return {'run': f'{__name__}.fake_run', 'name': name, 'value': value, **more}


def make_config(**changes):
  runs = {
    'pretrain': make_run('pretrain', 0.5),
    'b_seed0': make_run('b_seed0', 0.25, path='{workdir}/pretrain'),
    'a_seed1': make_run('a_seed1', 0.75),
  }
  settings = {
    'runs': runs,
    'order': ('pretrain', 'b_seed0', 'a_seed1'),
    'report': (
      table(
        cell('transfer', '5 shots', r'._seed\d'),
        cell('pre-training', '5 shots', 'pretrain'),
        cell('pre-training', 'all', 'pretrain'),
      ),
    ),
  }
  return ml_collections.ConfigDict(settings | changes)


def table(*cells):
  target = 'vit_jax.reports.table.Table'
  return {'target': target, 'title': 'Accuracy', 'cells': cells}


def cell(row, column, runs, metric='test/accuracy'):
  return {'row': row, 'column': column, 'runs': runs, 'metric': metric}


def test_runs_in_order_and_reports(tmp_path, capsys):
  panels = [
    {'title': 't', 'ylabel': 'y', 'lines': {'a': ['.*', 'test/accuracy']}}
  ]
  config = make_config()
  curves = {'target': 'vit_jax.reports.curves.Curves', 'panels': panels}
  config.report = (*config.report, curves)
  made, nothing = study(config, str(tmp_path))
  assert CALLS == ['pretrain', 'b_seed0', 'a_seed1']
  assert SEEN['b_seed0']['path'] == f'{tmp_path}/pretrain'
  assert SEEN['b_seed0']['workdir'] == f'{tmp_path}/b_seed0'
  assert config.runs.b_seed0.path == '{workdir}/pretrain'  # unharmed
  assert nothing is None
  assert list(made) == ['transfer', 'pre-training']
  # The last record of each run: 0.25 and 0.75.
  expected = {'mean': 0.5, 'std': 0.25, 'values': (0.25, 0.75)}
  assert made['transfer'] == {'5 shots': expected}
  read = json.loads((tmp_path / 'table.json').read_text())
  assert read['transfer']['5 shots']['values'] == [0.25, 0.75]
  assert (tmp_path / 'table.md').read_text() == (
    '# Accuracy\n\n'
    '|  | 5 shots (%) | all (%) |\n'
    '|---|---|---|\n'
    '| transfer | 50.0 ± 25.0 |  |\n'
    '| pre-training | 50.0 | 50.0 |\n'
  )
  assert (tmp_path / 'curves.png').read_bytes().startswith(b'\x89PNG')
  shown = capsys.readouterr().out
  assert '2/3 b_seed0' in shown and '50.0 ± 25.0' in shown
  assert f'Learning curves: {tmp_path}/curves.png' in shown


@dataclasses.dataclass
class Project:
  project: str


def test_runs_get_the_writers_and_the_presets_of_the_study(tmp_path):
  config = make_config()
  make = f'{__name__}.Project'
  config.runs.b_seed0.writers = {'x': {'target': make, 'project': 'own'}}
  config.writers = {'x': {'target': make, 'project': 'common'}}
  changed = {'runs.b_seed0.value': [0.5, 0.25], 'seed': [0, 1]}
  preset = {'config': 'configs/x.py', 'changed': changed}
  allowed = ['seed', 'runs.b_seed0.value']
  study(config, tmp_path, preset=preset, allow_changes=allowed)
  writers = [SEEN[name]['writers']['x'].project for name in CALLS]
  assert writers == ['common', 'own', 'common']
  assert SEEN['b_seed0']['provenance'].allow_changes == ['seed', 'value']
  got = SEEN['b_seed0']['provenance'].preset
  assert got['changed'] == {'value': [0.5, 0.25]}
  assert got['config'] == 'configs/x.py' and got['defaults']
  saved = json.loads((tmp_path / 'preset.json').read_text())
  assert saved['changed'] == changed
  shown = (tmp_path / 'report.html').read_text()
  assert 'runs.b_seed0.value' in shown and 'b_seed0' in shown


def test_done_runs_are_skipped_and_failed_ones_repeated(tmp_path, capsys):
  config = make_config()
  config.runs.b_seed0.fails = True
  with pytest.raises(RuntimeError, match='out of memory'):
    study(config, tmp_path)
  assert CALLS == ['pretrain', 'b_seed0']
  file = tmp_path / 'pretrain' / 'done.json'
  assert json.loads(file.read_text())['seconds'] < 3600
  file.write_text('{"seconds": 3600}')
  CALLS.clear()
  del config.runs.b_seed0.fails
  assert study(config, tmp_path) is not None
  assert CALLS == ['b_seed0', 'a_seed1']
  assert '1 done | study eta 2:00:00' in capsys.readouterr().out  # two to do
  CALLS.clear()
  assert study(config, tmp_path) is not None  # the report alone
  assert CALLS == []
  assert len(read_records(tmp_path / 'pretrain')) == 3
  for text in ('', '[]'):
    file.write_text(text)
    with pytest.raises(UserError, match=r'pretrain/done\.json'):
      study(config, tmp_path)


def test_a_member_does_one_run(tmp_path, capsys):
  members = {'2': 'a_seed1', 'pretrain': 'pretrain', 1: 'b_seed0'}
  for done, (member, name) in enumerate(members.items(), 1):
    made = study(make_config(), tmp_path, member=member)
    assert CALLS.pop() == name and not CALLS
    shown = capsys.readouterr().out
    assert (f'{done} of 3 runs are done' in shown) == (done < 3)
    if done == 1:  # the report is of what there is
      assert made[0]['transfer']['5 shots']['values'] == (0.75,)
      assert made[0]['pre-training'] == {}


@pytest.mark.parametrize(
  ('member', 'message'),
  [
    ('b_seed0', 'b_seed0 builds on .*pretrain'),
    ('pretrian', "'pretrian' .*1 b_seed0"),
    ('3', "'3' .*1 b_seed0"),
  ],
)
def test_members_that_cannot_be_done(member, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    study(make_config(), tmp_path, member=member)
  assert CALLS == []


def test_a_dry_run_plans_all_that_can_start_from_scratch(tmp_path, capsys):
  config = make_grid()
  more = {'init_from': {'path': '{workdir}/final'}, 'model': {}}
  config.runs.tuned = make_run('tuned', 0.1, **more)
  config.runs.taught = make_run('taught', 0.1, path='{workdir}/tuned')
  config.order = (*config.order, 'tuned', 'taught')
  assert study(config, tmp_path, dry_run=True) == []
  assert CALLS == ['dev_1', 'dev_2', 'dev_3', 'dev_4', 'final', 'tuned']
  assert not list(tmp_path.glob('*/metrics.jsonl'))
  shown = capsys.readouterr().out
  assert 'tuned without final' in shown and 'taught: needs tuned' in shown


def make_grid(**changes):
  """Three rates on dev, and a final run that takes the best of them."""
  runs = {
    f'dev_{i}': make_run(
      f'dev_{i}', value, schedule={'lr': i / 10, 'decay': 'cosine'}
    )
    for i, value in ((1, 0.5), (2, 0.7), (3, 0.7), (4, 0.9))
  }
  runs['dev_4']['diverges'] = True
  best = {'runs': 'dev_.*', 'metric': 'test/accuracy', 'take': ('schedule.lr',)}
  final = {'schedule': {'lr': 0.0, 'decay': 'linear'}, 'best_of': best}
  runs['final'] = make_run('final', 0.8, **final)
  settings = {'runs': runs, 'order': tuple(runs)}
  settings['report'] = (table(cell('r', 'c', 'dev_.*|final')),)
  return ml_collections.ConfigDict(settings | changes)


def test_the_best_of_a_grid_is_taken(tmp_path, capsys):
  """The first of equals; one that diverged has lost, and is not repeated."""
  (made,) = study(make_grid(), tmp_path)
  assert SEEN['final']['schedule'] == {'lr': 0.2, 'decay': 'linear'}
  assert 'best_of' not in SEEN['final']['provenance'].config
  assert made['r']['c']['values'] == (0.5, 0.7, 0.7, 0.8)
  shown = capsys.readouterr().out
  assert 'schedule.lr=0.2 from dev_2' in shown and 'Diverged: dev_4' in shown
  CALLS.clear()
  study(make_grid(), tmp_path)
  assert CALLS == []


def test_missing_data_of_any_run_is_found_before_the_first(tmp_path):
  config = make_config()
  for name, data in (('b_seed0', 'cifar10'), ('a_seed1', 'dtd')):
    target = {'target': 'vit_jax.data.sources.tfds.Tfds', 'name': data}
    target |= {'split': 'train', 'data_dir': str(tmp_path)}
    config.runs[name].others = {'test': {'data': {'source': target}}}
  with pytest.raises(ValueError, match='cannot be opened') as info:
    study(config, tmp_path)
  assert CALLS == []
  for data in ('cifar10', 'dtd'):
    assert f"tfds.builder('{data}', data_dir='{tmp_path}'" in str(info.value)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'order': ('pretrain',)}, 'runs.[ab]_seed.: there is no such run'),
    ({'order': ('pretran', 'b_seed0', 'a_seed1')}, 'did you mean .pretran'),
    ({'order': ('b_seed0', 'pretrain', 'a_seed1')}, 'b_seed0 builds on pretra'),
    (
      {'report': [table(cell('r', 'c', 'seed'))]},
      r"'seed' matches none of the runs",
    ),
    ({'report': [{'target': 'vit_jax.reports.table.Tabel'}]}, 'mean .Table'),
    ({'reprot': 'x'}, r"'reprot' \(did you mean 'report'"),
  ],
)
def test_mistakes_are_found_before_the_first_run(changes, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    study(make_config(**changes), tmp_path)
  assert CALLS == []


@pytest.mark.parametrize(
  ('key', 'value', 'message'),
  [
    ('runs', 'deev.*', "best_of=.*'deev.*must have metric"),
    ('tak', (), 'best_of={.* must have metric, take'),
    ('metric', 'dev/loss', 'no finite dev/loss'),
  ],
)
def test_mistakes_of_best_of(key, value, message, tmp_path):
  config = make_grid()
  config.runs.final.best_of[key] = value
  with pytest.raises(ValueError, match=message):
    study(config, tmp_path)


def test_checkpoints_that_are_not_wanted_are_removed(tmp_path):
  for name in ('pretrain', 'b_seed0', 'a_seed1'):
    (tmp_path / name / 'checkpoints' / '2').mkdir(parents=True)
  study(make_config(discard='._seed.'), tmp_path)
  assert (tmp_path / 'pretrain' / 'checkpoints' / '2').exists()
  for name in ('b_seed0', 'a_seed1'):
    assert not (tmp_path / name / 'checkpoints').exists()
    assert (tmp_path / name / 'metrics.jsonl').exists()


def test_missing_weights_are_reported_before_the_first_run(tmp_path):
  config = make_config(shared={'weights': None})
  config.runs.a_seed1.init_from = {'path': None}
  with pytest.raises(ValueError, match=r'a_seed1 starts .*shared\.weights='):
    study(config, tmp_path)
  assert CALLS == []

"""Which changes are refused when a run resumes, and which are not."""

import json
import shutil

import ml_collections
import numpy as np
import packed
import pytest
import tiny

from vit_jax import config as configs
from vit_jax import study
from vit_jax.runs import workdirs
from vit_jax.runs.workdirs import ChangedRunError
from vit_jax.types import UserError

DIGITS = {'target': 'vit_jax.data.sources.digits.Digits', 'split': 'train'}


def config_of(**changed):
  config = ml_collections.ConfigDict(
    {
      'run': 'vit_jax.train.train',
      'total_steps': 4,
      'model': {
        'target': 'vit_jax.models.vit.VisionTransformer',
        **{'width': 32, 'depth': 1, 'mlp_dim': 32, 'num_heads': 2},
        'embedding': {'patch_size': 4},
      },
      'objective': {'target': 'vit_jax.objectives.classification.softmax_xent'},
      'optimizer': {'target': 'optax.adamw', 'weight_decay': 0.1},
      'schedule': {'lr': 0.1},
      'data': {'source': DIGITS, 'batch_size': 8},
      'evals': {
        'val': {
          'target': 'vit_jax.evals.classification.Classification',
          'data': {'source': DIGITS | {'split': 'test'}, 'batch_size': 8},
        }
      },
    }
  )
  configs.override(config, [f'{k}={v}' for k, v in changed.items()])
  return config


def basis(sources=None, **changed):
  call = configs.plan_run(config_of(**changed))
  return workdirs.basis_of(configs.entries(call), sources)


def begun(workdir, now, step=5):
  """Make the workdir of a run with a checkpoint."""
  (workdir / 'checkpoints' / str(step)).mkdir(parents=True)
  workdirs.record_start(workdir, now)


@pytest.mark.parametrize(
  'changed, text',
  [
    ({'seed': 1}, 'seed: 0 -> 1'),
    ({'data.batch_size': 16}, 'data.batch_size: 8 -> 16'),
    ({'schedule.lr': 0.2}, 'schedule.lr: 0.1 -> 0.2'),
    ({'model.dropout': 0.1}, 'model.dropout: 0.0 -> 0.1'),
    ({'data.source.split': 'test'}, "data.source.split: 'train' -> 'test'"),
    ({'ema.decay': 0.9}, "ema.decay: 'not set' -> 0.9"),
    ({'accum_steps': 2}, 'accum_steps: 1 -> 2'),
    ({'evals.val.data.labels': False}, 'data.labels: True -> False'),
    ({'evals.val.loss': 'sigmoid'}, "val.loss: 'softmax' -> 'sigmoid'"),
    ({'optimizer.layer_decay.rate': 0.5}, "layer_decay.rate: 'not set' -> 0.5"),
  ],
)
def test_a_change_of_results_is_refused(changed, text, tmp_path):
  begun(tmp_path, basis())
  (key,) = (key.removesuffix('.rate') for key in changed)
  files = {p: p.read_text() for p in tmp_path.glob('*.json')}
  with pytest.raises(ChangedRunError) as refused:
    workdirs.check_changes(tmp_path, basis(**changed))
  assert text in str(refused.value)
  assert f'--allow_changes={key.split(".")[0]}' in str(refused.value)
  assert all(path.read_text() == was for path, was in files.items())
  assert workdirs.check_changes(tmp_path, basis(**changed), [key.split('.')[0]])
  with pytest.raises(ChangedRunError):
    workdirs.check_changes(tmp_path, basis(**changed), ['s', f'{key}.x'])


@pytest.mark.parametrize(
  'changed',
  [
    {'logging.every_steps': 1},
    {'data.num_workers': 4, 'data.on_error': 'skip'},
    {'mesh.fsdp': 8, 'checkpoints.keep_last': 3, 'evals.val.every_steps': 2},
    {'checkpoints.best_metric': 'val/accuracy', 'checkpoints.every_steps': 2},
    {'model.remat': 'full', 'logging.profile': '2:3'},
    {'evals.val.data.batch_size': 4},
    {
      'evals.new.target': 'vit_jax.evals.classification.Classification',
      'evals.new.data.source': DIGITS,
      'evals.new.data.batch_size': 8,
    },
    # Defaults that are written out.
    {'seed': 0, 'model.dropout': 0.0, 'evals.val.loss': 'softmax'},
    {'model.posemb.target': 'vit_jax.models.posemb.Learned'},
    {'preprocess.mean': 127.5, 'optimizer.freeze': []},
  ],
)
def test_a_harmless_change_passes(changed, tmp_path):
  begun(tmp_path, basis())
  assert workdirs.check_changes(tmp_path, basis(**changed)) == []


def test_a_run_without_a_checkpoint_may_change(tmp_path):
  workdirs.record_start(tmp_path, basis())
  assert workdirs.check_changes(tmp_path, basis(seed=1)) == []


@pytest.mark.parametrize(
  'content', ['{}', '', '[]', '{"config": {}, "data": {}}']
)
def test_a_damaged_record_of_the_start(content, tmp_path, capsys):
  """A run does not resume unchecked, unless the user removes the record."""
  begun(tmp_path, basis())
  file = tmp_path / 'resume.json'
  file.write_text(content)
  with pytest.raises(UserError, match=f'{file} (is damaged|cannot be|has)'):
    workdirs.check_changes(tmp_path, basis(seed=1))
  file.unlink()
  assert workdirs.check_changes(tmp_path, basis(seed=1)) == []
  assert f'{file} is missing: ' in capsys.readouterr().out


def test_changes_are_recorded(tmp_path):
  begun(tmp_path, basis())
  for seed in (1, 2):
    now = basis(seed=seed)
    found = workdirs.check_changes(tmp_path, now, ['seed'])
    workdirs.record_start(tmp_path, now, found, 5)
    assert workdirs.check_changes(tmp_path, now) == []
  lines = (tmp_path / 'changes.jsonl').read_text().splitlines()
  found = [json.loads(line) for line in lines]
  assert [(x['key'], x['old'], x['new'], x['step']) for x in found] == [
    ('seed', 0, 1, 5),
    ('seed', 1, 2, 5),
  ]


# Sources.


def folder_of(path):
  files = {}
  for name, count in {'daisy': 3, 'roses': 2}.items():
    for i in range(count):
      image = np.full((4, 4, 3), 9 * i, np.uint8)
      files[f'{name}/{i}.png'] = tiny.encode(image)
  return packed.write_folder(path, files)


def basis_of_folder(path):
  """Return the Basis of a run that trains and evaluates on a folder."""
  source = {'target': 'vit_jax.data.sources.folder.Folder', 'path': str(path)}
  config = config_of()
  config.data.source = config.evals.val.data.source = source
  call = configs.plan_run(config)
  arguments = {k: configs.make(v) for k, v in call.kwargs.items()}
  return workdirs.basis_of(configs.entries(call), arguments)


@pytest.mark.parametrize(
  ('change', 'key'),
  [
    (lambda x: shutil.rmtree(x / 'roses'), 'num_examples'),
    (lambda x: (x / 'daisy' / '1.png').unlink(), 'num_examples'),
    (lambda x: (x / 'roses').rename(x / 'rosa'), 'classes'),
    (lambda x: shutil.copy(x / 'roses/1.png', x / 'daisy/0.png'), 'examples'),
    (
      lambda x: (x / 'roses/1.png').rename(x / 'daisy/9.png'),
      r"rows: 'as before' -> '1 images added, 1 removed, 0 labels changed'",
    ),
    (lambda x: x.rename(x.parent / 'moved'), None),
  ],
)
def test_data_that_has_changed(change, key, tmp_path):
  """Another place for the same files is not a change."""
  folder, workdir = folder_of(tmp_path / 'images'), tmp_path / 'run'
  now = basis_of_folder(folder)
  assert {key.rpartition('.')[0] for key in now['data']} == {
    *('data.source', 'evals.val.data.source')
  }
  begun(workdir, now)
  change(folder)
  moved = tmp_path / 'moved'
  now = basis_of_folder(moved if moved.exists() else folder)
  if key is None:
    assert workdirs.check_changes(workdir, now) == []
    return
  with pytest.raises(ChangedRunError, match=f'data.source.{key}') as refused:
    workdirs.check_changes(workdir, now, ['evals'])
  assert '--allow_changes=evals,data.source' in str(refused.value)
  assert workdirs.check_changes(workdir, now, ['data', 'evals'])


def test_statistics_are_kept_from_the_first_checkpoint_on(tmp_path):
  """Before, data may change, and what is computed from them with it."""
  workdirs.write(tmp_path, workdirs.STATISTICS, {'moments': [[1.0, 2.0]]})
  assert workdirs.statistics(tmp_path) == {}
  (tmp_path / 'checkpoints/2').mkdir(parents=True)
  assert workdirs.statistics(tmp_path) == {'moments': [[1.0, 2.0]]}


# Hosts.


def test_hosts_may_differ_in_what_is_of_the_machine():
  def facts(**changed):
    return workdirs.facts(configs.plan_run(config_of(**changed)), {})

  same = {'data.num_workers': 4, 'data.prefetch': 3}
  assert facts() == facts(**same)
  assert facts() != facts(**{'mesh.fsdp': 2})
  assert facts() != facts(seed=1)
  assert {'version of jax', 'code of vit_jax'} <= facts().keys()


# Studies.


def do_study(workdir, allow_changes=(), **changed):
  runs = {'a': config_of(**changed), 'b': config_of()}
  runs = {name: ml_collections.ConfigDict(run) for name, run in runs.items()}
  provenance = configs.Provenance(allow_changes=allow_changes)
  study.study(workdir, runs=runs, dry_run=True, provenance=provenance)


def test_a_run_of_a_study_that_is_done(tmp_path):
  (tmp_path / 'a').mkdir()
  workdirs.record_start(tmp_path / 'a', basis())
  (tmp_path / 'a' / study.DONE).write_text('{"seconds": 1}')
  do_study(tmp_path)
  do_study(tmp_path, **{'logging.every_steps': 7})
  with pytest.raises(ChangedRunError) as refused:
    do_study(tmp_path, seed=1)
  assert f'{tmp_path}/a was started' in str(refused.value)
  assert 'seed: 0 -> 1' in str(refused.value)
  assert '--allow_changes=seed' in str(refused.value)
  for key in ('seed', 'runs.a.seed', 'runs.a', 'runs'):
    do_study(tmp_path, [key], seed=1)
  with pytest.raises(ChangedRunError):
    do_study(tmp_path, ['runs.b.seed', 'runs.a.data'], seed=1)


@pytest.mark.parametrize('module', ['outside_module', 'outside_package.losses'])
def test_code_from_outside_is_part_of_a_run(module, tmp_path, monkeypatch):
  """A run that resumes, hosts, and runs of a study that are done compare it."""
  file = tmp_path / f'{module.replace(".", "/")}.py'
  file.parent.mkdir(exist_ok=True)
  file.write_text('def loss(model, *, preprocess): ...\n')
  monkeypatch.syspath_prepend(tmp_path)
  call = configs.plan_run(config_of(**{'objective.target': f'{module}.loss'}))
  entries, facts = [*configs.entries(call)], workdirs.facts(call, {})
  now = workdirs.basis_of(entries)
  begun(tmp_path / 'a', now)
  (tmp_path / 'a' / study.DONE).write_text('{"seconds": 1}')
  assert workdirs.check_changes(tmp_path / 'a', now) == []
  workdirs.record_config(tmp_path, configs.Provenance(entries=entries))
  recorded = workdirs.read(tmp_path, 'environment.json')['code']
  assert recorded == {'objective.code': now['config']['objective.code']}

  file.write_text('def loss(model, *, preprocess): return 1\n')
  workdirs.code_of.cache_clear()  # as in another process
  others = {k for k, x in workdirs.facts(call, {}).items() if x != facts[k]}
  assert others == {'config.objective.code'}
  with pytest.raises(ChangedRunError, match=r'=objective\.code'):
    workdirs.check_changes(tmp_path / 'a', workdirs.basis_of(entries))
  with pytest.raises(ChangedRunError, match=r'objective\.code: '):
    do_study(tmp_path, **{'objective.target': f'{module}.loss'})

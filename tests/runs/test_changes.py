"""Which changes are refused when a run resumes, and which are not."""

import dataclasses
import json
import pathlib
import shutil

import ml_collections
import numpy as np
import pytest

from vit_jax import config as configs
from vit_jax import study
from vit_jax.config import ConfigError
from vit_jax.data import fingerprints
from vit_jax.data.embedded.digits import Digits
from vit_jax.data.folder import Folder
from vit_jax.data.pipeline import Data, Unlabelled
from vit_jax.runs import changes
from vit_jax.runs.changes import ChangedRunError

OLD_RUN = pathlib.Path(__file__).parent / 'golden' / 'old_run'
DIGITS = {'target': 'vit_jax.data.embedded.digits.Digits', 'split': 'train'}


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


def basis(workdir='run', sources=None, **changed):
  call = configs.plan_run(config_of(**changed))
  return changes.basis_of(workdir, configs.entries(call), sources)


def begun(workdir, now, step=5):
  """Make the workdir of a run with a checkpoint."""
  (workdir / 'checkpoints' / str(step)).mkdir(parents=True)
  (workdir / 'config.json').write_text('{"seed": 0}')
  changes.record(workdir, now, (), None)


def test_every_harmless_argument_exists():
  for name in changes.HARMLESS:
    function, _, argument = name.rpartition('.')
    found = configs.locate(function)
    assert argument in configs.parameters_of(found), name
    assert configs.owner_of(found, argument) == name


def test_a_run_on_a_folder_resumes_where_any_source_is_named():
  old = 'vit_jax.data.folder.Folder'
  new = 'vit_jax.data.sources.open_source'
  before = changes.Basis({'data.source.target': old}, data={'data.source': {}})
  now = changes.Basis({'data.source.target': new}, data={'data.source': {}})
  assert not changes.compare(before, now)
  other = changes.Basis({'data.source.target': old}, data={'data.source': {}})
  assert changes.compare(now, other)
  gone = dataclasses.replace(now, data={'data.source': {'num_examples': 3}})
  before = dataclasses.replace(
    before, data={'data.source': {'num_examples': 4}}
  )
  assert [x.key for x in changes.compare(before, gone)] == ['data.source']


@pytest.mark.parametrize(
  'changed, text',
  [
    ({'seed': 1}, 'seed: 0 -> 1'),
    ({'data.batch_size': 16}, 'data.batch_size: 8 -> 16'),
    ({'schedule.lr': 0.2}, 'schedule.lr: 0.1 -> 0.2'),
    ({'model.dropout': 0.1}, 'model.dropout: 0.0 -> 0.1'),
    ({'data.source.split': 'test'}, "data.source.split: 'train' -> 'test'"),
    ({'ema_decay': 0.9}, 'ema_decay: None -> 0.9'),
    ({'accum_steps': 2}, 'accum_steps: 1 -> 2'),
    ({'evals.val.data.labels': False}, 'data.labels: True -> False'),
    ({'evals.val.loss': 'sigmoid'}, "val.loss: 'softmax' -> 'sigmoid'"),
    ({'optimizer.layer_decay.rate': 0.5}, 'layer_decay.rate: not set -> 0.5'),
  ],
)
def test_a_change_of_results_is_refused(changed, text, tmp_path):
  begun(tmp_path, basis())
  (key,) = (key.removesuffix('.rate') for key in changed)
  files = {p: p.read_text() for p in tmp_path.glob('*.json')}
  with pytest.raises(ChangedRunError) as refused:
    changes.check(tmp_path, basis(**changed))
  assert text in str(refused.value)
  assert f'--allow_changes={key}' in str(refused.value)
  assert all(path.read_text() == was for path, was in files.items())
  for part in (key, key.split('.')[0]):
    assert changes.check(tmp_path, basis(**changed), [part])


@pytest.mark.parametrize(
  'changed',
  [
    {'log_every_steps': 1, 'log_every_epochs': None},
    {'data.num_workers': 4, 'data.on_error': 'skip'},
    {'mesh.fsdp': 8, 'checkpoint.keep_last': 3, 'evals.val.every_steps': 2},
    {'checkpoint.best_metric': 'val/accuracy', 'checkpoint.every_steps': 2},
    {'model.remat': 'full', 'profile': '2:3', 'on_nan': 'rollback'},
    # Defaults that are written out.
    {'seed': 0, 'model.dropout': 0.0, 'evals.val.loss': 'softmax'},
    {'model.posemb.target': 'vit_jax.models.posemb.Learned'},
    {'preprocess.mean': 127.5, 'optimizer.freeze': []},
  ],
)
def test_a_harmless_change_passes(changed, tmp_path):
  begun(tmp_path, basis())
  assert changes.check(tmp_path, basis(**changed)) == []


def test_arguments_of_other_versions_of_the_code():
  now = basis()
  older = {k: v for k, v in now.config.items() if k != 'model.stochastic_depth'}
  newer = {**now.config, 'model.fancy': 1}
  assert not changes.compare(dataclasses.replace(now, config=older), now)
  before = dataclasses.replace(
    now, config=newer, defaults=now.defaults | {'model.fancy'}
  )
  assert not changes.compare(before, now)
  # It was set, or its default is another one today.
  assert changes.compare(dataclasses.replace(now, config=newer), now)
  other = {**now.config, 'model.dropout': 0.1}
  assert changes.compare(dataclasses.replace(now, config=other), now)


def test_a_run_without_a_checkpoint_may_change(tmp_path):
  changes.record(tmp_path, basis(), (), None)
  assert changes.check(tmp_path, basis(seed=1)) == []


def test_unknown_keys_are_errors(tmp_path):
  message = r"no key 'schedule.l' \(did you mean 'schedule.lr'\?\)"
  with pytest.raises(ConfigError, match=message):
    changes.check(tmp_path, basis(), ['schedule.l'])


def test_changes_are_recorded_and_the_old_config_is_kept(tmp_path):
  begun(tmp_path, basis())
  for seed in (1, 2):
    now = basis(seed=seed)
    found = changes.check(tmp_path, now, ['seed'])
    changes.record(tmp_path, now, found, 5)
    assert changes.check(tmp_path, now) == []
  lines = (tmp_path / 'changes.jsonl').read_text().splitlines()
  found = [json.loads(line) for line in lines]
  assert [(x['key'], x['old'], x['new'], x['step']) for x in found] == [
    ('seed', 0, 1, 5),
    ('seed', 1, 2, 5),
  ]
  assert (tmp_path / 'config_until_5.json').read_text() == '{"seed": 0}'


def test_a_workdir_of_older_code(tmp_path):
  """Its config.json is compared if it still fits the code."""
  begun(tmp_path, basis())
  (tmp_path / 'resume.json').unlink()
  (tmp_path / 'config.json').write_text(config_of().to_json())
  assert changes.check(tmp_path, basis(sources={'data': data()})) == []
  with pytest.raises(ChangedRunError, match='seed: 0 -> 1'):
    changes.check(tmp_path, basis(seed=1))
  shutil.copytree(OLD_RUN, tmp_path / 'old')
  assert changes.check(tmp_path / 'old', basis()) == []


@pytest.mark.parametrize('balanced', [True, False])
def test_data_balanced_of_older_code_is_an_order(tmp_path, balanced):
  order = {'data.order.target': 'vit_jax.data.sampling.Balanced'}
  now, other = basis(**(order if balanced else {})), basis()
  begun(tmp_path, basis())
  saved = json.loads((tmp_path / 'resume.json').read_text())
  del saved['config']['data.order.target']
  saved['config'] |= {'data.balanced': balanced}
  saved['defaults'].remove('data.order.target')
  saved['defaults'] += [] if balanced else ['data.balanced']
  (tmp_path / 'resume.json').write_text(json.dumps(saved))
  assert changes.check(tmp_path, now) == []
  if balanced:
    with pytest.raises(ChangedRunError, match=r'data\.order\.target'):
      changes.check(tmp_path, other)
  # A workdir that has only config.json.
  (tmp_path / 'resume.json').unlink()
  config = json.loads(config_of().to_json())
  config['data']['balanced'] = balanced
  (tmp_path / 'config.json').write_text(json.dumps(config))
  assert changes.check(tmp_path, now) == []
  if balanced:
    with pytest.raises(ChangedRunError, match=r'data\.order\.target'):
      changes.check(tmp_path, other)


def test_runs_that_are_moved_together(tmp_path):
  before, now = (
    basis(tmp_path / x / 'b', **{'init_from.path': str(tmp_path / x / 'a')})
    for x in ('one', 'other')
  )
  assert not changes.compare(before, now)


# Sources.


def data(source=None):
  return Data(source or Digits(split='train'), 8)


def folder_of(path):
  for name, count in {'daisy': 3, 'roses': 2, 'tulips': 4}.items():
    (path / name).mkdir(parents=True)
    for i in range(count):
      (path / name / f'{i}.png').write_bytes(bytes(10 + i))
  return path


def changed_by(change, path):
  before = fingerprints.fingerprint(Folder(path))
  change(path)
  now = fingerprints.fingerprint(Folder(path))
  return '; '.join(
    fingerprints.differences(json.loads(json.dumps(before)), now)
  )


@pytest.mark.parametrize(
  'change, text',
  [
    (
      lambda x: shutil.rmtree(x / 'roses'),
      "class 'roses' is missing; 2 examples fewer (9 -> 7)",
    ),
    (
      lambda x: (x / 'daisy' / '1.png').unlink(),
      "1 example fewer (9 -> 8); class 'daisy' has 1 example fewer",
    ),
    (lambda x: (x / 'roses').rename(x / 'rosa'), "class 'rosa' is new"),
    (
      lambda x: (x / 'roses' / '0.png').write_bytes(b'other'),
      'files of the same names have other sizes',
    ),
    (
      lambda x: (x / 'roses' / '0.png').rename(x / 'roses' / '7.png'),
      'other files',
    ),
    (lambda x: (x / 'roses' / '0.png').touch(), ''),
  ],
)
def test_a_folder_that_has_changed(change, text, tmp_path):
  found = changed_by(change, folder_of(tmp_path / 'images'))
  assert all(part in found for part in text.split('; '))
  assert bool(found) == bool(text)


def test_a_folder_that_was_moved(tmp_path):
  one, other = (folder_of(tmp_path / x) for x in ('one', 'other'))
  one, other = (fingerprints.fingerprint(Folder(x)) for x in (one, other))
  assert one == other


class Own:
  """A source without a method of its own for fingerprints."""

  def __init__(self, files, classes=('a', 'b'), weights=1):
    self.files, self.class_names = files, classes
    self.weights = np.full(3, weights)
    self._cache = object()

  def __len__(self):
    return len(self.files)

  def __getitem__(self, index):
    raise AssertionError('no example is read')


@pytest.mark.parametrize(
  'now, text',
  [
    (Own(['x', 'y']), ''),
    (Own(['x']), '1 example fewer'),
    (Own(['x', 'z']), "files ['x', 'y'] -> ['x', 'z']"),
    (Own(['x', 'y'], ('a', 'c')), "class 'b' is missing; class 'c' is new"),
    (Own(['x', 'y'], ('b', 'a')), 'the classes are in another order'),
    (Own(['x', 'y'], weights=2), 'weights'),
  ],
)
@pytest.mark.parametrize('wrap', [lambda x: x, Unlabelled])
def test_a_source_without_a_method(now, text, wrap):
  before, now = (
    fingerprints.fingerprint(wrap(x)) for x in (Own(['x', 'y']), now)
  )
  found = fingerprints.differences(before, now)
  assert bool(found) == bool(text)
  assert all(part in str(found) for part in text.split('; ')) or "'" in text


def test_sources_of_evaluators_are_found(tmp_path):
  call = configs.plan_run(config_of())
  arguments = {k: configs.make(v) for k, v in call.kwargs.items()}
  now = changes.basis_of(tmp_path, configs.entries(call), arguments)
  assert sorted(now.data) == ['data.source', 'evals.val.data.source']
  begun(tmp_path, now)
  arguments['data'] = data(Digits(split='train', examples_per_class=5))
  now = changes.basis_of(tmp_path, configs.entries(call), arguments)
  with pytest.raises(ChangedRunError, match='979 examples fewer'):
    changes.check(tmp_path, now, ['evals'])
  (found,) = changes.check(tmp_path, now, ['data'])
  assert found.key == 'data.source'


# Studies.


def do_study(workdir, allow_changes=(), **changed):
  runs = {'a': config_of(**changed), 'b': config_of()}
  runs = {name: ml_collections.ConfigDict(run) for name, run in runs.items()}
  study.study(
    workdir, runs=runs, dry_run=True, allow_changes=list(allow_changes)
  )


def test_a_run_of_a_study_that_is_done(tmp_path):
  (tmp_path / 'a').mkdir()
  changes.record(tmp_path / 'a', basis(tmp_path / 'a'), (), None)
  (tmp_path / 'a' / study.DONE).write_text('{"seconds": 1}')
  do_study(tmp_path)
  do_study(tmp_path, log_every_steps=7)
  with pytest.raises(ChangedRunError) as refused:
    do_study(tmp_path, seed=1)
  assert 'runs.a.seed: 0 -> 1' in str(refused.value)
  assert '--allow_changes=runs.a.seed' in str(refused.value)
  for key in ('seed', 'runs.a.seed', 'runs.a', 'runs'):
    do_study(tmp_path, [key], seed=1)
  with pytest.raises(ChangedRunError):
    do_study(tmp_path, ['runs.b.seed', 'runs.a.data'], seed=1)
  with pytest.raises(ConfigError, match=r"did you mean 'runs\.a\.seed'"):
    do_study(tmp_path, ['runs.a.sed'], seed=1)

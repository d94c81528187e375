"""VTAB-1k as a study: its runs, its table, and the published numbers."""

import re
import sys

import jax
import numpy as np
import pytest
from test_configs import ROOT, load_config, load_module
from test_configs_run import compile_fast  # noqa: F401

from vit_jax import config as configs
from vit_jax import study, tree
from vit_jax.data import vtab
from vit_jax.models import names
from vit_jax.runs.metrics import Writer, read_records
from vit_jax.weights import formats
from vit_jax.weights.bundle import Weights

sys.path.append(str(ROOT / 'tests' / 'data'))
import made_up

COLUMNS = ['ours', 'H/14 JFT', 'L/16 JFT', 'L/16 I21k']
# Means of the groups and of all tasks, of the published columns.
MEANS = {
  'Natural (7)': (86.69, 85.56, 83.27),
  'Specialized (4)': (87.00, 86.72, 84.65),
  'Structured (8)': (65.03, 62.96, 57.50),
  'Mean of 19': (77.63, 76.28, 72.72),
}


def write_weights(path):
  """Write weights of an untrained tiny model for images of 28 pixels."""
  model = names.create('ViT-mu/2', num_classes=3)
  images = jax.ShapeDtypeStruct((1, 28, 28, 3), np.float32)
  shapes = jax.eval_shape(model.init, jax.random.key(0), images)['params']
  rng = np.random.default_rng(0)
  weights = Weights(
    model=model,
    params={
      name: 0.1 * rng.normal(size=x.shape).astype(x.dtype)
      for name, x in tree.flatten(shapes).items()
    },
    image_shape=(28, 28, 3),
  )
  formats.write(weights, path, 'npz')
  return str(path)


run = configs.run  # also when `fake_runs` has replaced it


@pytest.fixture
def fake_runs(monkeypatch):
  """Replace runs: they only record their config and an accuracy."""
  seen = {}

  def fake(config, workdir, **options):
    name = workdir.rpartition('/')[2]
    seen[name] = config.to_dict()
    (evaluator,) = config.evals
    accuracy = len(name.split('_seed')[0]) / 100 + 0.1 * config.get('seed', 0)
    if evaluator == 'val':
      lr, steps = config.schedule.lr, config.total_steps
      accuracy = (lr == 0.003) + 0.1 * (steps == 2500)
    study.epath.Path(workdir).mkdir()
    writer = Writer(workdir)
    writer.write(1, {f'{evaluator}/accuracy': accuracy})
    writer.close()

  monkeypatch.setattr(configs, 'run', fake)
  monkeypatch.setattr(study, '_check_sources', lambda *args: None)
  monkeypatch.setattr(study.eta, 'costs', lambda runs: None)
  monkeypatch.setattr(study.formats, 'find', lambda path: None)
  return seen


def test_published_numbers():
  published = load_module('published')
  for (pretrained, model), numbers in published.TABLE_9.items():
    assert sorted(numbers) == sorted(vtab.TASKS)
    column = f'{model} {"JFT" if pretrained == "jft" else "I21k"}'
    for row, means in MEANS.items():
      group = row.split(' ')[0].lower()
      found = [
        value
        for task, value in numbers.items()
        if group in ('mean', vtab.TASKS[task].group)
      ]
      expected = means[COLUMNS.index(column) - 1]
      assert np.mean(found) == pytest.approx(expected, abs=0.011)
      if group == 'mean':
        mean, std = published.TABLE_2[pretrained, model]['vtab']
        assert mean == expected and 0 < std < 1


def test_the_protocol():
  config = load_config('vtab', 'L/16')
  assert len(config.runs) == len(config.order) == 57
  config.shared.weights, config.shared.data_dir = 'weights.npz', '/data'
  for task in vtab.TASKS:
    runs = [config.runs[f'{task}_seed{seed}'] for seed in (0, 1, 2)]
    assert [run.seed for run in runs] == [0, 1, 2]
    for run in runs:
      assert run.total_steps == 2500 and run.data.batch_size == 512
      schedule = run.schedule.to_dict()
      expected = {'lr': 0.01, 'decay': 'cosine', 'warmup_steps': 200}
      assert schedule == expected and 'best_of' not in run
      assert run.optimizer.clip_norm == 1 and run.optimizer.momentum == 0.9
      assert 'weight_decay' not in run.optimizer
      fields = {'data_dir': '/data'}
      source = vtab.settings(task, 'train800val200', **fields)
      assert run.data.source.to_dict() == source
      test = run.evals.test.data
      assert test.source.to_dict() == vtab.settings(task, 'test', **fields)
      assert test.transforms[-1]['size'] == 384
      assert run.data.transforms == vtab.transforms(task, train=True)
      assert run.init_from.path == 'weights.npz'


def test_shared_values_reach_every_run():
  config = load_config('vtab', 'dtd,seeds=1,sweep')
  pooling = 'shared.model.pooling.target=vit_jax.models.pooling.Mean'
  more = ('shared.num_workers=3', 'shared.accum_steps=4')
  configs.override(config, (pooling, *more))
  for run in config.runs.values():
    assert run.model.pooling.target.endswith('.Mean')
    assert run.accum_steps == 4
    (evaluator,) = run.evals.values()
    assert run.data.num_workers == evaluator.data.num_workers == 3


def test_the_full_table(fake_runs, tmp_path, capsys, monkeypatch):
  monkeypatch.setenv('COLUMNS', '80')
  config = load_config('vtab', 'L/16')
  config.shared.weights = 'weights.npz'
  (made,) = run(config, tmp_path)
  assert len(fake_runs) == 57 and len(made) == 23
  ours = {task: len(task) / 100 + 0.1 for task in vtab.TASKS}
  for task, mean in ours.items():
    found = made[vtab.TASKS[task].title]['ours']
    assert found['mean'] == pytest.approx(mean) and len(found['values']) == 3
  for row, published in MEANS.items():
    tasks = [
      task
      for task in vtab.TASKS
      if row.startswith(('Mean', vtab.TASKS[task].group.capitalize()))
    ]
    found = made[row]
    mean = np.mean([ours[task] for task in tasks])
    # Of each seed first, so the deviation is that of three scores.
    assert found['ours']['mean'] == pytest.approx(mean)
    assert found['ours']['std'] == pytest.approx(0.1 * np.std([0, 1, 2]))
    for column, value in zip(COLUMNS[1:], published):
      assert found[column]['mean'] == pytest.approx(value / 100, abs=1e-4)
  shown = capsys.readouterr().out
  assert '…' not in shown  # it fits on 80 columns
  assert re.search(r'Mean of 19 .*77\.6 ± 0\.2.*76\.3 ± 0\.5', shown)
  assert [*made][::18] == ['Caltech101', 'sNORB-Elev']


def test_sweep_takes_the_best_setting_of_each_task(fake_runs, tmp_path):
  config = load_config('vtab', 'clevr_count,dtd,seeds=2,sweep')
  config.shared.weights = 'weights.npz'
  run(config, tmp_path)
  for task in ('clevr_count', 'dtd'):
    tried = {
      (x['schedule']['lr'], x['total_steps'], x['schedule']['warmup_steps'])
      for name, x in fake_runs.items()
      if name.startswith(f'{task}_lr')
    }
    assert tried == {
      (lr, *steps)
      for lr in (0.001, 0.003, 0.01, 0.03)
      for steps in ((500, 100), (2500, 200))
    }
    dev = fake_runs[f'{task}_lr1e-02_steps500']
    source = vtab.settings(task, 'train800', data_dir=None)
    assert dev['data']['source'] == source
    source = vtab.settings(task, 'val200', data_dir=None)
    assert dev['evals']['val']['data']['source'] == source
    for seed in (0, 1):
      final = fake_runs[f'{task}_seed{seed}']
      assert final['schedule']['lr'] == 0.003 and final['seed'] == seed
      assert final['total_steps'] == 2500
      assert final['schedule']['warmup_steps'] == 200


def test_tasks_by_group_and_by_name():
  config = load_config('vtab', 'specialized,kitti,seeds=1')
  assert [x.split('_')[0] for x in config.order] == [
    *('camelyon', 'eurosat', 'resisc45', 'retinopathy', 'kitti')
  ]
  rows = list(dict.fromkeys(x['row'] for x in config.report[0]['cells']))
  assert rows[4:] == ['KITTI-Dist', 'Specialized (4)', 'Mean of 5']
  cells = [x for x in config.report[0]['cells'] if x['row'] == 'Mean of 5']
  table_9 = [83.3, 96.7, 91.4, 76.6, 84.5]  # H/14
  assert cells[1]['value'] == pytest.approx(np.mean(table_9) / 100)


def test_unprepared_data_is_found_at_once_with_all_commands(tmp_path):
  config = load_config('vtab', 'tiny')
  config.shared.weights, config.shared.data_dir = 'x', str(tmp_path / 'none')
  with pytest.raises(ValueError) as info:
    run(config, tmp_path / 'study')
  found = re.findall(r"tfds\.builder\('([^']*)'", str(info.value))
  assert len(found) == 16  # each once: three have two tasks
  assert set(found) == {task.tfds for task in vtab.TASKS.values()}
  assert str(info.value).count('.download_and_prepare()"') == 16
  assert str(tmp_path / 'none') in str(info.value)


@pytest.mark.parametrize('path', [None, '/nowhere'])
def test_missing_weights_are_found_before_the_first_run(
  path, tmp_path, monkeypatch
):
  monkeypatch.setattr(study, '_check_sources', lambda *args: None)
  monkeypatch.setattr(study.eta, 'costs', lambda runs: None)
  config = load_config('vtab', 'tiny')
  config.shared.weights = path
  message = r'config\.shared\.weights=PATH' if path is None else '/nowhere'
  with pytest.raises(ValueError, match=message):
    run(config, tmp_path)
  assert not list(tmp_path.glob('*_seed0'))


@pytest.mark.slow
def test_tiny_study_runs(compile_fast, tmp_path):  # noqa: F811
  """On data with the true sizes and features, for each kind of label."""
  tasks = 'caltech101,clevr_count,dsprites_location,kitti,snorb_azimuth'
  words = f'{tasks},seeds=1,size=224,tiny'
  config = load_config('vtab', words)
  used = {run.data.source.name for run in config.runs.values()}
  for name in used:
    made_up.prepare(tmp_path / 'data', name, made_up.VTAB_SIZES[name])
  config.shared.weights = write_weights(tmp_path / 'tiny.npz')
  config.shared.data_dir = str(tmp_path / 'data')
  config.shared.model.dtype = 'float32'
  (made,) = run(config, tmp_path / 'study')
  jax.clear_caches()
  tasks = [name.removesuffix('_seed0') for name in config.order]
  for task in tasks:
    assert 0 <= made[vtab.TASKS[task].title]['ours']['mean'] <= 1
    records = read_records(tmp_path / 'study' / f'{task}_seed0')
    few = 243 if 'snorb' in task else 20
    tested = [r for r in records if 'test/num_examples' in r]
    assert tested[-1]['test/num_examples'] == few
  mean = np.mean([made[vtab.TASKS[x].title]['ours']['mean'] for x in tasks])
  row = f'Mean of {len(tasks)}'
  assert made[row]['ours']['mean'] == pytest.approx(mean)

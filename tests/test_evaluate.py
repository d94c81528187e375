"""evaluate() on a run's checkpoint gives what the run itself measured."""

import csv
import json

import ml_collections
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from vit_jax import checkpoint, tree
from vit_jax.evals.classification import Classification
from vit_jax.evaluate import evaluate
from vit_jax.metrics import read_records
from vit_jax.reports import timm_csv
from vit_jax.train import train
from vit_jax.weights import formats

DATA = 'vit_jax.data.embedded.digits.'


def _evals(**differences):
  source = {'target': DATA + 'Digits', 'split': 'test', **differences}
  return {
    'test': {
      'target': 'vit_jax.evals.classification.Classification',
      'data': {'source': source, 'batch_size': 128},
    }
  }


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('run')
  config = {
    'total_steps': 3,
    'ema_decay': 0.5,
    'data': {
      'source': {'target': DATA + 'Digits', 'split': 'train'},
      'batch_size': 64,
    },
    'model': {
      'target': 'vit_jax.models.vit.VisionTransformer',
      **{'width': 16, 'depth': 2, 'mlp_dim': 16, 'num_heads': 2},
      **{'patch_size': 4, 'scan': True},
    },
    'preprocess': {'target': 'vit_jax.preprocess.Normalize', 'mean': 100.0},
    'objective': {'target': 'vit_jax.objectives.classification.softmax_xent'},
    'optimizer': {'target': 'vit_jax.optim.adam'},
    'schedule': {'lr': 0.01},
    'evals': _evals(),
  }
  train(ml_collections.ConfigDict(config), workdir)
  return workdir


def _evaluate(workdir, **config):
  return evaluate(ml_collections.ConfigDict(config), workdir)


def test_equals_what_the_run_measured(run, tmp_path):
  """Model, preprocessing and average come from the run without being named."""
  found = _evaluate(tmp_path, init_from={'path': str(run)}, evals=_evals())
  recorded = {k: v for r in read_records(run) for k, v in r.items()}
  assert found['test/num_examples'] == 768
  for name, value in found.items():
    assert recorded[name] == pytest.approx(value, rel=1e-6), name
  assert read_records(tmp_path)[-1]['step'] == 3


def test_parameters_are_split_as_the_config_says(run, tmp_path, monkeypatch):
  seen = {}

  def run_and_keep(self, params, run=Classification.run):
    seen.update(tree.flatten(params))
    return run(self, params)

  monkeypatch.setattr(Classification, 'run', run_and_keep)
  found = _evaluate(
    tmp_path,
    init_from={'path': str(run)},
    evals=_evals(),
    mesh={'fsdp': -1},
    sharding={'target': 'vit_jax.recipes.fsdp', 'min_elements': 1},
  )
  assert seen['block_0/mlp/fc1/kernel'].sharding.spec == P('fsdp')
  recorded = {k: v for r in read_records(run) for k, v in r.items()}
  assert found['test/accuracy'] == recorded['test/accuracy']
  assert found['test/loss'] == pytest.approx(recorded['test/loss'], rel=1e-6)


def test_the_row_that_timm_would_write(run, tmp_path):
  evals = _evals()
  evals['test']['confidence'] = 'binomial'
  transforms = [
    {'target': 'vit_jax.data.transforms.ResizeSmall', 'size': 9},
    {'target': 'vit_jax.data.transforms.CentralCrop', 'size': 8},
  ]
  evals['cropped'] = {**evals['test'], 'confidence': None}
  evals['cropped']['data'] = evals['test']['data'] | {'transforms': transforms}
  path = str(run) + '/'
  found = _evaluate(tmp_path, init_from={'path': path}, evals=evals)
  _evaluate(tmp_path / 'named', init_from={'path': path}, evals=evals, name='x')
  params, _ = checkpoint.load_params(run)
  count = sum(x.size for x in params.values())
  for name, rest in (
    ('test', {'crop_pct': '1.000', 'interpolation': ''}),
    ('cropped', {'crop_pct': '0.889', 'interpolation': 'area'}),
  ):
    with open(tmp_path / f'results-{name}.csv') as file:
      (row,) = csv.DictReader(file)
    assert ','.join(row) == (
      'model,top1,top1_err,top5,top5_err,param_count,img_size,crop_pct,'
      'interpolation'
    )
    top1, top5 = (
      100 * found[f'{name}/{k}'] for k in ('accuracy', 'top5_accuracy')
    )
    assert row == rest | {
      'model': run.name,
      'top1': f'{top1:.3f}',
      'top1_err': f'{100 - top1:.3f}',
      'top5': f'{top5:.3f}',
      'top5_err': f'{100 - top5:.3f}',
      'param_count': f'{count / 1e6:.2f}',
      'img_size': '8',
    }
  assert (tmp_path / 'named/results-test.csv').read_text().count('\nx,') == 1


def test_table_shows_intervals_behind_their_values(run, tmp_path, capsys):
  evals = _evals()
  evals['test'] |= {'confidence': 'binomial'}
  found = _evaluate(tmp_path, init_from={'path': str(run)}, evals=evals)
  low, high = (found[f'test/accuracy_{end}'] for end in ('low', 'high'))
  shown = capsys.readouterr().out
  assert f'{found["test/accuracy"]:.4g} [{low:.4g}, {high:.4g}]' in shown
  assert 'accuracy_low' not in shown and ' 768 ' in shown
  recorded = read_records(tmp_path)[-1]
  assert recorded['test/accuracy_low'] == low


@pytest.mark.parametrize(
  'init_from, name',
  [
    ({'path': 'gs://bucket/ViT-B_16.npz'}, 'ViT-B_16'),
    ({'path': '/tmp/vit_base.orig/model.safetensors'}, 'vit_base.orig'),
    ({'path': 'hf://timm/vit_base_patch16_224.x'}, 'vit_base_patch16_224.x'),
    (None, 'object'),
  ],
)
def test_name_of_the_model(init_from, name):
  assert timm_csv.name(init_from, object()) == name


def test_raw_parameters_are_others(run, tmp_path):
  raw = {'path': str(run), 'ema': False}
  found = _evaluate(tmp_path, init_from=raw, evals=_evals())
  recorded = {k: v for r in read_records(run) for k, v in r.items()}
  assert found['test/loss'] != pytest.approx(recorded['test/loss'], rel=1e-4)


@pytest.mark.parametrize('format', ['npz', 'timm', 'hf'])
def test_weights_of_any_format_give_what_the_run_measured(
  run, tmp_path, format
):
  path = tmp_path / ('x.npz' if format == 'npz' else 'x')
  formats.write(formats.read(run), path, format)
  init_from = {'path': str(path)}
  found = _evaluate(tmp_path / 'eval', init_from=init_from, evals=_evals())
  recorded = {k: v for r in read_records(run) for k, v in r.items()}
  for name, value in found.items():
    assert recorded[name] == pytest.approx(value, rel=1e-6), name


@pytest.mark.slow
def test_training_starts_from_weights_of_any_format(run, tmp_path):
  formats.write(formats.read(run), tmp_path / 'x', 'timm')
  config = json.loads((run / 'config.json').read_text())
  config |= {'total_steps': 1, 'init_from': {'path': str(tmp_path / 'x')}}
  config['init_from'] |= {'head': 'keep'}
  config['schedule'] |= {'lr': 0.0}
  state = train(ml_collections.ConfigDict(config), tmp_path / 'run')
  loaded, _ = checkpoint.load_params(run)
  for path, value in tree.flatten(state.params).items():
    np.testing.assert_array_equal(value, loaded[path], err_msg=path)


def test_without_a_run_the_model_must_be_named(tmp_path):
  with pytest.raises(ValueError, match='without init_from'):
    _evaluate(tmp_path, evals=_evals())


def test_a_duration_is_an_error(run, tmp_path):
  evals = _evals()
  evals['test']['every_steps'] = 3
  with pytest.raises(ValueError, match=r'every_steps.* mean nothing'):
    _evaluate(tmp_path, init_from={'path': str(run)}, evals=evals)


def test_other_classes_are_an_error(run, tmp_path):
  other = _evals()
  other['test']['data']['source'] = {
    'target': 'vit_jax.data.embedded.glyphs.Glyphs',
    **{'image_size': 8, 'num_examples': 8},
  }
  with pytest.raises(
    ValueError, match=r'evals\.test has 480 classes(?s:.*)test\.same_classes=F'
  ):
    _evaluate(tmp_path, init_from={'path': str(run)}, evals=other)
  # That remedy is for as many classes only.
  other['test']['same_classes'] = False
  with pytest.raises(ValueError, match='data has 480 classes and the model 10'):
    _evaluate(tmp_path, init_from={'path': str(run)}, evals=other)

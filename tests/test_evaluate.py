"""evaluate() on a run's checkpoint gives what the run itself measured."""

import json

import ml_collections
import numpy as np
import pytest

from vit_jax import checkpoint, tree
from vit_jax.build import ConfigError
from vit_jax.evaluate import evaluate
from vit_jax.metrics import read_records
from vit_jax.train import train
from vit_jax.weights import formats

DATA = 'vit_jax.data.builtin.'


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
  with pytest.raises(ConfigError, match='without init_from'):
    _evaluate(tmp_path, evals=_evals())


def test_a_duration_is_an_error(run, tmp_path):
  evals = _evals()
  evals['test']['every_steps'] = 3
  with pytest.raises(ConfigError, match=r'every_steps.* mean nothing'):
    _evaluate(tmp_path, init_from={'path': str(run)}, evals=evals)


def test_other_classes_are_an_error(run, tmp_path):
  other = _evals()
  other['test']['data']['source'] = {
    'target': 'vit_jax.data.glyphs.Glyphs',
    **{'image_size': 8, 'num_examples': 8},
  }
  with pytest.raises(ConfigError, match=r'evals\.test has 480 classes'):
    _evaluate(tmp_path, init_from={'path': str(run)}, evals=other)

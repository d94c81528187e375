"""Resuming is bit-identical: real processes, real kills, real data.

A run is compared with one that is killed (SIGKILL) after its first checkpoint
and started again by the same command. Dropout is on, examples are augmented,
and the optimizer has a state.
"""

import io
import json
import pathlib
import runpy
import shutil
import signal

import cv2
import ml_collections
import numpy as np
import pytest
import tensorflow_datasets as tfds
from faults.runs import (
  Run,
  difference,
  steps,
  undisturbed,
  with_source,
)

from vit_jax.runs import stored
from vit_jax.runs.metrics import read_records

GOLDEN = pathlib.Path(__file__).parent / 'golden'
CLASSES = ('dog', 'cat', 'bird')

# Each example twice, and three of the folder for each of the TFDS set.
ORDER = """order=dict(
        target='vit_jax.data.order.Repeated', times=2,
        order=dict(
          target='vit_jax.data.mixture.Mixed',
          weights=dict(files=3, few=1),
          orders=dict(files=dict(target='vit_jax.data.sampling.Balanced')))),
      batch_size=8,
    ),
"""


def _mixture(folder):
  """Return the config of a folder of files mixed with a subset of TFDS.

  Both have 20 PNGs of 12x10 pixels in 3 classes.
  """
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (20, 12, 10, 3), np.uint8)
  encoded = [cv2.imencode('.png', image)[1].tobytes() for image in images]
  for i, data in enumerate(encoded):
    path = folder / 'files' / CLASSES[i % 3] / f'{i}.PNG'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
  _prepare_tfds(folder / 'tfds', encoded)
  tfds_set = {
    'target': 'vit_jax.data.tfds.Tfds',
    'name': 'noise',
    'split': 'train[:90%]',
    'data_dir': str(folder / 'tfds'),
  }
  return {
    'target': 'vit_jax.data.mixture.Mixture',
    'classes': 'by_name',
    'sources': {
      'files': {
        'target': 'vit_jax.data.folder.Folder',
        'path': str(folder / 'files'),
      },
      'few': {
        'target': 'vit_jax.data.subset.Subset',
        'per_class': 2,
        'source': tfds_set,
      },
    },
  }


def _prepare_tfds(folder, encoded):
  class Noise(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version('1.0.0')
    pkg_dir_path = folder

    def _info(self):
      features = {
        'image': tfds.features.Image(encoding_format='png'),
        'label': tfds.features.ClassLabel(names=CLASSES),
      }
      features = tfds.features.FeaturesDict(features)
      return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, manager):
      del manager
      return {'train': self._generate_examples()}

    def _generate_examples(self):
      for i, data in enumerate(encoded):
        yield i, {'image': io.BytesIO(data), 'label': CLASSES[i % 3]}

  Noise(data_dir=folder, file_format='array_record').download_and_prepare()


@pytest.mark.slow
def test_a_killed_run_equals_one_that_was_not(tmp_path):
  config = with_source(_mixture(tmp_path / 'data'))
  config = config.replace('batch_size=8,\n    ),\n', ORDER)
  assert 'Repeated' in config
  straight, killed = tmp_path / 'straight', tmp_path / 'killed'
  run = Run(tmp_path, straight, config=config)
  assert run.finish() == 0, run.output
  run = Run(tmp_path, killed, config=config)
  assert run.wait_for(lambda: steps(killed), poll_s=0.002), run.output
  run.kill()
  step = stored.find(killed).name
  assert step != '40'  # the run was not done when it was killed

  run = Run(tmp_path, killed, config=config)
  assert run.finish() == 0, run.output
  assert f'resumed at step {step} of {killed}' in run.output
  assert not difference(straight, killed)


@pytest.mark.slow
def test_sigterm_saves_and_exits_with_a_message(tmp_path):
  stopped = tmp_path / 'stopped'
  run = Run(tmp_path, stopped)
  assert run.wait_for(lambda: read_records(stopped), poll_s=0.002), run.output
  run.process.send_signal(signal.SIGTERM)
  assert run.finish() == 128 + signal.SIGTERM, run.output
  step = stored.find(stopped).name
  assert 3 <= int(step) < 40
  assert f'SIGTERM: saved step {step} of 40 in {stopped}' in run.output
  assert 'Traceback' not in run.output

  run = Run(tmp_path, stopped)
  assert run.finish() == 0, run.output
  assert not difference(undisturbed(), stopped)


def test_a_run_of_the_code_before_the_redesign_resumes(tmp_path):
  """A checkpoint at step 3, with today's names of the same objects."""
  old = GOLDEN / 'old_run'
  shutil.copytree(old, tmp_path / 'run')
  saved = json.loads((old / 'config.json').read_text())
  settings = ml_collections.ConfigDict(saved)
  model = settings.model
  settings.model = {
    'target': model.target,
    **{k: model[k] for k in ('width', 'depth', 'mlp_dim', 'num_heads')},
    'dropout': model.dropout,
    'embedding': {'patch_size': model.patch_size},
    'posemb': {'init_std': model.posemb_init_std},
  }
  settings.optimizer.target = 'optax.adamw'
  for data in (settings.data, settings.evals.test.data):
    data.source.target = 'vit_jax.data.embedded.digits.Digits'
  config = (
    'import json, ml_collections\n'
    f'TEXT = {json.dumps(settings.to_dict())!r}\n'
    'def get_config():\n'
    '  return ml_collections.ConfigDict(json.loads(TEXT))\n'
  )
  # One device, and the default flags of XLA: the old run had them, too.
  env = {'XLA_FLAGS': ''}
  run = Run(tmp_path, tmp_path / 'run', config=config, env=env)
  assert run.finish() == 0, run.output
  losses = [
    [r['train/loss'], r['train/grad_norm']]
    for r in read_records(tmp_path / 'run')
    if 'train/loss' in r and r['step'] > 3
  ]
  recorded = json.loads((old / 'losses.json').read_text())
  module = runpy.run_path(str(GOLDEN / 'record_loss_curve.py'))
  if recorded['build'] == module['build_id']():
    assert losses == recorded['loss_and_grad_norm']
  else:
    expected = recorded['loss_and_grad_norm']
    np.testing.assert_allclose(losses, expected, rtol=1e-4)

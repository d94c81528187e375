"""Resuming is bit-identical: real processes, real kills, real data.

A run of six steps is compared with one that is killed (SIGKILL) after its
checkpoint of step three and started again by the same command. Dropout is on,
examples are augmented, and the optimizer has a state.
"""

import io
import json
import os
import pathlib
import runpy
import shutil
import signal
import subprocess
import sys
import time

import cv2
import ml_collections
import numpy as np
import pytest
import tensorflow_datasets as tfds

from vit_jax import stored
from vit_jax.metrics import read_records

ROOT = pathlib.Path(__file__).parents[1]
GOLDEN = ROOT / 'tests' / 'golden'

CONFIG = """
import ml_collections

def get_config():
  t = 'vit_jax.data.transforms.'
  return ml_collections.ConfigDict(dict(
    run='vit_jax.train.train',
    seed=3,
    total_steps=6,
    log_every_steps=1,
    accum_steps=2,
    ema_decay=0.9,
    model=dict(target='vit_jax.models.vit.VisionTransformer', width=32,
               depth=2, mlp_dim=64, num_heads=2,
               embedding=dict(patch_size=4), dropout=0.2,
               stochastic_depth=0.2),
    objective=dict(
      target='vit_jax.objectives.classification.softmax_xent'),
    optimizer=dict(target='optax.adamw', weight_decay=0.1),
    schedule=dict(lr=1e-2, warmup_steps=2),
    checkpoint=dict(every_steps=3, keep_last=2),
    # Takes a while after each step, so that a kill comes before the last.
    evals=dict(val=dict(
      target='vit_jax.evals.classification.Classification',
      every_steps=1,
      data=dict(
        source=dict(target='vit_jax.data.embedded.digits.Synthetic',
                    image_size=8, num_classes=3,
                    num_examples=1000, channels=CHANNELS),
        batch_size=8))),
    data=dict(
      source=SOURCE,
      transforms=[
        dict(target=t + 'InceptionCrop', size=8),
        dict(target=t + 'FlipLR'),
      ],
      batch_size=8,
    ),
  ))
"""


def _source(kind, folder):
  """Config of a source of some 20 PNGs of 12x10, 3 classes; or of digits."""
  if kind == 'digits':
    return {'target': 'vit_jax.data.embedded.digits.Digits', 'split': 'train'}
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (20, 12, 10, 3), np.uint8)
  encoded = [cv2.imencode('.png', image)[1].tobytes() for image in images]
  if kind == 'tfds':
    _prepare_tfds(folder, encoded)
    return {
      'target': 'vit_jax.data.tfds.Tfds',
      'name': 'noise',
      'split': 'train[:90%]',
      'data_dir': str(folder),
    }
  for i, data in enumerate(encoded):
    path = folder / f'class_{i % 3}' / f'{i}.PNG'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
  return {'target': 'vit_jax.data.folder.Folder', 'path': str(folder)}


def _prepare_tfds(folder, encoded):
  class Noise(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version('1.0.0')
    pkg_dir_path = folder

    def _info(self):
      features = {
        'image': tfds.features.Image(encoding_format='png'),
        'label': tfds.features.ClassLabel(num_classes=3),
      }
      features = tfds.features.FeaturesDict(features)
      return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, manager):
      del manager
      return {'train': self._generate_examples()}

    def _generate_examples(self):
      for i, data in enumerate(encoded):
        yield i, {'image': io.BytesIO(data), 'label': i % 3}

  Noise(data_dir=folder, file_format='array_record').download_and_prepare()


class Run:
  """`python -m vit_jax.main` on a config file, in a process of its own."""

  def __init__(self, config, workdir, **env):
    command = [sys.executable, '-m', 'vit_jax.main']
    self.workdir = workdir
    self._process = subprocess.Popen(
      [*command, f'--config={config}', f'--workdir={workdir}'],
      cwd=ROOT,
      env={
        **os.environ,
        'JAX_PLATFORMS': 'cpu',
        # Compiling takes most of these processes' time; they share it.
        'JAX_COMPILATION_CACHE_DIR': str(workdir.parent / 'xla_cache'),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.1',
        **env,
      },
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )

  def wait_for_checkpoint(self, step):
    path = self.workdir / 'checkpoints' / str(step)
    self._wait_for(path.exists)

  def wait_for_first_step(self):
    self._wait_for(lambda: read_records(self.workdir))

  def _wait_for(self, is_there):
    end = time.monotonic() + 120
    while not is_there():
      assert self._process.poll() is None, self._process.communicate()[0]
      assert time.monotonic() < end
      time.sleep(0.002)

  def send(self, number):
    self._process.send_signal(number)

  def finish(self, code=0):
    output, _ = self._process.communicate(timeout=240)
    assert self._process.returncode == code, output
    return output


def _assert_same_end(one, other):
  for item in ('params', 'ema'):
    a, _ = stored.load_params(one, step=6, ema=item == 'ema')
    b, _ = stored.load_params(other, step=6, ema=item == 'ema')
    assert a.keys() == b.keys()
    for path in a:
      np.testing.assert_array_equal(a[path], b[path], err_msg=path)
  losses = [
    {r['step']: r['train/loss'] for r in read_records(d) if 'train/loss' in r}
    for d in (one, other)
  ]
  assert losses[0] == losses[1]
  assert sorted(losses[0]) == [1, 2, 3, 4, 5, 6]


def _write_config(path, kind):
  source = _source(kind, path.parent / 'data')
  channels = 1 if kind == 'digits' else 3
  text = CONFIG.replace('SOURCE', repr(source))
  path.write_text(text.replace('CHANNELS', str(channels)))
  return path


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['folder', 'tfds', 'digits'])
def test_six_steps_equal_three_a_kill_and_three_more(kind, tmp_path):
  config = _write_config(tmp_path / 'config.py', kind)
  straight, killed = tmp_path / 'straight', tmp_path / 'killed'
  Run(config, straight).finish()

  run = Run(config, killed)
  run.wait_for_checkpoint(3)
  run.send(signal.SIGKILL)
  run.finish(-signal.SIGKILL)
  assert stored.find(killed).name == '3'  # not done when it was killed

  output = Run(config, killed).finish()
  assert f'resumed at step 3 of {killed}' in output
  _assert_same_end(straight, killed)


@pytest.mark.slow
def test_sigterm_saves_and_exits_with_a_message(tmp_path):
  config = _write_config(tmp_path / 'config.py', 'digits')
  straight, stopped = tmp_path / 'straight', tmp_path / 'stopped'
  run = Run(config, stopped)
  run.wait_for_first_step()
  run.send(signal.SIGTERM)
  output = run.finish(128 + signal.SIGTERM)
  step = stored.find(stopped).name
  assert step in '12345'
  assert f'SIGTERM: saved step {step} of 6 in {stopped}' in output
  assert 'Traceback' not in output

  Run(config, stopped).finish()
  Run(config, straight).finish()
  _assert_same_end(straight, stopped)


def test_a_run_of_the_code_before_the_redesign_resumes(tmp_path):
  """Its checkpoint at step 3, with today's names of the same objects."""
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
  path = tmp_path / 'config.py'
  text = json.dumps(settings.to_dict())
  path.write_text(
    'import json, ml_collections\n'
    f'TEXT = {text!r}\n'
    'def get_config():\n'
    '  return ml_collections.ConfigDict(json.loads(TEXT))\n'
  )
  # One device, and XLA's own flags: as the old run had them.
  Run(path, tmp_path / 'run', XLA_FLAGS='').finish()
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

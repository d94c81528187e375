"""evaluate gives the same digits on any number of devices and processes."""

import os
import pathlib
import socket
import subprocess
import sys

import ml_collections
import pytest

from vit_jax.metrics import read_records
from vit_jax.train import train

ROOT = pathlib.Path(__file__).parents[1]

# 101 and 67 examples: nothing divides them.
CONFIG = """
import ml_collections


def data(name, split, count):
  source = {'target': 'vit_jax.data.folder.Folder', 'path': '%(images)s'}
  source |= {'csv': name + '.csv', 'split': split}
  return {'source': source, 'batch_size': 16}


def get_config():
  test = data('labels', 'test', 67)
  readouts = 'vit_jax.evals.'
  return ml_collections.ConfigDict({
    'run': 'vit_jax.evaluate.evaluate',
    'init_from': {'path': '%(run)s'},
    'evals': {
      'test': {
        'target': 'vit_jax.evals.classification.Classification',
        'confidence': 'bootstrap',
        'per_class': True,
        'data': test,
      },
      'frozen': {
        'target': 'vit_jax.evals.frozen.Frozen',
        'data': {'digits': {'train': data('labels', 'train', 101),
                            'test': test}},
        'readouts': {
          'fewshot': {'target': readouts + 'fewshot.FewShot', 'shots': (3,)},
          'knn': {'target': readouts + 'knn.Knn', 'k': (1, 7)},
          'logistic': {'target': readouts + 'logistic.Logistic',
                       'C': (0.1, 1.0)},
          'probe': {'target': readouts + 'linear_probe.LinearProbe',
                    'lr': (0.1,), 'epochs': 3},
        },
      },
    },
  })
"""


@pytest.fixture(scope='module')
def images(tmp_path_factory):
  """168 real digits as files, and which of them are for what."""
  import cv2

  from vit_jax.data.embedded.digits import Digits

  path = tmp_path_factory.mktemp('digits')
  lines = ['path,label,split']
  for split, count in (('train', 101), ('test', 67)):
    source = Digits(split=split)
    for i in range(count):
      example = source[i]
      cv2.imwrite(str(path / f'{split}{i}.png'), example['image'])
      lines.append(f'{split}{i}.png,c{example["label"]},{split}')
  (path / 'labels.csv').write_text('\n'.join(lines))
  return path


@pytest.fixture(scope='module')
def run(images, tmp_path_factory):
  workdir = tmp_path_factory.mktemp('run')
  source = {'target': 'vit_jax.data.folder.Folder', 'path': str(images)}
  source |= {'csv': 'labels.csv', 'split': 'train'}
  config = {
    'total_steps': 20,
    'data': {'source': source, 'batch_size': 64},
    'model': {
      'target': 'vit_jax.models.vit.VisionTransformer',
      **{'width': 16, 'depth': 1, 'mlp_dim': 16, 'num_heads': 2},
      **{'patch_size': 4},
    },
    'objective': {'target': 'vit_jax.objectives.classification.softmax_xent'},
    'optimizer': {'target': 'vit_jax.optim.adam'},
    'schedule': {'lr': 0.01},
  }
  train(ml_collections.ConfigDict(config), workdir)
  return workdir


def _evaluate(config, workdir, num_devices, processes=1):
  """Records of `python -m vit_jax.main`, on so many processes."""
  with socket.socket() as free:
    free.bind(('localhost', 0))
    port = free.getsockname()[1]
  environment = {**os.environ, 'JAX_PLATFORMS': 'cpu'}
  environment['JAX_NUM_CPU_DEVICES'] = str(num_devices)
  command = [sys.executable, '-m', 'vit_jax.main', f'--config={config}']
  command += [f'--workdir={workdir}']
  if processes > 1:
    command += ['--distributed']
    environment['JAX_COORDINATOR_ADDRESS'] = f'localhost:{port}'
    environment['JAX_NUM_PROCESSES'] = str(processes)
  started = [
    subprocess.Popen(
      command,
      cwd=ROOT,
      env={**environment, 'JAX_PROCESS_ID': str(i)},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for i in range(processes)
  ]
  for process in started:
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
  (record,) = read_records(workdir)
  return {k: v for k, v in record.items() if '/' in k}


@pytest.mark.slow
def test_same_digits(images, run, tmp_path):
  config = tmp_path / 'config.py'
  config.write_text(CONFIG % {'images': images, 'run': run})
  one = _evaluate(config, tmp_path / 'one', 1)
  assert one['test/num_examples'] == 67
  assert 0.2 < one['test/accuracy'] < 1
  assert len(one) > 20
  for name, devices, processes in (('eight', 8, 1), ('two', 2, 2)):
    other = _evaluate(config, tmp_path / name, devices, processes)
    assert other.keys() == one.keys()
    for key, value in one.items():
      # What counts examples is the same to the last bit. Losses and
      # confidences come of float32 arithmetic on batches of another shape.
      exact = not key.rsplit('/')[-1].startswith(('loss', 'ece'))
      tolerance = 0 if exact else 1e-6
      assert other[key] == pytest.approx(value, rel=tolerance, abs=0), key

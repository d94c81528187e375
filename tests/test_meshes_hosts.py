"""One process of 8 devices and two of 4 train and evaluate the same."""

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

from vit_jax import checkpoint
from vit_jax.metrics import read_records

CONFIG = """
import ml_collections

def get_config(argument=''):
  source = {'target': 'vit_jax.data.embedded.digits.Digits', 'split': 'train'}
  recipes = 'vit_jax.recipes.'
  config = ml_collections.ConfigDict({
    'run': 'vit_jax.train.train',
    'total_steps': 6,
    'log_every_steps': 1,
    'ema_decay': 0.9,
    'data': {'source': source, 'batch_size': 16},
    'model': {'target': 'vit_jax.models.vit.VisionTransformer', 'width': 16,
              'depth': 1, 'mlp_dim': 32, 'num_heads': 2, 'patch_size': 4},
    'objective': {'target': 'vit_jax.objectives.classification.softmax_xent'},
    'optimizer': {'target': 'vit_jax.optim.sgd'},
    'schedule': {'lr': 0.1, 'decay': 'constant'},
    'mesh': {'data': 1, 'fsdp': -1},
    'sharding': {'target': recipes + 'fsdp', 'min_elements': 64},
    'evals': {
      'test': {
        'target': 'vit_jax.evals.classification.Classification',
        'data': {'source': source | {'split': 'test'}, 'batch_size': 16},
      },
    },
  })
  exec(argument.replace(';', '\\n'))
  return config
"""


def launch(config, workdir, processes):
  """`python -m vit_jax.main` on 8 devices of so many processes: their ends."""
  with socket.socket() as free:
    free.bind(('localhost', 0))
    port = free.getsockname()[1]
  environment = {**os.environ, 'JAX_PLATFORMS': 'cpu'}
  environment['JAX_NUM_CPU_DEVICES'] = str(8 // processes)
  command = [sys.executable, '-m', 'vit_jax.main', f'--config={config}']
  command.append(f'--workdir={workdir}')
  if processes > 1:
    command.append('--distributed')
    environment['JAX_COORDINATOR_ADDRESS'] = f'localhost:{port}'
    environment['JAX_NUM_PROCESSES'] = str(processes)
  started = [
    subprocess.Popen(
      command,
      cwd=pathlib.Path(__file__).parents[1],
      env={**environment, 'JAX_PROCESS_ID': str(i)},
      stderr=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    for i in range(processes)
  ]
  return [(p.communicate(timeout=500)[1], p.returncode) for p in started]


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
  """FSDP over 2 x 4 devices; what one leaves, the other takes up."""
  path = tmp_path / 'config.py'
  path.write_text(CONFIG)

  def run(name, processes, argument='pass'):
    ends = launch(f'{path}:{argument}', tmp_path / name, processes)
    assert all(code == 0 for _, code in ends), ends
    records = read_records(tmp_path / name)
    losses = [r['train/loss'] for r in records if 'train/loss' in r]
    return np.array(losses), records[-1]

  half = 'config.total_steps = 3'
  one, expected = run('one', 1)
  both, found = run('both', 2)
  run('two_one', 2, half)
  two_one, _ = run('two_one', 1)
  run('one_two', 1, half)
  one_two, _ = run('one_two', 2)
  assert len(one) == 6 and one[-1] < one[0]
  # Measured, of losses and parameters: 2.4e-7 and 1.2e-7 at most.
  for losses in (both, two_one, one_two):
    np.testing.assert_allclose(losses, one, rtol=0, atol=1e-6)
  assert found['test/accuracy'] == expected['test/accuracy']
  assert found['test/num_examples'] == expected['test/num_examples']
  assert abs(found['test/loss'] - expected['test/loss']) < 1e-6
  params, _ = checkpoint.load_params(tmp_path / 'one', ema=False)
  for name in ('both', 'two_one', 'one_two'):
    others, _ = checkpoint.load_params(tmp_path / name, ema=False)
    assert params.keys() == others.keys()
    for where, value in params.items():
      np.testing.assert_allclose(others[where], value, rtol=0, atol=1e-6)

"""Several hosts, as processes on loopback: stopped and failed together."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from vit_jax import hosts

ROOT = pathlib.Path(__file__).parents[1]

CONFIG = """
import ml_collections

def get_config(split='train'):
  source = dict(target='vit_jax.data.builtin.Digits', split=split)
  return ml_collections.ConfigDict(dict(
    run='vit_jax.train.train',
    total_steps=1_000_000,
    log_every_steps=10,
    data=dict(source=source, batch_size=8),
    model=dict(target='vit_jax.models.vit.VisionTransformer', width=32,
               depth=1, mlp_dim=32, num_heads=2, patch_size=4),
    objective=dict(target='vit_jax.objectives.classification.softmax_xent'),
    optimizer=dict(target='vit_jax.optim.sgd'),
    schedule=dict(lr=0.01),
  ))
"""


@pytest.fixture
def start(tmp_path):
  """Starts two hosts with an argument of the config each."""
  config = tmp_path / 'config.py'
  config.write_text(CONFIG)
  with socket.socket() as free:
    free.bind(('localhost', 0))
    port = free.getsockname()[1]
  started = []

  def start_both(*arguments):
    for i, argument in enumerate(arguments):
      command = [sys.executable, '-m', 'vit_jax.main', '--distributed']
      command += [f'--config={config}:{argument}', f'--workdir={tmp_path}/run']
      environment = {
        'JAX_PLATFORMS': 'cpu',
        'JAX_NUM_CPU_DEVICES': '1',
        'JAX_COORDINATOR_ADDRESS': f'localhost:{port}',
        'JAX_NUM_PROCESSES': '2',
        'JAX_PROCESS_ID': str(i),
      }
      with (tmp_path / f'log{i}').open('w') as log:
        started.append(
          subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=log,
            stderr=log,
          )
        )
    return started, [tmp_path / f'log{i}' for i in range(len(arguments))]

  yield start_both
  for process in started:
    process.kill()
    process.wait()


def wait_for_steps(log):
  for _ in range(240):
    if re.search(r'^ *10/1000000 ', log.read_text(), re.M):
      return
    time.sleep(0.5)
  raise AssertionError(log.read_text())


@pytest.mark.slow
@pytest.mark.parametrize('receiver', [0, 1])
def test_a_signal_to_one_saves_on_all(receiver, start, tmp_path):
  processes, logs = start('train', 'train')
  wait_for_steps(logs[0])
  processes[receiver].send_signal(signal.SIGTERM)
  for process in processes:
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
  (step,) = re.findall(r'SIGTERM: saved step (\d+) of', logs[0].read_text())
  assert (tmp_path / 'run' / 'checkpoints' / step / 'params').exists()


@pytest.mark.slow
@pytest.mark.parametrize('failing', [0, 1])
def test_an_error_on_one_ends_all(failing, start):
  splits = ['train', 'train']
  splits[failing] = 'tset'
  processes, logs = start(*splits)
  for process in processes:
    assert process.wait(timeout=60) == 1
  texts = [log.read_text() for log in logs]
  assert "ValueError: Digits has no split 'tset'" in texts[failing]
  assert (
    f"Host {failing} has failed: ValueError: Digits has no split 'tset'"
    in texts[1 - failing]
  )


@pytest.mark.slow
def test_a_host_that_is_killed_is_missed(start):
  processes, logs = start('train', 'train')
  wait_for_steps(logs[0])
  processes[1].kill()
  assert processes[0].wait(timeout=60) == 1
  message = f'Host 1 is silent since {hosts.SILENT_S} s: killed, or cut off.'
  assert message in logs[0].read_text()


def test_one_process_needs_none_of_it():
  with hosts.failing_together():
    pass

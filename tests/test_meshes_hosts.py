"""One process of 8 devices and two of 4 train and evaluate the same.

The test starts two processes that run this file, and compares their runs with
runs of its own.
"""

import functools
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

from vit_jax.data.embedded import digits
from vit_jax.data.pipeline import Data
from vit_jax.evals.classification import Classification
from vit_jax.models.layers import PatchEmbedding
from vit_jax.models.vit import VisionTransformer
from vit_jax.objectives.classification import softmax_xent
from vit_jax.optim import durations
from vit_jax.optim.optimizers import Optimizer, sgd
from vit_jax.optim.schedules import Schedule
from vit_jax.parallel import hosts as distributed
from vit_jax.parallel.sharding import MeshSizes, fsdp
from vit_jax.runs import stored
from vit_jax.runs.metrics import read_records
from vit_jax.train import Evaluation, train


def run(workdir, steps=6):
  """Train with FSDP over all devices, or resume."""
  test = Data(digits.Digits(split='test'), batch_size=16)
  train(
    workdir,
    model=VisionTransformer(
      width=16, depth=1, mlp_dim=32, num_heads=2, embedding=PatchEmbedding(4)
    ),
    data=Data(digits.Digits(split='train'), batch_size=16),
    objective=softmax_xent,
    optimizer=Optimizer(sgd),
    schedule=Schedule(lr=0.1, decay='constant'),
    total=durations.steps(steps),
    evals={'test': Evaluation(functools.partial(Classification, data=test))},
    mesh=MeshSizes(data=1, fsdp=-1),
    sharding=fsdp(min_elements=64),
    ema_decay=0.9,
    log_every=durations.steps(1),
    allow_changes=['total_steps'],
  )


def results(workdir):
  """Return the losses of a run, and its last evaluation."""
  records = read_records(workdir)
  losses = [r['train/loss'] for r in records if 'train/loss' in r]
  return np.array(losses), [r for r in records if 'test/loss' in r][-1]


def run_two_processes(folder, script=__file__, *, num_devices=4):
  """Run a script on two hosts; return the standard output of each."""
  with socket.socket() as free:
    free.bind(('localhost', 0))
    port = free.getsockname()[1]
  environment = os.environ | {
    'JAX_PLATFORMS': 'cpu',
    'JAX_NUM_CPU_DEVICES': str(num_devices),
    'JAX_COORDINATOR_ADDRESS': f'localhost:{port}',
    'JAX_NUM_PROCESSES': '2',
    'PYTHONPATH': str(pathlib.Path(__file__).parents[1]),
  }
  started = [
    subprocess.Popen(
      [sys.executable, script, folder],
      env=environment | {'JAX_PROCESS_ID': str(i)},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for i in range(2)
  ]
  printed = []
  for process in started:
    out, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors
    printed.append(out)
  return printed


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
  run(tmp_path / 'one')
  run(tmp_path / 'one_two', steps=3)
  run_two_processes(tmp_path)
  run(tmp_path / 'two_one')
  one, expected = results(tmp_path / 'one')
  both, found = results(tmp_path / 'both')
  two_one, _ = results(tmp_path / 'two_one')
  one_two, _ = results(tmp_path / 'one_two')
  assert len(one) == 6 and one[-1] < one[0]
  # Measured, of losses and parameters: 2.4e-7 and 1.2e-7 at most.
  for losses in (both, two_one, one_two):
    np.testing.assert_allclose(losses, one, rtol=0, atol=1e-6)
  assert found['test/accuracy'] == expected['test/accuracy']
  assert found['test/num_examples'] == expected['test/num_examples']
  assert abs(found['test/loss'] - expected['test/loss']) < 1e-6
  params, _ = stored.load_params(tmp_path / 'one', ema=False)
  for name in ('both', 'two_one', 'one_two'):
    others, _ = stored.load_params(tmp_path / name, ema=False)
    assert params.keys() == others.keys()
    for where, value in params.items():
      np.testing.assert_allclose(others[where], value, rtol=0, atol=1e-6)


if __name__ == '__main__':
  distributed.initialize()
  with distributed.failing_together():
    folder = pathlib.Path(sys.argv[1])
    run(folder / 'both')
    run(folder / 'two_one', steps=3)
    run(folder / 'one_two')

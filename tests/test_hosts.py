"""Several hosts, as processes on loopback: found, stopped, failed together."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from vit_jax import distributed, tree
from vit_jax.metrics import read_records

ROOT = pathlib.Path(__file__).parents[1]

# Parameters, optimizer state and average are split over the devices of both
# hosts; dropout is on, images are augmented.
CONFIG = """
import ml_collections

def get_config(argument='train'):
  split, _, steps = argument.partition(',')
  source = dict(target='vit_jax.data.embedded.digits.Digits', split=split)
  config = ml_collections.ConfigDict(dict(
    run='vit_jax.train.train',
    total_steps=int(steps or 1_000_000),
    log_every_steps=10,
    ema_decay=0.9,
    mesh=dict(fsdp=-1),
    sharding=dict(target='vit_jax.recipes.fsdp', min_elements=1),
    data=dict(
      source=source,
      transforms=[dict(target='vit_jax.data.transforms.InceptionCrop', size=8)],
      batch_size=8),
    model=dict(target='vit_jax.models.vit.VisionTransformer', width=32,
               depth=1, mlp_dim=32, num_heads=2, patch_size=4, dropout=0.1),
    objective=dict(target='vit_jax.objectives.classification.softmax_xent'),
    optimizer=dict(target='vit_jax.optim.adam'),
    schedule=dict(lr=0.01),
    checkpoint=dict(every_steps=1000),
  ))
  if steps == '12':
    config.log_every_steps = 1
    config.checkpoint = dict(every_steps=4, keep_last=3)
    # Takes a while after each step, so that a kill comes before the last.
    config.evals = dict(slow=dict(target='slow.Slow', every_steps=1))
  return config
"""

SLOW = """
import time

class Slow:
  def __init__(self, model, **_):
    pass

  def check(self, params):
    pass

  def run(self, params):
    time.sleep(0.5)
    return {}
"""


def free_port():
  with socket.socket() as free:
    free.bind(('localhost', 0))
    return free.getsockname()[1]


@pytest.fixture
def start(tmp_path):
  """Starts two hosts with an argument of the config each."""
  config = tmp_path / 'config.py'
  config.write_text(CONFIG)
  (tmp_path / 'slow.py').write_text(SLOW)
  started = []

  def start_both(
    *arguments, workdirs=('run', 'run'), tell=by_environment, devices=1
  ):
    processes, logs = [], []
    told = tell()
    for i, argument in enumerate(arguments):
      environment, flags = told(i)
      command = [sys.executable, '-m', 'vit_jax.main', '--distributed', *flags]
      command += [f'--config={config}:{argument}']
      command += [f'--workdir={tmp_path / workdirs[i]}']
      environment |= {
        'JAX_PLATFORMS': 'cpu',
        'JAX_NUM_CPU_DEVICES': str(devices),
        'PYTHONPATH': str(tmp_path),
      }
      logs.append(tmp_path / f'log{len(started)}')
      with logs[-1].open('w') as log:
        processes.append(
          subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            stdout=log,
            stderr=log,
          )
        )
      started.append(processes[-1])
    return processes, logs

  yield start_both
  for process in started:
    process.kill()
    process.wait()


def by_environment():
  port = free_port()
  return lambda i: (
    {
      'JAX_COORDINATOR_ADDRESS': f'localhost:{port}',
      'JAX_NUM_PROCESSES': '2',
      'JAX_PROCESS_ID': str(i),
    },
    [],
  )


def by_flags():
  port = free_port()
  return lambda i: (
    {},
    [
      f'--coordinator_address=localhost:{port}',
      '--num_processes=2',
      f'--process_id={i}',
    ],
  )


def by_slurm():
  """The variables that srun sets; jax makes a port of the job's number."""
  job = free_port() % 2**12
  return lambda i: (
    {
      'SLURM_JOB_ID': str(job),
      'SLURM_STEP_NODELIST': 'localhost',
      'SLURM_STEP_NUM_NODES': '1',
      'SLURM_NTASKS': '2',
      'SLURM_PROCID': str(i),
      'SLURM_LOCALID': str(i),
    },
    [],
  )


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


def everything(workdir, step):
  """All arrays of a checkpoint as numpy by path, and its position in the data.

  Read by Orbax alone: parameters, average, optimizer state, rng and step.
  """
  folder = workdir / 'checkpoints' / str(step)
  handler = ocp.PyTreeCheckpointHandler()
  arrays = {}
  for item in ('params', 'ema', 'train'):
    restore_args = jax.tree.map(
      lambda _: ocp.RestoreArgs(restore_type=np.ndarray),
      handler.metadata(folder / item).tree,
    )
    found = handler.restore(
      folder / item, args=ocp.args.PyTreeRestore(restore_args=restore_args)
    )
    arrays |= {f'{item}/{k}': v for k, v in tree.flatten(found).items()}
  position = json.loads((folder / 'data' / 'metadata').read_text())
  return arrays, position


@pytest.mark.slow
def test_one_of_two_is_killed_and_both_resume_bit_for_bit(start, tmp_path):
  killed, straight = (tmp_path / x for x in ('killed', 'straight'))
  again = {'workdirs': ('killed', 'killed'), 'devices': 2}
  processes, logs = start('train,12', 'train,12', **again)
  for _ in range(1200):
    if (killed / 'checkpoints' / '4').exists():
      break
    time.sleep(0.1)
  processes[1].kill()  # SIGKILL
  # The other misses it, which takes SILENT_S; what would have been meanwhile:
  whole, _ = start(
    'train,12', 'train,12', workdirs=('straight', 'straight'), devices=2
  )
  assert processes[0].wait(timeout=60) == 1
  message = (
    f'Host 1 is silent since {distributed.SILENT_S} s: killed, or cut off.'
  )
  assert message in logs[0].read_text()
  for process in whole:
    assert process.wait(timeout=120) == 0
  steps = [int(x.name) for x in (killed / 'checkpoints').glob('[0-9]')]
  assert max(steps) in (4, 8), 'killed too late'

  processes, logs = start('train,12', 'train,12', **again)
  for process in processes:
    assert process.wait(timeout=120) == 0
  text = logs[0].read_text()
  assert f'resumed at step {max(steps)} of {killed}' in text
  assert 'loss' not in logs[1].read_text()  # the first host speaks for all

  arrays, position = everything(straight, 12)
  other, other_position = everything(killed, 12)
  assert position == other_position == {'position': 12 * 8}
  assert arrays.keys() == other.keys()
  prefixes = {'/'.join(path.split('/')[:2]) for path in arrays}
  assert prefixes >= {'train/opt_state', 'train/rng', 'ema/head'}
  for path, value in arrays.items():
    np.testing.assert_array_equal(value, other[path], err_msg=path)
  losses = [
    [r['train/loss'] for r in read_records(x) if 'train/loss' in r]
    for x in (straight, killed)
  ]
  assert losses[0] == losses[1] and len(losses[0]) == 12


@pytest.mark.slow
@pytest.mark.parametrize('tell', [by_flags, by_slurm])
def test_the_hosts_find_each_other(tell, start, tmp_path):
  processes, logs = start('train,20', 'train,20', tell=tell)
  for process, log in zip(processes, logs):
    assert process.wait(timeout=120) == 0, log.read_text()
  assert '20 steps on 2 x cpu' in logs[0].read_text()
  assert 'loss' not in logs[1].read_text()
  records = read_records(tmp_path / 'run')
  assert [r['step'] for r in records] == [10, 20]


@pytest.mark.slow
def test_workdirs_of_each_its_own(start, tmp_path):
  processes, logs = start('train', 'train', workdirs=('run', 'other'))
  for process in processes:
    assert process.wait(timeout=60) == 1
  message = (
    f'--workdir={tmp_path}/other is not one folder for all hosts: host 1 does '
    'not see what host 0 writes there.'
  )
  assert message in logs[1].read_text()
  assert 'Traceback' not in logs[1].read_text()
  assert f'Host 1 has failed: ValueError: {message}' in logs[0].read_text()


@pytest.mark.parametrize(
  'given, message',
  [
    (
      {'coordinator_address': 'host'},
      "coordinator_address='host' must be HOST:PORT",
    ),
    (
      {'num_processes': 2, 'process_id': 2},
      'process_id=2 must be one of 0 to 1, as num_processes=2',
    ),
  ],
)
def test_nonsense_is_one_error(given, message):
  with pytest.raises(ValueError, match=message):
    distributed.initialize(**given)


def test_variables_must_be_numbers(monkeypatch):
  monkeypatch.setenv('JAX_NUM_PROCESSES', 'two')
  with pytest.raises(ValueError, match="num_processes='two' is no number"):
    distributed.initialize()


@pytest.mark.parametrize(
  'process_id', [pytest.param(0, marks=pytest.mark.slow), 1]
)
def test_a_host_that_waits_in_vain_says_so(process_id):
  address = f'localhost:{free_port()}'
  code = f"""
from vit_jax import distributed
distributed.SILENT_S, distributed.START_S = 1, 2
distributed.initialize({address!r}, 2, {process_id})
"""
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True
  )
  assert done.returncode == 1
  who = f'Host {process_id} of 2'
  assert f'{who} waits for the others at {address}' in done.stderr
  assert f'{who} has waited 2 s for the others at {address}' in done.stderr


def test_one_process_needs_none_of_it():
  with distributed.failing_together():
    pass

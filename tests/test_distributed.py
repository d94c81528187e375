"""Several processes on loopback as one run, and signals to any run."""

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

from vit_jax import distributed, tree, workdirs
from vit_jax.distributed import Stopped, StopSignal
from vit_jax.metrics import read_records

ROOT = pathlib.Path(__file__).parents[1]

# Parameters, optimizer state and EMA are sharded over the devices of both
# hosts; dropout is on, images are augmented.
CONFIG = """
import ml_collections
from vit_jax import distributed

distributed.SILENT_S, distributed.POLL_S = 8, 0.2

def get_config():
  source = dict(target='vit_jax.data.embedded.digits.Digits', split='train')
  return ml_collections.ConfigDict(dict(
    run='vit_jax.train.train',
    total_steps=1_000_000,
    log_every_steps=1,
    ema_decay=0.9,
    mesh=dict(fsdp=-1),
    sharding=dict(target='vit_jax.sharding.fsdp', min_elements=1),
    data=dict(
      source=source,
      transforms=[dict(target='vit_jax.data.transforms.InceptionCrop', size=8)],
      batch_size=8),
    model=dict(target='vit_jax.models.vit.VisionTransformer', width=16,
               depth=1, mlp_dim=16, num_heads=2, dropout=0.1, embedding=dict(
                 target='vit_jax.models.common.PatchEmbedding', patch_size=4)),
    objective=dict(target='vit_jax.objectives.classification.softmax_xent'),
    optimizer=dict(target='optax.adam'),
    schedule=dict(lr=0.01, decay='constant'),
    checkpoint=dict(every_steps=4, keep_last=100),
  ))
"""


def free_port():
  with socket.socket() as free:
    free.bind(('localhost', 0))
    return free.getsockname()[1]


@pytest.fixture
def start(tmp_path):
  """Return a function that starts a command on two hosts."""
  started = []

  def start_both(command, join, devices=1):
    job, processes, logs = join(), [], []
    for i in range(2):
      environment, flags = job(i)
      environment |= {
        'JAX_PLATFORMS': 'cpu',
        'JAX_NUM_CPU_DEVICES': str(devices),
      }
      logs.append(tmp_path / f'log{len(started)}')
      with logs[-1].open('w') as log:
        processes.append(
          subprocess.Popen(
            [sys.executable, *command, *flags],
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
  """Variables that srun sets; jax derives a port from the job's number."""
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


def wait_for(condition, logs):
  for _ in range(1200):
    if condition():
      return
    time.sleep(0.1)
  raise AssertionError('\n'.join(log.read_text() for log in logs))


def checkpoints(workdir):
  return {*workdirs.steps(workdir / 'checkpoints')}


def everything(workdir, step):
  """Return all arrays of a checkpoint by path, and its position in the data.

  Read by Orbax alone: parameters, EMA, optimizer state, rng and step.
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
def test_kills_and_signals(start, tmp_path):
  """Hosts that find each other by flags, by Slurm, or by the environment.

  A run of which host 0 is killed, then resumed and stopped by SIGTERM to host
  1, equals one that is stopped by SIGTERM to host 0, bit for bit.
  """
  config = tmp_path / 'config.py'
  config.write_text(CONFIG)
  broken, straight = tmp_path / 'broken', tmp_path / 'straight'

  def start_run(workdir, join):
    command = ['-m', 'vit_jax.main', '--distributed', f'--workdir={workdir}']
    return start([*command, f'--config={config}'], join, devices=2)

  def stop(receiver, workdir, after_step, processes, logs):
    """Send SIGTERM to a host once this checkpoint is there."""
    wait_for(lambda: max(checkpoints(workdir), default=0) >= after_step, logs)
    processes[receiver].send_signal(signal.SIGTERM)
    for process in processes:
      assert process.wait(timeout=60) == 128 + signal.SIGTERM
    text = logs[0].read_text()
    assert ' steps on 4 x cpu' in text
    assert 'loss' not in logs[1].read_text()  # Only host 0 prints progress.
    (step,) = map(int, re.findall(r'SIGTERM: saved step (\d+) of', text))
    assert step == max(checkpoints(workdir))

  processes, logs = start_run(broken, by_flags)
  wait_for(lambda: checkpoints(broken), logs)
  processes[0].kill()
  assert processes[1].wait(timeout=60) == 1
  text = logs[1].read_text()
  assert 'Host 0, which connects the hosts, is gone.' in text
  assert 'Traceback' not in text and ' @ 0x' not in text

  resumed = max(checkpoints(broken))
  processes, logs = start_run(broken, by_slurm)
  stop(1, broken, resumed + 4, processes, logs)
  assert f'resumed at step {resumed} of {broken}' in logs[0].read_text()
  stop(0, straight, resumed + 4, *start_run(straight, by_environment))

  common = max(checkpoints(broken) & checkpoints(straight))
  assert common >= resumed + 4
  arrays, position = everything(straight, common)
  other, other_position = everything(broken, common)
  assert position == other_position
  assert position['position'] == common * 8
  assert arrays.keys() == other.keys()
  prefixes = {'/'.join(path.split('/')[:2]) for path in arrays}
  assert prefixes >= {'train/opt_state', 'train/rng', 'ema/head'}
  for path, value in arrays.items():
    np.testing.assert_array_equal(value, other[path], err_msg=path)
  losses = [
    {r['step']: r['train/loss'] for r in read_records(x)[:common]}
    for x in (straight, broken)
  ]
  assert losses[0] == losses[1] and list(losses[0]) == [*range(1, common + 1)]


TOGETHER = """
import pathlib, sys
import jax
from vit_jax import distributed, terminal
from vit_jax.models import names

distributed.POLL_S = 0.2
folder, failing = pathlib.Path(sys.argv[1]), int(sys.argv[2])
distributed.initialize()
with distributed.failing_together(), terminal.one_message():
  distributed.check_shared(folder)
  if jax.process_index() == 0:  # which wrote the file, and removes it
    assert not list(folder.glob('.*'))
  own = folder / str(jax.process_index())
  own.mkdir()
  try:
    distributed.check_shared(own)
  except ValueError as error:
    print(error)
  if jax.process_index() == failing:
    names.create('no such model')
  jax.experimental.multihost_utils.sync_global_devices('wait forever')
"""


@pytest.mark.slow
@pytest.mark.parametrize('failing', [0, 1])
def test_an_error_on_one_ends_all(failing, start, tmp_path):
  command = ['-c', TOGETHER, str(tmp_path), str(failing)]
  processes, logs = start(command, by_environment)
  codes = [process.wait(timeout=60) for process in processes]
  texts = [log.read_text() for log in logs]
  assert codes == [1, 1], texts
  for i, text in enumerate(texts):
    assert (
      f'--workdir={tmp_path / str(i)} is not the same folder on all hosts: '
      'hosts [1] do not see what host 0 writes there.'
    ) in text
  (error,) = re.findall(
    r"^ValueError: .*'no such model'.*", texts[failing], re.M
  )
  assert f'Host {failing} has failed: {error}' in texts[1 - failing]


@pytest.mark.parametrize(
  'given, message',
  [
    (
      {'coordinator_address': 'host'},
      "coordinator_address='host' must be HOST:PORT",
    ),
    (
      {'num_processes': 2, 'process_id': 2},
      'process_id=2 must be one of 0 to 1, because num_processes=2',
    ),
  ],
)
def test_invalid_arguments(given, message):
  with pytest.raises(ValueError, match=message):
    distributed.initialize(**given)


def test_variables_must_be_numbers(monkeypatch):
  monkeypatch.setenv('JAX_NUM_PROCESSES', 'two')
  with pytest.raises(
    ValueError, match="num_processes='two' must be an integer"
  ):
    distributed.initialize()


@pytest.mark.parametrize(
  'process_id', [pytest.param(0, marks=pytest.mark.slow), 1]
)
def test_a_host_that_waits_without_success_says_so(process_id):
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
  where = f'for the others at the coordinator address {address}.'
  assert f'{who} is waiting {where}' in done.stderr
  assert f'{who} has waited 2 s {where}' in done.stderr


def test_one_process_needs_none_of_it(tmp_path):
  with distributed.failing_together():
    distributed.check_shared(tmp_path / 'missing')


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_the_second_acts(number):
  received = []
  before = signal.signal(number, lambda *_: received.append('old handler'))
  try:
    with StopSignal() as stop:
      assert not stop.requested()
      os.kill(os.getpid(), number)
      assert stop.requested() and stop.requested()
      assert not received
      os.kill(os.getpid(), number)
      assert received == ['old handler']
    assert stop.message(2, 9, '/run') == (
      f'{number.name}: saved step 2 of 9 in /run. Run the same command to '
      'resume.'
    )
    assert Stopped(stop).code == 128 + number
    # Outside, the old handlers are back.
    os.kill(os.getpid(), number)
    assert received == ['old handler'] * 2
  finally:
    signal.signal(number, before)


def test_handlers_are_restored_after_an_error():
  before = signal.getsignal(signal.SIGTERM)
  with pytest.raises(KeyError), StopSignal():
    raise KeyError
  assert signal.getsignal(signal.SIGTERM) is before

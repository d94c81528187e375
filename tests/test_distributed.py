"""Several processes on loopback as one run, and signals to any run."""

import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from faults.runs import PLAIN, ROOT, Process, everything, free_port, join, steps

from vit_jax.parallel import hosts as distributed
from vit_jax.parallel.hosts import Stopped, StopSignal
from vit_jax.runs.metrics import read_records

# Silent hosts are given up sooner. Parameters, optimizer state and EMA are
# sharded over the devices of both hosts.
CONFIG = f"""
from vit_jax import distributed

distributed.SILENT_S, distributed.POLL_S = 8, 0.2
{PLAIN}"""
FLAGS = [
  '--config.total_steps=1000000',
  '--config.checkpoint.keep_last=100',
  '--config.mesh.fsdp=-1',
  '--config.sharding.target=vit_jax.parallel.sharding.fsdp',
  '--config.sharding.min_elements=1',
]


@pytest.fixture
def start(tmp_path):
  """Return a function that starts a command on two hosts."""
  started = []

  def start_both(command, joining, devices=1):
    hosts = []
    for variables, flags in joining:
      env = variables | {'JAX_NUM_CPU_DEVICES': str(devices)}
      hosts.append(Process(tmp_path, *command, *flags, env=env))
      started.append(hosts[-1])
    return hosts

  yield start_both
  for process in started:
    process.kill()


# Functions that return (environment variables, flags) of two hosts.


def by_environment():
  variables = {
    'JAX_COORDINATOR_ADDRESS': f'localhost:{free_port()}',
    'JAX_NUM_PROCESSES': '2',
  }
  return [(variables | {'JAX_PROCESS_ID': str(i)}, ()) for i in range(2)]


def by_flags():
  return [({}, flags) for flags in join(2)]


def by_slurm():
  """Variables that srun sets; jax derives a port from the job's number."""
  variables = {
    'SLURM_JOB_ID': str(free_port() % 2**12),
    'SLURM_STEP_NODELIST': 'localhost',
    'SLURM_STEP_NUM_NODES': '1',
    'SLURM_NTASKS': '2',
  }
  return [
    (variables | {'SLURM_PROCID': str(i), 'SLURM_LOCALID': str(i)}, ())
    for i in range(2)
  ]


@pytest.mark.slow
def test_kills_and_signals(start, tmp_path):
  """Hosts that find each other by flags, by Slurm, or by the environment.

  A run of which host 0 is killed, then resumed and stopped by SIGTERM to host
  1, equals one that is stopped by SIGTERM to host 0, bit for bit.
  """
  config = tmp_path / 'config.py'
  config.write_text(CONFIG)
  broken, straight = tmp_path / 'broken', tmp_path / 'straight'

  def start_run(workdir, joining):
    command = ['-m', 'vit_jax.main', '--distributed', f'--workdir={workdir}']
    return start([*command, f'--config={config}', *FLAGS], joining, devices=2)

  def wait_for_checkpoint(workdir, step, hosts):
    def is_there():
      return max(steps(workdir), default=0) >= step

    assert hosts[0].wait_for(is_there), [host.output for host in hosts]

  def stop(receiver, workdir, after_step, hosts):
    """Send SIGTERM to a host as soon as this checkpoint exists."""
    wait_for_checkpoint(workdir, after_step, hosts)
    hosts[receiver].process.send_signal(signal.SIGTERM)
    for host in hosts:
      assert host.finish(60) == 128 + signal.SIGTERM, host.output
    text = hosts[0].output
    assert ' steps on 4 x cpu' in text
    assert 'loss' not in hosts[1].output  # Only host 0 prints progress.
    (step,) = map(int, re.findall(r'SIGTERM: saved step (\d+) of', text))
    assert step == max(steps(workdir))

  hosts = start_run(broken, by_flags())
  wait_for_checkpoint(broken, 1, hosts)
  hosts[0].kill()
  assert hosts[1].finish(60) == 1
  text = hosts[1].output
  assert 'Host 0, which connects the hosts, is gone.' in text
  assert 'Traceback' not in text and ' @ 0x' not in text

  resumed = max(steps(broken))
  hosts = start_run(broken, by_slurm())
  stop(1, broken, resumed + 5, hosts)
  assert f'resumed at step {resumed} of {broken}' in hosts[0].output
  stop(0, straight, resumed + 5, start_run(straight, by_environment()))

  common = max({*steps(broken)} & {*steps(straight)})
  assert common >= resumed + 5
  arrays, other = everything(straight, common), everything(broken, common)
  assert arrays['data/position'] == common * 8
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
  hosts = start(command, by_environment())
  codes = [host.finish(60) for host in hosts]
  texts = [host.output for host in hosts]
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

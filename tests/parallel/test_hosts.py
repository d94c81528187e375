"""Two processes on loopback as one run. One pair serves all questions."""

import os
import signal
import time

import numpy as np
import pytest
from processes import PLAIN, Process, free_port, join, steps, undisturbed

from vit_jax.parallel import hosts
from vit_jax.parallel.hosts import StopSignal
from vit_jax.runs.checkpoint import load_params
from vit_jax.runs.records import read_records

FLAGS = [
  '--config.mesh.fsdp=-1',
  '--config.sharding.target=vit_jax.parallel.sharding.fsdp',
  '--config.sharding.min_elements=1',
  '--config.checkpoints.keep_last=100',
]


@pytest.fixture
def start(tmp_path):
  """Return a function that starts a command on two hosts."""
  started = []

  def start_both(command, of_host, devices=1):
    pair = []
    for env, flags in of_host:
      env = env | {'JAX_NUM_CPU_DEVICES': str(devices)}
      pair.append(Process(tmp_path, *command, *flags, env=env))
      started.append(pair[-1])
    return pair

  yield start_both
  for process in started:
    process.kill()


def results(workdir):
  """Return parameters, and losses as means of three steps, as CONFIG writes."""
  losses = [r['train/loss'] for r in read_records(workdir) if 'train/loss' in r]
  means = np.reshape(losses[: len(losses) // 13 * 13], (13, -1)).mean(axis=1)
  return load_params(workdir)[0] | {'losses': means}


@pytest.mark.slow
def test_two_hosts_are_one_run(start, tmp_path):
  """They train as one process does; SIGTERM, then a kill, end and resume it."""
  config, workdir = tmp_path / 'config.py', tmp_path / 'both'
  config.write_text(PLAIN)
  command = ['-m', 'vit_jax.main', f'--config={config}', *FLAGS]
  command.append(f'--workdir={workdir}')

  def begin(*flags):
    return start([*command, *flags], [({}, x) for x in join(2)], devices=2)

  def wait_for(pair, step):
    is_there = lambda: max(steps(workdir), default=0) >= step  # noqa: E731
    assert pair[0].wait_for(is_there), [host.output for host in pair]

  pair = begin()
  wait_for(pair, 5)
  pair[1].process.send_signal(signal.SIGTERM)
  codes = [host.finish() for host in pair]
  stopped = max(steps(workdir))
  assert codes == [128 + signal.SIGTERM] * 2 or stopped == 40
  assert f'saved step {stopped} of 40' in pair[0].output
  assert 'loss' not in pair[1].output  # Only host 0 prints progress.
  assert ' steps on 4 x cpu' in pair[0].output

  pair = begin()
  assert [host.finish() for host in pair] == [0, 0], pair[0].output
  assert f'resumed at step {stopped}' in pair[0].output
  # Four devices of one process sum in another order than one device, too, and
  # Adam scales what is only rounding: their difference gives the bound.
  alone = tmp_path / 'alone'
  process = Process(
    tmp_path,
    *[*command[:-1], f'--workdir={alone}'],
    env={'JAX_NUM_CPU_DEVICES': '4'},
  )
  assert process.finish() == 0, process.output
  one, four, two = map(results, (undisturbed(), alone, workdir))
  for path, expected in one.items():
    rounding = np.abs(four[path] - expected).max()
    atol = max(4 * rounding, 1e-6)
    np.testing.assert_allclose(two[path], expected, atol=atol, err_msg=path)

  # If a host is killed, the coordinator ends the other.
  pair = begin('--config.total_steps=100000', '--allow_changes=total_steps')
  wait_for(pair, 45)
  pair[1].kill()
  begun = time.monotonic()
  assert pair[0].finish(200) not in (0, 1)  # a cluster starts it again
  assert time.monotonic() - begun < 150

  # Hosts with different configs refuse to start.
  (first, second), folder = join(2), tmp_path / 'other'
  pair = start(
    [*command[:-1], f'--workdir={folder}'],
    [({}, first), ({}, (*second, '--config.seed=9'))],
  )
  assert [host.finish() for host in pair] == [1, 1]
  assert 'config.seed: 3 on host 0, 9 here' in pair[1].output
  assert 'Hosts [1] differ from host 0' in pair[0].output


TOGETHER = """
import pathlib, sys
import jax
from vit_jax.parallel import hosts
from vit_jax.runs import workdirs

folder = pathlib.Path(sys.argv[1])
hosts.initialize()
with hosts.failing_together():
  assert hosts.broadcast({'from': jax.process_index()}) == {'from': 0}
  assert hosts.on_any(jax.process_index() == 1) == [1]
  workdirs.Claim(folder)
  own = folder / str(jax.process_index())
  own.mkdir()
  workdirs.Claim(own)
"""


@pytest.mark.slow
def test_hosts_agree(start, tmp_path):
  env = {
    'JAX_COORDINATOR_ADDRESS': f'localhost:{free_port()}',
    'JAX_NUM_PROCESSES': '2',
  }
  pair = start(
    ['-c', TOGETHER, str(tmp_path)],
    [(env | {'JAX_PROCESS_ID': str(i)}, ()) for i in range(2)],
  )
  assert [host.finish(200) for host in pair] == [os.EX_SOFTWARE] * 2
  for i, host in enumerate(pair):
    text = f'--workdir={tmp_path / str(i)} is not the same folder on all hosts'
    assert f'{text}: hosts [1] do not see' in host.output


def test_one_process_needs_none_of_it(tmp_path):
  with hosts.failing_together():
    assert hosts.broadcast({'a': [1]}) == {'a': [1]}
    assert hosts.on_any(False) == [] and hosts.on_any(True) == [0]
    hosts.refuse_differences({'seed': '1'})


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_the_second_acts(number, capsys):
  received = []
  before = signal.signal(number, lambda *_: received.append('old handler'))
  try:
    with StopSignal() as stop:
      assert not stop.requested(1)
      os.kill(os.getpid(), number)
      assert stop.requested(2) == stop.requested(3) == number
      assert not received
      os.kill(os.getpid(), number)
      assert received == ['old handler']
    # Outside, the old handlers are back.
    os.kill(os.getpid(), number)
    assert received == ['old handler'] * 2
  finally:
    signal.signal(number, before)
  assert f'{number.name}: saving after this step' in capsys.readouterr().err
  with pytest.raises(KeyError), StopSignal():
    raise KeyError
  assert signal.getsignal(number) is before

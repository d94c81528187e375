"""Metrics of a run: what is measured, and when it is fetched."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import scalars

from vit_jax.analysis import chips
from vit_jax.durations import Timeline, steps
from vit_jax.io import terminal
from vit_jax.runs import monitor as monitor_lib
from vit_jax.runs.monitor import Monitor, NonFiniteError
from vit_jax.runs.records import read_records


def make_monitor(workdir, **kwargs):
  total_steps = kwargs.pop('total_steps', 10)
  logging = monitor_lib.Logging(steps(kwargs.pop('every', 2)))
  return Monitor(workdir, Timeline(16, 100, total_steps), logging, **kwargs)


@pytest.fixture
def clock(monkeypatch):
  """A clock of monitor.py that stands still."""
  found = types.SimpleNamespace(now=100.0)
  found.perf_counter = lambda: found.now
  found.process_time = lambda: 2 * found.now  # two busy threads
  monkeypatch.setattr(monitor_lib, 'time', found)
  return found


class Spy:
  """A scalar that records in a list when it is fetched to the host."""

  def __init__(self, name, value, fetched):
    self._name, self._value, self._fetched = name, value, fetched

  def __array__(self, *args, **kwargs):
    self._fetched.append(self._name)
    return np.float32(self._value)


def test_a_step_is_fetched_only_after_the_next_is_dispatched(tmp_path):
  monitor, fetched = make_monitor(tmp_path), []
  for step in (1, 2, 3):
    monitor.step(step, {'loss': Spy(step, 0.5 * step, fetched)})
    # The host waits for the first step, which compiles.
    assert fetched == list(range(1, max(2, step)))
  assert [r['step'] for r in read_records(tmp_path)] == [2]
  monitor.flush()
  monitor.flush()  # there is nothing left
  assert fetched == [1, 2, 3]
  monitor.close()


@pytest.mark.parametrize('total, count', [(3, 3), (60, 20), (4000, 80)])
def test_a_short_run_has_twenty_records(total, count, tmp_path):
  timeline = Timeline(4, 99, total)
  monitor = Monitor(tmp_path, timeline)
  for step in range(1, total + 1):
    monitor.step(step, {'loss': np.float32(1)})
  monitor.flush()
  monitor.close()
  assert len(read_records(tmp_path)) == count


def test_records_are_means_over_the_interval(tmp_path):
  monitor = make_monitor(
    tmp_path, total_steps=5, learning_rate=lambda step: jnp.float32(0.5) * step
  )
  for step in range(1, 6):
    monitor.step(step, {'loss': jnp.float32(step)}, skipped=step // 3)
  monitor.flush()
  monitor.close()
  records = read_records(tmp_path)
  # Every second step, and the last one, which is no shorter.
  assert [r['step'] for r in records] == [2, 4, 5]
  assert [r['train/loss'] for r in records] == [1.5, 3.5, 4.0]
  # Update n uses the learning rate at n - 1.
  assert [r['train/lr'] for r in records] == [0.5, 1.5, 2.0]
  assert [r.get('data_skipped') for r in records] == [None, 1, 1]
  assert [r['progress'] for r in records] == [0.4, 0.8, 1.0]
  assert all(r['memory_gb'] > 0.01 and 'mfu' not in r for r in records)


def test_rates_and_phases(tmp_path, clock, monkeypatch, capsys):
  kind = jax.devices()[0].device_kind
  monkeypatch.setitem(chips.CHIPS, kind, chips.Chip(1e12))
  monitor = make_monitor(tmp_path, flops_per_step=4e12)
  clock.now += 50  # compilation
  monitor.step(1, {'loss': 1.0})
  spent = {'reading': 5.0, 'decoding': 7.0}
  for step in (2, 3, 4):
    with monitor.waiting(spent):
      clock.now += 0.5
      spent['reading'] += 3  # of several threads
      spent['decoding'] += 1
    clock.now += 1.5
    with monitor.pause('saving'):
      clock.now += 7
    monitor.step(step, {'loss': 1.0})
  monitor.flush()
  monitor.finish(4)
  monitor.close()
  first, second, _ = read_records(tmp_path)
  # Step 2 was fetched after step 3 was dispatched; 4 s for steps 2 and 3.
  assert first['images_per_s'] == pytest.approx(16 / 4)
  assert second['images_per_s'] == pytest.approx(2 * 16 / 2)
  assert second['data_wait'] == pytest.approx(0.5 / 2)
  assert second['data_wait/reading'] == pytest.approx(0.75 * 0.5 / 2)
  assert second['data_wait/decoding'] == pytest.approx(0.25 * 0.5 / 2)
  assert second['mfu'] == pytest.approx(4e12 / (8 * 1e12 * 2 / 2))
  assert second['exaflops'] == pytest.approx(4 * 4e12 / 1e18)
  assert second['eta_s'] == pytest.approx(6 * 2 / 2)
  found = {k[8:]: v for k, v in second.items() if k.startswith('seconds/')}
  expected = {'compile': 50, 'data': 1.5, 'steps': 4.5, 'saving': 21}
  assert found == {'setup': 0} | expected
  assert second['cpu_seconds'] == 2 * (1.5 + 4.5)
  out = capsys.readouterr().out
  assert 'wall time 0:01:17 |' in out and 'saving 27.3%' in out


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_nan_stops_and_names_the_step(value, tmp_path):
  monitor = make_monitor(tmp_path)
  losses = [1.0, 2.0, value, 1.0]
  with pytest.raises(NonFiniteError, match=f'loss={value} in step 3 of 10'):
    for step, loss in enumerate(losses, 1):
      monitor.step(step, {'loss': jnp.float32(loss), 'accuracy': 0.5})
  assert step == 4
  monitor.close()
  assert [r['train/loss'] for r in read_records(tmp_path)] == [1.5]


def test_resuming_removes_records_of_lost_steps(tmp_path, clock):
  monitor = make_monitor(tmp_path)
  for step in range(1, 8):
    monitor.step(step, {'loss': float(step)})
    clock.now += 1
  monitor.close()  # killed: step 6 is logged, step 7 is lost
  with (tmp_path / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 8, "tr')
  assert [r['step'] for r in read_records(tmp_path)] == [2, 4, 6]

  monitor = make_monitor(
    tmp_path,
    start_step=4,
    carried={'seconds': {'steps': 9.0}, 'cpu_seconds': 12.0},
  )
  assert [r['step'] for r in read_records(tmp_path)] == [2, 4]
  for step in (5, 6):
    clock.now += 1
    monitor.step(step, {'loss': 10.0})
  monitor.flush()
  monitor.close()
  records = read_records(tmp_path)
  assert [(r['step'], r['train/loss']) for r in records] == [
    *((2, 1.5), (4, 3.5), (6, 10.0))
  ]
  assert records[-1]['seconds/steps'] == 10
  assert records[-1]['cpu_seconds'] == 14
  shown = scalars(tmp_path)['train/loss']
  assert shown == [(2, 1.5), (4, 3.5), (6, 10.0)]


@pytest.mark.parametrize(
  ('kind', 'tera'),
  [
    *(('TPU v5 lite', 197), ('TPU v5p', 459), ('TPU v5', 459)),
    *(('NVIDIA H100 80GB HBM3', 989), ('NVIDIA H100 PCIe', 756)),
    *(('NVIDIA L40S', 362), ('NVIDIA L40', 181), ('NVIDIA L4', 121)),
    *(('NVIDIA GH200 480GB', 989), ('cpu', None)),
  ],
)
def test_peak_flops(kind, tera):
  found = chips.find(kind)
  assert (found and found.peak_flops) == (tera and tera * 1e12)
  if 'GH200' in kind:  # the peak of an H200, but not its memory
    assert not found.hbm_gib


def test_output_to_a_file_is_plain_lines(tmp_path, capsys):
  monitor = make_monitor(tmp_path, total_steps=1000)
  for step in (1, 2):
    monitor.step(step, {'loss': 0.5})
  monitor.flush()
  terminal.say('[brackets] are not markup')
  monitor.close()
  *_, first, second = capsys.readouterr().out.splitlines()
  assert first.startswith('   2/1000 loss 0.5 | ')
  assert second == '[brackets] are not markup'

"""Metrics: what is measured, when it is fetched, and what is written."""

import json
import re
import struct
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from vit_jax.runs import metrics, terminal
from vit_jax.runs.metrics import Monitor, NonFiniteError, Writer, read_records


def make_monitor(workdir, **kwargs):
  defaults = {'total_steps': 10, 'batch_size': 16, 'log_every_steps': 2}
  return Monitor(workdir, **(defaults | kwargs))


class Spy:
  """A scalar that records in a list when it is fetched to the host."""

  def __init__(self, name, value, fetched):
    self._name, self._value, self._fetched = name, value, fetched

  def __array__(self, *args, **kwargs):
    self._fetched.append(self._name)
    return np.float32(self._value)


def test_the_first_step_is_timed_from_the_start(tmp_path, capsys, monkeypatch):
  clock = types.SimpleNamespace(now=0.0)
  clock.perf_counter = lambda: clock.now
  monkeypatch.setattr(metrics, 'time', clock)
  monitor = make_monitor(tmp_path, log_every_steps=1)
  monitor.step(1, {'loss': 1.0})
  clock.now = 7.0
  monitor.compiled(1)
  monitor.close()
  out = capsys.readouterr().out
  assert 'first step, including compilation: 7.0 s' in out


def test_a_step_is_fetched_only_after_the_next_is_dispatched(tmp_path):
  monitor, fetched = make_monitor(tmp_path), []
  for step in (1, 2, 3):
    monitor.step(step, {'loss': Spy(step, 0.5 * step, fetched)})
    assert fetched == list(range(1, step))
  assert [r['step'] for r in read_records(tmp_path)] == [2]
  monitor.flush()
  monitor.flush()  # there is nothing left
  assert fetched == [1, 2, 3]
  monitor.close()


def test_records_are_means_over_the_interval(tmp_path):
  monitor = make_monitor(
    tmp_path,
    total_steps=5,
    learning_rate=lambda step: jnp.float32(0.5) * step,
  )
  for step in range(1, 6):
    monitor.step(step, {'loss': jnp.float32(step)}, skipped=step // 3)
  monitor.flush()
  monitor.close()
  records = read_records(tmp_path)
  # Every second step, and the last one.
  assert [r['step'] for r in records] == [2, 4, 5]
  assert [r['train/loss'] for r in records] == [1.5, 3.5, 5.0]
  # Update n uses the learning rate at n - 1.
  assert [r['train/lr'] for r in records] == [0.5, 1.5, 2.0]
  assert [r.get('data_skipped') for r in records] == [None, 1, 1]
  assert all(r['memory_gb'] > 0.01 and 'mfu' not in r for r in records)


@pytest.mark.parametrize('flops_per_step', [4e12, lambda: 4e12])
def test_rates(tmp_path, monkeypatch, flops_per_step):
  clock = types.SimpleNamespace(now=100.0)
  clock.perf_counter = lambda: clock.now
  monkeypatch.setattr(metrics, 'time', clock)
  kind = jax.devices()[0].device_kind
  monkeypatch.setitem(metrics.PEAK_FLOPS, kind, 1e12)
  monitor = make_monitor(tmp_path, flops_per_step=flops_per_step)
  clock.now += 50  # compilation
  monitor.step(1, {'loss': 1.0})
  monitor.flush()
  monitor.restart_clock(1)
  for step in (2, 3, 4):
    with monitor.waiting('transfer'):
      clock.now += 0.5
    clock.now += 1.5
    with monitor.pause():
      clock.now += 7
    monitor.step(step, {'loss': 1.0})
  monitor.flush()
  monitor.close()
  first, second = read_records(tmp_path)
  # Step 2 was fetched after step 3 was dispatched; 4 s for steps 2 and 3.
  assert first['images_per_s'] == pytest.approx(16 / 4)
  assert second['images_per_s'] == pytest.approx(2 * 16 / 2)
  assert second['images_per_s_per_device'] == pytest.approx(2 * 16 / 2 / 8)
  assert second['data_wait'] == pytest.approx(0.5 / 2)
  assert second['mfu'] == pytest.approx(4e12 / (8 * 1e12 * 2 / 2))
  assert second['eta_s'] == pytest.approx(6 * 2 / 2)


@pytest.mark.parametrize(
  ('losses', 'last_step', 'shown'),
  [
    ([1.0, 2.0, np.nan, 1.0], 4, r'loss=nan in step 3 \(of 10\)'),
    ([1.0, 2.0, np.inf, np.nan], 4, r'loss=inf in step 3 and 4 \(of 10\)'),
    ([1.0, 2.0, np.nan], 3, r'loss=nan in step 3 \(of 10\)'),
  ],
)
def test_nan_stops_and_names_the_steps(losses, last_step, shown, tmp_path):
  monitor = make_monitor(tmp_path)
  shown += r'\. The last finite step was 2\. Earlier checkpoints are kept'
  with pytest.raises(NonFiniteError, match=shown):
    for step, loss in enumerate(losses, 1):
      monitor.step(step, {'loss': jnp.float32(loss), 'accuracy': 0.5})
    assert step == last_step
    monitor.flush()
  monitor.close()
  assert [r['train/loss'] for r in read_records(tmp_path)] == [1.5]


def test_resuming_removes_records_of_lost_steps(tmp_path):
  monitor = make_monitor(tmp_path)
  for step in range(1, 8):
    monitor.step(step, {'loss': float(step)})
  monitor.close()  # killed: step 6 is logged, step 7 is lost
  assert [r['step'] for r in read_records(tmp_path)] == [2, 4, 6]

  monitor = make_monitor(tmp_path, start_step=4)
  assert [r['step'] for r in read_records(tmp_path)] == [2, 4]
  for step in (5, 6):
    monitor.step(step, {'loss': 10.0})
  monitor.flush()
  monitor.close()
  records = read_records(tmp_path)
  assert [(r['step'], r['train/loss']) for r in records] == [
    *((2, 1.5), (4, 3.5), (6, 10.0))
  ]


def test_a_writer_without_start_appends(tmp_path):
  for value in (1.0, 2.0):
    writer = Writer(tmp_path)
    writer.write(5, {'test/accuracy': value})
    writer.close()
  assert [r['test/accuracy'] for r in read_records(tmp_path)] == [1.0, 2.0]
  lines = (tmp_path / 'metrics.jsonl').read_text().splitlines()
  assert json.loads(lines[0])['time'].endswith('+00:00')
  assert read_records(tmp_path / 'nowhere') == []


def scalars(path):
  """Return [(step, tag, value)] of a TensorBoard file."""
  data, found = path.read_bytes(), []  # length, crc, event, crc, ...
  while data:
    (length,) = struct.unpack('<Q', data[:8])
    event = event_pb2.Event.FromString(data[12 : 12 + length])
    found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
    data = data[16 + length :]
  return found


def test_tensorboard(tmp_path):
  writer = Writer(tmp_path, start_step=0)
  writer.write(3, {'train/loss': 0.25, 'val/accuracy': 0.5})
  writer.close()
  (events,) = tmp_path.glob('events.out.tfevents.*')
  assert scalars(events) == [(3, 'train/loss', 0.25), (3, 'val/accuracy', 0.5)]


@pytest.mark.parametrize(
  ('kind', 'tera'),
  [
    ('TPU v5 lite', 197),
    ('TPU v5p', 459),
    ('TPU v6 lite', 918),
    ('NVIDIA H100 80GB HBM3', 989),
    ('NVIDIA H100 PCIe', 756),
    ('NVIDIA L40S', 362),
    ('NVIDIA L40', 181),
    ('NVIDIA A100-SXM4-80GB', 312),
    ('NVIDIA H200', 989),
    ('NVIDIA GH200 480GB', 989),
    ('TPU v5', 459),
    ('NVIDIA L4', 121),
    ('cpu', None),
  ],
)
def test_peak_flops(kind, tera):
  assert metrics.peak_flops(kind) == (tera and tera * 1e12)


def test_waiting_is_divided_among_its_causes(tmp_path, monkeypatch):
  clock = types.SimpleNamespace(now=0.0)
  clock.perf_counter = lambda: clock.now
  monkeypatch.setattr(metrics, 'time', clock)
  monitor = make_monitor(tmp_path, log_every_steps=2)
  spent = {'reading': 5.0, 'decoding': 7.0}
  for step in (1, 2):
    with monitor.waiting(spent):
      spent['reading'] += 3  # of several threads
      spent['decoding'] += 1
      clock.now += 2
    with monitor.waiting('transfer'):
      clock.now += 1
    clock.now += 7
    monitor.step(step, {'loss': 1.0})
  monitor.flush()
  (record,) = read_records(tmp_path)
  assert record['data_wait'] == pytest.approx(0.3)
  assert record['data_wait/reading'] == pytest.approx(0.15)
  assert record['data_wait/decoding'] == pytest.approx(0.05)
  assert record['data_wait/transfer'] == pytest.approx(0.1)
  numbers = {k: v for k, v in record.items() if isinstance(v, float)}
  assert 'data wait 30% (reading)' in terminal.line(numbers)


def test_terminal_line():
  record = {
    'train/loss': 1.23456,
    'train/lr': 3e-4,
    'train/grad_norm': 0.98765,
    'train/accuracy': 0.5,
    'images_per_s': 12345.6,
    'mfu': 0.4321,
    'data_wait': 0.05,
    'memory_gb': 1.26,
    'val/accuracy': 0.98765,
    'val/ece': 0.1,
    'few/5shot_seed0': 0.1,
    'exaflops': 0.1,
    'eta_s': 3725.4,
  }
  assert terminal.line(record) == (
    'loss 1.235 | lr 3.00e-04 | grad 0.988 | img/s 12,346 | mfu 43.2% | '
    'data wait 5% | mem 1.3GB | val/accuracy 0.9877 | eta 1:02:05'
  )


def test_speed_per_device_needs_several_devices():
  record = {'images_per_s': 80.0, 'images_per_s_per_device': 80.0}
  assert terminal.line(record) == 'img/s 80'
  record['images_per_s_per_device'] = 10.0
  assert terminal.line(record) == 'img/s 80 | img/s/dev 10'


def test_wrapping_breaks_between_fields_and_words():
  record = ' 100/1300 loss 6.022 | lr 2.28e-03 | data wait 1% | eta 0:16:49'
  assert terminal.wrap(record, 80) == record
  assert terminal.wrap(record, 44).split('\n') == [
    ' 100/1300 loss 6.022 | lr 2.28e-03 |',
    '     data wait 1% | eta 0:16:49',
  ]
  path = '/a/very/long/path/of-a-run/checkpoints/1300:'
  text = f'parameters of {path} 71 arrays\n  head dropped'
  assert terminal.wrap(text, 30).split('\n') == [
    *('parameters of', f'    {path}', '    71 arrays', '  head dropped')
  ]
  for width in range(20, 90):
    for line in terminal.wrap(record, width).split('\n'):
      assert len(line) <= width
    assert terminal.wrap(record, width).split() == record.split()


def in_a_terminal(monkeypatch, columns):
  monkeypatch.setenv('FORCE_COLOR', '1')
  monkeypatch.setenv('TERM', 'xterm')
  monkeypatch.setenv('COLUMNS', str(columns))


def test_a_terminal_gets_lines_that_fit(capsys, monkeypatch):
  in_a_terminal(monkeypatch, 80)
  record = {
    'train/loss': 6.022,
    'train/lr': 2.28e-3,
    'train/grad_norm': 1.17,
    'images_per_s': 152.0,
    'images_per_s_per_device': 19.0,
    'data_wait': 0.01,
    'memory_gb': 1.1,
    'eta_s': 1009.0,
  }
  terminal.Terminal(0, 1300).show(100, record)
  terminal.heading(f'12/16 {"a_long_name_" * 4} | 11 done | study eta 0:10:00')
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 4
  assert all(len(line) <= 80 for line in lines)
  assert '    ' in lines[1] and 'eta 0:16:49' in lines[1]
  assert 'study eta 0:10:00' in ' '.join(x.strip() for x in lines[2:])


def test_the_bar_labels_its_times(capsys, monkeypatch):
  in_a_terminal(monkeypatch, 80)
  shown = terminal.Terminal(0, 100_000)
  shown.advance(99_000)
  shown.close()
  out = re.sub(r'\x1b\[[0-9;?]*[a-zA-Z]', '', capsys.readouterr().out)
  *_, bar = [x for x in re.split('[\r\n]', out) if 'training' in x]
  assert '99000/100000' in bar and len(bar) <= 80
  assert 'elapsed 0:00:0' in bar and 'left ' in bar


def test_a_file_says_how_long_something_takes(capsys, monkeypatch):
  clock = types.SimpleNamespace(now=0.0)
  clock.monotonic = lambda: clock.now
  monkeypatch.setattr(terminal, 'time', clock)
  waits = []

  class Event(threading.Event):
    def wait(self, timeout):
      waits.append(timeout)
      clock.now += timeout
      return len(waits) == 4

  monkeypatch.setattr(terminal.threading, 'Event', Event)
  terminal.say('compiling ...')
  terminal._remind('compiling ...', Event(), terminal.console())
  assert capsys.readouterr().out.splitlines() == [
    'compiling ...',
    *(f'compiling ... {seconds} s' for seconds in (10, 20, 40)),
  ]


def test_output_to_a_file_is_plain_lines(tmp_path, capsys):
  monitor = make_monitor(tmp_path, total_steps=1000)
  monitor.step(2, {'loss': 0.5})
  monitor.flush()
  monitor.say('[brackets] are not markup')
  monitor.close()
  first, second = capsys.readouterr().out.splitlines()
  assert first.startswith('   2/1000 loss 0.25 | ')
  assert second == '[brackets] are not markup'


def test_a_terminal_shows_a_bar(capsys, monkeypatch):
  monkeypatch.setenv('FORCE_COLOR', '1')
  shown = terminal.Terminal(3, 17)
  shown.advance(4)
  shown.say('a line')
  shown.close()
  out = capsys.readouterr().out
  assert '4/17' in out and 'a line' in out


def test_table():
  table = terminal.table('T', ['', 'a'], [('x', '1'), ('y', '2')])
  assert (table.row_count, len(table.columns)) == (2, 2)


def test_the_time_is_divided_into_phases(tmp_path, monkeypatch):
  """Also over a kill: what came after the checkpoint is lost."""
  clock = types.SimpleNamespace(now=0.0)
  clock.perf_counter = lambda: clock.now
  monkeypatch.setattr(metrics, 'time', clock)

  def run(start, steps):
    stopwatch = metrics.Stopwatch()
    clock.now += 10
    monitor = make_monitor(tmp_path, start_step=start, stopwatch=stopwatch)
    for step in steps:
      with monitor.waiting('transfer'):
        clock.now += 1
      clock.now += 4 if step > start + 1 else 20
      monitor.step(step, {'loss': 1.0})
      if step == start + 1:
        monitor.compiled(step)
    monitor.flush()
    with monitor.pause('saving'):
      clock.now += 3
    return monitor

  def seconds():
    found = read_records(tmp_path)[-1]
    phases = {k: v for k, v in found.items() if k.startswith('seconds/')}
    total = sum(phases.values())
    assert found['goodput'] == pytest.approx(phases['seconds/steps'] / total)
    return {k.removeprefix('seconds/'): v for k, v in phases.items()}, found

  run(0, range(1, 7)).close()  # killed while it writes a checkpoint
  spent, last = seconds()
  assert spent == {'setup': 10, 'compile': 20, 'data': 6, 'steps': 20}
  assert last['progress'] == 0.6
  monitor = run(4, (5, 6))  # resumes from the checkpoint before
  monitor.finish(6)
  monitor.close()
  spent, _ = seconds()
  # The record of step 4 was written after step 5 was dispatched.
  assert spent.pop('lost') == 5 + 3
  assert spent == {
    'setup': 20,
    'compile': 40,
    'data': 7,
    'steps': 20,
    'saving': 3,
  }
  assert clock.now == sum(spent.values()) + 5 + 3


def test_a_checkpoint_carries_what_was_not_yet_recorded(tmp_path):
  """Means over an interval with a restart are those of a run without one."""
  losses = np.random.default_rng(0).normal(size=10).astype(np.float32)

  def run(workdir, start, end, carried=None):
    workdir.mkdir(exist_ok=True)
    monitor = make_monitor(
      workdir, start_step=start, log_every_steps=3, carried=carried
    )
    for step in range(start + 1, end + 1):
      monitor.step(step, {'loss': losses[step - 1]})
    monitor.flush()
    carried = json.loads(json.dumps(monitor.carry(end)))
    monitor.close()
    return carried

  run(tmp_path / 'straight', 0, 10)
  carried = run(tmp_path / 'stopped', 0, 5)
  run(tmp_path / 'stopped', 5, 7, carried)  # killed before a checkpoint
  run(tmp_path / 'stopped', 5, 10, carried)
  found = [
    [(r['step'], r['train/loss']) for r in read_records(tmp_path / name)]
    for name in ('straight', 'stopped')
  ]
  assert found[0] == found[1] and [x for x, _ in found[0]] == [3, 6, 9, 10]


def test_work_that_a_checkpoint_has_is_not_lost(tmp_path, monkeypatch, capsys):
  """Even if no record was written between it and the record before."""
  clock = types.SimpleNamespace(now=0.0)
  clock.perf_counter = lambda: clock.now
  monkeypatch.setattr(metrics, 'time', clock)

  def run(start, end, carried=None):
    monitor = make_monitor(
      tmp_path, start_step=start, log_every_steps=5, carried=carried
    )
    for step in range(start + 1, end + 1):
      clock.now += 2
      monitor.step(step, {'loss': 1.0})
      if step == start + 1:
        monitor.compiled(step)
    monitor.flush()
    return monitor

  first = run(0, 4)
  with first.pause('saving'):
    carried = first.carry(4)
    clock.now += 1
  run(4, 9, carried)  # killed after step 9, of which there is no record
  last = run(4, 10, carried)
  last.finish(10)
  last.close()
  record = read_records(tmp_path)[-1]
  phases = {k: v for k, v in record.items() if k.startswith('seconds/')}
  # Steps 1 and 5 count as compilation. Saving was not part of the checkpoint.
  assert phases == {
    'seconds/setup': 0,
    'seconds/compile': 4,
    'seconds/steps': 16,
    'seconds/lost': 1 + 10,
  }
  assert clock.now == 4 * 2 + 1 + 5 * 2 + 6 * 2
  *_, line = capsys.readouterr().out.splitlines()
  assert line.startswith('wall time 0:00:31 | goodput (steps) 51.6% | comp')
  assert line.endswith('| restoring 0.0% | setup 0.0% | lost 35.5%')
  assert not (tmp_path / '.seconds.json').exists()


def test_data_that_arrives_during_a_step_costs_nothing(tmp_path, monkeypatch):
  clock = types.SimpleNamespace(now=0.0)
  clock.perf_counter = lambda: clock.now
  monkeypatch.setattr(metrics, 'time', clock)
  monitor = make_monitor(tmp_path, log_every_steps=10)
  clock.now += 1
  monitor.step(1, {'loss': jnp.float32(1)})
  monitor.compiled(1)
  for step, is_computing in ((2, True), (3, False)):
    monkeypatch.setattr(monitor, '_is_computing', lambda x=is_computing: x)
    with monitor.waiting('transfer'):
      clock.now += 2
    monitor.step(step, {'loss': jnp.float32(1)})
  monitor.flush()
  monitor.finish(3)
  monitor.close()
  last = read_records(tmp_path)[-1]
  assert (last['seconds/steps'], last['seconds/data']) == (2, 2)

"""Files that grow: metrics.jsonl and TensorBoard's events, damaged or not."""

import json
import math
import os

import pytest
from etils import epath
from fsspec.implementations.memory import MemoryFileSystem
from tensorboardX.proto import event_pb2
from vit_jax.runs.records import open_log, read_records

from vit_jax.runs import records
from vit_jax.runs.metrics import Writer

GOOD = b'{"step": 1, "x": 0.5}\n{"step": 2, "x": 0.25}\n'


def steps(workdir):
  return [record['step'] for record in read_records(workdir)]


def strict(text):
  """Return the values of lines of JSON; NaN and Infinity are refused."""

  def refuse(constant):
    raise ValueError(constant)

  return [json.loads(x, parse_constant=refuse) for x in text.splitlines()]


def events(data):
  """Return the events of a file."""
  found = []
  while data:
    length = int.from_bytes(data[:8], 'little')
    found.append(event_pb2.Event.FromString(data[12 : 12 + length]))
    data = data[16 + length :]
  return found


@pytest.fixture
def store(monkeypatch):
  """An object store in memory: its files, and a list of what was written."""

  class Store(MemoryFileSystem):
    store: dict = {}  # noqa: RUF012
    pseudo_dirs: list = ['']  # noqa: RUF012
    written: list = []  # noqa: RUF012

    def _open(self, path, mode='rb', **kwargs):
      assert mode in ('rb', 'wb')  # stores cannot append
      file = super()._open(path, mode, **kwargs)
      if mode == 'wb':
        write = file.write
        file.write = lambda x: self.written.append(len(x)) or write(x)
      return file

  made = Store(skip_instance_cache=True)
  made.makedirs('s3://bucket/run')
  monkeypatch.setenv('EPATH_USE_TF', 'false')
  monkeypatch.setattr(
    epath.backend.fsspec_backend, '_get_filesystem', lambda name: made
  )
  return made


def test_a_record_is_one_write_at_any_length(tmp_path, monkeypatch):
  writes, write = [], os.write
  monkeypatch.setattr(
    os, 'write', lambda fd, data: writes.append(len(data)) or write(fd, data)
  )
  log, _ = open_log(tmp_path)
  for step in range(1000, 4000):
    log.append({'step': step, 'train/loss': 0.25})
  assert len(writes) == 3000 and len(set(writes)) == 1
  inode = (tmp_path / 'metrics.jsonl').stat().st_ino
  log, found = open_log(tmp_path, last_step=2000)
  assert len(writes) == 3000  # later records were cut off in place
  assert (len(found.kept), len(found.removed)) == (1001, 1999)
  log.append({'step': 2001})
  assert steps(tmp_path) == [*range(1000, 2002)]
  assert (tmp_path / 'metrics.jsonl').stat().st_ino == inode


def test_records_out_of_order_are_removed_too(tmp_path):
  (tmp_path / 'metrics.jsonl').write_text('{"step": 9}\n{"step": 3}\n')
  open_log(tmp_path, last_step=5)
  assert steps(tmp_path) == [3]


@pytest.mark.parametrize(
  ('content', 'kept', 'bad'),
  [
    (GOOD + b'{"step": 3, "x": 0.1', [1, 2], 1),
    (GOOD + b'{"step": 3}', [1, 2, 3], 1),  # only its newline is missing
    (GOOD + b'garbage\n[1]\n7\n{"step": 3}\n', [1, 2, 3], 3),
    (GOOD + b'\0' * 300, [1, 2], 1),
    (b'\xff\xfe\n' + GOOD, [1, 2], 1),
    (GOOD + b'{"loss": 1}\n{"step": "3"}\n{"step": true}\n', [1, 2], 3),
    (GOOD + b'{"step": 3, "x": NaN, "y": -Infinity}\n', [1, 2, 3], 1),
    (b'[' * 100_000 + b'\n' + GOOD, [1, 2], 1),
  ],
)
def test_damaged_lines_are_left_out(content, kept, bad, tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_bytes(content)
  assert steps(tmp_path) == kept
  assert path.read_bytes() == content  # readers change nothing
  log, found = open_log(tmp_path, last_step=10)
  (message,) = found.messages
  assert f'{path} is damaged: {bad} of ' in message
  assert f'The {len(kept)} good records are kept' in message
  assert (tmp_path / 'metrics.jsonl.damaged').read_bytes() == content
  log.append({'step': 4})
  assert steps(tmp_path) == [*kept, 4]
  strict(path.read_text())
  assert not open_log(tmp_path, last_step=10)[1].messages


def test_an_earlier_damaged_file_is_kept(tmp_path):
  for content in ('one', 'two', 'three'):
    (tmp_path / 'metrics.jsonl').write_text(content)
    open_log(tmp_path)
  for name, content in (('', 'one'), ('-1', 'two'), ('-2', 'three')):
    file = tmp_path / f'metrics.jsonl.damaged{name}'
    assert file.read_text() == content
  assert read_records(tmp_path) == []


def test_a_folder_in_place_of_the_file(tmp_path, capsys):
  (tmp_path / 'metrics.jsonl' / 'inside').mkdir(parents=True)
  assert read_records(tmp_path) == []
  writer = Writer(tmp_path, 0)
  writer.write(1, {'loss': 0.5})
  writer.close()
  assert steps(tmp_path) == [1]
  assert (tmp_path / 'metrics.jsonl.damaged' / 'inside').exists()
  (message,) = capsys.readouterr().out.splitlines()
  assert 'metrics.jsonl cannot be read: Is a directory. It was' in message


def test_values_that_are_not_finite_are_json(tmp_path):
  values = {'a': math.nan, 'b': math.inf, 'c': -math.inf, 'd': 0.1 + 0.2}
  writer = Writer(tmp_path)
  writer.write(3, values)
  writer.close()
  (line,) = strict((tmp_path / 'metrics.jsonl').read_text())
  names = {'a': 'NaN', 'b': 'Infinity', 'c': '-Infinity', 'd': 0.1 + 0.2}
  assert line.items() >= names.items()
  (found,) = read_records(tmp_path)
  assert math.isnan(found.pop('a'))
  assert (found['b'], found['c'], found['d']) == (
    math.inf,
    -math.inf,
    0.1 + 0.2,
  )
  (file,) = tmp_path.glob('events.*')
  shown = {
    v.tag: v.simple_value for v in events(file.read_bytes())[-1].summary.value
  }
  assert math.isnan(shown['a']) and shown['b'] == math.inf


@pytest.mark.slow  # pandas takes a second to import
def test_pandas_reads_values_that_are_not_finite(tmp_path):
  pandas = pytest.importorskip('pandas')
  log, _ = open_log(tmp_path)
  for step, value in enumerate((0.5, math.nan, math.inf)):
    log.append({'step': step, 'x': value})
  table = pandas.read_json(tmp_path / 'metrics.jsonl', lines=True)
  assert table['x'].dtype == float and table['x'].isna()[1]
  assert table['x'][2] == math.inf


def test_object_stores_get_segments(store):
  workdir = 's3://bucket/run'
  assert read_records(workdir) == []
  log, _ = open_log(workdir, 0)
  for step in range(1, 701):
    log.append({'step': step})
  names = [f'metrics-{i:06d}.jsonl' for i in range(3)]
  assert sorted(path.name for path in epath.Path(workdir).iterdir()) == names
  assert max(store.written) <= records.SEGMENT * len('{"step": 123}\n')
  assert steps(workdir) == [*range(1, 701)]

  store.written.clear()
  log, found = open_log(workdir, 400)
  assert len(store.written) == 1  # the segment with the step
  assert (len(found.kept), len(found.removed)) == (400, 300)
  for step in range(401, 600):
    log.append({'step': step})
  assert steps(workdir) == [*range(1, 600)]


def test_the_single_file_of_an_older_run_comes_first(store):
  workdir = epath.Path('s3://bucket/run')
  (workdir / 'metrics.jsonl').write_bytes(GOOD)
  store.written.clear()
  log, _ = open_log(workdir, 2)
  log.append({'step': 3})
  assert steps(workdir) == [1, 2, 3] and max(store.written) < len(GOOD)
  (workdir / 'metrics-000000.jsonl').write_bytes(b'{"step": 3}\ngarb')
  _, found = open_log(workdir, 3)
  assert '1 of 2 lines' in found.messages[0] and steps(workdir) == [1, 2, 3]
  aside = workdir / 'metrics-000000.jsonl.damaged'
  assert aside.read_bytes() == b'{"step": 3}\ngarb'


def test_segments_that_were_copied_to_a_disk(tmp_path):
  (tmp_path / 'metrics-000000.jsonl').write_bytes(GOOD)
  (tmp_path / 'metrics-000001.jsonl').write_text('{"step": 3}\n')
  log, _ = open_log(tmp_path, 3)
  log.append({'step': 4})
  assert steps(tmp_path) == [1, 2, 3, 4]


def test_files_of_events_sort_by_age(tmp_path):
  """Also two in one second, and after the clock was set back."""
  late = tmp_path / 'events.out.tfevents.4000000000.host'
  late.write_bytes(b'')
  for step in (1, 2):
    records.Events(tmp_path, purge_step=step).write(step, {'x': step / 2})
  _, *files = sorted(tmp_path.glob('events.*'))
  assert len(files) == 2
  for step, file in enumerate(files, 1):
    version, start, event = events(file.read_bytes())
    assert version.file_version == 'brain.Event:2'
    assert start.session_log.status == event_pb2.SessionLog.START
    assert start.step == event.step == step
    (value,) = event.summary.value
    assert (value.tag, value.simple_value) == ('x', step / 2)


def test_events_on_object_stores(store):
  log = records.Events('s3://bucket/run', purge_step=0)
  for step in range(300):
    log.write(step, {'x': 1.0})
  files = sorted(epath.Path('s3://bucket/run').iterdir())
  found = [events(file.read_bytes()) for file in files]
  assert [e[0].file_version for e in found] == ['brain.Event:2'] * 2
  shown = [e.step for f in found for e in f if e.summary.value]
  assert shown == [*range(300)]


def test_time_of_a_killed_run(tmp_path):
  first = records.Heartbeat(tmp_path)
  assert (first.lived, first.spent) == (0, {})
  first.save(5, {'steps': 3.5})
  first.beat(12.5)
  second = records.Heartbeat(tmp_path)
  assert (second.lived, second.spent) == (12.5, {5: {'steps': 3.5}})
  for content in ('{"lived": 1', '[]', '{"spent": 3, "lived": 4}', '\0'):
    (tmp_path / '.seconds.json').write_text(content)
    damaged = records.Heartbeat(tmp_path)
    assert (damaged.lived, damaged.spent) == (0, {})
  second.remove()
  second.remove()
  records.Heartbeat(tmp_path / 'gone').beat(1)  # creates nothing
  assert not list(tmp_path.iterdir())

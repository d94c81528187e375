"""The benchmark's arithmetic with given times, and a small run."""

import csv
import json
import pathlib
import statistics
import sys

import pytest

from vit_jax.models import names
from vit_jax.runs import environment
from vit_jax.tools.benchmark import __main__ as benchmark
from vit_jax.tools.benchmark import cases, input, report, rounds

TIMM_COLUMNS = (
  'model,infer_samples_per_sec,infer_step_time,infer_batch_size,'
  'infer_img_size,infer_gmacs,train_samples_per_sec,train_step_time,'
  'train_batch_size,train_img_size,param_count'
)
OUR_COLUMNS = 'mfu mfu_measured hbm_peak compile_s device_kind n_devices '
OUR_COLUMNS += 'precision attention remat'
STARTED = {
  'compile_s': 2.0,
  'param_count': 5_000_000,
  'forward_flops': 6e9,
  'hbm_peak': 1.5,
  'device_kind': 'H100',
  'n_devices': 2,
  'peak_flops': 1e12,
}
CASE = {'model': 'B/16', 'mode': 'train', 'batch_size': 10, 'image_size': 224}
CASE |= {'precision': 'bfloat16', 'attention': 'auto', 'remat': 'none'}
CASE |= {'scan': False}
FAKE = """
from vit_jax.tools.benchmark import workers
class Fake:
  def __init__(self, settings):
    {start}
    self.started = {started}
    self._times = iter({times})
  def round(self, steps):
    print('a library prints on stdout')
    return next(self._times) * steps
  def ceiling(self):
    return dict(flops=5e11)
workers.serve(Fake)
"""


@pytest.fixture
def fake(tmp_path):
  """Writes a worker that claims given times; its command."""

  def write(name, times=(), *, start='pass', started=STARTED):
    path = tmp_path / f'{name}.py'
    text = FAKE.format(start=start, started=started, times=list(times))
    path.write_text(text)
    return [sys.executable, str(path)]

  return write


@pytest.mark.parametrize(
  ('steps', 'count', 'shares'),
  [(30, 5, [6] * 5), (7, 3, [2] * 3), (2, 5, [1, 1]), (1, 1, [1])],
)
def test_rounds_are_equal(steps, count, shares):
  assert rounds.split(steps, count) == shares


def test_workers_take_turns():
  calls = []

  def worker(name):
    return lambda steps: calls.append((name, steps)) or name * steps

  results = rounds.in_turn([worker('a'), worker('b')], [3, 2])
  assert calls == [('a', 3), ('b', 3), ('a', 2), ('b', 2)]
  assert results == [['aaa', 'aa'], ['bbb', 'bb']]


def test_ratio_is_that_of_neighbours():
  # The machine was four times slower in the second round, for both.
  started = {'started': STARTED, 'peer_started': {}}
  found = {'times': [1, 4, 1], 'peer_times': [2, 8, 3]} | started
  row = report.row(CASE, found)
  keys = ('ratio', 'ratio_min', 'ratio_max', 'ratio_of_best')
  assert [row[key] for key in keys] == [2, 2, 3, 2]


def test_row_of_given_times():
  found = {'started': STARTED, 'times': [0.2, 0.1, 0.4], 'ceiling': 5e11}
  row = report.row(CASE, found)
  # 3 passes x 10 images x 6 GFLOP in 0.2 s on two devices: 0.45 TFLOP/s each.
  expected = {
    'train_samples_per_sec': 50,
    'train_step_time': 200,
    'step_time_min': 100,
    'step_time_max': 400,
    'mfu': 0.45,
    'mfu_measured': 0.9,
    'infer_gmacs': 3,
    'param_count': 5,
  }
  assert {k: row[k] for k in expected} == pytest.approx(expected)
  infer = report.row(CASE | {'mode': 'infer'}, found)
  assert infer['mfu'] == pytest.approx(0.15)
  assert infer['infer_batch_size'] == 10
  assert set(row) | set(infer) <= set(report.COLUMNS)


def test_columns_are_timms_and_ours():
  assert ','.join(report.COLUMNS).startswith(TIMM_COLUMNS)
  assert set(OUR_COLUMNS.split()) < set(report.COLUMNS)


def test_peer_and_ours_are_paired(fake):
  found = rounds.measure(
    CASE,
    [2, 2, 2],
    ours=fake('ours', [0.1, 0.4, 0.1]),
    peer=fake('peer', [0.2, 0.6, 0.2], started={'notes': 'eager'}),
    peer_name='other',
  )
  row = report.row(CASE, found)
  assert row['peer'] == 'other (eager)'
  assert [row[k] for k in ('ratio', 'ratio_min', 'ratio_max')] == (
    pytest.approx([2, 1.5, 2])
  )
  assert row['peer_samples_per_sec'] == pytest.approx(50)
  assert row['mfu_measured'] == pytest.approx(1.8)
  said = 'ours / theirs 2.000 (1.500 to 2.000), fastest rounds 2.000'
  assert said in report.line(row)


@pytest.mark.parametrize(
  ('start', 'message'),
  [
    ('raise RuntimeError("RESOURCE_EXHAUSTED: 9 GB")', 'out of memory: Runtim'),
    ('raise MemoryError', 'out of memory: MemoryError'),
    ('import os; os.kill(os.getpid(), 9)', 'out of memory: the process ended'),
    ('import os; os._exit(3)', 'failed: the process ended with status 3'),
    ('raise ValueError("no such thing")', 'failed: ValueError: no such thing'),
  ],
)
def test_what_fails_is_a_row(fake, start, message, tmp_path):
  found = rounds.measure(CASE, [1], ours=fake('ours', start=start))
  row = report.row(CASE, found)
  assert row['error'].startswith(message)
  assert message in report.line(row)
  report.write_csv(tmp_path / 'x.csv', [row])
  with (tmp_path / 'x.csv').open() as file:
    (read,) = csv.DictReader(file)
  assert read['model'] == 'B/16' and read['train_samples_per_sec'] == ''
  assert read['error'] == row['error']


def test_a_peer_without_memory_leaves_ours(fake):
  found = rounds.measure(
    CASE,
    [1],
    ours=fake('ours', [0.1]),
    peer=fake('peer', start='raise RuntimeError("CUDA out of memory")'),
    peer_name='timm',
  )
  row = report.row(CASE, found)
  assert row['train_samples_per_sec'] == pytest.approx(100)
  assert row['error'].startswith('peer out of memory') and 'ratio' not in row


@pytest.mark.parametrize('settings', ['own', 'ours'])
def test_settings_of_the_peers_process(fake, monkeypatch, settings):
  monkeypatch.setattr(environment, 'faster', lambda: {'FASTER': 'yes'})
  theirs = {'notes': 'PLACE'}
  peer = fake('peer', [0.2], started=theirs)
  path = pathlib.Path(peer[1])
  seen = "__import__('os').environ.get('FASTER', 'no')"
  path.write_text(path.read_text().replace("'PLACE'", seen))
  found = rounds.measure(
    CASE,
    [1],
    ours=fake('ours', [0.1]),
    peer=peer,
    peer_name='other',
    peer_settings=settings,
  )
  row = report.row(CASE, found)
  assert row['peer'] == f'other ({"yes" if settings == "ours" else "no"})'
  assert row['peer_settings'] == settings
  assert f'{settings} settings' in report.line(row)


def test_first_batch_size_that_fits(fake, monkeypatch, capsys):
  full = 'if settings["batch_size"] > 4: raise MemoryError'
  command = fake('ours', [0.1], start=full)
  monkeypatch.setattr(cases, 'our_command', lambda: command)
  arguments = ['--models=mu/16,Ti/16', '--steps=1', '--first_fit']
  benchmark.main([*arguments, '--batch_sizes=16,4,2'])
  lines = capsys.readouterr().out.splitlines()
  tried = [line.split(' | ')[0] for line in lines if 'train, batch' in line]
  assert tried == [
    f'{model} train, batch {size}'
    for model in ('mu/16', 'Ti/16')
    for size in (16, 4)
  ]


@pytest.mark.slow
def test_end_to_end(tmp_path, fake, capfd, monkeypatch):
  """A real worker and a peer given by its path, in processes of their own."""
  monkeypatch.setenv('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')  # compiles faster
  _, peer = fake('peer', [1.0] * 2, started={'compile_s': 1.0})
  files = {'csv': tmp_path / 'b.csv', 'json': tmp_path / 'b.json'}
  benchmark.main(
    [
      '--models=mu/16',
      '--mode=infer',
      '--batch_sizes=4',
      '--image_size=32',
      '--steps=4',
      '--rounds=2',
      '--warmup=1',
      '--scan',
      f'--peer={peer}',
      *(f'--{name}={path}' for name, path in files.items()),
    ]
  )
  with files['csv'].open() as file:
    (row,) = csv.DictReader(file)
  (saved,) = json.loads(files['json'].read_text())['cases']
  assert len(saved['times']) == 2
  assert not row['error'] and row['mode'] == 'infer'
  speed = float(row['infer_samples_per_sec'])
  ms, low, high = (
    float(row[k]) for k in ('infer_step_time', 'step_time_min', 'step_time_max')
  )
  assert speed == pytest.approx(4 / ms * 1e3, rel=1e-4)
  assert low <= ms <= high
  count = names.count_parameters('mu/16', image_size=32)
  assert float(row['param_count']) == pytest.approx(count / 1e6, rel=1e-4)
  # 4 patches and the class token, D = 32, M = 128, one layer, 1000 classes.
  tokens, d, m = 5, 32, 128
  macs = 4 * 768 * d + tokens * (4 * d * d + 2 * d * m) + 2 * tokens**2 * d
  macs += 1000 * d
  assert float(row['infer_gmacs']) == pytest.approx(macs / 1e9, rel=1e-4)
  # The peer claims a second per step.
  ratio = statistics.median(1 / t for t in saved['times'])
  assert float(row['ratio']) == pytest.approx(ratio, rel=1e-4)
  assert 0 < float(row['mfu_measured']) < 1 and row['mfu'] == ''
  assert row['precision'] == 'float32' and row['scan'] == 'True'
  assert 'img/s' in capfd.readouterr().out


def test_cases_are_all_combinations():
  arguments = '--models=mu/16 --batch_sizes=1,2 --mode=train,input,infer '
  arguments += '--precision=bfloat16 --remat=none,full --image_size=32'
  found = cases.cases(benchmark.parser().parse_args(arguments.split()))
  modes = [(case['mode'], case['batch_size']) for case in found]
  assert modes[:2] == [('input', 1), ('input', 2)]
  assert len(found) == 2 + 2 * 2 * 2
  assert found[2]['fields'] == {'dtype': 'bfloat16', 'num_classes': 1000}
  assert found[-1]['fields']['remat'] == 'full'
  arguments = '--mode=input --images=imagenet,records --num_threads=1,2'
  found = cases.cases(benchmark.parser().parse_args(arguments.split()))
  assert [(case['images'], case['num_threads']) for case in found] == [
    *(('imagenet', 1), ('imagenet', 2), ('records', 1), ('records', 2))
  ]


@pytest.mark.parametrize(
  ('peer', 'augmentations'),
  [
    ('timm', ['crop', 'deit', 'deit3']),
    ('tf.data', ['crop']),
    ('linen', []),
    ('none', []),
  ],
)
def test_peers_have_what_they_can_do(peer, augmentations):
  arguments = '--models=mu/16 --mode=input,train --augmentation='
  arguments += ','.join(input.AUGMENTATIONS)
  found = cases.cases(benchmark.parser().parse_args(arguments.split()))
  *inputs, train = found
  assert len(inputs) == 4
  commands = {
    case['augmentation']: cases.peer_command(peer, 'python', case)
    for case in inputs
  }
  assert [name for name, x in commands.items() if x] == augmentations
  has_models = cases.peer_command(peer, 'python', train) is not None
  assert has_models == (peer in ('timm', 'linen'))


@pytest.mark.slow
def test_input_is_timed_by_part_and_against_a_peer(tmp_path, monkeypatch):
  """The peer is our own worker: it speaks the protocol without TensorFlow."""
  monkeypatch.setattr(cases, 'peer_command', lambda *_: cases.our_command())
  path = tmp_path / 'rows.csv'
  arguments = '--mode=input --batch_sizes=4 --steps=2 --rounds=2 --warmup=1 '
  arguments += '--image_size=32 --num_threads=1 --peer=tf.data --images=records'
  arguments += ' --augmentation=augreg'
  benchmark.main([*arguments.split(), f'--csv={path}'])
  with path.open() as file:
    (row,) = csv.DictReader(file)
  assert row['images'] == 'records' and row['num_threads'] == '1'
  assert row['augmentation'] == 'augreg'
  assert float(row['ratio']) > 0 and float(row['ratio_of_cpu_time']) >= 0
  parts = [float(row[f'{x}_ms']) for x in ('reading', 'decoding')]
  assert parts[1] > parts[0] and float(row['cpu_ms']) > 0


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--models=Q/16'], 'no model named'),
    (['--models=mu/16', '--peer=timm'], 'timm has no mu/16'),
    (['--models=R50x1', '--peer=linen'], 'is a plain ViT, not R50x1'),
    (['--peer=nowhere.py'], 'nowhere.py does not exist'),
  ],
)
def test_mistakes(arguments, message):
  with pytest.raises(SystemExit, match=message):
    benchmark.main(arguments)


@pytest.mark.parametrize(
  'argument', ['--mode=sing', '--batch_sizes=0', '--attention=x', '--remat=x']
)
def test_bad_arguments(argument, capsys):
  with pytest.raises(SystemExit):
    benchmark.main([argument])
  assert argument.split('=')[0] in capsys.readouterr().err

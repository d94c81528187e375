"""Prepared data sets: written, killed, continued, verified, trained on."""

import csv
import io
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import tarfile
import time

import cv2
import numpy as np
import pytest
from PIL import Image

from vit_jax.data import images
from vit_jax.data.embedded.digits import Digits
from vit_jax.data.embedded.glyphs import Glyphs
from vit_jax.data.sources import open_source
from vit_jax.data.tfds import Tfds
from vit_jax.tools.prepare import __main__ as command
from vit_jax.tools.prepare import duplicates, releases, run, shards

ROOT = pathlib.Path(__file__).parents[2]
NAMES = ('ant', 'bee', 'cat ü')
# EXIF with the orientation 6: to be turned by 90 degrees.
TURNED = b'Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06' + bytes(
  6
)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('cache')))


def photo(seed, height=40, width=56):
  """A smooth image with detail, as photographs have; no two are alike."""
  rng = np.random.default_rng(seed)
  image = np.zeros((height, width, 3))
  for side in (4, 8, 16):
    coarse = rng.uniform(0, 70, (side, side, 1)) + rng.uniform(0, 10, (1, 1, 3))
    image += cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
  return np.clip(image, 0, 255).astype(np.uint8)


def encoded(image, ending='.png', **options):
  file = io.BytesIO()
  kind = {'.jpg': 'JPEG', '.png': 'PNG'}[ending]
  Image.fromarray(image.squeeze()).save(file, kind, **options)
  return file.getvalue()


def files(count=12, ending='.png', **options):
  """Return {'CLASS/NUMBER.png': bytes} in the order of a Folder."""
  return {
    f'{name}/{i:03d}{ending}': encoded(photo(i), ending, **options)
    for label, name in enumerate(NAMES)
    for i in range(label, count, len(NAMES))
  }


def write_folder(path, content):
  for name, data in content.items():
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).write_bytes(data)
  return str(path)


def write_tar(path, content, mode='w'):
  with tarfile.open(path, mode) as tar:
    for name, data in content.items():
      info = tarfile.TarInfo(name)
      info.size = len(data)
      tar.addfile(info, io.BytesIO(data))
  return str(path)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return write_folder(tmp_path_factory.mktemp('folder'), files())


def prepared(source, dest, *flags):
  """Run the command in this process."""
  command.main([str(source), str(dest), *flags])


def refused(capsys, *argv):
  """Return the message of a command that fails with status 1."""
  with pytest.raises(SystemExit) as info:
    command.main([str(x) for x in argv])
  assert info.value.code not in (0, None)
  return str(info.value.code)


def contents(source):
  return [
    (x['image'], source.class_names[x['label']])
    for x in map(source.__getitem__, range(len(source)))
  ]


def data_files(path):
  """Return the bytes of all files except the record, which has dates."""
  return {
    x.name: x.read_bytes()
    for x in sorted(path.iterdir())
    if x.name != 'prepare-train.json'
  }


def read_csv(path):
  return list(csv.DictReader(path.read_text().splitlines()))


def use(monkeypatch, **sources):
  """Let names of sources stand for these objects."""
  monkeypatch.setattr(
    'vit_jax.data.sources.open_source',
    lambda name, **_: sources.get(name) or open_source(name),
  )


class Listed:
  """A source of given examples."""

  channels = 3

  def __init__(self, found, labels=None, class_names=None):
    self.found, self.class_names = found, class_names
    self.given = [0] * len(found) if labels is None else labels
    self.num_classes = None if class_names is None else len(class_names)

  def __len__(self):
    return len(self.found)

  def __getitem__(self, index):
    return {'image': self.found[index], 'label': self.given[index]}


# What is written.


def test_folder_is_read_by_name_and_by_path(folder, tmp_path, capsys):
  dest = tmp_path / 'my-set'
  prepared(folder, dest, '--shards=3')
  shown = capsys.readouterr().out
  expected = [(data, name.split('/')[0]) for name, data in files().items()]
  by_name = Tfds('my-set', split='train', data_dir=tmp_path)
  for source in (
    by_name,
    Tfds(str(dest), split='train'),
    open_source(f'tfds:{dest}:train'),
    open_source(dest, split='train'),
  ):
    assert source.class_names == list(NAMES)
    assert contents(source) == expected
  assert [by_name.file_name(i) for i in range(12)] == list(files())
  assert len(Tfds(str(dest), split='train[:50%]')) == 6
  names = [x.name for x in dest.glob('*.array_record*')]
  assert sorted(names)[1] == 'my_set-train.array_record-00001-of-00003'
  record = json.loads((dest / 'prepare-train.json').read_text())
  assert record['state'] == 'verified' and record['examples'] == 12
  assert record['source'] == folder and record['options']['shards'] == 3
  assert [x['examples'] for x in record['files']] == [4, 4, 4]
  assert not list(dest.glob('.*'))  # nothing is left of the work
  assert f'--config.data.source.path=tfds:{dest}:train' in shown


def test_folder_of_a_version_is_read_by_name(folder, tmp_path):
  prepared(folder, tmp_path / 'ants' / '2.0.1')
  assert len(Tfds('ants', split='train', data_dir=tmp_path)) == 12
  assert len(Tfds('ants:2.0.1', split='train', data_dir=tmp_path)) == 12
  assert len(open_source(f'tfds:{tmp_path}/ants/2.0.1:train')) == 12


@pytest.mark.parametrize('kind', ['tar', 'tar.gz', 'wds', 'inner'])
def test_tar_and_webdataset(kind, tmp_path):
  content, where = files(), tmp_path / 'x.tar'
  expected = [(data, name.split('/')[0]) for name, data in content.items()]
  if kind == 'tar.gz':
    where = tmp_path / 'x.tar.gz'
    source = write_tar(where, content, 'w:gz')
  elif kind == 'inner':  # as ImageNet has them
    inner = {}
    for name in NAMES:
      mine = {k[-7:]: v for k, v in content.items() if k.startswith(name)}
      write_tar(where, mine)
      inner[f'{name}.tar'] = where.read_bytes()
    source = write_tar(where, inner)
  elif kind == 'wds':
    members = {}
    for name, data in content.items():
      stem = name.split('/')[1][:-4]
      members |= {f'{stem}.png': data, f'{stem}.cls': name.split('/')[0]}
    members = {
      k: v if isinstance(v, bytes) else v.encode() for k, v in members.items()
    }
    source = f'wds:{write_tar(where, members)}'
  else:
    source = write_tar(where, content)
  prepared(source, tmp_path / 'set')
  assert contents(Tfds(str(tmp_path / 'set'), split='train')) == expected
  prepared(source, tmp_path / 'set')  # does nothing, and unpacks nothing
  assert not (tmp_path / 'set' / '.prepare').exists()


def test_truncated_archive_is_reported(tmp_path, capsys):
  source = pathlib.Path(write_tar(tmp_path / 'x.tar.gz', files(), 'w:gz'))
  source.write_bytes(source.read_bytes()[:-5000])
  message = refused(capsys, source, tmp_path / 'set')
  assert 'x.tar.gz is truncated or damaged' in message


def test_splits_of_one_data_set(tmp_path, capsys):
  content = files()
  for split, keep in (('train', 9), ('val', 3)):
    part = dict(list(content.items())[:keep])
    write_folder(tmp_path / 'in' / split, part)
    prepared(tmp_path / 'in', tmp_path / 'set', f'--split={split}')
  set_ = str(tmp_path / 'set')
  assert [len(Tfds(set_, split=x)) for x in ('train', 'val')] == [9, 3]
  assert len(Tfds(set_, split='train+val')) == 12
  other = write_folder(
    tmp_path / 'other', {'dog/1.png': content['ant/000.png']}
  )
  message = refused(capsys, other, set_, '--split=test')
  assert "'ant', 'bee', 'cat ü' are missing" in message
  assert '--class_names=FILE' in message


def test_soft_labels_keep_values_and_names(tmp_path, monkeypatch):
  weights = np.random.default_rng(0).random((5, 3)).astype(np.float32)
  source = Listed([encoded(photo(i)) for i in range(5)], weights, NAMES)
  use(monkeypatch, soft=source)
  prepared('soft', tmp_path / 'soft')
  found = Tfds('soft', split='train', data_dir=tmp_path)
  np.testing.assert_array_equal(found.labels(), weights)
  assert found.num_classes == 3 and found.class_names == list(NAMES)


def test_labels_of_unknown_number(tmp_path, monkeypatch):
  source = Listed([photo(i) for i in range(3)], [7, 0, 2])
  use(monkeypatch, ints=source)
  prepared('ints', tmp_path / 'ints')
  found = Tfds('ints', split='train', data_dir=tmp_path)
  assert found.labels().tolist() == [7, 0, 2] and found.num_classes is None
  np.testing.assert_array_equal(images.decode(found[1]['image']), photo(1))


def test_order_is_the_source_s_or_shuffled(folder, tmp_path):
  orders = []
  for name, flags in {
    'a': ['--shuffle_seed=1', '--shards=2'],
    'b': ['--shuffle_seed=1', '--shards=4', '--num_workers=1'],
    'c': ['--shuffle_seed=2'],
  }.items():
    prepared(folder, tmp_path / name, *flags)
    source = Tfds(name, split='train', data_dir=tmp_path)
    orders.append([source.file_name(i) for i in range(12)])
  assert orders[0] == orders[1] != orders[2]
  assert sorted(orders[0]) == list(files()) != orders[0]


def test_plan_has_each_example_once():
  for count in (1, 7, 8, 9, 100):
    for number in {1, min(3, count), count}:
      plan = shards.Plan(count, number, shuffle_seed=0)
      chunks = range(number * plan.chunks)
      found = [i for chunk in chunks for i in plan.indices(chunk)]
      assert sorted(found) == list(range(count))


# Re-encoding.


def test_reencode_shrinks_only(tmp_path):
  big, small = photo(0, 60, 90), photo(1, 20, 30)
  turned = encoded(big, '.jpg', quality=95, exif=TURNED)
  grey = np.repeat(big[..., :1], 3, 2)
  alpha = np.where(np.arange(90) < 45, 0, 255)[None].repeat(60, 0)
  clear = np.dstack([big, alpha])
  source = write_folder(
    tmp_path / 'in',
    {
      'a/0.png': encoded(big),
      'a/1.jpg': (kept := encoded(small, '.jpg')),
      'a/2.jpg': turned,
      'a/3.png': encoded(grey),
      'a/4.png': encoded(clear.astype(np.uint8)),
    },
  )
  prepared(source, tmp_path / 'set', '--short_side=32')
  found = Tfds('set', split='train', data_dir=tmp_path)
  data = [found[i]['image'] for i in range(5)]
  decoded = [images.decode(x) for x in data]
  shapes = [x.shape[:2] for x in decoded]
  assert shapes == [(32, 48), (20, 30), (48, 32), (32, 48), (32, 48)]
  assert data[1] == kept
  expected = cv2.resize(big, (48, 32), interpolation=cv2.INTER_AREA)
  assert np.abs(decoded[0].astype(int) - expected).mean() < 2
  right = np.rot90(expected, -1)
  assert np.abs(decoded[2].astype(int) - right).mean() < 4
  assert Image.open(io.BytesIO(data[3])).mode == 'L'
  assert decoded[4][:, :20].min() > 240  # transparent pixels are white
  record = json.loads((tmp_path / 'set' / 'prepare-train.json').read_text())
  assert record['reencoded'] == 4 and record['turned'] == 0


def test_bytes_are_copied_without_a_short_side(tmp_path, capsys):
  data = encoded(photo(0), '.jpg', exif=TURNED)
  source = write_folder(tmp_path / 'in', {'a/0.jpg': data})
  prepared(source, tmp_path / 'set')
  assert Tfds('set', split='train', data_dir=tmp_path)[0]['image'] == data
  record = json.loads((tmp_path / 'set' / 'prepare-train.json').read_text())
  assert record['turned'] == 1
  exif = '--config.data.source.exif=True'
  assert capsys.readouterr().out.count(exif) == 2
  turned = open_source(f'tfds:{tmp_path}/set:train', exif=True)
  assert turned.exif and not Tfds('set', split='train', data_dir=tmp_path).exif


# Unreadable images.


def test_unreadable_images(tmp_path, capsys):
  content = files()
  bad = [*content][5]
  content[bad] = content[bad][:100]
  source = write_folder(tmp_path / 'in', content)
  message = refused(capsys, source, tmp_path / 'set')
  assert f'example 5 ({bad})' in message and '--on_error=skip' in message
  dest = tmp_path / 'other'
  prepared(source, dest, '--on_error=skip', '--shards=12')  # one is empty
  found = Tfds('other', split='train', data_dir=tmp_path)
  del content[bad]
  expected = [(data, name.split('/')[0]) for name, data in content.items()]
  assert contents(found) == expected
  rows = read_csv(dest / 'unreadable-train.csv')
  assert [(x['index'], x['description']) for x in rows] == [('5', bad)]
  command.main(['--verify', str(dest)])


# Interruptions, other commands, damage.


def _interrupted(monkeypatch, source, dest, *flags, after):
  """Prepare until some shards are complete, and fail as a crash does."""

  class Crash(BaseException):
    pass

  finish, count = shards.Writer.finish, [0]

  def crash(self):
    count[0] += 1
    if count[0] > after:
      raise Crash
    return finish(self)

  with monkeypatch.context() as patch, pytest.raises(Crash):
    patch.setattr(shards.Writer, 'finish', crash)
    prepared(source, dest, *flags)


def test_continues_at_whole_shards(folder, tmp_path, monkeypatch, capsys):
  flags = ['--shards=4', '--shuffle_seed=3', '--short_side=32']
  prepared(folder, tmp_path / 'a' / 'set', *flags)
  dest = tmp_path / 'b' / 'set'
  _interrupted(monkeypatch, folder, dest, *flags, after=2)
  written = {x.name: x.stat().st_mtime_ns for x in dest.glob('*array_record*')}
  assert len(written) == 2
  with (dest / 'prepare-train.jsonl').open('a') as file:
    file.write('{"shard": 2, "fi')  # as a kill can leave it
  message = refused(capsys, '--verify', dest)
  assert '2 of 4 shards are written' in message
  prepared(folder, dest, *flags)
  assert '2 of 4 shards are complete' in capsys.readouterr().out
  for name, modified in written.items():
    assert (dest / name).stat().st_mtime_ns == modified
  assert data_files(dest) == data_files(tmp_path / 'a' / 'set')


def test_other_options_and_other_data_are_refused(tmp_path, capsys):
  source = write_folder(tmp_path / 'in', files())
  prepared(source, tmp_path / 'set', '--shards=2')
  message = refused(capsys, source, tmp_path / 'set', '--shards=3')
  assert '- shards=2\n+ shards=3' in message
  message = refused(
    capsys, source, tmp_path / 'set', '--shards=2', '--short_side=32'
  )
  assert '- short_side=None\n+ short_side=32' in message
  (tmp_path / 'in' / 'ant' / '000.png').unlink()
  message = refused(capsys, source, tmp_path / 'set', '--shards=2')
  assert "class 'ant' has 1 example fewer" in message
  message = refused(capsys, source, source)
  assert 'has other files' in message
  with pytest.raises(SystemExit) as info:
    command.main([source])
  assert info.value.code == 2


def test_verify_finds_a_flipped_byte_and_it_is_repaired(
  folder, tmp_path, capsys
):
  dest = tmp_path / 'set'
  prepared(folder, dest, '--shards=3')
  good = data_files(dest)
  command.main(['--verify', str(dest)])
  shard = dest / 'set-train.array_record-00001-of-00003'
  data = bytearray(good[shard.name])
  data[len(data) // 3] ^= 1
  shard.write_bytes(data)
  assert f'{shard.name} is damaged' in refused(capsys, '--verify', dest)
  shard.unlink()
  assert f'{shard.name} is missing' in refused(capsys, '--verify', dest)
  prepared(folder, dest, '--shards=3')
  command.main(['--verify', str(dest)])
  assert data_files(dest)[shard.name] == good[shard.name]
  message = refused(capsys, '--verify', folder)
  assert 'no prepare-SPLIT.json' in message


def test_two_processes_do_not_write_one_folder(folder, tmp_path, capsys):
  dest = tmp_path / 'set'
  dest.mkdir()
  with run._locked(dest):
    message = refused(capsys, folder, dest)
  assert 'another process is preparing' in message


# Copies of evaluation examples.


def _copies(image):
  """Return copies as they occur on the web, by name."""
  height, width = image.shape[:2]
  twentieth = [round(x * 0.05) for x in image.shape[:2]]
  jpeg = encoded(image, '.jpg', quality=75)
  half = cv2.resize(
    image, (width // 2, height // 2), interpolation=cv2.INTER_AREA
  )
  return {
    'equal': image,
    'smaller': half,
    'larger': cv2.resize(image, (width * 2, height * 2)),
    'JPEG': images.decode(jpeg),
    'grey': image.mean(-1, keepdims=True).astype(np.uint8).repeat(3, 2),
    'corner cut': image[twentieth[0] :, twentieth[1] :],
    'sides cut': image[:, twentieth[1] : -twentieth[1]],
  }


def test_copies_are_listed_and_left_out(tmp_path, monkeypatch, capsys):
  evaluation = [photo(100 + i, 96, 128) for i in range(20)]
  copies = [x for i in (7, 3) for x in _copies(evaluation[i]).values()]
  found = [photo(i, 96, 128) for i in range(10)] + copies
  use(
    monkeypatch,
    seen=Listed(found),
    held=Listed(evaluation),
    other=Listed(found),
  )
  for name, flag in (('all', '--compare_with'), ('rest', '--leave_out')):
    dest = tmp_path / name
    prepared('seen', dest, f'{flag}=held', '--shards=2', '--shuffle_seed=0')
    rows = read_csv(dest / 'copies-train.csv')
    pairs = {(int(x['index']), int(x['evaluation_index'])) for x in rows}
    assert pairs == {(i, 7 if i < 17 else 3) for i in range(10, 24)}
    exact = {int(x['index']) for x in rows if x['kind'] == 'exact'}
    assert exact == {10, 17}
    assert all(x['evaluation_set'] == 'held' for x in rows)
    left_out = flag == '--leave_out'
    assert {x['left_out'] for x in rows} == {str(left_out)}
    kept = Tfds(name, split='train', data_dir=tmp_path)
    assert len(kept) == (10 if left_out else 24)
    command.main(['--verify', str(dest)])
  message = refused(capsys, 'seen', tmp_path / 'rest', '--shards=2')
  assert "- leave_out=['held']" in message


def test_different_digits_and_glyphs_are_no_copies(tmp_path):
  test = Digits(split='test', examples_per_class=10)
  train = Digits(split='train')
  index = duplicates.build(tmp_path, [test], 10, _map)
  assert not [m for i in range(50) for m in index.find(train[i]['image'])]
  glyphs = [Glyphs()[i]['image'] for i in range(0, 2**20, 2**15)]
  index = duplicates.build(tmp_path, [Listed(glyphs)], 10, _map)
  found = [[m.place for m in index.find(glyph)] for glyph in glyphs]
  assert found == [[i] for i in range(len(glyphs))]


def _map(function, count):
  return map(function, range(count))


def test_images_of_one_colour_are_only_exact_copies(tmp_path):
  flat = [np.full((20, 30, 3), x, np.uint8) for x in (0, 128)]
  index = duplicates.build(tmp_path, [Listed(flat)], 64, _map)
  assert [m.kind for m in index.find(flat[1])] == ['exact']
  assert not index.find(np.full((9, 9, 3), 255, np.uint8))


def test_releases_of_imagenet():
  wnids = [f'n{i:08d}' for i in range(21_841)]
  assert 'fall 2011' in releases.report(wnids)
  assert 'winter 2021' in releases.report(wnids[:19_167])
  assert '1 fewer than ImageNet-21k of fall 2011' in releases.report(wnids[1:])
  assert releases.report(list(NAMES)) == ''


# As a user.


def _start(*argv, **environ):
  return subprocess.Popen(
    [sys.executable, '-m', 'vit_jax.tools.prepare', *map(str, argv)],
    cwd=ROOT,
    env={**os.environ, 'JAX_PLATFORMS': 'cpu', **environ},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


@pytest.mark.slow
def test_kill_9_and_the_same_command(tmp_path):
  source = write_folder(tmp_path / 'in', files(180, '.jpg'))
  flags = ['--shards=30', '--short_side=32', '--shuffle_seed=0']
  whole, dest = tmp_path / 'a' / 'set', tmp_path / 'b' / 'set'
  prepared(source, whole, *flags, '--num_workers=0')
  log = dest / 'prepare-train.jsonl'
  kills, process = 0, None
  for _ in range(2):
    before = log.read_bytes().count(b'\n') if log.exists() else 0
    process = _start(source, dest, *flags, '--num_workers=1')
    while process.poll() is None:
      if log.exists() and log.read_bytes().count(b'\n') > before:
        process.send_signal(signal.SIGKILL)
        kills += 1
        break
      time.sleep(0.002)
    process.communicate()
  assert kills
  process = _start(source, dest, *flags)
  text, _ = process.communicate(timeout=120)
  assert process.returncode == 0 and 'Continuing' in text, text
  one, other = data_files(whole), data_files(dest)
  assert one == other


@pytest.mark.slow
def test_training_on_the_printed_command(folder, tmp_path, capsys):
  prepared(folder, tmp_path / 'set', '--short_side=32')
  shown = capsys.readouterr().out.splitlines()
  line = next(x for x in shown if '-m vit_jax.main' in x)
  argv = shlex.split(line.replace('=DIR', f'={tmp_path}/run'))[1:]
  sizes = ['--config.total_steps=2', '--config.data.batch_size=4']
  argv[argv.index('--config=configs/train_folder.py')] += ':tiny'
  done = subprocess.run(
    [sys.executable, *argv, *sizes],
    cwd=ROOT,
    env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert (tmp_path / 'run' / 'metrics.jsonl').exists()

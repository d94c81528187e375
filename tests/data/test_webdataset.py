"""WebDataset: keys, labels of all kinds, shards, indices, remote, errors."""

import concurrent.futures
import json
import pickle
import time

import fsspec
import numpy as np
import packed
import pytest

from vit_jax.data import fingerprints, pipeline, shards, tar_files
from vit_jax.data.folder import Folder
from vit_jax.data.webdataset import WebDataset

FILES = packed.images()
LABELS = [packed.NAMES.index(name.split('/')[0]) for name in FILES]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
  path = tmp_path_factory.mktemp('cache')
  monkeypatch.setenv('XDG_CACHE_HOME', str(path))
  return path / 'vit_jax' / 'index'


def write(folder, count=3, files=FILES, names='train-{:04d}.tar'):
  """Write shards of equal numbers of samples; return their pattern."""
  items, size = list(files.items()), -(-len(files) // count)
  for i in range(count):
    part = dict(items[i * size : (i + 1) * size])
    path = folder / names.format(i)
    packed.write_tar(path, packed.samples(part))
  return f'{folder}/{names.format(0).replace("0000", "{0000..%04d}")}' % (
    count - 1
  )


def test_shards_by_braces_globs_and_folder(tmp_path):
  pattern = write(tmp_path)
  everything = [
    {'image': data, 'label': label}
    for data, label in zip(FILES.values(), LABELS)
  ]
  for files in (
    pattern,
    f'{tmp_path}/train-*.tar',
    tmp_path,
    [tmp_path / 'train-0000.tar', f'{tmp_path}/train-000[12].tar'],
  ):
    source = WebDataset(files)
    assert packed.all_of(source) == everything
  assert (source.num_classes, source.class_names) == (None, None)
  assert source.labels().tolist() == LABELS
  assert (source.labels().dtype, source.ignored) == (np.int32, 0)
  where = f'004.png in {tmp_path}/train-0001.tar, '
  assert source.describe(5).startswith(where)
  assert source.file_name(5) == '004.png'


@pytest.mark.parametrize(
  ('pattern', 'expected'),
  [
    ('a.tar', ['a.tar']),
    ('a-{08..10}.tar', ['a-08.tar', 'a-09.tar', 'a-10.tar']),
    ('{2..0}', ['2', '1', '0']),
    ('{a,b}{0..1}', ['a0', 'a1', 'b0', 'b1']),
    ('{x,y{0..1}}', ['x', 'y0', 'y1']),
  ],
)
def test_braces(pattern, expected):
  assert sorted(shards.braces(pattern)) == sorted(expected)
  with pytest.raises(ValueError, match='not a range'):
    shards.braces('a{0-3}.tar')


def one(path, members, **options):
  return WebDataset(packed.write_tar(path / 'x.tar', members), **options)


@pytest.mark.parametrize(
  ('member', 'text', 'label_key', 'label'),
  [
    ('cls', b'1\n', 'cls', 1),
    ('CLS', b'1', 'cls;json:label', 1),
    ('index', b'1', 'cls;index', 1),
    ('txt', b'bee\n', 'txt', 1),
    ('cls', 'cat ü'.encode(), 'cls', 2),
    ('json', b'{"label": 1}', 'cls;index;json:label', 1),
    ('json', b'{"a": {"b": "bee"}}', 'json:a.b', 1),
    ('json', b'{"label": [0, 0.5, 1]}', 'json:label', [0, 0.5, 1]),
    ('cls', b'7', '', 0),
  ],
)
def test_kinds_of_labels(tmp_path, member, text, label_key, label):
  members = {'a.b/0.png': b'image', f'a.b/0.{member}': text}
  names = [*packed.NAMES]
  source = one(tmp_path, members, label_key=label_key, class_names=names)
  assert source[0]['image'] == b'image'
  np.testing.assert_array_equal(source[0]['label'], label)
  np.testing.assert_array_equal(source.labels(), [label])
  assert source.num_classes == 3
  expected = np.float32 if isinstance(label, list) else np.int32
  assert source.labels().dtype == expected


def test_class_names(tmp_path):
  members = packed.samples(FILES)
  source = one(tmp_path, members, label_key='json:a.b')
  assert source.class_names == [*packed.NAMES]
  assert packed.contents(source) == packed.expected(FILES)
  (tmp_path / 'names.json').write_text('{"0": "x", "1": "y", "2": "z"}')
  named = tmp_path / 'names.json'
  assert one(tmp_path, members, class_names=named).class_names == [*'xyz']
  (tmp_path / 'classnames.txt').write_text('A\nB\nC\nD\n')
  deep = WebDataset(packed.write_tar(tmp_path / 'train' / '0.tar', members))
  assert deep.class_names == one(tmp_path, members).class_names == [*'ABCD']
  with pytest.raises(ValueError, match=r'the label 2. Labels .* \[0, 2\)'):
    one(tmp_path, members, class_names=['x', 'y'])
  with pytest.raises(ValueError, match="has 'x' twice"):
    one(tmp_path, members, class_names=['x', 'y', 'x'])


def test_members_and_samples_that_are_left_out(tmp_path):
  members = {
    '0.jpg': b'0',
    '0.cls': b'0',
    '._0.jpg': b'of macOS',
    'readme': b'no key',
    '1.cls': b'no image',
    '2.seg.png': b'2',
    '2.cls': b'2',
  }
  source = one(tmp_path, members)
  assert [x['image'] for x in packed.all_of(source)] == [b'0']
  assert source.ignored == 3
  source = one(tmp_path, members, image_key='seg.png')
  assert packed.all_of(source) == [{'image': b'2', 'label': 2}]


def test_members_of_a_sample_need_not_be_adjacent(tmp_path):
  members = [(f'{i}.png', b'%d' % i) for i in range(3)]
  members += [(f'{i}.cls', b'%d' % i) for i in (2, 1, 0)]
  source = one(tmp_path, members)
  assert [(int(x['image']), x['label']) for x in packed.all_of(source)] == [
    (0, 0),
    (1, 1),
    (2, 2),
  ]


@pytest.mark.parametrize(
  ('members', 'message'),
  [
    ([('a.png', b''), ('a.txt', b'x')], r"'a' of .*x\.tar has no label cls .*"
     r"It has \.png, \.txt, from byte 512 on\..*Set label_key"),
    ([('a.png', b''), ('a.cls', b' ')], r"\.cls at byte 1024 .* it is empty"),
    ([('a.png', b''), ('a.json', b'{"x": 1}')], "KeyError: 'label'"),
    ([('a.png', b''), ('a.json', b'{')], 'JSONDecodeError'),
    ([('a.png', b''), ('a.cls', b'0'), ('a.png', b'')],
     r"x\.tar has two members 'a.png', at the bytes 512 and 2048"),
    ([('a.cls', b'0')], 'no samples with an image, but 1 others'),
    ([('a.png', b''), ('a.cls', b'-1')], 'has the label -1'),
    ([('a.png', b''), ('a.json', b'{"label": 1.5}')], "label '1.5' of type"),
  ],
)  # fmt: skip
def test_unusable_samples(tmp_path, members, message):
  with pytest.raises(ValueError, match=f'(?s){message}'):
    one(tmp_path, members)


def test_damaged_shards(tmp_path):
  write(tmp_path)
  for i in (0, 2):
    path = tmp_path / f'train-000{i}.tar'
    path.write_bytes(path.read_bytes()[:1300])
  with pytest.raises(
    ValueError, match=r'(?s)0000\.tar is truncated.* in 1 more shards'
  ):
    WebDataset(tmp_path)
  with pytest.raises(ValueError, match=r'2 of 5 files .*0003\.tar.*0004\.tar'):
    WebDataset(f'{tmp_path}/train-{{0000..0004}}.tar')
  with pytest.raises(ValueError, match='not an ending such as cls'):
    WebDataset(tmp_path, label_key='json')


def test_shards_are_indexed_once(tmp_path, cache, monkeypatch):
  write(tmp_path)
  broken = tmp_path / 'train-0001.tar'
  whole = broken.read_bytes()
  broken.write_bytes(whole[:1300])
  with pytest.raises(ValueError, match='truncated'):
    WebDataset(tmp_path)
  assert len(list(cache.iterdir())) == 2  # of the whole shards
  broken.write_bytes(whole)
  read, names = tar_files.members, []

  def members(fn, size, name):
    names.append(name)
    return read(fn, size, name)

  monkeypatch.setattr(tar_files, 'members', members)
  first = WebDataset(tmp_path)
  assert names == [str(broken)]
  assert packed.all_of(WebDataset(tmp_path)) == packed.all_of(first)
  assert names == [str(broken)]
  WebDataset(tmp_path, label_key='')  # other labels, another index
  assert len(names) == 4


def test_an_interrupt_stops_the_scans(tmp_path, monkeypatch):
  write(tmp_path)
  scanned, read = [], tar_files.members

  def members(fn, size, name):
    if name.endswith('0000.tar'):
      raise KeyboardInterrupt
    for member in read(fn, size, name):
      scanned.append(member)
      time.sleep(0.1)
      yield member

  monkeypatch.setattr(tar_files, 'members', members)
  with pytest.raises(KeyboardInterrupt):
    WebDataset(tmp_path)
  assert len(scanned) < 12


def test_remote_shards(tmp_path, monkeypatch):
  monkeypatch.setattr(shards, '_BLOCK', 1500)
  write(tmp_path)
  memory = fsspec.filesystem('memory')
  for path in tmp_path.iterdir():
    memory.pipe(f'/wds/{path.name}', path.read_bytes())
  try:
    local = WebDataset(tmp_path)
    for files in ('train-{0000..0002}.tar', 'train-*.tar', ''):
      source = WebDataset(f'memory://wds/{files}')
      assert packed.all_of(source) == packed.all_of(local)
    assert source.fingerprint() == local.fingerprint()
    copy = pickle.loads(pickle.dumps(source))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
      found = list(pool.map(copy.__getitem__, [*range(len(copy))] * 5))
    assert found == packed.all_of(local) * 5
    memory.pipe('/wds/classnames.txt', b'a\nb\nc')
    assert WebDataset('memory://wds').class_names == ['a', 'b', 'c']
    with pytest.raises(ValueError, match='not be listed over http'):
      WebDataset('http://localhost/train-*.tar')
    memory.rm('/wds/train-0001.tar')
    with pytest.raises(OSError, match=r'cannot read .*train-0001\.tar at byte'):
      copy[5]
  finally:
    memory.rm('/wds', recursive=True)


def test_an_index_in_json(tmp_path):
  write(tmp_path)
  listed = [
    {'url': f'train-000{i}.tar', 'nsamples': 4, 'filesize': 0} for i in (1, 0)
  ]
  index = tmp_path / 'index.json'
  index.write_text(json.dumps({'wids_version': 1, 'shardlist': listed}))
  source = WebDataset(index)
  values = list(FILES.values())
  assert [x['image'] for x in packed.all_of(source)] == values[4:8] + values[:4]
  listed[1]['nsamples'] = 5
  index.write_text(json.dumps({'wids_version': 1, 'shardlist': listed}))
  with pytest.raises(ValueError, match=r'0000\.tar has 4 .* index says 5'):
    WebDataset(index)
  index.write_text('[]')
  with pytest.raises(ValueError, match='Expected an index of shards'):
    WebDataset(index)


def test_splits_by_the_names_of_shards(tmp_path):
  write(tmp_path)
  write(tmp_path, 1, packed.images(3), 'val-{:04d}.tar')
  assert len(WebDataset(tmp_path, split='train')) == 12
  assert len(WebDataset(tmp_path, split='val')) == 3
  with pytest.raises(
    ValueError, match=r"splits \['train', 'val'\]. Choose one"
  ):
    WebDataset(tmp_path)
  with pytest.raises(ValueError, match=r"'test'. Their splits are \['train'"):
    WebDataset(tmp_path, split='test')


def test_fingerprints(tmp_path):
  write(tmp_path / 'a')
  write(tmp_path / 'b')
  first = fingerprints.fingerprint(WebDataset(tmp_path / 'a'))
  assert fingerprints.fingerprint(WebDataset(tmp_path / 'b')) == first
  for ending, data in (('png', b'other'), ('cls', b'2')):
    members = packed.samples(dict([*FILES.items()][:4])) | {
      f'000.{ending}': data
    }
    packed.write_tar(tmp_path / 'b' / 'train-0000.tar', members)
    assert fingerprints.fingerprint(WebDataset(tmp_path / 'b')) != first


def test_batches_equal_those_of_a_folder(tmp_path):
  folder = Folder(packed.write_folder(tmp_path / 'folder', FILES))
  write(tmp_path / 'wds')
  source = WebDataset(tmp_path / 'wds')
  for hosts in (1, 2):
    for host in range(hosts):
      one, two = (
        pipeline.Data(x, 4).train_batches(
          seed=1, process_index=host, process_count=hosts
        )
        for x in (folder, source)
      )
      for _ in range(5):
        x, y = next(one), next(two)
        np.testing.assert_array_equal(x['image'], y['image'])
        np.testing.assert_array_equal(x['label'], y['label'])
      one.close(), two.close()

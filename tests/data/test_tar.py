"""Tar: layouts, inner tar files, links, damage, labels in a table, speed."""

import concurrent.futures
import functools
import http.server
import io
import pickle
import tarfile
import threading

import fsspec
import numpy as np
import packed
import pytest

from vit_jax.data import fingerprints, imagenet, pipeline, shards, tar_files
from vit_jax.data.folder import Folder
from vit_jax.data.tar import Tar, stream
from vit_jax.data.transforms import FlipLR, Resize

FILES = packed.images()


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
  path = tmp_path_factory.mktemp('cache')
  monkeypatch.setenv('XDG_CACHE_HOME', str(path))
  return path / 'vit_jax' / 'index'


@pytest.mark.parametrize('format', [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize('base', ['', './', 'data/of mine/', 'l' * 150 + '/'])
def test_class_folders(tmp_path, base, format):
  files = {f'{base}{name}': data for name, data in FILES.items()}
  files |= {f'{base}ant/Thumbs.db': b'x', f'{base}.hidden/a.png': b'x'}
  path = packed.write_tar(tmp_path / 'x.tar', files, format=format)
  source = Tar(path)
  assert packed.contents(source) == packed.expected(FILES)
  assert source.class_names == [*packed.NAMES]
  assert (source.num_classes, source.ignored) == (3, 1)
  assert source.labels().tolist() == [x['label'] for x in packed.all_of(source)]
  assert source.labels().dtype == np.int32
  name = f'{base}ant/000.png'.removeprefix('./')
  assert source.describe(0).startswith(f'{name} in {path}, ')
  assert source.file_name(-1).endswith('cat ü/011.png')
  with pytest.raises(IndexError):
    source[len(source)]


def inner(files, name):
  return {k.split('/')[1]: v for k, v in files.items() if k.startswith(name)}


def test_tar_files_in_a_tar_file(tmp_path):
  """As ILSVRC2012_img_train.tar and, below a folder, ImageNet-21k's."""
  members = {
    f'{x}.tar': packed.tar_bytes(inner(FILES, x)) for x in packed.NAMES
  }
  path = packed.write_tar(tmp_path / 'train.tar', members)
  assert packed.contents(Tar(path)) == packed.expected(FILES)
  whole = {f'winter21_whole/{k}': v for k, v in members.items()}
  source = Tar(packed.write_tar(tmp_path / 'whole.tar', whole))
  assert packed.contents(source) == packed.expected(FILES)
  assert source.file_name(0) == 'winter21_whole/ant/000.png'


def test_each_of_several_tar_files_is_a_class(tmp_path):
  for name in packed.NAMES:
    packed.write_tar(tmp_path / f'{name}.tar', inner(FILES, name))
  for files in (
    tmp_path,
    f'{tmp_path}/*.tar',
    f'{tmp_path}/{{ant,bee,cat ü}}.tar',
  ):
    assert packed.contents(Tar(files)) == packed.expected(FILES)


def test_split_folders_and_slices_equal_those_of_a_folder(tmp_path):
  other = packed.images(4)
  files = {f'f/train/{k}': v for k, v in FILES.items()}
  files |= {f'f/val/{k}': v for k, v in other.items()}
  root = packed.write_folder(tmp_path, files) / 'f'
  path = packed.write_tar(tmp_path / 'f.tar', files)
  for split in ('train', 'val', 'train[:60%]', 'train[60%:]'):
    for stratified in (False, True):
      one = Tar(path, split=split, stratified=stratified)
      two = Folder(root, split=split, stratified=stratified)
      assert packed.all_of(one) == packed.all_of(two)
      assert one.class_names == two.class_names
  with pytest.raises(ValueError, match=r'look like splits\. Choose one'):
    Tar(path)
  with pytest.raises(ValueError, match="no folder for the split 'test'"):
    Tar(path, split='test')


def batches(source, hosts):
  data = pipeline.Data(source, 4, [FlipLR(), Resize(8)])
  for host in range(hosts):
    found = data.train_batches(seed=3, process_index=host, process_count=hosts)
    yield from (next(found) for _ in range(4))
    found.close()


def assert_same_batches(one, two):
  for x, y in zip(one, two, strict=True):
    np.testing.assert_array_equal(x['image'], y['image'])
    np.testing.assert_array_equal(x['label'], y['label'])


@pytest.mark.parametrize('hosts', [1, 2])
def test_batches_equal_those_of_a_folder(tmp_path, hosts):
  folder = Folder(packed.write_folder(tmp_path / 'a', FILES))
  tar = Tar(packed.write_tar(tmp_path / 'x.tar', FILES))
  assert_same_batches(batches(folder, hosts), batches(tar, hosts))


def test_threads_and_copies_read_the_same(tmp_path):
  path = packed.write_tar(tmp_path / 'x.tar', FILES)
  source = pickle.loads(pickle.dumps(Tar(path)))
  order = np.random.default_rng(0).integers(0, len(source), 500).tolist()
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    found = list(pool.map(source.__getitem__, order))
  everything = packed.all_of(source)
  assert found == [everything[i] for i in order]


def test_one_folder_is_one_class_unless_it_is_a_split(tmp_path):
  images = inner(FILES, 'ant')
  cats = {f'data/train/cats/{k}': v for k, v in images.items()}
  path = packed.write_tar(tmp_path / 'x.tar', cats)
  for split in (None, 'train', 'train[:50%]'):
    source = Tar(path, split=split)
    assert source.class_names == ['cats']
    assert len(source) == (2 if split == 'train[:50%]' else 4)
  packed.write_tar(path, {f'val/{k}': v for k, v in images.items()})
  with pytest.raises(ValueError, match='but no folders that would be'):
    Tar(path)
  packed.write_tar(
    path, cats | {'data/train/dogs/x.png': b'', 'data/y.png': b''}
  )
  with pytest.raises(ValueError, match=r"\['train'\], which look like splits"):
    Tar(path)
  source = Tar(path, split='train')
  assert (source.class_names, source.ignored) == (['cats', 'dogs'], 1)


def test_more_files_than_may_stay_open(tmp_path, monkeypatch):
  monkeypatch.setattr(shards, '_OPEN', 2)
  for i, (name, data) in enumerate(FILES.items()):
    packed.write_tar(tmp_path / f'{i:02d}.tar', {name: data})
  source = Tar(tmp_path)
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    found = list(pool.map(source.__getitem__, [*range(len(source))] * 20))
  assert found == packed.all_of(source) * 20
  assert len(source._shards._open) <= 2


def test_links_and_repeated_members(tmp_path):
  first, second = list(FILES.values())[:2]
  files = [('a/x.png', first), ('b/y.png', second), ('a/x.png', second)]
  files += [packed.link('b/z.png', '../a/x.png')]
  files += [packed.link('b/h.png', 'b/y.png', tarfile.LNKTYPE)]
  files += [packed.link('b/note.txt', '/elsewhere')]
  source = Tar(packed.write_tar(tmp_path / 'x.tar', files))
  names = [source.file_name(i) for i in range(len(source))]
  assert names == ['a/x.png', 'b/h.png', 'b/y.png', 'b/z.png']
  assert {x['image'] for x in packed.all_of(source)} == {second}
  files += [packed.link('b/w.png', '/elsewhere/w.png')]
  packed.write_tar(tmp_path / 'x.tar', files)
  with pytest.raises(
    ValueError, match=r"link to 'elsewhere/w\.png', which is not"
  ):
    Tar(tmp_path / 'x.tar')


def test_a_truncated_file_is_an_error_at_every_length(tmp_path):
  members = {'a/0.png': b'x' * 700, 'b.tar': packed.tar_bytes({'1.png': b'y'})}
  data = packed.tar_bytes(members, format=tarfile.GNU_FORMAT)
  count = len(list(read_members(data)))
  end = len(data.rstrip(b'\0')) + 512
  lengths = [0, 1, 511, 512, 1000, 1024, 1212, 1535, 1536, 2047, 2048, 2500]
  for length in lengths:
    with pytest.raises(ValueError, match=r'x\.tar'):
      list(read_members(data[:length]))
    with pytest.raises(ValueError, match=r'x\.tar'):
      list(tar_files.stream(io.BytesIO(data[:length]), 'x.tar'))
  assert len(list(read_members(data[: end + 10240]))) == count
  path = tmp_path / 'cut.tar'
  path.write_bytes(data[:1212])
  with pytest.raises(ValueError, match=r'cut\.tar is truncated: .* byte 1212'):
    Tar(path)


def read_members(data, name='x.tar'):
  def read(offset, size):
    return data[offset : offset + size]

  return tar_files.members(read, len(data), name)


def test_damage_is_an_error_that_names_its_place(tmp_path):
  data = bytearray(packed.tar_bytes(FILES, format=tarfile.USTAR_FORMAT))
  second = next(m.offset for m in list(read_members(data))[1:2]) - 512
  data[second + 3] ^= 1
  path = tmp_path / 'x.tar'
  path.write_bytes(data)
  with pytest.raises(ValueError, match=f'x.tar is damaged: byte {second} '):
    Tar(path)
  path.write_bytes(b'no tar file' * 200)
  with pytest.raises(ValueError, match='no tar archive at byte 0'):
    Tar(path)


def test_concatenated_files_and_zeros_at_the_end(tmp_path):
  files = list(FILES.items())
  data = packed.tar_bytes(files[:5]) + packed.tar_bytes(files[5:])
  (tmp_path / 'x.tar').write_bytes(data + bytes(100_000))
  assert packed.contents(Tar(tmp_path / 'x.tar')) == packed.expected(FILES)


@pytest.mark.parametrize('mode', ['w:gz', 'w:xz', 'w:bz2', 'w'])
def test_streams(tmp_path, mode):
  members = {'x/ant.tar': packed.tar_bytes(inner(FILES, 'ant')), 'a.txt': b'7'}
  path = packed.write_tar(tmp_path / 'x.tar', members, mode=mode)
  expected = [(f'x/ant/{k}', v) for k, v in inner(FILES, 'ant').items()]
  assert list(stream(path)) == [*expected, ('a.txt', b'7')]
  if mode != 'w':
    program = {'gz': 'gunzip', 'xz': 'unxz', 'bz2': 'bunzip2'}[mode[2:]]
    with pytest.raises(ValueError, match=rf'compressed .*\n  {program} --keep'):
      Tar(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r'x\.tar is (truncated|damaged)'):
      list(stream(path))


def test_labels_in_a_table(tmp_path):
  flat = {k.split('/')[1]: v for k, v in FILES.items()}
  path = packed.write_tar(tmp_path / 'flat.tar', flat)
  with pytest.raises(ValueError, match=r'no folders .* Set csv'):
    Tar(path)
  rows = [f'{k.split("/")[1]},{k.split("/")[0]},train' for k in FILES]
  rows[-1] = rows[-1].replace('train', 'val')
  table = tmp_path / 'labels.csv'
  table.write_text('\n'.join(['path,label,split', *rows]), encoding='utf-8')
  source = Tar(path, csv=table, split='train')
  assert packed.contents(source) == packed.expected(FILES)[:-1]
  assert source.ignored == 1
  assert len(Tar(path, csv=table)) == len(FILES)
  source = Tar(path, csv={'003.png': 'b', '000.png': 'a'})
  assert packed.contents(source) == [
    (flat['003.png'], 'b'),
    (flat['000.png'], 'a'),
  ]
  with pytest.raises(ValueError, match=r"1 images that .* \['none.png'\]"):
    Tar(path, csv={'none.png': 0})
  with pytest.raises(ValueError, match="no split 'test'"):
    Tar(path, csv=table, split='test')


def test_a_remote_file(tmp_path, cache):
  memory = fsspec.filesystem('memory')
  memory.pipe('/tars/x.tar', packed.tar_bytes(FILES))
  try:
    source = Tar('memory://tars/x.tar')
    assert packed.contents(source) == packed.expected(FILES)
    assert len(Tar('memory://tars/*.tar')) == len(Tar('memory://tars'))
    assert len(list(cache.glob('*.npz'))) == 1
    assert [x for _, x in stream('memory://tars/x.tar')] == [*FILES.values()]
    memory.pipe('/tars/x.tar', packed.tar_bytes(dict([*FILES.items()][:5])))
    assert len(Tar('memory://tars/x.tar')) == 5
  finally:
    memory.rm('/tars', recursive=True)


class WholeFiles(http.server.SimpleHTTPRequestHandler):
  """A server that ignores byte ranges, as Python's own does."""

  def log_message(self, *args):
    pass


def test_a_web_server_without_byte_ranges(tmp_path, monkeypatch):
  monkeypatch.setattr(shards, '_BLOCK', 4096)
  packed.write_tar(tmp_path / 'x.tar', FILES)
  handler = functools.partial(WholeFiles, directory=str(tmp_path))
  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f'http://127.0.0.1:{server.server_port}/x.tar'
    names = [name for name, _ in stream(url)]
    with pytest.raises(ValueError, match='returns the whole file instead of'):
      Tar(url)
    server.shutdown()
  assert names == [*FILES]


@pytest.mark.parametrize('bad', [float('nan'), -1e9, 1e300])
def test_absurd_times_of_members(tmp_path, bad):
  files = []
  for name, data in FILES.items():
    info = tarfile.TarInfo(name)
    info.size, info.pax_headers = len(data), {'mtime': str(bad)}
    files.append((info, data))
  file = io.BytesIO()
  with tarfile.open(fileobj=file, mode='w') as tar:
    for info, data in files:
      tar.addfile(info, io.BytesIO(data))
  (tmp_path / 'x.tar').write_bytes(file.getvalue())
  assert packed.contents(Tar(tmp_path / 'x.tar')) == packed.expected(FILES)


def test_the_index_is_kept_until_a_file_changes(tmp_path, cache, monkeypatch):
  path = packed.write_tar(tmp_path / 'x.tar', FILES)
  before = Tar(path)
  (file,) = cache.glob('*.npz')
  with monkeypatch.context() as patch:
    patch.setattr(tar_files, 'members', None)  # headers are not read again
    assert packed.all_of(Tar(path)) == packed.all_of(before)
  file.write_bytes(b'damaged')
  assert packed.all_of(Tar(path)) == packed.all_of(before)
  Tar(path, cache_dir=tmp_path / 'mine')
  assert len(list((tmp_path / 'mine').iterdir())) == 1
  unread = Tar(path)
  packed.write_tar(path, dict([*FILES.items()][:5]))
  assert len(Tar(path, cache_dir='')) == 5 == len(Tar(path))
  with pytest.raises(OSError, match='has changed since the start'):
    unread[0]


def test_fingerprints(tmp_path):
  path = packed.write_tar(tmp_path / 'x.tar', FILES)
  first = fingerprints.fingerprint(Tar(path))
  moved = packed.write_tar(tmp_path / 'deep' / 'y.tar', FILES)
  assert fingerprints.fingerprint(Tar(moved)) == first
  assert first['classes'] == dict.fromkeys(packed.NAMES, 4)
  name = next(iter(FILES))
  for other in ({name: b'x'}, {'ant/new.png': b'x'}):
    packed.write_tar(path, FILES | other)
    assert fingerprints.fingerprint(Tar(path)) != first


def test_imagenet_in_its_own_files(tmp_path, monkeypatch):
  wnids = imagenet.wnids()
  data = list(FILES.values())
  members = {
    f'{wnids[i]}.tar': packed.tar_bytes({f'{wnids[i]}_{i}.JPEG': data[i]})
    for i in (0, 7)
  }
  packed.write_tar(tmp_path / 'ILSVRC2012_img_train.tar', members)
  train = imagenet.archives(tmp_path, split='train')
  assert [x['label'] for x in packed.all_of(train)] == [0, 7]
  labels = imagenet.validation_labels()
  assert len(labels) == imagenet.NUM_VALIDATION
  assert set(labels.values()) == set(wnids)
  first = dict([*labels.items()][:3])
  val = packed.write_tar(
    tmp_path / 'ILSVRC2012_img_val.tar', dict.fromkeys(first, data[3])
  )
  with pytest.raises(ValueError, match='csv lists 49997 images that'):
    imagenet.archives(tmp_path, split='val')
  monkeypatch.setattr(imagenet, 'validation_labels', lambda: first)
  source = imagenet.archives(tmp_path, split='validation')
  assert (len(source), source.num_classes) == (3, 1000)
  # The published labels of the first images.
  found = [source.class_names[x] for x in source.labels()]
  assert found == ['n01751748', 'n09193705', 'n02105855']
  with pytest.raises(ValueError, match='must be one of'):
    imagenet.archives(val.parent, split='test')


def test_nothing_to_read(tmp_path):
  path = packed.write_tar(tmp_path / 'x.tar', {'a/readme.txt': b''})
  with pytest.raises(ValueError, match='no images, but 1 other members'):
    Tar(path)
  with pytest.raises(
    ValueError, match=r'1 of 1 files cannot be opened: .*none'
  ):
    Tar(tmp_path / 'none.tar')
  with pytest.raises(ValueError, match='matches no files'):
    Tar(tmp_path / '*.gone.tar')
  with pytest.raises(ValueError, match='channels=2'):
    Tar(path, channels=2)

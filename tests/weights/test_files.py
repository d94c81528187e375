"""Files of arrays: written and read, broken or hostile, local or remote."""

import http.server
import io
import json
import pickle
import struct
import sys
import threading
import tracemalloc
import urllib.parse
import zipfile

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from small import tiny

from vit_jax import pretrained
from vit_jax.data import folder, tfds
from vit_jax.runs import stored, workdirs
from vit_jax.weights import files, formats

FILE = {
  'a/b/kernel': np.arange(6, dtype=np.float32).reshape(2, 3),
  'scalar': np.float32(2.5),
  'none': np.zeros((0, 4), np.float32),
  'step': np.int32(7),
}


def same(found, expected=FILE):
  assert found.keys() == expected.keys()
  for name, array in expected.items():
    assert found[name].dtype == array.dtype and found[name].shape == array.shape
    np.testing.assert_array_equal(found[name], array)
  return True


@pytest.mark.parametrize('save', [np.savez, np.savez_compressed])
def test_numpys_files_are_read(tmp_path, save):
  save(tmp_path / 'x.npz', **FILE)
  assert same(files.read_npz(tmp_path / 'x.npz'))
  assert files.kind(tmp_path / 'x.npz') == 'npz'


def test_numpy_reads_ours(tmp_path):
  files.write_npz(tmp_path / 'x.npz', FILE)
  with np.load(tmp_path / 'x.npz', allow_pickle=False) as file:
    assert same(dict(file))
  assert same(files.read_npz(tmp_path / 'x.npz'))
  first = (tmp_path / 'x.npz').read_bytes()
  files.write_npz(tmp_path / 'x.npz', FILE)
  assert (tmp_path / 'x.npz').read_bytes() == first
  assert [p.name for p in tmp_path.iterdir()] == ['x.npz']


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
  files.write_npz(tmp_path / 'x.npz', FILE)
  with pytest.raises(ValueError, match='allow_pickle'):
    files.write_npz(tmp_path / 'x.npz', FILE | {'x': np.array([{}])})
  assert same(files.read_npz(tmp_path / 'x.npz'))
  assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize('kind', ['npz', 'safetensors'])
@pytest.mark.parametrize('dtype', [np.float16, np.float64, ml_dtypes.bfloat16])
def test_other_floats_come_as_float32(tmp_path, kind, dtype):
  exact = np.array([[1.5, -0.25, 3]], np.float32)
  path = tmp_path / 'x'
  if kind == 'npz':
    stored = exact.astype(dtype)
    if dtype == ml_dtypes.bfloat16:
      stored = stored.view('V2')
    with path.open('wb') as f:
      np.savez(f, x=stored, y=stored[0, 0])
    assert files.read_npz(path)['y'].shape == ()
    found = files.read_npz(path)['x']
  else:
    safetensors.numpy.save_file({'x': exact.astype(dtype)}, path)
    found = files.read_safetensors(path)['x']
  assert found.dtype == np.float32
  np.testing.assert_array_equal(found, exact)


def test_order_and_endianness_of_npz(tmp_path):
  array = np.arange(6, dtype='>f4').reshape(2, 3)
  np.savez(tmp_path / 'x.npz', f=np.asfortranarray(array), b=array)
  found = files.read_npz(tmp_path / 'x.npz')
  for name in 'fb':
    assert found[name].dtype == np.float32 and found[name].dtype.isnative
    np.testing.assert_array_equal(found[name], array)


def member(shape='(3,)', descr="'<f4'", data=b'\0' * 12, order='False'):
  """Bytes of an .npy file with any header."""
  header = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}}}\n"
  header = header.encode()
  return b'\x93NUMPY\x01\x00' + struct.pack('<H', len(header)) + header + data


def zipped(**members):
  out = io.BytesIO()
  with zipfile.ZipFile(out, 'w') as file:
    for name, data in members.items():
      file.writestr(name, data)
  return out.getvalue()


class Harmful:
  ran = False

  def __reduce__(self):
    return setattr, (Harmful, 'ran', True)


HOSTILE = {
  'object': (member(descr="'|O'", data=pickle.dumps(Harmful())), 'x.npy is pi'),
  'huge': (member('(1000000, 1000000)'), 'x.npy promises .*, but has 12'),
  'negative': (member('(-3,)'), 'promises'),
  'short': (member('(4,)'), 'promises .* 16 bytes, but has 12'),
  'long': (member('(2,)'), 'more than the 8 bytes'),
  'overflow': (member('(9223372036854775807, 9)'), 'promises'),
  'code': (member(descr="__import__('os').getcwd()"), 'corrupt'),
  'no_header': (b'\x93NUMPY\x01\x00\xff\xff{', 'corrupt'),
  'no_array': (b'hello', 'corrupt'),
  'nested': (member('(' * 900 + ')' * 900), 'corrupt'),
  'version': (b'\x93NUMPY\x09\x00' + b'\0' * 20, 'version'),
  'empty': (b'', 'corrupt'),
}


@pytest.mark.parametrize('kind', HOSTILE)
def test_hostile_members(tmp_path, kind):
  data, message = HOSTILE[kind]
  path = tmp_path / 'x.npz'
  path.write_bytes(zipped(**{'ok.npy': member(), 'x.npy': data}))
  tracemalloc.start()
  with pytest.raises(ValueError, match=message) as e:
    files.read_npz(path)
  assert str(path) in str(e.value)
  assert tracemalloc.get_traced_memory()[1] < 1e6
  tracemalloc.stop()
  assert not Harmful.ran


def test_pickled_by_numpy(tmp_path):
  np.savez(tmp_path / 'x.npz', a=np.zeros(2), pre_logits=np.array({}))
  with pytest.raises(ValueError, match=r'pre_logits\.npy is pickled'):
    files.read_npz(tmp_path / 'x.npz')


def test_a_header_that_promises_what_a_zip_could_hold(tmp_path):
  """The zip's directory lies, too: 4 GB of what are 12 bytes."""
  path = tmp_path / 'x.npz'
  data = zipped(**{'x.npy': member('(1000, 1000, 1000)')})
  at = data.rindex(b'PK\x01\x02')
  lie = struct.pack('<I', 4_000_000_100)
  path.write_bytes(data[: at + 24] + lie + data[at + 28 :])
  tracemalloc.start()
  with pytest.raises(ValueError):
    files.read_npz(path)
  assert tracemalloc.get_traced_memory()[1] < 1e6
  tracemalloc.stop()


def test_broken_zips(tmp_path):
  path = tmp_path / 'x.npz'
  good = zipped(**{'x.npy': member()})
  twice = io.BytesIO()
  with zipfile.ZipFile(twice, 'w') as file, pytest.warns(UserWarning):
    file.writestr('x.npy', member())
    file.writestr('x.npy', member())
  at = good.index(b'\0' * 12)
  for data, message in (
    (good[: len(good) // 2], 'truncated'),
    (good[:40], 'truncated'),
    (b'PK\x03\x04', 'truncated'),
    (good[:at] + b'\1' + good[at + 1 :], 'CRC'),
    (zipped(), 'no arrays'),
    (zipped(**{'x.npy': member(), 'read.me': b'x'}), r'read\.me.*not an array'),
    (twice.getvalue(), 'several arrays'),
    (b'no zip', 'not a zip'),
    (b'', 'not a zip'),
  ):
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
      files.read_npz(path)
  with pytest.raises(ValueError, match='No such file'):
    files.read_npz(tmp_path / 'other.npz')


def test_safetensors_there_and_back(tmp_path):
  path = tmp_path / 'model.safetensors'
  files.write_safetensors(path, FILE, {'format': 'pt'})
  assert same(files.read_safetensors(path))
  assert files.kind(path) == 'safetensors'
  with safetensors.safe_open(path, 'np') as file:
    assert file.metadata() == {'format': 'pt'}
  transposed = {'x': np.arange(6, dtype=np.float32).reshape(2, 3).T}
  files.write_safetensors(path, transposed)
  assert same(files.read_safetensors(path), transposed)
  assert len(list(tmp_path.iterdir())) == 1


def test_broken_safetensors(tmp_path):
  path = tmp_path / 'model.safetensors'
  good = safetensors.numpy.save({'x': np.zeros(100, np.float32)})
  header = b'{"x":{"dtype":"F32","shape":[9],"data_offsets":[0,400]}}'
  for data in (
    good[:-1],
    good[:20],
    good[:4],
    b'',
    good + b'more',
    struct.pack('<Q', 1 << 39) + good[8:],
    struct.pack('<Q', len(header)) + header + b'\0' * 400,
    struct.pack('<Q', 5) + b'{"x":' + b'\0' * 400,
  ):
    path.write_bytes(data)
    with pytest.raises(ValueError, match='corrupt'):
      files.read_safetensors(path)


@pytest.fixture
def sharded(tmp_path):
  """The path of an index, and what it says, of two shards."""
  parts = {
    'model-1.safetensors': {'a': np.ones(2, np.float32)},
    'model-2.safetensors': {'b': np.zeros(3, np.float32)},
  }
  for name, part in parts.items():
    files.write_safetensors(tmp_path / name, part)
  index = {name: file for file, part in parts.items() for name in part}
  path = tmp_path / 'model.safetensors.index.json'
  path.write_text(json.dumps({'metadata': {}, 'weight_map': index}))
  return path, index


def test_shards_are_read_by_their_index(sharded):
  path, _ = sharded
  assert files.kind(path) == 'safetensors'
  found = files.read_safetensors(path)
  assert {name: x.shape for name, x in found.items()} == {'a': (2,), 'b': (3,)}


@pytest.mark.parametrize(
  'change, message',
  [
    ({'a': '../model-1.safetensors'}, 'own folder'),
    ({'a': '/model-1.safetensors'}, 'own folder'),
    ({'a': '..'}, 'own folder'),
    ({'a': 'x\\y'}, 'own folder'),
    ({'a': 3}, 'own folder'),
    ({'a': 'model-3.safetensors'}, 'not in its folder'),
    ({'c': 'model-2.safetensors'}, r"disagree: missing \['c'\]"),
    ({'a': 'model-2.safetensors'}, r"missing \['a'\]"),
  ],
)
def test_an_index_that_is_wrong(sharded, change, message):
  path, index = sharded
  path.write_text(json.dumps({'weight_map': index | change}))
  with pytest.raises(ValueError, match=message):
    files.read_safetensors(path)


@pytest.mark.parametrize(
  'text, message',
  [
    ('{"a": 1,\n "b" 2}', 'line 2 column 6'),
    ('[1]', 'expected {...}, found a list'),
    ('', 'line 1'),
    ('[' * 100_000, 'not valid JSON'),
  ],
)
def test_json_errors_have_a_place(tmp_path, text, message):
  path = tmp_path / 'config.json'
  path.write_text(text)
  with pytest.raises(ValueError, match=message):
    files.read_json(path)
  path.write_bytes(b'{"\xff": 1}')
  with pytest.raises(ValueError, match='not valid JSON'):
    files.read_json(path)
  path.write_text('{"a": {"b": [1]}}')
  assert files.read_json(path) == {'a': {'b': [1]}}


def test_pickles_are_refused_with_a_remedy(tmp_path):
  path = tmp_path / 'weights'
  for data in (
    zipped(**{'archive/data.pkl': b'x', 'archive/data/0': b'x'}),
    zipped(**{'archive/data.pkl': b'x', 'archive/data/0': b'x'})[:-5],
    pickle.dumps(Harmful(), protocol=2),
    pickle.dumps({'a': 1}, protocol=5),
    b'\x80\x02\x8a\nl\xfcF\x9cF\xf9 j\xa8P\x19.',  # torch before 1.6
  ):
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r'pickle.*save_file\('):
      files.kind(path)
  assert not Harmful.ran


@pytest.mark.parametrize(
  'data, message',
  [
    (b'', 'empty'),
    (b'\x89HDF\r\n\x1a\n' + b'\0' * 9, 'HDF5'),
    (b'\0' * 40 + bytes.fromhex('57fb808b247547db'), 'TensorFlow'),
    (b'\x93NUMPY\x01\x00', 'single array'),
    (b'\x1f\x8b\x08', 'gzip'),
    (b'<!DOCTYPE html>', 'web page'),
    (b'version https://git-lfs.github.com/spec/v1\n', 'git lfs pull'),
    (b'{"model_type": "vit"}', 'unknown format'),
    (b'what is this', r"unknown format \(it begins b'what is '\)"),
    (b'{', 'JSON'),
  ],
)
def test_other_files_are_named(tmp_path, data, message):
  path = tmp_path / 'weights.npz'  # content counts, not what it is called
  path.write_bytes(data)
  with pytest.raises(ValueError, match=message):
    files.kind(path)


def test_no_file_is_an_error(tmp_path):
  for path in (tmp_path, tmp_path / 'x'):
    with pytest.raises(ValueError, match='is not a file'):
      files.kind(path)


def test_arrays_that_are_not_read_are_not_unpacked(tmp_path):
  path = tmp_path / 'x.npz'
  np.savez_compressed(path, a=np.ones(3), opt=np.zeros(3_000_000))
  data = path.read_bytes()
  at = data.index(b'opt.npy') + 1000
  path.write_bytes(data[:at] + b'damaged' + data[at + 7 :])
  tracemalloc.start()
  found = files.stored(path)
  assert {k: v.shape for k, v in found.blanks.items()} == {
    'a': (3,),
    'opt': (3_000_000,),
  }
  read = found.read(['a'])
  assert tracemalloc.get_traced_memory()[1] < 1e6
  tracemalloc.stop()
  np.testing.assert_array_equal(read['a'], np.ones(3, np.float32))
  with pytest.raises(ValueError, match=r'x\.npz cannot be read'):
    found.read()


def test_a_file_that_unpacks_to_far_more_than_its_bytes(tmp_path, monkeypatch):
  path = tmp_path / 'x.npz'
  monkeypatch.setattr(files, '_ALWAYS', 1 << 20)
  arrays = {'x': np.zeros(1 << 18, np.float32)}
  np.savez_compressed(path, **arrays)
  assert files.read_npz(path)['x'].size == 1 << 18  # as much as is always read
  arrays['x'] = np.zeros(1 << 19, np.float32)
  np.savez_compressed(path, **arrays)
  with pytest.raises(ValueError, match=r'x\.npz.*0\.0 GB, 9\d\d times.*savez'):
    files.read_npz(path)
  np.savez(path, **arrays)
  assert files.read_npz(path)['x'].size == 1 << 19


@pytest.mark.parametrize('limit', ['members', 'header'])
def test_directories_and_headers_are_limited(tmp_path, monkeypatch, limit):
  path = tmp_path / 'x'
  monkeypatch.setattr(files, '_BLOCK', 1000)
  if limit == 'members':
    np.savez(path.with_suffix('.npz'), **{f'x{i}': i for i in range(99)})
    with pytest.raises(ValueError, match=r'directory has .* at most 1000'):
      files.stored_npz(path.with_suffix('.npz'))
  else:
    arrays = {f'x{i}': np.zeros(1) for i in range(99)}
    safetensors.numpy.save_file(arrays, path)
    with pytest.raises(ValueError, match=r'header of \d+ bytes; at most 1000'):
      files.stored_safetensors(path)


def test_other_compression_and_overlapping_members(tmp_path):
  path = tmp_path / 'x.npz'
  with zipfile.ZipFile(path, 'w', zipfile.ZIP_BZIP2) as file:
    file.writestr('x.npy', member())
  with pytest.raises(ValueError, match=r'method 12; expected deflate'):
    files.read_npz(path)
  data = zipped(**{'x.npy': member(), 'y.npy': member()})
  first, second = (
    data.index(b'PK\x01\x02'),
    data.rindex(b'PK\x01\x02'),
  )
  offset = data[first + 42 : first + 46]
  path.write_bytes(data[: second + 42] + offset + data[second + 46 :])
  with pytest.raises(ValueError, match='overlap'):
    files.read_npz(path)


class Server(http.server.ThreadingHTTPServer):
  daemon_threads = True

  def __init__(self):
    super().__init__(('127.0.0.1', 0), Handler)
    self.content, self.log, self.cut, self.said = {}, [], None, None
    self.url = f'http://127.0.0.1:{self.server_port}'

  def downloads(self):
    return [path for method, path in self.log if method == 'GET']


class Handler(http.server.BaseHTTPRequestHandler):
  """Serves Server.content {path: (bytes, version)}.

  cut: sends only so many bytes; said: HEAD says another length, 0 for none.
  """

  def do_HEAD(self):
    self._send(body=False)

  def do_GET(self):
    self._send(body=True)

  def _send(self, body):
    self.server.log.append((self.command, self.path))
    found = self.server.content.get(self.path)
    self.send_response(200 if found else 404)
    data, version = found or (b'', '')
    said = self.server.said
    if said != 0:
      self.send_header('Content-Length', str((not body and said) or len(data)))
    self.send_header('ETag', f'"{version}"')
    self.end_headers()
    if body:
      self.wfile.write(data[: self.server.cut])
      self.close_connection = True

  def log_message(self, *args):
    pass


@pytest.fixture
def server(monkeypatch):
  monkeypatch.setenv('NO_PROXY', '127.0.0.1')
  monkeypatch.setenv('no_proxy', '127.0.0.1')
  server = Server()
  thread = threading.Thread(target=server.serve_forever, args=(0.02,))
  thread.start()
  yield server
  server.shutdown()
  thread.join()
  server.server_close()


def names_in(folder):
  return sorted(p.name for p in folder.rglob('*') if p.is_file())


def test_a_file_is_fetched_once(server, tmp_path):
  server.content['/w/x.npz'] = b'abc', 1
  seen = []
  for _ in range(2):
    path = files.fetch(
      f'{server.url}/w/x.npz',
      cache_dir=tmp_path,
      progress=lambda *args: seen.append(args),
    )
    assert path.read_bytes() == b'abc' and path.name == 'x.npz'
  assert len(server.downloads()) == 1
  assert seen[-1] == (f'{server.url}/w/x.npz', 3, 3)


def test_a_changed_file_is_fetched_again(server, tmp_path):
  url = f'{server.url}/x.npz'
  for version, data in enumerate([b'abc', b'abd', b'longer']):
    server.content['/x.npz'] = data, version
    assert files.fetch(url, cache_dir=tmp_path).read_bytes() == data
  assert len(server.downloads()) == 3
  assert names_in(tmp_path) == ['.x.npz.json', 'x.npz']


def test_a_broken_connection_leaves_nothing(server, tmp_path):
  url = f'{server.url}/x.npz'
  server.content['/x.npz'] = b'a' * 100_000, 1
  server.cut = 50_000
  with pytest.raises(ValueError, match='could not be downloaded'):
    files.fetch(url, cache_dir=tmp_path)
  assert not names_in(tmp_path)
  server.cut = None
  assert files.fetch(url, cache_dir=tmp_path).stat().st_size == 100_000
  # Nor does it spoil what was there.
  server.content['/x.npz'] = b'b' * 100_000, 2
  server.cut = 50_000
  with pytest.raises(ValueError):
    files.fetch(url, cache_dir=tmp_path)
  server.cut = None
  assert files.fetch(url, cache_dir=tmp_path).read_bytes() == b'b' * 100_000


def test_a_server_that_sends_more_than_it_says(server, tmp_path, monkeypatch):
  url = f'{server.url}/x.npz'
  server.content['/x.npz'] = bytes(20_000_000), 1
  server.said = 1000
  with pytest.raises(ValueError, match=r'than the 1,000 bytes.*local path'):
    files.fetch(url, cache_dir=tmp_path)
  server.said = 10**16
  with pytest.raises(ValueError, match=r'10,000,000\.0 GB.*VIT_JAX_CACHE'):
    files.fetch(url, cache_dir=tmp_path)
  server.said = 0
  monkeypatch.setattr(files, '_UNSIZED', 1 << 20)
  with pytest.raises(ValueError, match='more than the 1,048,576 bytes'):
    files.fetch(url, cache_dir=tmp_path)
  assert not names_in(tmp_path)


def test_files_of_one_folder_lie_in_one(server, tmp_path, monkeypatch):
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'cache'))
  for path in ('/a/x.npz', '/a/x.json', '/b/x.npz'):
    server.content[path] = path.encode(), 1
  a, b, c = (files.fetch(server.url + path) for path in server.content)
  assert a.parent == b.parent != c.parent
  assert a.is_relative_to(tmp_path / 'cache')
  assert c.read_bytes() == b'/b/x.npz'


def test_an_index_brings_its_shards(server, tmp_path):
  files.write_safetensors(tmp_path / 'one', {'a': np.ones(3, np.float32)})
  index = json.dumps({'weight_map': {'a': 'one'}}).encode()
  server.content['/m/model.safetensors.index.json'] = index, 1
  server.content['/m/one'] = (tmp_path / 'one').read_bytes(), 1
  path = files.fetch(f'{server.url}/m/model.safetensors.index.json')
  assert files.read_safetensors(path).keys() == {'a'}


def test_without_a_connection_the_cache_is_taken(server, tmp_path, capsys):
  server.content['/x.npz'] = b'abc', 1
  url = f'{server.url}/x.npz'
  files.fetch(url, cache_dir=tmp_path)
  gone = f'http://127.0.0.1:{server.server_port}'
  server.content.clear()
  with pytest.raises(ValueError, match='FileNotFoundError'):
    files.fetch(
      url, cache_dir=tmp_path
    )  # the server knows that it is not there
  server.shutdown()
  server.socket.close()
  assert files.fetch(f'{gone}/x.npz', cache_dir=tmp_path).read_bytes() == b'abc'
  assert 'cache' in capsys.readouterr().err
  with pytest.raises(ValueError, match='cannot be read'):
    files.fetch(f'{gone}/y.npz', cache_dir=tmp_path)


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
  """No test writes to the cache of who runs it."""
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'home'))


def test_local_paths_are_given_back(tmp_path):
  (tmp_path / 'model.npz').write_bytes(b'')
  (tmp_path / 'other.txt').write_bytes(b'')
  path = tmp_path / 'model.npz'
  assert (
    files.fetch(path)
    == files.fetch(str(path))
    == files.fetch(f'file://{path}')
    == path
  )
  with pytest.raises(ValueError, match=r'contains: model\.npz\.'):
    files.fetch(tmp_path / 'modell.npz')
  with pytest.raises(ValueError, match='neither does'):
    files.fetch(tmp_path / 'nowhere' / 'x.npz')


def test_what_cannot_be_fetched(server, monkeypatch):
  with pytest.raises(ValueError, match='nothing:// is not known'):
    files.fetch('nothing://x/y.npz')
  with pytest.raises(ValueError, match='end in the name'):
    files.fetch(f'{server.url}/folder/')

  def missing(url, **options):
    if url.startswith('http'):
      return 'web', url
    raise ImportError('Install it')

  monkeypatch.setattr(files.fsspec.core, 'url_to_fs', missing)
  with pytest.raises(ValueError, match='pip install s3fs'):
    files.fetch('s3://bucket/x.npz')
  # Public buckets need no package.
  fs, remote = files._file_system('gs://vit_models/a+b/x.npz')
  assert fs == 'web'
  assert remote == 'https://storage.googleapis.com/vit_models/a%2Bb/x.npz'


@pytest.fixture
def no_gcsfs(monkeypatch):
  monkeypatch.setitem(sys.modules, 'gcsfs', None)  # importing it fails
  # fsspec keeps the classes that it has imported.
  monkeypatch.setattr(sys.modules['fsspec.registry'], '_registry', {})


def test_public_weights_of_gs_need_no_package(
  server, tmp_path, monkeypatch, no_gcsfs
):
  monkeypatch.setenv('STORAGE_EMULATOR_HOST', server.url)
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'cache'))
  weights = tiny()
  written = formats.write(weights, tmp_path / 'B 16.npz', 'npz')
  for file in written:
    name = urllib.parse.quote(file.name)
    server.content[f'/bucket/{name}'] = file.read_bytes(), 1
  url = 'gs://bucket/B 16.npz'
  model, params = pretrained.load(url, report=None, num_heads=4)
  assert model.width == weights.model.width
  np.testing.assert_array_equal(
    params['pos_embedding'], weights.params['pos_embedding']
  )
  formats.find(url)
  with pytest.raises(
    ValueError, match=r"not public.*pip install -e '.\[gcs\]'"
  ):
    formats.read('gs://bucket/missing.npz')


@pytest.mark.parametrize(
  'use',
  [
    lambda path: pretrained.load(path),
    lambda path: workdirs.prepare(path),
    lambda path: stored.find(path),
    lambda path: formats.write(tiny(), f'{path}/x.npz', 'npz'),
    lambda path: folder.Folder(path),
    lambda path: tfds.Tfds(name='x', split='train', data_dir=path),
  ],
)
def test_what_needs_gcsfs_names_the_extra(use, no_gcsfs):
  with pytest.raises(ValueError, match=r"gcsfs: pip install -e '.\[gcs\]'"):
    use('gs://bucket/folder')


def test_progress_is_printed_every_ten_seconds(monkeypatch, capsys):
  now = [100.0]
  monkeypatch.setattr(files.time, 'monotonic', lambda: now[0])
  progress = files._Progress()
  for seconds, done in ((1, 10e6), (11, 110e6), (15, 150e6), (25, 250e6)):
    now[0] = 100.0 + seconds
    progress('gs://x/y.npz', done, 700e6)
  assert capsys.readouterr().err.splitlines() == [
    'y.npz: 110 of 700 MB, 10.0 MB/s',
    'y.npz: 250 of 700 MB, 10.0 MB/s',
  ]


@pytest.mark.parametrize('format', ['npz', 'timm'])
@pytest.mark.parametrize('whole', [True, False])
def test_weights_are_read_from_a_url_with_what_lies_beside_them(
  server, tmp_path, monkeypatch, format, whole
):
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'cache'))
  weights = tiny(gelu={'npz': 'exact', 'timm': 'tanh'}[format])
  path = tmp_path / ('x.npz' if format == 'npz' else 'x')
  first, beside, *_ = formats.write(weights, path, format)
  for file in (first, beside) if whole else (first,):
    server.content[f'/w/{file.name}'] = file.read_bytes(), 1
  back = formats.read(f'{server.url}/w/{first.name}', num_heads=4)
  for name, value in weights.params.items():
    np.testing.assert_array_equal(back.params[name], value, err_msg=name)
  # Without config.json or NAME.json the GELU is the format's usual one.
  assert (back.model.block.gelu == weights.model.block.gelu) == whole

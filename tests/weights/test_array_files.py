"""Files of arrays: written and read, damaged, local or remote."""

import functools
import http.server
import io
import json
import os
import pickle
import stat
import struct
import threading
import zipfile

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from vit_jax.io.files import replacing, write_atomically
from vit_jax.types import UserError
from vit_jax.weights import array_files

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


def write(path, arrays=FILE):
  array_files.write(path, arrays)
  return path


@pytest.mark.parametrize('name', ['x.npz', 'x.safetensors'])
def test_there_and_back(name, tmp_path):
  path = write(tmp_path / name)
  assert same(array_files.read(path))
  os.rename(path, tmp_path / 'any.name')
  assert same(array_files.read(tmp_path / 'any.name'))
  shapes = array_files.read(tmp_path / 'any.name', values=False)
  assert {k: x.shape for k, x in shapes.items()} == {
    k: x.shape for k, x in FILE.items()
  }
  assert not any(x.any() for x in shapes.values())
  write(path)
  other = {'a.npz': np.load, 'a.safetensors': safetensors.numpy.load_file}
  assert same(dict(other[f'a{path.suffix}'](path)))


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
  path = write(tmp_path / 'x.npz')
  with pytest.raises(ValueError), replacing(path) as partial:
    partial.write_bytes(b'half')
    raise ValueError
  assert same(array_files.read(path)) and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize('umask', [0o022, 0o077])
def test_permissions_are_those_of_new_files(umask, tmp_path):
  before = os.umask(umask)
  try:
    write_atomically(tmp_path / 'x', 'text')
    write(tmp_path / 'x.npz')
  finally:
    os.umask(before)
  for path in tmp_path.iterdir():
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize('name', ['x.npz', 'x.safetensors'])
@pytest.mark.parametrize('dtype', [np.float16, np.float64, ml_dtypes.bfloat16])
def test_other_floats_come_as_float32(tmp_path, name, dtype):
  exact = np.array([[1.5, -0.25, 3]], np.float32)
  stored = exact.astype(dtype)
  if dtype == ml_dtypes.bfloat16 and name == 'x.npz':
    stored = stored.view('V2')
  path = write(tmp_path / name, {'x': stored})
  found = array_files.read(path)['x']
  assert found.dtype == np.float32
  np.testing.assert_array_equal(found, exact)


@pytest.mark.parametrize('dtype', ['float8_e4m3fn', 'float8_e5m2'])
def test_floats_of_8_bits(dtype, tmp_path):
  exact, path = np.array([[1.5, -0.25, 3]], np.float32), tmp_path / 'x'
  name = f'F{dtype[5:].upper().removesuffix("FN")}'  # F8_E4M3
  about = {'dtype': name, 'shape': [1, 3], 'data_offsets': [0, 3]}
  header = json.dumps({'x': about}).encode()
  raw = struct.pack('<Q', len(header)) + header + exact.astype(dtype).tobytes()
  path.write_bytes(raw)
  assert same(array_files.read(path), {'x': exact})


def test_shards(tmp_path):
  parts = {'a.safetensors': ['scalar', 'step'], 'b.safetensors': ['a/b/kernel']}
  index = {}
  for name, keys in parts.items():
    write(tmp_path / name, {k: np.asarray(FILE[k]) for k in keys})
    index |= dict.fromkeys(keys, name)
  path = tmp_path / 'model.safetensors.index.json'
  path.write_text(json.dumps({'weight_map': index}))
  expected = {k: x for k, x in FILE.items() if k in index}
  assert same(array_files.read(path), expected)
  assert array_files.read(path, values=False).keys() == expected.keys()
  (tmp_path / 'a.safetensors').unlink()  # and is not opened
  found = array_files.read(path, keep=lambda names: {'new': 'a/b/kernel'})
  assert same(found, {'new': FILE['a/b/kernel']})


@pytest.mark.parametrize(
  'shards',
  [
    {'x': 'model.safetensors.index.json'},
    {'x': '../secret.safetensors'},
    {'x': '..\\secret.safetensors'},
    {'x': '{folder}/secret.safetensors'},
    {'x': 'loop.safetensors'},
    {'x': ['a.safetensors']},
    {'x': '.'},
    ['a.safetensors'],
    None,
  ],
)
def test_an_index_names_files_of_its_folder_only(shards, tmp_path):
  folder = tmp_path / 'model'
  folder.mkdir()
  write(tmp_path / 'secret.safetensors', {'x': np.ones(2, np.float32)})
  index = json.dumps({'weight_map': shards})
  index = index.replace('{folder}', str(tmp_path))
  for name in ('model.safetensors.index.json', 'loop.safetensors'):
    (folder / name).write_text(index)
  with pytest.raises(UserError, match=str(folder)):
    array_files.read(folder / 'model.safetensors.index.json')


class Harmful:
  ran = False

  def __reduce__(self):
    return setattr, (Harmful, 'ran', True)


def npz(**arrays):
  out = io.BytesIO()
  np.savez(out, **arrays)
  return out.getvalue()


def zip_of(name):
  out = io.BytesIO()
  with zipfile.ZipFile(out, 'w') as file:
    file.writestr(name, pickle.dumps(Harmful()))
  return out.getvalue()


def four_tebibytes():
  header = {'descr': '<f4', 'fortran_order': False, 'shape': (2**40,)}
  array, out = io.BytesIO(), io.BytesIO()
  np.lib.format.write_array_header_1_0(array, header)
  with zipfile.ZipFile(out, 'w') as file:
    file.writestr('x.npy', array.getvalue())
  return out.getvalue()


def with_field(offset, value):
  """Return an .npz whose entry has another value in a field of its headers."""
  data = bytearray(GOOD)
  for start, skip in ((0, 6), (data.rfind(b'PK\x01\x02'), 8)):
    struct.pack_into('<H', data, start + skip + offset, value)
  return bytes(data)


GOOD = npz(x=np.ones(9))


@pytest.mark.parametrize(
  'data, named',
  [
    (npz(x=np.array([Harmful()])), 'allow_pickle'),
    (zip_of('archive/data.pkl'), 'safetensors'),
    (pickle.dumps(Harmful()), 'safetensors'),
    (GOOD[: len(GOOD) // 2], 'again'),
    (GOOD.replace(np.ones(2).tobytes(), b'0' * 16, 1), 'again'),
    (struct.pack('<Q', 99) + b'{"x', 'again'),
    (zip_of('model.weights.h5'), '(.keras) are not supported'),
    (four_tebibytes(), '4.00 TiB'),
    (with_field(0, 1), 'encrypted'),
    (with_field(2, 99), 'compression'),
    (b'version https://git-lfs', 'git-lfs'),
    (b'', 'unknown'),
  ],
)
def test_what_cannot_be_read_is_one_error(data, named, tmp_path):
  path = tmp_path / 'x'
  path.write_bytes(data)
  with pytest.raises(ValueError) as e:
    array_files.read(path)
  assert named in str(e.value) and str(path) in str(e.value)
  assert not Harmful.ran


# Remote.


@pytest.fixture
def server(tmp_path, monkeypatch):
  """(folder that is served, its URL, requests); the cache is in tmp_path."""
  folder, requests = tmp_path / 'served', []
  folder.mkdir()

  class Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
      requests.append(self.path)
      super().do_GET()

    def log_message(self, *_):
      pass

  served = http.server.ThreadingHTTPServer(
    ('localhost', 0), functools.partial(Handler, directory=folder)
  )
  threading.Thread(target=served.serve_forever, daemon=True).start()
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'cache'))
  yield folder, f'http://localhost:{served.server_port}', requests
  served.shutdown()
  served.server_close()


def test_a_file_is_downloaded_once(server):
  folder, url, requests = server
  write(folder / 'x.npz')
  local = array_files.fetch(f'{url}/x.npz')
  assert same(array_files.read(local)) and local.name == 'x.npz'
  seen = len(requests)
  assert array_files.fetch(f'{url}/x.npz') == local and len(requests) == seen
  assert array_files.fetch(f'{url}/y.json', missing_ok=True) is None
  with pytest.raises(ValueError, match=r'y\.json does not exist'):
    array_files.fetch(f'{url}/y.json')
  names = [path.name for path in local.parent.iterdir()]
  assert names == ['x.npz']


def test_an_index_brings_its_shards(server):
  folder, url, requests = server
  write(folder / 'a.safetensors', {'x': np.ones(2, np.float32)})
  index = {'weight_map': {'x': 'a.safetensors'}}
  name = 'model.safetensors.index.json'
  (folder / name).write_text(json.dumps(index))
  array_files.fetch(f'{url}/{name}', keep=lambda names: {})
  assert not any('/a.safetensors' in x for x in requests)
  assert array_files.read(array_files.fetch(f'{url}/{name}'))['x'].shape == (2,)


def test_public_buckets_are_read_over_http(server, monkeypatch):
  folder, url, requests = server
  (folder / 'bucket').mkdir()
  write(folder / 'bucket' / 'a b.npz')
  monkeypatch.setenv('STORAGE_EMULATOR_HOST', url)
  find = array_files.importlib.util.find_spec
  monkeypatch.setattr(
    array_files.importlib.util,
    'find_spec',
    lambda name: None if name == 'gcsfs' else find(name),
  )
  assert same(array_files.read(array_files.fetch('gs://bucket/a b.npz')))
  assert requests[-1] == '/bucket/a%20b.npz'


def test_a_server_that_cannot_be_reached_is_named(server):
  with pytest.raises(ValueError, match='http://localhost:1/x'):
    array_files.fetch('http://localhost:1/x.npz')
  with pytest.raises(ValueError, match='does not exist'):
    array_files.fetch('/nowhere/x.npz')

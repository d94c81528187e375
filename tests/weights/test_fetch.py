"""Remote files, from a server on this machine."""

import http.server
import json
import threading

import numpy as np
import pytest
from small import tiny

from vit_jax.weights import arrays, formats
from vit_jax.weights import fetch as module
from vit_jax.weights.fetch import fetch


class Server(http.server.ThreadingHTTPServer):
  daemon_threads = True

  def __init__(self):
    super().__init__(('127.0.0.1', 0), Handler)
    self.files, self.log, self.cut = {}, [], None
    self.url = f'http://127.0.0.1:{self.server_port}'

  def downloads(self):
    return [path for method, path in self.log if method == 'GET']


class Handler(http.server.BaseHTTPRequestHandler):
  """Serves Server.files {path: (bytes, version)}; cut: sends only so many."""

  def do_HEAD(self):
    self._send(body=False)

  def do_GET(self):
    self._send(body=True)

  def _send(self, body):
    self.server.log.append((self.command, self.path))
    found = self.server.files.get(self.path)
    self.send_response(200 if found else 404)
    data, version = found or (b'', '')
    self.send_header('Content-Length', str(len(data)))
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


def files_in(folder):
  return sorted(p.name for p in folder.rglob('*') if p.is_file())


def test_a_file_is_fetched_once(server, tmp_path):
  server.files['/w/x.npz'] = b'abc', 1
  seen = []
  for _ in range(2):
    path = fetch(
      f'{server.url}/w/x.npz',
      cache_dir=tmp_path,
      progress=lambda *args: seen.append(args),
    )
    assert path.read_bytes() == b'abc' and path.name == 'x.npz'
  assert len(server.downloads()) == 1
  assert seen[-1] == (f'{server.url}/w/x.npz', 3, 3)


def test_a_changed_file_is_fetched_anew(server, tmp_path):
  url = f'{server.url}/x.npz'
  for version, data in enumerate([b'abc', b'abd', b'longer']):
    server.files['/x.npz'] = data, version
    assert fetch(url, cache_dir=tmp_path).read_bytes() == data
  assert len(server.downloads()) == 3
  assert files_in(tmp_path) == ['.x.npz.json', 'x.npz']


def test_a_broken_connection_leaves_nothing(server, tmp_path):
  url = f'{server.url}/x.npz'
  server.files['/x.npz'] = b'a' * 100_000, 1
  server.cut = 50_000
  with pytest.raises(ValueError, match='could not be downloaded'):
    fetch(url, cache_dir=tmp_path)
  assert not files_in(tmp_path)
  server.cut = None
  assert fetch(url, cache_dir=tmp_path).stat().st_size == 100_000
  # Nor does it spoil what was there.
  server.files['/x.npz'] = b'b' * 100_000, 2
  server.cut = 50_000
  with pytest.raises(ValueError):
    fetch(url, cache_dir=tmp_path)
  server.cut = None
  assert fetch(url, cache_dir=tmp_path).read_bytes() == b'b' * 100_000


def test_files_of_one_folder_lie_in_one(server, tmp_path, monkeypatch):
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'cache'))
  for path in ('/a/x.npz', '/a/x.json', '/b/x.npz'):
    server.files[path] = path.encode(), 1
  a, b, c = (fetch(server.url + path) for path in server.files)
  assert a.parent == b.parent != c.parent
  assert a.is_relative_to(tmp_path / 'cache')
  assert c.read_bytes() == b'/b/x.npz'


def test_an_index_brings_its_shards(server, tmp_path):
  arrays.write_safetensors(tmp_path / 'one', {'a': np.ones(3, np.float32)})
  index = json.dumps({'weight_map': {'a': 'one'}}).encode()
  server.files['/m/model.safetensors.index.json'] = index, 1
  server.files['/m/one'] = (tmp_path / 'one').read_bytes(), 1
  path = fetch(f'{server.url}/m/model.safetensors.index.json')
  assert arrays.read_safetensors(path).keys() == {'a'}


def test_without_a_connection_the_cache_is_taken(server, tmp_path, capsys):
  server.files['/x.npz'] = b'abc', 1
  url = f'{server.url}/x.npz'
  fetch(url, cache_dir=tmp_path)
  gone = f'http://127.0.0.1:{server.server_port}'
  server.files.clear()
  with pytest.raises(ValueError, match='FileNotFoundError'):
    fetch(url, cache_dir=tmp_path)  # the server knows that it is not there
  server.shutdown()
  server.socket.close()
  assert fetch(f'{gone}/x.npz', cache_dir=tmp_path).read_bytes() == b'abc'
  assert 'cache' in capsys.readouterr().err
  with pytest.raises(ValueError, match='cannot be read'):
    fetch(f'{gone}/y.npz', cache_dir=tmp_path)


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
  """No test writes to the cache of who runs it."""
  monkeypatch.setenv('VIT_JAX_CACHE', str(tmp_path / 'home'))


def test_local_paths_are_given_back(tmp_path):
  (tmp_path / 'model.npz').write_bytes(b'')
  (tmp_path / 'other.txt').write_bytes(b'')
  path = tmp_path / 'model.npz'
  assert fetch(path) == fetch(str(path)) == fetch(f'file://{path}') == path
  with pytest.raises(ValueError, match=r'there is: model\.npz\.'):
    fetch(tmp_path / 'modell.npz')
  with pytest.raises(ValueError, match='neither does'):
    fetch(tmp_path / 'nowhere' / 'x.npz')


def test_what_cannot_be_fetched(server, monkeypatch):
  with pytest.raises(ValueError, match='nothing:// is not known'):
    fetch('nothing://x/y.npz')
  with pytest.raises(ValueError, match='end in the name'):
    fetch(f'{server.url}/folder/')

  def missing(url, **options):
    if url.startswith('http'):
      return 'web', url
    raise ImportError('Install it')

  monkeypatch.setattr(module.fsspec.core, 'url_to_fs', missing)
  with pytest.raises(ValueError, match='pip install s3fs'):
    fetch('s3://bucket/x.npz')
  # Public buckets need no package.
  fs, remote = module._file_system('gs://vit_models/a+b/x.npz')
  assert fs == 'web'
  assert remote == 'https://storage.googleapis.com/vit_models/a%2Bb/x.npz'


def test_progress_is_shown_after_two_seconds(monkeypatch, capsys):
  now = [100.0]
  monkeypatch.setattr(module.time, 'monotonic', lambda: now[0])
  progress = module._Progress()
  for seconds, done in ((1, 10e6), (4, 40e6), (5, 50e6), (15, 150e6)):
    now[0] = 100.0 + seconds
    progress('gs://x/y.npz', done, 700e6)
  assert capsys.readouterr().err.splitlines() == [
    'y.npz: 40 of 700 MB, 10.0 MB/s, eta 1:06',
    'y.npz: 150 of 700 MB, 10.0 MB/s, eta 0:55',
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
    server.files[f'/w/{file.name}'] = file.read_bytes(), 1
  back = formats.read(f'{server.url}/w/{first.name}', num_heads=4)
  for name, value in weights.params.items():
    np.testing.assert_array_equal(back.params[name], value, err_msg=name)
  # Without config.json or NAME.json the GELU is the format's usual one.
  gelu = back.settings.get('gelu', 'tanh')
  assert (gelu == weights.settings['gelu']) == whole

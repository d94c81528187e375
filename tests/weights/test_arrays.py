"""Arrays on disk: what is written comes back, what is broken is one error."""

import io
import json
import pickle
import struct
import tracemalloc
import zipfile

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from vit_jax.weights import arrays

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
  assert same(arrays.read_npz(tmp_path / 'x.npz'))
  assert arrays.kind(tmp_path / 'x.npz') == 'npz'


def test_numpy_reads_ours(tmp_path):
  arrays.write_npz(tmp_path / 'x.npz', FILE)
  with np.load(tmp_path / 'x.npz', allow_pickle=False) as file:
    assert same(dict(file))
  assert same(arrays.read_npz(tmp_path / 'x.npz'))
  first = (tmp_path / 'x.npz').read_bytes()
  arrays.write_npz(tmp_path / 'x.npz', FILE)
  assert (tmp_path / 'x.npz').read_bytes() == first
  assert [p.name for p in tmp_path.iterdir()] == ['x.npz']


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
  arrays.write_npz(tmp_path / 'x.npz', FILE)
  with pytest.raises(ValueError, match='allow_pickle'):
    arrays.write_npz(tmp_path / 'x.npz', FILE | {'x': np.array([{}])})
  assert same(arrays.read_npz(tmp_path / 'x.npz'))
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
    assert arrays.read_npz(path)['y'].shape == ()
    found = arrays.read_npz(path)['x']
  else:
    safetensors.numpy.save_file({'x': exact.astype(dtype)}, path)
    found = arrays.read_safetensors(path)['x']
  assert found.dtype == np.float32
  np.testing.assert_array_equal(found, exact)


def test_order_and_endianness_of_npz(tmp_path):
  array = np.arange(6, dtype='>f4').reshape(2, 3)
  np.savez(tmp_path / 'x.npz', f=np.asfortranarray(array), b=array)
  found = arrays.read_npz(tmp_path / 'x.npz')
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
    arrays.read_npz(path)
  assert str(path) in str(e.value)
  assert tracemalloc.get_traced_memory()[1] < 1e6
  tracemalloc.stop()
  assert not Harmful.ran


def test_pickled_by_numpy(tmp_path):
  np.savez(tmp_path / 'x.npz', a=np.zeros(2), pre_logits=np.array({}))
  with pytest.raises(ValueError, match=r'pre_logits\.npy is pickled'):
    arrays.read_npz(tmp_path / 'x.npz')


def test_a_header_that_promises_what_a_zip_could_hold(tmp_path):
  """The zip's directory lies, too: 4 GB of what are 12 bytes."""
  path = tmp_path / 'x.npz'
  data = zipped(**{'x.npy': member('(1000, 1000, 1000)')})
  at = data.rindex(b'PK\x01\x02')
  lie = struct.pack('<I', 4_000_000_100)
  path.write_bytes(data[: at + 24] + lie + data[at + 28 :])
  tracemalloc.start()
  with pytest.raises(ValueError):
    arrays.read_npz(path)
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
    (zipped(**{'x.npy': member(), 'read.me': b'x'}), r'read\.me.*no array'),
    (twice.getvalue(), 'several arrays'),
    (b'no zip', 'not a zip'),
    (b'', 'not a zip'),
  ):
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
      arrays.read_npz(path)
  with pytest.raises(ValueError, match='No such file'):
    arrays.read_npz(tmp_path / 'other.npz')


def test_safetensors_there_and_back(tmp_path):
  path = tmp_path / 'model.safetensors'
  arrays.write_safetensors(path, FILE, {'format': 'pt'})
  assert same(arrays.read_safetensors(path))
  assert arrays.kind(path) == 'safetensors'
  with safetensors.safe_open(path, 'np') as file:
    assert file.metadata() == {'format': 'pt'}
  transposed = {'x': np.arange(6, dtype=np.float32).reshape(2, 3).T}
  arrays.write_safetensors(path, transposed)
  assert same(arrays.read_safetensors(path), transposed)
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
      arrays.read_safetensors(path)


@pytest.fixture
def sharded(tmp_path):
  """The path of an index, and what it says, of two shards."""
  parts = {
    'model-1.safetensors': {'a': np.ones(2, np.float32)},
    'model-2.safetensors': {'b': np.zeros(3, np.float32)},
  }
  for name, part in parts.items():
    arrays.write_safetensors(tmp_path / name, part)
  index = {name: file for file, part in parts.items() for name in part}
  path = tmp_path / 'model.safetensors.index.json'
  path.write_text(json.dumps({'metadata': {}, 'weight_map': index}))
  return path, index


def test_shards_are_read_by_their_index(sharded):
  path, _ = sharded
  assert arrays.kind(path) == 'safetensors'
  found = arrays.read_safetensors(path)
  assert {name: x.shape for name, x in found.items()} == {'a': (2,), 'b': (3,)}


@pytest.mark.parametrize(
  'change, message',
  [
    ({'a': '../model-1.safetensors'}, 'beside it'),
    ({'a': '/model-1.safetensors'}, 'beside it'),
    ({'a': '..'}, 'beside it'),
    ({'a': 'x\\y'}, 'beside it'),
    ({'a': 3}, 'beside it'),
    ({'a': 'model-3.safetensors'}, 'not beside it'),
    ({'c': 'model-2.safetensors'}, r"disagree: missing \['c'\]"),
    ({'a': 'model-2.safetensors'}, r"missing \['a'\]"),
  ],
)
def test_an_index_that_is_wrong(sharded, change, message):
  path, index = sharded
  path.write_text(json.dumps({'weight_map': index | change}))
  with pytest.raises(ValueError, match=message):
    arrays.read_safetensors(path)


@pytest.mark.parametrize(
  'text, message',
  [
    ('{"a": 1,\n "b" 2}', 'line 2 column 6'),
    ('[1]', 'expected {...}, found a list'),
    ('', 'line 1'),
    ('[' * 100_000, 'no JSON'),
  ],
)
def test_json_errors_have_a_place(tmp_path, text, message):
  path = tmp_path / 'config.json'
  path.write_text(text)
  with pytest.raises(ValueError, match=message):
    arrays.read_json(path)
  path.write_bytes(b'{"\xff": 1}')
  with pytest.raises(ValueError, match='no JSON'):
    arrays.read_json(path)
  path.write_text('{"a": {"b": [1]}}')
  assert arrays.read_json(path) == {'a': {'b': [1]}}


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
      arrays.kind(path)
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
    (b'{"model_type": "vit"}', 'not known'),
    (b'what is this', r"not known here \(it begins b'what is '\)"),
    (b'{', 'JSON'),
  ],
)
def test_other_files_are_named(tmp_path, data, message):
  path = tmp_path / 'weights.npz'  # content counts, not what it is called
  path.write_bytes(data)
  with pytest.raises(ValueError, match=message):
    arrays.kind(path)


def test_no_file_is_an_error(tmp_path):
  for path in (tmp_path, tmp_path / 'x'):
    with pytest.raises(ValueError, match='no file'):
      arrays.kind(path)

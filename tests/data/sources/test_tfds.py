"""TFDS sets that the test itself prepares, without TensorFlow."""

import dataclasses
import io
import pickle
import struct
import sys

import made_up
import numpy as np
import pytest
import tensorflow_datasets as tfds
from tiny import encode

from vit_jax.data import images
from vit_jax.data.images import Colours
from vit_jax.data.sources.tfds import Tfds
from vit_jax.tools import to_array_record
from vit_jax.types import UserError

_FEATURES = {
  'image': tfds.features.Image(shape=(None, None, 3), encoding_format='png'),
  'label': tfds.features.ClassLabel(names=['ant', 'bee', 'cat']),
  'weights': tfds.features.Tensor(shape=(3,), dtype=np.float32),
  'count': np.int64,
  'tags': tfds.features.Sequence(np.int64),
  'things': tfds.features.Sequence(
    {'place': tfds.features.Tensor(shape=(2,), dtype=np.float32), 'n': np.int64}
  ),
  'file_name': tfds.features.Text(),
}


def _example(value):
  return {
    'image': io.BytesIO(encode(np.full((4, 5, 3), value, np.uint8))),
    'label': value % 3,
    'weights': np.eye(3, dtype=np.float32)[value % 3],
    'count': value,
    'tags': [1] * (value % 4),
    'things': [{'place': [i, 2], 'n': 5} for i in range(value % 4)],
    'file_name': f'{value}.png',
  }


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory):
  path = tmp_path_factory.mktemp('tfds')
  splits = {'train': map(_example, range(20)), 'test': [_example(90)]}
  made_up.prepare_new(path, 'colours', '1.2.0', _FEATURES, splits)
  return path


@pytest.fixture(scope='module')
def as_tfrecord(data_dir, tmp_path_factory):
  """The same set as TFRecord files, written by the format's definition."""
  from array_record.python.array_record_data_source import ArrayRecordDataSource

  path = tmp_path_factory.mktemp('tfrecord')
  source = data_dir / 'colours' / '1.2.0'
  target = path / 'colours' / '1.2.0'
  target.mkdir(parents=True)
  for file in source.iterdir():
    if '.array_record-' not in file.name:
      text = file.read_text().replace('"array_record"', '"tfrecord"')
      (target / file.name).write_text(text)
      continue
    name = file.name.replace('array_record', 'tfrecord')
    with ArrayRecordDataSource([str(file)]) as records:
      framed = [
        struct.pack('<Q', len(x)) + bytes(4) + x + bytes(4)
        for x in (records[i] for i in range(len(records)))
      ]
    (target / name).write_bytes(b''.join(framed))
  return path


def _values(source):
  return [_value(source[i]) for i in range(len(source))]


def _value(example):
  return int(images.decode(example['image'])[0, 0, 0])


def test_reads_without_tensorflow(data_dir):
  source = Tfds('colours', split='train', data_dir=data_dir)
  assert len(source) == 20 and sorted(_values(source)) == list(range(20))
  for i in range(20):
    value = _value(source[i])
    assert source[i]['label'] == value % 3
    assert isinstance(source[i]['image'], bytes)
    assert source[i]['count'] == value and 'things' in source[i]
    assert source.describe(i) == f'colours train[{i}] ({value}.png)'
  assert source.class_names == ['ant', 'bee', 'cat']
  assert source.decode == Colours(3, exif=False)
  assert source.num_classes == 3
  assert 'tensorflow' not in sys.modules


def test_slices(data_dir):
  whole = _values(Tfds('colours', split='train', data_dir=data_dir))
  split = 'train[80%:]+train[:5]+test'
  source = Tfds('colours', split=split, data_dir=data_dir)
  assert _values(source) == [*whole[16:], *whole[:5], 90]


def test_name_with_version_and_pickle(data_dir):
  source = Tfds('colours:1.2.0', split='train', data_dir=str(data_dir))
  copy = pickle.loads(pickle.dumps(source))
  assert _values(copy) == _values(source)
  assert len(pickle.dumps(source)) < 10_000  # no records


def test_other_labels(data_dir):
  options = {'split': 'train', 'data_dir': data_dir}
  source = Tfds('colours', **options, label_key='count')
  assert source.num_classes is None and source.class_names is None
  assert all(source[i]['label'] == _value(source[i]) for i in range(20))
  soft = Tfds('colours', **options, label_key='weights')[0]
  np.testing.assert_array_equal(soft['label'], np.eye(3)[_value(soft) % 3])


@dataclasses.dataclass(frozen=True)
class Length:
  """A label: the length of a feature, as an int or as one-hot."""

  num_classes: int = 4
  vector: bool = False

  def __call__(self, value):
    if isinstance(value, dict):
      assert value['place'].shape == (len(value['n']), 2)
      assert value['place'].dtype == np.float32
      value = value['n']
    assert value.dtype == np.int64
    label = len(value)
    return np.eye(self.num_classes)[label] if self.vector else label


@pytest.mark.parametrize('key', ['tags', 'things'])
def test_label_fn(data_dir, key):
  options = {'split': 'train', 'data_dir': data_dir, 'label_key': key}
  source = Tfds('colours', **options, label_fn=Length())
  expected = [value % 4 for value in _values(source)]
  assert {0, 3} < set(expected)  # also of no element
  assert [source[i]['label'] for i in range(20)] == expected
  assert type(source[0]['label']) is int
  assert source.num_classes == 4 and source.class_names is None
  np.testing.assert_array_equal(source.labels(), expected)
  assert source.labels().dtype == np.int32
  copy = pickle.loads(pickle.dumps(source))
  assert [copy[i]['label'] for i in range(20)] == expected
  vectors = Tfds('colours', **options, label_fn=Length(vector=True)).labels()
  np.testing.assert_array_equal(vectors, np.eye(4)[expected])
  assert vectors.dtype == np.float32


@pytest.mark.parametrize('key', ['label', 'count', 'weights'])
def test_labels_are_those_of_the_examples(data_dir, key, monkeypatch):
  monkeypatch.setattr('vit_jax.data.sources.tfds._READ_AHEAD', 7)
  source = Tfds('colours', split='train', data_dir=data_dir, label_key=key)
  expected = np.stack([source[i]['label'] for i in range(20)])
  labels = source.labels()
  assert labels.dtype == (np.float32 if key == 'weights' else np.int32)
  np.testing.assert_array_equal(labels, expected)


def test_absent_data_shows_the_command(data_dir):
  with pytest.raises(ValueError, match="'mnist' is not prepared") as info:
    Tfds('mnist', split='train', data_dir=data_dir)
  command = (
    f"tfds.builder('mnist', data_dir='{data_dir}', file_format='array_record')"
    '.download_and_prepare()'
  )
  assert command in str(info.value)
  with pytest.raises(UserError, match='prepare SOURCE DIR/no_such_set'):
    Tfds('no_such_set', split='train', data_dir=data_dir)


def test_tfrecord_shows_the_command_and_it_works(data_dir, as_tfrecord):
  with pytest.raises(ValueError, match='is prepared as tfrecord') as info:
    Tfds('colours', split='train', data_dir=as_tfrecord)
  shown = str(info.value).split('python -m vit_jax.tools.to_array_record ')[1]
  for _ in range(2):  # again, as after an interruption
    to_array_record.main([shown.splitlines()[0]])
  converted = Tfds('colours', split='train[2:]', data_dir=as_tfrecord)
  original = Tfds('colours', split='train[2:]', data_dir=data_dir)
  assert _values(converted) == _values(original)


def test_conversion_errors(tmp_path):
  with pytest.raises(SystemExit, match=r'no files named \*.tfrecord-\*'):
    to_array_record.main([str(tmp_path)])
  cut = struct.pack('<Q', 100) + bytes(50)
  (tmp_path / 'x.tfrecord-00000-of-00001').write_bytes(cut)
  with pytest.raises(Exception, match='TFRecord'):  # of Grain
    to_array_record.main([str(tmp_path)])
  assert not (tmp_path / 'x.array_record-00000-of-00001').exists()

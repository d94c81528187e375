"""Parquet: columns, row groups, the cache, remote files, errors."""

import concurrent.futures
import json
import pickle
import sys

import fsspec
import numpy as np
import packed
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from absl import logging

from vit_jax.data import fingerprints, pipeline
from vit_jax.data.folder import Folder
from vit_jax.data.parquet import Parquet

FILES = packed.images()
LABELS = [packed.NAMES.index(name.split('/')[0]) for name in FILES]


def hugging_face(names):
  """Return the schema's metadata as the package datasets writes it."""
  label = {'names': names, '_type': 'ClassLabel'}
  features = {'image': {'_type': 'Image'}, 'label': label}
  return {'huggingface': json.dumps({'info': {'features': features}})}


def write(path, images=None, labels=LABELS, *, rows=4, names=None, **columns):
  images = list(FILES.values()) if images is None else images
  table = pa.table({'image': images, 'label': labels, **columns})
  if names:
    table = table.replace_schema_metadata(hugging_face(names))
  path.parent.mkdir(parents=True, exist_ok=True)
  pq.write_table(table, path, row_group_size=rows)
  return path


def structs(images, path=None):
  return [{'bytes': x, 'path': path} for x in images]


@pytest.mark.parametrize('kind', [list, structs])
@pytest.mark.parametrize('rows', [1, 5, 100])
def test_images_and_labels(tmp_path, kind, rows):
  path = tmp_path / 'x.parquet'
  write(path, kind(FILES.values()), rows=rows, names=packed.NAMES)
  source = Parquet(path)
  assert packed.contents(source) == packed.expected(FILES)
  assert (source.num_classes, len(source)) == (3, 12)
  assert source.labels().tolist() == LABELS
  assert source.labels().dtype == np.int32
  where = f'row {7 % rows} of row group {7 // rows} of {path}'
  assert source.describe(7) == where
  with pytest.raises(IndexError):
    source[12]


@pytest.mark.parametrize(
  ('values', 'expected', 'names'),
  [
    (pa.array([0, 2], pa.uint8()), [0, 2], None),
    (pa.array([True, False]), [1, 0], None),
    (['b', 'a'], [1, 0], ['a', 'b']),
    (pa.array(['b', 'a']).dictionary_encode(), [1, 0], ['a', 'b']),
    ([[0.0, 1.0], [0.5, 0.5]], [[0, 1], [0.5, 0.5]], None),
    ([[1, 0], [0, 1]], [[1, 0], [0, 1]], None),
  ],
)
def test_kinds_of_labels(tmp_path, values, expected, names):
  source = Parquet(write(tmp_path / 'x.parquet', [b'', b'a'], values))
  np.testing.assert_array_equal(source.labels(), expected)
  np.testing.assert_array_equal(source[1]['label'], expected[1])
  assert source.class_names == names
  assert source.num_classes == (2 if names or np.ndim(expected) > 1 else None)


def test_several_files(tmp_path):
  for split, half in (
    ('train', slice(5)),
    ('train', slice(5, 12)),
    ('test', slice(3)),
  ):
    path = tmp_path / f'{split}-0000{half.start or 0}-of-2.parquet'
    write(path, list(FILES.values())[half], LABELS[half], names=packed.NAMES)
  source = Parquet(f'{tmp_path}/train-*.parquet')
  assert packed.contents(source) == packed.expected(FILES)
  assert packed.all_of(Parquet(tmp_path, split='train')) == packed.all_of(
    source
  )
  assert len(Parquet(tmp_path, split='test')) == 3
  with pytest.raises(ValueError, match=r"\['test', 'train'\]. Choose one"):
    Parquet(tmp_path)
  write(tmp_path / 'train-2.parquet', labels=['x'] * 12)
  with pytest.raises(ValueError, match='int64 and string in different files'):
    Parquet(tmp_path, split='train')


def test_images_in_files_next_to_the_table(tmp_path):
  packed.write_folder(tmp_path, FILES)
  cells = [{'bytes': None, 'path': name} for name in FILES]
  source = Parquet(write(tmp_path / 'x.parquet', cells, names=packed.NAMES))
  assert packed.contents(source) == packed.expected(FILES)


def test_other_columns_and_names(tmp_path):
  path = write(tmp_path / 'x.parquet', label2=LABELS, text=['x'] * 12)
  source = Parquet(path, label_key='label2', class_names=['a', 'b', 'c'])
  assert source.class_names == ['a', 'b', 'c']
  assert Parquet(path, label_key='').labels().tolist() == [0] * 12
  with pytest.raises(
    ValueError, match=r"no column 'img' .*It has image \(binary"
  ):
    Parquet(path, image_key='img')
  with pytest.raises(ValueError, match=r"'text' of .* is string. Expected the"):
    Parquet(path, image_key='text')
  with pytest.raises(ValueError, match=r"no column 'no'.* or to '' for images"):
    Parquet(path, label_key='no')


@pytest.mark.parametrize(
  ('labels', 'message'),
  [
    ([0, None], r'1 of 2 labels are empty \(null\), the first in row 1'),
    ([0, -1], r'label of row 1 is -1, not in \[0, '),
    ([0, 5], r'label of row 1 is 5, not in \[0, 2\)'),
    ([0.5, 1.0], "has the label '0.5' of type float"),
    ([[1.0], [1.0, 2.0]], 'lists of .* values. Expected one number for each'),
  ],
)
def test_unusable_labels(tmp_path, labels, message):
  write(tmp_path / 'x.parquet', [b'', b''], labels)
  with pytest.raises(ValueError, match=message):
    Parquet(tmp_path / 'x.parquet', class_names=['a', 'b'])


def test_unusable_files(tmp_path):
  path = write(tmp_path / 'x.parquet')
  data = path.read_bytes()
  path.write_bytes(data[: len(data) // 2])
  with pytest.raises(ValueError, match=r'cannot read .*x\.parquet as parquet'):
    Parquet(path)
  path.write_bytes(data[:200] + bytes(300) + data[500:])  # in an image column
  source = Parquet(path)
  with pytest.raises((ValueError, OSError), match=r'x\.parquet, row group 0'):
    packed.all_of(source)
  write(path, [b'', None], [0, 1])
  with pytest.raises(ValueError, match=r'the image is empty \(null\)'):
    packed.all_of(Parquet(path))
  with pytest.raises(ValueError, match='has no rows'):
    Parquet(write(path, pa.array([], pa.binary()), pa.array([], pa.int64())))


def test_the_cache_is_bounded_and_shared_by_threads(tmp_path, monkeypatch):
  images = [bytes([i]) * 1000 for i in range(40)]
  path = write(tmp_path / 'x.parquet', images, [0] * 40, rows=4)
  source = Parquet(path, cache_bytes=9000)  # two row groups
  groups, loaded = source._groups, []
  monkeypatch.setattr(
    groups, '_load', lambda *x, load=groups._load: (loaded.append(x), load(*x))
  )
  assert [x['image'] for x in packed.all_of(source)] == images
  assert len(loaded) == 10
  assert sum(groups._sizes.values()) <= 9000
  assert len(groups._kept) == 2
  order = np.random.default_rng(0).integers(0, 40, 400).tolist()
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    found = list(pool.map(source.__getitem__, order))
  assert [x['image'] for x in found] == [images[i] for i in order]
  loaded.clear()
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    list(pool.map(pickle.loads(pickle.dumps(source)).__getitem__, [0] * 50))
  assert not loaded


def test_shuffled_reading_of_large_row_groups_is_reported(
  tmp_path, monkeypatch
):
  warnings = []
  monkeypatch.setattr(logging, 'warning', warnings.append)
  images = [bytes(1000)] * 800
  path = write(tmp_path / 'x.parquet', images, [0] * 800, rows=40)
  packed.all_of(Parquet(path, cache_bytes=1))  # in order
  assert not warnings
  source = Parquet(path, cache_bytes=1)
  for i in range(0, 800 * 40, 41):
    source[i % 800]
  (text,) = warnings
  assert 'row group is read as a whole' in text.replace('\n', ' ')
  assert 'tools.prepare' in text


def test_remote_files(tmp_path):
  memory = fsspec.filesystem('memory')
  local = Parquet(write(tmp_path / 'x.parquet', names=packed.NAMES))
  memory.pipe('/pq/train-0.parquet', (tmp_path / 'x.parquet').read_bytes())
  try:
    for files in (
      'memory://pq/*.parquet',
      'memory://pq',
      'memory://pq/train-{0..0}.parquet',
    ):
      source = pickle.loads(pickle.dumps(Parquet(files)))
      assert packed.all_of(source) == packed.all_of(local)
  finally:
    memory.rm('/pq', recursive=True)


def test_fingerprints(tmp_path):
  first = fingerprints.fingerprint(Parquet(write(tmp_path / 'x.parquet')))
  moved = write(tmp_path / 'b' / 'x.parquet')
  assert fingerprints.fingerprint(Parquet(moved)) == first
  write(moved, labels=LABELS[::-1])
  assert fingerprints.fingerprint(Parquet(moved)) != first
  write(moved, [b'x' + x for x in FILES.values()])
  assert fingerprints.fingerprint(Parquet(moved)) != first


def test_batches_equal_those_of_a_folder(tmp_path):
  folder = Folder(packed.write_folder(tmp_path / 'folder', FILES))
  source = Parquet(write(tmp_path / 'x.parquet', names=packed.NAMES))
  for host in range(2):
    one, two = (
      pipeline.Data(x, 4).train_batches(
        seed=1, process_index=host, process_count=2
      )
      for x in (folder, source)
    )
    for _ in range(5):
      x, y = next(one), next(two)
      np.testing.assert_array_equal(x['image'], y['image'])
      np.testing.assert_array_equal(x['label'], y['label'])
    one.close(), two.close()


def test_the_package_is_missing(monkeypatch):
  monkeypatch.setitem(sys.modules, 'pyarrow.parquet', None)
  with pytest.raises(ValueError, match=r"pip install 'vit_jax\[parquet\]'"):
    Parquet('x')

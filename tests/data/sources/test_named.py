"""All readers show the same examples, and open_source finds them by name."""

import concurrent.futures
import io
import pickle
import shutil

import made_up
import numpy as np
import packed
import pytest
import tensorflow_datasets as tfds

from vit_jax.data.images import UnreadableError
from vit_jax.data.pipeline import Data
from vit_jax.data.sources import tables
from vit_jax.data.sources.folder import Folder
from vit_jax.data.sources.hugging_face import HuggingFace
from vit_jax.data.sources.named import open_source
from vit_jax.data.sources.tfds import Tfds
from vit_jax.data.subsets import Slice, fingerprint
from vit_jax.data.targets import Classes, Grades, Numbers

datasets = pytest.importorskip('datasets')

FILES = packed.images()
NAMES = [*packed.NAMES]
LABELS = [NAMES.index(name.split('/')[0]) for name in FILES]


def write_tfds(path, files):
  """Write the data set 'insects' in the order of the files, by TFDS."""

  label = tfds.features.ClassLabel(names=NAMES)
  features = {'image': tfds.features.Image(), 'label': label}
  features['file_name'] = tfds.features.Text()
  examples = [
    {'image': io.BytesIO(data), 'label': name.split('/')[0], 'file_name': name}
    for name, data in files.items()
  ]
  splits = {'train': examples}
  made_up.prepare_new(path, 'insects', '1.0.0', features, splits)


def table(files):
  image = [{'bytes': x, 'path': name} for name, x in files.items()]
  label = [NAMES.index(name.split('/')[0]) for name in files]
  features = datasets.Features(
    image=datasets.Image(),
    label=datasets.ClassLabel(names=NAMES),
    row=datasets.Value('int64'),
  )
  columns = {'image': image, 'label': label, 'row': [*range(len(label))]}
  return datasets.Dataset.from_dict(columns, features=features)


def write_all(root, files=FILES):
  """Write the same images in each kind of file."""
  packed.write_folder(root / 'folder', files)
  packed.write_folder(root / 'splits' / 'train', files)
  rows = ''.join(f'{name},{name.split("/")[0]}\n' for name in files)
  (root / 'folder' / 'labels.csv').write_text(rows, encoding='utf-8')
  samples = {}
  for name, data in files.items():
    label, stem = name.removesuffix('.png').split('/')
    samples[f'{stem}.png'] = data
    samples[f'{stem}.cls'] = str(NAMES.index(label)).encode()
  packed.write_folder(root / 'wds', {'train-0.tar': packed.tar_bytes(samples)})
  (root / 'names.txt').write_text('\n'.join(NAMES), encoding='utf-8')
  datasets.DatasetDict(train=table(files)).save_to_disk(root / 'saved')
  table(files).save_to_disk(root / 'single')
  table(files).to_parquet(root / 'pq' / 'train-0.parquet')
  write_tfds(root / 'tfds', files)
  return root


@pytest.fixture(scope='module')
def root(tmp_path_factory):
  with pytest.MonkeyPatch.context() as patch:
    cache = str(tmp_path_factory.mktemp('cache'))
    patch.setattr(datasets.config, 'HF_DATASETS_CACHE', cache)
    patch.setattr(datasets.config, 'HF_HUB_OFFLINE', True)
    patch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    yield write_all(tmp_path_factory.mktemp('data'))


TFDS = 'tfds:{}/tfds/insects/1.0.0'
KINDS = {  # name: (class, arguments)
  'folder:{}/folder': (Folder, {}),
  '{}/folder': (Folder, {}),
  '{}/folder ': (Folder, {'csv': 'labels.csv'}),
  '{}/splits': (Folder, {'split': 'train'}),
  f'{TFDS}:train': (Tfds, {}),
  '{}/tfds/insects/1.0.0': (Tfds, {'split': 'train'}),
  'hf:{}/splits:train': (HuggingFace, {}),
  'hf:{}/pq': (HuggingFace, {'split': 'train'}),
  '{}/pq/train-*.parquet': (HuggingFace, {}),
  '{}/wds/train-*.tar': (HuggingFace, {'class_names': '{}/names.txt'}),
  '{}/saved': (HuggingFace, {}),
  '{}/single': (HuggingFace, {'split': 'train'}),
}


def opened(root, name, **more):
  options = KINDS.get(name, ({}, {}))[1]
  options = {k: v.format(root) for k, v in options.items()} | more
  return open_source(name.strip().format(root), **options)


@pytest.mark.parametrize('name', KINDS)
def test_all_kinds_give_the_same_examples(root, name):
  source = opened(root, name)
  assert type(source) is KINDS[name][0]
  assert packed.contents(source) == packed.expected(FILES)
  assert len(source) == 12 and source.num_classes == 3
  assert source.class_names == NAMES and source.decode.channels == 3
  assert source.labels().tolist() == LABELS
  assert source.labels().dtype == np.int32
  assert type(source[0]['label']) is int
  assert len(opened(root, name, classes=False)) == 12
  is_table = any(x in name for x in ('/pq', '/saved', '/single'))
  assert source[5].get('row') == (5 if is_table else None)
  assert source.decode.exif is (KINDS[name][0] is not Tfds)
  with pytest.raises((IndexError, ValueError)):
    source[12]
  copy = pickle.loads(pickle.dumps(source))
  assert copy.describe(7) == source.describe(7) != source.describe(8)
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    found = list(pool.map(copy.__getitem__, [*range(12)] * 4))
  assert found == packed.all_of(source) * 4
  half = opened(root, name, split=KINDS[name][1].get('split', '') + '[:50%]')
  assert len(half) == 6 and half.class_names == NAMES


@pytest.mark.parametrize('name', [f'{TFDS}:train', '{}/saved'])
def test_kinds_of_labels_of_columns(root, name):
  order = [*reversed(NAMES)]
  grades = pickle.loads(
    pickle.dumps(opened(root, name, targets=Grades(order=order)))
  )
  assert grades.class_names == order
  assert grades.labels().tolist() == [2 - x for x in LABELS]
  assert grades[0]['label'] == 2 and grades.column('label') == LABELS
  labels = opened(root, name, targets=Numbers(('label',)))
  assert labels[11]['label'] == [2] and labels.num_classes == 1


def differences(one, other):
  return [key for key in one if one[key] != other.get(key, one[key])]


def test_fingerprints_tell_data_apart(root, tmp_path):
  source = fingerprint(opened(root, '{}/folder'))
  for name in KINDS:
    found = differences(source, fingerprint(opened(root, name)))
    assert {*found} <= {'rows'}  # by names of files, where there are some
  shutil.copytree(root / 'folder', tmp_path / 'moved')
  moved = tmp_path / 'moved'
  assert differences(source, fingerprint(Folder(moved))) == []
  names = class_names = ['cat ü', 'bee', 'ant']
  other = fingerprint(Folder(moved, class_names=class_names))
  assert differences(source, other) == ['classes', 'rows', 'examples']
  (moved / 'bee' / '001.png').write_bytes(b'other')
  (change,) = differences(source, fingerprint(Folder(moved)))
  assert change == 'examples'
  (moved / 'bee' / '001.png').unlink()
  changes = differences(source, fingerprint(Folder(moved)))
  assert changes[0] == 'num_examples'
  unreadable = Folder(moved)
  (moved / names[0] / '002.png').unlink()
  assert len(fingerprint(unreadable)['examples']) == 16


def test_arguments_reach_the_source(root):
  folder = root / 'folder'
  assert open_source(folder, channels=1).decode.channels == 1
  assert open_source(folder, exif=False).decode.exif is False
  assert open_source(folder, class_names=NAMES[::-1])[0]['label'] == 2
  part = open_source(folder, split='[:75%]', stratified=True, channels=1)
  assert type(part) is Slice and part.decode.channels == 1
  assert np.bincount(part.labels()).tolist() == [3, 3, 3]
  source = open_source(root / 'saved', image_key='image', label_key='label')
  assert source.num_classes == 3
  name = f'tfds:{root}/tfds/insects/1.0.0'
  assert open_source(f'{name}:train', exif=True).decode.exif
  assert len(open_source(f'{name}:train[:3]+train[5:]')) == 10
  assert open_source(f'{name}:train', label_key='label').num_classes == 3


def test_the_names_of_configurations(monkeypatch):
  seen = []
  for kind in ('hf', 'tfds'):
    monkeypatch.setitem(
      open_source.__globals__['_READERS'],
      kind,
      lambda name, channels, **options: seen.append((name, options)),
    )
  open_source('hf:beans')
  open_source('hf:a/b:big', split='test')
  open_source('hf:a/b:big:test')
  open_source('tfds:cifar10:3.0.2', split='test')
  open_source('tfds:gs://bucket/cifar10/3.0.2:test')
  open_source('hf:s3://bucket/*.parquet')
  assert seen == [
    ('beans', {}),
    ('a/b', {'config': 'big', 'split': 'test'}),
    ('a/b', {'config': 'big', 'split': 'test'}),
    ('cifar10:3.0.2', {'split': 'test'}),
    ('gs://bucket/cifar10/3.0.2', {'split': 'test'}),
    ('s3://bucket/*.parquet', {}),
  ]


def test_only_images_of_the_data_set_are_read(tmp_path, monkeypatch):
  (tmp_path / 'a.png').write_bytes(b'image')
  paths = [f'{tmp_path}/a.png', f'{tmp_path}/../b', '/etc/passwd']
  data = {'image': [{'path': x} for x in paths], 'label': [0, 1, 0]}
  made = datasets.Dataset.from_dict(data).cast_column('image', datasets.Image())
  monkeypatch.setattr(datasets, 'load_dataset', lambda *args, **options: made)
  source = HuggingFace(tmp_path / 'train.parquet')
  assert source[0]['image'] == b'image'
  for index in (1, 2):
    with pytest.raises(ValueError, match='is not below'):
      source[index]


def test_arguments_reach_the_package(monkeypatch):
  seen = []

  def load_dataset(*args, **options):
    seen.append((args, options))
    return table(FILES)

  monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
  HuggingFace('a/b', split='x', config='c')
  HuggingFace('/x/*.parquet')
  HuggingFace('/x/0.tar')
  files = [
    {'split': 'train', 'data_files': {'train': name}}
    for name in ('/x/*.parquet', '/x/0.tar')
  ]
  assert seen == [
    (('a/b', 'c'), {'split': 'x'}),
    (('parquet',), files[0]),
    (('webdataset',), files[1]),
  ]


def test_an_example_without_an_image_is_unreadable(monkeypatch):
  data = table(FILES).add_item({'image': None, 'label': 0})
  monkeypatch.setattr(datasets, 'load_dataset', lambda *a, **k: data)
  source = HuggingFace('/x/0.tar')
  batches = Data(source, 13, on_error='skip').eval_batches()
  assert next(iter(batches))['mask'].tolist() == [True] * 12 + [False]
  with pytest.raises(UnreadableError, match=r"\[12\].*'image' is empty"):
    next(iter(Data(source, 13).eval_batches()))


@pytest.mark.parametrize(
  ('name', 'options', 'words'),
  [
    ('wds:/data/x.tar', {}, ["'wds'", 'folder:PATH']),
    (TFDS, {}, ['split']),
    (f'{TFDS}:train', {'label_key': 'y'}, ["'y'", 'label_key', 'file_name']),
    (f'{TFDS}:train', {'image_key': 'img'}, ["'img'", 'image_key']),
    ('hf:nobody/nothing:train', {}, ['nobody/nothing train cannot be read']),
    ('hf:{}/pq:test', {}, ['pq test cannot be read', "['train']"]),
    ('hf:{}/saved', {'split': 'test'}, ["'test'", "'train'"]),
    ('hf:{}/saved', {'label_key': 'fine'}, ["'fine'", 'label_key', 'image']),
    ('hf:{}/saved', {'image_key': 'x'}, ["'x'", 'image_key']),
    ('{}/folder', {'split': '[5%:5%]'}, ["'[5%:5%]'"]),
    ('{}/folder', {'class_names': ['a', 'a']}, ['class_names', 'twice']),
    ('{}/folder', {'class_names': ['ant', 'bee']}, ['class_names', 'cat ü']),
  ],
)
def test_names_that_nothing_can_be_opened_from(root, name, options, words):
  with pytest.raises(ValueError) as error:
    open_source(name.format(root), **options)
  assert all(word in str(error.value) for word in words)


def test_a_damaged_page_of_a_parquet_file(root, tmp_path):
  file = tmp_path / 'a.parquet'
  data = next(root.glob('pq/*.parquet')).read_bytes()
  file.write_bytes(data[:4] + b'\xff' * 36 + data[40:])
  with pytest.raises(ValueError, match=r'a\.parquet train is damaged: '):
    open_source(str(file))


@pytest.mark.parametrize(
  ('values', 'names', 'expected', 'classes'),
  [
    ([2, 0, 1], None, [2, 0, 1], '012'),
    ([2, 0, 1], 'abc', [2, 0, 1], 'abc'),
    ([True, False], None, [1, 0], '01'),
    (['2', '10'], None, [0, 1], ['2', '10']),
    (['2', '10'], ['10', '2'], [1, 0], ['10', '2']),
    (['b', 'a', 'b'], None, [1, 0, 1], 'ab'),
    (['b', 'a', 'b'], 'bca', [0, 2, 0], 'bca'),
    ([[0.5, 1], [0, 1]], None, [[0.5, 1], [0, 1]], None),
    ([[0.5, 1], [0, 1]], 'ab', [[0.5, 1], [0, 1]], 'ab'),
    (['a', 'x'], 'abc', "['x']", None),
    ([None, None], None, 'all labels in x are missing', None),
    ([0.5], None, '0.5', None),
  ],
)
def test_kinds_of_labels(values, names, expected, classes):
  names = None if names is None else [*names]
  if isinstance(expected, str):
    with pytest.raises(ValueError) as error:
      tables.labelled('here', Classes(), {'x': values}, names)
    assert 'here' in str(error.value) and expected in str(error.value)
    return
  found, known = Classes().encode('here', {'x': values}, names)
  np.testing.assert_array_equal(found, expected)
  assert found.dtype == (np.float32 if found.ndim > 1 else np.int32)
  assert known == (None if classes is None else [*classes])

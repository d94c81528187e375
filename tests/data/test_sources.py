"""open_source: kinds by name and by content, splits, slices, errors."""

import importlib

import fsspec
import numpy as np
import packed
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_configs import load_config
from vit_jax.data.parquet import Parquet
from vit_jax.data.tar import Tar
from vit_jax.data.webdataset import WebDataset

from vit_jax import config as configs
from vit_jax.data import pipeline, splits
from vit_jax.data.folder import Folder
from vit_jax.data.sources import open_source
from vit_jax.data.tfds import Tfds
from vit_jax.data.transforms import FlipLR

made_up = importlib.import_module('made_up')
FILES = packed.images()
LABELS = [packed.NAMES.index(name.split('/')[0]) for name in FILES]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('cache')))


@pytest.fixture(scope='module')
def root(tmp_path_factory):
  """The same images in each kind of file."""
  root = tmp_path_factory.mktemp('data')
  packed.write_folder(root / 'folder', FILES)
  packed.write_tar(root / 'x.tar', FILES)
  packed.write_tar(root / 'wds' / 'x-0.tar', packed.samples(FILES))
  (root / 'wds' / 'classnames.txt').write_text(
    '\n'.join(packed.NAMES), encoding='utf-8'
  )
  names = [packed.NAMES[x] for x in LABELS]
  table = pa.table({'image': list(FILES.values()), 'label': names})
  (root / 'pq').mkdir()
  pq.write_table(table, root / 'pq' / 'x.parquet')
  return root


NAMED = {
  'folder:{}/folder': Folder,
  '{}/folder': Folder,
  'tar:{}/x.tar': Tar,
  '{}/x.tar': Tar,
  'wds:{}/wds/x-{{0..0}}.tar': WebDataset,
  '{}/wds': WebDataset,
  '{}/wds/x-*.tar': WebDataset,
  'parquet:{}/pq': Parquet,
  '{}/pq': Parquet,
  '{}/pq/*.parquet': Parquet,
}


@pytest.mark.parametrize('name', NAMED)
def test_all_kinds_give_the_same_examples(root, name):
  source = open_source(name.format(root))
  assert type(source) is NAMED[name]
  assert packed.contents(source) == packed.expected(FILES)


@pytest.mark.parametrize('name', NAMED)
def test_slices_hold_out_a_part_of_each_class(root, name):
  parts = [
    open_source(name.format(root), split=split, stratified=True, channels=1)
    for split in ('[:75%]', '[75%:]')
  ]
  for part, count in zip(parts, (3, 1)):
    assert np.bincount(part.labels()).tolist() == [count] * 3
    assert (part.channels, part.num_classes) == (1, 3)
    assert part.class_names == [*packed.NAMES]
    labels = [x['label'] for x in packed.all_of(part)]
    assert labels == part.labels().tolist() == pipeline.labels(part).tolist()
  images = [x['image'] for part in parts for x in packed.all_of(part)]
  assert sorted(images) == sorted(FILES.values())


@pytest.mark.slow
@pytest.mark.parametrize('name', ['{}/x.tar', '{}/wds', '{}/pq'])
def test_worker_processes_read_the_same(root, name):
  """Batches are those of a folder, on two hosts and with two processes."""
  folder, source = open_source(root / 'folder'), open_source(name.format(root))
  for host in range(2):
    one, two = (
      pipeline.Data(each, 4, [FlipLR()], num_workers=workers).train_batches(
        seed=3, process_index=host, process_count=2
      )
      for each, workers in ((folder, 0), (source, 2))
    )
    for _ in range(5):
      x, y = next(one), next(two)
      np.testing.assert_array_equal(x['image'], y['image'])
      np.testing.assert_array_equal(x['label'], y['label'])
    one.close(), two.close()


def test_hugging_face_by_name(root, tmp_path):
  datasets = pytest.importorskip('datasets')
  packed.write_folder(tmp_path / 'images' / 'train', FILES)
  source = open_source(f'hf:{tmp_path}/images:train')
  assert packed.contents(source) == packed.expected(FILES)
  datasets.load_dataset(f'{tmp_path}/images').save_to_disk(tmp_path / 'saved')
  for name, split in (('saved', 'train'), ('saved:train', None)):
    found = open_source(f'hf:{tmp_path}/{name}', split=split)
    assert packed.all_of(found) == packed.all_of(source)
  assert type(open_source(tmp_path / 'saved', split='train')) is type(source)
  with pytest.raises(ValueError, match='save_to_disk, so it takes no config'):
    open_source(f'hf:{tmp_path}/saved:config', split='train')


@pytest.fixture(scope='module')
def tfds(tmp_path_factory):
  path = tmp_path_factory.mktemp('tfds')
  made_up.prepare(path, 'cifar10:3.0.2', {'train': 40, 'test': 20})
  return path / 'cifar10' / '3.0.2'


def test_tfds_by_name_and_folder(tfds):
  source = open_source(f'tfds:{tfds}:train')
  assert (type(source), len(source)) == (Tfds, 40)
  assert len(open_source(f'tfds:{tfds}:train[:10]')) == 10
  assert len(open_source(f'tfds:{tfds}:train+test')) == 60
  assert len(open_source(tfds, split='test')) == 20
  part = open_source(f'tfds:{tfds}', split='train[:25%]')
  assert (type(part), len(part)) == (splits.Slice, 10)
  same = open_source(f'tfds:{tfds}:train', split='[:25%]')
  assert same.labels().tolist() == part.labels().tolist()
  assert part.describe(0).startswith('cifar10:3.0.2 train[')
  with pytest.raises(ValueError, match='names no split'):
    open_source(f'tfds:{tfds}')
  with pytest.raises(ValueError, match="the split 'train', but split='test'"):
    open_source(f'tfds:{tfds}:train', split='test[:5]')


def test_arguments_reach_the_source(root, tmp_path):
  (tmp_path / 'names.txt').write_text('a\nb\nc')
  source = open_source(
    root / 'wds', label_key='json:label', class_names=tmp_path / 'names.txt'
  )
  assert source.class_names == ['a', 'b', 'c']
  (root / 'folder' / 'table.csv').write_text('ant/000.png,0\n')
  assert len(open_source(root / 'folder', csv='table.csv')) == 1
  with pytest.raises(ValueError, match="of the kind 'wds' takes no csv"):
    open_source(root / 'wds', csv='table.csv')
  with pytest.raises(
    ValueError, match=r"no file of .* is of the split 'train'"
  ):
    open_source(root / 'wds', split='train')


def test_folders_of_several_kinds(root, tmp_path):
  """Tar files next to class folders do not change what a folder is."""
  packed.write_folder(tmp_path / 'a', FILES)
  packed.write_tar(tmp_path / 'a' / 'a.tar', FILES)
  assert type(open_source(tmp_path / 'a')) is Folder
  packed.write_tar(tmp_path / 'b' / 'a.tar', FILES)
  (tmp_path / 'b' / 'a.parquet').write_bytes(b'')
  with pytest.raises(ValueError, match='has files of several kinds'):
    open_source(tmp_path / 'b')
  packed.write_tar(
    tmp_path / 'c' / 'ILSVRC2012_img_train.tar',
    {'n01440764.tar': packed.tar_bytes({'x.JPEG': b'x'})},
  )
  found = open_source(tmp_path / 'c', split='train')
  assert (len(found), found.num_classes) == (1, 1000)


def test_a_config_reads_all_kinds(root):
  """The held-out tenth is the same in a tar file as in a folder."""
  found = {}
  for name in ('folder', 'x.tar'):
    config = load_config('train_folder', 'held_out=25')
    config.data.source.path = str(root / name)
    for data in (config.data, config.evals.test.data):
      found.setdefault(name, []).append(configs.resolve(data.source))
  for one, two in zip(*found.values()):
    assert packed.all_of(one) == packed.all_of(two)
  assert [len(x) for x in found['x.tar']] == [9, 3]


def test_imagenet_presets_read_its_own_tar_files(tmp_path):
  wnids = {'n01440764': 2, 'n01443537': 3}
  members = {
    f'{wnid}.tar': packed.tar_bytes(
      {f'{wnid}_{i}.JPEG': b'%d' % i for i in range(count)}
    )
    for wnid, count in wnids.items()
  }
  packed.write_tar(tmp_path / 'ILSVRC2012_img_train.tar', members)
  config = load_config('pretrain_imagenet', 'folder')
  config.data.source.path = f'imagenet:{tmp_path}'
  config.data.source.split = 'train[:80%]'
  source = configs.resolve(config.data.source)
  assert (len(source), source.num_classes, source.exif) == (4, 1000, False)
  assert source.class_names[1] == 'n01443537'
  assert config.evals.val.data.source.path == config.data.source.path
  assert config.evals.val.data.source.split == 'val'


def test_exif_is_that_of_the_kind_unless_it_is_set(root, tfds):
  for name, default in ((root / 'x.tar', True), (f'tfds:{tfds}:train', False)):
    assert open_source(name).exif is default
    part = open_source(name, split='[:50%]', stratified=True, exif=not default)
    assert part.exif is not default


def test_remote_names_are_guessed_too():
  memory = fsspec.filesystem('memory')
  try:
    for name, data in FILES.items():
      memory.pipe(f'/here/{name}', data)
    memory.pipe('/there/x.tar', packed.tar_bytes(packed.samples(FILES)))
    source = open_source('memory://here')
    assert packed.contents(source) == packed.expected(FILES)
    assert type(open_source('memory://there')) is WebDataset
  finally:
    memory.rm('/here', recursive=True)
    memory.rm('/there', recursive=True)


@pytest.mark.parametrize(
  ('name', 'message'),
  [
    (None, 'path=None. Set it to a folder of images or another source'),
    ('webdataset:/data/x.tar', "unknown kind 'webdataset'. The kinds of"),
    ('tar:', "'tar:' has no name, as in 'tar:/data/flowers.tar'"),
    ('/no/such', "'/no/such' is neither a folder .*No such .* The kinds of"),
    ('imagenet:/no/such', 'names no split. Add it, as in .*:train'),
    ('imagenet:/no/such:train', 'img_train.tar .No such file'),
    ('imagenet:train', 'manual/ILSVRC2012_img_train.tar .No such file'),
  ],
)
def test_names_that_nothing_can_be_opened_from(name, message):
  with pytest.raises(ValueError, match=message):
    open_source(name)

"""Folder: layouts, names, tables, remote file systems, errors."""

import fsspec
import numpy as np
import pytest
from PIL import Image

from vit_jax.data import images, pipeline
from vit_jax.data.folder import Folder
from vit_jax.data.sources import open_source


def _write(path, value=0, kind=None):
  path.parent.mkdir(parents=True, exist_ok=True)
  image = Image.fromarray(np.full((2, 3, 3), value, np.uint8))
  image.save(path, kind)


@pytest.fixture
def root(tmp_path):
  for split, count in (('train', 3), ('val', 1)):
    for label, name in enumerate(('10', '2', 'kätzchen')):
      for i in range(count):
        ending = ('png', 'BMP', 'PnG')[i]
        path = tmp_path / split / name / 'deep' / f'bild ü{i}.{ending}'
        _write(path, 10 * label + i, kind=ending.lower())
  (tmp_path / 'train' / 'dog').mkdir()
  _write(tmp_path / 'val' / 'dog' / '0.png', 30)
  (tmp_path / 'train' / '2' / 'Thumbs.db').write_bytes(b'x')
  (tmp_path / 'train' / '2' / '.hidden.png').write_bytes(b'x')
  (tmp_path / 'train' / '.cache').mkdir()
  (tmp_path / 'train' / '.cache' / 'x.png').write_bytes(b'x')
  (tmp_path / 'train' / 'readme.txt').write_bytes(b'x')
  return tmp_path


def _content(source):
  values = [int(images.decode(x['image'])[0, 0, 0]) for x in _all(source)]
  return list(zip(values, [x['label'] for x in _all(source)]))


def _all(source):
  return [source[i] for i in range(len(source))]


def test_split_and_class_folders(root, capsys):
  train = Folder(root, split='train')
  assert train.class_names == ['10', '2', 'dog', 'kätzchen']
  assert train.num_classes == 4
  assert (train.channels, train.exif) == (3, True)
  expected = [(0, 0), (1, 0), (2, 0), (10, 1), (11, 1), (12, 1)]
  assert _content(train) == [*expected, (20, 3), (21, 3), (22, 3)]
  Folder(root, split='train')  # as an evaluator does
  said = f'{root}/train: ignored files that are not images in class sub-folders'
  assert capsys.readouterr().out == f'{said} (2): 2/Thumbs.db, readme.txt\n'
  assert train.describe(7).endswith('train/kätzchen/deep/bild ü1.BMP')


def test_splits_agree_on_the_classes(root):
  val = Folder(root, split='val')
  assert val.class_names == ['10', '2', 'dog', 'kätzchen']
  assert _content(val) == [(0, 0), (10, 1), (30, 2), (20, 3)]
  assert len(Folder(root / 'train')) == 9  # class folders without splits
  assert Folder(root / 'val').class_names == val.class_names


def test_folders_need_not_be_classes(root):
  source = Folder(root, classes=False)
  assert len(source) == 13 and source.num_classes is None
  assert source.class_names is None and not source.labels().any()
  with pytest.raises(ValueError, match=r'has no images, and 0 other files'):
    Folder(root / 'nothing', classes=False)


def test_class_names_fix_the_order(root):
  names = ['kätzchen', 'dog', '2', '10', 'unseen']
  val = Folder(root, split='val', class_names=names)
  assert val.num_classes == 5
  assert _content(val) == [(0, 3), (10, 2), (30, 1), (20, 0)]


def test_all_endings(tmp_path):
  for ending in ('jpg', 'JPG', 'jpeg', 'JPEG', 'png', 'webp', 'WebP', 'bmp'):
    kind = {'jpg': 'jpeg'}.get(ending.lower(), ending.lower())
    _write(tmp_path / 'a' / f'{ending}_.{ending}', 7, kind=kind)
  source = Folder(tmp_path)
  assert len(source) == 8
  assert {value for value, _ in _content(source)} == {7}


class Bucket(fsspec.get_filesystem_class('memory')):
  """A file system that stands for gs://."""

  protocol = 'gs'

  @classmethod
  def _strip_protocol(cls, path):
    return super()._strip_protocol(path.replace('gs://', 'memory://'))


def test_remote_files_equal_local_ones(root, monkeypatch):
  bucket = Bucket()
  for path in root.rglob('*'):
    if path.is_file():
      bucket.pipe(f'/pets/{path.relative_to(root)}', path.read_bytes())
  backend = 'etils.epath.backend._FileSystemSpecBackend._get_filesystem'
  monkeypatch.setattr(backend, lambda self, name: bucket)

  def find(url):
    return (bucket, bucket._strip_protocol(url))

  monkeypatch.setattr(fsspec.core, 'url_to_fs', find)
  try:
    for split in ('train', 'val'):
      local = Folder(root, split=split)
      remote = Folder('gs://pets', split=split)
      assert _all(remote) == _all(local)
    assert remote.describe(0) == 'gs://pets/val/10/deep/bild ü0.png'
    bucket.pipe('/pets/t.csv', b'val/10/deep/bild \xc3\xbc0.png,3\n')
    assert Folder('gs://pets', csv='t.csv')[0]['label'] == 3
    assert open_source('gs://pets', split='val').class_names[0] == '10'
  finally:
    bucket.rm('/pets', recursive=True)


def test_links_are_followed_and_each_folder_is_visited_once(root):
  """Links to the folder itself, to those above it and to others in it."""
  (root / 'linked').mkdir()
  (root / 'linked' / '10').symlink_to(root / 'train' / '10')
  assert _content(Folder(root / 'linked')) == [(0, 0), (1, 0), (2, 0)]
  links = {'val/l': '.', 'val/m': '..', 'val/2/n': '../..', 'val/10/o': '../2'}
  before = Folder(root, split='val')
  for link, target in links.items():
    (root / link).symlink_to(target, target_is_directory=True)
  after = Folder(root, split='val')
  assert _content(after) == _content(before)
  assert after.class_names == before.class_names


def test_csv_with_names_and_splits(root):
  lines = ['label,path,split', 'cat,val/2/deep/bild ü0.png,val']
  lines += ['ant,train/10/deep/bild ü1.BMP,train']
  (root / 'all.csv').write_text('\n'.join(lines), encoding='utf-8')
  val = Folder(root, csv='all.csv', split='val')
  assert val.class_names == ['ant', 'cat']
  assert _content(val) == [(10, 1)]
  assert _content(Folder(root, csv='all.csv', split='train')) == [(1, 0)]


@pytest.mark.parametrize('header', ['', 'path,label\n', '\ufeffpath,label\n'])
def test_csv_with_ints(root, header):
  table = root / 'val' / 't.csv'
  table.write_text(header + '2/deep/bild ü0.png, 5\ndog/0.png,0\n')
  source = Folder(root / 'val', csv='t.csv')
  assert _content(source) == [(10, 5), (30, 0)]  # the table's order
  assert source.num_classes is None and source.class_names is None
  names = list('abcdef')
  assert Folder(root, csv='val/t.csv', class_names=names).num_classes == 6


@pytest.mark.parametrize(
  ('options', 'table', 'words'),
  [
    ({'csv': 't.csv'}, 'a.png\n', ["['a.png']", "'label'"]),
    ({'csv': 't.csv'}, '', ['t.csv', 'no rows']),
    ({'csv': 't.csv', 'split': 'train'}, 'a.png,cat\n', ["'train'"]),
    ({'csv': 't.csv', 'class_names': ['dog']}, 'a.png,cat\n', ["'cat'"]),
    ({'split': 'test'}, '', ['test has no images']),
    ({}, '', ["split='train'"]),
    ({'split': 'val', 'class_names': ['2']}, '', ['class_names', "'10'"]),
    ({'path': 'empty'}, '', ['no images', '1 other', '.jpg']),
  ],
)
def test_errors(root, options, table, words):
  (root / 't.csv').write_text(table)
  path = root / options.pop('path', '')
  if path.name == 'empty':
    (path / 'a').mkdir(parents=True)
    (path / 'a' / 'x.txt').write_bytes(b'')
  with pytest.raises(ValueError) as error:
    Folder(path, **options)
  assert all(word in str(error.value) for word in words)


def test_a_file_that_does_not_end_is_named(root):
  (root / 'val' / '2' / 'z.jpg').symlink_to('/dev/zero')
  data = pipeline.Data(Folder(root / 'val'), 5)
  with pytest.raises(ValueError, match=r'2/z\.jpg: The file has more than'):
    list(data.eval_batches())


def test_missing_file_names_itself(root):
  (root / 't.csv').write_text('gone.png,0\n')
  with pytest.raises(OSError, match=r'gone\.png'):
    Folder(root, csv='t.csv')[0]

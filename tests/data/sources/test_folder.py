"""Folder: layouts, names, tables, remote file systems, errors."""

import os
import pathlib
import tarfile
import tempfile

import fsspec
import numpy as np
import packed
import pytest
import tiny
from PIL import Image

from vit_jax.data import images, pipeline
from vit_jax.data.images import Colours
from vit_jax.data.sources import image_files, tars
from vit_jax.data.sources.folder import Folder
from vit_jax.data.sources.named import open_source
from vit_jax.io.files import write_csv


def picture(value, kind='PNG'):
  return tiny.encode(np.full((2, 3, 3), value, np.uint8), kind)


@pytest.fixture
def root(tmp_path):
  others = '2/Thumbs.db', '2/.hidden.png', '.cache/x.png', 'readme.txt'
  files = {f'train/{name}': b'x' for name in others}
  files['val/dog/0.png'] = picture(30)
  for split, endings in (('train', ('png', 'BMP', 'PnG')), ('val', ('png',))):
    for label, name in enumerate(('10', '2', 'kätzchen')):
      for i, ending in enumerate(endings):
        path = f'{split}/{name}/deep/bild ü{i}.{ending}'
        files[path] = picture(10 * label + i, ending.upper())
  packed.write_folder(tmp_path, files)
  (tmp_path / 'train' / 'dog').mkdir()
  return tmp_path


def _content(source):
  return [
    (int(images.decode(x['image'])[0, 0, 0]), x['label'])
    for x in packed.all_of(source)
  ]


def test_split_and_class_folders(root, capsys):
  train = Folder(root, split='train')
  assert train.class_names == ['10', '2', 'dog', 'kätzchen']
  assert train.num_classes == 4
  assert train.decode == Colours(3, exif=True)
  expected = [(0, 0), (1, 0), (2, 0), (10, 1), (11, 1), (12, 1)]
  assert _content(train) == [*expected, (20, 3), (21, 3), (22, 3)]
  Folder(root, split='train')  # as an evaluator does
  said, deep = capsys.readouterr().out.splitlines()
  assert said.endswith('class sub-folders (2): 2/Thumbs.db, readme.txt')
  assert deep.endswith(': 10, 2, kätzchen; not their sub-folders (1): deep')
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
  kinds = Image.registered_extensions()
  kinds = {x: kind for x, kind in kinds.items() if kind in images.FORMATS}
  assert kinds.keys() == {*image_files.ENDINGS}
  for ending, kind in {**kinds, '.JPG': 'JPEG', '.WebP': 'WEBP'}.items():
    name = f'a/{ending[1:]}_{ending}'
    packed.write_folder(tmp_path, {name: picture(7, kind)})
  source = Folder(tmp_path)
  assert len(source) == len(kinds) + 2
  assert {value for value, _ in _content(source)} == {7}


def tree(path, *files):
  return packed.write_folder(path, dict.fromkeys(files, b''))


CATS = 'cat/1.jpg', 'dog/1.jpg'
OTHERS = 'bird/a.txt', 'lost+found/x/1.jpg', '__MACOSX/cat/1.jpg'
HIDDEN = 'cat/@eaDir/1.jpg/S.jpg', 'cat/._1.jpg', '.ipynb_checkpoints/1.jpg'


@pytest.mark.parametrize(
  'train, test',
  [
    *(('train', 'val'), ('TRAIN', 'TEST_SIMPLE'), ('training_set', 'test_set')),
    *(('seg_train', 'seg_pred'), ('train_images', 'x'), ('train2017', 'val')),
    *(('asl alphabet train', 'x'), ('Trainset', 'x'), ('train', 'images')),
  ],
)
def test_splits_are_not_classes(train, test, tmp_path):
  files = [f'{x}/{y}' for x in (train, test) for y in CATS]
  tree(tmp_path, *files, '__MACOSX/train/cat/._1.jpg', 'notes/a.txt')
  message = f'look like splits.*split={train!r} .*data.source.split='
  with pytest.raises(ValueError, match=message):
    Folder(tmp_path)
  with pytest.raises(ValueError, match=f"split='{tmp_path.name}/{train}' "):
    Folder(tmp_path.parent, split=tmp_path.name)
  assert Folder(tmp_path, split=train).class_names == ['cat', 'dog']
  assert len(Folder(tmp_path, class_names=[train, test])) == 4


@pytest.mark.parametrize(
  'files, classes, said',
  [
    (['bus/1.jpg', 'train/1.jpg'], ['bus', 'train'], ''),
    (['cat/19/1.jpg', 'dog/19/1.jpg'], ['cat', 'dog'], 'sub-folders (1): 19'),
    ([*CATS, *OTHERS], ['cat', 'dog'], '(3): __MACOSX, bird, lost+found'),
    ([*CATS, *HIDDEN], ['cat', 'dog'], ''),
    ([*CATS, 'Cat/1.jpg'], ['Cat', 'cat', 'dog'], "['Cat', 'cat']"),
    (['e\u0302/1.jpg', '\xea/2.jpg', *CATS], ['cat', 'dog', '\xea'], ''),
    ([*CATS, 'M\udcff\n/1.jpg'], [r'M\udcff\n', 'cat', 'dog'], ''),
  ],
)
def test_folders_that_are_classes(files, classes, said, tmp_path, capsys):
  root = tree(tmp_path / 'data', *files)
  source = Folder(root)
  assert source.class_names == classes
  assert {*source.labels().tolist()} == {*range(len(classes))}
  out = capsys.readouterr().out
  assert out.endswith(f'{said}\n') if said else not out
  found = {os.fspath(root / source.file_name(i)) for i in range(len(source))}
  assert {*image_files.find([f'{root}'])} == found
  assert {*image_files.find([f'{root}/**/*.jpg'])} == found
  assert len(Folder(root, classes=False)) == len(found)
  with tarfile.open(tmp_path / 'x.tar', 'w') as tar:
    tar.add(root, 'any/folder')
  tar = tars.Tar(tmp_path / 'x.tar')
  assert tar.class_names == classes and len([*tar]) == len(found)


def test_other_folders_next_to_splits(tmp_path, capsys):
  files = [f'{x}/{y}' for x in ('train', 'val') for y in CATS]
  files += ['val/bee/1.jpg', 'test/new/1.jpg', 'notes/xmls/a', 'run/1/a.png']
  (tree(tmp_path / 'x', *files) / 'train' / 'empty').mkdir()
  for path, split in (('x', 'train'), ('x', 'val'), ('', 'x/train')):
    source = Folder(tmp_path / path, split=split)
    assert source.class_names == ['bee', 'cat', 'dog']
  said = 'these classes (4): 1, empty, new, xmls'
  assert capsys.readouterr().out.count(said) == 2  # once for a folder


def test_an_earlier_run_among_the_images(tmp_path):
  tree(tmp_path, *CATS, 'run/resume.json', 'run/confusion.png')
  with pytest.raises(ValueError, match='the workdir of a run, run'):
    Folder(tmp_path)


def test_the_only_folder_that_contains_the_classes(tmp_path):
  tree(tmp_path / 'a' / 'b', *CATS)
  with pytest.raises(ValueError, match=rf'cat, dog\. Use {tmp_path}/a/b'):
    Folder(tmp_path)
  assert Folder(tmp_path, class_names=['a']).num_classes == 1


def test_a_folder_that_cannot_be_listed_is_named():
  with tempfile.TemporaryDirectory() as root:
    os.chmod(tree(pathlib.Path(root), *CATS), 0o755)
    os.chmod(f'{root}/dog', 0)
    user = os.geteuid()
    os.seteuid(user or 65534)  # root can list any folder
    try:
      with pytest.raises(PermissionError, match='/dog'):
        Folder(root)
    finally:
      os.seteuid(user)


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
      assert packed.all_of(remote) == packed.all_of(local)
    assert remote.describe(0) == 'gs://pets/val/10/deep/bild ü0.png'
    bucket.pipe('/pets/t.csv', b'val/10/deep/bild \xc3\xbc0.png,3\n')
    assert Folder('gs://pets', csv='t.csv').class_names == ['3']
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


def test_csv_that_this_package_writes(tmp_path):
  names = ['a,b.jpg', 'two\nlines.jpg', 'c\rr.jpg', 'l\u2028s', 'x\x0cy']
  tree(tmp_path, *names, 'latin\udcff.jpg')
  rows = [['path', 'label'], *([name, 'x'] for name in names)]
  rows.append(['latin\udcff.jpg', '²'])
  write_csv(tmp_path / 't.csv', rows, odd='surrogateescape')
  source = Folder(tmp_path, csv='t.csv')
  found = [source.file_name(i) for i in range(len(source))]
  assert found == [*names, 'latin\udcff.jpg']
  assert source.class_names == ['x', '²']  # a digit, but not a decimal one
  write_csv(tmp_path / 't.csv', rows[-1:])
  assert (tmp_path / 't.csv').read_text() == 'latin\\udcff.jpg,²\n'


@pytest.mark.parametrize('header', ['', 'path,label\n', '\ufeffpath,label\n'])
def test_csv_with_ints(root, header):
  table = root / 'val' / 't.csv'
  table.write_text(header + '2/deep/bild ü0.png, 5\ndog/0.png,0\n')
  source = Folder(root / 'val', csv='t.csv')
  assert _content(source) == [(10, 1), (30, 0)]  # the table's order
  assert source.class_names == ['0', '5']  # no class that nothing has
  names = list('abcdef')
  assert Folder(root, csv='val/t.csv', class_names=names).num_classes == 6


@pytest.mark.parametrize(
  ('options', 'table', 'words'),
  [
    ({'csv': 't.csv', 'class_names': ['dog']}, 'dog/0.png,cat\n', ["'cat'"]),
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


def test_a_file_that_does_not_end_is_named(root, monkeypatch):
  monkeypatch.setattr(image_files, 'MAX_FILE_BYTES', 2**21)
  (root / 'val' / '2' / 'z.jpg').symlink_to('/dev/zero')
  data = pipeline.Data(Folder(root / 'val'), 5)
  with pytest.raises(ValueError, match=r'2/z\.jpg: More than'):
    list(data.eval_batches())

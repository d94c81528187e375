"""Folder: layouts, names, tables, remote file systems, errors."""

import io
import itertools
import os
import pickle

import fsspec
import numpy as np
import pytest
from PIL import Image

from vit_jax.data import images
from vit_jax.data.folder import Folder


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


def test_split_and_class_folders(root):
  train = Folder(root, split='train')
  assert train.class_names == ['10', '2', 'dog', 'kätzchen']
  assert train.num_classes == 4
  expected = [(0, 0), (1, 0), (2, 0), (10, 1), (11, 1), (12, 1)]
  assert _content(train) == [*expected, (20, 3), (21, 3), (22, 3)]
  assert train.ignored == 2  # Thumbs.db, readme.txt
  assert train.describe(7).endswith('train/kätzchen/deep/bild ü1.BMP')


def test_splits_agree_on_the_classes(root):
  val = Folder(root, split='val')
  assert val.class_names == Folder(root, split='train').class_names
  assert _content(val) == [(0, 0), (10, 1), (30, 2), (20, 3)]


def test_class_folders_without_splits(root):
  assert len(Folder(root / 'train')) == 9
  assert Folder(root / 'val').class_names == ['10', '2', 'dog', 'kätzchen']


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


def test_pickle_and_repeat(root):
  source = Folder(root, split='train')
  copy = pickle.loads(pickle.dumps(source))
  assert _all(copy) == _all(source) == _all(Folder(root, split='train'))
  assert copy.describe(3) == source.describe(3)


def test_memory_file_system_equals_local(root):
  memory = fsspec.filesystem('memory')
  for folder, _, files in os.walk(root):
    for file in files:
      path = os.path.join(folder, file)
      with open(path, 'rb') as opened:
        memory.pipe(f'/pets/{os.path.relpath(path, root)}', opened.read())
  try:
    for split in ('train', 'val'):
      local = Folder(root, split=split)
      remote = Folder('memory://pets', split=split)
      assert _all(remote) == _all(local)
      assert remote.ignored == local.ignored
    assert remote.describe(0) == 'memory:///pets/val/10/deep/bild ü0.png'
    memory.pipe('/pets/t.csv', b'val/10/deep/bild \xc3\xbc0.png,3\n')
    assert Folder('memory://pets', csv='t.csv')[0]['label'] == 3
  finally:
    memory.rm('/pets', recursive=True)


def test_csv_with_names_and_splits(root):
  lines = ['label,path,split', 'cat,val/2/deep/bild ü0.png,val']
  lines += ['ant,train/10/deep/bild ü1.BMP,train']
  (root / 'all.csv').write_text('\n'.join(lines), encoding='utf-8')
  val = Folder(root, csv='all.csv', split='val')
  assert val.class_names == ['ant', 'cat']
  assert _content(val) == [(10, 1)]
  assert _content(Folder(root, csv='all.csv', split='train')) == [(1, 0)]


@pytest.mark.parametrize('header', ['', 'path,label\n', 'Filename,label\n'])
def test_csv_with_ints(root, header):
  table = root / 'val' / 't.csv'
  table.write_text(header + '2/deep/bild ü0.png, 5\ndog/0.png,0\n')
  source = Folder(root / 'val', csv='t.csv')
  assert _content(source) == [(10, 5), (30, 0)]  # the table's order
  assert source.num_classes is None and source.class_names is None
  names = list('abcdef')
  assert Folder(root, csv='val/t.csv', class_names=names).num_classes == 6
  with pytest.raises(ValueError, match=r'label 5\. Labels must lie in'):
    Folder(root, csv='val/t.csv', class_names=list('abc'))


def test_csv_errors(root):
  with pytest.raises(ValueError, match=r'cannot read the table .*no\.csv'):
    Folder(root, csv='no.csv')
  (root / 't.csv').write_text('a.png\n')
  with pytest.raises(ValueError, match=r"row 0 is \['a.png'\]. Expected"):
    Folder(root, csv='t.csv')
  (root / 't.csv').write_text('a.png,cat\n')
  with pytest.raises(ValueError, match='no column "split"'):
    Folder(root, csv='t.csv', split='train')
  with pytest.raises(
    ValueError, match=r'labels that class_names does not.*cat'
  ):
    Folder(root, csv='t.csv', class_names=['dog'])
  (root / 't.csv').write_text('')
  with pytest.raises(ValueError, match='is empty'):
    Folder(root, csv='t.csv')


def test_errors(root, tmp_path):
  with pytest.raises(ValueError, match=r"no folder for the split 'test'\. Its"):
    Folder(root, split='test')
  with pytest.raises(ValueError, match=r'look like splits. Choose one'):
    Folder(root)
  with pytest.raises(ValueError, match=r'cannot list the folder .*nowhere'):
    Folder(tmp_path / 'nowhere')
  with pytest.raises(ValueError, match=r'folders that class_names does not'):
    Folder(root, split='val', class_names=['2'])
  (tmp_path / 'empty' / 'a').mkdir(parents=True)
  (tmp_path / 'empty' / 'a' / 'x.txt').write_bytes(b'')
  with pytest.raises(
    ValueError, match='no images in class sub-folders, but 1 oth'
  ):
    Folder(tmp_path / 'empty')
  with pytest.raises(ValueError, match='cannot be listed over http'):
    Folder('https://example.com/pets')
  with pytest.raises(ValueError, match='cannot open nosuch://'):
    Folder('nosuch://x')


@pytest.mark.parametrize('base', ['train', ''])
def test_slices_part_the_files(root, base):
  path = root if base else root / 'train'
  everything = _content(Folder(path, split=base or None))
  parts = [
    _content(Folder(path, split=f'{base}[{x}]'))
    for x in (':30%', '30%:-2', '-2:')
  ]
  assert [len(part) for part in parts] == [3, 4, 2]
  assert sorted(itertools.chain(*parts)) == sorted(everything)
  assert parts[0] != everything[:3]  # not the first class only
  names = Folder(path, split=f'{base}[:1]').class_names
  assert names == ['10', '2', 'dog', 'kätzchen']
  with pytest.raises(ValueError, match='contains no images'):
    Folder(path, split=f'{base}[:0]')


def test_slices_of_a_table(root):
  table = root / 'train' / 't.csv'
  table.write_text(''.join(f'{i}.png,{i}\n' for i in range(50)))
  labels = [
    {x for x in Folder(root / 'train', csv='t.csv', split=s)._labels}
    for s in ('[:80%]', '[80%:]')
  ]
  assert list(map(len, labels)) == [40, 10]
  assert labels[0] | labels[1] == set(range(50))


def test_index_out_of_range(root):
  source = Folder(root, split='val')
  with pytest.raises(IndexError):
    source[4]


def test_missing_file_names_itself(root):
  (root / 't.csv').write_text('gone.png,0\n')
  with pytest.raises(OSError, match=r'gone\.png'):
    Folder(root, csv='t.csv')[0]


def test_encoded_bytes_are_the_files(root):
  source = Folder(root, split='val')
  with open(source.describe(2), 'rb') as file:
    assert source[2]['image'] == file.read()
  assert io.BytesIO(source[2]['image']).read(4) == b'\x89PNG'

"""Prepared data sets: what is written, from which sources, without copies."""

import csv
import io
from unittest import mock

import cv2
import numpy as np
import packed
import pytest
import tensorflow_datasets as tfds
from listed import Listed
from packed import NAMES, tar_bytes, write_folder
from PIL import Image
from tiny import encode

from vit_jax.data import imagenet, images
from vit_jax.data.rasters import Raster
from vit_jax.data.sources import tars
from vit_jax.data.sources.digits import Digits
from vit_jax.data.sources.named import open_source, split_and_name
from vit_jax.data.sources.tfds import Tfds
from vit_jax.data.targets import Classes, Labels, Numbers
from vit_jax.tools import prepare

FILES = packed.images()


def photo(seed, height=40, width=56):
  """A smooth image with detail, as photographs have; no two are alike."""
  rng = np.random.default_rng(seed)
  image = np.zeros((height, width, 3))
  for side in (4, 8, 16):
    coarse = rng.uniform(0, 70, (side, side, 1)) + rng.uniform(0, 10, (1, 1, 3))
    image += cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
  return np.clip(image, 0, 255).astype(np.uint8)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return write_folder(tmp_path_factory.mktemp('folder'), FILES)


def prepared(*argv):
  """Run the command in this process."""
  prepare.main([str(x) for x in argv])


def contents(source):
  names = source.class_names
  return {
    source.file_name(i): (x['image'], names[x['label']] if names else x)
    for i, x in enumerate(map(source.__getitem__, range(len(source))))
  }


def left_out(dest):
  return list(csv.DictReader((dest / 'left_out.csv').read_text().splitlines()))


def made(dest, source, **options):
  """Write a source as the split 'train', and return what is read of it."""
  prepare.write(dest, {'train': source}, **options)
  return open_source(f'tfds:{dest}:train')


def test_a_folder_is_copied_and_read_by_name(folder, tmp_path, capsys):
  dest = tmp_path / 'my-set'
  prepared(folder, f'held=folder:{folder}', dest)
  out = capsys.readouterr().out
  assert '12 examples of train.' in out and '12 examples of held.' in out
  assert f'--config.data.source.path=tfds:{dest}:train' in out
  read = open_source(f'tfds:{dest}:held')
  assert contents(read) == contents(open_source(folder))
  assert [read.file_name(i) for i in range(12)] == list(FILES)  # the order
  assert not dest.with_name('my-set.part').exists()
  named = Tfds('my-set', split='train', data_dir=tmp_path)
  assert contents(named) == contents(read)
  with pytest.raises(SystemExit):  # the data set exists now
    prepared(folder, dest)


def test_all_options_of_the_command_arrive(monkeypatch):
  opened, written = mock.Mock(), mock.Mock()
  monkeypatch.setattr(prepare, 'open_source', opened)
  monkeypatch.setattr(prepare, 'write', written)
  options = {'csv': 'a', 'image_key': 'b', 'label_key': 'c', 'class_names': 'd'}
  flags = [f'--{name}={value}' for name, value in options.items()]
  flags += ['--short_side=9', '--shuffle', '--leave_out=x:y:test']
  flags += ['--max_image_bytes=7']
  prepared('/a', 'val=hf:b:train', 'dest', *flags)
  options['decode'] = None
  sources = [mock.call(x, **options) for x in ('/a', 'hf:b:train')]
  assert opened.mock_calls == [*sources, mock.call('x:y:test', decode=None)]
  source = opened.return_value
  written.assert_called_once_with(
    *('dest', {'train': source, 'val': source}),
    **{'short_side': 9, 'shuffle': True, 'leave_out': {'x:y:test': source}},
    max_image_bytes=7,
  )


def test_shuffled(folder, tmp_path):
  prepared(folder, tmp_path / 'set', '--shuffle')
  read = open_source(f'tfds:{tmp_path}/set:train')
  order = [read.file_name(i) for i in range(12)]
  assert sorted(order) == sorted(FILES) and order != list(FILES)
  assert contents(read) == contents(open_source(folder))


def test_labels_of_other_kinds(tmp_path):
  arrays = [photo(i) for i in range(3)]
  read = made(tmp_path / 'b', Listed(arrays, [3, 1000, 7]))
  assert read.num_classes is None
  assert [read[i]['label'] for i in range(3)] == [3, 1000, 7]
  np.testing.assert_array_equal(images.decode(read[1]['image']), arrays[1])
  digits = Digits(split='test', examples_per_class=1)
  read = made(tmp_path / 'c', digits)
  assert [read[i]['label'] for i in range(10)] == [
    digits[i]['label'] for i in range(10)
  ]
  np.testing.assert_array_equal(
    images.decode(read[4]['image'], 1), digits[4]['image']
  )
  assert 'scan' in read.file_name(0)


def test_rasters_keep_their_bits(tmp_path):
  file, array = io.BytesIO(), np.full((2, 4, 5), 65535, np.uint16)
  np.save(file, array)
  data = file.getvalue()
  tar = tar_bytes({'ant/1.npy': data, 'bee/2.npy': data})
  (tmp_path / 'a.tar').write_bytes(tar)
  prepared(f'tar:{tmp_path}/a.tar', tmp_path / 'a', '--channels=5')
  source = Listed([array])
  source.decode = Raster(5)
  made(tmp_path / 'b', source)
  read = [open_source(f'tfds:{tmp_path}/{x}:train') for x in 'ab']
  assert [len(x) for x in read] == [2, 1]
  assert {x[0]['image'] for x in read} == {data}
  with pytest.raises(ValueError, match='short_side is for images of 8 bits'):
    made(tmp_path / 'c', source, short_side=2)


def test_short_side(tmp_path):
  exif = Image.Exif()
  exif[0x0112] = 6
  smooth = cv2.resize(photo(0, 20, 30), (300, 200))
  found = [
    encode(smooth),
    encode(photo(1, 20, 24), 'JPEG'),
    encode(smooth, 'JPEG', exif=exif, quality=95),
    encode(photo(1, 20, 24), 'JPEG', exif=exif),
  ]
  read = made(tmp_path / 'set', Listed(found), short_side=50)
  out = [images.decode(read[i]['image'], exif=False) for i in range(4)]
  assert [x.shape[:2] for x in out] == [(50, 75), (20, 24), (75, 50), (24, 20)]
  assert read[1]['image'] == found[1]  # its bytes
  mean = smooth.reshape(50, 4, 75, 4, 3).mean((1, 3))
  assert np.abs(out[0] - mean).mean() < 3
  turned = np.rot90(mean, -1)
  assert np.abs(out[2] - turned).mean() < 4
  source = Listed(found[2:3])
  source.decode = images.Colours(exif=False)
  raw = made(tmp_path / 'raw', source, short_side=50)[0]
  assert images.decode(raw['image']).shape[:2] == (50, 75)
  sampling = Image.open(io.BytesIO(read[0]['image']))
  assert sampling.layer[0][1:3] == (2, 2)  # 4:2:0


def test_unreadable_images(tmp_path):
  class Interrupted(Listed):
    def __getitem__(self, index):
      raise RuntimeError('interrupted')

  with pytest.raises(RuntimeError, match='interrupted'):
    made(tmp_path / 'set', Interrupted([b'']))
  assert not (tmp_path / 'set').exists()
  source = Listed([encode(photo(0)), b'junk', encode(photo(1))], [0, 1, 2])
  source.file_name = ('a\udcff.png', 'b\udcff,.png', 'c.png').__getitem__
  read = made(tmp_path / 'set', source)
  assert [read[i]['label'] for i in range(2)] == [0, 2]
  assert [read.file_name(i) for i in range(2)] == ['a\\udcff.png', 'c.png']
  (row,) = left_out(tmp_path / 'set')
  assert (row['split'], row['file_name']) == ('train', r'b\udcff,.png')
  assert 'unreadable' in row['reason'] and 'junk' in row['reason']
  large = photo(2)
  source = Listed([encode(large), encode(large[1:])])
  assert len(made(tmp_path / 'b', source, max_image_bytes=large.size - 1)) == 1
  (row,) = left_out(tmp_path / 'b')
  assert f'Set max_image_bytes={large.size} to' in row['reason']


def test_columns_and_vectors_are_kept(tmp_path):
  write_folder(tmp_path, {f'{i}.png': encode(photo(i)) for i in (0, 1)})
  rows = 'image,cat,dog,age (m),code\n0.png,1,,1.5,01\n1.png,0,1,,2\n'
  (tmp_path / 't.csv').write_text(rows)
  prepared(tmp_path, tmp_path / 'set', '--csv=t.csv', '--label_key=code')

  def labels(name, targets):
    source = open_source(f'tfds:{tmp_path}/{name}:train', targets=targets)
    return source.class_names, source.labels()

  both = np.float32([[1, np.nan], [0, 1]])
  assert labels('set', Classes())[0] == ['01', '2']
  np.testing.assert_equal(labels('set', Numbers(('age (m)',)))[1], [[1.5]])
  np.testing.assert_equal(labels('set', Labels(('cat', 'dog')))[1], both)
  source = Listed([photo(0), photo(1)], [*both], ['x', 'y'])
  np.testing.assert_equal(made(tmp_path / 'other', source).labels(), both)
  np.testing.assert_equal(labels('other', Labels(('x', 'y')))[1], both)


def test_splits_with_other_classes(tmp_path):
  sources = [Listed([photo(0)], class_names=names) for names in ('ab', 'ac')]
  with pytest.raises(ValueError, match='Add --class_names=FILE'):
    prepare.write(tmp_path / 'set', dict(zip('xy', sources)))


@pytest.mark.parametrize(
  'text, split',
  [
    *(('/data/flowers', 'train'), ('val=/data/flowers', 'val')),
    *(('tfds:cifar10:test', 'test'), ('tfds:cifar10:test[:9]', 'test')),
    *(('tar:/data/a.tar', 'train'), ('x=imagenet:/data:train', 'x')),
  ],
)
def test_name_of_the_split(text, split):
  assert split_and_name(text)[0] == split


# Tar files.


@pytest.mark.parametrize('kind', ['folders', 'compressed', 'inner'])
def test_tar_files_are_read_as_folders(folder, tmp_path, kind):
  content = FILES | {'ant/._000.png': b'', 'ant/notes.txt': b''}
  if kind == 'inner':
    inner = {
      f'{name}.tar': tar_bytes(
        {k.split('/')[1]: v for k, v in content.items() if k.startswith(name)}
      )
      for name in NAMES
    }
    data = tar_bytes(inner)
  else:
    content = {f'data/all/{k}': v for k, v in content.items()}
    data = tar_bytes(content, 'w:gz' if kind == 'compressed' else 'w')
  (tmp_path / 'a.tar').write_bytes(data)
  prepared(f'tar:{tmp_path}/a.tar', tmp_path / 'set')
  found = contents(open_source(f'tfds:{tmp_path}/set:train'))
  found = {k.removeprefix('data/all/'): v for k, v in found.items()}
  assert found == contents(open_source(folder))


def test_a_tar_file_without_classes(tmp_path):
  (tmp_path / 'a.tar').write_bytes(tar_bytes({'x/1.png': b'', 'x/2.png': b''}))
  with pytest.raises(ValueError, match=r'a\.tar has no images in class'):
    tars.Tar(tmp_path / 'a.tar')


def test_imagenet(tmp_path):
  names = imagenet.wnids()
  inner = {
    f'{name}.tar': tar_bytes({f'{name}_1.JPEG': encode(photo(i))})
    for i, name in enumerate(names[:2])
  }
  (tmp_path / 'ILSVRC2012_img_train.tar').write_bytes(tar_bytes(inner))
  train = prepare._open(f'imagenet:{tmp_path}:train')
  assert not train.decode.exif and train.class_names == list(names[:2])
  found = [(name, x['label']) for name, x in train]
  assert found == [(f'{x}/{x}_1.JPEG', i) for i, x in enumerate(names[:2])]
  labels = tfds.core.tfds_path('datasets/imagenet2012/validation_labels.txt')
  labels = labels.read_text().split()
  flat = {f'ILSVRC2012_val_{i:08d}.JPEG': b'' for i in (1, 50_000)}
  (tmp_path / 'ILSVRC2012_img_val.tar').write_bytes(tar_bytes(flat))
  validation = prepare._open(f'imagenet:{tmp_path}:validation')
  assert validation.class_names == list(names) == sorted(names)
  found = [names[x['label']] for _, x in validation]
  assert found == [labels[0], labels[-1]]


# Copies of evaluation images.


def test_copies_are_left_out(tmp_path):
  shrunk = cv2.resize(photo(3), (28, 20), interpolation=cv2.INTER_AREA)
  train = [photo(0), shrunk, encode(photo(4), 'JPEG', quality=60), photo(5)]
  for i, image in enumerate(train):
    data = image if isinstance(image, bytes) else encode(image)
    write_folder(tmp_path / 'a', {f'x/{i}.png': data})
  test = {f'y/{i}.png': encode(photo(i)) for i in (3, 4, 8)}
  write_folder(tmp_path / 'b', test)
  prepared(tmp_path / 'a', tmp_path / 'set', f'--leave_out={tmp_path}/b')
  rows = left_out(tmp_path / 'set')
  assert [row['file_name'] for row in rows] == ['x/1.png', 'x/2.png']
  for row, number in zip(rows, (3, 4)):
    assert f'copy of {tmp_path}/b: y/{number}.png' in row['reason']
  assert len(open_source(f'tfds:{tmp_path}/set:train')) == 2


def test_the_nearest_hash_within_the_distance_counts(monkeypatch):
  value = prepare.perceptual_hash(photo(1)[..., :1])
  assert value.dtype == np.uint64
  monkeypatch.setattr(prepare, 'perceptual_hash', lambda image: image)
  source = [{'image': value ^ np.uint64(x)} for x in (0b1111111, 0b11)]
  copies = prepare.Copies({'a': source}, 9)
  assert copies.find(value) == 'a: index 1 (distance 2)'
  assert copies.find(value ^ np.uint64(0xFF00)) is None

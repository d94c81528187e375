"""VTAB-1k's tasks: splits, labels and transforms."""

import numpy as np
import pytest
import tensorflow_datasets as tfds

from vit_jax import config as config_lib
from vit_jax.data import vtab

TASKS = list(vtab.TASKS)

# VTAB's slices depend on these sizes of train, validation and test, which
# tensorflow_datasets does not state. Then the first example of val200 and of
# test: its index and the number of its split.
TABLE = """
  caltech101           3059      -  6084    2754:0      0:1
  cifar100            50000      - 10000   45000:0      0:1
  dtd                  1880   1880  1880       0:1      0:2
  oxford_flowers102    1020   1020  6149       0:1      0:2
  oxford_iiit_pet      3680      -  3669    2944:0      0:1
  sun397/tfds         76128  10875 21750       0:1      0:2
  svhn_cropped        73257      - 26032   65931:0      0:1
  patch_camelyon     262144  32768 32768       0:1      0:2
  eurosat/rgb         27000      -     -   16200:0  21600:0
  resisc45            31500      -     -   18900:0  25200:0
  clevr               70000  15000 15000   63000:0      0:1
  dmlab               65550  22628 22735       0:1      0:2
  kitti                6347    423   711       0:1      0:2
  dsprites           737280      -     -  589824:0 663552:0
  smallnorb           24300      - 24300       0:1  12150:1
  diabetic_retinopathy_detection/btgraham-300 35126 10906 42670 0:1 0:2
"""
SPLITS = 'train', 'validation', 'test'
ROWS = {row.split()[0]: row.split()[1:] for row in TABLE.strip().splitlines()}
SIZES = {
  name: {k: int(n) for k, n in zip(SPLITS, row) if n != '-'}
  for name, row in ROWS.items()
}


def size_of_test(task):
  first, split = map(int, ROWS[task.tfds][4].split(':'))
  return [*SIZES[task.tfds].values()][split] - first


@pytest.mark.parametrize('key', TASKS)
def test_splits(key):
  task = vtab.TASKS[key]
  sizes = SIZES[task.tfds]
  places = ROWS[task.tfds][3:]
  val, test = (tuple(map(int, place.split(':'))) for place in places)
  parts = {
    'train800': [(0, 0, 800)],
    'val200': [(*val, 200)],
    'train800val200': [(0, 0, 800), (*val, 200)],
    'test': [(*test, size_of_test(task))],
  }
  infos = {
    name: tfds.core.SplitInfo(name=name, shard_lengths=[size], num_bytes=0)
    for name, size in sizes.items()
  }
  for split, expected in parts.items():
    spec = vtab.settings(key, split)['split']
    found = []
    for piece in tfds.core.ReadInstruction.from_spec(spec).to_absolute(infos):
      first, name = piece.from_ or 0, piece.splitname
      end = sizes[name] if piece.to is None else piece.to
      found.append((first, [*sizes].index(name), end - first))
    assert found == expected, split


@pytest.mark.parametrize('key', TASKS)
def test_labels(key, tmp_path):
  task = vtab.TASKS[key]
  features = tfds.builder(task.tfds, data_dir=tmp_path).info.features
  assert isinstance(features['image'], tfds.features.Image)
  feature = features[task.label_key]
  settings = vtab.settings(key, 'test', data_dir=str(tmp_path))
  assert settings['data_dir'] == str(tmp_path)
  assert settings['label_key'] == task.label_key
  if task.label_fn is None:
    assert isinstance(feature, tfds.features.ClassLabel)
    assert 'label_fn' not in settings
    return
  label_fn = config_lib.resolve(settings['label_fn'])
  if isinstance(label_fn, vtab.Merged):
    assert label_fn.values == feature.num_classes
  else:
    used = {'clevr': 'size pixel_coords', 'kitti': 'type location'}[task.tfds]
    assert set(used.split()) <= set(feature.feature)


def test_the_table():
  groups = [task.group for task in vtab.TASKS.values()]
  assert [groups.count(group) for group in vtab.GROUPS] == [7, 4, 8]
  assert groups == sorted(groups)  # natural, specialized, structured
  sizes = dict.fromkeys(vtab.GROUPS, 0)
  for task in vtab.TASKS.values():
    sizes[task.group] += size_of_test(task)
  assert list(sizes.values()) == [75_564, 87_138, 225_202]
  assert {t.tfds for t in vtab.TASKS.values()} == set(SIZES)


@pytest.mark.parametrize('count, label', [(3, 0), (4, 1), (9, 6), (10, 7)])
def test_clevr_count(count, label):
  assert vtab.ClevrCount()({'size': np.zeros(count, np.int64)}) == label


def test_clevr_distance():
  """Equal to a threshold is not above it; the nearest counts, and only z."""
  thresholds = np.float32([8, 8.5, 9, 9.5, 10])
  above = np.nextafter(thresholds, np.float32(11))
  each = [*zip(thresholds, range(5)), *zip(above, range(1, 6))]
  coords = np.full((3, 3), -5, np.float32)
  for nearest, label in [(0.1, 0), *each, (100, 5)]:
    coords[:, 2] = 100, nearest, 100
    assert vtab.ClevrDistance()({'pixel_coords': coords}) == label


@pytest.mark.parametrize(
  'types, depths, label',
  [
    ([], [], 3),
    ([3, 4, 5, 6, 7], [1, 1, 1, 1, 1], 3),  # nothing that drives on roads
    ([0], [8.0], 0),
    ([1], [8.1], 1),
    ([2], [20.0], 1),
    ([2], [20.1], 2),
    ([0], [900.0], 2),
    ([0], [-1.0], 0),  # beside the camera
    ([3, 0, 1], [2, 30, 15], 1),
  ],
)
def test_kitti_distance(types, depths, label):
  locations = np.zeros((len(types), 3), np.float32)
  locations[:, 2] = depths
  objects = {'type': np.array(types, np.int64), 'location': locations}
  assert vtab.KittiDistance()(objects) == label


def test_merged_labels():
  location, orientation = vtab.Merged(values=32), vtab.Merged(values=40)
  assert [location(i) for i in range(32)] == [i // 2 for i in range(32)]
  expected = [int(np.floor(i / 2.5)) for i in range(40)]
  assert [orientation(np.int64(i)) for i in range(40)] == expected
  assert expected[:6] == [0, 0, 0, 1, 1, 2]
  assert location.num_classes == orientation.num_classes == 16


def _kinds(key, **options):
  """What the transforms of a task are, as (class, size or probability)."""
  configs = vtab.transforms(key, **options)
  made = [config_lib.resolve(config) for config in configs]
  return [(type(t).__name__, getattr(t, 'size', (None,))[0]) for t in made]


def test_transforms():
  crop = [('Resize', 448), ('RandomCrop', 384)]
  plain, flip, scale = ('Resize', 384), ('FlipLR', None), ('Scale', None)
  expected = {key: [*crop, flip] for key in TASKS}
  expected['dsprites_orientation'] = [scale, *crop]
  expected['snorb_azimuth'] = crop
  for key in ('clevr_count', 'clevr_distance', 'dmlab', 'kitti'):
    expected[key] = [plain, flip]
  expected['dsprites_location'] = [scale, plain]
  assert {key: _kinds(key, train=True) for key in TASKS} == expected
  for key in TASKS:
    first = [scale] if key.startswith('dsprites') else []
    assert _kinds(key, train=False) == [*first, plain]
  assert _kinds('pets', size=224, train=True)[:2] == [
    ('Resize', 256),  # of scenic; 7/6 is 261
    ('RandomCrop', 224),
  ]
  assert _kinds('pets', size=378, train=True)[0] == ('Resize', 441)
  assert _kinds('kitti', size=224, train=True)[0] == ('Resize', 224)
  assert _kinds('kitti', size=32, train=True)[0] == ('Resize', 32)


def test_dsprites_images_are_black_and_white():
  image = np.zeros((64, 64, 3), np.uint8)
  image[:5, :7] = 1
  for config in vtab.transforms('dsprites_location', size=64, train=True):
    image = config_lib.resolve(config)(image, np.random.default_rng(0))
  assert image.dtype == np.uint8 and image.shape == (64, 64, 3)
  assert set(np.unique(image)) == {0, 255}
  assert np.sum(image == 255) == 5 * 7 * 3

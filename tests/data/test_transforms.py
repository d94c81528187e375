"""Transforms against numpy, Pillow and the formulas they implement."""

import json
import pickle

import numpy as np
import pytest
from options import all_set
from PIL import Image
from record_feature_distillation import resized
from tiny import golden, noise

from vit_jax import config as config_lib
from vit_jax.data import transforms as T
from vit_jax.data.vtab import Scale


def _rng(seed=0):
  return np.random.default_rng(seed)


def _build(name, **fields):
  return config_lib.build({'target': f'{T.__name__}.{name}', **fields})


@pytest.mark.parametrize('size', [(15, 20), (17, 53), (64, 64)])
def test_resize_is_bilinear_without_antialiasing(size):
  out = T.Resize(size)(noise(), _rng())
  assert out.dtype == np.uint8
  (expected,) = resized(noise()[None].astype(np.float64), size)
  assert np.abs(out - expected).max() <= 1


@pytest.mark.parametrize('case', range(12))
def test_area_is_tensorflows(case):
  recorded = golden('tf_area')
  image, theirs = recorded[f'image_{case}'], recorded[f'area_{case}']
  out = T.Resize(theirs.shape[:2], 'area')(image, _rng())
  assert out.dtype == np.uint8 and out.shape == theirs.shape
  assert np.abs(out - theirs).max() <= 0.52


@pytest.mark.parametrize('name', ['bilinear', 'bicubic', 'lanczos'])
@pytest.mark.parametrize('channels', [1, 3])
def test_antialiased_is_pillows(name, channels):
  image = noise(channels=channels)
  out = T.Resize((11, 13), name, antialias=True)(image, _rng())
  kind = Image.Resampling[name.upper()]
  for c in range(channels):
    plane = Image.fromarray(image[..., c]).resize((13, 11), kind)
    np.testing.assert_array_equal(out[..., c], np.asarray(plane))


def test_nearest_takes_pixel_centres():
  out = T.Resize((10, 8), 'nearest')(noise(), _rng())
  np.testing.assert_array_equal(out, noise()[1::3, 2::5])


@pytest.mark.parametrize(
  'shape, expected', [((30, 40), (15, 20)), ((50, 20), (38, 15))]
)
def test_resize_small(shape, expected):
  assert T.ResizeSmall(15)(noise(*shape), _rng()).shape == (*expected, 3)


def test_central_crop():
  out = T.CentralCrop((9, 20))(noise(), _rng())
  np.testing.assert_array_equal(out, noise()[10:19, 10:30])


def test_random_crop_reaches_every_place_equally():
  image = np.arange(12, dtype=np.uint8).reshape(3, 4, 1)
  rng = _rng()
  found = [int(T.RandomCrop((2, 2))(image, rng)[0, 0, 0]) for _ in range(6000)]
  counts = np.bincount(found, minlength=12)
  assert set(np.flatnonzero(counts)) == {0, 1, 2, 4, 5, 6}
  assert np.abs(counts[counts > 0] - 1000).max() < 150  # 5 sigma


def test_flip():
  image = noise()[3:20, 5:19]  # not contiguous
  np.testing.assert_array_equal(T.FlipLR(1.0)(image, _rng()), image[:, ::-1])
  np.testing.assert_array_equal(T.FlipLR(0.0)(image, _rng()), image)
  rng = _rng()
  flips = [(T.FlipLR()(noise(), rng) != noise()).any() for _ in range(400)]
  assert 150 < sum(flips) < 250


@pytest.mark.parametrize('method, last', [('tf', 9), ('torch', 10)])
def test_inception_crop_offsets(method, last):
  """TensorFlow's Uniform(H - h) excludes H - h, torchvision's randint not."""
  crop = T.InceptionCrop(8, (0.25, 0.25), (1.0, 1.0), method=method)
  rng = _rng()
  boxes = np.array([crop.box((20, 20), rng) for _ in range(500)])
  assert {*boxes[:, 2]} == {*boxes[:, 3]} == {10}
  assert {*boxes[:, 0]} == {*boxes[:, 1]} == {*range(last + 1)}
  crop = T.InceptionCrop(8, (1.0, 1.0), (1.0, 1.0), method=method)
  assert crop.box((20, 20), rng) == (0, 0, 20, 20)


@pytest.mark.parametrize(
  'method, wide, narrow',
  [
    (
      'tf',
      [(37, 72, 236, 265), (64, 6, 307, 322), (72, 158, 131, 118)],
      [(0, 0, 110, 100), (0, 0, 119, 99), (2, 0, 110, 99)],
    ),
    (
      'torch',
      [(0, 7, 374, 328), (3, 20, 279, 361), (51, 226, 251, 223)],
      [(0, 1, 120, 91), (0, 2, 113, 98), (3, 1, 112, 99)],
    ),
  ],
)
def test_recorded_boxes(method, wide, narrow):
  crop = T.InceptionCrop(8, method=method)
  assert [crop.box((375, 500), _rng(seed)) for seed in range(3)] == wide
  crop = T.InceptionCrop(8, area=(0.9, 1), method=method)
  assert [crop.box((120, 100), _rng(seed)) for seed in range(3)] == narrow


def test_scaled_to_another_image_size():
  before = (T.ResizeSmall(256), T.CentralCrop(224), T.FlipLR())
  after = (T.ResizeSmall(439), T.CentralCrop(384), T.FlipLR())
  assert T.scale(before, 384, old=(224, 224)) == after
  assert T.scale(before, 224, old=(224, 224)) == before
  # The smaller side grows with the larger side of the image.
  wide = (T.ResizeSmall(439), T.CentralCrop((192, 384)), T.FlipLR())
  assert T.scale(before, (192, 384), old=(224, 224, 3)) == wide
  small = (T.ResizeSmall(13), T.CentralCrop((8, 12)))
  large = (T.ResizeSmall(26), T.CentralCrop((24, 12)))
  assert T.scale(small, (24, 12), old=(8, 12)) == large


def uniform(found):
  """Whether numbers are uniform in [0, 1]: Kolmogorov-Smirnov, p < 1e-3."""
  return np.abs(np.sort(found) - np.linspace(0, 1, len(found))).max() < 0.03


def test_distributions_of_inception_crops():
  # At a fixed ratio of 1 on a square: heights uniform in [sqrt(.04), 1] * 200.
  crop, rng = T.InceptionCrop(8, (0.04, 1.0), (1.0, 1.0)), _rng()
  heights = np.array([crop.box((200, 200), rng)[2] for _ in range(4000)])
  assert heights.min() == 40 and heights.max() == 200
  assert uniform((heights - 40) / 160)
  least, most = 0.04, 0.24  # at a ratio of 4 it still fits
  crop = T.InceptionCrop(8, (least, most), (1 / 4, 4), method='torch')
  boxes = np.array([crop.box((400, 400), rng) for _ in range(4000)])
  h, w = boxes[:, 2:].T
  assert uniform((h * w / 400**2 - least) / (most - least))
  assert uniform((np.log(w / h) / np.log(4) + 1) / 2)


def test_inception_crop_falls_back():
  # An image too thin for any ratio in bounds at this area.
  crop = T.InceptionCrop(8, area=(0.9, 1.0))
  assert crop.box((10, 100), _rng()) == (0, 0, 10, 100)
  crop = T.InceptionCrop(8, area=(0.9, 1.0), method='torch')
  assert crop.box((9, 100), _rng()) == (0, 44, 9, 12)
  assert crop.box((100, 10), _rng()) == (43, 0, 13, 10)


@pytest.mark.parametrize('kind', [T.InceptionCrop, T.Resize, T.ResizeSmall])
def test_all_fields_of_a_crop_act(kind):
  options = {'size': (12, 10), 'interpolation': 'bicubic', 'antialias': True}
  if kind is T.InceptionCrop:
    options |= {'area': (0.3, 0.4), 'ratio': (2, 2.1), 'method': 'torch'}
  elif kind is T.ResizeSmall:
    options |= {'size': 11, 'rounding': 'down'}
  crop = all_set(kind, **options)
  y, x, h, w = crop.box((30, 40), _rng(1))
  if kind is T.InceptionCrop:
    assert 0.28 < h * w / 1200 < 0.42 and 1.9 < w / h < 2.2
    assert (y, x, h, w) == T._box_torch(30, 40, (0.3, 0.4), (2, 2.1), _rng(1))
  size = (14, 11) if kind is T.ResizeSmall else (10, 12)  # 14.67
  part = Image.fromarray(noise()[y : y + h, x : x + w])
  expected = np.asarray(part.resize(size, Image.Resampling.BICUBIC))
  np.testing.assert_array_equal(crop(noise(), _rng(1)), expected)


def test_several_crops_of_an_image():
  """Each is an InceptionCrop; all draw from one stream."""
  how = {'interpolation': 'lanczos', 'antialias': False}
  options = {'size': (8, 6), 'count': 3, 'area': (0.5, 0.9), **how}
  options |= {'local_size': 4, 'local_count': 5, 'local_area': (0.1, 0.2)}
  views = all_set(T.MultiCrop, **options)(noise(), _rng(2))
  rng = _rng(2)
  crop = T.InceptionCrop((8, 6), (0.5, 0.9), method='torch', **how)
  expected = [crop(noise(), rng) for _ in range(3)]
  np.testing.assert_array_equal(views['image'], expected)
  crop = T.InceptionCrop(4, (0.1, 0.2), method='torch', **how)
  expected = [crop(noise(), rng) for _ in range(5)]
  np.testing.assert_array_equal(views['local'], expected)
  views = T.MultiCrop(8, local_count=0)(noise(channels=1), _rng())
  assert [(k, x.shape) for k, x in views.items()] == [('image', (2, 8, 8, 1))]
  assert T.sized([T.ResizeSmall(1.5)], (32, 20)) == (T.ResizeSmall(48),)
  relative = T.MultiCrop(1.0, local_size=0.5)
  (found,) = T.sized([relative], (32, 20), 'bilinear')
  assert found == T.MultiCrop(
    (32, 20), local_size=(16, 10), interpolation='bilinear'
  )


# Conventions of evaluation.


def test_the_transforms_of_the_original_code_resize_to_a_square():
  assert T.evaluation('original', 384) == (T.Resize(384),)
  with pytest.raises(ValueError, match=r"'original' has no crop=0\.9"):
    T.evaluation('original', 384, crop=0.9)


@pytest.mark.parametrize(('size', 'small'), [(224, 256), (384, 448), (28, 32)])
def test_the_transforms_of_big_vision(size, small):
  found = T.evaluation('big_vision', size)
  assert found == (T.ResizeSmall(small, 'area'), T.CentralCrop(size))


@pytest.mark.parametrize(
  ('size', 'crop', 'small'),
  [(224, None, 248), (384, None, 384), (224, 0.875, 256), (288, 0.95, 303)],
)
def test_the_transforms_of_timm(size, crop, small):
  resize, central = T.evaluation('timm', size, crop=crop)
  assert (resize.size, resize.interpolation) == (small, 'bicubic')
  assert resize.antialias and central.size == (size, size)
  # 1 pixel less in the larger side, and the crop starts at an even pixel.
  rng = _rng()
  image = np.arange(5 * 8 * 3, dtype=np.uint8).reshape(5, 8, 3)
  small = T.ResizeSmall(4, 'bicubic', antialias=True, rounding='down')
  assert small(image, rng).shape == (4, 6, 3)  # 6.4
  assert small(image[:, :7], rng).shape == (4, 5, 3)  # 5.6
  assert T.ResizeSmall(4)(image[:, :7], rng).shape == (4, 6, 3)
  for room, even, down in ((1, 0, 0), (3, 2, 1), (2, 1, 1), (5, 2, 2)):
    row = image[:2, : 2 + room]
    for rounding, start in (('even', even), ('down', down)):
      np.testing.assert_array_equal(
        T.CentralCrop(2, rounding=rounding)(row, rng), row[:, start : start + 2]
      )


# All of them.

_ALL = [
  T.InceptionCrop((8, 6), area=(0.2, 0.9), method='torch'),
  T.Resize(8),
  T.Resize(8, 'bicubic', antialias=True),
  T.ResizeSmall(8),
  T.RandomCrop(8),
  T.CentralCrop(8),
  T.FlipLR(1.0),
  Scale(1),
]


@pytest.mark.parametrize('transform', _ALL)
def test_one_channel_stays(transform):
  out = transform(noise(channels=1), _rng())
  assert out.ndim == 3 and out.shape[-1] == 1


@pytest.mark.parametrize('transform', [*_ALL, T.MultiCrop(8, area=(0.2, 0.9))])
def test_transforms_can_be_written_to_files(transform):
  assert pickle.loads(pickle.dumps(transform)) == transform
  settings = json.loads(json.dumps(config_lib.describe(transform)))
  assert config_lib.build(settings) == transform


def test_tiny_images():
  for seed in range(50):
    assert T.InceptionCrop(4)(noise(1, 1), _rng(seed)).shape == (4, 4, 3)
    assert T.InceptionCrop(4)(noise(2, 3), _rng(seed)).shape == (4, 4, 3)


@pytest.mark.parametrize(
  'make, message',
  [
    (lambda: T.ResizeSmall(8, antialias=True)(noise(), _rng()), "'area'"),
    (lambda: T.resize(noise(), 8, 'nearest', antialias=True), "'nearest'"),
    (lambda: _build('InceptionCrop', size=8, area=(0.9, 0.5)), 'area'),
    (lambda: _build('InceptionCrop', size=8, ratio=(2, 1)), 'ratio'),
    (lambda: T.sized([T.Resize(1.5)], None), 'needs image_size'),
  ],
)
def test_errors(make, message):
  with pytest.raises(ValueError, match=message):
    make()


@pytest.mark.parametrize('kind', [T.RandomCrop, T.CentralCrop])
def test_crop_larger_than_the_image(kind):
  with pytest.raises(ValueError, match=r'\(31, 10\) is larger than the image'):
    kind((31, 10))(noise(), _rng())

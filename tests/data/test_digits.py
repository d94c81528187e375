"""Digits and Synthetic: which images, in which order, with which labels."""

import hashlib
import pickle

import numpy as np
import pytest
from sklearn import datasets

from vit_jax.data.embedded import digits


def _images(source):
  return np.stack([source[i]['image'] for i in range(len(source))])


def _labels(source):
  return np.array([source[i]['label'] for i in range(len(source))])


def test_golden_pixels():
  """The images are the same in every process and on every machine."""
  s = digits.Synthetic(image_size=9, num_classes=3, num_examples=9, seed=4)
  d = digits.Digits(split='train', examples_per_class=2, seed=4)
  data = b''.join(x[i]['image'].tobytes() for x in (s, d) for i in range(9))
  digest = hashlib.sha256(data).hexdigest()
  assert (
    digest == '4bb1ca1c12ed5e404b2f79119211b655d8984473ed58eb9f4574035c72603b8e'
  )


def test_digits_are_the_scans():
  data = datasets.load_digits()
  train, test = digits.Digits(split='train'), digits.Digits(split='test')
  assert (len(train), len(test)) == (1029, 768)
  images = np.concatenate([_images(train), _images(test)])
  assert images.shape == (1797, 8, 8, 1) and images.dtype == np.uint8
  np.testing.assert_allclose(
    images[..., 0] * (16 / 255), data.images, atol=0.04
  )
  assert images.max() == 255 and images.min() == 0
  labels = np.concatenate([_labels(train), _labels(test)])
  np.testing.assert_array_equal(labels, data.target)
  for source in (train, test):
    counts = np.bincount(_labels(source), minlength=10)
    assert counts.max() < 1.15 * counts.min()


def test_splits_share_no_writer():
  # Each writer copied the same list of digits: it starts where one begins.
  labels = ''.join(map(str, datasets.load_digits().target))
  start = labels[:36]
  train = len(digits.Digits(split='train'))
  assert labels[train : train + 36] == start


def test_digits_subsets():
  full = digits.Digits(split='train')
  five = digits.Digits(split='train', examples_per_class=5, seed=1)
  np.testing.assert_array_equal(np.bincount(_labels(five)), 5)
  again = digits.Digits(split='train', examples_per_class=5, seed=1)
  np.testing.assert_array_equal(_images(five), _images(again))
  other = digits.Digits(split='train', examples_per_class=5, seed=2)
  assert (_images(five) != _images(other)).any()
  rows = {(i.tobytes(), l) for i, l in zip(_images(full), _labels(full))}
  ten = digits.Digits(split='train', examples_per_class=10, seed=1)
  tens = {i.tobytes() for i in _images(ten)}
  for image, label in zip(_images(five), _labels(five)):
    assert (image.tobytes(), label) in rows
    assert image.tobytes() in tens


def test_digits_can_be_written_into():
  source = digits.Digits(split='train')
  before = source[0]['image'].copy()
  source[0]['image'][:] = 7
  np.testing.assert_array_equal(source[0]['image'], before)
  np.testing.assert_array_equal(
    digits.Digits(split='train')[0]['image'], before
  )


def test_digits_errors():
  with pytest.raises(ValueError, match='examples_per_class=200, but'):
    digits.Digits(split='train', examples_per_class=200)
  with pytest.raises(IndexError):
    digits.Digits(split='test')[768]


def test_digits_describe_the_row_of_the_set():
  source = digits.Digits(split='test')
  assert 'scan 1031' in source.describe(2)
  assert source.class_names[source[2]['label']] in '0123456789'


def test_synthetic():
  source = digits.Synthetic(
    image_size=(6, 10), num_classes=4, num_examples=50, channels=2
  )
  images, labels = _images(source), _labels(source)
  assert images.shape == (50, 6, 10, 2) and images.dtype == np.uint8
  np.testing.assert_array_equal(labels, np.arange(50) % 4)
  assert len({i.tobytes() for i in images}) == 50
  np.testing.assert_array_equal(images, _images(source))
  assert abs(images.mean() - 127.5) < 5
  other = digits.Synthetic(
    image_size=(6, 10), num_classes=4, num_examples=50, channels=2, seed=1
  )
  assert (images != _images(other)).any()


@pytest.mark.parametrize('learnable', [False, True])
def test_synthetic_is_learnable_if_asked(learnable):
  train, test = (
    digits.Synthetic(
      image_size=12,
      num_classes=5,
      num_examples=100,
      seed=seed,
      learnable=learnable,
    )
    for seed in (0, 1)
  )
  images, labels = _images(train).astype(float), _labels(train)
  means = np.stack([images[labels == k].mean(0) for k in range(5)])
  distance = ((_images(test)[:, None] - means[None]) ** 2).sum((2, 3, 4))
  accuracy = (distance.argmin(1) == _labels(test)).mean()
  assert accuracy == 1 if learnable else accuracy < 0.5


def test_pickles():
  for source in (
    digits.Digits(split='train', examples_per_class=3),
    digits.Synthetic(image_size=4, num_classes=2, num_examples=3),
  ):
    copy = pickle.loads(pickle.dumps(source))
    np.testing.assert_array_equal(_images(copy), _images(source))

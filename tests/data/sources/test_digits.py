"""Digits: which images, in which order, with which labels."""

import pickle

import numpy as np
import packed
import pytest
from sklearn import datasets

from vit_jax.data.sources.digits import Digits


def _labels(source):
  return np.array([source[i]['label'] for i in range(len(source))])


def test_digits_are_the_scans():
  data = datasets.load_digits()
  train, test = Digits(split='train'), Digits(split='test')
  assert (len(train), len(test)) == (1029, 768)
  assert 'scan 1031' in test.describe(2)
  assert test.class_names == list('0123456789')
  images = np.concatenate([packed.stack(train), packed.stack(test)])
  assert images.shape == (1797, 8, 8, 1) and images.dtype == np.uint8
  np.testing.assert_allclose(images[..., 0] * (16 / 255), data.images, 0, 0.04)
  assert images.max() == 255 and images.min() == 0
  labels = np.concatenate([_labels(train), _labels(test)])
  np.testing.assert_array_equal(labels, data.target)
  # Each writer copied the same list of digits: 'test' starts where one begins.
  np.testing.assert_array_equal(data.target[1029:][:36], data.target[:36])


def test_digits_subsets():
  full = Digits(split='train')
  five = Digits(split='train', examples_per_class=5, seed=1)
  scans = [int(five.describe(i).split()[3]) for i in range(5)]
  assert scans == [4, 13, 38, 49, 72]
  np.testing.assert_array_equal(np.bincount(_labels(five)), 5)
  other = Digits(split='train', examples_per_class=5, seed=2)
  assert (packed.stack(five) != packed.stack(other)).any()
  rows = {(i.tobytes(), l) for i, l in zip(packed.stack(full), _labels(full))}
  ten = Digits(split='train', examples_per_class=10, seed=1)
  tens = {i.tobytes() for i in packed.stack(ten)}
  for image, label in zip(packed.stack(five), _labels(five)):
    assert (image.tobytes(), label) in rows
    assert image.tobytes() in tens
  copy = pickle.loads(pickle.dumps(five))
  np.testing.assert_array_equal(packed.stack(copy), packed.stack(five))


def test_digits_can_be_written_into():
  source = Digits(split='train')
  before = source[0]['image'].copy()
  source[0]['image'][:] = 7
  np.testing.assert_array_equal(source[0]['image'], before)
  np.testing.assert_array_equal(Digits(split='train')[0]['image'], before)


def test_digits_that_are_not_there():
  assert len(Digits(split='train', examples_per_class=200)) == 1029
  with pytest.raises(IndexError):
    Digits(split='test')[768]

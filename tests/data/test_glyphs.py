"""Glyphs: which characters, how they are drawn, what the arguments do."""

import concurrent.futures
import hashlib
import pickle
import unicodedata

import numpy as np
import pytest

from vit_jax.data.embedded import glyphs
from vit_jax.data.embedded.glyphs import CHARACTERS


def test_depends_on_seed_and_index_not_on_order_or_threads():
  source = glyphs.Glyphs(seed=0)
  forward = [source[i]['image'] for i in range(200)]
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    backward = list(pool.map(lambda i: source[i]['image'], range(199, -1, -1)))
  np.testing.assert_array_equal(forward, backward[::-1])
  assert len({image.tobytes() for image in forward}) == 200
  other = glyphs.Glyphs(seed=1)
  assert (other[0]['image'] != forward[0]).any()


@pytest.mark.parametrize(
  'options, means',
  [
    ({}, [135.3, 42.4, 51.7, 146.2, 60.0, 92.8, 45.5, 84.5]),
    (
      dict(image_size=16, low_resolution=0.0, deformation=2.0, noise=2.0),
      [102.4, 40.2, 34.2, 109.4, 49.5, 71.3, 35.2, 66.0],
    ),
  ],
)
def test_recorded_images(options, means):
  source = glyphs.Glyphs(seed=3, **options)
  examples = [source[i] for i in range(8)]
  assert [x['label'] for x in examples[:4]] == [75, 266, 180, 211]
  # Other versions of FreeType and OpenCV round differently.
  np.testing.assert_allclose(
    [x['image'].mean() for x in examples], means, atol=0.3
  )


def test_copies_by_pickle_are_the_same_and_small():
  source = glyphs.Glyphs(image_size=16, seed=2, channels=3)
  data = pickle.dumps(source)
  assert len(data) < 10_000  # no distance fields
  copy = pickle.loads(data)
  np.testing.assert_array_equal(copy[5]['image'], source[5]['image'])


@pytest.mark.parametrize('image_size', [8, 24, 97])
@pytest.mark.parametrize('channels', [1, 3])
def test_shape_and_type(image_size, channels):
  source = glyphs.Glyphs(image_size=image_size, channels=channels)
  example = source[0]
  assert example['image'].shape == (image_size, image_size, channels)
  assert example['image'].dtype == np.uint8
  assert (example['image'] == example['image'][..., :1]).all()
  assert type(example['label']) is int


def test_labels_are_balanced_and_names_fit():
  source = glyphs.Glyphs(num_examples=2 * len(CHARACTERS), image_size=8)
  labels = [source[i]['label'] for i in range(len(source))]
  counts = np.bincount(labels, minlength=source.num_classes)
  np.testing.assert_array_equal(counts, 2)
  first = labels[: source.num_classes]
  assert sorted(first) == list(range(source.num_classes))
  assert first != sorted(first)
  assert source.class_names == list(CHARACTERS)


def test_fewer_classes():
  source = glyphs.Glyphs(num_examples=30, image_size=8, num_classes=10)
  labels = [source[i]['label'] for i in range(30)]
  assert sorted(labels[:10]) == sorted(labels[10:20]) == list(range(10))
  assert source.class_names == list(CHARACTERS[:10])
  with pytest.raises(IndexError):
    source[30]
  assert repr(source.class_names[labels[7]]) in source.describe(7)


def test_characters_are_the_chosen_ones():
  assert len(CHARACTERS) == len(set(CHARACTERS)) == 480
  digest = hashlib.sha256(CHARACTERS.encode()).hexdigest()
  assert digest.startswith('b13878cc562e4f2d')
  for character in CHARACTERS:
    for part in character + unicodedata.normalize('NFKD', character):
      assert not unicodedata.category(part).startswith('N'), character


def test_options_switch_things_off():
  plain = dict(deformation=0, noise=0, low_resolution=0)
  off = glyphs.Glyphs(**plain)
  a = np.stack([off[i]['image'] for i in range(20)])
  for change in ({'deformation': 1}, {'noise': 1}, {'low_resolution': 1}):
    on = glyphs.Glyphs(**(plain | change))
    b = np.stack([on[i]['image'] for i in range(20)])
    assert (a != b).any((1, 2, 3)).sum() > 15, change
  assert (a == 0).mean() > 0.2  # a clean background

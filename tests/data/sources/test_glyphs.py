"""Glyphs: which characters, how they are drawn, what the arguments do."""

import concurrent.futures
import hashlib
import pickle

import numpy as np
import pytest

from vit_jax.data.sources import glyphs
from vit_jax.data.sources.glyphs import CHARACTERS


def test_depends_on_seed_and_index_not_on_order_or_threads():
  source = glyphs.Glyphs(seed=0)
  forward = [source[i]['image'] for i in range(200)]
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    backward = list(pool.map(lambda i: source[i]['image'], range(199, -1, -1)))
  np.testing.assert_array_equal(forward, backward[::-1])
  assert len({image.tobytes() for image in forward}) == 200
  other = glyphs.Glyphs(seed=1)
  assert (other[0]['image'] != forward[0]).any()


def test_recorded_images():
  source = glyphs.Glyphs(seed=3)
  examples = [source[i] for i in range(8)]
  assert [x['label'] for x in examples[:4]] == [75, 266, 180, 211]
  # Other versions of FreeType and OpenCV round differently.
  recorded = {
    np.mean: [135.3, 42.4, 51.7, 146.2, 60.0, 92.8, 45.5, 84.5],
    np.std: [82.0, 73.9, 56.0, 82.6, 92.5, 83.0, 63.4, 80.9],
  }
  for measure, expected in recorded.items():
    found = [measure(x['image']) for x in examples]
    np.testing.assert_allclose(found, expected, atol=0.3)


def test_copies_by_pickle_are_the_same_and_small():
  source = glyphs.Glyphs(image_size=16, seed=2)
  data = pickle.dumps(source)
  assert len(data) < 10_000  # no distance fields
  copy = pickle.loads(data)
  np.testing.assert_array_equal(copy[5]['image'], source[5]['image'])


@pytest.mark.parametrize('image_size', [8, 24, 97])
def test_shape_and_type(image_size):
  example = glyphs.Glyphs(image_size=image_size)[0]
  assert example['image'].shape == (image_size, image_size, 1)
  assert example['image'].dtype == np.uint8
  assert type(example['label']) is int


@pytest.mark.parametrize('fields', [{}, {'num_classes': 10}])
def test_labels_are_balanced_and_names_fit(fields):
  count = fields.get('num_classes', len(CHARACTERS))
  source = glyphs.Glyphs(num_examples=2 * count, image_size=8, **fields)
  labels = [source[i]['label'] for i in range(2 * count)]
  first, second = labels[:count], labels[count:]
  assert sorted(first) == sorted(second) == list(range(count))
  assert first != sorted(first)
  assert source.class_names == list(CHARACTERS[:count])
  assert repr(source.class_names[labels[7]]) in source.describe(7)
  with pytest.raises(IndexError):
    source[2 * count]


def test_characters_are_the_chosen_ones():
  digest = hashlib.sha256(CHARACTERS.encode()).hexdigest()
  assert digest.startswith('b13878cc562e4f2d')

"""Glyphs: which characters, how they are drawn, what the arguments do."""

import concurrent.futures
import pickle
import unicodedata

import glyph_selection
import numpy as np
import pytest

from vit_jax.data.embedded import glyphs
from vit_jax.data.embedded.glyphs import CHARACTERS, FACES


@pytest.fixture(scope='module')
def pictures():
  fonts = [glyphs._font(face) for face in FACES]
  return {
    c: glyph_selection.shape_pictures(c, fonts)
    for c in CHARACTERS + '0123456789'
  }


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


def test_no_character_is_a_number():
  assert len(CHARACTERS) == len(set(CHARACTERS)) == 480
  words = ('DIGIT', 'NUMBER', 'NUMERAL', 'FRACTION', 'LETTER TWO', 'TONE SIX')
  for character in CHARACTERS:
    for part in character + unicodedata.normalize('NFKD', character):
      assert not part.isnumeric() and not part.isdigit(), character
      assert not unicodedata.category(part).startswith('N'), character
    name = unicodedata.name(character)
    assert not any(word in name for word in words), name
  numbers = '0٣²①½Ⅷ₅一⒈ƻ'
  assert [c for c in numbers if not glyph_selection.is_number(c)] == []


def test_no_two_classes_look_the_same_and_none_like_a_digit(pictures):
  stack = np.stack([pictures[c] for c in CHARACTERS + '0123456789'])
  # Sums over 4x4 pixels differ by no more than the pixels: a lower bound.
  cells = stack.reshape(len(stack), len(FACES), 12, 4, 12, 4).sum((3, 5))
  cells = cells.reshape(*stack.shape[:2], -1)
  for k, character in enumerate(CHARACTERS):
    bound = glyph_selection.nearness(cells[k + 1 :], cells[k])
    others = np.flatnonzero(bound < 0.2) + k + 1
    # A little under the threshold: other FreeTypes place edges differently.
    near = glyph_selection.nearness(stack[others], stack[k])
    assert (near > 0.19).all(), (character, others)


def test_look_alikes_are_recognised(pictures):
  fonts = [glyphs._font(face) for face in FACES]
  for kept, dropped in (('0', 'O'), ('A', 'Α'), ('A', 'А'), ('M', 'М')):
    picture = glyph_selection.shape_pictures(dropped, fonts)
    near = glyph_selection.nearness(picture[None], pictures[kept])
    assert near[0] < 0.21, (kept, dropped)
    assert dropped not in CHARACTERS
  far = glyph_selection.nearness(pictures['A'][None], pictures['R'])
  assert far[0] > 0.3


def test_classes_can_be_told_apart():
  """Nearest class mean, far above chance on images it has not seen."""
  options = dict(low_resolution=0, noise=0, deformation=0.3)
  source = glyphs.Glyphs(seed=0, **options)
  block = source.num_classes  # every block shows the classes in this order
  k = 100
  means = np.zeros((k, 24 * 24))
  for i in range(12):
    for c in range(k):
      means[c] += source[i * block + c]['image'].ravel() / 12
  means -= means.mean(1, keepdims=True)
  means /= np.linalg.norm(means, axis=1, keepdims=True)
  hits = [
    (means @ source[12 * block + c]['image'].ravel()).argmax() == c
    for c in range(k)
  ]
  assert np.mean(hits) > 0.3  # chance: 0.01


def test_images_cover_the_look_of_the_digits():
  import cv2
  from sklearn import datasets

  digits = datasets.load_digits().images.astype(np.float32) / 16
  # Cubic, the sharper of the two ways that glyphs are enlarged.
  how = cv2.INTER_CUBIC
  digits = np.stack([cv2.resize(d, (24, 24), None, 0, 0, how) for d in digits])
  source = glyphs.Glyphs(noise=0)
  images = np.stack([source[i]['image'] for i in range(500)]) / 255
  ink = images.mean((1, 2, 3))
  low, high = np.quantile(digits.mean((1, 2)), [0.05, 0.95])
  assert np.quantile(ink, 0.75) > low and np.quantile(ink, 0.98) > high
  edges = np.abs(np.diff(images[..., 0], axis=2)).max((1, 2))
  digit_edges = np.abs(np.diff(digits, axis=2)).max((1, 2))
  share = (edges < np.quantile(digit_edges, 0.95)).mean()
  assert 0.3 < share < 0.9  # as soft as the digits, but not all of them


def test_options_switch_things_off():
  plain = dict(deformation=0, noise=0, low_resolution=0)
  off = glyphs.Glyphs(**plain)
  a = np.stack([off[i]['image'] for i in range(20)])
  for change in ({'deformation': 1}, {'noise': 1}, {'low_resolution': 1}):
    on = glyphs.Glyphs(**(plain | change))
    b = np.stack([on[i]['image'] for i in range(20)])
    assert (a != b).any((1, 2, 3)).sum() > 15, change
  assert (a == 0).mean() > 0.2  # a clean background

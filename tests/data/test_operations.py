"""Operations of augmentation: what Pillow does not do, and one channel.

Those of Pillow are compared with recordings of timm in test_augment.py.
"""

import numpy as np
import pytest
from PIL import Image, ImageFilter, ImageOps

from vit_jax.data import operations as O

FILL = (10, 128, 200)
ARGUMENTS = {
  **{'Posterize': 3, 'Solarize': 77.4, 'SolarizeAdd': 60},
  **dict.fromkeys(O.ENHANCE, 1.9),
}


def picture(height=37, width=30, channels=3):
  """A smooth image with noise; its channels have unlike ranges."""
  rng = np.random.default_rng(0)
  coarse = rng.integers(40, 200, (5, 4, 3), dtype=np.uint8)
  image = Image.fromarray(coarse).resize((width, height), 3)
  noise = rng.integers(-30, 31, (height, width, 3)) * [0.5, 1, 1.2]
  image = np.clip(np.asarray(image) + noise, 3, 252).astype(np.uint8)
  return image if channels == 3 else image[..., :channels].copy()


def cases():
  """Yield (operation, arguments)."""
  for name, operation in O.COLOR.items():
    yield operation, [ARGUMENTS[name]] if name in ARGUMENTS else []
  for operation in O.GEOMETRY.values():
    for kernel in ('nearest', 'bilinear', 'bicubic'):
      yield operation, [0.3, kernel, 9]
  yield from ((O.blur, [1.9]), (O.grey, []))


@pytest.mark.parametrize('case', [*cases()])
def test_one_channel_is_one_of_three_equal_ones(case):
  operation, arguments = case
  view = picture(44, 60, 1)[41:3:-1, ::2]
  before = view.copy()
  out = operation(view, *arguments)
  three = operation(np.repeat(view, 3, axis=2), *arguments)
  np.testing.assert_array_equal(np.repeat(out, 3, axis=2), three)
  np.testing.assert_array_equal(view, before)  # not changed
  tiny = np.full((1, 2, 3), 77, np.uint8)
  assert operation(tiny, *arguments).shape == tiny.shape


@pytest.mark.parametrize('name', O.GEOMETRY)
def test_geometry_by_nothing(name):
  image = picture()
  np.testing.assert_array_equal(
    O.GEOMETRY[name](image, 0, 'nearest', FILL), image
  )


def test_posterize_solarize_and_blur_are_pillows():
  image = picture()
  theirs = Image.fromarray(image)
  blurred = theirs.filter(ImageFilter.GaussianBlur(1.9))
  np.testing.assert_array_equal(O.blur(image, 1.9), blurred)
  for bits in (1, 4, 8):
    out = O.posterize(image, bits)
    np.testing.assert_array_equal(out, ImageOps.posterize(theirs, bits))
  for level in (0, 77.4, 128, 256):
    out = O.solarize(image, level)
    np.testing.assert_array_equal(out, ImageOps.solarize(theirs, level))


def test_posterize_to_no_bits_is_black():
  assert not O.posterize(picture(), 0).any()


def test_solarize_add():
  image = np.array([[[0], [100], [127], [128], [250]]], np.uint8)
  out = O.solarize_add(image, 60)
  assert out.ravel().tolist() == [60, 160, 187, 128, 250]
  out = O.solarize_add(image, 220)
  assert out.ravel().tolist() == [220, 255, 255, 128, 250]
  assert O.solarize_add(image, 300).ravel().tolist() == [255] * 3 + [128, 250]


def test_contrast_with_a_given_mean():
  image = np.array([[[0], [100], [200]]], np.uint8)
  assert O.contrast(image, 0.5, 150).ravel().tolist() == [75, 125, 175]


def test_erase_clips_the_box_and_copies():
  image = picture(6, 5)
  before = image.copy()
  out = O.erase(image, (-2, 3, 4, 9), FILL)
  assert (out[:2, 3:] == FILL).all()
  np.testing.assert_array_equal(out[2:], image[2:])
  np.testing.assert_array_equal(out[:, :3], image[:, :3])
  np.testing.assert_array_equal(O.erase(image, (-9, 0, 4, 4), 7), image)
  np.testing.assert_array_equal(image, before)


def test_fill_levels():
  assert O.levels(7, 3) == (7, 7, 7)
  assert O.levels((255, 0, 0), 1) == (76,)
  assert O.levels((0, 255, 0), 1) == (150,)

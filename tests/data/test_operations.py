"""Operations of augmentation: Pillow's, and what Pillow does not have."""

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vit_jax.data import operations as O

FILL = (10, 128, 200)


def picture(height=37, width=30, channels=3):
  """A smooth image with noise; its channels have unlike ranges."""
  rng = np.random.default_rng(0)
  coarse = rng.integers(40, 200, (5, 4, 3), dtype=np.uint8)
  image = Image.fromarray(coarse).resize((width, height), 3)
  noise = rng.integers(-30, 31, (height, width, 3)) * [0.5, 1, 1.2]
  image = np.clip(np.asarray(image) + noise, 3, 252).astype(np.uint8)
  return image if channels == 3 else image[..., :channels].copy()


def pillow(image):
  return Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)


def affine(*matrix):
  def transform(image, kernel):
    fill = FILL if image.mode == 'RGB' else FILL[0]
    kind = Image.Resampling[kernel.upper()]
    affine = Image.Transform.AFFINE
    return image.transform(image.size, affine, matrix, kind, fillcolor=fill)

  return transform


def rotated(image, kernel):
  fill = FILL if image.mode == 'RGB' else FILL[0]
  return image.rotate(-27, Image.Resampling[kernel.upper()], fillcolor=fill)


COLOR = {
  'AutoContrast': [((), ImageOps.autocontrast)],
  'Equalize': [((), ImageOps.equalize)],
  'Invert': [((), ImageOps.invert)],
  'Posterize': [
    ((bits,), lambda x, bits=bits: ImageOps.posterize(x, bits))
    for bits in (1, 4, 8)
  ],
  'Solarize': [
    ((level,), lambda x, level=level: ImageOps.solarize(x, level))
    for level in (0, 77.4, 128, 256)
  ],
  **{
    name: [
      (
        (f,),
        lambda x, f=f, name=name: getattr(ImageEnhance, name)(x).enhance(f),
      )
      for f in (0.0, 0.55, 1.9, 3.7)
    ]
    for name in ('Color', 'Contrast', 'Brightness', 'Sharpness')
  },
}
GEOMETRY = {
  'Rotate': (-27, rotated),
  'ShearX': (0.29, affine(1, 0.29, 0, 0, 1, 0)),
  'ShearY': (-0.83, affine(1, 0, 0, -0.83, 1, 0)),
  'TranslateX': (-7.3, affine(1, 0, -7.3, 0, 1, 0)),
  'TranslateY': (11.8, affine(1, 0, 0, 0, 1, 11.8)),
}
OTHERS = {
  O.blur: [
    ((r,), lambda x, r=r: x.filter(ImageFilter.GaussianBlur(r)))
    for r in (0.1, 1.9)
  ],
  O.grey: [((), lambda x: x.convert('L').convert(x.mode))],
}


def cases():
  yield from ((O.COLOR[name], cases) for name, cases in COLOR.items())
  yield from OTHERS.items()


@pytest.mark.parametrize('channels', [1, 3])
def test_color_operations_are_pillows(channels):
  assert set(COLOR) | {'SolarizeAdd'} == set(O.COLOR)
  view = picture(44, 60, channels)[41:3:-1, ::2]
  before = view.copy()
  for operation, each in cases():
    for arguments, theirs in each:
      out = operation(view, *arguments)
      expected = np.asarray(theirs(pillow(before))).reshape(view.shape)
      np.testing.assert_array_equal(out, expected)
      np.testing.assert_array_equal(view, before)  # not changed
      tiny = np.full((1, 2, channels), 77, np.uint8)
      assert operation(tiny, *arguments).shape == tiny.shape


@pytest.mark.parametrize('channels', [1, 3])
@pytest.mark.parametrize('kernel', ['nearest', 'bilinear', 'bicubic'])
@pytest.mark.parametrize('name', O.GEOMETRY)
def test_geometry_is_pillows(name, kernel, channels):
  argument, theirs = GEOMETRY[name]
  image = picture(channels=channels)
  out = O.GEOMETRY[name](image, argument, kernel, FILL[:channels])
  expected = np.asarray(theirs(pillow(image), kernel)).reshape(image.shape)
  np.testing.assert_array_equal(out, expected)
  nothing = O.GEOMETRY[name](image, 0, kernel, 9)
  np.testing.assert_array_equal(nothing, image)


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

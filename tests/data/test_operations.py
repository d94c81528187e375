"""Operations of augmentation, pixel by pixel against Pillow."""

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vit_jax.data import images
from vit_jax.data import operations as O

KERNELS = ('nearest', 'bilinear', 'bicubic')
FILL = (10, 128, 200)


def _picture(height=37, width=30, channels=3):
  """A smooth image with noise; its channels have unlike ranges."""
  rng = np.random.default_rng(0)
  coarse = rng.integers(40, 200, (5, 4, 3), dtype=np.uint8)
  image = Image.fromarray(coarse).resize((width, height), 3)
  noise = rng.integers(-30, 31, (height, width, 3)) * [0.5, 1, 1.2]
  image = np.clip(np.asarray(image) + noise, 3, 252).astype(np.uint8)
  return image if channels == 3 else image[..., :channels].copy()


def _pillow(image):
  return Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)


def _affine(*matrix):
  def transform(image, kernel):
    fill = FILL if image.mode == 'RGB' else FILL[0]
    kind = Image.Resampling[kernel.upper()]
    affine = Image.Transform.AFFINE
    return image.transform(image.size, affine, matrix, kind, fillcolor=fill)

  return transform


def _rotate(degrees):
  def transform(image, kernel):
    fill = FILL if image.mode == 'RGB' else FILL[0]
    kind = Image.Resampling[kernel.upper()]
    return image.rotate(degrees, kind, fillcolor=fill)

  return transform


def _enhance(kind, factor):
  return lambda image: kind(image).enhance(factor)


COLOR = {
  'autocontrast': (O.autocontrast, (), ImageOps.autocontrast),
  'equalize': (O.equalize, (), ImageOps.equalize),
  'invert': (O.invert, (), ImageOps.invert),
  **{
    f'posterize {bits}': (
      *(O.posterize, (bits,)),
      # Pillow 13 refuses 0 bits, of which nothing is left.
      lambda image, bits=bits: (
        ImageOps.posterize(image, bits) if bits else image.point(lambda _: 0)
      ),
    )
    for bits in (0, 1, 4, 8)
  },
  **{
    f'solarize {threshold}': (
      *(O.solarize, (threshold,)),
      lambda image, t=threshold: ImageOps.solarize(image, t),
    )
    for threshold in (0, 77.4, 128, 256)
  },
  **{
    f'{name} {factor}': (operation, (factor,), _enhance(kind, factor))
    for name, operation, kind in (
      ('color', O.color, ImageEnhance.Color),
      ('contrast', O.contrast, ImageEnhance.Contrast),
      ('brightness', O.brightness, ImageEnhance.Brightness),
      ('sharpness', O.sharpness, ImageEnhance.Sharpness),
    )
    for factor in (0.0, 0.1, 0.55, 1.0, 1.45, 1.9, 3.7)
  },
  **{
    f'blur {radius}': (
      *(O.blur, (radius,)),
      lambda image, r=radius: image.filter(ImageFilter.GaussianBlur(r)),
    )
    for radius in (0.1, 0.7, 1.3, 1.9)
  },
}
GEOMETRY = {
  'rotate': (O.rotate, -27.0, _rotate(-27.0)),
  'rotate far': (O.rotate, 130.0, _rotate(130.0)),
  'shear_x': (O.shear_x, 0.29, _affine(1, 0.29, 0, 0, 1, 0)),
  'shear_y': (O.shear_y, -0.83, _affine(1, 0, 0, -0.83, 1, 0)),
  'translate_x': (O.translate_x, -7.3, _affine(1, 0, -7.3, 0, 1, 0)),
  'translate_y': (O.translate_y, 41.8, _affine(1, 0, 0, 0, 1, 41.8)),
  'translate_y whole': (O.translate_y, 4, _affine(1, 0, 0, 0, 1, 4)),
}


def _distance(ours, image, theirs):
  theirs = np.asarray(theirs).reshape(image.shape)
  assert ours.dtype == np.uint8 and ours.shape == image.shape
  return np.abs(ours.astype(int) - theirs)


@pytest.mark.parametrize('channels', [1, 3])
@pytest.mark.parametrize('name', COLOR)
def test_color_operations_are_pillows(name, channels):
  operation, arguments, theirs = COLOR[name]
  image = _picture(channels=channels)
  distance = _distance(
    operation(image, *arguments), image, theirs(_pillow(image))
  )
  assert distance.max() <= 1
  assert distance.mean() < 0.01


@pytest.mark.parametrize('channels', [1, 3])
@pytest.mark.parametrize('kernel', KERNELS)
@pytest.mark.parametrize('name', GEOMETRY)
def test_geometry_is_pillows(name, kernel, channels):
  operation, argument, theirs = GEOMETRY[name]
  image = _picture(channels=channels)
  out = operation(image, argument, kernel, FILL[:channels])
  distance = _distance(out, image, theirs(_pillow(image), kernel))
  # Pillow rounds bilinear levels down. OpenCV 4 has 32 places in a pixel.
  bilinear = 1 if images.opencv().__version__ >= '5' else 4
  limits = {'nearest': 0, 'bilinear': bilinear, 'bicubic': 1}
  assert distance.max() <= limits[kernel]


@pytest.mark.parametrize('kernel', KERNELS)
@pytest.mark.parametrize('operation', O.GEOMETRY.values())
def test_geometry_without_strength_changes_nothing(operation, kernel):
  image = _picture()
  np.testing.assert_array_equal(operation(image, 0, kernel, 9), image)


@pytest.mark.parametrize('operation', [O.autocontrast, O.equalize, O.contrast])
def test_images_of_one_level_stay(operation):
  image = np.full((5, 4, 3), 77, np.uint8)
  arguments = (0.3,) if operation is O.contrast else ()
  np.testing.assert_array_equal(operation(image, *arguments), image)


@pytest.mark.parametrize('shape', [(1, 1), (2, 9), (9, 2)])
@pytest.mark.parametrize('channels', [1, 3])
def test_tiny_images(shape, channels):
  image = np.full((*shape, channels), 77, np.uint8)
  for operation, arguments, _ in COLOR.values():
    assert operation(image, *arguments).shape == image.shape
  for operation, argument, _ in GEOMETRY.values():
    for kernel in KERNELS:
      assert operation(image, argument, kernel, 0).shape == image.shape


def test_solarize_add():
  image = np.array([[[0], [100], [127], [128], [250]]], np.uint8)
  out = O.solarize_add(image, 60)
  assert out.ravel().tolist() == [60, 160, 187, 128, 250]
  assert O.solarize_add(image, 220).ravel().tolist() == [
    220,
    255,
    255,
    128,
    250,
  ]


def test_contrast_with_a_given_mean():
  image = np.array([[[0], [100], [200]]], np.uint8)
  assert O.contrast(image, 0.5, 150).ravel().tolist() == [75, 125, 175]


def test_grey_is_the_luma_and_leaves_one_channel():
  image = _picture()
  luma = np.asarray(_pillow(image).convert('L'))
  assert np.abs(O.grey(image) - luma[..., None].astype(int)).max() <= 1
  grey = _picture(channels=1)
  assert O.grey(grey) is grey
  assert O.hue(grey, 0.2) is grey


def test_erase_clips_the_box_and_copies():
  image = _picture(6, 5)
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
  with pytest.raises(ValueError, match='2 levels, but the image has 3'):
    O.levels((1, 2), 3)


def test_views_are_taken_as_arrays():
  view = _picture(44, 30)[41:3:-1, 2:28]
  copy = view.copy()
  for operation, arguments, _ in COLOR.values():
    expected = operation(copy, *arguments)
    np.testing.assert_array_equal(operation(view, *arguments), expected)
  for operation, argument, _ in GEOMETRY.values():
    for kernel in KERNELS:
      expected = operation(copy, argument, kernel, 3)
      found = operation(view, argument, kernel, 3)
      np.testing.assert_array_equal(found, expected)


def test_operations_do_not_change_their_argument():
  image = _picture()
  before = image.copy()
  for operation, arguments, _ in COLOR.values():
    operation(image, *arguments)
  for operation, argument, _ in GEOMETRY.values():
    operation(image, argument, 'bicubic', 3)
  np.testing.assert_array_equal(image, before)

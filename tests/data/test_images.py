"""Decoding against Pillow's, kind by kind."""

import io

import numpy as np
import pytest
from PIL import Image

from vit_jax.data import images


def _picture(height=24, width=40):
  """Smooth and without symmetry, so that JPEG is near and flips show."""
  y, x = np.mgrid[:height, :width]
  planes = [x * 6, y * 10, 250 - x * 3 - y * 4]
  return np.clip(np.stack(planes, -1), 0, 255).astype(np.uint8)


def _encode(image, kind, **options):
  file = io.BytesIO()
  if isinstance(image, np.ndarray):
    image = Image.fromarray(image)
  image.save(file, kind, **options)
  return file.getvalue()


@pytest.mark.parametrize(
  'kind, options',
  [('PNG', {}), ('BMP', {}), ('WEBP', {'lossless': True})],
)
def test_lossless_colour(kind, options):
  image = images.decode(_encode(_picture(), kind, **options))
  assert image.dtype == np.uint8
  np.testing.assert_array_equal(image, _picture())


@pytest.mark.parametrize('kind', ['JPEG', 'WEBP'])
def test_lossy_colour_is_near_pillows(kind):
  data = _encode(_picture(), kind, quality=90)
  image, pillows = images.decode(data), Image.open(io.BytesIO(data))
  difference = image.astype(int) - np.asarray(pillows.convert('RGB'))
  assert np.abs(difference).max() <= 2  # two builds of the same codec


@pytest.mark.parametrize('kind', ['PNG', 'JPEG', 'BMP', 'WEBP'])
def test_grey_becomes_three_equal_channels(kind):
  grey = Image.fromarray(_picture()[..., 0])
  options = {'lossless': True} if kind == 'WEBP' else {}
  image = images.decode(_encode(grey, kind, **options))
  assert image.shape == (24, 40, 3)
  assert np.ptp(image, axis=-1).max() == 0
  assert np.abs(image[..., 0].astype(int) - _picture()[..., 0]).max() <= 3


def test_one_channel_is_luma():
  image = images.decode(_encode(_picture(), 'PNG'), channels=1)
  luma = _picture() @ [0.299, 0.587, 0.114]
  assert image.shape == (24, 40, 1)
  assert np.abs(image[..., 0] - luma).max() < 1.5


@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'WEBP'])
@pytest.mark.parametrize('orientation', range(1, 9))
def test_exif_orientation(kind, orientation):
  # The turns by which the EXIF standard defines the eight orientations.
  upright = _picture().astype(int)
  stored = {
    1: upright,
    2: upright[:, ::-1],
    3: upright[::-1, ::-1],
    4: upright[::-1],
    5: upright.swapaxes(0, 1),
    6: np.rot90(upright, 1),
    7: upright[::-1, ::-1].swapaxes(0, 1),
    8: np.rot90(upright, -1),
  }[orientation]
  exif = Image.Exif()
  exif[0x0112] = orientation
  data = _encode(stored.astype(np.uint8), kind, exif=exif, quality=95)
  image = images.decode(data)
  assert image.shape == upright.shape
  assert np.abs(image - upright).mean() < 6  # another turn: 30 and more


def test_orientation_of_transparent_png():
  exif = Image.Exif()
  exif[0x0112] = 6
  stored = np.rot90(_picture(), 1)
  opaque = np.full((*stored.shape[:2], 1), 255, np.uint8)
  data = _encode(np.concatenate([stored, opaque], -1), 'PNG', exif=exif)
  np.testing.assert_array_equal(images.decode(data), _picture())


@pytest.mark.parametrize('kind', ['PNG', 'WEBP'])
def test_alpha_is_composited_on_white(kind):
  alpha = np.linspace(0, 255, 24 * 40).round().astype(np.uint8).reshape(24, 40)
  rgba = np.concatenate([_picture(), alpha[..., None]], -1)
  options = {'lossless': True, 'exact': True} if kind == 'WEBP' else {}
  image = images.decode(_encode(rgba, kind, **options))
  share = alpha[..., None] / 255
  expected = _picture() * share + 255 * (1 - share)
  assert image.shape == (24, 40, 3)
  assert np.abs(image - expected).max() <= 1


def test_grey_with_alpha():
  grey = np.full((4, 4), 100, np.uint8)
  alpha = np.zeros((4, 4), np.uint8)
  alpha[0] = 255
  image = Image.merge('LA', [Image.fromarray(grey), Image.fromarray(alpha)])
  decoded = images.decode(_encode(image, 'PNG'))
  assert (decoded[0] == 100).all() and (decoded[1:] == 255).all()


@pytest.mark.parametrize('transparent', [False, True])
def test_palette(transparent):
  palette = Image.fromarray(np.repeat([[0, 1, 2]], 4, 0).astype(np.uint8), 'P')
  palette.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
  options = {'transparency': 1} if transparent else {}
  image = images.decode(_encode(palette, 'PNG', **options))
  middle = [255] * 3 if transparent else [40, 50, 60]
  expected = [[[10, 20, 30], middle, [70, 80, 90]]] * 4
  np.testing.assert_array_equal(image, expected)


def test_gif():
  image = images.decode(_encode(Image.fromarray(_picture()[..., 0]), 'GIF'))
  np.testing.assert_array_equal(image, _picture()[..., :1].repeat(3, -1))


def test_16_bit_keeps_the_upper_byte():
  wide = np.linspace(0, 65535, 24 * 40).astype(np.uint16).reshape(24, 40)
  image = images.decode(_encode(Image.fromarray(wide), 'PNG'))
  assert np.abs(image[..., 0].astype(int) - wide // 256).max() <= 1
  assert image.max() == 255 and np.ptp(image, axis=-1).max() == 0


def test_cmyk_jpeg():
  cmyk = Image.fromarray(_picture()).convert('CMYK')
  image = images.decode(_encode(cmyk, 'JPEG', quality=95))
  assert np.abs(image.astype(int) - _picture()).mean() < 6


@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'WEBP', 'BMP'])
def test_cut_off_is_an_error(kind):
  data = _encode(_picture(200, 300), kind)
  with pytest.raises(ValueError, match='cannot decode an image of'):
    images.decode(data[: len(data) // 2])


@pytest.mark.parametrize(
  'data', [b'', b'no image', b'\xff\xd8\xff\xe0', b'\x89PNG\r\n\x1a\n', b'RIFF']
)
def test_no_image_is_an_error(data):
  with pytest.raises(ValueError, match='cannot decode'):
    images.decode(data)


def test_channels_are_checked():
  with pytest.raises(ValueError, match='channels=4 must be'):
    images.decode(b'', channels=4)

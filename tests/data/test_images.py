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


@pytest.mark.parametrize(
  'kind, options',
  [
    ('JPEG', {}),
    ('JPEG', {'progressive': True}),
    ('PNG', {}),
    ('WEBP', {}),
    ('WEBP', {'lossless': True}),
    ('WEBP', {'exif': b'Exif'}),  # VP8X
    ('BMP', {}),
    ('GIF', {}),
    ('TIFF', {'compression': 'tiff_lzw'}),
    ('PPM', {}),
    ('JPEG2000', {}),
    ('ICO', {'sizes': [(40, 24)]}),
  ],
)
@pytest.mark.parametrize('channels', [1, 3])
def test_limit_on_the_decoded_size(kind, options, channels):
  data, size = _encode(_picture(), kind, **options), 24 * 40 * channels
  decoded = images.decode(data, channels, max_image_bytes=size)
  assert decoded.nbytes == size
  with pytest.raises(ValueError, match=r'24 x 40|960 pixels') as info:
    images.decode(data, channels, max_image_bytes=size - 1)
  assert f'max_image_bytes={size - 1:,}' in str(info.value)
  assert f'Set max_image_bytes={size} to' in str(info.value)


def test_limit_above_pillows_own():
  pillows = Image.MAX_IMAGE_PIXELS
  try:
    Image.MAX_IMAGE_PIXELS = 100
    for kind in ('GIF', 'TIFF'):
      images.decode(_encode(_picture(), kind))  # warnings are errors
    assert Image.MAX_IMAGE_PIXELS == 100
  finally:
    Image.MAX_IMAGE_PIXELS = pillows


def test_limit_before_anything_is_decoded():
  data = bytearray(_encode(_picture(), 'PNG'))
  data[16:24] = (30_000).to_bytes(4, 'big') * 2
  with pytest.raises(ValueError, match='30,000 x 30,000 pixels, 2,700,000,000'):
    images.decode(data)


def test_gif_whose_frame_is_larger_than_its_screen():
  data = bytearray(_encode(Image.new('L', (16, 16)), 'GIF'))
  at = data.index(b',\0\0\0\0\x10\0\x10\0')
  data[at + 5 : at + 9] = b'\xff' * 4
  with pytest.raises(ValueError, match='65,535 x 65,535'):
    images.decode(data)


def test_jpeg_of_many_scans():
  data = _encode(_picture(), 'JPEG', progressive=True)
  last = data[data.rindex(b'\xff\xda') : -2]
  images.decode(data[:-2] + 50 * last + data[-2:])
  with pytest.raises(ValueError, match=r'JPEG has 1,0\d\d scans'):
    images.decode(data[:-2] + 1000 * last + data[-2:])


def test_jpeg_with_junk_before_its_frame():
  data = _encode(_picture(), 'JPEG')
  at = data.index(b'\xff\xc0')
  junk = data[:at] + b'\0junk\xff' + data[at:]  # as libjpeg, which warns
  np.testing.assert_array_equal(images.decode(junk), images.decode(data))
  with pytest.raises(ValueError, match='24 x 40'):
    images.decode(junk, max_image_bytes=9)

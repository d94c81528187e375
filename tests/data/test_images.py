"""Decoding against Pillow's, kind by kind, and parts against whole images."""

import contextlib
import io
import zlib

import numpy as np
import pytest
from PIL import Image
from tiny import encode

from vit_jax.data import images, pipeline
from vit_jax.data.sources import image_files, inputs


def picture(height=24, width=40):
  """Smooth and without symmetry, so that JPEG is near and flips show."""
  y, x = np.mgrid[:height, :width]
  planes = [x * 6, y * 10, 250 - x * 3 - y * 4]
  return np.clip(np.stack(planes, -1), 0, 255).astype(np.uint8)


def exif(orientation):
  tags = Image.Exif()
  tags[0x0112] = orientation
  return tags


@pytest.mark.parametrize(
  'kind, options',
  [
    *(('PNG', {}), ('BMP', {}), ('WEBP', {'lossless': True})),
    ('TIFF', {'compression': 'tiff_lzw'}),
  ],
)
def test_lossless_colour(kind, options):
  image = images.decode(encode(picture(), kind, **options))
  assert image.dtype == np.uint8
  np.testing.assert_array_equal(image, picture())


@pytest.mark.parametrize('kind', ['PNG', 'JPEG', 'BMP', 'WEBP', 'GIF'])
def test_grey_becomes_three_equal_channels(kind):
  grey = Image.fromarray(picture()[..., 0])
  options = {'lossless': True} if kind == 'WEBP' else {}
  image = images.decode(encode(grey, kind, **options))
  assert image.shape == (24, 40, 3)
  assert np.ptp(image, axis=-1).max() == 0
  assert np.abs(image[..., 0].astype(int) - picture()[..., 0]).max() <= 3


@pytest.mark.parametrize('kind', ['PNG', 'GIF'])  # by OpenCV, by Pillow
def test_one_channel_is_luma(kind):
  image = images.decode(encode(picture(), kind), channels=1)
  shown = Image.open(io.BytesIO(encode(picture(), kind))).convert('RGB')
  luma = np.asarray(shown) @ [0.299, 0.587, 0.114]
  assert image.shape == (24, 40, 1)
  assert np.abs(image[..., 0] - luma).max() < 1.5


@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'WEBP', 'AVIF'])
@pytest.mark.parametrize('orientation', range(1, 9))
def test_exif_orientation(kind, orientation):
  # The turns by which the EXIF standard defines the eight orientations.
  upright = picture().astype(int)
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
  data = encode(np.uint8(stored), kind, exif=exif(orientation), quality=95)
  encoded = images.Encoded(data)
  assert encoded.shape == upright.shape
  assert encoded.seconds == 0  # nothing was decoded to find the shape
  image = encoded.pixels()
  assert encoded.seconds > 0
  assert np.abs(image - upright).mean() < 6  # another turn: 30 and more
  as_stored = images.decode(data, exif=False)
  assert np.abs(as_stored - stored).mean() < 6


def chunk(kind, data, damage=0):
  size, crc = len(data), zlib.crc32(kind + data) ^ damage
  return size.to_bytes(4, 'big') + kind + data + crc.to_bytes(4, 'big')


PACKED = zlib.compress(bytes(1_100_000))  # more than Pillow's own limit
ODD = chunk(b'zTXt', b'x\0\0' + PACKED) + chunk(b'iCCP', b'x\0\0' + PACKED)
ODD += chunk(b'tEXt', b'Comment\0wrong checksum', damage=1)
RAW = zlib.compress(f'\nexif\n0\n{exif(6).tobytes().hex()}'.encode())
XMP = b'<x tiff:Orientation="6"/>'
TAGS = [
  (b'zTXt', b'Raw profile type exif\0\0' + RAW),
  (b'iTXt', b'XML:com.adobe.xmp' + bytes(5) + XMP),
  (b'eXIf', exif(6).tobytes()[6:]),
]


@pytest.mark.parametrize('at', [33, -12])  # before, behind the pixels
@pytest.mark.parametrize('channels', [3, 4])  # by OpenCV, by Pillow
def test_odd_chunks_of_a_png_and_places_of_its_orientation(channels, at):
  stored = np.insert(np.rot90(picture(), 1), 3, 255, -1)
  data = encode(stored[..., :channels])
  data = data[:33] + ODD + data[33:]
  for tag in TAGS:
    image = images.decode(data[:at] + chunk(*tag) + data[at:])
    np.testing.assert_array_equal(image, picture())
  data = encode(stored[..., :3], 'JPEG', xmp=XMP)
  assert images.Encoded(data).shape == (24, 40, 3)


def test_a_damaged_exif_segment_is_ignored():
  data = encode(picture(), 'JPEG', exif=b'Exif\0\0II*\0\xff')
  assert images.decode(data).shape == (24, 40, 3)


@pytest.mark.parametrize(
  'kind, mode', [('PNG', 'RGB'), ('WEBP', 'RGB'), ('PNG', 'L')]
)
def test_alpha_is_composited_on_white(kind, mode):
  alpha = np.linspace(0, 255, 24 * 40).round().astype(np.uint8).reshape(24, 40)
  stored = Image.fromarray(picture()).convert(mode)
  opaque = np.asarray(stored.convert('RGB'))
  stored.putalpha(Image.fromarray(alpha))
  options = {'lossless': True, 'exact': True} if kind == 'WEBP' else {}
  image = images.decode(encode(stored, kind, **options))
  share = alpha[..., None] / 255
  expected = opaque * share + 255 * (1 - share)
  assert image.shape == (24, 40, 3)
  assert np.abs(image - expected).max() <= 1


def test_a_bmp_whose_fourth_byte_is_not_used_has_its_colours():
  bgra = np.insert(picture()[..., ::-1], 3, 0, -1)
  data = images.opencv().imencode('.bmp', bgra)[1].tobytes()
  np.testing.assert_array_equal(images.decode(data), picture())


@pytest.mark.parametrize('kind', ['float32', 'int32', 'int16'])
def test_levels_of_an_unknown_range_are_an_error(kind):
  data = encode(Image.fromarray(np.ones((4, 5), kind)), 'TIFF')
  with pytest.raises(images.UnreadableError, match='uint8 or uint16'):
    images.decode(data)


@pytest.mark.parametrize('transparent', [False, True])
def test_palette(transparent):
  palette = Image.fromarray(np.repeat([[0, 1, 2]], 4, 0).astype(np.uint8), 'P')
  palette.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
  options = {'transparency': 1} if transparent else {}
  image = images.decode(encode(palette, 'PNG', **options))
  middle = [255] * 3 if transparent else [40, 50, 60]
  expected = [[[10, 20, 30], middle, [70, 80, 90]]] * 4
  np.testing.assert_array_equal(image, expected)


@pytest.mark.parametrize('kind', ['PNG', 'TIFF'])
def test_16_bit_keeps_the_upper_byte(kind):
  wide = np.linspace(0, 65535, 24 * 40).astype(np.uint16).reshape(24, 40)
  image = images.decode(encode(Image.fromarray(wide), kind))
  assert np.abs(image[..., 0].astype(int) - wide // 256).max() <= 1
  assert image.max() == 255 and np.ptp(image, axis=-1).max() == 0


def test_cmyk_jpeg():
  cmyk = Image.fromarray(picture()).convert('CMYK')
  image = images.decode(encode(cmyk, 'JPEG', quality=95))
  assert np.abs(image.astype(int) - picture()).mean() < 6


# Errors.


@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'WEBP', 'BMP'])
def test_a_truncated_file_is_an_error(kind):
  data = encode(picture(200, 300), kind)
  with pytest.raises(images.UnreadableError, match=f'{len(data) // 2} bytes'):
    images.decode(data[: len(data) // 2])


@pytest.mark.parametrize(
  'data', [b'', b'no image', b'\xff\xd8\xff\xe0', b'\x89PNG\r\n\x1a\n', b'RIFF']
)
def test_other_bytes_are_an_error(data):
  with pytest.raises(images.UnreadableError):
    images.decode(data)


OTHERS = {
  b'version https://git-lfs.github.com/spec/v1\noid': 'a Git LFS pointer',
  b'\0\0\0\x18ftypheic\0\0\0\0mif1heic': 'it is HEIC',
  b'\n<!DOCTYPE html><html>': 'it is an HTML page',
  b'junk': 'cannot identify image file',
}


@pytest.mark.parametrize('data', OTHERS)
def test_what_is_no_image_is_named(data, tmp_path):
  file = tmp_path / 'a.jpg'
  file.write_bytes(data)
  for read in (images.decode, lambda _: image_files.check(((str(file),),), '')):
    with pytest.raises(images.UnreadableError, match=OTHERS[data]) as info:
      read(data)
    assert '<_io' not in str(info.value)


@pytest.mark.parametrize('kind', images.FORMATS)
@pytest.mark.parametrize('channels', [1, 3])
def test_limit_on_the_decoded_size(kind, channels, monkeypatch):
  monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 100)  # Pillow's own
  images.pillow.cache_clear()
  data, size = encode(picture(), kind), 24 * 40 * channels
  encoded = images.Encoded(data, channels, max_image_bytes=size)
  assert encoded.pixels().nbytes == size
  with pytest.raises(images.UnreadableError, match='24 x 40') as info:
    images.Encoded(data, channels, max_image_bytes=size - 1)
  assert f'Set max_image_bytes={size} to' in str(info.value)


def test_the_default_limit_acts_before_anything_is_decoded():
  data = bytearray(encode(picture(), 'PNG'))
  data[16:24] = (30_000).to_bytes(4, 'big') * 2
  data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, 'big')
  with pytest.raises(images.UnreadableError, match='30,000 x 30,000 pixels'):
    images.decode(bytes(data))


def test_a_gif_whose_frame_is_larger_than_its_screen():
  data = bytearray(encode(Image.new('L', (16, 16)), 'GIF'))
  at = data.index(b',\0\0\0\0\x10\0\x10\0')
  data[at + 5 : at + 9] = b'\xff' * 4
  with pytest.raises(images.UnreadableError, match='65,535 x 65,535'):
    images.decode(bytes(data))


def test_a_lossless_jpeg_is_decoded_or_an_error():
  data = bytes.fromhex(  # Huffman codes, 32 x 32 x 3 pixels, a scan
    'ffd8ffc4001500010100000000000000000000000000000001ffc3001108002000200301'
    '1100021100031100ffda000c03010002000300010000'
  )
  data += 3 * 32 * 32 * b'\x50' + b'\xff\xd9'  # differences 0, 1, 0, 0, 0, 0
  with contextlib.suppress(images.UnreadableError):
    part = images.Encoded(data).part((3, 5, 7, 9))
    np.testing.assert_array_equal(part, images.decode(data)[3:10, 5:14])


# Parts.

HEIGHT, WIDTH = 75, 101  # no multiples of a block
KINDS = {
  '4:2:0': {'subsampling': 2},
  '4:2:2': {'subsampling': 1},
  '4:4:4': {'subsampling': 0},
  'progressive': {'progressive': True},
  'restart markers': {'restart_marker_blocks': 3},
  'codes of its own': {'optimize': True},
  'few coefficients': {'quality': 3},
}


def noisy(height=HEIGHT, width=WIDTH):
  """Colourful, with edges and noise, so that each pixel counts."""
  rng = np.random.default_rng(0)
  y, x = np.mgrid[:height, :width]
  planes = [x * 255 // width, y * 255 // height, (x // 7 + y // 5) % 2 * 200]
  noise = rng.normal(0, 12, (height, width, 3))
  return np.uint8(np.clip(np.stack(planes, -1) + noise, 0, 255))


def jpeg(**options):
  return encode(noisy(), 'JPEG', **{'quality': 90} | options)


def boxes(height, width):
  rng = np.random.default_rng(1)
  yield from [(0, 0, 1, 1), (height - 1, width - 1, 1, 1), (3, 0, 9, width)]
  for _ in range(40):
    y, x = int(rng.integers(height)), int(rng.integers(width))
    h, w = rng.integers(1, height - y + 1), rng.integers(1, width - x + 1)
    yield y, x, int(h), int(w)


def check_parts(data, channels=3, **options):
  """Compare parts with those of the whole image."""
  whole = images.decode(data, channels, **options)
  for y, x, h, w in boxes(*whole.shape[:2]):
    encoded = images.Encoded(data, channels, **options)
    assert encoded.shape == whole.shape
    pixels = encoded.part((y, x, h, w))
    np.testing.assert_array_equal(pixels, whole[y : y + h, x : x + w])
    assert encoded.seconds > 0


@pytest.mark.parametrize('channels', [1, 3])
@pytest.mark.parametrize('kind', KINDS)
def test_parts_of_jpegs(kind, channels, monkeypatch):
  if images.decode_part:  # without others
    monkeypatch.delattr(images.Encoded, '_with_opencv')
  check_parts(jpeg(**KINDS[kind]), channels)


@pytest.mark.parametrize('factors', [0x411111, 0x121111])
def test_parts_of_jpegs_with_other_sampling(factors):
  """Four columns, or two rows, have one value of colour: 4:1:1 and 4:4:0."""
  cv2 = images.opencv()
  options = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, factors]
  check_parts(cv2.imencode('.jpg', noisy(), options)[1].tobytes())


@pytest.mark.parametrize('channels', [1, 3])
def test_parts_of_grey_jpegs(channels):
  check_parts(encode(noisy()[..., 0], 'JPEG'), channels)


@pytest.mark.parametrize('respected', [True, False])
@pytest.mark.parametrize('orientation', range(1, 9))
def test_parts_of_turned_jpegs(orientation, respected):
  check_parts(jpeg(exif=exif(orientation)), exif=respected)


@pytest.mark.parametrize('kind', ['PNG', 'WEBP', 'GIF', 'TIFF'])
def test_parts_of_other_kinds(kind):
  check_parts(encode(noisy(), kind))


def test_parts_without_the_extension_are_the_same(monkeypatch):
  monkeypatch.setattr(images, 'decode_part', None)
  check_parts(jpeg())


EXTENSION = pytest.mark.parametrize('extension', [images.decode_part, None])


@EXTENSION
@pytest.mark.parametrize('kind', [*KINDS, 'CMYK'])
def test_damage_below_a_part_is_an_error(kind, extension, monkeypatch):
  if not extension and kind in ('progressive', 'restart markers'):
    return  # not all of it is found
  monkeypatch.setattr(images, 'decode_part', extension)
  cmyk = encode(Image.fromarray(noisy()).convert('CMYK'), 'JPEG')
  data = jpeg(**KINDS[kind]) if kind in KINDS else cmyk
  half, hole = data[: len(data) // 2], data[len(data) * 6 // 10 :]
  for damaged in half + b'\xff\xd9', half + hole, half + data, data[:-2]:
    for height, check in (HEIGHT, True), (5, True), (HEIGHT, False):
      with pytest.raises(images.UnreadableError):
        images.Encoded(damaged, check=check).part((0, 0, height, WIDTH))


@EXTENSION
def test_odd_bytes_do_no_harm(extension, monkeypatch, caplog, tmp_path):
  monkeypatch.setattr(images, 'decode_part', extension)
  data, restart = jpeg(), jpeg(restart_marker_blocks=3)
  source = [
    {'image': x[:at] + bytes(99) + x[at:], 'label': 0}
    for x, at in ((data, 20), (data, -2), (restart, restart.index(b'\xff\xd1')))
  ]
  for _ in range(2):
    batch = next(iter(pipeline.Data(source, 3).eval_batches()))
  np.testing.assert_array_equal(batch['image'], [images.decode(data)] * 3)
  said = sorted(x.message for x in caplog.records)
  assert len(said) == (3 if extension else 0)
  for i, line in enumerate(said):
    assert f'example {i} of list' in line and 'extraneous bytes' in line
  (tmp_path / 'odd.jpg').write_bytes(source[1]['image'])
  source = inputs.Paths([f'{tmp_path}/odd.jpg'])
  assert len(list(inputs.load(source, []))) == 1
  named = [x for x in caplog.messages if 'odd.jpg: Corrupt' in x]
  assert len(named) == bool(extension)


def test_damaged_jpegs_are_the_same_in_part_or_an_error():
  rng, compared = np.random.default_rng(5), 0
  for options in ({'optimize': True}, {'restart_marker_blocks': 2}):
    data = jpeg(**options)
    for _ in range(150):
      damaged = bytearray(data)
      for place in rng.integers(2, len(data) - 2, 2):
        damaged[place] = rng.integers(256)
      try:
        encoded = images.Encoded(bytes(damaged), max_image_bytes=2**20)
        if min(encoded.shape[:2]) >= 60:
          part = encoded.part((20, 10, 40, 50))
          whole = images.decode(bytes(damaged))
          np.testing.assert_array_equal(part, whole[20:60, 10:60])
          compared += 1
      except images.UnreadableError:
        pass
  assert compared > 30

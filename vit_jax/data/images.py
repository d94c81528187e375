"""Decoding of images: OpenCV for the common kinds, Pillow for the rest.

OpenCV is faster and releases the GIL, so threads decode in parallel. Pillow
decodes images with transparency, CMYK JPEGs and GIFs, which OpenCV decodes
incorrectly or not at all, and whatever else OpenCV refuses.

A file of 100 kB can contain an image of gigabytes. So the size is read from the
header, and compared with a limit, before anything is decoded.
"""

import functools
import io
import re
import struct
import threading
from typing import Any, NamedTuple

import numpy as np

from vit_jax import checks

MAX_IMAGE_BYTES = 2**28  # Default limit: 89 million pixels of 3 channels.

_PNG = b'\x89PNG\r\n\x1a\n'
# Encoders write about 10. Each costs a pass over the image, but a few bytes.
_MAX_JPEG_SCANS = 100
# Pillow would start Ghostscript, or unpack gzip without a limit.
_REFUSED = ('EPS', 'FITS')


def size(name: str, value: Any) -> tuple[int, int]:
  """Return `value`, an int or (height, width), as a pair; else ValueError."""
  pair = value
  if isinstance(value, int | np.integer):
    pair = (value, value)
  is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
  if not is_pair or not all(
    isinstance(side, int | np.integer) and side >= 1 for side in pair
  ):
    raise ValueError(
      f'{name}={value!r} must be an integer or (height, width), each at least'
      ' 1 pixel.'
    )
  return tuple(pair)


@functools.cache
def opencv() -> Any:
  """Return the module cv2 without its own threads: images are the tasks."""
  import cv2

  cv2.setNumThreads(0)
  return cv2


def decode(
  data: bytes, channels: int = 3, *, max_image_bytes: int = MAX_IMAGE_BYTES
) -> np.ndarray:
  """Decode an image to uint8 [H, W, channels], in RGB order.

  The EXIF orientation is applied. Transparent pixels are composited on white,
  as in a browser. 16-bit samples keep their upper 8 bits. ICC profiles are
  ignored. An animation returns its first frame.

  Args:
    data: bytes of the file.
    channels: 3 converts grey to three equal channels, 1 converts RGB to luma.
    max_image_bytes: limit on H * W * channels. The header is checked before
      anything is decoded.

  Raises:
    ValueError: the bytes are not an image, corrupt, truncated, or the image is
      larger than the limit.
  """
  checks.one_of('channels', channels, (1, 3))
  if not data:
    raise ValueError('cannot decode an image of 0 bytes: the file is empty.')
  data = bytes(data)
  header = _read_header(data)
  if header is not None:
    _check_size(header.width, header.height, channels, max_image_bytes)
    if header.scans > _MAX_JPEG_SCANS:
      raise ValueError(
        f'the JPEG has {header.scans:,} scans. More than {_MAX_JPEG_SCANS} are'
        ' not decoded, because each one costs a pass over the whole image.'
      )
  image = None
  if header is not None and not header.for_pillow:
    image = _with_opencv(data, channels)
  if image is None:
    image = _with_pillow(data, channels, max_image_bytes, header)
  return image


def _check_size(width, height, channels, limit):
  if width * height * channels > limit:
    raise ValueError(
      _too_large(f'{height:,} x {width:,}', width * height, channels, limit)
    )


def _too_large(size, pixels, channels, limit):
  needed = pixels * channels
  return (
    f'the image has {size} pixels, {needed:,} bytes when decoded, more than'
    f' max_image_bytes={limit:,}. Set max_image_bytes={needed} to decode it.'
  )


def _with_opencv(data, channels):
  """Return uint8 [H, W, channels], or None if OpenCV cannot decode it."""
  cv2 = opencv()
  flag = cv2.IMREAD_COLOR_RGB if channels == 3 else cv2.IMREAD_GRAYSCALE
  try:
    image = cv2.imdecode(np.frombuffer(data, np.uint8), flag)
  except cv2.error:
    return None
  if image is None or image.dtype != np.uint8:
    return None
  return image.reshape(*image.shape[:2], channels)


def _with_pillow(data, channels, limit, header):
  """Return uint8 [H, W, channels], of OpenCV too if there was no header."""
  from PIL import Image, ImageOps, UnidentifiedImageError

  bombs = Image.DecompressionBombError, Image.DecompressionBombWarning
  try:
    with _open(data, limit // channels) as image:
      if image.format in _REFUSED:
        raise ValueError(f'files of the kind {image.format} are not decoded.')
      _check_size(*image.size, channels, limit)
      if image.format == 'TIFF':  # tiles can be larger than the image
        width, height = (image.tag_v2.get(tag, 1) for tag in (322, 323))
        _check_size(width, height, channels, limit)
      decoded = _with_opencv(data, channels) if header is None else None
      if decoded is not None:
        return decoded
      image = ImageOps.exif_transpose(image)
      if image.mode.startswith('I;16'):  # Pillow's own conversion clips
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
      if image.has_transparency_data:
        image = image.convert('RGBA')
        canvas = Image.new('RGBA', image.size, 'white')
        image = Image.alpha_composite(canvas, image)
        del canvas
      image = image.convert('RGB')
      image = image.convert('L') if channels == 1 else image
      return np.array(image).reshape(image.height, image.width, channels)
  except Exception as error:  # Pillow's decoders raise many types
    reason = str(error)
    if isinstance(error, UnidentifiedImageError):
      reason = 'not an image, or truncated in its header.'
    if isinstance(error, bombs):
      pixels = int(re.search(r'\d+', reason)[0])
      reason = _too_large(f'{pixels:,}', pixels, channels, limit)
    raise ValueError(
      f'cannot decode an image of {len(data)} bytes that begin with'
      f' {data[:8]!r}: {reason}'
    ) from error


_pillow_limit = threading.Lock()


def _open(data, max_pixels):
  """Return a Pillow image that is not decoded yet.

  Pillow's own limit, a variable of its module, is `max_pixels` for the moment:
  icons are decoded when they are opened, and contain other images.
  """
  from PIL import Image

  with _pillow_limit:
    kept = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = max_pixels
    try:
      return Image.open(io.BytesIO(data))
    finally:
      Image.MAX_IMAGE_PIXELS = kept


class _Header(NamedTuple):
  """Facts from the beginning of an image file.

  Attributes:
    height, width: in pixels.
    for_pillow: whether it is a GIF, has transparency, or is CMYK.
    scans: upper bound of the number of scans of a progressive JPEG, else 0.
  """

  height: int
  width: int
  for_pillow: bool
  scans: int = 0


def _read_header(data):
  """Return the _Header of a JPEG, PNG, WebP, BMP or GIF; else None."""
  try:
    if data[:2] == b'\xff\xd8':
      return _read_jpeg_header(data)
    if data[:8] == _PNG and data[12:16] == b'IHDR':
      width, height = struct.unpack_from('>2I', data, 16)
      # Colour types grey + alpha, RGB + alpha; a transparent colour.
      alpha = data[25] in (4, 6)
      alpha = alpha or data.find(b'tRNS', 33, data.find(b'IDAT', 33)) >= 0
      return _Header(height, width, alpha)
    if data[:4] == b'RIFF' and data[8:12] == b'WEBP':
      return _read_webp_header(data)
    if data[:4] == b'GIF8':
      return _read_gif_header(data)
    if data[:2] == b'BM':
      if struct.unpack_from('<I', data, 14)[0] < 40:
        return None  # of OS/2
      width, height = struct.unpack_from('<2i', data, 18)
      return _Header(abs(height), abs(width), data[28:30] == b'\x20\0')
  except (struct.error, IndexError):
    pass  # truncated
  return None


def _read_webp_header(data):
  kind = data[12:16]
  if kind == b'VP8X':
    width = int.from_bytes(data[24:27], 'little') + 1
    height = int.from_bytes(data[27:30], 'little') + 1
    return _Header(height, width, bool(data[20] & 0x10))
  if kind == b'VP8L':
    (bits,) = struct.unpack_from('<I', data, 21)
    height, width = (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    return _Header(height, width, bool(bits >> 28 & 1))
  if kind == b'VP8 ':
    width, height = struct.unpack_from('<2H', data, 26)
    return _Header(height & 0x3FFF, width & 0x3FFF, False)
  return None


def _read_gif_header(data):
  """Return the _Header of the screen, enlarged to contain the first frame."""
  width, height, flags = struct.unpack_from('<2HB', data, 6)
  at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
  while data[at] not in b',;':
    if data[at] == 0x21:  # an extension: a byte for its kind, then blocks
      at += 2
      while data[at]:
        at += 1 + data[at]
    at += 1
  if data[at] == 0x2C:
    left, top, frame_width, frame_height = struct.unpack_from(
      '<4H', data, at + 1
    )
    width, height = (
      max(width, left + frame_width),
      max(height, top + frame_height),
    )
  return _Header(height, width, True)


def _read_jpeg_header(data):
  """Return the _Header of the first frame, found as libjpeg finds it."""
  at = 2
  while (at := data.find(b'\xff', at)) >= 0:
    marker, at = data[at + 1], at + 1
    if marker in (0x00, 0x01, 0xFF) or 0xD0 <= marker <= 0xD7:
      continue  # no segment: a stuffed or fill byte, or a lone marker
    if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
      height, width, components = struct.unpack_from('>2HB', data, at + 4)
      scans = 0
      if marker > 0xC0:  # progressive; bytes.count would take 7 times as long
        rest = np.frombuffer(data, np.uint8, offset=at)
        scans = np.count_nonzero((rest[:-1] == 0xFF) & (rest[1:] == 0xDA))
      return _Header(height, width, components == 4, scans)
    if marker in (0xD9, 0xDA):  # no frame before the end or the first scan
      return None
    at += 1 + int.from_bytes(data[at + 1 : at + 3], 'big')
  return None

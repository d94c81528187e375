"""Decoding of images: OpenCV for the common kinds, Pillow for the rest.

OpenCV is faster and releases the GIL, so threads decode in parallel. Pillow
decodes images with transparency, CMYK JPEGs and GIFs, which OpenCV decodes
incorrectly or not at all, and whatever else OpenCV refuses.

A transform that needs a part of the image only, such as a random crop, gets the
image `Encoded`. The part of a JPEG is then decoded by libjpeg-turbo, with the
same pixels, if the extension _jpeg.c was compiled when this package was
installed.

A file of 100 kB can contain an image of gigabytes. So the size is read from the
header, and compared with a limit, before anything is decoded.
"""

import functools
import io
import re
import struct
import threading
import time
from typing import Any, NamedTuple

import numpy as np

from vit_jax.config import checks

try:
  from vit_jax.data import _jpeg  # type: ignore[attr-defined]
except ImportError:  # not compiled
  _jpeg = None

MAX_IMAGE_BYTES = 2**28  # Default limit: 89 million pixels of 3 channels.

Box = tuple[int, int, int, int]  # y, x, height, width

_END = b'\xff\xd9'  # of a JPEG
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
  data: bytes,
  channels: int = 3,
  *,
  max_image_bytes: int = MAX_IMAGE_BYTES,
  exif: bool = True,
) -> np.ndarray:
  """Decode an image to uint8 [H, W, channels], in RGB order.

  Transparent pixels are composited on white, as in a browser. 16-bit samples
  keep their upper 8 bits. ICC profiles are ignored. An animation returns its
  first frame.

  Args:
    data: bytes of the file.
    channels: 3 converts grey to three equal channels, 1 converts RGB to luma.
    max_image_bytes: limit on H * W * channels. The header is checked before
      anything is decoded.
    exif: apply the EXIF orientation, by which cameras say how the image is to
      be turned. TensorFlow's decoders ignore it.

  Raises:
    ValueError: the bytes are not an image, corrupt, truncated, or the image is
      larger than the limit.
  """
  return Encoded(
    data, channels, max_image_bytes=max_image_bytes, exif=exif
  ).pixels()


class UnreadableError(ValueError):
  """The bytes are not an image that can be decoded."""


class Encoded:
  """An image file whose size is known, and that is decoded as far as needed.

  Args:
    data, channels, max_image_bytes, exif: of `decode`.
    scaled: let `part` decode a JPEG at 1/2 or 1/4 of its size where that is
      enough. This filters out high frequencies, which a resize would sample.

  Attributes:
    shape: (H, W, channels) of the image.
    seconds: spent on decoding so far.

  Raises:
    UnreadableError: of this class and its methods; see `decode`.
  """

  def __init__(
    self,
    data: bytes,
    channels: int = 3,
    *,
    max_image_bytes: int = MAX_IMAGE_BYTES,
    exif: bool = True,
    scaled: bool = False,
  ) -> None:
    checks.one_of('channels', channels, (1, 3))
    if not data:
      raise UnreadableError(
        'cannot decode an image of 0 bytes: the file is empty.'
      )
    self._data, self._channels, self._exif = bytes(data), channels, exif
    self._limit, self._scaled, self.seconds = max_image_bytes, scaled, 0.0
    self._header = header = _read_header(self._data)
    self._pixels: np.ndarray | None = None
    if header is None:  # another kind: the decoder finds its size
      self.shape = self.pixels().shape
      return
    _check_size(header.width, header.height, channels, max_image_bytes)
    if header.scans > _MAX_JPEG_SCANS:
      raise UnreadableError(
        f'the JPEG has {header.scans:,} scans. More than {_MAX_JPEG_SCANS} are'
        ' not decoded, because each one costs a pass over the whole image.'
      )
    self._turn = _TURNS[header.orientation if exif else 1]
    size = header.height, header.width
    if not header.is_jpeg and exif:  # PNG and WebP can be turned, too
      size = self.pixels().shape[:2]
    elif self._turn.transpose:
      size = size[::-1]
    self.shape = (*size, channels)

  def pixels(self) -> np.ndarray:
    """Return the image: uint8 [H, W, channels]."""
    pixels = self._pixels
    if pixels is None:
      begin = time.perf_counter()
      self._pixels = pixels = self._decode()
      self.seconds += time.perf_counter() - begin
    return pixels

  def part(
    self, box: Box, size: tuple[int, int] | None = None
  ) -> tuple[np.ndarray, Box]:
    """Return pixels that contain a part of the image, and where it lies there.

    Args:
      box: (y, x, height, width) of the part.
      size: (height, width) to which the part will be resized. With `scaled`
        the pixels may be as few. None: the pixels are those of the image.

    Returns:
      uint8 [h, w, channels], and the box in these pixels, of floats if they
      are scaled.
    """
    whole = (0, 0, *self.shape[:2])
    denominator = 1
    if self._scaled and size:
      factor = min(box[2] / size[0], box[3] / size[1])
      denominator = next((s for s in (4, 2) if s <= factor), 1)
    if self._pixels is None and (denominator > 1 or box != whole):
      begin = time.perf_counter()
      found = self._decode_part(box, denominator)
      self.seconds += time.perf_counter() - begin
      if found is not None:
        return found
    y, x, height, width = box
    pixels = self.pixels()[y : y + height, x : x + width]
    return pixels, (0, 0, height, width)

  def _decode(self):
    header, image = self._header, None
    if header is not None and not header.for_pillow:
      image = _with_opencv(self._data, self._channels, self._exif)
    if image is None:
      image = _with_pillow(
        self._data, self._channels, self._limit, header, self._exif
      )
    return image

  def _decode_part(self, box, denominator):
    """Return what `part` does, of a JPEG without damage; else None."""
    header, data = self._header, self._data
    # The end of a truncated file is missed only by who reads to the end.
    if _jpeg is None or not header or not header.is_jpeg:
      return None
    if header.for_pillow or data[-2:] != _END:
      return None
    stored = self._turn.undo(box, self.shape)
    area, inner = stored, (0, 0, *stored[2:])
    if denominator > 1:
      area, inner = _scaled(stored, denominator)
    height, width = area[2:]
    room = height * (width + _jpeg.MORE_COLUMNS) * self._channels
    out = np.empty(room, np.uint8)
    found = _jpeg.decode(data, area, self._channels, denominator, out)
    if found is None:
      return None
    left, stride = found
    rows = out[: height * stride * self._channels].reshape(height, stride, -1)
    pixels = rows[:, left : left + width]
    return self._turn.apply(pixels), self._turn.apply_box(inner, pixels.shape)


def _scaled(box, denominator):
  """Return the pixels of a scaled image that a box touches, and it in them."""
  y, x, height, width = box
  top, left = y // denominator, x // denominator
  bottom, right = (
    -(-(y + height) // denominator),
    -(-(x + width) // denominator),
  )
  inner = y / denominator - top, x / denominator - left
  return (
    (top, left, bottom - top, right - left),
    (*inner, height / denominator, width / denominator),
  )


class _Turn(NamedTuple):
  """An EXIF orientation: the image is transposed, then flipped."""

  transpose: bool
  flip_y: bool
  flip_x: bool

  def apply(self, image):
    if not any(self):
      return image
    if self.transpose:
      image = image.swapaxes(0, 1)
    rows, columns = (
      slice(None, None, -1 if self.flip_y else None),
      slice(None, None, -1 if self.flip_x else None),
    )
    return np.ascontiguousarray(image[rows, columns])

  def apply_box(self, box, shape):
    """Return the box in an image of this shape after it was turned."""
    y, x, height, width = box
    rows, columns = shape[:2]
    if self.transpose:
      y, x, height, width, rows, columns = x, y, width, height, columns, rows
    if self.flip_y:
      y = rows - y - height
    if self.flip_x:
      x = columns - x - width
    return y, x, height, width

  def undo(self, box, shape):
    """Return the box before the turn that gave an image of this shape."""
    y, x, height, width = box
    if self.flip_y:
      y = shape[0] - y - height
    if self.flip_x:
      x = shape[1] - x - width
    return (x, y, width, height) if self.transpose else (y, x, height, width)


# By the value of the EXIF tag, see its standard, section 4.6.4.
_TURNS = {
  1: _Turn(False, False, False),
  2: _Turn(False, False, True),
  3: _Turn(False, True, True),
  4: _Turn(False, True, False),
  5: _Turn(True, False, False),
  6: _Turn(True, False, True),
  7: _Turn(True, True, True),
  8: _Turn(True, True, False),
}


def _check_size(width, height, channels, limit):
  if width * height * channels > limit:
    raise UnreadableError(
      _too_large(f'{height:,} x {width:,}', width * height, channels, limit)
    )


def _too_large(size, pixels, channels, limit):
  needed = pixels * channels
  return (
    f'the image has {size} pixels, {needed:,} bytes when decoded, more than'
    f' max_image_bytes={limit:,}. Set max_image_bytes={needed} to decode it.'
  )


def _with_opencv(data, channels, exif):
  """Return uint8 [H, W, channels], or None if OpenCV cannot decode it."""
  cv2 = opencv()
  flag = cv2.IMREAD_COLOR_RGB if channels == 3 else cv2.IMREAD_GRAYSCALE
  if not exif:
    flag |= cv2.IMREAD_IGNORE_ORIENTATION
  try:
    image = cv2.imdecode(np.frombuffer(data, np.uint8), flag)
  except cv2.error:
    return None
  if image is None or image.dtype != np.uint8:
    return None
  return image.reshape(*image.shape[:2], channels)


def _with_pillow(data, channels, limit, header, exif):
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
      decoded = None
      if header is None:
        decoded = _with_opencv(data, channels, exif)
      if decoded is not None:
        return decoded
      image = ImageOps.exif_transpose(image) if exif else image
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
    raise UnreadableError(
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
    is_jpeg: whether `orientation` is known.
    orientation: EXIF's, 1 to 8.
  """

  height: int
  width: int
  for_pillow: bool
  scans: int = 0
  is_jpeg: bool = False
  orientation: int = 1


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
      turn = _orientation(data[:at])
      return _Header(height, width, components == 4, scans, True, turn)
    if marker in (0xD9, 0xDA):  # no frame before the end or the first scan
      return None
    at += 1 + int.from_bytes(data[at + 1 : at + 3], 'big')
  return None


def _orientation(data):
  """Return the EXIF orientation in the segments before the first frame."""
  start = data.find(b'Exif\0\0') + 6
  order = {b'II*\0': '<', b'MM\0*': '>'}.get(data[start : start + 4])
  if start < 6 or order is None:
    return 1
  try:
    at = start + struct.unpack_from(f'{order}I', data, start + 4)[0]
    (count,) = struct.unpack_from(f'{order}H', data, at)
    for entry in range(at + 2, at + 2 + 12 * count, 12):
      tag, kind, _, value = struct.unpack_from(f'{order}HHIH', data, entry)
      if tag == 0x0112 and kind == 3:
        return value if value in _TURNS else 1
  except struct.error:  # truncated
    pass
  return 1

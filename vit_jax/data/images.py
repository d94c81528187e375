"""Decoding of images: OpenCV for the common kinds, Pillow for the rest.

OpenCV is faster and releases the GIL, so threads decode in parallel. Pillow
decodes images with transparency, CMYK JPEGs and GIFs, which OpenCV decodes
incorrectly or not at all, and whatever else OpenCV refuses.
"""

import functools
import io
from typing import Any

import numpy as np

from vit_jax import checks

_PNG = b'\x89PNG\r\n\x1a\n'


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


def decode(data: bytes, channels: int = 3) -> np.ndarray:
  """Decode an image to uint8 [H, W, channels], in RGB order.

  The EXIF orientation is applied. Transparent pixels are composited on white,
  as in a browser. 16-bit samples keep their upper 8 bits. ICC profiles are
  ignored. An animation returns its first frame.

  Args:
    data: bytes of the file.
    channels: 3 converts grey to three equal channels, 1 converts RGB to luma.

  Raises:
    ValueError: the bytes are not an image, corrupt, or truncated.
  """
  checks.one_of('channels', channels, (1, 3))
  if not data:
    raise ValueError('cannot decode an image of 0 bytes: the file is empty.')
  data = bytes(data)
  image = None if _is_for_pillow(data) else _with_opencv(data, channels)
  return _with_pillow(data, channels) if image is None else image


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


def _with_pillow(data, channels):
  from PIL import Image, ImageOps, UnidentifiedImageError

  try:
    with Image.open(io.BytesIO(data)) as image:
      image = ImageOps.exif_transpose(image)
      if image.mode.startswith('I;16'):  # Pillow's own conversion clips
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
      if image.has_transparency_data:
        image = image.convert('RGBA')
        canvas = Image.new('RGBA', image.size, 'white')
        image = Image.alpha_composite(canvas, image)
      image = image.convert('RGB')
      image = image.convert('L') if channels == 1 else image
      return np.array(image).reshape(image.height, image.width, channels)
  except Exception as error:  # Pillow's decoders raise many types
    reason = str(error)
    if isinstance(error, UnidentifiedImageError):
      reason = 'not an image, or truncated in its header.'
    raise ValueError(
      f'cannot decode an image of {len(data)} bytes that begin with'
      f' {data[:8]!r}: {reason}'
    ) from error


def _is_for_pillow(data):
  """Return whether the header says transparency, CMYK, or GIF."""
  if data[:2] == b'\xff\xd8':
    return _jpeg_components(data) == 4
  if data[:8] == _PNG and len(data) > 33:
    if data[25] in (4, 6):  # colour types grey + alpha, RGB + alpha
      return True
    return data.find(b'tRNS', 33, data.find(b'IDAT', 33)) >= 0
  if data[:4] == b'RIFF' and data[8:12] == b'WEBP' and len(data) > 25:
    if data[12:16] == b'VP8X':
      return bool(data[20] & 0x10)
    return data[12:16] == b'VP8L' and bool(data[24] & 0x10)
  if data[:2] == b'BM' and len(data) > 30:
    return int.from_bytes(data[28:30], 'little') == 32
  return data[:4] == b'GIF8'


def _jpeg_components(data):
  """Return the number of components in the frame header; 0 without one."""
  at = 2
  while at + 9 < len(data) and data[at] == 0xFF:
    marker = data[at + 1]
    if marker == 0xFF:  # fill byte
      at += 1
    elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
      return data[at + 9]
    else:
      at += 2 + int.from_bytes(data[at + 2 : at + 4], 'big')
  return 0

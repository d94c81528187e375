"""Image files to arrays: OpenCV for the common kinds, Pillow for the rest.

OpenCV is the faster of the two and releases the GIL, so threads decode in
parallel. Images with transparency, CMYK JPEGs and GIFs, which it gets wrong or
not at all, go to Pillow; so does whatever OpenCV refuses.
"""

import functools
import io

import numpy as np

_PNG = b'\x89PNG\r\n\x1a\n'


@functools.cache
def opencv():
  """The cv2 module, with its own threads off: we parallelise over images."""
  import cv2

  cv2.setNumThreads(0)
  return cv2


def decode(data, channels=3):
  """Decodes one encoded image to uint8 [H, W, channels], in RGB order.

  The EXIF orientation is applied. Transparent pixels are composited on white,
  as a browser would show them. Grey becomes three equal channels, or colour
  becomes luma, as `channels` (1 or 3) says. 16-bit samples keep their upper
  8 bits. ICC profiles are ignored; of an animation the first frame counts.

  Raises:
    ValueError: the bytes are no image, corrupt, or cut off.
  """
  if channels not in (1, 3):
    raise ValueError(f'channels is {channels!r}; it can be 1 or 3.')
  if not data:
    raise ValueError('cannot decode an image of 0 bytes: the file is empty.')
  data = bytes(data)
  image = None if _is_for_pillow(data) else _with_opencv(data, channels)
  return _with_pillow(data, channels) if image is None else image


def _with_opencv(data, channels):
  """uint8 [H, W, channels], or None where OpenCV cannot decode the image."""
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
      reason = 'no image, or one cut off in its header.'
    raise ValueError(
      f'cannot decode an image of {len(data)} bytes that begin with'
      f' {data[:8]!r}: {reason}'
    ) from error


def _is_for_pillow(data):
  """Whether the header tells of transparency, CMYK, or a GIF."""
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
  """Number of colour components in the frame header; 0 where there is none."""
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

"""Decoding of images: OpenCV for the common kinds, Pillow for the rest.

OpenCV is faster, and releases the GIL, so threads decode in parallel. Pillow
reads the headers, and decodes images with transparency, CMYK JPEGs, GIFs, TIFFs
and AVIFs, which OpenCV decodes incorrectly or not at all. If the extension
_jpeg.c is compiled, libjpeg-turbo decodes JPEGs, only the part of a crop.
"""

import dataclasses
import functools
import io
import math
import re
import time
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from absl import logging

from vit_jax.types import UserError

try:
  from vit_jax.data._jpeg import decode as decode_part
except ImportError:  # not compiled, or of another version
  decode_part = None

MAX_IMAGE_BYTES = 2**28  # Default limit: 89 million pixels of 3 channels.

warn_once = functools.cache(logging.warning)  # of `Encoded.remark`

Box = tuple[int, int, int, int]  # y, x, height, width

# Pillow has more, but starts Ghostscript or unpacks gzip for some of them.
FORMATS = ('JPEG', 'PNG', 'WEBP', 'BMP', 'GIF', 'TIFF', 'AVIF')
ENDINGS = (
  *('.jpg', '.jpeg', '.jpe', '.jfif', '.png', '.apng', '.webp', '.bmp'),
  *('.gif', '.tif', '.tiff', '.avif', '.avifs'),
)
_OTHERS = {  # what files may be instead, by how they begin
  rb'version https://git-lfs': 'it is a Git LFS pointer. Run git lfs pull',
  rb'(?s)....ftyp(hei|hev|mif1|msf1)': 'it is HEIC. Save it as JPEG or PNG',
  rb'(?i)\s*<(!doctype )?html': 'it is an HTML page. Download it again',
}
_TAGS = re.compile(rb'eXIf|Raw profile type|XML:com.adobe.xmp')  # of PNGs
_BITS, _PHOTOMETRIC, _SAMPLES = 258, 262, 277  # tags of TIFF
_MARKER = re.compile(rb'\xff[^\x00\xd0-\xd7\xff]')  # that ends a scan


def pair(size: Any) -> tuple[int, int]:
  """Return a size, int for a square or (height, width), as a pair."""
  height, width = np.broadcast_to(size, 2).tolist()
  return height, width


def opencv() -> Any:
  """Return the module cv2, see opencv.py."""
  from vit_jax.data.opencv import cv2

  return cv2


@functools.cache
def pillow() -> Any:
  """Return the module PIL.Image without its own limits on sizes.

  As in OpenCV, a wrong checksum matters only in chunks that the pixels need.
  """
  from PIL import Image
  from PIL import PngImagePlugin as png

  class Stream(png.PngStream):
    def crc(self, cid, data):
      (self.crc_skip if cid[:1].islower() else super().crc)(cid, data)

  png.PngStream = Stream  # type: ignore[misc]
  png.MAX_TEXT_CHUNK = png.MAX_TEXT_MEMORY = MAX_IMAGE_BYTES
  Image.MAX_IMAGE_PIXELS = None  # `Encoded` has a limit, and says how to set it
  return Image


def is_picture(image: np.ndarray) -> bool:
  """Return whether an image has 1 or 3 channels of levels 0 to 255."""
  return image.dtype == np.uint8 and image.shape[2] in (1, 3)


def by_pillow(function: Callable[[Any], Any], image: np.ndarray) -> np.ndarray:
  """Return function(Pillow image) as an array with the channels of `image`.

  Channels of rasters are changed one by one, as images of mode 'F'.
  """
  if not is_picture(image):
    planes = np.ascontiguousarray(np.moveaxis(image, 2, 0))
    planes = [function(pillow().fromarray(x)) for x in planes]
    return np.stack([np.asarray(x) for x in planes], axis=2)
  picture = image[..., 0] if image.shape[2] == 1 else image
  out = np.array(function(pillow().fromarray(picture)))
  return out.reshape(*out.shape[:2], image.shape[2])


def by_opencv(
  function: Callable[[np.ndarray], np.ndarray],
  image: np.ndarray,
  most: int = 128,
) -> np.ndarray:
  """Return function(image), of at most `most` channels at once.

  OpenCV takes 128, its INTER_AREA 4, and drops a channel that is the only one.
  """
  channels = image.shape[2]
  if channels <= most:
    out = function(image)
    return out.reshape(*out.shape[:2], channels)
  parts = np.split(image, range(most, channels, most), axis=2)
  parts = [by_opencv(function, np.ascontiguousarray(x), most) for x in parts]
  return np.concatenate(parts, axis=2)


def decode(data: bytes, channels: int = 3, *, exif: bool = True) -> np.ndarray:
  """Decode an image to uint8 [H, W, channels]; see `Encoded`."""
  return Encoded(data, channels, exif=exif).pixels()


class UnreadableError(UserError):
  """The bytes are not an image that can be decoded."""


@dataclasses.dataclass(frozen=True)
class Colours:
  """The default decoder: pictures of levels 0 to 255, see `Encoded`.

  A decoder is what a source has as `decode`, and a run as part of its weights:
  all that depends on the kind of image files. Another is `rasters.Raster`.

    decode(data, max_image_bytes=..., check=...)   an image [H, W, C], or
        an `Encoded`, which decodes what a crop needs
    decode.dtype   of all images
    decode.endings, decode.takes(path)   which files are images
    decode.paths(path)   the files of an image, of which this is the first
    decode.show(image)   uint8 [H, W, 1 or 3], to look at
    decode.most_checked   files that are read before a run, to find broken ones
  """

  channels: Literal[1, 3] = 3
  exif: bool = True

  dtype: ClassVar = 'uint8'
  endings: ClassVar = ENDINGS
  most_checked: ClassVar = 50_000  # in a few seconds: mostly headers

  def __call__(self, data: bytes, **options: Any) -> 'Encoded':
    return Encoded(data, self.channels, exif=self.exif, **options)

  def takes(self, path: str) -> bool:
    return path.lower().endswith(self.endings)

  def paths(self, path: str) -> tuple[str, ...]:
    return (path,)

  def show(self, image: np.ndarray) -> np.ndarray:
    return np.clip(np.round(image), 0, 255).astype(np.uint8)


def decoder(source: Any) -> Any:
  """Return the decoder of the image files of a source."""
  return getattr(source, 'decode', None) or Colours()


def opened(decode: Any, image: Any, **options: Any) -> Any:
  """Return the image of an example, decoded unless it is an array of levels."""
  if isinstance(image, bytes) or decode.dtype != 'uint8':
    return decode(image, **options)
  return image


def picture(source: Any, image: Any) -> np.ndarray:
  """Return the image of an example of a source as uint8 to look at."""
  decode = decoder(source)
  image = opened(decode, image)
  return decode.show(image.pixels() if isinstance(image, Encoded) else image)


class Encoded:
  """An image file that is decoded as far as needed.

  The colours are RGB. Transparent pixels are composited on white, as in a
  browser. 16-bit samples keep their upper 8 bits. ICC profiles are ignored. An
  animation is its first frame.

  Args:
    data: bytes of a JPEG, PNG, WebP, BMP, GIF, TIFF or AVIF file.
    channels: 3 converts grey to three equal channels, 1 converts RGB to luma.
    max_image_bytes: limit on H * W * channels, checked before decoding.
    exif: apply the EXIF orientation, which TensorFlow's decoders ignore.
    check: find all damage of a JPEG, also below a part. Without it decoding is
      faster, and finds what is missing in the pixels that are returned.

  Raises:
    UnreadableError: by the constructor or a method: the bytes are not an image,
      corrupt, truncated, or the image is larger than the limit.

  Attributes:
    shape: (H, W, channels) of the image.
    remark: what libjpeg-turbo found odd in a JPEG that has no damage, or ''.
    is_turned: whether the EXIF orientation changes the image.
    seconds: time spent on decoding so far.
  """

  def __init__(
    self,
    data: bytes,
    channels: int = 3,
    *,
    max_image_bytes: int = MAX_IMAGE_BYTES,
    exif: bool = True,
    check: bool = True,
  ) -> None:
    self._data, self._channels, self._check = data, channels, check
    self.remark, self.seconds = '', 0.0
    try:
      with _open(data) as image:
        width, height = image.size
        needed = width * height * channels
        if kind := {'F': 'floats', 'I': 'signed or 32-bit'}.get(image.mode):
          raise ValueError(f'pixels are {kind}. Save them as uint8 or uint16')
        self._for_pillow = (
          image.format in ('GIF', 'TIFF', 'AVIF')
          or image.mode == 'CMYK'
          or image.has_transparency_data
        )
        is_jpeg = image.format in ('JPEG', 'MPO') and not self._for_pillow
        self._by_libjpeg = is_jpeg and decode_part is not None
        one_scan = image.format == 'JPEG' and 'progressive' not in image.info
        self._scan = image.fp.tell() if one_scan else 0
        # Pillow turns a TIFF. The limit comes first, as a PNG may be loaded.
        exif = exif and image.format != 'TIFF' and needed <= max_image_bytes
        self._turn = _TURNS[_orientation(image, data) if exif else 1]
    except Exception as error:  # Pillow's readers raise many types
      raise _unreadable(data, error) from error
    if needed > max_image_bytes:
      raise UnreadableError(
        f'the image has {height:,} x {width:,} pixels, {needed:,} bytes when'
        f' decoded, more than max_image_bytes={max_image_bytes:,}. Set'
        f' max_image_bytes={needed} to decode it.'
      )
    self.is_turned = any(self._turn)
    if self._turn.transpose:
      height, width = width, height
    self.shape = (height, width, channels)

  @property
  def lost(self) -> list[str]:
    """Parts of the file that decoding leaves out, in words."""
    with _open(self._data) as image:
      tags, is_tiff = getattr(image, 'tag_v2', {}), image.format == 'TIFF'
      bits = self._data[24] if image.format == 'PNG' else 8
      bits = np.max(tags.get(_BITS, bits))
      pages = image.n_frames if is_tiff else 1
      more = tags.get(_SAMPLES, 1) - len(image.getbands())
      found = {
        f'of {bits} bits the upper 8 are read': bits > 8,
        f'of {pages} pages the first is read': pages > 1,
        f'{more} more bands are not read': more > 0,
        'what is transparent is read as on white': image.has_transparency_data,
      }
    return [text for text, is_so in found.items() if is_so]

  def pixels(self) -> np.ndarray:
    """Return the image: uint8 [H, W, channels]."""
    return self.part((0, 0, *self.shape[:2]))

  def part(self, box: Box) -> np.ndarray:
    """Return the pixels in a box: uint8 [height, width, channels]."""
    begin = time.perf_counter()
    try:
      image = self._decoded(self._turn.undo(box, self.shape))
    except Exception as error:  # the decoders raise many types
      raise _unreadable(self._data, error) from error
    image = self._turn.apply(image)
    self.seconds += time.perf_counter() - begin
    return image

  def _decoded(self, box):
    """Return the pixels in a box of the image as it is stored."""
    y, x, height, width = box
    if self._by_libjpeg:
      out = np.empty((height, width, self._channels), np.uint8)
      check = self._check or out.size == math.prod(self.shape)
      remark = decode_part(self._data, box, self._channels, check, out)
      if remark is not None:
        self.remark = remark
        return out
    data = _without_end(self._data, self._scan)
    image = None if self._for_pillow else self._with_opencv(data)
    image = self._with_pillow(data) if image is None else image
    return image[y : y + height, x : x + width]

  def _with_opencv(self, data):
    """Return uint8 [H, W, channels] as stored, or None if it cannot."""
    cv2 = opencv()
    flag = cv2.IMREAD_COLOR_RGB if self._channels == 3 else cv2.IMREAD_GRAYSCALE
    flag |= cv2.IMREAD_IGNORE_ORIENTATION
    image = cv2.imdecode(np.frombuffer(data, np.uint8), flag)
    if image is None or image.dtype != np.uint8:
      return None
    return image.reshape(*image.shape[:2], self._channels)

  def _with_pillow(self, data):
    """Return uint8 [H, W, channels] as stored."""
    Image = pillow()
    with _open(data) as image:
      if image.mode.startswith('I;16'):  # Pillow's own conversion clips
        levels = (np.asarray(image) >> 8).astype(np.uint8)
        is_inverse = getattr(image, 'tag_v2', {}).get(_PHOTOMETRIC) == 0
        image = Image.fromarray(255 - levels if is_inverse else levels)
      if image.format == 'BMP' and not image.convert('RGBA').getbbox():
        image = image.convert('RGB')  # no program has set the fourth byte
      if image.has_transparency_data:
        canvas = Image.new('RGBA', image.size, 'white')
        image = Image.alpha_composite(canvas, image.convert('RGBA'))
      image = image.convert('RGB')
      image = image.convert('L') if self._channels == 1 else image
      return np.array(image).reshape(*image.size[::-1], self._channels)


def _open(data):
  """Return a Pillow image that is not decoded yet."""
  return pillow().open(io.BytesIO(data), formats=FORMATS)


def _without_end(data, scan):
  """Return a JPEG whose only scan is at `scan`, if not 0, without its end.

  At the marker libjpeg fills missing rows with grey. Without it, it waits for
  data, and OpenCV and Pillow raise. It reads 8 bytes ahead; ones are no code.
  """
  end = scan and _MARKER.search(data, scan)
  if not end or end[0][1] not in b'\xd8\xd9':  # end, or start of another file
    return data
  return data[: end.start()] + 8 * b'\xff\x00'


def _orientation(image, data):
  """Return the EXIF orientation, tag 0x0112, of a Pillow image, 1 to 8."""
  try:
    if image.format == 'PNG':
      late = data.rfind(b'IDAT')  # the last chunk of pixels
      if _TAGS.search(data, late + int.from_bytes(data[late - 4 : late])):
        image.load()  # reads the chunks behind them
    exif = pillow().Image.getexif(image)  # a PNG's own always loads it
    found = exif.get(0x0112, 1)
  except Exception:  # Pillow raises many types for damaged tags
    return 1
  return found if found in _TURNS else 1


def _unreadable(data, error):
  why = re.sub(' <_io.BytesIO .*>', '', str(error))  # of Pillow
  why = next((x for start, x in _OTHERS.items() if re.match(start, data)), why)
  return UnreadableError(
    f'cannot decode an image of {len(data)} bytes that begin with'
    f' {data[:8]!r}: {why}. The formats are {", ".join(FORMATS)}.'
  )


class _Turn(NamedTuple):
  """An EXIF orientation: the image is transposed, then flipped."""

  transpose: bool
  flip_y: bool
  flip_x: bool

  def apply(self, image):
    if self.transpose:
      image = image.swapaxes(0, 1)
    rows, columns = (-1 if flip else 1 for flip in (self.flip_y, self.flip_x))
    return np.ascontiguousarray(image[::rows, ::columns])

  def undo(self, box, shape):
    """Map a box of the turned image, which has `shape`, to the stored image."""
    y, x, height, width = box
    if self.flip_y:
      y = shape[0] - y - height
    if self.flip_x:
      x = shape[1] - x - width
    return (x, y, width, height) if self.transpose else (y, x, height, width)


# By the value of the EXIF tag, 1 to 8, see its standard, section 4.6.4.
_FLIPS = (False, False), (False, True), (True, True), (True, False)  # (y, x)
_ALL = [_Turn(turned, *flips) for turned in (False, True) for flips in _FLIPS]
_TURNS = dict(enumerate(_ALL, 1))

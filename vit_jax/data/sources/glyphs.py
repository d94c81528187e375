"""Embedded glyphs: letters and symbols of free fonts, drawn when read.

Made for pretraining without a download. No class is a digit or looks like one,
but strokes resemble scans of `digits.Digits` (thick, deformed, often 8x8 px).

Each character is rendered once per face into a signed distance field, which
`cv2.remap` samples through a random affine and elastic map. An offset to the
distances sets the stroke width, and their slope sets the blur.
"""

import dataclasses
import functools
import importlib.util
import pathlib
import threading
from typing import Annotated, Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vit_jax.data.opencv import cv2
from vit_jax.types import Count, Expect, Seed

FACES = (
  *('DejaVuSans', 'DejaVuSans-Bold', 'DejaVuSans-Oblique', 'DejaVuSansMono'),
  *('DejaVuSerif', 'DejaVuSerif-Bold', 'DejaVuSerif-Italic'),
  *('STIXGeneral', 'STIXGeneralItalic', 'STIXGeneralBol'),
)

# Letters, punctuation marks and symbols that all faces have, without numbers,
# look-alikes of digits and look-alikes of earlier characters. Written out so
# that labels do not depend on the versions of the fonts.
CHARACTERS = (
  '!"$%&\'()*+,./:;<=>?@ABCDEFGHIJKLMNPQRSTUVWXYZ[\\]^`abcdefghij'
  'kmnpqrtuy{}~¡¢£¤¥§¨©ª«¬®°±´µ¶¸º»¿ÀÆÇÈÌÍÎÏÑÒ×ØÙÝÞßàãåæçèëìíîï'
  'ðñòõ÷øùûüýþÿāĂĄąĆćĉċĎďđĕėĘęĜĝğġĢĤĥĨĩīĭĮįİĲĳĴĵĶķĸĹĺĻļľŀŁłńŅņŉ'
  'ŊŋōőŒœŔŕŖŗřŚśŝŞşšŢţŤťŮůŲųŴŵŸŹźżƀƈƐƒƕƚƛƞƠơƪƫƭƯưƺƾǀǁǂǰǼǽǾǿȷɐɑɒ'
  'ɔɕɖɗɘəɚɛɝɞɟɠɣɤɥɧɨɩɫɬɭɮɯɰɱɲɳɵɷɸɹɺɻɽɾɿʁʂʃʄʅʆʇʈʉʊʋʌʍʎʏʐʑʒʓʔʕʖʗʘ'
  'ʚʛʝʞʟʠʣʤʥʦʧʨʱʷʻˁˆˇ˘˛˜˝ˠˣ΅ΆΈΉΊΌΎΏΐΓΔΘΞΣΦΨΩάέήίΰαβγδζικλνξπρςσ'
  'τυφχψωϊϋύώϐϑϒϖϘϙϚϛϝϞϟϠϡϰϱϵ϶ЂЃЉЊЋЌЎЏДЖЙКЛУЧШЩЪЫЬЭЮЯбдзиймфцщю'
  'ђѓљћќўџѢѣҐґẅỳ‛“”‟†‡…‰‹›€ℎ№™∂␣┌┐└┘├┤┬┴┼╒╓╕╖╘╙╛╜╞╟╡╢╤╥╦╧╨╩╪╫╬ﬁ'
)

_FONT_PX = 96  # size at which characters are rendered
_BANK_PX = 64  # side of a distance field
_GLYPH_PX = 44  # longer side of a glyph in it
_REACH_PX = 12.0  # distances are clipped here: 127 steps of uint8
_FONT_LOCK = threading.Lock()  # FreeType's faces are not thread-safe


@dataclasses.dataclass(kw_only=True, eq=False)
class Glyphs:
  """Unlimited images of letters and symbols: bright strokes on black.

  Image i, uint8 [image_size, image_size, 1], depends on (seed, i) only. Each
  block of `num_classes` images contains every class once, in an order from the
  seed. Between versions of FreeType or OpenCV, last bits of pixels may differ.

  Attributes:
    seed: use another seed for other images, e.g. for validation.
    num_classes: the first ones of CHARACTERS.
  """

  image_size: Annotated[int, Expect(lambda n: n >= 8, 'at least 8')] = 24
  num_examples: Count = 2**20
  seed: Seed = 0
  num_classes: Annotated[
    int,
    Expect(lambda n: 2 <= n <= len(CHARACTERS), f'in 2 to {len(CHARACTERS)}'),
  ] = len(CHARACTERS)

  def __post_init__(self) -> None:
    self.class_names = list(CHARACTERS[: self.num_classes])
    rng = np.random.default_rng(self.seed)
    self._labels = rng.permutation(self.num_classes).tolist()

  def __len__(self) -> int:
    return self.num_examples

  def __getitem__(self, index: int) -> dict[str, Any]:
    index = range(len(self))[index]
    label = self._labels[index % self.num_classes]
    rng = np.random.Generator(np.random.PCG64((self.seed, index)))
    image, face = _draw(label, rng, self.image_size)
    return {'image': image[..., None], 'label': label, 'font': FACES[face]}

  def describe(self, index: int) -> str:
    """Return the character, and the seed and index that determine the image."""
    character = CHARACTERS[self._labels[index % self.num_classes]]
    return f'glyph {character!r} (seed {self.seed}, index {index})'


def _draw(label, rng, size):
  """Return an image of a class, uint8 [size, size], and its index of FACES."""
  u = rng.random(16).tolist()
  face = int(u[0] * len(FACES))
  field, half_stroke, extent = _distance_field(label, face)
  maps, scale = _sample_map(u[1:8], extent, size)
  # A 4x4 grid of shifts, in pixels of the bank, interpolated smoothly.
  bend = rng.standard_normal((4, 4, 2), dtype=np.float32)
  bend = cv2.resize(bend, (size, size), interpolation=cv2.INTER_CUBIC)
  maps += bend * (3.8 * u[8])
  distance = cv2.remap(
    field, maps, None, cv2.INTER_LINEAR, borderMode=cv2.BORDER_CONSTANT
  ).astype(np.float32)
  low = u[9] < 0.6
  # Stroke and blur in output pixels: level = clip(distance / blur + 1/2).
  half = half_stroke * scale
  thicken = ((0.065 if low else 0.035) + 0.06 * u[10]) * size - half
  thicken = min(max(thicken, -0.4 * half), 0.8 * _REACH_PX * scale)
  blur = (0.04 if low else 0.04 + 0.08 * u[11] * u[11]) * size
  image = distance * (_REACH_PX * scale / (127 * blur))
  image += (thicken - 128 / 127 * _REACH_PX * scale) / blur + 0.5
  np.clip(image, 0, 1, out=image)
  if low:
    image = _through_low_resolution(image, u[12])
  image *= 255 * (1 - 0.3 * u[13] ** 3)
  image += rng.standard_normal((size, size), np.float32) * (20 * u[14] ** 3)
  return np.rint(np.clip(image, 0, 255)).astype(np.uint8), face


def _sample_map(u, extent, size):
  """Return (map, scale) from pixels of the image to a distance field.

  The map is float32 [size, size, 2]. `u` are 7 uniform random numbers, `extent`
  is the (width, height) of the glyph in the field.
  """
  width, height = extent
  stretch = np.exp(0.7 * u[0] - 0.25)  # tall more often than wide
  scale_y = (0.72 + 0.33 * u[1]) * size / max(height, width / stretch**0.5)
  scale_x = min(scale_y / stretch, size / width)
  angle = 0.4 * (u[2] - 0.5)
  slant = 0.8 * (u[3] - 0.5) * abs(2 * u[4] - 1)
  cos, sin = np.cos(angle), np.sin(angle)
  # Inverse of rotate(angle) . shear(slant) . scale, from centre to centre.
  linear = np.array([[cos, sin], [-sin, cos]])
  linear = np.array([[1, slant], [0, 1]]) @ linear
  linear /= np.array([[scale_x], [scale_y]])
  # The shift keeps the glyph inside the image, up to a small margin.
  room = np.array([size - scale_x * width, size - scale_y * height])
  shift = (np.array(u[5:7]) - 0.5) * (np.maximum(room, 0) * 0.5 + 0.08 * size)
  base = (size - 1) / 2 + shift
  offset = (_BANK_PX - 1) / 2 - linear @ base
  maps = _grid(size) @ linear.T.astype(np.float32) + offset.astype(np.float32)
  return maps, float(np.sqrt(scale_x * scale_y))


def _through_low_resolution(image, u):
  """Average to 7 to 12 pixels a side, mostly 8, and interpolate back.

  The scans of the digits count ink in 4x4 cells, 0 to 16, in the same way.
  """
  size = image.shape[0]
  small = min(size, 8 if u < 0.6 else 7 + int((u - 0.6) / 0.4 * 6))
  image = cv2.resize(image, (small, small), interpolation=cv2.INTER_AREA)
  image = np.rint(image * 16) / 16
  how = cv2.INTER_LINEAR if int(u * 1e6) % 2 else cv2.INTER_CUBIC
  return cv2.resize(image, (size, size), interpolation=how)


@functools.lru_cache(maxsize=8)
def _grid(size):
  x, y = np.meshgrid(np.arange(size), np.arange(size))
  return np.stack([x, y], axis=-1).astype(np.float32)


@functools.cache
def _distance_field(label, face):
  """Return (signed distance field, half stroke width, glyph (width, height)).

  The field is uint8 [64, 64], 128 at the outline. Units are its pixels.
  """
  mask = _ink(CHARACTERS[label], _font(FACES[face]))
  # At twice the size of the field, for outlines between its pixels.
  ratio = 2 * _GLYPH_PX / max(mask.shape)
  height, width = (max(2, round(n * ratio)) for n in mask.shape)
  how = cv2.INTER_AREA if ratio < 1 else cv2.INTER_LINEAR
  mask = cv2.resize(mask, (width, height), interpolation=how)
  y, x = _BANK_PX - height // 2, _BANK_PX - width // 2
  ink = np.zeros((2 * _BANK_PX, 2 * _BANK_PX), np.uint8)
  ink[y : y + height, x : x + width] = mask > 127
  inside = cv2.distanceTransform(ink, cv2.DIST_L2, 3)
  field = inside - cv2.distanceTransform(1 - ink, cv2.DIST_L2, 3)
  field = cv2.resize(field, (_BANK_PX, _BANK_PX), interpolation=cv2.INTER_AREA)
  levels = np.clip(field / (2 * _REACH_PX), -1, 1) * 127 + 128
  # Over a bar of half width h the distance to the outline is h/2 on average.
  half_stroke = np.float64(inside.sum() / max(int(ink.sum()), 1))
  extent = np.array([width / 2, height / 2])
  return np.rint(levels).astype(np.uint8), half_stroke, extent


@functools.cache
def _font(face):
  # Its files only: the import would take as long as all others together.
  folder = pathlib.Path(importlib.util.find_spec('matplotlib').origin).parent
  path = folder / 'mpl-data/fonts/ttf' / f'{face}.ttf'
  layout = ImageFont.Layout.BASIC
  return ImageFont.truetype(path, _FONT_PX, layout_engine=layout)


def _ink(character, font):
  """Return the ink of a glyph, cropped to its bounding box: uint8 [h, w]."""
  with _FONT_LOCK:
    left, top, right, bottom = font.getbbox(character)
    image = Image.new('L', (right - left + 2, bottom - top + 2))
    ImageDraw.Draw(image).text((1 - left, 1 - top), character, 255, font=font)
  box = image.point(lambda level: 255 if level > 127 else 0).getbbox()
  return np.asarray(image.crop(box))

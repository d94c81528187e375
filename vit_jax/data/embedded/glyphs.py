"""Embedded glyphs: letters and symbols of free fonts, drawn as they are read.

Made for pre-training without a download: the classes hold no digit and nothing
that looks like one, yet the strokes look like the scans of `digits.Digits`
(thick, deformed, often at the resolution of 8x8 pixels).

How an image comes about: each character is rendered once per face into a bank
of signed distance fields. One `cv2.remap` samples a field through a random
affine and elastic map at the image's own resolution; adding a number to the
distances then sets the stroke, and the slope of the step sets the blur.
"""

import functools

import cv2
import numpy as np

from vit_jax.data import arguments
from vit_jax.data.embedded import glyph_characters
from vit_jax.data.embedded.glyph_characters import CHARACTERS, FACES

_BANK_PX = 64  # side of a distance field
_GLYPH_PX = 44  # longer side of a glyph in it
_REACH_PX = 12.0  # distances are clipped here: 127 steps of uint8


class Glyphs:
  """Unlimited images of letters and symbols: bright strokes on black.

  Image i is drawn from (seed, i) alone: face, size, aspect, slant, rotation,
  shift, elastic deformation, stroke, blur or low resolution, contrast, noise.
  Every `num_classes` consecutive images hold each class once, in an order that
  the seed chooses. Pixels may differ between FreeType or OpenCV versions in
  the last bits; labels do not.

  713 letters, punctuation marks and symbols have a glyph in all ten `FACES`.
  3 go because they are numbers in some sense (`is_number` of
  `glyph_characters`), and those that look like a digit or like an earlier
  character in most faces (`select_characters`, there): 480 classes remain.

  Args:
    image_size: side in pixels, at least 8.
    num_examples: what `len` says. Any number: no image is stored.
    seed: another seed is another set of images, e.g. for validation.
    channels: 1, or 3 equal ones.
    low_resolution: share of images that pass through 7 to 12 pixels a side.
    deformation: factor on the elastic deformation; 0 turns it off.
    noise: factor on the pixel noise; 0 turns it off.
  """

  num_classes = len(CHARACTERS)

  def __init__(
    self,
    *,
    image_size=24,
    num_examples=2**20,
    seed=0,
    channels=1,
    low_resolution=0.6,
    deformation=1.0,
    noise=1.0,
  ):
    arguments.check_int('image_size', image_size, 8)
    arguments.check_int('num_examples', num_examples, 1)
    arguments.check_int('seed', seed, 0)
    if channels not in (1, 3):
      raise ValueError(f'channels is {channels!r}; give 1 (grey) or 3.')
    if not 0 <= low_resolution <= 1:
      raise ValueError(
        f'low_resolution is {low_resolution}; it is a share, give 0 to 1.'
      )
    if deformation < 0 or noise < 0:
      raise ValueError(
        f'deformation is {deformation} and noise {noise}; both are factors:'
        ' give 0 (off) or more.'
      )
    self.class_names = list(CHARACTERS)
    self.image_size = image_size
    self.num_examples = num_examples
    self.seed = seed
    self.channels = channels
    self.low_resolution = low_resolution
    self.deformation = deformation
    self.noise = noise
    order = np.random.default_rng(seed).permutation(self.num_classes)
    self._labels = order.tolist()

  def __len__(self):
    return self.num_examples

  def __getitem__(self, index):
    index = arguments.check_index(index, self.num_examples)
    label = self._labels[index % self.num_classes]
    rng = np.random.Generator(np.random.PCG64((self.seed, index)))
    image = self._draw(label, rng)[..., None]
    if self.channels == 3:
      image = np.repeat(image, 3, axis=-1)
    return {'image': image, 'label': label}

  def describe(self, index):
    """The character and the arguments that example `index` is drawn from."""
    label = self._labels[index % self.num_classes]
    return (
      f'glyph {CHARACTERS[label]!r} (class {label}, seed {self.seed},'
      f' index {index})'
    )

  def _draw(self, label, rng):
    """One image of a class: uint8 [image_size, image_size]."""
    size = self.image_size
    u = rng.random(16).tolist()
    face = int(u[0] * len(FACES))
    fields, half_strokes, extents = _bank()
    field = fields[label, face]
    maps, scale = _sample_map(u[1:8], extents[label, face], size)
    if self.deformation:
      # A 4x4 grid of shifts, in pixels of the bank, interpolated smoothly.
      bend = cv2.resize(
        rng.standard_normal((4, 4, 2), dtype=np.float32),
        (size, size),
        interpolation=cv2.INTER_CUBIC,
      )
      maps += bend * (3.8 * u[8] * self.deformation)
    distance = cv2.remap(
      field, maps, None, cv2.INTER_LINEAR, borderMode=cv2.BORDER_CONSTANT
    ).astype(np.float32)
    low = u[9] < self.low_resolution
    # Stroke and blur in output pixels: level = clip(distance / blur + 1/2).
    half = half_strokes[label, face] * scale
    thicken = ((0.065 if low else 0.035) + 0.06 * u[10]) * size - half
    thicken = min(max(thicken, -0.4 * half), 0.8 * _REACH_PX * scale)
    blur = (0.04 if low else 0.04 + 0.08 * u[11] * u[11]) * size
    image = distance * (_REACH_PX * scale / (127 * blur))
    image += (thicken - 128 / 127 * _REACH_PX * scale) / blur + 0.5
    np.clip(image, 0, 1, out=image)
    if low:
      image = _through_low_resolution(image, u[12])
    image *= 255 * (1 - 0.3 * u[13] ** 3)
    if self.noise:
      sigma = 20 * self.noise * u[14] ** 3
      image += rng.standard_normal((size, size), dtype=np.float32) * sigma
    np.clip(image, 0, 255, out=image)
    return np.rint(image).astype(np.uint8)


def _sample_map(u, extent, size):
  """Where each pixel looks in the bank: float32 [size, size, 2], and px/px.

  u: 7 uniform numbers; extent: width and height of the glyph in the bank.
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
  # The room that the glyph leaves bounds the shift; a little runs over.
  room = np.array([size - scale_x * width, size - scale_y * height])
  shift = (np.array(u[5:7]) - 0.5) * (np.maximum(room, 0) * 0.5 + 0.08 * size)
  base = (size - 1) / 2 + shift
  offset = (_BANK_PX - 1) / 2 - linear @ base
  maps = _grid(size) @ linear.T.astype(np.float32) + offset.astype(np.float32)
  return maps, float(np.sqrt(scale_x * scale_y))


def _through_low_resolution(image, u):
  """Averages cells to 8x8, else 7 to 12 pixels a side, and interpolates back.

  The scans of the digits were made so: counts of ink over 4x4 cells, 0 to 16.
  """
  size = image.shape[0]
  small = 8 if u < 0.6 else 7 + int((u - 0.6) / 0.4 * 6)
  small = min(small, size)
  image = cv2.resize(image, (small, small), interpolation=cv2.INTER_AREA)
  image = np.rint(image * 16) / 16
  how = cv2.INTER_LINEAR if int(u * 1e6) % 2 else cv2.INTER_CUBIC
  return cv2.resize(image, (size, size), interpolation=how)


@functools.lru_cache(maxsize=8)
def _grid(size):
  x, y = np.meshgrid(np.arange(size), np.arange(size))
  return np.stack([x, y], axis=-1).astype(np.float32)


@functools.lru_cache(maxsize=1)
def _bank():
  """Distance fields of all classes and faces, made once a process.

  Returns uint8 [K, faces, 64, 64] (128 at the outline, more inside), float
  [K, faces] half widths of the strokes and float [K, faces, 2] (width, height)
  of the glyphs, both in pixels of the bank.
  """
  shape = (len(CHARACTERS), len(FACES))
  fields = np.empty((*shape, _BANK_PX, _BANK_PX), np.uint8)
  half_strokes = np.empty(shape)
  extents = np.empty((*shape, 2))
  for f, face in enumerate(FACES):
    font = glyph_characters.font_of(face)
    for k, character in enumerate(CHARACTERS):
      fields[k, f], half_strokes[k, f], extents[k, f] = _distance_field(
        glyph_characters.render(character, font)
      )
  return fields, half_strokes, extents


def _distance_field(mask):
  """uint8 distance field, half stroke and (width, height) of a glyph."""
  # At twice the size of the bank, for outlines between its pixels.
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
  half_stroke = float(inside.sum() / max(int(ink.sum()), 1))
  return np.rint(levels).astype(np.uint8), half_stroke, (width / 2, height / 2)

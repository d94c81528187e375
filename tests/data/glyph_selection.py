"""Selection of the characters of `glyphs.Glyphs`.

713 letters, punctuation marks and symbols have a glyph in all ten faces. Three
are dropped because they are numbers, and those that look like a digit or like
an earlier character in most faces: 480 remain.

    python tests/data/glyph_selection.py
"""

import unicodedata

import cv2
import numpy as np
from matplotlib import ft2font

from vit_jax.data.embedded import glyphs
from vit_jax.data.embedded.glyphs import FACES

_NUMBER_WORDS = frozenset(
  (
    *('ZERO', 'ONE', 'TWO', 'THREE', 'FOUR', 'FIVE', 'SIX', 'SEVEN', 'EIGHT'),
    *('NINE', 'TEN', 'DIGIT', 'NUMBER', 'NUMERAL', 'FRACTION'),
  )
)


def is_number(character):
  """Return whether a character is, names or decomposes to a number.

  Fractions, circled and raised digits, Roman numerals, and letters such as
  U+01BB LATIN LETTER TWO WITH STROKE are numbers.
  """
  parts = character + unicodedata.normalize('NFKD', character)
  return any(
    unicodedata.category(c)[0] == 'N'
    or unicodedata.numeric(c, None) is not None
    for c in parts
  ) or not _NUMBER_WORDS.isdisjoint(unicodedata.name(character, '').split())


def select_characters(threshold=0.21):
  """Return `glyphs.CHARACTERS`, computed from the fonts, by code point.

  A character is dropped if in 6 of the 10 faces it differs from a digit, or
  from an earlier character, by less than `threshold`: the mean absolute
  difference of the glyphs, stretched to one box and blurred, divided by their
  mean ink. So O is dropped (0), and Greek Alpha (Latin A).
  """
  fonts = [glyphs._font(face) for face in FACES]
  common = set.intersection(
    *(set(ft2font.FT2Font(font.path).get_charmap()) for font in fonts)
  )
  pool = [chr(code) for code in sorted(common)]
  pool = [c for c in pool if unicodedata.category(c)[0] in 'LSP']
  pool = [c for c in pool if not is_number(c)]
  taken, pictures = [], []
  for character in [*'0123456789', *pool]:
    picture = shape_pictures(character, fonts)
    if pictures and nearness(np.stack(pictures), picture).min() < threshold:
      continue
    taken.append(character)
    pictures.append(picture)
  return ''.join(c for c in taken if c not in '0123456789')


def shape_pictures(character, fonts):
  """Return the stretched, blurred glyphs: float32 [faces, 48 * 48]."""
  pictures = []
  for font in fonts:
    mask = glyphs._render(character, font).astype(np.float32) / 255
    mask = cv2.resize(mask, (48, 48), interpolation=cv2.INTER_AREA)
    pictures.append(cv2.GaussianBlur(mask, (0, 0), 1.0).ravel())
  return np.stack(pictures)


def nearness(pictures, picture):
  """Return the sixth smallest of the ten differences between faces.

  Args:
    pictures: [N, faces, pixels].
    picture: [faces, pixels].

  Returns:
    [N].
  """
  ink = (pictures.sum(2) + picture.sum(1)[None]) / 2
  difference = np.abs(pictures - picture[None]).sum(2) / ink
  return np.sort(difference, axis=1)[:, 5]


if __name__ == '__main__':
  print(select_characters())

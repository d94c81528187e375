"""The characters that `glyphs.Glyphs` draws, and how they were chosen."""

import os
import unicodedata

import cv2
import matplotlib
import numpy as np
from matplotlib import ft2font
from PIL import Image, ImageDraw, ImageFont

FACES = (
  'DejaVuSans',
  'DejaVuSans-Bold',
  'DejaVuSans-Oblique',
  'DejaVuSansMono',
  'DejaVuSerif',
  'DejaVuSerif-Bold',
  'DejaVuSerif-Italic',
  'STIXGeneral',
  'STIXGeneralItalic',
  'STIXGeneralBol',
)

# What `select_characters` found; written out so that labels and their number
# do not depend on the FreeType or font version of the machine.
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

_NUMBER_WORDS = frozenset(
  (
    *('ZERO', 'ONE', 'TWO', 'THREE', 'FOUR', 'FIVE', 'SIX', 'SEVEN', 'EIGHT'),
    *('NINE', 'TEN', 'DIGIT', 'NUMBER', 'NUMERAL', 'FRACTION'),
  )
)
_FONT_PX = 96


def font_of(face):
  folder = os.path.join(matplotlib.get_data_path(), 'fonts', 'ttf')
  path = os.path.join(folder, f'{face}.ttf')
  if not os.path.exists(path):
    raise FileNotFoundError(
      f'{path} is not there: this installation of matplotlib came without its'
      ' fonts, which the glyphs are drawn from; reinstall it by pip.'
    )
  return ImageFont.truetype(
    path, _FONT_PX, layout_engine=ImageFont.Layout.BASIC
  )


def render(character, font):
  """The glyph's ink cut to its bounding box: uint8 [h, w]."""
  left, top, right, bottom = font.getbbox(character)
  image = Image.new('L', (right - left + 2, bottom - top + 2))
  ImageDraw.Draw(image).text((1 - left, 1 - top), character, 255, font=font)
  mask = np.asarray(image)
  ink = mask > 127
  rows, columns = np.flatnonzero(ink.any(1)), np.flatnonzero(ink.any(0))
  return mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def is_number(character):
  """Whether a character is, names or decomposes to a digit or a number.

  Fractions, circled and raised digits, Roman numerals, and letters such as
  U+01BB LATIN LETTER TWO WITH STROKE are numbers in this sense.
  """
  parts = character + unicodedata.normalize('NFKD', character)
  return any(
    unicodedata.category(c)[0] == 'N'
    or unicodedata.numeric(c, None) is not None
    for c in parts
  ) or not _NUMBER_WORDS.isdisjoint(unicodedata.name(character, '').split())


def select_characters(threshold=0.21):
  """Recomputes `CHARACTERS` from the fonts, in order of code points.

  A character goes when in 6 of the 10 faces it differs from a digit, or from
  one already taken, by less than `threshold`: the mean absolute difference of
  the glyphs, stretched to one box and blurred, over their mean ink. So O goes
  for 0, and of Latin A and Greek Alpha the first stays.
  """
  fonts = [font_of(face) for face in FACES]
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
  """What `select_characters` compares: float32 [faces, 48 * 48], 0 to 1."""
  pictures = []
  for font in fonts:
    mask = render(character, font).astype(np.float32) / 255
    mask = cv2.resize(mask, (48, 48), interpolation=cv2.INTER_AREA)
    pictures.append(cv2.GaussianBlur(mask, (0, 0), 1.0).ravel())
  return np.stack(pictures)


def nearness(pictures, picture):
  """The sixth smallest of ten faces' differences: [N, F, P], [F, P] -> [N]."""
  ink = (pictures.sum(2) + picture.sum(1)[None]) / 2
  difference = np.abs(pictures - picture[None]).sum(2) / ink
  return np.sort(difference, axis=1)[:, 5]

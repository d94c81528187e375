"""Colour pictures to try the commands of the README without a download.

python -m vit_jax.tools.samples DIR [--table | --masks]

Draws DIR/CLASS/*, 40 pictures in each of 6 classes: three shapes and three
patterns, of several sizes, proportions and file formats. With --table, draws
DIR/*.png of one to four shapes, and DIR/table.csv with a column of 0 and 1 for
each shape, shapes (circle|star), count, size (of the largest, in percent of the
picture), and group (of four pictures with the same colours).

With --masks, cuts photographs of scikit-image: DIR/SPLIT/images/*.jpg and
DIR/SPLIT/masks/*.png for train and test, and DIR/classes.txt. Half of the
pictures have blobs of three materials, which differ in texture; the others have
three shapes cut from any photograph, which differ only in outline. Train and
test have different halves of the photographs. 255 is void.
"""

import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from vit_jax.io import terminal
from vit_jax.io.files import write_csv
from vit_jax.tools import parsers
from vit_jax.types import UserError

CLASSES = ('checks', 'circle', 'rings', 'star', 'stripes', 'triangle')
PER_CLASS, IN_TABLE = 40, 240
SHAPES = ('circle', 'star', 'triangle')
TABLE = ('image', *SHAPES, 'shapes', 'count', 'size', 'group')
MASKED = {'train': 120, 'test': 60}
MATERIALS = ('brick', 'grass', 'gravel')
MASK_CLASSES = ('background', *MATERIALS, *SHAPES)
SCENES = ('astronaut', 'chelsea', 'coffee', 'hubble_deep_field', 'rocket')
_ENDINGS = ('jpg', 'jpg', 'png', 'webp')


def draw(name: str, rng: np.random.Generator) -> np.ndarray:
  """Return a picture of one of CLASSES: uint8 [H, W, 3], 96 to 256 pixels."""
  height, width = rng.integers(96, 257, size=2)
  side = min(height, width)
  y, x = np.mgrid[:height, :width] / side
  y, x = (axis - axis.mean() - rng.uniform(-0.15, 0.15) for axis in (y, x))
  turn = np.exp(1j * rng.uniform(0, 2 * np.pi))
  place = (x + 1j * y) * turn / rng.uniform(0.22, 0.4)
  distance = _distance(name, place, 2 * np.pi * rng.uniform(0.6, 1.2))
  return _coloured(distance * side / 8, x, y, _colours(rng), rng)


def draw_several(i: int) -> tuple[np.ndarray, list[Any]]:
  """Return (picture of shapes in its quarters, its row of TABLE)."""
  rng, of_group = (np.random.default_rng([6, x]) for x in (i, i // 4))
  y, x = np.mgrid[-0.5:0.5:128j, -0.5:0.5:128j]
  count = rng.integers(1, 5)
  names, radii = rng.choice(SHAPES, count), rng.uniform(0.08, 0.2, count)
  shift = rng.uniform(-1, 1, (count, 2)) @ [1, 1j] * (0.25 - 1.2 * radii)
  middle = shift + (1 + 1j) / 4 * 1j ** rng.permutation(4)[:count]
  turn = np.exp(1j * rng.uniform(0, 7, count)) / radii
  places = (x + 1j * y - middle[:, None, None]) * turn[:, None, None]
  inside = 8 * np.max([*map(_distance, names, places)], axis=0)
  row = [f'{i:03}.png', *(int(x in names) for x in SHAPES)]
  row += ['|'.join(sorted({*names})), count, f'{200 * max(radii):.1f}', i // 4]
  return _coloured(inside, x, y, _colours(of_group), rng), row


def draw_masked(split: str, i: int) -> tuple[np.ndarray, np.ndarray]:
  """Return (picture of two or three parts of photographs, its mask).

  Both are uint8, [H, W, 3] and [H, W] of 224 to 320 pixels. Light and contrast
  of each part are random. A line of one pixel around the parts is void (255).
  """
  rng = np.random.default_rng([7, i, split == 'test'])
  height, width = rng.integers(224, 321, size=2)
  y, x = np.mgrid[:height, :width] / min(height, width)
  image = _photograph(rng.choice(SCENES), split, (height, width), rng)
  mask = np.zeros((height, width), np.uint8)
  names = rng.permutation(SHAPES if i % 2 else MATERIALS)
  for name in names[: rng.integers(2, 4)]:
    radius = rng.uniform(0.17, 0.3)
    middle = (rng.uniform(0.1, axis.max() - 0.1) for axis in (x, y))
    place = (x + 1j * y - complex(*middle)) * np.exp(1j * rng.uniform(0, 7))
    if i % 2:
      inside = _distance(name, place / radius) > 0
    else:
      angles = np.multiply.outer(range(2, 5), np.angle(place))
      waves = np.tensordot(rng.normal(0, 0.15, 3), np.cos(angles), 1)
      inside = np.abs(place) < radius * (0.8 + waves)
    photo = rng.choice(SCENES) if i % 2 else name
    image[inside] = _photograph(photo, split, (height, width), rng)[inside]
    mask[inside] = MASK_CLASSES.index(name)
  edge = np.diff(mask, axis=0, prepend=mask[:1]) != 0
  edge |= np.diff(mask, axis=1, prepend=mask[:, :1]) != 0
  return image, np.where(edge, np.uint8(255), mask)


@functools.cache
def _opened(name):
  try:
    from skimage import data
  except ImportError as error:
    raise UserError("--masks needs pip install -e '.[elpv]'.") from error
  return Image.fromarray(getattr(data, name)()).convert('RGB')


def _photograph(name, split, size, rng):
  """Return a random part of a half of a photograph: uint8 [H, W, 3]."""
  photo = _opened(name)
  width, height = photo.size
  w, h = width / 2 * rng.uniform(0.5, 0.95), height * rng.uniform(0.5, 0.95)
  left = rng.uniform(0, width / 2 - w) + (split == 'test') * width / 2
  top = rng.uniform(0, height - h)
  box = left, top, left + w, top + h
  part = photo.resize(size[::-1], Image.Resampling.BICUBIC, box)
  light = np.asarray(part) * rng.uniform(0.6, 1, 3) + rng.uniform(-20, 60)
  return np.clip(light[:, :: rng.choice([-1, 1])], 0, 255).astype(np.uint8)


def _coloured(distance, x, y, colours, rng):
  """Return a picture of figures, in light and with noise."""
  inside, (first, second) = np.clip(distance + 0.5, 0, 1)[..., None], colours
  light = 1 + 0.25 * (rng.uniform(-1, 1) * x + rng.uniform(-1, 1) * y)
  image = (first * (1 - inside) + second * inside) * light[..., None]
  image += rng.normal(0, rng.uniform(2, 16), image.shape)
  return np.clip(image, 0, 255).astype(np.uint8)


def _distance(name, place, frequency=0.0):
  """Return a number per pixel that is positive inside of the figure."""
  x, y, radius = place.real, place.imag, np.abs(place)
  angle = np.angle(place)
  if name == 'circle':
    return 1 - radius
  if name == 'triangle':
    sides = (np.cos(angle - 2 * np.pi * k / 3) for k in range(3))
    return 0.6 - radius * np.max(list(sides), axis=0)
  if name == 'star':
    return 0.75 + 0.35 * np.cos(5 * angle) - radius
  if name == 'rings':
    return np.sin(frequency * radius)
  if name == 'stripes':
    return np.sin(frequency * x)
  return np.sin(frequency * x) * np.sin(frequency * y)


def _colours(rng):
  """Return two colours whose brightness differs clearly: float [2, 3]."""
  while True:
    colours = rng.uniform(0, 255, (2, 3))
    if abs(np.diff(colours.mean(axis=1))) > 60:
      return colours


@terminal.one_message()
def main(argv: Sequence[str] | None = None) -> None:
  parser = parsers.parser(__doc__, 'tools.samples DIR')
  parser.add_argument('folder', type=pathlib.Path)
  kind = parser.add_mutually_exclusive_group()
  kind.add_argument('--table', action='store_true', help='several shapes')
  kind.add_argument('--masks', action='store_true', help='classes of pixels')
  args = parser.parse_args(argv)
  folder, rows = args.folder, [list(TABLE)]
  if args.table:
    folder.mkdir(parents=True, exist_ok=True)
    for picture, row in map(draw_several, range(IN_TABLE)):
      Image.fromarray(picture).save(folder / row[0])
      rows.append(row)
    write_csv(folder / 'table.csv', rows)
    return print(f'{IN_TABLE} pictures and table.csv in {folder}')
  if args.masks:
    for split, count in MASKED.items():
      images, masks = folder / split / 'images', folder / split / 'masks'
      images.mkdir(parents=True, exist_ok=True)
      masks.mkdir(exist_ok=True)
      for i in range(count):
        image, mask = map(Image.fromarray, draw_masked(split, i))
        image.save(images / f'{i:03}.jpg', quality=92)
        mask.save(masks / f'{i:03}.png')
    (folder / 'classes.txt').write_text('\n'.join(MASK_CLASSES) + '\n')
    return print(f'{MASKED} pictures with masks in {folder}')
  for label, name in enumerate(CLASSES):
    (folder / name).mkdir(parents=True, exist_ok=True)
    for i in range(PER_CLASS):
      picture = Image.fromarray(draw(name, np.random.default_rng([label, i])))
      picture.save(folder / name / f'{i:02}.{_ENDINGS[i % len(_ENDINGS)]}')
  print(f'{len(CLASSES)} classes of {PER_CLASS} pictures in {folder}')


if __name__ == '__main__':
  main()

"""Colour pictures to try the commands of the README without a download.

python -m vit_jax.tools.samples DIR [--table]

Draws DIR/CLASS/*, 40 pictures in each of 6 classes: three shapes and three
patterns, of several sizes, proportions and file formats. With --table, draws
DIR/*.png of one to four shapes, and DIR/table.csv with a column of 0 and 1 for
each shape, shapes (circle|star), count, size (of the largest, in percent of the
picture), and group (of four pictures with the same colours).
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from vit_jax.io import terminal
from vit_jax.io.files import csv_line
from vit_jax.tools import parsers

CLASSES = ('checks', 'circle', 'rings', 'star', 'stripes', 'triangle')
PER_CLASS, IN_TABLE = 40, 240
SHAPES = ('circle', 'star', 'triangle')
TABLE = ('image', *SHAPES, 'shapes', 'count', 'size', 'group')
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
  parser.add_argument('--table', action='store_true', help='several shapes')
  args = parser.parse_args(argv)
  folder, rows = args.folder, [list(TABLE)]
  if args.table:
    folder.mkdir(parents=True, exist_ok=True)
    for picture, row in map(draw_several, range(IN_TABLE)):
      Image.fromarray(picture).save(folder / row[0])
      rows.append(row)
    (folder / 'table.csv').write_text(''.join(map(csv_line, rows)))
    return print(f'{IN_TABLE} pictures and table.csv in {folder}')
  for label, name in enumerate(CLASSES):
    (folder / name).mkdir(parents=True, exist_ok=True)
    for i in range(PER_CLASS):
      picture = Image.fromarray(draw(name, np.random.default_rng([label, i])))
      picture.save(folder / name / f'{i:02}.{_ENDINGS[i % len(_ENDINGS)]}')
  print(f'{len(CLASSES)} classes of {PER_CLASS} pictures in {folder}')


if __name__ == '__main__':
  main()

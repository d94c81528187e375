"""Colour pictures to try the commands of the README without a download.

python -m vit_jax.tools.samples DIR

Draws DIR/CLASS/*, 40 pictures in each of 6 classes: three shapes and three
patterns, of several sizes, proportions and file formats.
"""

import pathlib
from collections.abc import Sequence

import numpy as np
from PIL import Image

from vit_jax.io import terminal
from vit_jax.tools import parsers

CLASSES = ('checks', 'circle', 'rings', 'star', 'stripes', 'triangle')
PER_CLASS = 40
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
  inside = np.clip(distance * side / 8 + 0.5, 0, 1)[..., None]
  first, second = _colours(rng)
  light = 1 + 0.25 * (rng.uniform(-1, 1) * x + rng.uniform(-1, 1) * y)
  image = (first * (1 - inside) + second * inside) * light[..., None]
  image += rng.normal(0, rng.uniform(2, 16), image.shape)
  return np.clip(image, 0, 255).astype(np.uint8)


def _distance(name, place, frequency):
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
  folder = parser.parse_args(argv).folder
  for label, name in enumerate(CLASSES):
    (folder / name).mkdir(parents=True, exist_ok=True)
    for i in range(PER_CLASS):
      picture = Image.fromarray(draw(name, np.random.default_rng([label, i])))
      picture.save(folder / name / f'{i:02}.{_ENDINGS[i % len(_ENDINGS)]}')
  print(f'{len(CLASSES)} classes of {PER_CLASS} pictures in {folder}')


if __name__ == '__main__':
  main()

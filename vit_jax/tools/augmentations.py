r"""Draw what augmentation does to an image, at several strengths.

  python -m vit_jax.tools.augmentations --output=FILE.png
  python -m vit_jax.tools.augmentations --output=FILE.png IMAGE

Each row is an operation. Three columns each show RandAugment as of AugReg at
magnitudes 5, 10 and 20, as of DeiT ('rand-m9-mstd0.5-inc1') at magnitudes 3, 6
and 9, and TrivialAugment at a third, two thirds and all of its strength. Below
are 3-Augment, colour jitter, random erasing and the simple random crop, at
three strengths and with three seeds. Without IMAGE a photograph of scikit-learn
is drawn.

Every row has one seed, so a random direction is the same in its columns.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath

from vit_jax import terminal
from vit_jax.data import augment, image_files, operations, transforms
from vit_jax.files import PathLike
from vit_jax.reports import pictures
from vit_jax.tools import arguments, outputs, predict

_MAGNITUDES = (5, 10, 20)  # of AugReg's RandAugment
_INCREASING = (3, 6, 9)  # of timm's
_STRENGTHS = (1 / 3, 2 / 3, 1.0)  # of TrivialAugment
_GAP_PX = 4
_SEED = 2
Row = tuple[str, list[np.ndarray | None]]


def main(argv: Sequence[str] | None = None) -> None:
  args = parser().parse_args(argv)
  with terminal.one_message():
    _run(args)


def parser() -> argparse.ArgumentParser:
  parser = arguments.plain_parser(
    __doc__, 'augmentations --output=FILE [IMAGE]'
  )
  add = parser.add_argument
  add('image', nargs='?', help='file; local or gs://...')
  add('--output', required=True, metavar='FILE', help='.png or .pdf')
  arguments.add_counts(
    parser,
    image_size=(112, 'height and width of each cell in pixels'),
    **arguments.MAX_IMAGE_BYTES,
  )
  return parser


def of_policies(image: np.ndarray) -> list[Row]:
  """Return rows (operation, 9 images) of the policies; None: not in it.

  Args:
    image: uint8 [H, W, C].
  """
  names = dict.fromkeys(
    augment.RandAugment.names
    + augment.TimmRandAugment.names
    + augment.TrivialAugment.names
  )
  names.pop('Identity')
  rows = []
  for name in names:
    cells: list[np.ndarray | None] = [None] * 9
    for i in range(3):
      if name in augment.RandAugment.names:
        augreg = augment.RandAugment(1, _MAGNITUDES[i])
        cells[i] = augreg.apply(name, image, _rng())
      if name in augment.TimmRandAugment.names:
        deit = augment.TimmRandAugment(_INCREASING[i], 0)
        cells[3 + i] = deit.apply(name, image, _rng())
      if name in augment.TrivialAugment.names:
        trivial = augment.TrivialAugment()
        cells[6 + i] = trivial.apply(name, image, _rng(), _STRENGTHS[i])
    rows.append((name, cells))
  return rows


def of_others(image: np.ndarray) -> list[Row]:
  """Return rows (transform, 9 images) of the other transforms.

  Args:
    image: uint8 [H, W, C].
  """
  grey = [operations.grey(image)] + 2 * [None]
  solarized = [operations.solarize(image, x) for x in (192, 128, 64)]
  blurred = [operations.blur(image, x) for x in (0.5, 1, 2)]
  size = image.shape[:2]
  strengths: dict[str, list[Any]] = {
    'ColorJitter': [augment.ColorJitter(x, x, x) for x in (0.1, 0.3, 0.6)],
    'with hue': [augment.ColorJitter(0, 0, 0, x) for x in (0.1, 0.25, 0.5)],
    'RandomErasing': [
      augment.RandomErasing(1.0, (x, x), mode=mode)
      for x, mode in ((0.05, 'pixel'), (0.15, 'rand'), (0.3, 'const'))
    ],
    'SimpleRandomCrop': [
      transforms.SimpleRandomCrop(size, padding) for padding in (4, 12, 32)
    ],
  }
  rows: list[Row] = [('3-Augment', [*grey, *solarized, *blurred])]
  for name, each in strengths.items():
    seeds = range(_SEED, _SEED + 3)
    rows.append((name, [t(image, _rng(s)) for t in each for s in seeds]))
  return rows


def draw(image: np.ndarray, rows: Sequence[Row], path: PathLike) -> None:
  """Write rows of images as a figure, .png or .pdf.

  Args:
    image: the original, in the first column.
    rows: of `of_policies` and `of_others`.
    path: of the file.
  """
  height, width, channels = image.shape
  white = np.full((height + _GAP_PX, width + _GAP_PX, channels), 255, np.uint8)
  lines = []
  for _, cells in rows:
    line = [white.copy() for _ in range(len(cells) + 1)]
    for tile, cell in zip(line, [image, *cells]):
      if cell is not None:
        tile[:height, :width] = cell
    lines.append(np.hstack(line))
  sheet = np.vstack(lines)
  figure = pictures.canvas(*(side / 100 for side in sheet.shape[1::-1]))
  axes = figure.subplots()
  axes.imshow(sheet.squeeze(), cmap='gray', vmin=0, vmax=255)
  steps = (np.arange(n) + 0.5 for n in (len(rows), len(rows[0][1]) + 1))
  rows_at, columns_at = (x * side for x, side in zip(steps, white.shape))
  titles = ['original', *(f'AugReg {x}' for x in _MAGNITUDES)]
  titles += [f'DeiT {x}' for x in _INCREASING]
  titles += [f'Trivial {x:.2g}' for x in _STRENGTHS]
  axes.set_yticks(rows_at, [name for name, _ in rows])
  axes.set_xticks(columns_at, titles)
  axes.xaxis.tick_top()
  axes.tick_params(length=0)
  axes.spines[:].set_visible(False)
  pictures.save(figure, epath.Path(path))


def _rng(seed=_SEED):
  return np.random.default_rng(seed)


def _run(args):
  path = epath.Path(args.output).expanduser()
  if path.suffix not in ('.png', '.pdf'):
    raise ValueError(f'--output={args.output} must end with .png or .pdf.')
  outputs.check_folder(args.output)
  image = _read(args)
  rows = of_policies(image) + of_others(image)
  draw(image, rows, path)
  print(path)


def _read(args):
  """Return the image, cropped to a square."""
  size = args.image_size
  crop = (transforms.ResizeSmall(size), transforms.CentralCrop(size))
  if args.image is not None:
    paths = image_files.find([args.image])
    limit = args.max_image_bytes
    loaded = image_files.load(paths, crop, max_image_bytes=limit, num_workers=1)
    return next(predict.images_of(loaded))
  from sklearn.datasets import load_sample_image

  image = load_sample_image('flower.jpg')
  for transform in crop:
    image = transform(image, _rng())
  return np.ascontiguousarray(image)


if __name__ == '__main__':
  main()

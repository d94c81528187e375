r"""Draw what augmentation does to an image, at several strengths.

  python -m vit_jax.tools.augmentations --output=FILE.png
  python -m vit_jax.tools.augmentations --output=FILE.png IMAGE

Each row of the upper part is an operation, drawn at three strengths for each of
RandAugment as of AugReg (magnitudes 5, 10 and 20), RandAugment as of DeiT
('rand-m9-mstd0.5-inc1'; magnitudes 3, 6 and 9) and TrivialAugment (a third, two
thirds and all of its strength). A cell is empty if the policy does not have the
operation. The lower part has the other transforms, at three strengths and with
three seeds. Without IMAGE a photograph of scikit-learn is drawn.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath

from vit_jax.data import augment, image_files, operations, transforms
from vit_jax.reports import pictures
from vit_jax.runs import terminal
from vit_jax.runs.files import PathLike
from vit_jax.tools import arguments, parsers, predict

_MAGNITUDES = (5, 10, 20)  # of AugReg's RandAugment
_INCREASING = (3, 6, 9)  # of timm's
_STRENGTHS = (1 / 3, 2 / 3, 1.0)  # of TrivialAugment
_CELL_PX, _GAP_PX, _DPI = 112, 4, 100
_SEED = 2
Row = tuple[str, list[np.ndarray | None]]


def main(argv: Sequence[str] | None = None) -> None:
  args = parser().parse_args(argv)
  with terminal.one_message():
    _run(args)


def parser() -> argparse.ArgumentParser:
  parser = parsers.parser(__doc__, 'tools.augmentations --output=FILE [IMAGE]')
  add = parser.add_argument
  add('image', nargs='?', help='file; local or gs://...')
  add('--output', required=True, metavar='FILE', help='.png or .pdf')
  arguments.add_counts(
    parser,
    image_size=(224, 'height and width of the augmented image in pixels'),
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
  size = image.shape[:2]
  fixed = {
    'Grey': [operations.grey(image)],
    'Solarize 192, 128, 64': [
      operations.solarize(image, x) for x in (192, 128, 64)
    ],
    'Blur 0.5, 1, 2': [operations.blur(image, x) for x in (0.5, 1, 2)],
  }
  strengths: dict[str, list[Any]] = {
    'ColorJitter 0.1, 0.3, 0.6': [
      augment.ColorJitter(x, x, x) for x in (0.1, 0.3, 0.6)
    ],
    'hue 0.1, 0.25, 0.5': [
      augment.ColorJitter(0, 0, 0, x) for x in (0.1, 0.25, 0.5)
    ],
    **{
      f'RandomErasing {mode}\n0.05, 0.15, 0.3': [
        augment.RandomErasing(1.0, (x, x), mode=mode) for x in (0.05, 0.15, 0.3)
      ]
      for mode in ('pixel', 'rand', 'const')
    },
    'SimpleRandomCrop\npadding 4, 16, 64': [
      transforms.SimpleRandomCrop(size, padding) for padding in (4, 16, 64)
    ],
  }
  rows: list[Row] = []
  for name, cells in fixed.items():
    line: list[np.ndarray | None] = [None] * 9
    line[: 3 * len(cells) : 3] = cells
    rows.append((name, line))
  for name, each in strengths.items():
    seeds = range(_SEED, _SEED + 3)
    rows.append((name, [t(image, _rng(s)) for t in each for s in seeds]))
  return rows


def draw(
  image: np.ndarray, parts: Sequence[Sequence[Row]], path: PathLike
) -> None:
  """Write rows of images as a figure, .png or .pdf.

  Args:
    image: the original, in the first column.
    parts: the results of `of_policies` and `of_others`.
    path: of the file.
  """
  titles = (
    [f'AugReg {x}' for x in _MAGNITUDES]
    + [f'DeiT {x}' for x in _INCREASING]
    + [f'Trivial {x:.2g}' for x in _STRENGTHS],
    [f'{x} {i}' for x in ('weak', 'medium', 'strong') for i in (1, 2, 3)],
  )
  sheets = [_sheet(image, rows) for rows in parts]
  heights = [len(sheet) for sheet in sheets]
  inches = sheets[0].shape[1] / _DPI + 2, sum(heights) / _DPI + 1
  figure = pictures.canvas(*inches)
  panels = figure.subplots(2, height_ratios=heights)
  side = _CELL_PX + _GAP_PX
  for axes, sheet, rows, names in zip(panels, sheets, parts, titles):
    axes.imshow(sheet.squeeze(), cmap='gray', vmin=0, vmax=255)
    axes.set_yticks(_middles(len(rows)), [name for name, _ in rows])
    axes.set_xticks(_middles(len(names) + 1), ['original', *names])
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlim(0, side * (len(names) + 1) - _GAP_PX)
  pictures.save(figure, epath.Path(path), dpi=_DPI, tight=True)


def _middles(count):
  return (np.arange(count) + 0.5) * (_CELL_PX + _GAP_PX)


def _sheet(image, rows):
  """Return the rows as one image; the first column is the original."""
  side, channels = _CELL_PX + _GAP_PX, image.shape[2]
  columns = len(rows[0][1]) + 1
  sheet = np.full((len(rows) * side, columns * side, channels), 255, np.uint8)
  for i, (_, cells) in enumerate(rows):
    for j, cell in enumerate((image, *cells)):
      if cell is not None:
        small = transforms.resize(cell, _CELL_PX, 'area')
        y, x = i * side, j * side
        sheet[y : y + _CELL_PX, x : x + _CELL_PX] = small
  return sheet


def _rng(seed=_SEED):
  return np.random.default_rng(seed)


def _run(args):
  path = epath.Path(args.output).expanduser()
  if path.suffix not in ('.png', '.pdf'):
    raise ValueError(f'--output={args.output} must end with .png or .pdf.')
  image = _read(args)
  draw(image, (of_policies(image), of_others(image)), path)
  print(path)


def _read(args):
  """Return the image, cropped to a square."""
  size = args.image_size
  crop = (transforms.ResizeSmall(size), transforms.CentralCrop(size))
  if args.image is not None:
    paths = image_files.find([args.image])
    loaded = image_files.load(paths, crop)
    return next(predict.images_of(loaded))
  from sklearn.datasets import load_sample_image

  image = load_sample_image('flower.jpg')
  for transform in crop:
    image = transform(image, _rng())
  return np.ascontiguousarray(image)


if __name__ == '__main__':
  main()

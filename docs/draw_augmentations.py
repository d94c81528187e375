"""Draw augmentations.jpg: what augmentation does, at several strengths.

  python docs/draw_augmentations.py docs/augmentations.jpg [IMAGE]

Each row of the upper part is an operation, at three strengths for each of
RandAugment of AugReg (magnitudes 5, 10 and 20), RandAugment of DeiT
('rand-m9-mstd0.5-inc1'; magnitudes 3, 6 and 9) and TrivialAugment (a third, two
thirds and all of its strength). A cell is empty if the policy does not have the
operation. The lower part has the other transforms and mixing with another
image, at three strengths and with three seeds. Sharpness and blur show the
middle of the image only, enlarged. Without IMAGE photographs of scikit-learn
are drawn.
"""

import functools
import pathlib
import sys

import jax
import numpy as np
from PIL import ImageFilter, ImageOps

from vit_jax.data import augment, images, transforms
from vit_jax.objectives.mixing import Cutmix, Mixup
from vit_jax.reports import pictures

_MAGNITUDES = (5, 10, 20)  # of AugReg's RandAugment
_INCREASING = (3, 6, 9)  # of timm's
_STRENGTHS = (1 / 3, 2 / 3, 1.0)  # of TrivialAugment
_SIZE_PX, _CELL_PX, _GAP_PX, _DPI = 224, 112, 4, 100
_SEED = 2
_ENLARGED = 'Sharpness', 'Blur'
_CAPTION = (
  'Above: operations of the policies of AugReg (RandAugment), DeiT and '
  'TrivialAugment, each at three strengths.\nA cell is empty if a policy does '
  'not have it. Below: other transforms, and mixing with another image.\n'
  'Sharpness and blur show the middle of the image, enlarged.'
)


def of_policies(image):
  """Return {operation: 9 images} of the policies; None: not in it."""
  deit = [augment.TimmRandAugment(x, 0) for x in _INCREASING]
  augreg = [augment.RandAugment(1, x) for x in _MAGNITUDES]
  trivial = augment.TrivialAugment()
  names = dict.fromkeys((*augreg[0].names, *deit[0].names, *trivial.names))
  names.pop('Identity')
  rows = {}
  for name in names:
    cells = [_applied(policy, name, image) for policy in (*augreg, *deit)]
    cells += [_applied(trivial, name, image, x) for x in _STRENGTHS]
    rows[name] = cells
  return rows


def _applied(policy, name, image, *strength):
  """Return an image after an operation; None: the policy does not have it."""
  if name not in policy.names:
    return None
  return images.by_pillow(
    lambda x: policy.apply(name, x, _rng(), *strength), image
  )


def of_others(image, partner=None):
  """Return {transform: 9 images} of the other transforms, and of mixing.

  `partner` is mixed with the image; by default the image, upside down.
  """
  size = image.shape[:2]
  partner = image[::-1] if partner is None else partner
  fixed = {
    'Grey': [lambda x: x.convert('L').convert(x.mode)],
    'Solarize 192, 128, 64': [
      functools.partial(ImageOps.solarize, threshold=x) for x in (192, 128, 64)
    ],
    'Blur 0.5, 1, 2': [functools.partial(_blur, radius=x) for x in (0.5, 1, 2)],
  }
  drawn = {
    'ColorJitter 0.1, 0.3, 0.6': [
      augment.ColorJitter(x, x, x) for x in (0.1, 0.3, 0.6)
    ],
    'hue 0.1, 0.25, 0.5': [
      augment.ColorJitter(0, 0, 0, x) for x in (0.1, 0.25, 0.5)
    ],
    'RandomErasing\n0.05, 0.15, 0.3': [
      augment.RandomErasing(1.0, (x, x)) for x in (0.05, 0.15, 0.3)
    ],
    'SimpleRandomCrop\npadding 4, 16, 64': [
      transforms.SimpleRandomCrop(size, padding) for padding in (4, 16, 64)
    ],
  }
  rows = {}
  for name, operations in fixed.items():
    rows[name] = [None] * 9
    cells = [images.by_pillow(f, image) for f in operations]
    rows[name][: 3 * len(cells) : 3] = cells
  for name, each in drawn.items():
    seeds = range(_SEED, _SEED + 3)
    rows[name] = [t(image, _rng(seed)) for t in each for seed in seeds]
  for name, mixer in {'mixup': Mixup, 'CutMix': Cutmix}.items():
    mixers = [mixer(alpha) for alpha in (0.1, 0.4, 1.0)]
    rows[f'{name} 0.1, 0.4, 1'] = [
      _mixed(image, partner, m, seed) for m in mixers for seed in range(3)
    ]
  return rows


def _mixed(image, partner, mixer, seed):
  """Return an image mixed with its partner."""
  blend = mixer(jax.random.key(seed), image.shape[:2])
  top, left, bottom, right = np.asarray(blend.box)
  weight, out = float(blend.weight), image.astype(np.float32)
  box = np.s_[top:bottom, left:right]
  out[box] = weight * out[box] + (1 - weight) * partner[box]
  return np.round(out).astype(np.uint8)


def _blur(picture, radius):
  return picture.filter(ImageFilter.GaussianBlur(radius))


def draw(image, partner, path):
  """Write the figure of an image, uint8 [H, W, C], also mixed with another."""
  parts = of_policies(image), of_others(image, partner)
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
  for axes, sheet, rows, names in zip(panels, sheets, parts, titles):
    axes.imshow(sheet.squeeze(), cmap='gray', vmin=0, vmax=255)
    axes.set_yticks(_middles(len(rows)), list(rows))
    axes.set_xticks(_middles(len(names) + 1), ['original', *names])
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
  figure.supxlabel(_CAPTION, fontsize=11)
  figure.savefig(path, dpi=_DPI, bbox_inches='tight')


def _middles(count):
  return (np.arange(count) + 0.5) * (_CELL_PX + _GAP_PX)


def _sheet(image, rows):
  """Return the rows as one image; the first column is the original."""
  side, channels = _CELL_PX + _GAP_PX, image.shape[2]
  sheet = np.full((len(rows) * side, 10 * side, channels), 255, np.uint8)
  for i, (name, cells) in enumerate(rows.items()):
    for j, cell in enumerate((image, *cells)):
      if cell is not None:
        if name.startswith(_ENLARGED):
          quarter = len(cell) // 8 * 3
          cell = cell[quarter:-quarter, quarter:-quarter]
        small = transforms.resize(cell, _CELL_PX, 'area')
        y, x = i * side, j * side
        sheet[y : y + _CELL_PX, x : x + _CELL_PX] = small
  return sheet


def _rng(seed=_SEED):
  return np.random.default_rng(seed)


def main(output, path=None):
  partner = None
  if path is None:
    from sklearn.datasets import load_sample_image

    image, partner = map(load_sample_image, ('flower.jpg', 'china.jpg'))
    partner = _cropped(partner)
  else:
    image = images.decode(pathlib.Path(path).read_bytes())
  draw(_cropped(image), partner, output)


def _cropped(image):
  for crop in (
    transforms.ResizeSmall(_SIZE_PX),
    transforms.CentralCrop(_SIZE_PX),
  ):
    image = crop(image, _rng())
  return np.ascontiguousarray(image)


if __name__ == '__main__':
  main(*sys.argv[1:])

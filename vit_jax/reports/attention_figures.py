"""Images next to what a model attends to."""

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
from etils import epath

from vit_jax.reports import pictures
from vit_jax.types import PathLike

STYLES = ('mask', 'heat')


def overlay(
  picture: np.ndarray, weights: np.ndarray, *, style: str = 'mask'
) -> np.ndarray:
  """Return an image with attention drawn over it: uint8 [H, W, 3].

  The picture is uint8 [H, W, C], the weights are [gh, gw], 0 or more. Style
  'mask' darkens what the model does not attend to (the paper's figures 6 and
  14); 'heat' draws a heat map over the image. The scale ends at the 99th
  percentile, not at the maximum as in the released code (from memory), because
  large models attend far more to a few patches.
  """
  import scipy.ndimage  # takes half a second
  from matplotlib import colormaps

  picture = pictures.rgb(picture) / 255
  most = max(np.percentile(weights, 99, method='higher'), weights.max() / 50)
  # Linear between the centres of patches, constant beyond them.
  mask = scipy.ndimage.zoom(
    np.minimum(np.asarray(weights, np.float64) / (most or 1), 1),
    np.divide(picture.shape[:2], weights.shape),
    order=1,
    mode='nearest',
    grid_mode=True,
  )
  if style == 'mask':
    drawn = picture * mask[..., None]
  else:
    grey = picture.mean(axis=-1, keepdims=True)
    drawn = 0.45 * grey + 0.55 * colormaps['inferno'](mask)[..., :3]
  return np.round(255 * np.clip(drawn, 0, 1)).astype(np.uint8)


def sheet(
  rows: Sequence[Sequence[np.ndarray]],
  path: epath.Path,
  *,
  names: Sequence[str] | None = None,
  title: str = '',
) -> None:
  """Draw images, each with its attention on the right (Figs. 6 and 14).

  Takes [(image, overlay, ...)], uint8 [H, W, C] of one size, and captions.
  """
  height, width = rows[0][0].shape[:2]
  aspect = len(rows[0]) * width / height
  columns = round(math.sqrt(len(rows) / aspect)) or 1  # about square
  tall = min(2.6, 11 / (columns * aspect))  # inches
  gap = np.full((height, round(0.03 * height), 3), 255, np.uint8)
  images = [
    np.concatenate([x for y in row for x in (gap, pictures.rgb(y))][1:], axis=1)
    for row in rows
  ]
  made, panels = pictures.grid(images, columns, tall, 0.24 if names else 0.08)
  made.suptitle(title, fontsize=8)
  limit = max(8, int(17 * tall * aspect))
  for axes, name in zip(panels, names or ()):
    text = pictures.shorten(name, limit)
    axes.set_title(text, fontsize=7, pad=2, parse_math=False)
  pictures.save(made, path, dpi=max(150, min(400, height / tall)))


def write_sheets(
  workdir: PathLike, sheets: Mapping[str, Sequence[Sequence[np.ndarray]]]
) -> None:
  """Draw each {title: rows of `sheet`} as WORKDIR/sheet-NUMBER-TITLE.png."""
  for number, (title, rows) in enumerate(sheets.items(), 1):
    name = re.sub(r'\W+', '-', title.partition(' (')[0].lower())
    path = epath.Path(workdir) / f'sheet-{number}-{name}.png'
    sheet(rows, path, title=title)

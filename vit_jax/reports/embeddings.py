"""Figures of patch filters and position similarities (paper, Fig. 7)."""

import math

import numpy as np
from etils import epath

from vit_jax.reports import pictures


def filters(
  tiles: np.ndarray, path: epath.Path, *, title: str = '', columns: int = 7
) -> None:
  """Draw filters, tiles [n, H, W, 3] in [0, 1], row by row (Fig. 7 left)."""
  n, height, width, _ = tiles.shape
  columns = min(columns, n)
  rows = math.ceil(n / columns)
  side = 0.62
  made = pictures.canvas(
    max(side * columns, 2.5) + 0.2, side * rows * height / width + 0.5
  )
  made.suptitle(title, fontsize=10)
  made.get_layout_engine().set(w_pad=0.02, h_pad=0.02, wspace=0.02, hspace=0.02)
  for i, axes in enumerate(made.subplots(rows, columns, squeeze=False).flat):
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(color='grey', linewidth=0.4)
    axes.set_visible(i < n)
    if i < n:
      axes.imshow(tiles[i], vmin=0, vmax=1, interpolation='nearest')
  pictures.save(made, path, dpi=200)


def positions(similarity: np.ndarray, path: epath.Path) -> None:
  """Draw the map of similarities [gh, gw] of each patch (Figs. 7 and 10)."""
  gh, gw = similarity.shape[:2]
  width = 4.4 if gw <= 8 else 7
  made = pictures.canvas(width + 0.5, width * min(gh / gw, 3))
  axes = made.subplots()
  shown = pictures.mosaic(axes, similarity, vmin=-1, vmax=1)
  axes.set(
    title='Position embedding similarity',
    xlabel='Input patch column',
    ylabel='Input patch row',
  )
  right = axes.inset_axes([1.03, 0, 0.035, 1])
  bar = made.colorbar(shown, cax=right, ticks=[-1, 0, 1])
  bar.set_label('Cosine similarity')
  # At least two dots per patch of a map.
  dpi = max(150, min(400, 2.2 * gw * gw / width))
  pictures.save(made, path, dpi=dpi, tight=True)

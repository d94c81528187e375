"""Figures of patch filters, position similarities (Fig. 7), and features."""

from collections.abc import Sequence

import numpy as np
from etils import epath

from vit_jax.reports import pictures


def filters(
  tiles: np.ndarray, path: epath.Path, *, title: str = '', columns: int = 7
) -> None:
  """Draw filters, tiles [n, H, W, 3] in [0, 1], row by row (Fig. 7 left)."""
  made, _ = pictures.grid(list(tiles), min(columns, len(tiles)), 0.62)
  made.suptitle(title, fontsize=10)
  pictures.save(made, path, dpi=200, tight=True)


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


def scatter(
  points: np.ndarray,
  path: epath.Path,
  classes: Sequence[str] | None = None,
) -> None:
  """Draw images as points [n, 2], colored by class.

  Args:
    points: [n, 2], of t-SNE.
    path: of the figure.
    classes: name of the class of each point; up to 20 are in a legend, and more
      are written at the middle of their points. None: one color.
  """
  from matplotlib import colormaps

  names = sorted(set(classes or ['']))
  labels = np.searchsorted(names, classes or [''] * len(points))
  if len(names) <= 20:
    map = colormaps['tab10' if len(names) <= 10 else 'tab20']
    colors = map(range(len(names)))
  else:
    colors = colormaps['gist_rainbow'](np.linspace(0, 1, len(names)))
  in_legend = bool(classes) and len(names) <= 20
  made = pictures.canvas(7.2 + (1.8 if in_legend else 0), 7)
  axes = made.subplots()
  axes.set(xticks=[], yticks=[], title=f't-SNE of {len(points):,} images')
  axes.set_aspect('equal', adjustable='datalim')
  size = float(np.clip(9000 / len(points), 5, 60))
  style = {'s': size, 'alpha': 0.8, 'linewidths': 0}
  shown = [pictures.shorten(name, 24) for name in names]
  dots = [
    axes.scatter(*points[labels == label].T, color=color, **style)
    for label, color in enumerate(colors)
  ]
  if in_legend:
    pictures.legend_beside(axes, dots, shown)
  elif classes:
    box = {'facecolor': 'white', 'alpha': 0.6, 'linewidth': 0, 'pad': 0.5}
    text = {'fontsize': 7, 'ha': 'center', 'va': 'center', 'parse_math': False}
    for label, name in enumerate(shown):
      middle = np.median(points[labels == label], axis=0)
      axes.text(*middle, name, bbox=box, **text)
  pictures.save(made, path, dpi=150, tight=True)

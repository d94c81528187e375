"""Figures of patch filters, position similarities (Fig. 7), and features."""

import math
from collections.abc import Mapping, Sequence

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


def scatter(
  points: np.ndarray,
  path: epath.Path,
  classes: Sequence[str] | None = None,
  images: Mapping[int, np.ndarray] | None = None,
) -> None:
  """Draw images as points [n, 2], colored by class.

  Args:
    points: [n, 2], of t-SNE.
    path: of the figure.
    classes: name of the class of each point; up to 20 are in a legend, and more
      are written at the middle of their points. None: one color.
    images: {index of a point: image uint8 [H, W, C]} to draw on the points.
  """
  from matplotlib import colormaps, offsetbox

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
  for label, color in enumerate(colors):
    axes.scatter(*points[labels == label].T, color=color, **style)
  for i, image in (images or {}).items():
    image = np.broadcast_to(image, (*image.shape[:2], 3))
    box = offsetbox.AnnotationBbox(
      offsetbox.OffsetImage(image, zoom=18 / max(image.shape[:2])),
      points[i],
      pad=0.1,
      bboxprops={'edgecolor': colors[labels[i]], 'linewidth': 1.5},
    )
    axes.add_artist(box)
  shown = [pictures.shorten(name, 24) for name in names]
  if in_legend:
    _legend(axes, shown, colors)
  elif classes:
    for label, name in enumerate(shown):
      middle = np.median(points[labels == label], axis=0)
      axes.text(
        *middle,
        name,
        fontsize=7,
        ha='center',
        va='center',
        parse_math=False,
        bbox={'facecolor': 'white', 'alpha': 0.6, 'linewidth': 0, 'pad': 0.5},
      )
  pictures.save(made, path, dpi=150, tight=True)


def _legend(axes, names, colors):
  from matplotlib.lines import Line2D

  dots = [Line2D([], [], marker='o', linestyle='', color=x) for x in colors]
  legend = axes.legend(
    dots, names, loc='center left', bbox_to_anchor=(1.01, 0.5), frameon=False
  )
  for text in legend.get_texts():
    text.set_parse_math(False)

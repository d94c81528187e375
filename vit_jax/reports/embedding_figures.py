"""Figures of patch filters, position similarities (Fig. 7), and features."""

from collections.abc import Sequence

import numpy as np
from etils import epath

from vit_jax.reports import pictures


def filters(tiles: np.ndarray, path: epath.Path, *, title: str) -> None:
  """Draw filters, tiles [n, H, W, 3] in [0, 1], row by row (Fig. 7 left)."""
  made, _ = pictures.grid(list(tiles), min(7, len(tiles)), 0.62)
  made.suptitle(title, fontsize=10)
  pictures.save(made, path, dpi=200, tight=True)


def positions(similarity: np.ndarray, path: epath.Path) -> None:
  """Draw the map of similarities [gh, gw] of every n-th patch (Figs. 7, 10)."""
  gh, gw = similarity.shape[:2]
  n = -(-max(gh, gw) // 16)
  width = 4.4 if gw <= 8 else 7
  made = pictures.canvas(width + 0.5, width * min(gh / gw, 3))
  axes = made.subplots()
  shown = pictures.mosaic(axes, similarity[::n, ::n], vmin=-1, vmax=1)
  axes.set_yticks(axes.get_yticks(), range(1, gh + 1, n))
  axes.set_xticks(axes.get_xticks(), range(1, gw + 1, n))
  axes.set(
    title='Position embedding similarity',
    xlabel='Input patch column',
    ylabel='Input patch row',
  )
  right = axes.inset_axes([1.03, 0, 0.035, 1])
  bar = made.colorbar(shown, cax=right, ticks=[-1, 0, 1])
  bar.set_label('Cosine similarity')
  # At least two dots per patch of a map.
  dpi = max(150, min(400, 2.2 * gw * gw / n / width))
  pictures.save(made, path, dpi=dpi, tight=True)


def norms(
  patches: np.ndarray, others: dict[str, np.ndarray], path: epath.Path
) -> None:
  """Draw a histogram of norms of patches, [n, L, P], in each layer.

  `others` are norms [n, L] of other tokens by name; their medians are lines.
  """
  from matplotlib import colormaps, ticker
  from matplotlib.colors import LogNorm

  depth = patches.shape[1]
  found = np.concatenate([patches.ravel(), *map(np.ravel, others.values())])
  low, high = np.log10([found.min(), found.max()])
  edges = np.logspace(low - 0.02, high + 0.02, 41)
  counts = [np.histogram(patches[:, i], edges)[0] for i in range(depth)]
  shares = np.stack(counts, axis=1) * depth / patches.size
  made, (axes,) = pictures.figure(1)
  axes.grid(visible=False)
  at, seen = np.arange(depth + 1) + 0.5, np.ma.masked_equal(shares, 0)
  scale = LogNorm(seen.min() / 20, seen.max())  # a single patch is visible
  shown = axes.pcolormesh(at, edges, seen, norm=scale, cmap='Blues')
  axes.set_prop_cycle(color=colormaps['autumn'](np.linspace(0, 0.8, 9)))
  for name, values in others.items():
    axes.plot(at[1:] - 0.5, np.median(values, axis=0), '.-', label=name)
  axes.set(
    yscale='log',
    xlabel='Network depth (layer)',
    ylabel='Norm',
    title=f'Norms of the patches of {len(patches):,} images',
  )
  axes.xaxis.get_major_locator().set_params(integer=True)
  plain = ticker.LogFormatter(minor_thresholds=(1.5, 0.5))
  axes.yaxis.set_major_formatter(plain)
  axes.yaxis.set_minor_formatter(plain)
  made.colorbar(shown, label='Fraction of the patches of the layer')
  if others:
    axes.legend(frameon=False, fontsize=8, loc='upper left')
  pictures.save(made, path)


def scatter(
  points: np.ndarray, path: epath.Path, classes: Sequence[str] | None = None
) -> None:
  """Draw images as points [n, 2] of t-SNE, colored by class (None: alike)."""
  from matplotlib import colormaps

  classes = classes or [''] * len(points)
  names, labels = np.unique(classes, return_inverse=True)
  colors = colormaps['turbo'](np.linspace(0.05, 0.95, len(names)))
  made = pictures.canvas(7.2, 7)
  axes = made.subplots()
  axes.set(xticks=[], yticks=[], title=f't-SNE of {len(points):,} images')
  axes.set_aspect('equal', adjustable='datalim')
  size = float(np.clip(9000 / len(points), 5, 60))
  axes.scatter(*points.T, s=size, c=colors[labels], alpha=0.8, linewidths=0)
  style = {'fontsize': 8, 'ha': 'center', 'va': 'center', 'parse_math': False}
  box = {'facecolor': 'white', 'alpha': 0.6, 'linewidth': 0, 'pad': 0.5}
  for label, name in enumerate(names):
    middle = np.median(points[labels == label], axis=0)
    axes.text(*middle, pictures.shorten(name, 24), bbox=box, **style)
  pictures.save(made, path, dpi=150, tight=True)

"""Figures of attention: maps, rollout next to the image, distance by depth."""

import math

import numpy as np

from vit_jax.checks import one_of
from vit_jax.reports import pictures

STYLES = ('mask', 'heat')
# Gaps of a sheet, within pairs and between them, as fractions of the height.
_INNER, _OUTER = 0.03, 0.12


def maps(values, picture, path, *, title):
  """Draw the attention of each layer (rows) and head (columns).

  Each map is divided by its own maximum. Otherwise heads that attend to all
  patches would be dark next to heads that attend to a few.

  Args:
    values: [L, h, gh, gw].
    picture: uint8 [H, W, C], drawn above the maps.
    path: of the figure.
    title: of the figure.
  """
  depth, heads, gh, gw = values.shape
  side = min(1.1, 14 / max(depth, heads))  # inches per map
  width = max(heads * side, 2.2) + 0.7
  height = depth * side * gh / gw
  above = min(2.0, 0.8 * width * picture.shape[0] / picture.shape[1])
  made = pictures.canvas(width, height + above + 0.9)
  top, below = made.subplots(2, 1, height_ratios=[above, height])
  _show(top, picture)
  top.set_title(title, fontsize=10)
  scale = np.maximum(values.max(axis=(2, 3), keepdims=True), 1e-30)
  pictures.mosaic(below, values / scale, vmin=0, vmax=1)
  below.set(xlabel='Head', ylabel='Layer')
  # At least two dots per patch.
  pictures.save(made, path, dpi=max(130, min(400, 2.2 * gw / side)), tight=True)


def _show(axes, picture):
  axes.imshow(np.broadcast_to(picture, (*picture.shape[:2], 3)))
  axes.set_axis_off()


def overlay(picture, weights, *, style='mask'):
  """Return an image with attention drawn over it: uint8 [H, W, 3].

  Weights are divided by their maximum and interpolated to the image's size.

  Args:
    picture: uint8 [H, W, C].
    weights: [gh, gw], 0 or more.
    style: 'mask', the image is dark where the model does not attend to it (the
      paper's figures 6 and 14); 'heat', a heat map over the image.
  """
  one_of('style', style, STYLES)
  height, width = picture.shape[:2]
  picture = np.broadcast_to(picture, (height, width, 3)) / 255
  mask = _enlarge(_enlarge(weights, height).T, width).T
  mask = (mask / max(weights.max(), 1e-30))[..., None]
  if style == 'mask':
    drawn = picture * mask
  else:
    from matplotlib import colormaps

    colours = colormaps['inferno'](mask[..., 0])[..., :3]
    grey = picture.mean(axis=-1, keepdims=True)
    drawn = 0.45 * grey + 0.55 * colours
  return np.round(255 * np.clip(drawn, 0, 1)).astype(np.uint8)


def _enlarge(values, size):
  """Interpolate [n, m] -> [size, m], linearly between the centres of cells."""
  cells = len(values)
  at = (np.arange(size) + 0.5) * cells / size - 0.5
  at = np.clip(at, 0, cells - 1)
  low = np.floor(at).astype(int)
  weight = (at - low)[:, None]
  high = np.minimum(low + 1, cells - 1)
  return values[low] * (1 - weight) + values[high] * weight


def sheet(pairs, path, *, names=None, columns=None):
  """Draw images, each with its attention on the right (Figs. 6 and 14).

  Args:
    pairs: [(image, overlay)], uint8 [H, W, C] of one size.
    path: of the figure.
    names: captions, or None.
    columns: number of pairs in a row; None for `pairs_to_a_row`.
  """
  height, width = pairs[0][0].shape[:2]
  columns = columns or pairs_to_a_row(len(pairs), width / height)
  rows = math.ceil(len(pairs) / columns)
  # In inches: an image; a pair; from one pair to the next.
  tall = min(2.6, 11 / (2 * columns * width / height))
  inner, outer = _INNER * tall, _OUTER * tall
  pair = 2 * tall * width / height + inner
  across = pair + outer
  down = tall + (0.24 if names else inner)
  margin = 0.24
  size = columns * across - outer + 0.1, rows * down + margin
  made = pictures.canvas(*size)
  made.set_layout_engine('none')
  gap = np.full((height, round(_INNER * height), 3), 255, np.uint8)
  for i, (image, drawn) in enumerate(pairs):
    left, top = 0.05 + i % columns * across, margin + i // columns * down
    box = left, size[1] - top - tall, pair, tall
    axes = made.add_axes([x / size[j % 2] for j, x in enumerate(box)])
    image = np.broadcast_to(image, drawn.shape)
    axes.imshow(np.concatenate([image, gap, drawn], axis=1), aspect='auto')
    axes.set_axis_off()
    if i < columns:
      _write(axes, 0.25, 1, 3, 'Input', 'bottom', 9)
      _write(axes, 0.75, 1, 3, 'Attention', 'bottom', 9)
    if names:
      _write(axes, 0.5, 0, -3, names[i], 'top', 8)
  pictures.save(made, path, dpi=max(150, min(400, height / tall)))


def pairs_to_a_row(count, aspect):
  """Return the number of columns that makes a sheet about square.

  Args:
    count: number of pairs.
    aspect: width / height of an image.
  """
  return max(1, min(count, round(math.sqrt(count / (2 * aspect)))))


def _write(axes, x, y, offset, text, side, size):
  axes.annotate(
    text,
    (x, y),
    xycoords='axes fraction',
    xytext=(0, offset),
    textcoords='offset points',
    horizontalalignment='center',
    verticalalignment=side,
    fontsize=size,
  )


def distance(values, path, *, uniform=None, title=''):
  """Draw mean attention distance, a dot per head, by layer (Figs. 7, 11).

  Args:
    values: [L, h], in pixels.
    path: of the figure.
    uniform: distance of a head with uniform attention, drawn as a line.
    title: of the figure.
  """
  from matplotlib import colormaps

  depth, heads = values.shape
  made, (axes,) = pictures.figure(1)
  colours = colormaps['turbo'](np.linspace(0.05, 0.95, heads))
  for head in range(heads):
    axes.plot(
      np.arange(1, depth + 1),
      values[:, head],
      linestyle='none',
      marker='o',
      markersize=5,
      markeredgewidth=0,
      alpha=0.85,
      color=colours[head],
      label=f'Head {head + 1}',
    )
  if uniform is not None:
    axes.axhline(
      uniform, color='grey', linestyle='--', linewidth=1, label='uniform'
    )
  axes.set(
    title=title,
    xlabel='Network depth (layer)',
    ylabel='Mean attention distance (pixels)',
    xlim=(0.5, depth + 0.5),
  )
  axes.set_ylim(0, 1.05 * max(values.max(), uniform or 0))
  axes.xaxis.get_major_locator().set_params(integer=True)
  axes.legend(
    frameon=False,
    fontsize=7,
    loc='center left',
    bbox_to_anchor=(1, 0.5),
    ncols=math.ceil(heads / 16),
    handletextpad=0.4,
  )
  pictures.save(made, path)

"""What all pictures of the reports share."""

import io
import math

import jax
import numpy as np

from vit_jax import terminal


def figure(num_panels):
  """(figure, its axes side by side)."""
  made = canvas(5.2 * num_panels, 3.8)
  all_axes = made.subplots(1, num_panels, squeeze=False)[0]
  for axes in all_axes:
    axes.grid(alpha=0.3)
    axes.spines[['top', 'right']].set_visible(False)
  return made, all_axes


def canvas(width, height):
  """An empty figure, of so many inches."""
  # The object interface: pyplot would look for a display.
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  made = Figure(figsize=(width, height), layout='constrained')
  FigureCanvasAgg(made)
  return made


def mosaic(axes, values, *, vmin, vmax, gap=0.1):
  """Draws maps [rows, columns, m, n] as tiles of one image, and numbers them.

  One image, since L/16 has 384 maps and axes are slow. Tiles count from 1.

  Args:
    axes: to draw on.
    values: [rows, columns, m, n].
    vmin, vmax: ends of the colours.
    gap: between tiles, as share of their width.

  Returns:
    what a colorbar needs.
  """
  *counts, m, n = values.shape
  gap = max(1, round(gap * n))
  space = ((0, 0), (0, 0), (0, gap), (0, gap))
  wide = np.pad(values, space, constant_values=np.nan)  # NaN is left white
  wide = wide.transpose(0, 2, 1, 3).reshape(
    np.multiply(counts, (m + gap, n + gap))
  )
  shown = axes.imshow(
    wide[:-gap, :-gap],
    cmap='viridis',
    vmin=vmin,
    vmax=vmax,
    interpolation='nearest',
  )
  for axis, count, size in zip((axes.yaxis, axes.xaxis), counts, (m, n)):
    numbers = range(0, count, math.ceil(count / 24))
    middles = [i * (size + gap) + (size - 1) / 2 for i in numbers]
    axis.set_ticks(middles, [str(i + 1) for i in numbers], fontsize=8)
    axis.set_tick_params(length=0)
  axes.spines[:].set_visible(False)
  return shown


def save(made, path, *, dpi=130, tight=False):
  """Writes the figure on the first host: a PNG, or what the ending says.

  Args:
    made: figure.
    path: of the file.
    dpi: dots to an inch.
    tight: cut the page to what is drawn, whatever size was asked for.
  """
  written = io.BytesIO()
  box = 'tight' if tight else None
  made.savefig(written, dpi=dpi, format=path.suffix[1:], bbox_inches=box)
  if jax.process_index() == 0:
    path.write_bytes(written.getvalue())


def tell(what, path):
  """Says where a picture is."""
  terminal.console().print(f'{what}: {path}', soft_wrap=True)

"""Parts that the figures of all reports share."""

import io
import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax.io.files import write_atomically


def figure(num_panels: int) -> tuple[Any, Any]:
  """Return (figure, its axes side by side)."""
  made = canvas(5.2 * num_panels, 3.8)
  panels = made.subplots(1, num_panels, squeeze=False)[0]
  for axes in panels:
    axes.grid(alpha=0.3)
    axes.spines[['top', 'right']].set_visible(False)
  return made, panels


def canvas(width: float, height: float) -> Any:
  """Return an empty figure of a size in inches."""
  # Not pyplot, which would look for a display.
  from matplotlib.figure import Figure

  return Figure(figsize=(width, height), layout='constrained')


def grid(
  images: Sequence[np.ndarray], columns: int, side: float, below: float = 0.05
) -> tuple[Any, list[Any]]:
  """Return (figure, axes) of images `side` inches high, a text `below` each."""
  rows = math.ceil(len(images) / columns)
  aspect = images[0].shape[1] / len(images[0])
  made = canvas(columns * (aspect + 0.1) * side, rows * (side + below) + 0.5)
  made.get_layout_engine().set(w_pad=0.02, h_pad=0.02, wspace=0.02, hspace=0)
  panels = list(made.subplots(rows, columns, squeeze=False).flat)
  for axes, image in zip(panels, images):
    axes.imshow(rgb(image))
  for axes in panels:
    axes.set_axis_off()
  return made, panels[: len(images)]


def rgb(image: np.ndarray) -> np.ndarray:
  """Return an image [H, W, C] with three channels."""
  return np.broadcast_to(image, (*image.shape[:2], 3))


def mosaic(axes: Any, values: np.ndarray, *, vmin: float, vmax: float) -> Any:
  """Draw maps [rows, columns, m, n] in one image: many axes would be slow."""
  *counts, m, n = values.shape
  gap = max(1, round(0.1 * n))
  padding = ((0, 0), (0, 0), (0, gap), (0, gap))
  tiles = np.pad(values, padding, constant_values=np.nan)  # NaN stays white
  shape = np.multiply(counts, (m + gap, n + gap))
  image = axes.imshow(
    tiles.transpose(0, 2, 1, 3).reshape(shape)[:-gap, :-gap],
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
  return image


def shorten(text: str, limit: int) -> str:
  """Return the text in one line of at most `limit` characters."""
  text = ' '.join(text.split())
  return text if len(text) <= limit else f'{text[: limit - 1]}…'


def save(
  made: Any, path: epath.Path, *, dpi: int = 130, tight: bool = False
) -> None:
  """Write a figure as .png or .pdf, cropped if `tight`, on the first host."""
  file, box = io.BytesIO(), 'tight' if tight else None
  with warnings.catch_warnings():
    # Names may have characters that the font lacks; boxes stand for them.
    warnings.filterwarnings('ignore', 'Glyph .* missing from', UserWarning)
    made.savefig(file, dpi=dpi, format=path.suffix[1:], bbox_inches=box)
  if jax.process_index() == 0:
    write_atomically(path, file.getvalue())

"""Pictures and worst predictions of numbers, and of several labels."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath

from vit_jax.reports import pictures, worst

_HEADER = 'file', 'name', 'true', 'predicted', 'index'
_MOST_ROWS, _MOST_PANELS, _MOST_LINES, _BINS = 1000, 4, 8, 10


@dataclasses.dataclass(frozen=True)
class Numbers:
  """Predictions of K numbers, or of K labels, for N examples.

  Attributes:
    index: of each example in the source, [N].
    true, predicted: float64 [N, K]; true is NaN if it is missing.
    names: of the K columns.
  """

  index: np.ndarray
  true: np.ndarray
  predicted: np.ndarray
  names: Sequence[str]

  title = 'true and predicted numbers'

  def errors(self) -> np.ndarray:
    """Return errors [N, K] that are comparable between columns."""
    with warnings.catch_warnings(action='ignore'):  # of one number
      return np.abs(self.predicted - self.true) / np.nanstd(self.true, axis=0)

  def write(
    self, folder: epath.Path, name: str, source: Any, class_names: Any = None
  ) -> list[epath.Path]:
    """Write sheet-NAME-TITLE.png and worst-NAME.csv; return their paths."""
    figure = folder / f'sheet-{name}-{self.title.replace(" ", "-")}.png'
    pictures.save(self.draw(), figure)
    errors = np.nan_to_num(self.errors(), nan=-1.0)
    order = np.argsort(-errors, axis=None, kind='stable')[:_MOST_ROWS]
    rows = [
      (
        self.names[k],
        *(f'{x[i, k]:.4g}' for x in (self.true, self.predicted)),
        int(self.index[i]),
      )
      for i, k in zip(*np.unravel_index(order, errors.shape))
      if errors[i, k] > 0
    ]
    return [figure, worst.write(folder, 'worst', name, _HEADER, rows, source)]

  def draw(self) -> Any:
    """Return a figure of predicted against true numbers."""
    made, panels = pictures.figure(min(len(self.names), _MOST_PANELS))
    for axes, name, x, y in zip(
      panels, self.names, self.true.T, self.predicted.T
    ):
      axes.plot(x, y, '.', alpha=0.5, markersize=5)
      ends = np.nanmin([x, y]), np.nanmax([x, y])
      axes.plot(ends, ends, color='grey', linestyle='--')
      axes.set(xlabel='true', ylabel='predicted')
      axes.set_title(pictures.shorten(name, 40), parse_math=False)
    return made


@dataclasses.dataclass(frozen=True)
class Labels(Numbers):
  """Predicted probabilities of K labels of 0 and 1."""

  title = 'reliability'

  def errors(self) -> np.ndarray:
    error = np.abs(self.predicted - self.true)
    return np.where(error > 0.5, error, np.nan)

  def draw(self) -> Any:
    """Return a figure of the fraction of 1 against predicted probabilities."""
    made, (axes,) = pictures.figure(1)
    axes.plot([0, 1], [0, 1], color='grey', linestyle='--')
    for name, true, p in zip(self.names, self.true.T, self.predicted.T):
      x, y = p[~np.isnan(true)], true[~np.isnan(true)]
      bins = np.minimum((x * _BINS).astype(int), _BINS - 1)
      count = np.bincount(bins, minlength=_BINS)
      with np.errstate(invalid='ignore'):
        points = [np.bincount(bins, z, _BINS) / count for z in (x, y)]
      axes.plot(*points, 'o-', markersize=4, label=pictures.shorten(name, 24))
    axes.set(xlabel='predicted probability', ylabel='fraction that is 1')
    if len(self.names) <= _MOST_LINES:
      axes.legend(frameon=False)
    return made

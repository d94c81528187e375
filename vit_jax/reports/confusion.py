"""Confusion matrix and misclassified examples of an evaluator; see worst.py.

confusion-NAME.csv       number of examples by true class (rows) and predicted
                         class (columns); the header is true_class,CLASS,...
confusion-NAME.png       the matrix as a figure
misclassified-NAME.csv   one row per misclassified example, in the order of the
                         probability of the true class, lowest first

An example with several correct classes counts in the row of the most probable
one. Classes without a unique name are followed by their number.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath

from vit_jax.io.files import write_csv
from vit_jax.reports import pictures, worst

MISCLASSIFIED = (
  *('file', 'true_class', 'predicted_class'),
  *('true_probability', 'predicted_probability', 'index'),
)
_MOST_CLASSES = 4000  # of a matrix; that many make a CSV of 32 MB
_WITH_COUNTS, _WITH_NAMES = 20, 60  # classes whose counts, names fit the figure


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Predictions:
  """Predictions, arrays of [n]; `true` is the most probable correct class."""

  index: np.ndarray  # of each example in the source
  true: np.ndarray
  predicted: np.ndarray
  true_log_probability: np.ndarray
  predicted_probability: np.ndarray
  classes: np.ndarray  # int [k], that could be predicted, sorted
  class_names: Sequence[str] | None  # of the data, by number

  def write(
    self, folder: epath.Path, name: str, source: Any, class_names: Any = None
  ) -> list[epath.Path]:
    """Write the files; return their paths. Many classes get no matrix."""
    paths = []
    labels = label(self.classes, self.class_names or class_names)
    true = np.searchsorted(self.classes, self.true)
    predicted = np.searchsorted(self.classes, self.predicted)
    if len(labels) <= _MOST_CLASSES:
      matrix = np.zeros((len(labels), len(labels)), int)
      np.add.at(matrix, (true, predicted), 1)
      paths += [folder / f'confusion-{name}.{x}' for x in ('csv', 'png')]
      rows = ([x, *row] for x, row in zip(labels, matrix.tolist()))
      write_csv(paths[0], [['true_class', *labels], *rows])
      draw(matrix, labels, paths[1], title=name)
    log_p, p = self.true_log_probability, self.predicted_probability
    (wrong,) = np.nonzero(true != predicted)
    wrong = wrong[np.lexsort([x[wrong] for x in (self.index, -p, log_p)])]
    rows = [
      (
        *(labels[true[i]], labels[predicted[i]]),
        *(f'{np.exp(log_p[i]):.6g}', f'{p[i]:.6g}', int(self.index[i])),
      )
      for i in wrong
    ]
    kind = 'misclassified'
    paths.append(worst.write(folder, kind, name, MISCLASSIFIED, rows, source))
    return paths


def label(
  classes: Sequence[int] | np.ndarray, names: Sequence[str] | None = None
) -> list[str]:
  """Return a unique text for each class number: its name, or the number."""
  if not names or len(names) <= classes[-1]:
    return [str(number) for number in classes]
  found = [str(names[number]) for number in classes]
  times = collections.Counter(found)
  return [
    name if times[name] == 1 else f'{name} ({number})'
    for name, number in zip(found, classes)
  ]


def draw(
  matrix: np.ndarray, labels: Sequence[str], path: epath.Path, *, title: str
) -> None:
  """Draw a confusion matrix [K, K]; colors are fractions of a true class."""
  size = len(matrix)
  with np.errstate(invalid='ignore'):  # classes without examples stay white
    shares = matrix / matrix.sum(axis=1, keepdims=True)
  side = min(max(0.42 * size, 3.2), 8.4)  # inches
  made = pictures.canvas(side + 1.5, side + 0.8)
  axes = made.subplots()
  accuracy = np.trace(matrix) / max(matrix.sum(), 1)
  what = f'{title}: {matrix.sum():,} examples, accuracy {accuracy:.1%}'
  axes.set_title(what, fontsize=10, loc='left', parse_math=False)
  # The square root makes rare confusions visible.
  image = axes.imshow(np.sqrt(shares), cmap='Blues', vmin=0, vmax=1)
  axes.set(xlabel='Predicted class', ylabel='True class')
  if size <= _WITH_NAMES:
    style = {'fontsize': min(9, 50 * side / size), 'parse_math': False}
    names = [pictures.shorten(x, 24) for x in labels]
    axes.set_xticks(range(size), names, rotation=90, **style)
    axes.set_yticks(range(size), names, **style)
  if size <= _WITH_COUNTS:
    for i, j in np.argwhere(matrix):
      color = 'white' if shares[i, j] > 0.3 else 'black'
      style = {'fontsize': 8, 'color': color, 'ha': 'center', 'va': 'center'}
      axes.text(j, i, f'{matrix[i, j]}', **style)
  bar = made.colorbar(image, ax=axes, fraction=0.04, pad=0.02)
  marks = np.array([0, 0.01, 0.05, 0.1, 0.25, 0.5, 1])
  bar.set_ticks(np.sqrt(marks), labels=[f'{x:.0%}' for x in marks], fontsize=8)
  bar.set_label('Fraction of the true class', fontsize=8)
  pictures.save(made, path, dpi=150, tight=True)

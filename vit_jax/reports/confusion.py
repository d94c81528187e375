"""Confusion matrix and misclassified examples of an evaluator.

confusion-NAME.csv       number of examples by true class (rows) and predicted
                         class (columns); the header is true_class,CLASS,...
confusion-NAME.png       the matrix as a figure
misclassified-NAME.csv   one row per misclassified example, in the order of the
                         probability of the true class, lowest first
thumbnails-NAME.json     images of the worst, for the page of the run: {index:
                         PNG or JPEG file in base64}

An example with several correct classes counts in the row of the most probable
one. Classes without a unique name are followed by their number.
"""

import base64
import collections
import concurrent.futures
import contextlib
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax.io.files import csv_line, write_atomically
from vit_jax.reports import pictures
from vit_jax.types import PathLike

MISCLASSIFIED = (
  *('file', 'true_class', 'predicted_class'),
  *('true_probability', 'predicted_probability', 'index'),
)
_MOST_CLASSES = 4000  # of a matrix; that many make a CSV of 32 MB
_WITH_COUNTS, _WITH_NAMES = 20, 60  # classes whose counts, names fit the figure
_IMAGES, _PX = 24, 160


def write_all(
  workdir: PathLike,
  evaluators: Mapping[str, Any],
  *,
  class_names: Sequence[str] | None = None,
) -> list[epath.Path]:
  """Write the files of each evaluator that has predictions, on the first host.

  `class_names` are of all classes, if the data has no names. Returns the paths.
  More than 4,000 classes get no matrix.
  """
  paths = []
  for name, evaluator in evaluators.items():
    p = getattr(evaluator, 'predictions', None)
    if p and jax.process_index() == 0:
      labels = label(p.classes, p.class_names or class_names)
      folder, source = epath.Path(workdir), evaluator.data.source
      paths += _write(folder, name, p, labels, source)
  return paths


def _write(folder, name, p, labels, source):
  """Write the files of an evaluator with Predictions p; return their paths."""
  paths = []
  true = np.searchsorted(p.classes, p.true)
  predicted = np.searchsorted(p.classes, p.predicted)
  if len(labels) <= _MOST_CLASSES:
    matrix = count(true, predicted, len(labels))
    paths += [folder / f'confusion-{name}.{x}' for x in ('csv', 'png')]
    rows = ([x, *row] for x, row in zip(labels, matrix.tolist()))
    _write_csv(paths[0], ['true_class', *labels], rows)
    draw(matrix, labels, paths[1], title=name)
  (wrong,) = np.nonzero(true != predicted)
  keys = p.index, -p.predicted_probability, p.true_log_probability
  wrong = wrong[np.lexsort([key[wrong] for key in keys])]
  with concurrent.futures.ThreadPoolExecutor(16) as pool:  # may read files
    files = pool.map(p.describe, p.index[wrong].tolist())
  rows = [
    (
      *(file, labels[true[i]], labels[predicted[i]]),
      f'{np.exp(p.true_log_probability[i]):.6g}',
      *(f'{p.predicted_probability[i]:.6g}', int(p.index[i])),
    )
    for file, i in zip(files, wrong)
  ]
  paths.append(folder / f'misclassified-{name}.csv')
  _write_csv(paths[-1], MISCLASSIFIED, rows)
  # A data set need not consist of files, and files may move.
  with contextlib.suppress(OSError):  # of Pillow: a page can do without images
    images = {i: _thumbnail(source[i]['image']) for *_, i in rows[:_IMAGES]}
    write_atomically(folder / f'thumbnails-{name}.json', json.dumps(images))
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


def count(
  true: np.ndarray, predicted: np.ndarray, num_classes: int
) -> np.ndarray:
  """Return the matrix [K, K] of counts: rows are true, columns predicted."""
  counts = np.bincount(true * num_classes + predicted, minlength=num_classes**2)
  return counts.reshape(num_classes, num_classes)


def _write_csv(path, header, rows):
  write_atomically(path, ''.join(map(csv_line, [header, *rows])).encode())


def _thumbnail(pixels):
  """Return a small PNG or JPEG in base64 of uint8 [H, W, C], or of a file."""
  from PIL import Image

  if isinstance(pixels, bytes):
    image = Image.open(io.BytesIO(pixels)).convert('RGB')
  else:
    image = Image.fromarray(pictures.rgb(np.asarray(pixels)))
  image.thumbnail((_PX, _PX))
  file = io.BytesIO()  # JPEG blurs small drawings
  image.save(file, 'PNG' if max(image.size) < 96 else 'JPEG')
  return base64.b64encode(file.getvalue()).decode()


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

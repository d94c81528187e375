"""Confusion matrices and misclassified images, see reports/confusion.py."""

import concurrent.futures
import csv
import io
import math
from collections.abc import Iterator

import numpy as np

from vit_jax.reports import confusion, markup, thumbnails
from vit_jax.reports.markup import Html, fold, section, table, tag
from vit_jax.reports.workdir import Workdir

_MAX_CELLS, _MAX_CLASSES = 25, 1000  # classes of a table, of a picture
_LISTED, _PAIRS = 10, 12


def of_run(run: Workdir) -> Iterator[Html | None]:
  """Yield sections with the matrices, then with the misclassified images."""
  for name in _evaluators(run.path, 'confusion-', '.csv'):
    yield section(f'Confusion matrix: {name}', *_confusion(run.path, name))
  for name in _evaluators(run.path, 'misclassified-', '.csv'):
    yield section(f'Worst mistakes: {name}', *_misclassified(run.path, name))


def _evaluators(folder, prefix, suffix):
  files = sorted(x.name for x in folder.glob(f'{prefix}*{suffix}'))
  return [x.removeprefix(prefix).removesuffix(suffix) for x in files]


def _confusion(folder, name):
  """Return the matrix as a table or an image, and the most confused pairs."""
  file = folder / f'confusion-{name}.csv'
  if file.stat().length > markup.MAX_BYTES:
    return [tag('p', f'{file.name} is too large for this page.')]
  (_, *labels), *rows = csv.reader(io.StringIO(_text(file)))
  matrix = np.array([row[1:] for row in rows], np.int64)
  totals = matrix.sum(axis=1, keepdims=True)
  shares = matrix / np.maximum(totals, 1)
  pairs = [
    [labels[i], labels[j], f'{count:,}', f'{shares[i, j]:.1%}']
    for i, j, count in confusion.most_confused(matrix, _PAIRS)
  ]
  if len(labels) <= _MAX_CELLS:
    shown = _cells(matrix, shares, labels)
  elif len(labels) <= _MAX_CLASSES:
    shown = _pixels(shares, name)
  else:
    shown = None
  head = ['true', 'predicted', 'examples', 'of the class']
  listed = tag(
    'div',
    tag('h3', 'Most confused'),
    table(head, pairs, numbers=(2, 3), sortable=True),
  )
  return [tag('div', shown, listed if pairs else None, class_='beside')]


def _cells(matrix, shares, labels):
  """Return a table of counts; colors show the fraction of the true class."""
  head = [
    tag('th', tag('span', label), scope='col', title=label) for label in labels
  ]
  corner = tag('th', tag('small', 'true ↓', Html('<br>'), 'predicted →'))
  rows = []
  for i, label in enumerate(labels):
    cells = [tag('th', label, scope='row')]
    for j, other in enumerate(labels):
      strength = round(100 * math.sqrt(shares[i, j]))
      style = (
        f'background:color-mix(in srgb,var(--heat) {strength}%,var(--soft));'
      )
      if strength > 60:
        style += 'color:var(--bg)'
      title = f'{label} predicted as {other}: {shares[i, j]:.1%}'
      text = f'{matrix[i, j]:,}' if matrix[i, j] else ''
      cells.append(tag('td', text, style=style, title=title))
    rows.append(tag('tr', *cells))
  made = tag(
    'table',
    tag('thead', tag('tr', corner, *head)),
    tag('tbody', *rows),
    class_='matrix',
  )
  return tag('div', made, class_='scroll')


def _pixels(shares, name):
  """Return an image with a pixel per pair of a true and a predicted class."""
  pixels = np.zeros((*shares.shape, 4), np.uint8)
  pixels[..., :3] = 37, 99, 235
  pixels[..., 3] = np.round(255 * np.sqrt(shares))
  alt = f'confusion matrix of {name}: {len(shares)} classes'
  picture = markup.image(_png(pixels), 'png', alt=alt, class_='pixels')
  note = 'Rows: true class. Columns: predicted class.'
  return tag('div', picture, tag('p', note, class_='muted'))


def _misclassified(folder, name):
  """Return the worst mistakes, as images where the files still exist."""
  file = folder / f'misclassified-{name}.csv'
  worst, count = thumbnails.rows(file)
  if not count:
    return [tag('p', 'No example is misclassified.')]
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    images = list(pool.map(lambda row: _thumbnail(folder, name, row), worst))
  parts = [
    tag(
      'p',
      f'{count:,} examples are misclassified. The worst are shown, whose true '
      f'class got the lowest probability; all are in {file.name}.',
      class_='muted',
    )
  ]
  items = [
    tag(
      'li',
      image,
      tag(
        'div',
        'predicted: ',
        tag('strong', row['predicted_class']),
        f' {_share(row["predicted_probability"])}',
      ),
      tag(
        'div',
        'true: ',
        tag('strong', row['true_class'], class_='good'),
        f' {_share(row["true_probability"])}',
        class_='muted',
      ),
      title=row['file'],
    )
    for row, image in zip(worst, images)
    if image
  ]
  if items:
    parts.append(tag('ul', *items, class_='images'))
  rows = [
    [
      row['file'],
      row['true_class'],
      _share(row['true_probability']),
      row['predicted_class'],
      _share(row['predicted_probability']),
    ]
    for row in (worst if items else worst[:_LISTED])
  ]
  head = ['example', 'true', 'its probability', 'predicted', 'its probability']
  listed = table(head, rows, numbers=(2, 4))
  parts.append(fold('As a table', listed) if items else listed)
  return parts


def _share(text):
  value = float(text)
  return f'{value:.1%}' if value >= 0.001 else f'{value:.1g}'


def _thumbnail(folder, name, row):
  """Return a small image of an example, or None if there is none."""
  data = thumbnails.read(folder, name, row)
  if data is None:
    return None
  kind = 'png' if data.startswith(b'\x89PNG') else 'jpeg'
  file = row['file'].rpartition('/')[2]
  return markup.image(data, kind, alt=file, class_=kind)


def _png(pixels):
  from PIL import Image

  file = io.BytesIO()
  Image.fromarray(pixels).save(file, 'PNG')
  return file.getvalue()


def _text(file):
  return file.read_bytes().decode('utf-8', 'replace')

"""Tables of path, label and split, and slices of splits; for folder.py."""

import csv
import io
import re
import zlib

ENDINGS = ('.jpg', '.jpeg', '.png', '.webp', '.bmp')


def parse_split(split, names):
  """('train', (None, '90%')) of 'train[:90%]'; names of splits come first."""
  if split is None or split in names:
    return split, None
  match = re.fullmatch(r'([^\[\]]*)\[(-?\d+%?)?:(-?\d+%?)?\]', split)
  if not match:
    return split, None
  return match[1] or None, (match[2], match[3])


def select(paths, bounds):
  """Indices, in order, of a slice of the paths after a fixed shuffle.

  Sorted paths are sorted by class, so a slice of them would lack classes; the
  shuffle is by checksum of the path, the same on every machine.
  """
  keys = [(zlib.crc32(path.encode(errors='replace')), path) for path in paths]
  order = sorted(range(len(paths)), key=keys.__getitem__)

  def index(text):
    if text is None or not text.endswith('%'):
      return None if text is None else int(text)
    return round(len(paths) * int(text[:-1]) / 100)

  return sorted(order[index(bounds[0]) : index(bounds[1])])


def read_rows(path, text):
  """The rows of the table and the names of its columns."""
  rows = [[cell.strip() for cell in x] for x in csv.reader(io.StringIO(text))]
  rows = [row for row in rows if any(row)]
  if not rows:
    raise ValueError(f'{path} is empty; it should hold rows of path,label.')
  columns = ['path', 'label']
  header = [cell.lower() for cell in rows[0]]
  if {'path', 'label'} <= set(header):
    columns, rows = header, rows[1:]
  elif not header[0].endswith(ENDINGS) and header[1:2] == ['label']:
    rows = rows[1:]  # a header with another word for the path
  short = [i for i, row in enumerate(rows) if len(row) < len(columns)]
  if short or not rows:
    what = f'row {short[0]} is {rows[short[0]]}' if short else 'no rows'
    raise ValueError(f'{path}: {what}; expected the columns {columns}.')
  return rows, columns


def read_labels(path, cells, names):
  """Labels as ints, and the class names where there are any."""
  if all(re.fullmatch(r'-?\d+', cell) for cell in set(cells)) and (
    names is None or not set(cells) <= set(names)
  ):
    labels = [int(cell) for cell in cells]
    top = None if names is None else len(names)
    bad = [x for x in labels if x < 0 or (top is not None and x >= top)]
    if bad:
      raise ValueError(
        f'{path} has the label {bad[0]}; labels lie in [0, {top or "..."}).'
      )
    return labels, names
  names = sorted(set(cells)) if names is None else names
  label_of = {name: label for label, name in enumerate(names)}
  unknown = sorted(set(cells) - set(label_of))
  if unknown:
    raise ValueError(
      f'{path} has labels that class_names does not list:'
      f' {shorten(unknown)}; class_names is {shorten(names)}.'
    )
  return [label_of[cell] for cell in cells], names


def shorten(values, count=10):
  values = list(values)
  more = f' and {len(values) - count} more' if len(values) > count else ''
  return f'{values[:count]}{more}'

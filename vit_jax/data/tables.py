"""Tables and lists of labels: text to class numbers, with clear errors."""

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.data import image_files
from vit_jax.runs.files import PathLike


def read(path: str, text: str) -> dict[str, list[str]]:
  """Return the columns of a CSV: {'path': [...], 'label': [...], ...}.

  The header is optional. Raises ValueError for a table without these columns.
  """
  rows = [[x.strip() for x in row] for row in csv.reader(io.StringIO(text))]
  rows = [row for row in rows if any(row)]
  if not rows:
    raise ValueError(f'{path} is empty. Expected rows of path,label.')
  columns = ['path', 'label']
  header = [cell.lower() for cell in rows[0]]
  if {'path', 'label'} <= set(header):
    columns, rows = header, rows[1:]
  elif not image_files.is_image(header[0]) and header[1:2] == ['label']:
    rows = rows[1:]  # a header with another word for the path
  short = [i for i, row in enumerate(rows) if len(row) < len(columns)]
  if short or not rows:
    what = f'row {short[0]} is {rows[short[0]]}' if short else 'no rows'
    raise ValueError(f'{path}: {what}. Expected the columns {columns}.')
  return {name: [row[i] for row in rows] for i, name in enumerate(columns)}


def labels(
  where: str, cells: Sequence[str], names: Sequence[str] | None
) -> tuple[list[int], Sequence[str] | None]:
  """Return labels as ints, and the class names or None.

  Args:
    where: what has the labels; it begins error messages.
    cells: labels as text: names, or ints that index `names`.
    names: of the classes; default: the sorted names, None if all are ints.
  """
  different = set(cells)
  are_ints = all(re.fullmatch(r'-?\d+', cell) for cell in different)
  if are_ints and (names is None or not different <= set(names)):
    found = [int(cell) for cell in cells]
    limit = 2**31 if names is None else len(names)
    if bad := [x for x in found if not 0 <= x < limit]:
      raise ValueError(
        f'{where} has the label {bad[0]}. Labels must lie in [0, {limit}).'
      )
    return found, names
  names = sorted(different) if names is None else names
  return index(f'{where} has labels', cells, names), names


def index(what: str, classes: Sequence[str], names: Sequence[str]) -> list[int]:
  """Return the label of each class; `what` begins the error message."""
  label_of = {name: label for label, name in enumerate(names)}
  if unknown := sorted(set(classes) - set(names)):
    raise ValueError(
      f'{what} that class_names does not list: {shorten(unknown)}.'
      f' class_names is {shorten(names)}.'
    )
  return [label_of[x] for x in classes]


def encode(
  where: str, values: Sequence[Any], names: Sequence[str] | None
) -> tuple[np.ndarray, list[str] | None]:
  """Return labels of any kind as an array, and the class names or None.

  Args:
    where: what has the labels; it begins error messages.
    values: ints, class names, or lists of K numbers, one for each class.
    names: of the classes; default: as of `labels`.

  Returns:
    (int32 [n] or float32 [n, K], names).

  Raises:
    ValueError: labels of other or several kinds, out of range, or unknown.
  """
  names = None if names is None else [str(name) for name in names]
  kinds = {type(value) for value in values}
  if kinds <= {int, bool, str}:
    cells = [str(int(x) if isinstance(x, bool) else x) for x in values]
    found, known = labels(where, cells, names)
    return np.asarray(found, np.int32), None if known is None else list(known)
  if kinds == {list}:
    lengths = {len(value) for value in values}
    try:
      vectors = np.array(values, np.float32)
    except (TypeError, ValueError):
      vectors = np.zeros(0)
    size = len(names) if names else max(lengths)
    if vectors.ndim == 2 and lengths == {size} and np.isfinite(vectors).all():
      return vectors, names
    raise ValueError(
      f'{where} has labels that are lists of {sorted(lengths)[:5]} values.'
      f' Expected one number for each of the {size} classes.'
    )
  example = next(x for x in values if type(x) not in (int, bool, str))
  raise ValueError(
    f'{where} has the label {str(example)[:60]!r} of type'
    f' {type(example).__name__}. A label is an int, a class name, or a list'
    ' with one weight for each class.'
  )


def class_sizes(
  labels: np.ndarray, names: Sequence[str] | None
) -> dict[str, int] | None:
  """Return {class: number of examples}; None without names."""
  if names is None:
    return None
  if labels.ndim > 1:
    counts = np.count_nonzero(labels, axis=0)
  else:
    counts = np.bincount(labels, minlength=len(names))
  return dict(zip(names, counts.tolist()))


def class_names(
  names: PathLike | Sequence[str] | None,
) -> list[str] | None:
  """Return class names, which can be in a file: lines of text, or a JSON list.

  A JSON dict {'0': name, ...} is a list, too. Raises ValueError for names that
  cannot be read or that repeat.
  """
  if names is None:
    return None
  where = 'class_names'
  if isinstance(names, str) or not isinstance(names, Sequence):
    where = str(names)
    names = _read_names(where)
  found = [str(name) for name in names]
  if len(set(found)) < len(found):
    twice = next(x for i, x in enumerate(found) if x in found[:i])
    raise ValueError(f'{where} has {twice!r} twice. Class names must differ.')
  if not found:
    raise ValueError(f'{where} has no names. Expected one for each class.')
  return found


def _read_names(path):
  try:
    text = image_files.read(*image_files.file_system(path)).decode('utf-8-sig')
    if not path.endswith('.json'):
      return [line.strip() for line in text.strip().splitlines()]
    found = json.loads(text)
    if isinstance(found, Mapping):
      found = [found[str(i)] for i in range(len(found))]
    if not isinstance(found, list):
      raise ValueError(f'expected a list, found a {type(found).__name__}')
    return found
  except Exception as error:  # each file system raises its own types
    raise ValueError(
      f'cannot read the class names in {path}: {type(error).__name__}: {error}.'
      ' Expected one name per line, or a JSON list.'
    ) from error


def shorten(values: Sequence[Any], count: int = 10) -> str:
  """Return the first values as text, and how many more there are."""
  more = f' and {len(values) - count} more' if len(values) > count else ''
  return f'{values[:count]}{more}'

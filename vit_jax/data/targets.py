"""Kinds of labels: each class is one, and encodes columns of a table.

  Classes   one class of each example               int32 [n]
  Grades    one of several classes in an order      int32 [n]
  Labels    any of several labels of an example     float32 [n, K], 0 or 1
  Numbers   one or several numbers                  float32 [n, K]

An empty cell, None or NaN is a missing label: -1 in int32, NaN in float32. As a
class, and in columns of 0 and 1, -1 is missing, too.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from vit_jax.data.sources.tables import clean, indices
from vit_jax.types import UserError

Columns = Mapping[str, Sequence[Any]]  # cells by the name of the column
Names = list[str] | None
_INT = re.compile(r'-?(0|[1-9]\d*)', re.ASCII)  # '01' is a name
_DECIMAL = re.compile(r'-?\d+\.\d+', re.ASCII)
_BITS = {'0': 0.0, '1': 1.0, 'true': 1.0, 'false': 0.0, '': np.nan}
_BITS['-1'] = np.nan


@dataclasses.dataclass(frozen=True)
class Targets:
  """Interface of the kinds of labels: classes, several labels, numbers.

  Attributes:
    columns: names of the columns; (): the column of the label.
  """

  columns: Sequence[str] = ()

  outputs: ClassVar[str] = 'probabilities'  # what a model predicts

  def encode(
    self, where: str, columns: Columns, names: Names = None
  ) -> tuple[np.ndarray, Names]:
    """Return (labels, names of their K classes, labels or numbers, or None).

    Args:
      where: what has the columns; it begins error messages.
      columns: cells of the columns, texts or values.
      names: names in order, if they are known; None: those that occur, sorted.
    """
    raise NotImplementedError

  def rows(self, values: Any, names: Any, k: int, threshold: float) -> Any:
    """Return rows [{column: cell}] of the predictions [K] for an image.

    k is the number of classes; labels are named from a threshold on.
    """
    return [dict(zip(names, values.tolist()))]

  def shown(self, values: Any, names: Any, k: int) -> Any:
    """Return {name: probability} of the k largest, or a text of numbers."""
    return {names[i]: float(values[i]) for i in top(values, k)}


@dataclasses.dataclass(frozen=True)
class Classes(Targets):
  """One class of each example: a name, or an int, which indexes the names.

  Lists of K numbers are weights of the K classes, float32 [n, K].
  """

  def encode(
    self, where: str, columns: Columns, names: Names = None
  ) -> tuple[np.ndarray, Names]:
    ((key, values),) = columns.items()
    names = None if names is None else list(map(clean, names))
    if any(map(_is_list, values)):
      labels = _weights(values)
      if labels is None:
        raise UserError(
          f'{where}: {key} has lists such as {values[0]}. Expected classes. '
          f'Several labels are labels={key}, see docs/labels.md.'
        )
      return labels, names
    missing = {'', '-1'} - {*(names or ())}
    texts = ['' if (text := _text(x)) in missing else text for x in values]
    found = {*texts} - {''}
    others = [x for x in found if not _INT.fullmatch(x)]
    if names is None and others and all(map(_DECIMAL.fullmatch, others)):
      raise UserError(
        f'{where}: {key} has numbers such as {min(others)}. Expected classes. '
        f'Numbers are number={key}, and grades order=A<B<C, see docs/labels.md.'
      )
    if others or found <= {*(names or ())}:
      names = sorted(found) if names is None else names
      labels = np.full(len(texts), -1, np.int32)
      labels[np.array(texts) != ''] = indices(where, filter(None, texts), names)
      return labels, names
    labels = np.array([int(x or -1) for x in texts])
    if labels.min() < -1 or labels.max() >= 2**31:
      raise UserError(
        f'{where}: {key} has classes from {labels.min()} to {labels.max()}. '
        'Expected ints from 0 on, and -1 for a missing class.'
      )
    return labels.astype(np.int32), names

  def rows(self, values: Any, names: Any, k: int, threshold: float) -> Any:
    columns = 'rank', 'class_id', 'class_name', 'probability'
    found = ((i, names[i], float(values[i])) for i in top(values, k))
    return [dict(zip(columns, (rank, *x))) for rank, x in enumerate(found, 1)]


@dataclasses.dataclass(frozen=True)
class Grades(Classes):
  """One of several classes in an order.

  Attributes:
    order: names of the classes, or numbers, from the lowest on.
  """

  order: Sequence[str] = dataclasses.field(kw_only=True)

  def encode(
    self, where: str, columns: Columns, names: Names = None
  ) -> tuple[np.ndarray, Names]:
    ((key, values),) = columns.items()
    order = list(map(_text, self.order))
    known = {str(i): x for i, x in enumerate(names or ()) if x in order}
    cells = [known.get(x, x) for x in map(_text, values)]
    if unknown := sorted({*cells} - {'', '-1', *order}):
      raise UserError(
        f'{where}: {key} has {unknown[:10]}, which are not in the order '
        f'{" < ".join(order)}. Add them.'
      )
    return super().encode(where, {key: cells}, order)


@dataclasses.dataclass(frozen=True)
class Labels(Targets):
  """Any of several labels of an example.

  They are columns of 0 and 1; or one column of lists, of names or numbers of
  labels, or of texts such as 'cat|dog', 'cat;dog', 'cat,dog' or 'cat dog'.
  """

  def encode(
    self, where: str, columns: Columns, names: Names = None
  ) -> tuple[np.ndarray, Names]:
    values, *_ = columns.values()
    if len(columns) == 1 and not {*map(_bit, values)} <= {*_BITS}:
      labels, names = self._of_lists(where, values, names)
    else:
      expected = '0, 1 or an empty cell, or one column of lists'
      labels = _table(where, columns, lambda x: _BITS[_bit(x)], expected)
      names = [*columns]
    return labels, names

  def _of_lists(self, where, values, names):
    """Return (labels, names) of a column of lists, or of texts to be split."""
    lists = values
    if not any(map(_is_list, values)):
      texts = list(map(_text, values))
      separator = next((x for x in '|;,' if any(x in y for y in texts)), None)
      lists = [x.split(separator) if x else None for x in texts]
    elif (labels := _weights(values)) is not None:
      return labels, names
    lists = [x if x is None else [*filter(None, map(_text, x))] for x in lists]
    found = sorted({x for y in lists for x in y or ()})
    are_numbers = all(map(_INT.fullmatch, {*found} - {*(names or ())}))
    if are_numbers := are_numbers and not {*found} <= {*(names or ())}:
      found.sort(key=int)
      names = names or [str(i) for i in range(int((found or [0])[-1]) + 1)]
    names = found if names is None else list(map(clean, names))
    known = list(map(str, range(len(names)))) if are_numbers else names
    index = dict(zip(found, indices(where, found, known)))
    labels = np.zeros((len(lists), len(names)), np.float32)
    for row, items in zip(labels, lists):
      row[...] = np.nan if items is None else row
      row[[index[x] for x in items or ()]] = 1
    return labels, names

  def rows(self, values: Any, names: Any, k: int, threshold: float) -> Any:
    found = '|'.join(x for x, p in zip(names, values) if p >= threshold)
    return [dict(zip(names, values.tolist())) | {'labels': found}]


@dataclasses.dataclass(frozen=True)
class Numbers(Targets):
  """One or several numbers of an example, in the units of their columns."""

  outputs: ClassVar[str] = 'numbers'

  def encode(
    self, where: str, columns: Columns, names: Names = None
  ) -> tuple[np.ndarray, Names]:
    expected = 'a number with a decimal point, or an empty cell'
    return _table(where, columns, _number, expected), [*columns]

  def shown(self, values: Any, names: Any, k: int) -> Any:
    return ', '.join(f'{name} {x:.6g}' for name, x in zip(names, values))


def top(probabilities: np.ndarray, k: int) -> list[int]:
  """Return the indices of the k largest of [K], in descending order."""
  return np.argsort(-probabilities, kind='stable')[:k].tolist()


def _table(where, columns, convert, expected):
  """Return float32 [n, K] of converted cells; refuse others, and no cells."""
  found = []
  for key, cells in columns.items():
    for row, cell in enumerate(cells, 1):
      try:
        found.append(convert(cell))
      except (KeyError, ValueError, TypeError, OverflowError):
        raise UserError(
          f'{where}: {key} has {cell!r} in row {row}. Expected {expected}.'
        ) from None
  labels = np.array(found, np.float32).reshape(len(columns), -1)
  if empty := [x for x, y in zip(columns, labels) if np.isnan(y).all()]:
    raise UserError(f'{where}: all cells of {", ".join(empty)} are missing.')
  return np.ascontiguousarray(labels.T)


def _number(cell):
  number = math.nan if cell is None or cell == '' else float(cell)
  if abs(number) > float(np.finfo(np.float32).max):
    raise OverflowError
  return number


def _bit(cell):
  return 'a list' if _is_list(cell) else _text(cell).lower()


def _text(cell):
  """Return a cell as text: '' if it is missing, '3' for 3.0 and '3.0'."""
  if cell is None or cell != cell:
    return ''
  if isinstance(cell, bool | np.bool_):
    return str(int(cell))
  text = clean(str(cell).strip())
  whole = re.fullmatch(r'(-?\d+)\.0+', text, re.ASCII)
  return whole[1] if whole else '' if text.lower() == 'nan' else text


def _is_list(cell):
  return isinstance(cell, list | tuple | dict)


def _weights(lists):
  """Return lists of K weights as float32 [n, K]; None if they are others.

  Ints are weights if they are 0 and 1, and some list has one of them twice, as
  no list of numbers of classes has.
  """
  if len({len(x) if _is_list(x) else None for x in lists}) > 1:
    return None
  array = np.array(lists)
  if array.dtype.kind == 'f':
    return array.astype(np.float32)
  bits = array.dtype.kind in 'iub' and not {*array.flat} - {0, 1}
  twice = any(len({*x}) < len(x) for x in lists)
  return array.astype(np.float32) if bits and twice else None

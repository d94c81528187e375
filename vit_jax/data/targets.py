"""Kinds of labels: each class is one, and encodes columns of a table.

  Classes   one class of each example               int32 [n]
  Grades    one of several classes in an order      int32 [n]
  Labels    any of several labels of an example     float32 [n, K], 0 or 1
  Numbers   one or several numbers                  float32 [n, K]

An empty cell, None, NaN and the words of `tables.MISSING` are a missing label:
-1 in int32, NaN in float32. -1 as a class, and next to 0, is missing, too.
"""

import ast
import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from vit_jax.data.sources.tables import (
  MISSING,
  clean,
  indices,
  say_once,
  some,
)
from vit_jax.types import UserError

Names = list[str] | None
_INT = re.compile(r'-?(0|[1-9]\d*)', re.ASCII)  # '01' is a name
_DECIMAL = re.compile(
  r'[+-]?(\d+[.,]\d*|[.,]\d+)(e[+-]?\d+)?|[+-]?\d+e[+-]?\d+', re.ASCII | re.I
)
_BITS = dict.fromkeys(('1', 'true', 'yes'), 1.0)
_BITS |= dict.fromkeys(('0', 'false', 'no'), 0.0) | {'': np.nan, '-1': np.nan}
_HOT = re.compile(r'[01]([ ,;|])[01](\1[01])*')  # '0 1 0'
_ODD = re.compile(r'\[.*\]|[({].*,.*[)}]', re.DOTALL)  # lists, if they parse
_FEW = 10  # images may each have a class of their own


@dataclasses.dataclass(frozen=True)
class Cells:
  """Cells of a column: the different ones, and which one is in each row."""

  different: list[Any]
  index: np.ndarray

  @classmethod
  def of(cls, values: Any) -> 'Cells':
    """Return the cells of a sequence; lists, also in arrays, become tuples."""
    known = getattr(values, 'different', None)  # of a Column
    if known is None:
      place: dict[Any, int] = {}
      found = (place.setdefault(_key(x), len(place)) for x in values)
      index = np.fromiter(found, np.int32, len(values))
      known = [*place], index
    return cls(*known)

  def texts(self, where: str, kept: Sequence[str] | None = None) -> list[str]:
    """Return the different cells as texts, '' for the missing ones.

    Words for missing values, except `kept`, are printed.
    """
    texts = list(map(_text, self.different))
    words = {x for x in texts if x.lower() in MISSING}.difference(kept or ())
    if words:
      say_once(f'{where}: read as missing: {", ".join(sorted(words))}')
    return ['' if x in words else x for x in texts]


Columns = Mapping[str, Cells]  # by the name of the column


@dataclasses.dataclass(frozen=True)
class Targets:
  """Interface of the kinds of labels: classes, several labels, numbers.

  Attributes:
    columns: names of the columns; (): the column of the label.
  """

  columns: Sequence[str] = ()

  outputs: ClassVar[str] = 'probabilities'  # what a model predicts
  heading: ClassVar[Sequence[str]] = ('class', 'images')  # of `statistics`

  def encode(
    self, where: str, columns: Mapping[str, Any], names: Names = None
  ) -> tuple[np.ndarray, Names]:
    """Return (labels, names of their K classes, labels or numbers, or None).

    Args:
      where: what has the columns; it begins error messages.
      columns: cells of the columns, texts or values.
      names: names in order, if they are known; None: those that occur, sorted.
    """
    columns = {k: Cells.of(x) for k, x in columns.items()}
    return self._encoded(where, columns, names)

  def _encoded(self, where: str, columns: Columns, names: Names) -> Any:
    raise NotImplementedError

  def rows(self, values: Any, names: Any, k: int, threshold: Any) -> Any:
    """Return rows [{column: cell}] of the predictions [K] for an image.

    Labels are named from a threshold on, {name: probability} or one for all.
    """
    return [dict(zip(names, values.tolist()))]

  def shown(self, values: Any, names: Any, k: int) -> Any:
    """Return {name: probability} of the k largest, or a text of numbers."""
    return {names[i]: float(values[i]) for i in top(values, k)}

  def statistics(self, names: Sequence[str], labels: Any) -> tuple[Any, Any]:
    """Return a row of each name under `heading`, and what is rarely meant."""
    raise NotImplementedError

  def words(self, name: str, *cells: Any) -> str:
    """Return a row of `statistics` in words."""
    return f'{name} {cells[0]:,}'

  def caption(self, names: Sequence[str], label: Any) -> str:
    """Return a label, or a mixed one, in words."""
    if not np.ndim(label):
      return str(names[label])
    parts = [
      f'{k}?' if np.isnan(x) else str(k) if x == 1 else f'{k} {x:.2g}'
      for k, x in zip(names, label)
      if x != 0
    ]
    return ' + '.join(parts) or 'none'


@dataclasses.dataclass(frozen=True)
class Classes(Targets):
  """One class of each example: a name, or an int, which indexes the names.

  Lists of K numbers are weights of the K classes, float32 [n, K].
  """

  def _encoded(self, where, columns, names):
    ((key, cells),) = columns.items()
    names = None if names is None else list(map(clean, names))
    if any(isinstance(x, tuple) for x in cells.different):
      labels = _weights(cells)
      if labels is None:
        raise UserError(
          f'{where}: {key} has lists such as {cells.different[0]}. Expected '
          f'classes. Several labels are labels={key}, see docs/labels.md.'
        )
      return labels, names
    texts = cells.texts(f'{where}: {key}', names)
    missing = {'', '-1'} - {*(names or ())}
    found = {*texts} - missing
    others = [x for x in found if not _INT.fullmatch(x)]
    decimals = list(filter(_DECIMAL.fullmatch, others))
    if names is None and decimals:
      raise UserError(
        f'{where}: {key} has {min(decimals)}, which has two readings: a number '
        f'(number={key}, see docs/labels.md), or the name of a class (list all '
        'names as class_names).'
      )
    if names is None:
      names = sorted(found) if others else sorted(found, key=int)
      if len(cells.index) == len(names) > _FEW:
        raise UserError(
          f'{where}: {key} has another cell in each of {len(names):,} rows. '
          'Expected classes. Set label_key to the column of the label.'
        )
    index = _index(where, [*found], names)
    labels = np.array([index.get(x, -1) for x in texts], np.int32)
    return labels[cells.index], names

  def statistics(self, names: Sequence[str], labels: Any) -> tuple[Any, Any]:
    counts = np.bincount(labels[labels >= 0], minlength=len(names)).tolist()
    rows, look = [*zip(names, counts)], _odd_names(names)
    if 2 * len(names) >= len(labels) > _FEW:
      look.append(f'{len(names):,} classes of {len(labels):,} images')
    if single := [name for name, count in rows if count == 1]:
      look.append(f'classes of one image {some(single)}')
    return rows, look

  def rows(self, values: Any, names: Any, k: int, threshold: Any) -> Any:
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

  def _encoded(self, where, columns, names):
    ((key, cells),) = columns.items()
    order = list(map(_text, self.order))
    known = {str(i): x for i, x in enumerate(names or ()) if x in order}
    texts = cells.texts(f'{where}: {key}', order)
    texts = [known.get(x, x) for x in texts]
    if unknown := sorted({*texts} - {'', '-1', *order}):
      raise UserError(
        f'{where}: {key} has {unknown[:10]}, which are not in the order '
        f'{" < ".join(order)}. Add them.'
      )
    return super()._encoded(where, {key: Cells(texts, cells.index)}, order)


@dataclasses.dataclass(frozen=True)
class Labels(Targets):
  """Any of several labels of an example.

  They are columns of 0 and 1 (or true, false, yes, no), or one column of lists
  of names, of numbers of labels, or of K zeros and ones. A text is a list if it
  is one of JSON or Python, '["cat", "dog"]', or is cut: 'cat|dog', 'cat;dog' or
  'cat,dog'. '[]' is an example without labels, an empty cell a missing one.

  Attributes:
    separator: where texts are cut; default: the one of | ; , that occurs.
  """

  separator: str | None = None

  heading: ClassVar[Sequence[str]] = ('label', 'positive', 'known', 'missing')

  def _encoded(self, where, columns, names):
    ((key, cells), *others) = columns.items()
    bits = {*_bits(cells)}
    if others or (bits <= {*_BITS} and bits != {''}):
      expected = '0, 1 or an empty cell, or one column of lists'
      return _table(where, columns, _read_bits, expected), [*columns]
    lists = self._lists(f'{where}: {key}', cells)
    if (labels := _weights(lists)) is not None:
      return labels, names or [*map(str, range(labels.shape[1]))]
    return _of_lists(where, lists, names)

  def _lists(self, where, cells):
    """Return the cells as tuples, of texts that are parsed or cut."""
    texts = [x for x in cells.different if isinstance(x, str)]
    if odd := [
      x for x in texts if _ODD.fullmatch(x) and _parsed(x, '') is None
    ]:
      raise UserError(
        f'{where} has {odd[0]!r}. Expected a list of JSON or Python, such as '
        '["cat", "dog"], or names that are separated by one of | ; ,'
      )
    own = [x for x in texts if x[:1] != '[' or x[-1:] != ']']
    found = [x for x in '|;,' if any(x in y for y in own)]
    if own and all(map(_HOT.fullmatch, own)):
      found = [own[0][1]]
    elif not found and any(re.search(r'\S\s+\S', x) for x in own):
      found = [' ', '|']
    if self.separator is None and len(found) > 1:
      one, two = found[:2]
      cell = next(x for x in own if one in x)
      raise UserError(
        f'{where} has {cell!r}, which has two readings: cut at {one!r} it is '
        f'{_cut(cell, one)}, at {two!r} {_cut(cell, two)}. Set '
        f'targets.separator={one!r} or {two!r}.'
      )
    separator = self.separator or next(iter(found), '|')
    read = [
      x if isinstance(x, tuple) else _parsed(text, separator)
      for x, text in zip(cells.different, cells.texts(where))
    ]
    return Cells(read, cells.index)

  def statistics(self, names: Sequence[str], labels: Any) -> tuple[Any, Any]:
    known = (~np.isnan(labels)).sum(0).tolist()
    positive = np.nansum(labels, 0).round(2).tolist()  # not whole if soft
    positive = [int(x) if x == int(x) else x for x in positive]
    missing = [len(labels) - k for k in known]
    rows = [*zip(names, positive, known, missing)]
    found = {
      'with no positive': [x for x, p, *_ in rows if p == 0],
      'with one positive': [x for x, p, *_ in rows if p == 1],
      'without a negative': [x for x, p, k, _ in rows if p == k > 0],
    }
    look = [f'labels {k} {some(v)}' for k, v in found.items() if v]
    return rows, _odd_names(names) + look

  def words(self, name: str, *cells: Any) -> str:
    positive, known, missing = cells
    more = f' ({missing:,} missing)' * bool(missing)
    return f'{name} {positive:,} of {known:,}{more}'

  def rows(self, values: Any, names: Any, k: int, threshold: Any) -> Any:
    if not isinstance(threshold, Mapping):
      threshold = dict.fromkeys(names, threshold)
    pairs = zip(names, values)
    found = '|'.join(x for x, p in pairs if p >= threshold.get(x, 0.5))
    return [dict(zip(names, values.tolist())) | {'labels': found}]


@dataclasses.dataclass(frozen=True)
class Numbers(Targets):
  """One or several numbers of an example, in the units of their columns."""

  outputs: ClassVar[str] = 'numbers'
  heading: ClassVar[Sequence[str]] = (
    *('number', 'least', 'most', 'mean', 'std', 'missing'),
  )

  def _encoded(self, where, columns, names):
    expected = 'a number with a decimal point, or an empty cell'
    return _table(where, columns, Cells.texts, expected), [*columns]

  def shown(self, values: Any, names: Any, k: int) -> Any:
    return ', '.join(f'{name} {x:.6g}' for name, x in zip(names, values))

  def statistics(self, names: Sequence[str], labels: Any) -> tuple[Any, Any]:
    rows, look = [], []
    for name, column in zip(names, labels.T.astype(np.float64)):
      known = column[~np.isnan(column)]
      functions = (np.min, np.max, np.mean, np.std) if len(known) else ()
      found = [f'{f(known):.4g}' for f in functions] or ['-'] * 4
      rows.append((name, *found, len(column) - len(known)))
      values, times = np.unique(known, return_counts=True)
      if len(values) < 2:
        look.append(f'{name} has fewer than two different numbers')
      elif 2 * (most := times.max()) > len(known) > _FEW:
        value = f'{name} is {values[times.argmax()]:g}'
        look.append(f'{value} in {most:,} of {len(known):,} images')
    return rows, look

  def words(self, name: str, *cells: Any) -> str:
    least, most, mean, std, missing = cells
    more = f' ({missing:,} missing)' * bool(missing)
    return f'{name} {least} to {most}, mean {mean} ± {std}{more}'

  def caption(self, names: Sequence[str], label: Any) -> str:
    return ', '.join(f'{k} {x:.4g}' for k, x in zip(names, label))


def _odd_names(names):
  found = [x for x in names if x.lower() in MISSING or x[:1] in '[{(']
  return [f'names like missing values or lists {some(found)}'] * bool(found)


def top(probabilities: np.ndarray, k: int) -> list[int]:
  """Return the indices of the k largest of [K], in descending order."""
  return np.argsort(-probabilities, kind='stable')[:k].tolist()


def _table(where, columns, read, expected):
  """Return float32 [n, K] of columns, whose different cells `read` returns."""
  labels = []
  for key, cells in columns.items():
    found = [*map(_number, read(cells, f'{where}: {key}'))]
    if None in found:
      place = found.index(None)
      cell, row = cells.different[place], np.argmax(cells.index == place) + 1
      raise UserError(
        f'{where}: {key} has {cell!r} in row {row}. Expected {expected}.'
      )
    labels.append(np.array(found, np.float32)[cells.index])
  if empty := [x for x, y in zip(columns, labels) if np.isnan(y).all()]:
    raise UserError(f'{where}: all cells of {", ".join(empty)} are missing.')
  return np.stack(labels, 1)


def _number(cell):
  """Return a cell as a number, '' as NaN; None if float32 cannot have it."""
  try:
    number = math.nan if cell == '' else float(cell)
  except ValueError:
    return None
  return None if abs(number) > float(np.finfo(np.float32).max) else number


def _bits(cells):
  """Return the different cells as '0', '1', '-1', '' and other texts."""
  texts = [_text(x).lower() for x in cells.different]
  return ['' if x in MISSING else x for x in texts]


def _read_bits(cells, where):
  """Return 0.0, 1.0 or NaN of each different cell, others as they are."""
  bits, known = _bits(cells), dict(_BITS)
  if '-1' in bits:
    absent = not {'0', 'false', 'no'} & {*bits}
    known['-1'] = 0.0 if absent else math.nan
    what = 'absent, as 0 does not occur' if absent else 'missing'
    say_once(f'{where}: -1 is {what}')
  return [known.get(x, x) for x in bits]


def _key(cell):
  """Return a cell as what can be compared: lists as tuples."""
  if isinstance(cell, np.ndarray):
    cell = cell.tolist()
  if isinstance(cell, list | tuple | dict):
    return tuple(map(_key, cell))
  return cell


def _text(cell):
  """Return a cell as text: '' if it is missing, '3' for 3.0 and '3.0'."""
  if cell is None or cell != cell or cell == ():
    return ''
  if isinstance(cell, bool | np.bool_):
    return str(int(cell))
  text = clean(str(cell).strip())
  whole = re.fullmatch(r'(-?\d+)\.0+', text, re.ASCII)
  return whole[1] if whole else text


def _cut(text, separator):
  return [y for x in text.split(separator) if (y := x.strip())]


def _parsed(text, separator):
  """Return a text as a tuple, by JSON, Python, or cut; None if it is empty."""
  for parse in json.loads, ast.literal_eval:
    with contextlib.suppress(ValueError, SyntaxError):
      if text[:1] == '[' and isinstance(found := parse(text), list):
        return _key(found)
  return tuple(_cut(text, separator)) if text and separator else None


def _of_lists(where, lists, names):
  """Return (labels, names) of cells that are tuples, or None if missing."""
  parts = [(*filter(None, map(_text, x or ())),) for x in lists.different]
  if twice := [x for x in parts if {*x} <= {'0', '1'} and len({*x}) < len(x)]:
    raise UserError(
      f'{where} has {" ".join(twice[0])!r}. Expected as many zeros and ones in '
      'every cell, one for each label, or names.'
    )
  found = sorted({x for y in parts for x in y})
  if names is not None:
    names = list(map(clean, names))
  elif found and all(map(_INT.fullmatch, found)):
    most, count = max(map(int, found)), len(lists.index)
    if most >= max(count, 1000):
      raise UserError(
        f'{where}: labels up to {most:,} of {count:,} images need as many '
        'outputs. Expected names, or numbers of labels from 0 on.'
      )
    names = [str(i) for i in range(most + 1)]
  else:
    names = found
  index = _index(where, found, names)
  labels = np.zeros((len(parts), len(names)), np.float32)
  for row, items in zip(labels, parts):
    row[[index[x] for x in items]] = 1
  labels[[x is None for x in lists.different]] = np.nan
  return labels[lists.index], names


def _index(where, found, names):
  """Return {class: index}; ints that are not all names index the names."""
  known = {*names}
  if not known.issuperset(found) and all(map(_INT.fullmatch, found)):
    names = list(map(str, range(len(names))))
  return dict(zip(found, indices(where, found, names)))


def _weights(cells):
  """Return lists of K numbers as float32 [n, K]; None if they are others.

  Ints are weights if they are 0 and 1, and K is 2 or more.
  """
  is_known = [x is not None for x in cells.different]
  lists = [x for x in cells.different if x is not None]
  if len({len(x) if isinstance(x, tuple) else None for x in lists}) != 1:
    return None
  if all(isinstance(x, str) and x in ('0', '1') for y in lists for x in y):
    lists = [tuple(map(int, x)) for x in lists]
  array = np.array(lists)
  is_bits = array.dtype.kind in 'iub' and np.isin(array, [0, 1]).all()
  if array.ndim != 2 or not (
    array.dtype.kind == 'f' or (is_bits and array.shape[1] > 1)
  ):
    return None
  found = np.full((len(is_known), array.shape[1]), np.nan, np.float32)
  found[is_known] = array
  return found[cells.index]

"""Tables that list images and their labels: CSV, TSV and parquet files."""

import codecs
import contextlib
import csv
import io
import os
import posixpath
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from etils import epath

from vit_jax.data.sources import tables
from vit_jax.data.sources.image_files import Files, is_image, some
from vit_jax.data.targets import Names, Targets
from vit_jax.types import UserError

# Names of columns, in lower case; the first that is there is used.
IMAGES = (
  *('path', 'file', 'filename', 'file_name', 'image', 'image_path'),
  *('image_id', 'id', 'img'),
)
LABELS = ('label', 'labels', 'class', 'target')
_UNNAMED = 'Unnamed: '  # as pandas calls an index
_RAW = re.compile('[\ud800-\udfff]')  # bytes that are not UTF-8
_CODE = re.compile(r'[+-]?0\d|.*_')  # texts with digits that are no numbers
_OPTION = '--config.data.source'


class Table:
  """Rows of a table with an image and labels.

  Attributes:
    where: path of the table.
    columns: cells by the name of the column.
    labels, names: see targets.py; 0 before `encode`.
  """

  def __init__(self, path: Any, root: str, image_key: str | None) -> None:
    self.where = os.fspath(path)
    self._files = Files(root, self.where)
    self.columns = self._read(epath.Path(path).read_bytes())
    self._image_key = self._image_column(image_key)
    self._rows = np.arange(len(self.columns[self._image_key]))
    self.labels = np.zeros(len(self._rows), np.int32)
    self.names: Names = None

  def cells(self, name: str) -> Sequence[Any]:
    """Return the cells of a column, in the rows that are left."""
    cells = self.columns[name]
    return [cells[i] for i in self._rows]

  def encode(
    self,
    targets: Targets,
    label_key: str | None,
    others: Iterable[str | None],
    names: Sequence[str] | None,
  ) -> None:
    """Keep the rows with labels, whose columns are none of the others."""
    others = {self._image_key, *others}
    keys = targets.columns or [label_key or self._label_column(others)]
    tables.check(self.where, self.columns, 'label_key', *keys)
    columns = {x: self.columns[x] for x in keys}
    found = tables.labelled(self.where, targets, columns, names)
    self._rows, self.labels, self.names = found

  def choose(self, split: str, key: str) -> None:
    """Keep the rows of a split, in upper or lower case if one is like it."""
    tables.check(self.where, self.columns, 'split_key', key)
    cells = [f'{x}' for x in self.cells(key)]
    same = {x for x in cells if x.casefold() == split.casefold()}
    if split not in same and len(same) != 1:
      raise UserError(
        f'{self.where} has no split {split!r}. Its column {key!r} has'
        f' {sorted({*cells})}.'
      )
    chosen = split if split in same else same.pop()
    before = self.labels
    self._keep(np.flatnonzero([x == chosen for x in cells]))
    if before.ndim == 1 and (absent := {*before} - {*self.labels}):
      names = [self._named(x) for x in sorted(absent)]
      self._say(f'the split {chosen!r} has no examples of {some(names)}')

  def files(self) -> tuple[list[str], list[int]]:
    """Return the paths of the images, each once, and indices of those missing.

    The paths are relative to the root.
    """
    cells = list(map(str, self.cells(self._image_key)))
    found = [self._files.find(x) for x in cells]
    for cell, paths in zip(cells, found):
      if len(paths) > 1:
        raise UserError(
          f'{self.where}: {cell} could be {paths[0]} or {paths[1]}. Write more'
          f' of the path into the table, or set {_OPTION}.path to a folder.'
        )
    files = [paths[0] if paths else x for x, paths in zip(cells, found)]
    first: dict[str, int] = {}
    for i, file in enumerate(files):
      one, two = self.labels[first.setdefault(file, i)], self.labels[i]
      if one.tobytes() != two.tobytes():
        raise UserError(
          f'{self.where}: two rows of {file} have the labels '
          f'{self._named(one)} and {self._named(two)}. Expected one row for '
          'each image; several labels are one cell, such as cat|dog.'
        )
    if twice := len(files) - len(first):
      self._say(f'left out {twice:,} rows that are repeated')
    folders = sorted({posixpath.dirname(x) for x in first})
    if len(folders) > 1:
      self._say(f'labels are from the table, not the folders {some(folders)}')
    files, rows = [*first], [*first.values()]
    self._keep(rows)
    if missing := [i for i, row in enumerate(rows) if not found[row]]:
      self._say(f'files that are not there {some([files[i] for i in missing])}')
    return files, missing

  def _say(self, text):
    tables.say_once(f'{self.where}: {text}')

  def _keep(self, places):
    self._rows, self.labels = self._rows[places], self.labels[places]

  def _named(self, label):
    is_class = self.names and not label.ndim
    return str(self.names[label] if is_class else label)

  def _read(self, data):
    """Return {name: cells}.

    The first row of texts is a header, unless it names an image. Without one,
    two columns are 'path' and 'label', others '0', '1', ...
    """
    if self.where.endswith('.parquet'):
      from pyarrow import parquet

      return parquet.read_table(io.BytesIO(data)).to_pydict()
    is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    encoding = ('utf-16',) if is_utf16 else ('utf-8-sig', 'surrogateescape')
    text = data.decode(*encoding)
    csv.field_size_limit(2**31 - 1)  # cells with masks are long
    rows = _rows(text, max(',;\t', key=lambda x: _regular(text[:10_000], x)))
    find = self._files.find
    raw = {x for row in rows for x in row if _RAW.search(x) and not find(x)}
    if raw:
      self._say(f'not UTF-8, so read as cp1252, as in {_western(min(raw))!r}')
      rows = [[_western(x) if x in raw else x for x in row] for row in rows]
    first, *others = rows or [[]]
    names = [x or f'{_UNNAMED}{i}' for i, x in enumerate(first)]
    is_example = any(map(is_image, first))
    if is_example or (any(map(find, first)) and not named(first, IMAGES)):
      names = [*map(str, range(len(first)))]
      names, others = ['path', 'label'] if len(first) == 2 else names, rows
    count = len({*names})
    wrong = [x for x in others if len(x) < len(names) or any(x[len(names) :])]
    if wrong or not others or count < len(names):
      what = f'the row {wrong[0]}' if wrong else f'{len(others)} rows'
      raise UserError(
        f'{self.where} has {what}. Expected different columns, and a cell of '
        f'each in every row: {names}. Quote cells that have a separator.'
      )
    return {name: [row[i] for row in others] for i, name in enumerate(names)}

  def _image_column(self, key):
    """Return the name of the column whose cells are files."""
    tables.check(self.where, self.columns, 'image_key', key)
    counts = {}
    for name in [key] if key else self.columns:
      cells = self.columns[name]
      some_cells = map(str, cells[:: len(cells) // 1000 + 1])
      counts[name] = sum(bool(self._files.find(x)) for x in some_cells)
    found = [x for x, n in counts.items() if 2 * n > max(counts.values())]
    found = [x for x in found if not x.startswith(_UNNAMED)] or found
    if (chosen := _likely(found, IMAGES)) is None:
      what = f'{len(found)} columns have' if found else 'no column has'
      raise UserError(
        f'{self.where}: {what} the names of files below {self._files.root}. '
        f'Found {self._contents()}. Set {_OPTION}.image_key=COLUMN, or '
        f'{_OPTION}.path to the folder of the images.'
      )
    return chosen

  def _label_column(self, others):
    """Return the name of the column of the label, which is none of others."""
    rest = [x for x in self.columns if x not in others]
    rest = [x for x in rest if not x.startswith(_UNNAMED)]
    if (chosen := _likely(rest, LABELS)) is None:
      raise UserError(
        f'{self.where}: which column is the label? Found {self._contents()}. '
        f'Set {_OPTION}.label_key=COLUMN. Several columns of 0 and 1 are '
        'labels=A+B, and numbers number=A, in the argument of the config.'
      )
    return chosen

  def _contents(self):
    """Return the columns, and the first of their different cells."""
    cells = {k: sorted({*map(str, x)}) for k, x in self.columns.items()}
    return '; '.join(
      f'{k} {some([x[:20] for x in v])}' for k, v in cells.items()
    )


def named(columns: Iterable[str], names: Sequence[str]) -> str | None:
  """Return the column with the first of the names, in upper or lower case."""
  found = {x.lower(): x for x in columns}
  return next((found[x] for x in names if x in found), None)


def _likely(columns, names):
  """Return the column with the first of the names, else the only one."""
  return named(columns, names) or (columns[0] if len(columns) == 1 else None)


def numbers(cells: Sequence[Any]) -> Sequence[Any]:
  """Return texts as numbers if all are, '' as NaN; other cells as they are."""
  if any(not isinstance(x, str) or _CODE.match(x) for x in cells):
    return cells
  for convert in int, lambda x: float(x or 'nan'):
    with contextlib.suppress(ValueError):
      return [convert(x) for x in cells]
  return cells


def _rows(text, separator):
  """Return the rows that are not empty."""
  found = csv.reader(io.StringIO(text, newline=''), delimiter=separator)
  return [[x.strip() for x in row] for row in found if any(row)]


def _regular(text, separator):
  """Return the number of rows that have as many cells as the first, not one."""
  rows = _rows(text, separator)
  return sum(len(row) == len(rows[0]) > 1 for row in rows)


def _western(cell):
  data = cell.encode('utf-8', 'surrogateescape')
  return data.decode('cp1252', 'surrogateescape')

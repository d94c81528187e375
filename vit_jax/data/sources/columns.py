"""Columns of tables, in Arrow's memory: a million cells take some 20 MB."""

import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

_CODE = r'^[+-]?0\d|_'  # texts with digits that are no numbers


def binary(texts: Sequence[str]) -> Any:
  """Return texts as an Arrow array of their bytes."""
  try:
    return pa.array(texts, pa.string()).cast(pa.binary())
  except UnicodeEncodeError:  # names of files that are no UTF-8
    return pa.array(map(os.fsencode, texts), pa.binary())


class Column(Sequence[Any]):
  """Cells of a column: texts, or values of a parquet file."""

  def __init__(self, cells: Any) -> None:
    if isinstance(cells, pa.ChunkedArray):
      cells = cells.combine_chunks()
    if isinstance(cells, list):  # bytes that are no UTF-8 stay in Python
      made = np.empty(len(cells), object)
      made[:] = cells
      cells = made
    self.cells: Any = cells

  def __len__(self) -> int:
    return len(self.cells)

  def __getitem__(self, row: Any) -> Any:
    if isinstance(row, slice):
      return [*self.take(np.arange(len(self))[row])]
    cell = self.cells[int(row)]
    return cell.as_py() if isinstance(cell, pa.Scalar) else cell

  def __iter__(self) -> Any:
    return iter(self.cells.tolist())

  def _is_odd(self):
    is_list = isinstance(self.cells, np.ndarray)
    return is_list or pa.types.is_nested(self.cells.type)

  def take(self, rows: np.ndarray) -> 'Column':
    """Return the cells of some rows."""
    return Column(self.cells.take(rows))

  def tobytes(self) -> bytes:
    """Return bytes that differ for other cells."""
    if self._is_odd():
      return repr(self.cells.tolist()).encode()
    cells = pa.concat_arrays([self.cells, self.cells[:0]])  # from offset 0
    *_, data = cells.buffers()
    if not pa.types.is_primitive(cells.type):
      sizes = pc.binary_length(cells)
      data = data[: pc.sum(sizes).as_py()]
      return sizes.to_numpy(zero_copy_only=False).tobytes() + bytes(data)
    return cells.to_numpy(zero_copy_only=False).tobytes()

  def texts(self) -> Any:
    """Return the cells as an Arrow array of texts, '' for none."""
    cells = self.cells
    if isinstance(cells, np.ndarray):
      return binary(cells.tolist())
    return pc.fill_null(cells.cast(pa.string()), '').cast(pa.binary())

  @functools.cached_property
  def different(self) -> tuple[list[Any], np.ndarray] | None:
    """(the different cells, which one each row has); None for lists."""
    if self._is_odd():
      return None
    found = self.cells.dictionary_encode(null_encoding='encode')
    return found.dictionary.to_pylist(), found.indices.to_numpy()

  @functools.cached_property
  def numbers(self) -> 'Column':
    """Texts as numbers if all are, '' as NaN; other cells as they are."""
    cells = self.cells
    if isinstance(cells, np.ndarray) or not pa.types.is_string(cells.type):
      return self
    if (
      len(cells) > 100 and Column(cells[:100]).numbers.cells.type == cells.type
    ):
      return self
    if pc.any(pc.match_substring_regex(cells, _CODE)).as_py():
      return self
    for kind, empty in (pa.int64(), ''), (pa.float64(), 'nan'):
      try:
        return Column(pc.if_else(pc.equal(cells, ''), empty, cells).cast(kind))
      except pa.ArrowInvalid:
        pass
    return self


def read_csv(data: Any, separator: str, width: int) -> list[Any] | None:
  """Return the columns of texts in UTF-8, the header too; None if irregular."""
  names = [f'f{i}' for i in range(width)]
  try:
    table = csv.read_csv(
      pa.BufferReader(data),
      csv.ReadOptions(autogenerate_column_names=True),
      csv.ParseOptions(delimiter=separator, newlines_in_values=True),
      csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()),
        strings_can_be_null=False,
      ),
    )
  except pa.ArrowInvalid:
    return None
  if table.column_names != names:
    return None
  cells = [pc.utf8_trim_whitespace(x) for x in table.columns]
  empty = functools.reduce(pc.and_, (pc.equal(x, '') for x in cells))
  if pc.any(empty).as_py():
    cells = [x.filter(pc.invert(empty)) for x in cells]
  return [x.combine_chunks() for x in cells]

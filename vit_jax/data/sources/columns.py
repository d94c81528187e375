"""Columns of tables, in Arrow's memory: a million cells take some 20 MB."""

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

_CODE = r'^[+-]?0\d'  # texts of digits that are no numbers


def binary(texts: Iterable[str]) -> Any:
  """Return texts as an Arrow array of their bytes."""
  cells = [x.encode(errors='surrogateescape') for x in texts]
  return pa.array(cells, pa.binary())


class Column:
  """Cells of a column: texts, or values of a parquet file.

  column[row] is a cell, and column[rows] the column of several rows.
  """

  def __init__(self, cells: Any) -> None:
    self._cells = cells

  def __len__(self) -> int:
    return len(self._cells)

  def __getitem__(self, row: Any) -> Any:
    if np.ndim(row):
      return Column(self._cells.take(row))
    return _value(self._cells[int(row)].as_py())

  def __iter__(self) -> Iterator[Any]:
    return map(_value, self._cells.to_pylist())

  def encoded(self) -> Any:
    """Return the cells as an Arrow array of bytes, b'' for none."""
    cells = self._cells
    if not pa.types.is_binary(cells.type):
      cells = cells.cast(pa.string()).cast(pa.binary())
    return pc.fill_null(cells, b'')

  @functools.cached_property
  def different(self) -> tuple[list[Any], np.ndarray] | None:
    """(the different cells, which one each row has); None for lists."""
    if pa.types.is_nested(self._cells.type):
      return None
    found = self._cells.dictionary_encode(null_encoding='encode')
    return [*Column(found.dictionary)], found.indices.to_numpy()

  @functools.cached_property
  def numbers(self) -> 'Column':
    """Texts as numbers if all are, '' as NaN; other cells as they are."""
    cells = self._cells
    is_text = pa.types.is_string(cells.type)
    if not is_text or _numbers(cells[:100]) is None:  # quick
      return self
    is_code = pc.any(pc.match_substring_regex(cells, _CODE)).as_py()
    found = None if is_code else _numbers(cells)
    return self if found is None else Column(found)


def of_texts(parts: Iterable[Any]) -> Column:
  """Return the column of texts, whose bytes are in several Arrow arrays."""
  cells = pa.chunked_array(parts, pa.binary()).combine_chunks()
  with contextlib.suppress(pa.ArrowInvalid):  # names of files can be any bytes
    cells = pc.utf8_trim_whitespace(cells.cast(pa.string()))
  return Column(cells)


def read_csv(
  data: bytes, separator: str, names: Sequence[str], is_header: bool
) -> dict[str, Column] | None:
  """Return the columns of a regular table in UTF-8, sooner than `csv`; or None.

  `is_header` says whether the first row has the names.
  """
  text = dict.fromkeys(names, pa.string())
  try:
    table = csv.read_csv(
      pa.BufferReader(data),
      csv.ReadOptions(column_names=names),
      csv.ParseOptions(delimiter=separator, newlines_in_values=True),
      csv.ConvertOptions(column_types=text, strings_can_be_null=False),
    )
  except pa.ArrowInvalid:
    return None
  cells = [pc.utf8_trim_whitespace(x) for x in table.columns]
  empty = functools.reduce(pc.and_, (pc.equal(x, '') for x in cells))
  is_odd = pc.any(empty).as_py() or len(text) < len(names)
  if is_odd or len(empty) <= is_header:
    return None
  cells = [Column(x.combine_chunks()[int(is_header) :]) for x in cells]
  return dict(zip(names, cells))


def _numbers(texts):
  """Return texts as numbers, '' as NaN; None if others are among them."""
  for kind, empty in (pa.int64(), ''), (pa.float64(), 'nan'):
    with contextlib.suppress(pa.ArrowInvalid):
      return pc.if_else(pc.equal(texts, ''), empty, texts).cast(kind)
  return None


def _value(cell):
  return os.fsdecode(cell) if isinstance(cell, bytes) else cell

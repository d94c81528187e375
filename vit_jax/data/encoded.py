"""Columns of the data as vectors, for objectives that learn from them."""

from collections import ChainMap
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.data import subsets
from vit_jax.data.sources.tables import say_once
from vit_jax.data.subsets import Source, View
from vit_jax.data.targets import Classes, Targets
from vit_jax.types import UserError


class Encoded(View):
  """A source with columns that are read as labels are, see targets.py.

  A class becomes float32 [K] with a 1 at its place, and numbers float32 [K] in
  [0, 1], the least and the most of the column; a missing cell is NaN. What was
  understood is printed.

  Args:
    columns: kinds by the name of the column, as in `Data.keep`.

  Raises:
    UserError: if a cell has no reading, or all have one value.
  """

  def __init__(self, source: Source, columns: Mapping[str, Targets]) -> None:
    super().__init__(source, range(len(source)))
    self._encoded = {
      name: _encode(source, name, kind) for name, kind in columns.items()
    }

  def __getitem__(self, index: int) -> Mapping[str, Any]:
    found = {k: table[row[index]] for k, (row, table) in self._encoded.items()}
    return ChainMap(found, super().__getitem__(index))  # type: ignore


class LabelledBy(View):
  """A source whose label is the class in a column, to read out what is known.

  All cells must have a class.
  """

  def __init__(self, source: Source, column: str) -> None:
    super().__init__(source, range(len(source)))
    cells = {column: subsets.column(source, column)}
    self._labels, self.class_names = Classes().encode(column, cells)
    self.num_classes = len(self.class_names or ())

  def __getitem__(self, index: int) -> Mapping[str, Any]:
    label = int(self._labels[index])
    return ChainMap({'label': label}, super().__getitem__(index))  # type: ignore

  def labels(self) -> np.ndarray:
    return self._labels.copy()


def _encode(source, name, kind):
  """Return (row of each example, rows of a table [n, K])."""
  where = getattr(source, 'where', type(source).__name__)
  labels, names = kind.encode(where, {name: subsets.column(source, name)})
  cells, _ = kind.statistics(names, labels)
  text = f'{where}, {name}: {", ".join(kind.words(*x) for x in cells)}'
  if labels.ndim == 1:
    table = np.full((len(names) + 1, len(names)), np.nan, np.float32)
    table[:-1] = np.eye(len(names))
    text += f'; {np.sum(labels < 0):,} of {len(labels):,} are missing'
    found, is_varied = (labels, table), len({*labels.tolist()} - {-1}) > 1
  else:
    low, high = np.nanmin(labels, axis=0), np.nanmax(labels, axis=0)
    is_varied = np.all(low < high)
    table = (labels - low) / np.where(low < high, high - low, 1)
    found = np.arange(len(labels)), table
  if not is_varied:
    raise UserError(f'{text}. Expected two different values. Leave it out.')
  say_once(text)
  return found

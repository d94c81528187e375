"""Tables and lists of labels: text to class numbers."""

import collections
import csv
import functools
import io
import json
import os
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from etils import epath

from vit_jax.io import terminal
from vit_jax.types import PathLike, UserError

say_once = functools.cache(terminal.say)  # evaluators read the same folder


def read(path: PathLike) -> dict[str, list[str]]:
  """Return the columns of a CSV: {'path': [...], 'label': [...], ...}.

  The first row is a header if it has 'path' and 'label', the default columns.
  """
  text = epath.Path(path).read_bytes().decode('utf-8-sig', 'surrogateescape')
  lines = csv.reader(io.StringIO(text, newline=''))
  rows = [[x.strip() for x in row] for row in lines if row]
  columns = ['path', 'label']
  if rows and {*columns} <= {*rows[0]}:
    columns, *rows = rows
  short = [row for row in rows if len(row) < len(columns)]
  if short or not rows:
    what = f'the row {short[0]}' if short else 'no rows'
    raise UserError(f'{path} has {what}. Expected the columns {columns}.')
  return {name: [row[i] for row in rows] for i, name in enumerate(columns)}


def encode(
  where: str, values: Sequence[Any], names: Sequence[str] | None
) -> tuple[np.ndarray, list[str] | None]:
  """Return (labels int32 [n] or float32 [n, K], class names or None).

  Args:
    where: what has the labels; it begins error messages.
    values: ints, class names, or lists of K numbers, one for each class. Texts
      that are digits are ints, unless `names` has them.
    names: class names; default: the sorted names, None if all are ints.
  """
  names = None if names is None else list(map(clean, names))
  if any(isinstance(value, str) for value in values):
    values = [clean(str(value)) for value in values]
    different = {*values}
    are_ints = all(x.removeprefix('-').isdecimal() for x in different)
    if not are_ints or different <= set(names or ()):
      names = sorted(different) if names is None else names
      return indices(where, values, names), names
    values = [int(value) for value in values]
  found = np.array(values)
  if found.ndim == 2 and found.dtype.kind in 'fiub':
    return found.astype(np.float32), names
  if found.ndim != 1 or found.dtype.kind not in 'iub':
    raise UserError(
      f'{where} has labels such as {values[0]!r}, of shape {found.shape} and'
      f' type {found.dtype}. Each label must be an int, a class name, or a list'
      ' with one number for each class.'
    )
  return found.astype(np.int32), names


@functools.cache
def clean(name: str) -> str:
  """Return the name of a class in one form: in NFC, on one line, printable."""
  name = terminal.printable(name).replace('\n', '\\n')
  return unicodedata.normalize('NFC', name)


def indices(
  where: str, classes: Iterable[str], names: Sequence[str]
) -> np.ndarray:
  """Return the index of each class in the names: int32 [n]."""
  classes = list(classes)
  if unknown := sorted(set(classes) - set(names)):
    raise UserError(
      f'{where} has the classes {unknown[:10]}, which class_names does not'
      f' have. It has {list(names[:10])}.'
    )
  times = collections.Counter(map(str.casefold, names))
  if same := [x for x in names if times[x.casefold()] > 1]:
    what = 'classes that differ in upper and lower case only'
    say_once(f'{where} has {what}; rename them if they are the same: {same}')
  label_of = {name: label for label, name in enumerate(names)}
  return np.array([label_of[x] for x in classes], np.int32)


def read_names(path: PathLike) -> list[str]:
  """Return the names in a file: a JSON list if it ends in .json, else lines."""
  text = epath.Path(path).expanduser().read_text()
  is_json = os.fspath(path).endswith('.json')
  return json.loads(text) if is_json else text.splitlines()


def class_names(names: PathLike | Sequence[str] | None) -> list[str] | None:
  """Return class names, which can be in a file; see `read_names`."""
  if names is None:
    return None
  where = 'class_names'
  if isinstance(names, str) or not isinstance(names, Sequence):
    where, names = str(names), read_names(names)
  names = [str(name).strip() for name in names]
  if not names or len(set(names)) < len(names):
    raise UserError(f'{where} must have one name for each class, none twice.')
  return names

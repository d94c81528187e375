"""Columns and names of labels."""

import collections
import functools
import json
import os
import re
import types
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from vit_jax.io import terminal
from vit_jax.types import PathLike, UserError

# Words for missing values of pandas, in lower case.
_WORDS = '#n/a|#n/a n/a|#na|-1.#ind|-1.#qnan|-nan|1.#ind|1.#qnan|<na>|n/a|na'
MISSING = frozenset(f'{_WORDS}|nan|none|null'.split('|'))
_said: list[str] = []


@functools.cache  # evaluators read the same folder
def say_once(text: str) -> None:
  """Print what was understood or left out on reading, once in a process."""
  _said.append(text)
  terminal.say(text)


def said(where: str) -> list[str]:
  """Return what was said of data that are there."""
  found = (x.removeprefix(where) for x in _said if x.startswith(where))
  return [x.lstrip(': ') for x in found if x[:1] in (':', ' ')]


def some(names: Sequence[str]) -> str:
  """Return '(count): ' and the first names."""
  return f'({len(names)}): {", ".join(names[:5])}{", ..." * (len(names) > 5)}'


def check(
  where: str, columns: Iterable[str], argument: str, *keys: str | None
) -> None:
  """Refuse columns that are not there, which an argument has named."""
  for key in keys:
    if key is not None and key not in columns:
      raise UserError(
        f'{where} has no column {key!r} ({argument}). It has'
        f' {", ".join(columns) or "none"}.'
      )


def groups(cells: Iterable[Any], key: str) -> list[str]:
  """Return the groups of cells, or of paths if `key` is a pattern; '': none."""
  if '(' in key:
    matches = (re.search(key, str(x)) for x in cells)
    return [x[x.lastindex or 0] if x else '' for x in matches]
  texts = (re.sub(r'^(-?\d+)\.0$', r'\1', str(x).strip()) for x in cells)
  return ['' if x.lower() in MISSING else x for x in texts]


def labelled(
  where: str,
  targets: Any,
  columns: Mapping[str, Sequence[Any]],
  names: Sequence[str] | None = None,
) -> tuple[np.ndarray, np.ndarray, list[str] | None]:
  """Return (rows with labels, their labels, names) by `targets.encode`."""
  labels, names = targets.encode(where, columns, names)
  missing = np.isnan(labels).all(1) if labels.ndim > 1 else labels < 0
  what = f'labels in {", ".join(columns)}'
  if missing.all():
    raise UserError(f'{where}: all {what} are missing.')
  if missing.any():
    count = f'{missing.sum():,} of {len(labels):,} rows'
    say_once(f'{where}: left out {count} without {what}')
  rows = np.flatnonzero(~missing)
  return rows, labels[rows], names


class Labelled:
  """Base of sources that hold their labels: int32 [n] or float32 [n, K].

  Attributes:
    where: of the data; all that is said of them begins with it.
    used: the columns that were chosen, by what they are.
  """

  where = ''
  used: Mapping[str, str] = types.MappingProxyType({})

  def __init__(self, labels: np.ndarray, names: Sequence[str] | None) -> None:
    self._labels, self.class_names = labels, names
    self.num_classes = None if names is None else len(names)
    if labels.ndim > 1:
      self.num_classes = labels.shape[1]

  def __len__(self) -> int:
    return len(self._labels)

  def labels(self) -> np.ndarray:
    """Return the labels of all examples: int32 [n] or float32 [n, K]."""
    return self._labels.copy()

  def held(self, keep: Sequence[str] = ()) -> dict[str, list[Any]]:
    """Return {what: columns} of all examples that are known without reading."""
    return {'labels': [self._labels]}

  def _label(self, index):
    label = self._labels[index]
    return label if label.ndim else int(label)


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

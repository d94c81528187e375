"""Tables that list images and their labels: CSV, TSV and parquet files."""

import codecs
import csv
import functools
import io
import os
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc
from etils import epath

from vit_jax.data.sources import tables
from vit_jax.data.sources.columns import Column, read_csv
from vit_jax.data.sources.image_files import Files, is_image
from vit_jax.data.sources.tables import some
from vit_jax.data.targets import Cells, Names, Targets
from vit_jax.types import UserError

# Names of columns, in lower case; the first that is there is used. Those after
# 'img' are of images only if there is none of the others.
FILES = 'path', 'file', 'filename', 'file_name', 'image', 'image_path', 'img'
IMAGES = *FILES, 'image_id', 'id'
LABELS = ('label', 'labels', 'class', 'target')
_UNNAMED = 'Unnamed: '  # as pandas calls an index
_RAW = re.compile('[\ud800-\udfff]')  # bytes that are not UTF-8
_OPTION = '--config.data.source'


class Opened:
  """The cells of a table and the files of its folder; several sources share it.

  Attributes:
    where: path of the table.
    files: below the folder, found by the texts of the table.
    columns: cells by the name of the column.
  """

  def __init__(self, where: str, root: str) -> None:
    self.where, self.files = where, Files(root, where)
    self.columns = self._read(epath.Path(where).read_bytes())

  @functools.cache  # noqa: B019, with `_opened`
  def paths(self, key: str) -> tuple[Any, np.ndarray, np.ndarray, Any]:
    """Return what `find_all` does, and equal ints of equal paths."""
    files, is_there, several = self.files.find_all(self.columns[key].texts())
    codes = files.dictionary_encode().indices.to_numpy()
    return files, codes, is_there, several

  def _say(self, text):
    tables.say_once(f'{self.where}: {text}')

  def _read(self, data):
    """Return {name: Column}."""
    ending = os.path.splitext(self.where)[1].lower()
    if ending in ('.xlsx', '.xls', '.ods', '.json'):
      raise UserError(
        f'{self.where}: {ending} is not read. Save the table as .csv or '
        '.parquet, or as .jsonl with a JSON object on each line.'
      )
    if ending in ('.parquet', '.jsonl'):
      from pyarrow import ArrowInvalid, json, parquet

      read = parquet.read_table if ending == '.parquet' else json.read_json
      try:
        table = read(io.BytesIO(data))
      except (ArrowInvalid, OSError) as error:
        raise UserError(f'{self.where} is damaged: {error}') from error
      return dict(zip(table.column_names, map(Column, table.columns)))
    is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    encoding = ('utf-16',) if is_utf16 else ('utf-8-sig', 'surrogateescape')
    csv.field_size_limit(2**31 - 1)  # cells with masks are long
    text = data.decode(*encoding) if is_utf16 else ''
    data = text.encode() if text else data.removeprefix(codecs.BOM_UTF8)
    start = data[:10_000].decode('utf-8', 'surrogateescape')
    separator = max(',;\t', key=lambda x: _regular(start, x))
    find = self.files.find
    first = next(iter(_rows(start, separator)), [])
    if cells := first and read_csv(data, separator, len(first)):
      names, begin = self._names(first)
      if len({*names}) == len(names) and len(cells[0]) > begin:
        return {k: Column(x[begin:]) for k, x in zip(names, cells)}
    rows = _rows(data.decode('utf-8', 'surrogateescape'), separator)
    raw = {x for row in rows for x in row if _RAW.search(x) and not find(x)}
    if raw:
      self._say(f'not UTF-8, so read as cp1252, as in {_western(min(raw))!r}')
      rows = [[_western(x) if x in raw else x for x in row] for row in rows]
    first, *others = rows or [[]]
    names, begin = self._names(first)
    others = others if begin else rows
    count = len({*names})
    wrong = [x for x in others if len(x) < len(names) or any(x[len(names) :])]
    if wrong or not others or count < len(names):
      what = f'the row {wrong[0]}' if wrong else f'{len(others)} rows'
      raise UserError(
        f'{self.where} has {what}. Expected different columns, and a cell of '
        f'each in every row: {names}. Quote cells that have a separator.'
      )
    cells = ([row[i] for row in others] for i in range(len(names)))
    return dict(zip(names, map(Column, cells)))

  def _names(self, first):
    """Return the names of the columns, and the number of rows that have them.

    The first row of texts is a header, unless it names an image. Without one,
    two columns are 'path' and 'label', others '0', '1', ...
    """
    is_example = any(map(is_image, first))
    found = any(self.files.find_each(first))
    if not is_example and (not found or named(first, IMAGES)):
      return [x or f'{_UNNAMED}{i}' for i, x in enumerate(first)], 1
    if len(first) == 2:
      return ['path', 'label'], 0
    return [*map(str, range(len(first)))], 0


@functools.lru_cache(maxsize=1)  # evaluators open the same table
def _opened(where, root, stamps):
  return Opened(where, root)


def _stamps(*paths):
  """Return what changes with local files and folders; others always change."""
  try:
    return [(x.st_mtime_ns, x.st_size) for x in map(os.stat, paths)]
  except OSError:
    return [time.monotonic_ns()]


class Table:
  """Rows of a table with an image and labels.

  Attributes:
    where: path of the table.
    columns: cells by the name of the column; rows: those that are left.
    labels, names: see targets.py; without targets, labels are 0.
    files: paths of the images, each once, relative to the root, in an Arrow
      array of bytes; missing: indices of those that are not there.
    used: columns that were chosen, by what they are.
  """

  def __init__(
    self,
    path: Any,
    root: str,
    *,
    targets: Targets | None,
    image_key: str | None,
    label_key: str | None,
    split: str | None,
    split_key: str,
    group_key: str | None,
    names: Sequence[str] | None,
  ) -> None:
    self.where = os.fspath(path)
    opened = _opened(self.where, root, (*_stamps(self.where, root),))
    self._opened, self._files = opened, opened.files
    self.columns = opened.columns
    self._image_key = self._image_column(image_key)
    self.rows = np.arange(len(self.columns[self._image_key]))
    self.used = {'image': self._image_key}
    self.labels = np.zeros(len(self.rows), np.int32)
    self.names: Names = None
    if targets is not None:
      self._encode(targets, label_key, (split_key, group_key), names)
    if split is not None:
      self._choose(split, split_key, group_key)
      self.used['split'] = split_key
    elif split_key in self.columns:
      self._say(
        f'{split_key!r} is a column, and all its rows are used. Set split to '
        'one of its cells.'
      )
    if group_key is not None:
      self.used['group'] = group_key
    self.files, self.missing = self._files_of_rows()

  def cells(self, name: str) -> Column:
    """Return the cells of a column, in the rows that are left."""
    return self.columns[name].take(self.rows)

  def _encode(
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
    self.used['label'] = '+'.join(keys)
    columns = {x: self.columns[x] for x in keys}
    found = tables.labelled(self.where, targets, columns, names)
    self.rows, self.labels, self.names = found

  def _choose(self, split: str, key: str, group_key: str | None) -> None:
    """Keep the rows of a split, in upper or lower case if one is like it.

    Its groups, of a column or a pattern of paths, may not be in other splits.
    """
    tables.check(self.where, self.columns, 'split_key', key)
    cells = Cells.of(self.cells(key))
    texts = [*map(str, cells.different)]
    same = {x for x in texts if x.casefold() == split.casefold()}
    if split not in same and len(same) != 1:
      raise UserError(
        f'{self.where} has no split {split!r}. Its column {key!r} has'
        f' {sorted(texts)}.'
      )
    chosen = split if split in same else same.pop()
    before = self.labels
    is_chosen = np.array([x == chosen for x in texts])[cells.index]
    if group_key is not None:
      column = self._image_key if '(' in group_key else group_key
      tables.check(self.where, self.columns, 'group_key', column)
      groups = np.array(tables.groups(self.cells(column), group_key))
      here = {*groups[is_chosen]} - {''}
      if both := sorted(here & {*groups[~is_chosen]}):
        raise UserError(
          f'{self.where}: group_key={group_key!r}: {len(both)} groups of '
          f'{split!r} are in other splits, too {some(both)}. Leave '
          "out the split, and take slices such as '[:80%]'."
        )
    self._keep(np.flatnonzero(is_chosen))
    if before.ndim == 1 and (absent := {*before} - {*self.labels}):
      names = [self._named(x) for x in sorted(absent)]
      self._say(f'the split {chosen!r} has no examples of {some(names)}')

  def _files_of_rows(self):
    """Return `files` and `missing`."""
    files, codes, is_there, several = self._opened.paths(self._image_key)
    if both := several.keys() & {*self.rows.tolist()} if several else ():
      cell, paths = several[min(both)]
      raise UserError(
        f'{self.where}: {cell} could be {paths[0]} or {paths[1]}. Write more'
        f' of the path into the table, or set {_OPTION}.path to a folder.'
      )
    codes = codes[self.rows]
    first = np.zeros(len(files), np.int64)
    first[codes[::-1]] = np.arange(len(codes))[::-1]
    one, two = self.labels[first[codes]], self.labels
    differ = (one != two) & ((one == one) | (two == two))  # NaN equals NaN
    for i in np.flatnonzero(differ.any(-1) if differ.ndim > 1 else differ):
      file = os.fsdecode(files[int(self.rows[i])].as_py())
      raise UserError(
        f'{self.where}: two rows of {file} have '
        f'the labels {self._named(one[i])} and {self._named(two[i])}. Expected '
        'one row for each image; several labels are one cell, such as cat|dog.'
      )
    rows = np.flatnonzero(first[codes] == np.arange(len(codes)))
    if twice := len(codes) - len(rows):
      self._say(f'left out {twice:,} rows that are repeated')
    files, is_there = (x.take(self.rows[rows]) for x in (files, is_there))
    text = pc.replace_substring_regex(files, '/?[^/]*$', '')
    folders = sorted(map(os.fsdecode, pc.unique(text).to_pylist()))
    if len(folders) > 1:
      self._say(f'labels are from the table, not the folders {some(folders)}')
    self._keep(rows)
    if missing := np.flatnonzero(~is_there).tolist():
      names = [os.fsdecode(files[i].as_py()) for i in missing]
      self._say(f'files that are not there {some(names)}')
    return files, missing

  def _say(self, text):
    tables.say_once(f'{self.where}: {text}')

  def _keep(self, places):
    self.rows, self.labels = self.rows[places], self.labels[places]

  def _named(self, label):
    is_class = self.names and not label.ndim
    return str(self.names[label] if is_class else label)

  def _image_column(self, key):
    """Return the name of the column whose cells are files."""
    tables.check(self.where, self.columns, 'image_key', key)
    counts = {}
    likely = [x for x in self.columns if x.lower() in FILES]
    for name in [key] if key else likely or self.columns:
      cells = self.columns[name]
      sample = cells.take(np.arange(0, len(cells), len(cells) // 1000 + 1))
      counts[name] = self._files.find_all(sample.texts())[1].sum()
    found = [x for x, n in counts.items() if 2 * n > max(counts.values())]
    found = [x for x in found if not x.startswith(_UNNAMED)] or found
    found = [x for x in found if is_image(str(self.columns[x][0]))] or found
    if (chosen := _likely(found, IMAGES)) is None:
      what = f'{len(found)} columns have' if found else 'no column has'
      what = f'{likely[0]!r} does not have' if likely else what
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
    cells = {
      k: sorted({*map(str, Cells.of(x).different)})
      for k, x in self.columns.items()
    }
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

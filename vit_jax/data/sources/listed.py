"""Tables that list images and their labels: CSV, TSV and parquet files."""

import codecs
import csv
import functools
import io
import itertools
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc
from etils import epath

from vit_jax.data.sources import tables
from vit_jax.data.sources.columns import Column, binary, of_texts, read_csv
from vit_jax.data.sources.image_files import Files, is_image
from vit_jax.data.sources.tables import some
from vit_jax.data.targets import Cells, Targets
from vit_jax.types import UserError

# Names of columns, in lower case; the first that is there is used. Those after
# 'img' are of images only if there is none of the others.
FILES = 'path', 'file', 'filename', 'file_name', 'image', 'image_path', 'img'
IMAGES = *FILES, 'image_id', 'id'
LABELS = ('label', 'labels', 'class', 'target')
_UNNAMED = 'Unnamed: '  # as pandas calls an index
_RAW = re.compile('[\ud800-\udfff]')  # bytes that are not UTF-8
_TYPED = '.parquet', '.jsonl'
_BLOCK = 500  # rows at a time: more start the garbage collector
_OPTION = '--config.data.source'


class Opened:
  """The cells of a table and the files of its folder; several sources share it.

  `columns` has the cells by name, and `files` finds files by their texts.
  """

  def __init__(self, where: str, root: str) -> None:
    self.where, self.files = where, Files(root, where)
    ending = os.path.splitext(where)[1].lower()
    if ending in ('.xlsx', '.xls', '.ods', '.json'):
      raise UserError(
        f'{where}: {ending} is not read. Save the table as .csv or .parquet, '
        'or as .jsonl with a JSON object on each line.'
      )
    data, is_typed = epath.Path(where).read_bytes(), ending in _TYPED
    self.columns = _typed(where, data) if is_typed else self._texts(data)

  @functools.lru_cache(maxsize=1)  # noqa: B019, as `_opened`
  def paths(self, key: str) -> tuple[Any, np.ndarray, dict[int, Any]]:
    """Return what `find_all` does, and equal ints of equal paths."""
    files, odd = self.files.find_all(self.columns[key].encoded())
    return files, files.dictionary_encode().indices.to_numpy(), odd

  def _texts(self, data):
    """Return {name: Column} of a CSV or TSV file."""
    csv.field_size_limit(2**31 - 1)  # cells with masks are long
    start = data[:10_000]
    separator = max(',;\t', key=lambda x: _regular([*_rows(start, x)]))
    rows = self._rows(data, separator)
    first = [x.strip() for x in next(rows, [])]
    names, is_header = self._names(first)
    if found := read_csv(data, separator, names, is_header):
      return found
    rows = rows if is_header else itertools.chain([first], rows)
    width, wrong, parts = len(names), [], []
    while not wrong and (block := [*itertools.islice(rows, _BLOCK)]):
      wrong = [x for x in block if len(x) < width or _is_any(x[width:])]
      parts.append([binary(x) for x in zip(*block)])
    if wrong or not parts or len({*names}) < width:
      what = 'equal columns' if parts else '0 rows'
      what = f'the row {wrong[0]}' if wrong else what
      raise UserError(
        f'{self.where} has {what}. Expected different columns, and a cell of '
        f'each in every row: {names}. Quote cells that have a separator.'
      )
    return {k: of_texts(x) for k, x in zip(names, zip(*parts))}

  def _rows(self, data, separator):
    """Return the rows; cells not in UTF-8 that name no file are cp1252."""
    rows = _rows(data, separator)
    if not _RAW.search(data.decode(errors='surrogateescape')):
      return rows
    raw = sorted({x.strip() for row in rows for x in row if _RAW.search(x)})
    raw = [x for x, paths in zip(raw, self.files.find(raw)) if not paths]
    found = {x: os.fsencode(x).decode('cp1252', 'surrogateescape') for x in raw}
    if raw:
      what = f'not UTF-8, so read as cp1252, as in {found[raw[0]]!r}'
      tables.say_once(f'{self.where}: {what}')
    rows = ([x.strip() for x in row] for row in _rows(data, separator))
    return ([found.get(x, x) for x in row] for row in rows)

  def _names(self, first):
    """Return (names of the columns, whether the first row has them).

    The first row of texts is a header, unless it names an image. Without one,
    two columns are 'path' and 'label', others '0', '1', ...
    """
    is_known = named(first, IMAGES) or not any(self.files.find(first))
    if is_known and not any(map(is_image, first)):
      return [x or f'{_UNNAMED}{i}' for i, x in enumerate(first)], True
    if len(first) == 2:
      return ['path', 'label'], False
    return [*map(str, range(len(first)))], False


@functools.lru_cache(maxsize=1)  # evaluators open the same table
def _opened(where, root, stamps):
  return Opened(where, root)


def _stamps(*paths):
  """Return what changes with local files and folders; others always change."""
  try:
    return str([(x.st_mtime_ns, x.st_size) for x in map(os.stat, paths)])
  except OSError:
    return time.monotonic_ns()


class Table:
  """Rows of a table with an image and labels.

  Args:
    keys: columns of 'image', 'label', 'split' and 'group', or None.

  Attributes:
    columns: cells by the name of the column; rows: those that are left.
    labels, names: see targets.py; without targets, labels are 0.
    files: Arrow array of the paths below the root, as bytes, each once;
      missing: indices of those that are not there.
    used: columns that were chosen, by what they are.
  """

  def __init__(
    self,
    path: Any,
    root: str,
    keys: Mapping[str, str | None],
    *,
    targets: Targets | None,
    split: str | None,
    names: Sequence[str] | None,
  ) -> None:
    self.where = os.fspath(path)
    self._opened = _opened(self.where, root, _stamps(self.where, root))
    self.columns = self._opened.columns
    image, self.names = self._image_column(keys['image']), None
    self.rows = np.arange(len(self.columns[image]))
    self.labels = np.zeros(len(self.rows), np.int32)
    self.used = {'image': image}
    if targets is not None:
      others = image, keys['split'], keys['group']
      chosen = targets.columns or [keys['label'] or self._label_column(others)]
      tables.check(self.where, self.columns, 'label_key', *chosen)
      self.used['label'] = '+'.join(chosen)
      cells = {x: self.columns[x] for x in chosen}
      found = tables.labelled(self.where, targets, cells, names)
      self.rows, self.labels, self.names = found
    if split is not None:
      self._choose(split, keys['split'], keys['group'])
      self.used['split'] = keys['split']
    elif keys['split'] in self.columns:
      self._say(
        f'{keys["split"]!r} is a column, and all its rows are used. Set split '
        'to one of its cells.'
      )
    if keys['group'] is not None:
      self.used['group'] = keys['group']
    self.files, self.missing = self._files_of_rows()

  def _choose(self, split, key, group_key):
    """Keep the rows of a split, in upper or lower case if one is like it.

    Its groups, of a column or a pattern of paths, may not be in other splits.
    """
    tables.check(self.where, self.columns, 'split_key', key)
    cells = Cells.of(self.columns[key][self.rows])
    texts = [*map(str, cells.different)]
    alike = [x for x in texts if x.casefold() == split.casefold()]
    same = [split] if split in alike else alike
    if len(same) != 1:
      raise UserError(
        f'{self.where} has no split {split!r}. Its column {key!r} has'
        f' {sorted(texts)}.'
      )
    is_chosen = np.array([x in same for x in texts])[cells.index]
    if group_key is not None:
      column = self.used['image'] if '(' in group_key else group_key
      tables.check(self.where, self.columns, 'group_key', column)
      groups = tables.groups(self.columns[column][self.rows], group_key)
      here = {*itertools.compress(groups, is_chosen)} - {''}
      if both := sorted(here & {*itertools.compress(groups, ~is_chosen)}):
        raise UserError(
          f'{self.where}: group_key={group_key!r}: {len(both)} groups of '
          f'{split!r} are in other splits, too {some(both)}. Leave '
          "out the split, and take slices such as '[:80%]'."
        )
    before = self.labels
    self._keep(np.flatnonzero(is_chosen))
    if before.ndim == 1 and (absent := {*before} - {*self.labels}):
      names = [self._named(x) for x in sorted(absent)]
      self._say(f'the split {same[0]!r} has no examples of {some(names)}')

  def _files_of_rows(self):
    """Return `files` and `missing`."""
    files, codes, odd = self._opened.paths(self.used['image'])
    rows = odd.keys() & self.rows.tolist() if odd else ()
    for cell, paths in (odd[i] for i in sorted(rows) if odd[i][1]):
      raise UserError(
        f'{self.where}: {cell} could be {paths[0]} or {paths[1]}. Write more'
        f' of the path into the table, or set {_OPTION}.path to a folder.'
      )
    _, first, place = np.unique(
      codes[self.rows], return_index=True, return_inverse=True
    )
    one, two = self.labels[first[place]], self.labels
    differ = (one != two) & ((one == one) | (two == two))  # NaN equals NaN
    for i in np.flatnonzero(differ.any(-1) if differ.ndim > 1 else differ):
      file = os.fsdecode(files[int(self.rows[i])].as_py())
      raise UserError(
        f'{self.where}: two rows of {file} have '
        f'the labels {self._named(one[i])} and {self._named(two[i])}. Expected '
        'one row for each image; several labels are one cell, such as cat|dog.'
      )
    if twice := len(self.rows) - len(first):
      self._say(f'left out {twice:,} rows that are repeated')
    self._keep(np.sort(first))
    files = files.take(self.rows)
    text = pc.replace_substring_regex(files, '/?[^/]*$', '')
    folders = sorted(map(os.fsdecode, pc.unique(text).to_pylist()))
    if len(folders) > 1:
      self._say(f'labels are from the table, not the folders {some(folders)}')
    rows = enumerate(self.rows.tolist())
    if missing := [i for i, x in rows if x in odd]:
      names = [odd[self.rows[i]][0] for i in missing]
      self._say(f'files that are not there {some(names)}')
    return files, missing

  def channel(self, key: str, decode: Any) -> Any:
    """Return the files of one more channel of rasters, as `files`."""
    tables.check(self.where, self.columns, 'image_key', key)
    files, _, odd = self._opened.paths(key)
    if decode.dtype == 'uint8' or odd.keys() & self.rows.tolist():
      raise UserError(
        f'{self.where}: {key!r} is a column for one of several channels. '
        'Expected the word channels=N of the config, and a file in each row.'
      )
    self.used['image'] += f'+{key}'
    return files.take(self.rows)

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
    files, counts = self._opened.files, {}
    likely = [x for x in self.columns if x.lower() in FILES]
    for name in [key] if key else likely or self.columns:
      cells = self.columns[name]
      sample = cells[np.arange(0, len(cells), len(cells) // 1000 + 1)]
      odd = files.find_all(sample.encoded())[1].values()
      counts[name] = len(sample) - sum(not paths for _, paths in odd)
    found = [x for x, n in counts.items() if 2 * n > max(counts.values())]
    found = [x for x in found if not x.startswith(_UNNAMED)] or found
    found = [x for x in found if is_image(str(self.columns[x][0]))] or found
    if (chosen := _likely(found, IMAGES)) is None:
      what = f'{len(found)} columns have' if found else 'no column has'
      what = f'{likely[0]!r} does not have' if likely else what
      raise UserError(
        f'{self.where}: {what} the names of files below {files.root}. '
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
    found = []
    for name, column in self.columns.items():
      cells = sorted({*map(str, Cells.of(column).different)})
      found.append(f'{name} {some([x[:20] for x in cells])}')
    return '; '.join(found)


def named(columns: Iterable[str], names: Sequence[str]) -> str | None:
  """Return the column with the first of the names, in upper or lower case."""
  found = {x.lower(): x for x in columns}
  return next((found[x] for x in names if x in found), None)


def _likely(columns, names):
  """Return the column with the first of the names, else the only one."""
  return named(columns, names) or (columns[0] if len(columns) == 1 else None)


def _typed(where, data):
  """Return {name: Column} of a parquet file or of JSON lines."""
  from pyarrow import ArrowInvalid, json, parquet

  is_json = where.lower().endswith('.jsonl')
  read = json.read_json if is_json else parquet.read_table
  try:
    table = read(io.BytesIO(data))
  except (ArrowInvalid, OSError) as error:
    raise UserError(f'{where} is damaged: {error}') from error
  columns = (Column(x.combine_chunks()) for x in table.columns)
  return dict(zip(table.column_names, columns))


def _rows(data, separator):
  """Return the rows of UTF-8 or UTF-16 that are not empty."""
  is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
  encoding = ('utf-16',) if is_utf16 else ('utf-8-sig', 'surrogateescape')
  text = io.TextIOWrapper(io.BytesIO(data), *encoding, newline='')
  return filter(_is_any, csv.reader(text, delimiter=separator))


def _is_any(cells):
  return any(map(str.strip, cells))


def _regular(rows):
  """Return the number of rows that have as many cells as the first, not one."""
  return sum(len(row) == len(rows[0]) > 1 for row in rows)

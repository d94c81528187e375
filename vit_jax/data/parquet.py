"""Images in parquet files, as Hugging Face and others store them."""

import collections
import concurrent.futures
import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from absl import logging

from vit_jax.config.domains import OneOf, Range, checked
from vit_jax.data import arrow, fingerprints, image_files, shards, tables
from vit_jax.runs.files import PathLike

_THREADS = 16  # files whose labels are read at a time
_LOADS = 16  # of row groups, before their cost is judged
_WASTE = 8  # bytes read for each byte of the images that is worth a warning


@checked
class Parquet:
  """Images and labels in parquet files, local or on an object store.

  The column of the image has the bytes of image files, or the struct
  {bytes, path} of Hugging Face. The column of the label has ints, bools, texts,
  or lists of K numbers. Labels are read at the start, images when they are
  needed, a whole row group at a time: the latest ones stay in memory. Reading
  in a shuffled order therefore reads many times the bytes of the images if row
  groups have many rows. A warning says so; tools.prepare converts the files.

  source[i] is {'image': bytes, 'label': int or float [K]}. The order is that of
  the files and of their rows.

  Args:
    files: names, globs ('train-*.parquet'), braces, or folders of parquet
      files, see shards.py.
    split: reads only the files of this split, see `shards.expand`.
    image_key: column of the image.
    label_key: column of the label. '' is for images without labels: each label
      is 0.
    class_names: names of the classes in the order of their labels, or a file
      with one name per line, or a JSON list. Default: those in the metadata of
      Hugging Face; else the sorted labels, if they are texts.
    channels: 1 or 3, to which the images are decoded.
    exif: apply the EXIF orientation; see `images.decode`.
    cache_bytes: limit on the row groups that a process keeps in memory; the
      latest one is kept whatever its size.

  Raises:
    ValueError: pyarrow is not installed; no such file; a file that is not
      parquet, or damaged; a missing column, or one of the wrong type; empty or
      invalid labels.
  """

  def __init__(
    self,
    files: PathLike | Sequence[PathLike],
    *,
    split: str | None = None,
    image_key: str = 'image',
    label_key: str = 'label',
    class_names: PathLike | Sequence[str] | None = None,
    channels: Annotated[int, OneOf(1, 3)] = 3,
    exif: bool = True,
    cache_bytes: Annotated[int, Range(1, 2**50)] = 2**29,
  ) -> None:
    arrow.pyarrow()
    self.channels: int = channels
    self.exif: bool = exif
    self._image_key, self._label_key = image_key, label_key
    names = shards.expand(files, endings=('.parquet',), split=split)
    shards.check_one_split(names, split)
    self._shards = shards.Shards(names)
    self._groups = _RowGroups(self._shards, image_key, cache_bytes)
    known = tables.class_names(class_names)
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
      found = list(pool.map(self._open, range(len(names))))
    if known is None:
      known = arrow.class_names(found[0][0].metadata, label_key)
    rows = [count for _, counts, _ in found for count in counts]
    self._file = np.repeat(
      np.arange(len(names), dtype=np.int32), [len(x) for _, x, _ in found]
    )
    self._first = np.array([i for _, x, _ in found for i in range(len(x))])
    self._ends = np.cumsum(rows, dtype=np.int64)
    name = names[0] if len(names) == 1 else f'{names[0]}, ...'
    if not rows or not self._ends[-1]:
      raise ValueError(f'{name} has no rows.')
    if label_key:
      import pyarrow as pa

      columns = [column for *_, column in found]
      kinds = {str(column.type) for column in columns}
      if len(kinds) > 1:
        raise ValueError(
          f'the column {label_key!r} is {" and ".join(sorted(kinds))} in'
          f' different files of {name}. Write them with one schema.'
        )
      chunks = [chunk for column in columns for chunk in column.chunks]
      column = pa.chunked_array(chunks, type=columns[0].type)
      self._labels, known = arrow.encode_labels(
        f'{name}, column {label_key!r}', column, known
      )
    else:
      self._labels = np.zeros(int(self._ends[-1]), np.int32)
      known = None
    self.class_names: list[str] | None = known
    self.num_classes: int | None = None if known is None else len(known)
    if self._labels.ndim > 1:
      self.num_classes = self._labels.shape[1]

  def __len__(self) -> int:
    return len(self._labels)

  def __getitem__(self, index: int) -> dict[str, Any]:
    index = range(len(self))[index]
    group, file, row = self._place(index)
    folder = arrow.folder_of(self._shards[file])
    cell = self._groups.cell(file, int(self._first[group]), row)
    label = self._labels[index]
    return {
      'image': arrow.image_bytes(cell, folder),
      'label': label.copy() if label.ndim else int(label),
    }

  def labels(self) -> np.ndarray:
    """Return the labels of all examples: int32 [n] or float32 [n, K]."""
    return self._labels.copy()

  def describe(self, index: int) -> str:
    """Return the file, the row group and the row in it."""
    group, file, row = self._place(range(len(self))[index])
    return (
      f'row {row} of row group {int(self._first[group])} of'
      f' {self._shards[file]}'
    )

  def fingerprint(self) -> dict[str, Any]:
    """Return class sizes, a hash of the labels, and one of the row groups."""
    labels = self._labels.astype(self._labels.dtype.newbyteorder('<'))
    return {
      'kind': 'vit_jax.data.parquet.Parquet',
      'num_examples': len(self),
      'classes': tables.class_sizes(self._labels, self.class_names),
      'files': self._shards.fingerprint(),
      'labels': fingerprints.digest([labels.tobytes()]),
    }

  def _place(self, index):
    """Return (number of the row group, number of the file, row in group)."""
    group = int(np.searchsorted(self._ends, index, side='right'))
    start = int(self._ends[group - 1]) if group else 0
    return group, int(self._file[group]), index - start

  def _open(self, file):
    """Return (schema, rows of each row group, column of labels) of a file."""
    name, keys = self._shards[file], (self._image_key, self._label_key)
    with _errors(name), self._groups.open(file) as opened:
      schema = opened.schema_arrow
      arrow.check_columns(name, schema, *keys)
      about = opened.metadata
      rows = [about.row_group(i).num_rows for i in range(about.num_row_groups)]
      labels = opened.read([keys[1]]).column(0) if keys[1] else None
    return schema, rows, labels


@contextlib.contextmanager
def _errors(name):
  """Turn errors of pyarrow and file systems into one that names the file."""
  try:
    yield
  except Exception as error:  # of pyarrow, OSErrors, and of file systems
    if str(name) in str(error) and isinstance(error, ValueError):
      raise
    raise ValueError(
      f'cannot read {name} as parquet: {error}. It is damaged, or not a parquet'
      ' file. Copy it again.'
    ) from error


class _RowGroups:
  """Row groups of parquet files, of which the latest are kept in memory.

  Several threads may read. A row group that two of them need is read once.

  Args:
    files: parquet files.
    column: the only column that is read.
    limit: on the bytes that are kept.
  """

  def __init__(self, files: shards.Shards, column: str, limit: int) -> None:
    self._files, self._column, self._limit = files, column, limit
    self._start()

  def open(self, file: int) -> Any:
    """Return an open pyarrow ParquetFile; a context manager."""
    import pyarrow.parquet as pq

    name = self._files[file]
    about = self._metadata.get(file)
    fs, path = image_files.file_system(name)
    source = path if fs is None else fs.open(path, 'rb')
    # Remote reads that lie close together become one request.
    opened = pq.ParquetFile(source, metadata=about, pre_buffer=fs is not None)
    self._metadata[file] = opened.metadata
    return opened

  def cell(self, file: int, group: int, row: int) -> Any:
    """Return a value of the column; raise ValueError if it cannot be read."""
    with self._lock:
      future = self._kept.get((file, group))
      is_new = future is None
      if future is None:
        future = self._kept[file, group] = concurrent.futures.Future()
      self._kept.move_to_end((file, group))
    if is_new:
      self._load(file, group, future)
    value = future.result()[row].as_py()
    if not self._warned:
      self._count(value)
    return value

  def _load(self, file, group, future):
    name = self._files[file]
    try:
      with _errors(f'{name}, row group {group},'), self.open(file) as opened:
        table = opened.read_row_group(group, columns=[self._column])
        column = table.column(self._column)
      future.set_result(column)
    except BaseException as error:
      with self._lock:
        self._kept.pop((file, group), None)
      future.set_exception(error)
      return
    with self._lock:
      self._sizes[file, group] = column.nbytes
      self._loads += 1
      self._read_bytes += column.nbytes
      while sum(self._sizes.values()) > self._limit and len(self._sizes) > 1:
        oldest = next(key for key in self._kept if key in self._sizes)
        del self._kept[oldest], self._sizes[oldest]

  def _count(self, value):
    """Warn once if much more is read than is used."""
    data = value.get('bytes') if isinstance(value, dict) else value
    size = len(data or b'')
    with self._lock:
      self._used_bytes += size
      is_waste = self._read_bytes > _WASTE * self._used_bytes
      warn = self._loads >= _LOADS and is_waste and not self._warned
      self._warned |= warn
    if warn:
      logging.warning(
        f'Parquet {self._files[0]}: read {self._read_bytes / 1e6:,.0f} MB for'
        f' {self._used_bytes / 1e6:,.1f} MB of images, because a row group is'
        ' read as a whole and the order is shuffled. Set cache_bytes to the'
        ' size of the data if it fits into memory (of each worker), or convert'
        ' it once with\n  python -m vit_jax.tools.prepare SOURCE DEST'
      )

  def _start(self):
    self._lock = threading.Lock()
    self._metadata: dict[int, Any] = {}
    self._kept: collections.OrderedDict[
      tuple[int, int], concurrent.futures.Future[Any]
    ] = collections.OrderedDict()
    self._sizes: dict[tuple[int, int], int] = {}
    self._loads = self._read_bytes = self._used_bytes = 0
    self._warned = False

  def __getstate__(self) -> dict[str, Any]:
    return {
      'files': self._files,
      'column': self._column,
      'limit': self._limit,
    }

  def __setstate__(self, state: Mapping[str, Any]) -> None:
    self.__init__(**state)  # type: ignore[misc]

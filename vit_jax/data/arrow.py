"""Images and labels in Arrow tables: what parquet and Hugging Face share."""

import json
import os
import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

import fsspec
import numpy as np

from vit_jax.data import tables


def image_bytes(value: Any, folder: str = '') -> bytes:
  """Return the bytes of an image from a cell of a table.

  Args:
    value: bytes, or {'bytes': bytes or None, 'path': str or None}.
    folder: that relative paths start from.

  Raises:
    ValueError: there is neither; OSError: the file cannot be read.
  """
  if isinstance(value, Mapping):
    if value.get('bytes') is None and value.get('path'):
      return _read(value['path'], folder)
    value = value.get('bytes')
  if isinstance(value, bytes):
    return value
  raise ValueError('the cell of the image is empty (null).')


def _read(path, folder):
  if '://' not in path and '::' not in path:
    path = posixpath.join(folder, path)
  try:
    with fsspec.open(path, 'rb') as file:
      return file.read()
  except Exception as error:  # each file system raises its own types
    raise OSError(f'cannot read the file {path}: {error}') from error


def is_image_type(kind: Any) -> bool:
  """Return whether cells of an Arrow type can be images."""
  import pyarrow as pa

  if pa.types.is_struct(kind):
    names = [kind.field(i).name for i in range(kind.num_fields)]
    if 'bytes' not in names:
      return False
    inner = kind.field('bytes').type
    # Without any bytes, the images are in files.
    return is_image_type(inner) or (pa.types.is_null(inner) and 'path' in names)
  return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def encode_labels(
  where: str, column: Any, names: Sequence[str] | None
) -> tuple[np.ndarray, list[str] | None]:
  """Return the labels in a column, and the class names or None.

  Args:
    where: what has the labels; it begins error messages.
    column: Arrow array of ints, bools, texts, or lists of K numbers.
    names: of the classes.

  Returns:
    (int32 [n] or float32 [n, K], names).

  Raises:
    ValueError: empty cells; labels of another kind or out of range.
  """
  import pyarrow as pa

  if column.null_count:
    empty = np.asarray(column.is_null())
    raise ValueError(
      f'{where}: {column.null_count} of {len(column)} labels are empty (null),'
      f' the first in row {int(empty.argmax())}. Remove these rows, or set'
      " label_key='' for images without labels."
    )
  if pa.types.is_integer(column.type):
    values = column.to_numpy()
    limit = 2**31 if names is None else len(names)
    wrong = np.flatnonzero((values < 0) | (values >= limit))
    if len(wrong):
      row = int(wrong[0])
      raise ValueError(
        f'{where}: the label of row {row} is {values[row]}, not in'
        f' [0, {limit}). -1 often means that a split has no labels.'
      )
    return values.astype(np.int32), None if names is None else list(names)
  return tables.encode(where, column.to_pylist(), names)


def class_names(metadata: Mapping[bytes, bytes] | None, key: str) -> Any:
  """Return the names that the metadata of Hugging Face gives a column."""
  try:
    about = json.loads((metadata or {})[b'huggingface'])
    names = about['info']['features'][key]['names']
  except (KeyError, TypeError, ValueError):
    return None
  if isinstance(names, Mapping):
    names = [names[str(i)] for i in range(len(names))]
  return [str(name) for name in names]


def check_columns(
  where: str, schema: Any, image_key: str, label_key: str
) -> None:
  """Raise ValueError unless a schema has the image and, if named, the label."""
  kinds = {field.name: field.type for field in schema}
  listed = ', '.join(f'{name} ({kind})' for name, kind in kinds.items())
  for argument, key in (('image_key', image_key), ('label_key', label_key)):
    if key and key not in kinds:
      none = ", or to '' for images without labels" * (argument == 'label_key')
      raise ValueError(
        f'{where} has no column {key!r} ({argument}). It has {listed}. Set'
        f' {argument} to one of them{none}.'
      )
  if not is_image_type(kinds[image_key]):
    raise ValueError(
      f'the column {image_key!r} of {where} is {kinds[image_key]}. Expected the'
      f' bytes of image files, or a struct of bytes and path. It has {listed}.'
      ' Set image_key to another one.'
    )


def pyarrow(extra: str = 'parquet') -> Any:
  """Return the module pyarrow; ValueError says how to install it."""
  try:
    import pyarrow.parquet as _  # noqa: F401
  except ImportError as error:
    raise ValueError(
      f"this source needs pyarrow: pip install 'vit_jax[{extra}]'"
    ) from error
  import pyarrow

  return pyarrow


def folder_of(name: str) -> str:
  """Return the folder of a file or URL."""
  return posixpath.dirname(os.fspath(name))

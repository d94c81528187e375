"""Writers of files: rows, arrays, predictions and features.

The writers of predictions (table, CSV, JSON) and of features (npz) take an
iterator of results and keep none of them in memory.
"""

import contextlib
import csv
import io
import json
import os
import pathlib
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import numpy as np
from rich.cells import cell_len

from vit_jax.runs.files import PathLike, replacing, write_atomically


def write_rows(
  path: PathLike,
  rows: Iterable[Mapping[str, Any]],
  columns: Sequence[str] | None = None,
) -> None:
  """Write dicts as CSV. Values that a row lacks are empty.

  Args:
    path: of the file.
    rows: dicts.
    columns: keys of the rows, in order; None: all keys.
  """
  columns = columns or dict.fromkeys(key for row in rows for key in row)
  file = io.StringIO()
  writer = csv.DictWriter(file, columns, lineterminator='\n')
  writer.writeheader()
  writer.writerows(rows)
  write_atomically(path, file.getvalue())


def write_values(path: PathLike, values: Any) -> None:
  """Write JSON values."""
  write_atomically(path, json.dumps(values, indent=2) + '\n')


def write_arrays(path: PathLike, arrays: Mapping[str, Any]) -> None:
  """Write a dict of arrays as a compressed npz."""
  file = io.BytesIO()
  np.savez_compressed(file, **arrays)
  write_atomically(path, file.getvalue())


def top(probabilities: np.ndarray, k: int) -> np.ndarray:
  """Return the indices of the k largest of [K], in descending order."""
  k = min(k, len(probabilities))
  best = np.argpartition(-probabilities, k - 1)[:k]
  return best[np.lexsort((best, -probabilities[best]))]


def write_table(
  file: TextIO,
  results: Iterable[Mapping[str, Any]],
  names: Sequence[str] | None,
  top_k: int,
  paths: Sequence[str] = (),
) -> None:
  """Write aligned columns: path, class and probability; one row per rank.

  Args:
    file: a terminal gets lines that fit it.
    results, names, top_k: as of the other writers.
    paths: all that will be written, which sets the width of the column.
  """
  labels = ['class', *(names or ['class 0000'])]
  wide = min(max(map(cell_len, labels)), 40)
  longest = max(map(cell_len, [*paths, 'image']))
  if file.isatty():  # the rest of a line takes 21 cells
    rest = shutil.get_terminal_size().columns - 21
    wide = min(wide, max(rest // 2, 10))
    longest = min(longest, max(rest - wide, 10))
  print(f'{"image":{longest}}  rank  {"class":{wide}}  probability', file=file)
  for path, rows in _ranked(results, names, top_k):
    for rank, (class_id, name, probability) in enumerate(rows, 1):
      image = _column(path if rank == 1 else '', longest, keep_end=True)
      label = _column(name or f'class {class_id}', wide)
      print(f'{image}  {rank:4}  {label}  {probability:11.2%}', file=file)


def _column(text, width, keep_end=False):
  """Return the text in `width` cells of a terminal, shortened or padded."""
  text = ''.join(x if x.isprintable() else '?' for x in text)
  if cell_len(text) > width:
    while cell_len(text) > width - 1:
      text = text[1:] if keep_end else text[:-1]
    text = f'…{text}' if keep_end else f'{text}…'
  return text + ' ' * (width - cell_len(text))


def write_csv(
  file: TextIO,
  results: Iterable[Mapping[str, Any]],
  names: Sequence[str] | None,
  top_k: int,
) -> None:
  """Write a header, and one row per path and rank."""
  writer = csv.writer(file, lineterminator='\n')
  writer.writerow(['path', 'rank', 'class_id', 'class_name', 'probability'])
  for path, rows in _ranked(results, names, top_k):
    for rank, (class_id, name, probability) in enumerate(rows, 1):
      writer.writerow([path, rank, class_id, name, f'{probability:.6g}'])


def write_json(
  file: TextIO,
  results: Iterable[Mapping[str, Any]],
  names: Sequence[str] | None,
  top_k: int,
) -> None:
  """Write a list with one item per line; class_name is null without names."""
  file.write('[')
  for i, (path, rows) in enumerate(_ranked(results, names, top_k)):
    predictions = [
      {'class_id': i, 'class_name': name, 'probability': float(f'{p:.6g}')}
      for i, name, p in rows
    ]
    item = {'path': path, 'predictions': predictions}
    file.write(',\n'[not i :] + json.dumps(item, ensure_ascii=False))
  file.write('\n]\n')


FORMATS = {'table': write_table, 'csv': write_csv, 'json': write_json}


def default_format(path: PathLike | None) -> str:
  """Return the format for a file, or for stdout if path is None.

  The ending .csv or .json of a file decides, and a terminal gets a table.
  """
  if path is None:
    return 'table' if sys.stdout.isatty() else 'csv'
  ending = pathlib.Path(path).suffix[1:]
  return ending if ending in FORMATS else 'table'


def _ranked(results, names, top_k):
  """Yield (path, [(class_id, name or None, probability), ...])."""
  for result in results:
    probabilities = result.get('probabilities')
    if probabilities is None or probabilities.ndim != 1:
      raise ValueError(
        'The weights have no image-level head. Leave out --format and --output '
        'to write only features.'
      )
    ranks = top(probabilities, top_k).tolist()
    rows = [(i, names and names[i], float(probabilities[i])) for i in ranks]
    yield result['path'], rows


def without_errors(
  results: Iterable[Mapping[str, Any]], skipped: list[Any]
) -> Iterator[Mapping[str, Any]]:
  """Yield the results without 'error', and append the errors to `skipped`."""
  for result in results:
    if 'error' in result:
      skipped.append(result['error'])
    else:
      yield result


def exit_status(skipped: list[Any], total: int) -> int:
  """Return 1 if images were skipped, and list their errors on stderr."""
  if skipped:
    print(f'{len(skipped)} of {total} skipped:', file=sys.stderr)
    print('\n'.join(skipped), file=sys.stderr)
  return 1 if skipped else 0


def check_folder(path: PathLike | None) -> None:
  """Raise ValueError unless `path` can be written; None is stdout."""
  folder = pathlib.Path(path).expanduser().parent if path else None
  if folder and not (folder.is_dir() and os.access(folder, os.W_OK)):
    raise ValueError(
      f'{path} cannot be written: {folder} is not a folder that you may write '
      'to.'
    )


@contextlib.contextmanager
def opened(path: PathLike | None) -> Iterator[TextIO]:
  """Yield stdout if path is None, else a text file, renamed when complete."""
  if path is None:
    # Names that the terminal's encoding cannot show are escaped.
    if hasattr(sys.stdout, 'reconfigure'):
      sys.stdout.reconfigure(errors='backslashreplace')
    yield sys.stdout
    sys.stdout.flush()
    return
  options: Any = {'encoding': 'utf-8', 'errors': 'backslashreplace'}
  with (
    replacing(pathlib.Path(path).expanduser()) as partial,
    open(partial, 'w', newline='', **options) as file,
  ):
    yield file


def save_features(
  results: Iterable[Mapping[str, Any]], path: PathLike
) -> Iterator[Mapping[str, Any]]:
  """Yield the results, and write their features to an npz at the end.

  It has the arrays 'paths' [N] and 'features' float32 [N, ...]. Features are
  kept in a temporary file in the same folder, not in memory.
  """
  paths, shape = [], ()
  with (
    replacing(pathlib.Path(path).expanduser()) as partial,
    tempfile.TemporaryFile(dir=partial.parent) as rows,
  ):
    for result in results:
      features = np.ascontiguousarray(result['features'], '<f4')
      rows.write(features.data)
      paths.append(result['path'])
      shape = features.shape
      yield result
    rows.seek(0)
    header = {'descr': '<f4', 'fortran_order': False}
    header['shape'] = (len(paths), *shape)
    with zipfile.ZipFile(partial, 'w') as archive:
      with archive.open('paths.npy', 'w', force_zip64=True) as file:
        np.lib.format.write_array(file, np.array(paths, str))
      with archive.open('features.npy', 'w', force_zip64=True) as file:
        np.lib.format.write_array_header_1_0(file, header)
        shutil.copyfileobj(rows, file)

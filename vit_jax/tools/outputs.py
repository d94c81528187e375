"""How predictions are written: as a table, CSV or JSON, and features as npz.

Each writer takes results one at a time and keeps none of them.
"""

import contextlib
import csv
import json
import os
import pathlib
import shutil
import sys
import tempfile
import zipfile

import numpy as np


def top(probabilities, k):
  """Indices of the k largest of [K] (all if K < k), the largest first."""
  k = min(k, len(probabilities))
  best = np.argpartition(-probabilities, k - 1)[:k]
  return best[np.lexsort((best, -probabilities[best]))]


def write_table(file, results, names, top_k):
  """For people: 'path', and below it a line a class; top_k=1: a line each."""
  width = min(max(map(len, names or ['class 0000'])), 40)
  for i, (path, rows) in enumerate(_ranked(results, names, top_k)):
    if top_k == 1:
      ((class_id, name, probability),) = rows
      label = name or f'class {class_id}'
      print(f'{probability:7.2%}  {label:{width}}  {path}', file=file)
      continue
    print('\n' * bool(i) + path, file=file)
    for rank, (class_id, name, probability) in enumerate(rows, 1):
      label = name or f'class {class_id}'
      print(f'{rank:3}. {probability:8.2%}  {label}', file=file)


def write_csv(file, results, names, top_k):
  """One row to each path and rank, beneath a header."""
  writer = csv.writer(file, lineterminator='\n')
  writer.writerow(['path', 'rank', 'class_id', 'class_name', 'probability'])
  for path, rows in _ranked(results, names, top_k):
    for rank, (class_id, name, probability) in enumerate(rows, 1):
      writer.writerow([path, rank, class_id, name, f'{probability:.6g}'])


def write_json(file, results, names, top_k):
  """A list, an item a line; class_name is null where there are no names."""
  file.write('[')
  for i, (path, rows) in enumerate(_ranked(results, names, top_k)):
    predictions = [
      {
        'class_id': class_id,
        'class_name': name,
        'probability': float(f'{probability:.6g}'),
      }
      for class_id, name, probability in rows
    ]
    item = {'path': path, 'predictions': predictions}
    file.write(',\n'[not i :] + json.dumps(item, ensure_ascii=False))
  file.write('\n]\n')


FORMATS = {'table': write_table, 'csv': write_csv, 'json': write_json}


def _ranked(results, names, top_k):
  """(path, [(class_id, name or None, probability), ...]) of each result."""
  for result in results:
    probabilities = result.get('probabilities')
    if probabilities is None or probabilities.ndim != 1:
      raise ValueError(
        'These weights predict nothing of a whole picture; leave out --format '
        'and --output to have the features alone.'
      )
    yield (
      result['path'],
      [
        (int(i), names[i] if names else None, float(probabilities[i]))
        for i in top(probabilities, top_k)
      ],
    )


def check_folder(path):
  """ValueError unless a file can be written at `path`; None is stdout."""
  if path is None:
    return
  folder = pathlib.Path(path).expanduser().parent
  if not folder.is_dir() or not os.access(folder, os.W_OK):
    raise ValueError(
      f'{path} cannot be written: {folder} is no folder that you may write to.'
    )


@contextlib.contextmanager
def opened(path):
  """stdout if path is None, else a text file that is there once it is whole."""
  if path is None:
    # A name that is no text in the terminal's encoding is shown as escapes.
    if hasattr(sys.stdout, 'reconfigure'):
      sys.stdout.reconfigure(errors='backslashreplace')
    yield sys.stdout
    sys.stdout.flush()
    return
  with (
    replacing(path) as partial,
    open(
      partial, 'w', encoding='utf-8', errors='backslashreplace', newline=''
    ) as file,
  ):
    yield file


@contextlib.contextmanager
def replacing(path):
  """Path of a file beside `path`, which takes its place at the end."""
  path = pathlib.Path(path).expanduser()
  partial = path.with_name(f'.{path.name}.partial')
  try:
    yield partial
    partial.replace(path)
  finally:
    partial.unlink(missing_ok=True)


def save_features(results, path):
  """Passes results on, and their features to an npz when they are at an end.

  Arrays 'paths' [N] and 'features' float32 [N, ...]. Features wait in a
  temporary file beside it, not in memory.
  """
  paths, shape = [], ()
  with (
    replacing(path) as partial,
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

"""Files of features, which grow in parts, so that a killed command resumes."""

import functools
import itertools
import pathlib
import shutil
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from vit_jax.io import terminal
from vit_jax.io.files import read_json, replacing, write_json
from vit_jax.types import UserError


class Parts:
  """Parts of FILE.npz or FILE.parquet, in FILE.npz.parts until it is complete.

  asked.json has what was asked. N.npz, the part that ends with the N-th image,
  has 'paths' [n], 'features' float32 [n, ...], and 'errors' of other images.

  Attributes:
    done: number of images in the parts.
  """

  def __init__(self, path: pathlib.Path, asked: Mapping[str, Any]) -> None:
    self._path, self._folder = path, path.with_name(f'{path.name}.parts')
    self._folder.mkdir(exist_ok=True)
    self.done = max((int(x.stem) for x in self._files()), default=0)
    if not self.done:
      write_json(self._folder / 'asked.json', asked)
    before = read_json(self._folder / 'asked.json')
    what = f'{self._folder} has {self.done:,} images'
    if changed := [k for k, x in asked.items() if x != before.get(k)]:
      raise UserError(
        f'{what} of a stopped command with other {", ".join(changed)}. Repeat '
        'that command to resume it, or remove the folder to start again.'
      )
    if self.done:
      print(f'{what}, resuming.', file=sys.stderr)

  def write(self, results: Iterable[Mapping[str, Any]], size: int) -> None:
    """Write a part after every `size` dicts of `predict`."""
    results = iter(results)
    while group := list(itertools.islice(results, size)):
      self.done += len(group)
      found = [x for x in group if 'error' not in x]
      path = self._folder / f'{self.done:09}.npz'
      with replacing(path) as partial, partial.open('wb') as file:
        np.savez(
          file,
          paths=np.array([x['path'] for x in found], str),
          features=np.array([x['features'] for x in found], np.float32),
          errors=np.array([x['error'] for x in group if 'error' in x], str),
        )

  def finish(self) -> list[str]:
    """Write the file, remove the parts, and return the errors."""
    errors = np.concatenate([*self._each('errors')]).tolist()
    shape = next((x.shape[1:] for x in self._each('features') if len(x)), ())
    write = {'.npz': self._npz, '.parquet': self._parquet}[self._path.suffix]
    with replacing(self._path) as partial:
      write(str(partial), shape)
    for file in reversed(self._files()):  # a kill leaves the first parts
      file.unlink()
    shutil.rmtree(self._folder)
    return errors

  def _files(self) -> list[pathlib.Path]:
    return sorted(self._folder.glob('[0-9]*.npz'))

  def _each(self, name: str) -> Iterator[np.ndarray]:
    """Yield an array of each part."""
    for file in self._files():
      with np.load(file) as part:
        yield part[name]

  def _npz(self, path, shape):
    """Write what `np.savez_compressed` does, but a part at a time."""
    paths = np.concatenate([*self._each('paths')])
    header = {'descr': '<f4', 'fortran_order': False}
    header['shape'] = (len(paths), *shape)
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
      with archive.open('paths.npy', 'w', force_zip64=True) as file:
        np.save(file, paths)
      with archive.open('features.npy', 'w', force_zip64=True) as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.writelines(self._each('features'))

  def _parquet(self, path, shape):
    """Write the columns 'path', escaped UTF-8, and 'features', nested lists."""
    import pyarrow.parquet

    kind = functools.reduce(pyarrow.list_, shape[::-1], pyarrow.float32())
    schema = pyarrow.schema({'path': pyarrow.string(), 'features': kind})
    nest = pyarrow.FixedSizeListArray.from_arrays
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
      for paths, features in zip(self._each('paths'), self._each('features')):
        names = pyarrow.array(map(terminal.printable, paths), 'string')
        column = pyarrow.array(features.ravel())
        column = functools.reduce(nest, shape[::-1], column)
        writer.write_table(pyarrow.table([names, column], schema=schema))


def read(path: pathlib.Path) -> tuple[list[str], np.ndarray]:
  """Return the paths [N] and features [N, D] in a file that `Parts` wrote."""
  if path.suffix == '.npz':
    with np.load(path) as file:
      paths, found = file['paths'].tolist(), file['features']
  else:
    import pyarrow.compute
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    paths, nested = table['path'].to_pylist(), table['features']
    found = pyarrow.compute.list_flatten(nested, recursive=True).to_numpy()
  return paths, found.reshape(len(paths), -1)

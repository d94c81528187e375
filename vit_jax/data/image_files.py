"""Image files by path: listed, read and decoded.

A path is local, or the URL of an fsspec file system: 'gs://' with gcsfs
installed, 's3://' with s3fs, 'memory://', and so on.
"""

import collections
import concurrent.futures
import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import fsspec
import numpy as np

from vit_jax.config import checks
from vit_jax.data import images
from vit_jax.runs.files import check_remote, is_local

ENDINGS = ('.jpg', '.jpeg', '.png', '.webp', '.bmp')


def is_image(path: str) -> bool:
  """Return whether the path ends like an image, in lower or upper case."""
  return path.lower().endswith(ENDINGS)


def file_system(path: str) -> tuple[Any, str]:
  """Return (fsspec file system, path in it); local paths have None."""
  if is_local(path):
    return None, os.path.expanduser(path)
  check_remote(path)
  try:
    fs, inner = fsspec.core.url_to_fs(path)
  except (ImportError, ValueError) as error:
    raise ValueError(f'cannot open {path}: {error}') from error
  if 'file' in (fs.protocol if isinstance(fs.protocol, tuple) else ()):
    return None, inner
  return fs, inner


def read(fs: Any, path: str) -> bytes:
  """Return the bytes of a file."""
  if fs is not None:
    return fs.cat_file(path)
  with open(path, 'rb') as file:  # faster than fsspec's own local files
    return file.read()


def walk(fs: Any, folder: str) -> Iterator[str]:
  """Yield the paths of all files below a folder, relative to it.

  Hidden files and folders are left out, and so are pipes, devices, and links
  to a folder that contains them. The order is not defined.
  """
  folder = folder.rstrip('/') or '/'
  start = len(folder) + (folder != '/')
  if fs is not None:
    found = (path[start:] for path in fs.find(folder))
    yield from (path for path in found if not re.search(r'(^|/)\.', path))
    return
  for path in _walk(folder, frozenset([os.path.realpath(folder)])):
    yield path[start:]


def _walk(folder, above):
  """Yield paths of local files; `above` are the folders that are open."""
  with os.scandir(folder) as entries:
    for entry in entries:
      if entry.name[0] == '.':
        continue
      if os.path.isdir(entry.path):
        real = os.path.realpath(entry.path)
        if real not in above:
          yield from _walk(entry.path, above | {real})
      elif entry.is_symlink() or entry.is_file():  # also links to nothing
        yield entry.path


def find(patterns: Iterable[str]) -> list[str]:
  """Return the sorted paths of the images that the patterns match.

  A file that is named itself is returned whatever its ending. Folders, at any
  depth, and globs ('**' for any depth) return the visible files with an image
  ending: jpg, jpeg, png, webp, bmp, in lower or upper case. Each file is
  returned once. Raises ValueError for a pattern that matches no image.
  """
  found: dict[str, str] = {}
  for pattern in patterns:
    fs, path = file_system(pattern)
    if fs is None and not (glob.has_magic(path) or os.path.exists(path)):
      raise ValueError(f'{pattern} does not exist.')
    here = _find(fs, path, pattern)
    if not here:
      raise ValueError(
        f'{pattern}: no images found. Give files, folders that contain images'
        f' at any depth, or globs. The endings are {", ".join(ENDINGS)}.'
      )
    for path in here:
      found.setdefault(os.path.abspath(path) if fs is None else path, path)
  return sorted(found.values())


def _find(fs, pattern, url):
  if fs is None and os.path.isfile(pattern):
    return [pattern]
  is_folder = os.path.isdir if fs is None else fs.isdir
  found = []
  try:
    if is_folder(pattern):
      matches = [pattern]
    elif not glob.has_magic(pattern):
      return [url]  # http has no folders; reading shows whether it exists
    elif fs is None:
      matches = glob.glob(pattern, recursive=True)
    else:
      visible = len(re.split(r'[*?[]', pattern)[0].rpartition('/')[0])
      matches = [x for x in fs.glob(pattern) if '/.' not in x[visible:]]
    for match in matches:
      if is_folder(match):
        found += [os.path.join(match, path) for path in walk(fs, match)]
      else:
        found.append(match)
  except Exception as error:  # each file system raises its own types
    raise ValueError(f'cannot list {url}: {error}') from error
  found = list(filter(is_image, found))
  return found if fs is None else list(map(fs.unstrip_protocol, found))


def load(
  paths: Iterable[str],
  transforms: Sequence[Any],
  *,
  channels: int = 3,
  max_image_bytes: int = images.MAX_IMAGE_BYTES,
  num_workers: int | None = None,
  ahead: int = 64,
) -> Iterator[tuple[str, Any]]:
  """Yield (path, image uint8 [H, W, C]), or (path, ValueError) on failure.

  Threads read, decode and transform up to `ahead` images in advance, in the
  order of `paths` (local paths or URLs). By default, `num_workers` is the
  number of cores, at most 16. `max_image_bytes` is that of `images.decode`.
  """
  num_workers = num_workers or min(16, os.cpu_count() or 1)
  checks.integer('max_image_bytes', max_image_bytes, 1)
  pending: collections.deque[Any] = collections.deque()
  pool = concurrent.futures.ThreadPoolExecutor(num_workers)
  try:
    for path in paths:
      future = pool.submit(_load, path, transforms, channels, max_image_bytes)
      pending.append((path, future))
      if len(pending) > ahead:
        path, future = pending.popleft()
        yield path, future.result()
    for path, future in pending:
      yield path, future.result()
  finally:
    pool.shutdown(cancel_futures=True)


def _load(path, transforms, channels, max_image_bytes):
  try:
    data = read(*file_system(path))
  except Exception as error:  # each file system raises its own types
    return ValueError(f'{path}: cannot be read: {error}')
  try:
    image = images.decode(data, channels, max_image_bytes=max_image_bytes)
    rng = np.random.default_rng(0)
    for transform in transforms:
      image = transform(image, rng)
    return image
  except ValueError as error:
    return ValueError(f'{path}: {error}')

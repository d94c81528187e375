"""Pictures by path: found in folders and by patterns, decoded by threads."""

import collections
import concurrent.futures
import functools
import glob
import os
import re

import fsspec
import numpy as np

from vit_jax.data import folder, images, table

_WILD = ('*', '?', '[')


def find(patterns):
  """Sorted paths of the pictures that files, folders and globs name.

  A file that is named by itself is taken whatever its ending. In folders, at
  any depth, and in what a glob ('**' for any depth) matches, files count that
  end like pictures (jpg, jpeg, png, webp, bmp, in any case); hidden ones do
  not.

  Args:
    patterns: paths, folders, globs; local, or URLs of an fsspec file system.

  Returns:
    list of paths, each file once.

  Raises:
    ValueError: one of them names no picture.
  """
  found = {}
  for pattern in patterns:
    here = _find_local(pattern) if '://' not in pattern else _find(pattern)
    if not here:
      raise ValueError(
        f'{pattern}: no pictures there. Name files, folders that hold some '
        f'at any depth, or globs; the endings are {", ".join(table.ENDINGS)}.'
      )
    for path in here:
      found.setdefault(_identity(path), path)
  return sorted(found.values())


def _find_local(pattern):
  path = os.path.expanduser(pattern)
  if os.path.isfile(path):
    return [path]
  if os.path.isdir(path):
    return [os.path.join(path, p) for p in folder.walk(path) if _is_picture(p)]
  if not any(c in pattern for c in _WILD):
    raise ValueError(f'{pattern} does not exist.')
  found = []
  for match in glob.glob(path, recursive=True):
    if os.path.isdir(match):
      found += [
        os.path.join(match, p) for p in folder.walk(match) if _is_picture(p)
      ]
    elif _is_picture(match):
      found.append(match)
  return found


def _find(url):
  fs, path = _file_system(url)
  try:
    root = path.rstrip('/')
    if any(c in path for c in _WILD):
      matches = fs.glob(path)
      root = re.split(r'[*?[]', path)[0].rpartition('/')[0]
    elif fs.isdir(path):
      matches = [path]
    else:
      return [url]  # http knows no folders; reading tells whether it is there
    found = []
    for match in matches:
      found += fs.find(match) if fs.isdir(match) else [match]
  except Exception as error:  # each file system raises its own types
    raise ValueError(f'cannot list {url}: {error}') from error
  return [
    fs.unstrip_protocol(p)
    for p in found
    if _is_picture(p) and '/.' not in p[len(root) :]
  ]


def _is_picture(path):
  return path.lower().endswith(table.ENDINGS)


def _identity(path):
  return path if '://' in path else os.path.abspath(path)


def load(paths, transforms, *, channels=3, num_workers=None, ahead=64):
  """Yields (path, uint8 image [H, W, C], or the ValueError it raised).

  Pictures are read, decoded and transformed by threads, at most `ahead` of
  them before they are asked for, and come in the order of `paths`.

  Args:
    paths: local, or URLs of an fsspec file system.
    transforms: called in turn as t(image, rng).
    channels: 1 or 3.
    num_workers: threads; by default one for each core, up to 16.
    ahead: number of finished images that are kept at most.
  """
  num_workers = num_workers or min(16, os.cpu_count() or 1)
  one = functools.partial(_load, transforms=transforms, channels=channels)
  pending = collections.deque()
  pool = concurrent.futures.ThreadPoolExecutor(num_workers)
  try:
    for path in paths:
      pending.append((path, pool.submit(one, path)))
      if len(pending) > ahead:
        path, future = pending.popleft()
        yield path, future.result()
    while pending:
      path, future = pending.popleft()
      yield path, future.result()
  finally:
    pool.shutdown(cancel_futures=True)


def _load(path, transforms, channels):
  """The image, or a ValueError that names the file."""
  try:
    data = _read(path)
  except Exception as error:  # each file system raises its own types
    return _named(path, f'cannot be read: {error}', error)
  try:
    image = images.decode(data, channels)
    rng = np.random.default_rng(0)
    for transform in transforms:
      image = transform(image, rng)
    return image
  except ValueError as error:
    return _named(path, error, error)


def _named(path, message, cause):
  error = ValueError(f'{path}: {message}')
  error.__cause__ = cause
  return error


def _read(path):
  if '://' not in path:
    with open(path, 'rb') as file:
      return file.read()
  fs, path = _file_system(path)
  return fs.cat_file(path)


def _file_system(url):
  try:
    return fsspec.core.url_to_fs(url)
  except (ImportError, ValueError) as error:
    raise ValueError(f'cannot open {url}: {error}') from error

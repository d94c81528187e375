"""Fingerprints of sources: whether data is the same, without reading images.

A fingerprint is a dict of JSON values. It does not depend on the machine: files
are named relative to the folder of the data. A source may have a method
fingerprint(); others are described by their public attributes and length.
"""

import concurrent.futures
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.data.pipeline import Source

_MOST_BYTES = 2**26  # Larger arrays count by shape and dtype only.


def fingerprint(source: Source) -> dict[str, Any]:
  """Return the fingerprint of a source.

  Known keys, each of which a source may leave out: 'kind' (full name of its
  class), 'name', 'version', 'num_examples', 'classes' (a list of names, or
  {name: number of examples}), and 'files', 'sizes', 'labels', 'weights'
  (hashes).
  """
  if callable(own := getattr(source, 'fingerprint', None)):
    return own()
  return described(source)


def described(source: Source, without: Sequence[str] = ()) -> dict[str, Any]:
  """Return a fingerprint from the public attributes of a source.

  Args:
    source: another source in it, such as the one that it wraps, counts too.
    without: names of attributes that do not count.
  """
  kind = type(source)
  found = {
    'kind': f'{kind.__module__}.{kind.__qualname__}',
    'num_examples': len(source),
    'num_classes': getattr(source, 'num_classes', None),
  }
  if (names := getattr(source, 'class_names', None)) is not None:
    found['classes'] = [str(name) for name in names]
  for name, value in sorted(getattr(source, '__dict__', {}).items()):
    # `exif` is an argument of the source, compared with the config.
    if name in (*without, *found, 'class_names', 'exif'):
      continue
    if _is_source(value):
      found[name.lstrip('_')] = fingerprint(value)
    elif not name.startswith('_') and (known := _json(value)) is not None:
      found[name] = known
  return found


def _is_source(value):
  containers = str | bytes | Sequence | Mapping | np.ndarray
  return (
    hasattr(type(value), '__getitem__')
    and hasattr(type(value), '__len__')
    and not isinstance(value, containers)
  )


def _json(value):
  """Return a value as JSON, long ones as a hash; None for other objects."""
  if isinstance(value, np.ndarray) and value.dtype.hasobject:
    return None
  if isinstance(value, np.ndarray):
    about = f'{value.dtype} {value.shape}'
    small = value.nbytes <= _MOST_BYTES
    return f'{about} {digest([value.tobytes()])}' if small else about
  try:
    text = json.dumps(value, sort_keys=True)
  except (TypeError, ValueError):
    return None
  return value if len(text) < 1000 else digest([text])


def digest(parts: Iterable[str | bytes]) -> str:
  """Return a hash of a sequence of texts or bytes: 16 hexadecimal digits."""
  found = hashlib.sha256()
  for part in parts:
    if isinstance(part, str):
      part = part.encode(errors='surrogateescape')
    found.update(b'%d:' % len(part) + part)
  return found.hexdigest()[:16]


def sizes(paths: Sequence[str]) -> list[int]:
  """Return the bytes of local files; -1 for one that does not exist."""

  def size(path):
    try:
      return os.stat(path).st_size
    except OSError:
      return -1

  # Threads wait together for a network file system.
  with concurrent.futures.ThreadPoolExecutor(32) as pool:
    parts = [paths[i : i + 1000] for i in range(0, len(paths), 1000)]
    found = pool.map(lambda part: [size(path) for path in part], parts)
    return [each for part in found for each in part]


_HASHES = {
  'files': 'other files, or files in another order',
  'sizes': 'files of the same names have other sizes',
  'labels': 'other labels',
  'weights': 'other weights',
}


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
  """Return what has changed between two fingerprints, in words."""
  found = [*_classes(saved.get('classes'), now.get('classes'))]
  before, after = (x.get('num_examples') for x in (saved, now))
  if isinstance(before, int) and isinstance(after, int) and before != after:
    more = 'more' if after > before else 'fewer'
    found.append(
      f'{_examples(after - before)} {more} ({before:,} -> {after:,})'
    )
  for key in dict.fromkeys([*saved, *now]):
    one, other = saved.get(key), now.get(key)
    if key in ('classes', 'num_examples') or one == other:
      continue
    if isinstance(one, Mapping) and isinstance(other, Mapping):
      found += [f'{key}: {line}' for line in differences(one, other)]
    elif key not in _HASHES:
      found.append(f'{key} {one!r} -> {other!r}')
    elif not found:  # else it follows from what is found
      found.append(_HASHES[key])
  return found


def _classes(saved, now):
  """Yield how the classes differ, if both are known."""
  if saved is None or now is None:
    return
  missing, new = ([x for x in a if x not in b] for a, b in _both(saved, now))
  if missing:
    yield _named(missing, 'is missing', 'are missing')
  if new:
    yield _named(new, 'is new', 'are new')
  if not (missing or new) and list(saved) != list(now):
    yield 'the classes are in another order'
  if isinstance(saved, Mapping) and isinstance(now, Mapping):
    both = [x for x in saved if x in now and saved[x] != now[x]]
    for name in both[:3]:
      change = now[name] - saved[name]
      more = 'more' if change > 0 else 'fewer'
      yield f'class {name!r} has {_examples(change)} {more}'
    if len(both) > 3:
      yield f'{len(both) - 3} more classes have other numbers of examples'


def _both(saved, now):
  # Sets, because ImageNet-21k has 21,841 classes.
  return (list(saved), set(now)), (list(now), set(saved))


def _examples(change):
  return f'{abs(change):,} example{"s" * (abs(change) > 1)}'


def _named(names, one, many):
  shown = ', '.join(map(repr, names[:3]))
  if len(names) > 3:
    shown += f' and {len(names) - 3} more'
  return f'class {shown} {one}' if len(names) == 1 else f'{shown} {many}'

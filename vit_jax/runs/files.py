"""Files that are either whole or absent, and what remote paths need."""

import contextlib
import importlib
import importlib.util
import json
import os
import stat
import uuid
from collections.abc import Iterator
from typing import Any

from etils import epath

PathLike = str | os.PathLike[str]


def is_local(path: PathLike) -> bool:
  """Return whether a path is on a file system of this host, not a URL."""
  return '://' not in os.fspath(path)


@contextlib.contextmanager
def replacing(path: PathLike) -> Iterator[epath.Path]:
  """Yield a temporary path in the same folder; rename it to `path` at the end.

  A reader, or a run that is killed, never sees half of the file. Two processes
  may write the same path: the last one wins. If the body raises, the temporary
  file is removed and `path` stays as it was. The file has the permissions that
  the umask gives to new files, whatever the body used to write it.

  Args:
    path: local, or any path that epath understands (gs://...).
  """
  path = epath.Path(path)
  partial = path.with_name(f'.{path.name}.{uuid.uuid4().hex}.part')
  try:
    if is_local(path):
      partial.touch()
      mode = os.stat(partial).st_mode
    yield partial
    if is_local(path):
      os.chmod(partial, stat.S_IMODE(mode))
    partial.replace(path)
  except BaseException:
    partial.unlink(missing_ok=True)
    raise


def write_atomically(path: PathLike, content: str | bytes) -> None:
  """Write text or bytes so that the file appears whole; see `replacing`."""
  with replacing(path) as partial:
    if isinstance(content, bytes):
      partial.write_bytes(content)
    else:
      partial.write_text(content)


LARGEST_JSON = 1 << 23  # bytes; parsed, they can take 25 times as much
_DEEPEST_JSON = 50  # levels; recursive functions can take them


def read_json(path: PathLike) -> dict[str, Any]:
  """Return the dict in a JSON file that others may have written.

  Args:
    path: local, or any path that epath understands (gs://...).

  Raises:
    ValueError: it cannot be read; it is not a JSON object (says in which line
      and column); it has more than 8 MB or 50 levels.
  """
  try:
    with epath.Path(path).open('rb') as file:
      data = file.read(LARGEST_JSON + 1)
    if len(data) > LARGEST_JSON:
      raise ValueError(f'it has more than {LARGEST_JSON >> 20} MB')
    found = json.loads(data)
  except OSError as e:
    raise ValueError(f'{path} cannot be opened: {e.strerror or e}.') from e
  except (ValueError, RecursionError) as e:  # invalid UTF-8 is a ValueError too
    raise ValueError(f'{path} is not valid JSON: {e}.') from e
  if not isinstance(found, dict):
    what = type(found).__name__
    raise ValueError(f'{path}: expected {{...}}, found a {what}.')
  level: list[Any] = [found]
  for _ in range(_DEEPEST_JSON):
    level = [
      inner
      for value in level
      if isinstance(value, dict | list)
      for inner in (value.values() if isinstance(value, dict) else value)
    ]
  if level:
    raise ValueError(f'{path} has more than {_DEEPEST_JSON} levels.')
  return found


# The package that a protocol needs, and how to install it.
PACKAGES = {
  'gs': ('gcsfs', "pip install -e '.[gcs]'"),
  'gcs': ('gcsfs', "pip install -e '.[gcs]'"),
  's3': ('s3fs', 'pip install s3fs'),
  'http': ('aiohttp', 'pip install aiohttp'),
  'https': ('aiohttp', 'pip install aiohttp'),
  'hf': ('huggingface_hub', 'pip install huggingface_hub'),
}


def check_remote(path: Any) -> None:
  """Raise ValueError if the package that a URL needs cannot be imported.

  The message names the command that installs it. Local paths need nothing.
  """
  protocol, mark, _ = os.fspath(path).partition('://')
  if not mark or protocol not in PACKAGES:
    return
  package, install = PACKAGES[protocol]
  try:
    importlib.import_module(package)
  except ImportError as error:
    if protocol == 'gs' and importlib.util.find_spec('tensorflow'):
      return  # epath uses its file system
    raise ValueError(
      f'{os.fspath(path)}: {protocol}:// needs the package {package}: {install}'
    ) from error

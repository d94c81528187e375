"""Files that are either whole or absent, and what remote paths need."""

import contextlib
import importlib
import importlib.util
import os
import stat
import uuid
from collections.abc import Iterator
from typing import Any

from etils import epath

PathLike = str | os.PathLike[str]


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
  is_local = '://' not in os.fspath(path)
  try:
    if is_local:
      partial.touch()
      mode = os.stat(partial).st_mode
    yield partial
    if is_local:
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

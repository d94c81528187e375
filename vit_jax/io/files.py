"""Files that are either whole or absent, local or at a URL such as gs://..."""

import contextlib
import csv
import errno
import io
import json
import os
import socket
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from etils import epath

from vit_jax.types import PathLike, UserError


def is_local(path: PathLike) -> bool:
  """Return whether a path is on a file system of this host, not a URL."""
  return '://' not in os.fspath(path)


def unreachable(path: PathLike) -> str:
  """Return why Cloud Storage does not answer, or ''; gs://... paths only."""
  if os.fspath(path).startswith('gs://'):
    try:
      socket.create_connection(('storage.googleapis.com', 443), 10).close()
    except OSError as error:
      return str(error)
  return ''


@contextlib.contextmanager
def replacing(path: PathLike) -> Iterator[epath.Path]:
  """Yield a temporary path in the same folder; rename it to `path` at the end.

  A reader, or a run that is killed, never sees half of the file. If the body
  raises, the temporary file is removed and `path` stays as it was.
  """
  path = epath.Path(path)
  partial = path.with_name(f'.{path.name}.{uuid.uuid4().hex}.part')
  try:
    yield partial
    partial.replace(path)
  except BaseException:
    partial.unlink(missing_ok=True)
    raise


def write_atomically(path: PathLike, content: str | bytes) -> None:
  """Write text or bytes so that the file appears whole; see `replacing`."""
  data = content.encode() if isinstance(content, str) else content
  with replacing(path) as partial:
    partial.write_bytes(data)


def csv_line(row: Iterable[Any]) -> str:
  """Return a line of a CSV."""
  line = io.StringIO()
  csv.writer(line).writerow(row)  # quotes a CR in a name only if it ends lines
  return line.getvalue().removesuffix('\r\n') + '\n'


def write_csv(
  path: PathLike, rows: Iterable[Iterable[Any]], odd: str = 'backslashreplace'
) -> None:
  """Write a CSV; `odd` is how bytes of names that are not UTF-8 are encoded."""
  text = ''.join(map(csv_line, rows))
  write_atomically(path, text.encode(errors=odd))


def is_full(error: BaseException | None) -> bool:
  """Return whether an error, or one that led to it, is that of a full disk."""
  texts = os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT)
  while error and not any(text in str(error) for text in texts):
    error = error.__cause__ or error.__context__
  return error is not None


def write_json(path: PathLike, content: Any) -> None:
  """Write indented JSON; see `write_atomically`."""
  write_atomically(path, json.dumps(content, indent=2) + '\n')


def read_json(path: PathLike) -> dict[str, Any]:
  """Return the dict in a JSON file; raise UserError if there is none."""
  try:
    found = json.loads(epath.Path(path).read_bytes())
  except (OSError, ValueError, RecursionError) as e:
    raise UserError(f'{path} cannot be read as JSON: {e}.') from e
  if not isinstance(found, dict):
    raise UserError(f'{path} has a {type(found).__name__}, not {{...}}.')
  return found

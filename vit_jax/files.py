"""Files that are either whole or absent."""

import uuid

from etils import epath


def write_atomically(path, content):
  """Write a file under a temporary name, then rename it.

  A reader, or a run that is killed, never sees half of the file. Two processes
  may write the same path: the last one wins.

  Args:
    path: local, or any path that epath understands (gs://...).
    content: text or bytes.
  """
  path = epath.Path(path)
  partial = path.with_name(f'.{path.name}.{uuid.uuid4().hex}.part')
  try:
    if isinstance(content, bytes):
      partial.write_bytes(content)
    else:
      partial.write_text(content)
    partial.replace(path)
  except BaseException:
    partial.unlink(missing_ok=True)
    raise

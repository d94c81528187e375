"""Explanations of errors of the file system under a workdir.

A full disk, or a workdir that was moved while a run writes to it, shows up as
one of many errors of Python, Orbax, TensorStore or TensorBoard, in any thread.
The cause is therefore looked for in the workdir, not in the type of the error.
"""

import contextlib
import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator

import jax
from etils import epath

from vit_jax.runs.files import PathLike, is_local

# Written to a workdir at the start of a run, see workdirs.Claim. Nothing writes
# it again, so without it the workdir is gone, even if there is a folder of its
# name.
MARK = '.claim'

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_TEXTS = ('No space left', 'quota exceeded', 'File too large')
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_READ_ONLY_TEXTS = ('Read-only file system', 'Permission denied')
_QUIET_S = 2  # without a write: the threads of a failed save have ended
_LITTLE = 10 << 20  # bytes; a disk with less is full


class WorkdirError(ValueError):
  """The workdir cannot be written to any more."""


@contextlib.contextmanager
def explained(
  workdir: PathLike, newest: Callable[[], int | None] = lambda: None
) -> Iterator[None]:
  """Context manager that turns errors of the workdir into one message.

  Args:
    workdir: of the run.
    newest: function () -> step of the newest checkpoint, or None.

  Raises:
    WorkdirError: the disk is full, or the workdir is read-only or gone.
  """
  path = epath.Path(workdir)
  try:
    yield
  except WorkdirError:
    _remove_created_again(path)
    raise
  except Exception as error:
    _remove_created_again(path)
    if text := _explanation(path, error, newest()):
      raise WorkdirError(text) from error
    raise


def gone(workdir: PathLike, newest: int | None = None) -> str:
  """Return the message about a workdir that has disappeared."""
  last = '' if newest is None else f' Its newest checkpoint is step {newest}.'
  return (
    f'The workdir {workdir} is gone: it was moved, renamed or deleted while '
    f'the run wrote to it.{last} The run has created nothing there again. Move '
    'it back, or pass its new place as --workdir, and run the same command to '
    'resume.'
  )


def remove(path: epath.Path) -> None:
  """Remove a folder as far as possible."""
  if is_local(path):
    shutil.rmtree(path, ignore_errors=True)
  else:
    with contextlib.suppress(Exception):  # each file system has its own errors
      path.rmtree()


def _remove_created_again(workdir):
  """Remove a workdir that has nothing but what threads wrote after it was gone.

  TensorStore creates missing folders, in which records are then appended. Its
  threads outlive a failed save, so wait until they have been quiet.
  """
  if not is_local(workdir) or jax.process_index() or (workdir / MARK).exists():
    return
  now = time.monotonic()
  end, quiet = now + 30, now + _QUIET_S
  while now < min(end, quiet):
    if _is_created_again(workdir):
      remove(workdir)
      quiet = now + _QUIET_S
    time.sleep(0.1)
    now = time.monotonic()


def _is_created_again(workdir):
  """Return whether a folder has only what such threads can have written."""
  begun = re.compile(r'\d+\.orbax-checkpoint-tmp.*')
  again = re.compile(r'checkpoints|metrics\.jsonl|events\..*|\.seconds\.json')
  try:
    names = [path.name for path in workdir.iterdir()]
    if 'checkpoints' in names:
      steps = [path.name for path in (workdir / 'checkpoints').iterdir()]
      if not all(map(begun.fullmatch, steps)):
        return False
  except OSError:
    return False
  return all(map(again.fullmatch, names))


def _explanation(workdir, error, newest):
  """Return what the user has to know, or '' if the workdir is in order."""
  if not _exists(workdir / MARK):
    return gone(workdir, newest)
  found = list(_chain(error))
  texts = [str(each) for each in found]
  numbers = {getattr(each, 'errno', None) for each in found}
  place = os.path.abspath(workdir) if is_local(workdir) else str(workdir)
  is_here = any(place in text or str(workdir) in text for text in texts)
  resume = (
    'No checkpoint is complete yet'
    if newest is None
    else f'The newest complete checkpoint is step {newest}'
  )
  free = shutil.disk_usage(workdir).free if is_local(workdir) else None
  has_little = free is not None and free < _LITTLE
  if _has(_FULL, _FULL_TEXTS, numbers, texts) and (is_here or has_little):
    left = '' if free is None else f': {_size(free)} are free'
    size = _newest_size(workdir, newest)
    needs = f', and a checkpoint takes {_size(size)}' if size else ''
    return (
      f'The disk of the workdir {workdir} is full{left}{needs}. {resume}. Free '
      'some space, or keep fewer checkpoints (checkpoint.keep_last, '
      'checkpoint.keep_every_steps), and run the same command to resume.'
    )
  if _has(_READ_ONLY, _READ_ONLY_TEXTS, numbers, texts) and is_here:
    return (
      f'The workdir {workdir} cannot be written to any more: {texts[-1]}. '
      f'{resume}. Make it writable, and run the same command to resume.'
    )
  return ''


def _chain(error):
  """Yield an error and those that led to it."""
  while error is not None:
    yield error
    error = error.__cause__ or error.__context__


def _has(expected, expected_texts, numbers, texts):
  return bool(numbers & {*expected}) or any(
    x.lower() in text.lower() for x in expected_texts for text in texts
  )


def _exists(path):
  """Return whether a path exists, also if that cannot be found out."""
  try:
    return path.exists()
  except Exception:  # each file system has its own errors
    return True


def _newest_size(workdir, newest):
  """Return the bytes of the newest checkpoint on a local disk, or 0."""
  folder = workdir / 'checkpoints' / str(newest)
  if newest is None or not is_local(workdir):
    return 0
  return sum(
    os.stat(os.path.join(root, name)).st_size
    for root, _, names in os.walk(folder)
    for name in names
  )


def _size(count):
  for unit in ('bytes', 'kB', 'MB'):
    if count < 1000:
      return f'{count:.3g} {unit}'
    count /= 1000
  return f'{count:,.3g} GB'

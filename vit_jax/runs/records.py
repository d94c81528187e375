"""Files that grow while a run lasts: metrics.jsonl and TensorBoard's events.

A record costs the same at any length of the run. On a local file system it is
appended by a single write, so that a kill leaves at most one torn line. Object
stores cannot append. There, a file is a sequence of segments of 256 records, of
which only the last is written again.

metrics.jsonl has a JSON object per line; its segments are metrics-000000.jsonl,
metrics-000001.jsonl, ... JSON has no NaN and no infinity. They are written as
the strings 'NaN', 'Infinity' and '-Infinity', which `read_records` and pandas
read as floats.
"""

import contextlib
import json
import math
import numbers
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from etils import epath

from vit_jax.runs.files import PathLike, is_local, write_atomically

NAME = 'metrics.jsonl'
SEGMENT = 256  # records; some 200 kB
_CHECKPOINTS = 20  # whose account of time a Heartbeat keeps
_OWN = re.compile(r'metrics(-(\d{6,}))?\.jsonl')
_EVENTS = re.compile(r'events\.out\.tfevents\.(\d+)\..*')
_NOT_FINITE = ('NaN', 'Infinity', '-Infinity')


def read_records(workdir: PathLike) -> list[dict[str, Any]]:
  """Return the records of a run, oldest first; [] if there are none.

  Damaged lines, and files that cannot be read, are left out.
  """
  return [x for path in _files(workdir) for x in _read(path).records]


class Found(NamedTuple):
  """Records of the run so far.

  Attributes:
    kept: records that stay.
    removed: records of later steps, which were removed.
    messages: a line for each damaged file.
  """

  kept: list[dict[str, Any]]
  removed: list[dict[str, Any]]
  messages: list[str]


class Log:
  """The end of metrics.jsonl, to which records are appended; see `open_log`."""

  def __init__(self, file: '_Growing') -> None:
    self._file = file

  def append(self, record: Mapping[str, Any]) -> None:
    """Append a record, a dict of numbers and text with a 'step'."""
    self._file.append(_encode(record))


def open_log(
  workdir: PathLike, last_step: int | None = None
) -> tuple[Log, Found]:
  """Mend damaged files, remove records of later steps, and open the log.

  A file with lines that are not records is written again with those that are; a
  copy of what it was stays under another name. A file that cannot be read is
  renamed.

  Args:
    workdir: directory of the run, local or gs://...
    last_step: records of later steps are removed; None keeps all.
  """
  found = Found([], [], [])
  path, lines = epath.Path(workdir) / NAME, []
  for path in _files(workdir):
    part = _read(path)
    if part.error or part.damaged:
      found.messages.append(_set_aside(path, part))
    stays = [last_step is None or r['step'] <= last_step for r in part.records]
    for record, stay in zip(part.records, stays):
      (found.kept if stay else found.removed).append(record)
    lines = [line for line, stay in zip(part.lines, stays) if stay]
    if part.damaged or not all(stays):
      _rewrite(path, lines, in_place=not part.damaged and _falls(stays))
  file = _Growing(path, _following, lines)
  if not is_local(path) and path.name == NAME:
    file.next()  # the single file of an older run stays as it is
  return Log(file), found


def _following(path):
  """Return the path of the segment after this file."""
  number = _OWN.fullmatch(path.name)[2]
  following = 0 if number is None else int(number) + 1
  return path.with_name(f'metrics-{following:06d}.jsonl')


class Events:
  """Appends scalars to a file of TensorBoard's events.

  Each start of a run begins a new file. Names sort by age, as TensorBoard needs
  it, even if two starts fall into a second or the clock was set back.

  Args:
    workdir: directory of the run, local or gs://...
    purge_step: TensorBoard drops earlier events from this step on; None: none.
  """

  def __init__(self, workdir: PathLike, purge_step: int | None = None) -> None:
    from tensorboardX.proto import event_pb2

    self._workdir = epath.Path(workdir)
    self._file = _Growing(
      self._following(),
      self._following,
      header=_framed(file_version='brain.Event:2'),
    )
    if purge_step is not None:
      start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
      self._append(step=purge_step, session_log=start)

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    """Append the values of a step as one event."""
    from tensorboardX import summary

    found = summary.Summary()
    for name, value in values.items():
      found.MergeFrom(summary.scalar(name, value))
    self._append(step=step, summary=found)

  def _append(self, **content):
    self._file.append(_framed(**content))

  def _following(self, _=None):
    """Return the path of a new file, which sorts after all others."""
    found = (_EVENTS.fullmatch(name) for name in _names(self._workdir))
    newest = max((int(x[1]) for x in found if x), default=0)
    second = max(int(time.time()), newest + 1)
    host = socket.gethostname()
    return self._workdir / f'events.out.tfevents.{second:010d}.{host}'


def _framed(**content):
  """Return an event of this moment, framed as TFRecord: length, checksums."""
  from tensorboardX.proto import event_pb2
  from tensorboardX.record_writer import masked_crc32c

  def checked(data):
    return data + masked_crc32c(data).to_bytes(4, 'little')

  event = event_pb2.Event(wall_time=time.time(), **content)
  data = event.SerializeToString()
  return checked(len(data).to_bytes(8, 'little')) + checked(data)


class Heartbeat:
  """Wall time of a run, also of one that will be killed, in a small file.

  From it the next start knows what the run has spent until its checkpoint, and
  what was lost since. Errors are ignored: then the records have to do. Object
  stores get the file with each checkpoint, file systems once a second.

  Args:
    workdir: directory of the run.
    active: whether this process reads and writes the file.

  Attributes:
    lived: seconds of the run.
    spent: {step of a checkpoint: {phase: seconds} until it was begun}.
  """

  def __init__(self, workdir: PathLike, *, active: bool = True) -> None:
    self._path = epath.Path(workdir) / '.seconds.json'
    self._active = active
    self.lived: float = 0.0
    self.spent: dict[int, dict[str, float]] = {}
    if not active:
      return
    # A kill, while the file is written, can leave half of it.
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
      found = json.loads(self._path.read_text())
      self.spent = {
        int(step): {phase: float(x) for phase, x in spent.items()}
        for step, spent in found['spent'].items()
      }
      self.lived = float(found['lived'])

  def beat(self, lived: float) -> None:
    """Save how many seconds the run has lived."""
    self.lived = lived
    if is_local(self._path):
      self._write()

  def save(self, step: int, spent: Mapping[str, float]) -> None:
    """Save {phase: seconds} of the run until the checkpoint of this step."""
    newest = sorted(self.spent.keys() - {step})[-_CHECKPOINTS:]
    self.spent = {x: self.spent[x] for x in newest} | {step: dict(spent)}
    self._write()

  def remove(self) -> None:
    """Remove the file, because the last record says all that it does."""
    if self._active:
      with contextlib.suppress(OSError):
        self._path.unlink()

  def _write(self):
    if self._active:
      content = {'lived': round(self.lived, 3), 'spent': self.spent}
      with contextlib.suppress(OSError):
        self._path.write_text(json.dumps(content) + '\n')


class _Growing:
  """A file that grows: appended to, or on object stores a series of segments.

  Args:
    path: the file, which need not exist.
    following: function (path) -> path of the next segment.
    chunks: what an existing file has in it.
    header: written at the start of each new file.
  """

  def __init__(
    self,
    path: epath.Path,
    following: Callable[[epath.Path], epath.Path],
    chunks: list[bytes] | None = None,
    header: bytes = b'',
  ) -> None:
    self._path, self._following, self._header = path, following, header
    self._count = len(chunks or ())
    self._is_local = is_local(path)
    self._content = b'' if self._is_local else b''.join(chunks or ())

  def append(self, chunk: bytes) -> None:
    if self._count >= SEGMENT and not self._is_local:
      self.next()
    if not self._count:
      chunk = self._header + chunk
    self._count += 1
    if self._is_local:
      _append(self._path, chunk)
    else:
      self._content += chunk
      self._path.write_bytes(self._content)  # a store shows whole objects only

  def next(self) -> None:
    """Begin the next segment."""
    self._path = self._following(self._path)
    self._content, self._count = b'', 0


def _append(path, data):
  """Append to a local file, by one write unless the disk is nearly full."""
  try:
    # Opened each time: a file that was moved or deleted is noticed.
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
      while data:
        data = data[os.write(file, data) :]
    finally:
      os.close(file)
  except OSError as error:
    error.filename = os.fspath(path)  # os.write does not set it
    raise


class _Part(NamedTuple):
  """Content of a file of records."""

  text: bytes
  records: list[dict[str, Any]]
  lines: list[bytes]  # of the records, each with its newline
  damaged: int = 0  # number of lines that are not records in JSON
  error: str = ''  # why the file cannot be read


def _read(path):
  try:
    text = path.read_bytes()
  except FileNotFoundError:
    return _Part(b'', [], [])
  except OSError as error:
    if not is_local(path):
      raise  # perhaps the network
    return _Part(b'', [], [], error=error.strerror or str(error))
  *found, rest = text.split(b'\n')
  damaged = 0
  if rest:
    found.append(rest)
  records, lines = [], []
  for line in found:
    record, is_strict = _decode(line)
    damaged += not is_strict
    if record is not None:
      records.append(record)
      lines.append(line + b'\n' if is_strict else _encode(record))
  damaged += bool(rest and lines and lines[-1] == rest + b'\n')
  return _Part(text, records, lines, damaged)


def _decode(line):
  """Return (record of a line or None, whether it is a record in JSON)."""
  constants = []
  try:
    record = json.loads(line, parse_constant=lambda x: constants.append(x) or x)
  except (ValueError, RecursionError):
    return None, False
  if not isinstance(record, dict) or type(record.get('step')) is not int:
    return None, False
  if b'NaN' in line or b'Infinity' in line:
    record |= {
      key: float(value)
      for key, value in record.items()
      if isinstance(value, str) and value in _NOT_FINITE
    }
  return record, not constants  # older versions wrote bare NaN


def _encode(record):
  """Return the line of a record."""
  plain = {key: _plain(value) for key, value in record.items()}
  return json.dumps(plain, allow_nan=False).encode() + b'\n'


def _plain(value):
  """Return a value that JSON has."""
  if value is None or isinstance(value, str):
    return value
  if isinstance(value, numbers.Integral):
    return int(value)
  value = float(value)
  return value if math.isfinite(value) else json.dumps(value)


def _set_aside(path, part):
  """Keep a damaged file under another name; return what to say about it."""
  for number in range(1000):
    aside = path.with_name(path.name + '.damaged' + f'-{number}' * bool(number))
    if not aside.exists():
      break
  if part.error:
    path.rename(aside)
    return (
      f'{path} cannot be read: {part.error}. It was renamed to {aside.name}; '
      'records go to a new file.'
    )
  # A copy, so that no kill can leave the run without its records.
  aside.write_bytes(part.text)
  lines = part.text.count(b'\n') + (not part.text.endswith(b'\n'))
  return (
    f'{path} is damaged: {part.damaged} of {lines} lines are not complete '
    f'JSON records. The {len(part.records)} good records are kept, and a copy '
    f'of the damaged file in {aside.name}.'
  )


def _rewrite(path, lines, *, in_place):
  """Reduce a file to these lines; `in_place` if they are its beginning."""
  if not is_local(path):
    path.write_bytes(b''.join(lines)) if lines else path.unlink()
  elif in_place:
    os.truncate(path, sum(map(len, lines)))
  else:
    write_atomically(path, b''.join(lines))


def _falls(flags):
  """Return whether no True comes after a False."""
  return sorted(flags, reverse=True) == flags


def _files(workdir):
  """Return the files with records, oldest first."""
  folder = epath.Path(workdir)
  names = filter(_OWN.fullmatch, _names(folder))
  # The whole file comes before its segments.
  return [folder / name for name in sorted(names, key=lambda x: (x != NAME, x))]


def _names(folder):
  try:
    return [path.name for path in folder.iterdir()]
  except (FileNotFoundError, NotADirectoryError):
    return []

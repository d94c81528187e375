"""Shards of records: written one after the other, each whole or absent."""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.data import workers
from vit_jax.data.order import Shuffled
from vit_jax.tools.prepare.examples import Features, Made, Maker

TARGET_BYTES = 150_000_000  # of a shard, unless their number is given
# One record per group, because single examples are read. Images are compressed.
_OPTIONS = 'group_size:1,uncompressed'
_CHUNK = 8  # examples that a worker makes at a time
_SAMPLE = 256  # examples from which the bytes of all are estimated


@dataclasses.dataclass(frozen=True)
class Plan:
  """Division of the examples among the shards.

  Shard k has the positions [n * k // shards, n * (k + 1) // shards). Examples
  without a record leave the shard shorter, so no shard depends on another one.

  Attributes:
    count: number of examples of the source, n.
    shards: number of shards.
    shuffle_seed: of the order; None: as in the source.
  """

  count: int
  shards: int
  shuffle_seed: int | None = None

  def bounds(self, shard: int) -> tuple[int, int]:
    """Return the first position of a shard, and the position after its last."""
    n, k = self.count, self.shards
    return n * shard // k, n * (shard + 1) // k

  @property
  def chunks(self) -> int:
    """Number of chunks of a shard; the last ones may be empty."""
    return math.ceil(math.ceil(self.count / self.shards) / _CHUNK)

  def indices(self, chunk: int) -> list[int]:
    """Return the examples of a chunk, a number over all shards."""
    shard, part = divmod(chunk, self.chunks)
    first, last = self.bounds(shard)
    first += part * _CHUNK
    positions = range(first, min(first + _CHUNK, last))
    if self.shuffle_seed is None:
      return list(positions)
    visits = Shuffled().bind(range(self.count), self.shuffle_seed)
    return [visits(position)[1] for position in positions]


@dataclasses.dataclass(frozen=True)
class _Chunks:
  """Function of a place in `chunks` that makes the records; picklable."""

  maker: Maker
  plan: Plan
  chunks: Sequence[int]

  def __call__(self, place: int) -> list[Made]:
    indices = self.plan.indices(self.chunks[place])
    return [self.maker(index) for index in indices]


def shards_for(maker: Maker) -> int:
  """Return a number of shards of about 150 MB, estimated from a sample."""
  count = len(maker.source)
  maker = dataclasses.replace(maker, duplicates=None)
  sample = sorted({count * i // _SAMPLE for i in range(_SAMPLE)})
  with concurrent.futures.ThreadPoolExecutor(workers.cores()) as pool:
    sizes = [len(x.record or b'') for x in pool.map(maker, sample)]
  total = count * sum(sizes) / len(sizes)
  return min(count, max(1, round(total / TARGET_BYTES)))


def made(
  maker: Maker, plan: Plan, shards: Sequence[int], num_workers: int
) -> contextlib.closing:
  """Return a context manager with the chunks of these shards, in order.

  Args:
    maker: makes the records.
    plan: of the shards.
    shards: numbers of shards.
    num_workers: number of processes; 0: threads of this process.
  """
  per_shard = range(plan.chunks)
  chunks = [
    shard * plan.chunks + part for shard in shards for part in per_shard
  ]
  read = _Chunks(maker, plan, chunks)
  found: Any
  if num_workers:
    found = workers.Processes(
      read,
      range(len(chunks)),
      processes=num_workers,
      threads=2,
      ahead=6,
      max_restarts=3,
    )
  else:
    threads = workers.cores() + 1
    found = workers.Threads(
      read, range(len(chunks)), threads=threads, ahead=threads + 4
    )
  return contextlib.closing(found)


class Writer:
  """Writes one shard: a partial file that gets its name when it is complete.

  Args:
    path: of the shard.
  """

  def __init__(self, path: pathlib.Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    self._path = path
    self._partial = path.with_name(f'.{path.name}.part')
    self._partial.unlink(missing_ok=True)
    self._writer = ArrayRecordWriter(str(self._partial), _OPTIONS)
    self._crc, self.examples = 0, 0

  def write(self, record: bytes) -> None:
    self._writer.write(record)
    self._crc, self.examples = zlib.crc32(record, self._crc), self.examples + 1

  def finish(self) -> dict[str, Any]:
    """Complete the file; return its name, size and checksums."""
    self._writer.close()
    size, sha256 = _sha256(self._partial)
    with open(self._partial, 'rb+') as file:
      os.fsync(file.fileno())
    self._partial.replace(self._path)
    _sync_folder(self._path.parent)
    return {
      'file': self._path.name,
      'examples': self.examples,
      'bytes': size,
      'sha256': sha256,
      'crc32_of_records': self._crc,
    }

  def abandon(self) -> None:
    """Remove the partial file."""
    with contextlib.suppress(Exception):
      self._writer.close()
    self._partial.unlink(missing_ok=True)


def _sha256(path):
  """Return (bytes, sha256) of a file."""
  with open(path, 'rb') as file:
    digest = hashlib.file_digest(file, 'sha256').hexdigest()
    return file.tell(), digest


def _sync_folder(folder):
  number = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(number)
  finally:
    os.close(number)


class Log:
  """The complete shards, a JSON line for each.

  Args:
    path: of the file.
  """

  def __init__(self, path: pathlib.Path) -> None:
    self._path = path

  def read(self) -> dict[int, dict[str, Any]]:
    """Return {shard: entry}; a line that a kill has cut off is left out."""
    if not self._path.exists():
      return {}
    lines = self._path.read_bytes().split(b'\n')[:-1]
    try:
      found = [json.loads(line) for line in lines]
    except ValueError as error:
      raise ValueError(
        f'{self._path} is damaged: {error}. Remove it; the same command then'
        ' writes the shards again.'
      ) from error
    return {entry['shard']: entry for entry in found}

  def mend(self) -> None:
    """Remove the line that a kill has cut off."""
    if self._path.exists():
      whole = self._path.read_bytes().rfind(b'\n') + 1
      os.truncate(self._path, whole)

  def append(self, entry: Mapping[str, Any]) -> None:
    with open(self._path, 'ab') as file:
      file.write(json.dumps(entry).encode() + b'\n')
      file.flush()
      os.fsync(file.fileno())


class Damaged(ValueError):
  """A shard is not as it was written."""


def verify(
  folder: pathlib.Path, entries: Sequence[Mapping[str, Any]], features: Features
) -> Iterator[Mapping[str, Any] | Damaged]:
  """Read shards back; yield the entry of each, or the error.

  Compared are the size and the checksum of the file, the number of records and
  their checksum. Every record is parsed, and its label checked.
  """
  parser = features.as_tfds()

  def check(entry):
    try:
      _verify(folder / entry['file'], entry, features, parser)
      return entry
    except Damaged as error:
      return error

  pool = concurrent.futures.ThreadPoolExecutor(workers.cores())
  try:
    yield from pool.map(check, entries)
  finally:
    pool.shutdown(cancel_futures=True)


def _verify(path, entry, features, parser):
  if not path.exists():
    raise Damaged(f'{path.name} is missing.')
  size, digest = _sha256(path)
  if size != entry['bytes']:
    raise Damaged(f'{path.name} has {size:,} bytes, not {entry["bytes"]:,}.')
  if digest != entry['sha256']:
    raise Damaged(f'{path.name} is damaged: its sha256 is not as written.')
  crc, count = 0, 0
  for record in _records(path, entry['examples']):
    crc, count = zlib.crc32(record, crc), count + 1
    try:
      _parse(record, features, parser)
    except Exception as error:  # protobuf and TFDS raise many types
      raise Damaged(
        f'{path.name}: record {count - 1} cannot be parsed: {error}'
      ) from error
  if count != entry['examples'] or crc != entry['crc32_of_records']:
    raise Damaged(f'{path.name} has other records than were written.')


def _records(path, expected):
  from array_record.python import array_record_data_source

  if not expected:
    return
  with array_record_data_source.ArrayRecordDataSource([str(path)]) as records:
    for start in range(0, len(records), 64):
      stop = min(start + 64, len(records))
      yield from records.__getitems__(list(range(start, stop)))


def _parse(record, features, parser):
  import tensorflow_datasets as tfds

  skip = {'image': tfds.decode.SkipDecoding()}
  example = parser.deserialize_example_np(record, decoders=skip)
  if not example['image']:
    raise ValueError('it has no image.')
  label = example['label']
  features.check(label if np.ndim(label) else int(label))

"""Convert a TFDS data set from TFRecord to ArrayRecord, without TensorFlow.

    python -m vit_jax.tools.to_array_record ~/tensorflow_datasets/mnist/3.0.1

The new files are written next to the old ones, which are kept, and are as
large. TFDS and vit_jax then find both formats. After an interruption, run the
command again: it skips complete files.
"""

import concurrent.futures
import json
import pathlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from vit_jax.runs import terminal
from vit_jax.runs.files import PathLike, write_atomically
from vit_jax.tools import parsers


def main(argv: Sequence[str] | None = None) -> None:
  parser = parsers.parser(__doc__, 'tools.to_array_record DIRECTORY [options]')
  parser.add_argument('directory', help='folder with dataset_info.json')
  parser.add_argument('--num_workers', type=int, default=4)
  args = parser.parse_args(argv)
  with terminal.one_message():
    convert(args.directory, num_workers=args.num_workers)


def convert(directory: Any, *, num_workers: int | None = 4) -> None:
  """Write an ArrayRecord file for each TFRecord file of the directory.

  Raises:
    ValueError: there are no TFRecord files, or one is truncated.
  """
  directory = pathlib.Path(directory).expanduser()
  files = sorted(directory.glob('*.tfrecord-*'))
  if not files:
    raise ValueError(
      f'{directory} has no files named *.tfrecord-*. Expected the folder of a'
      ' prepared TFDS data set, with its dataset_info.json.'
    )
  total = 0
  with concurrent.futures.ThreadPoolExecutor(num_workers) as pool:
    for i, count in enumerate(pool.map(_convert_file, files), 1):
      total += count
      print(
        f'\r{i} of {len(files)} files, {total} examples', end='', flush=True
      )
  print()
  # TFDS reads here which other formats exist. Written last, when all files do.
  info = directory / 'dataset_info.json'
  content = json.loads(info.read_text())
  formats = set(content.get('alternativeFileFormats', ()))
  content['alternativeFileFormats'] = sorted(formats | {'array_record'})
  write_atomically(info, json.dumps(content, indent=2))


def _convert_file(path):
  """Copy the records; return their number, or 0 if the target exists."""
  from array_record.python.array_record_module import ArrayRecordWriter

  target = path.with_name(path.name.replace('.tfrecord-', '.array_record-'))
  if target.exists():
    return 0
  partial = target.with_name(target.name + '.partial')
  # One record per group, as TFDS writes them: single examples are read.
  writer = ArrayRecordWriter(str(partial), 'group_size:1')
  count = 0
  for record in records(path):
    writer.write(record)
    count += 1
  writer.close()
  partial.rename(target)
  return count


def records(path: PathLike) -> Iterator[bytes]:
  """Yield the records of an uncompressed TFRecord file.

  A record is its length (uint64), a checksum of the length (4 bytes), the data
  and a checksum of the data (4 bytes). Checksums are not verified.
  """
  with open(path, 'rb') as file:
    while header := file.read(12):
      length = struct.unpack('<Q', header[:8])[0] if len(header) == 12 else 0
      data = file.read(length + 4)
      if len(header) < 12 or len(data) < length + 4:
        raise ValueError(f'{path} is truncated after byte {file.tell()}.')
      yield data[:length]


if __name__ == '__main__':
  main()

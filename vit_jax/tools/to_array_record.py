r"""Converts a TFDS data set from TFRecord to ArrayRecord, without TensorFlow.

  python -m vit_jax.tools.to_array_record ~/tensorflow_datasets/mnist/3.0.1

The new files, as large as the old, are written beside these, which are kept;
TFDS and vit_jax then find both formats. Run again after an interruption: files
that are complete are left alone.
"""

import argparse
import concurrent.futures
import json
import pathlib
import struct


def main(argv=None):
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('directory', help='holds dataset_info.json')
  parser.add_argument('--num_workers', type=int, default=4)
  args = parser.parse_args(argv)
  convert(args.directory, num_workers=args.num_workers)


def convert(directory, *, num_workers=4):
  """Writes an ArrayRecord file for each TFRecord file of the directory.

  Raises:
    ValueError: no such files, or one that is cut off.
  """
  directory = pathlib.Path(directory).expanduser()
  files = sorted(directory.glob('*.tfrecord-*'))
  if not files:
    raise ValueError(
      f'{directory} has no files named *.tfrecord-*; give the folder of a'
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
  # This is how TFDS learns of a second format; written last, as it promises
  # that all files are there.
  info = directory / 'dataset_info.json'
  content = json.loads(info.read_text())
  formats = set(content.get('alternativeFileFormats', ()))
  content['alternativeFileFormats'] = sorted(formats | {'array_record'})
  info.write_text(json.dumps(content, indent=2))


def _convert_file(path):
  """Number of records copied; 0 if the file was there already."""
  from array_record.python.array_record_module import ArrayRecordWriter

  target = path.with_name(path.name.replace('.tfrecord-', '.array_record-'))
  if target.exists():
    return 0
  partial = target.with_name(target.name + '.partial')
  # One record to a group, as TFDS writes them: reads are of single examples.
  writer = ArrayRecordWriter(str(partial), 'group_size:1')
  count = 0
  for record in records(path):
    writer.write(record)
    count += 1
  writer.close()
  partial.rename(target)
  return count


def records(path):
  """Yields the records of an uncompressed TFRecord file.

  Each is its length (uint64), a checksum of that (4 bytes), the data, and a
  checksum of the data (4 bytes). Checksums are not verified.
  """
  with open(path, 'rb') as file:
    while header := file.read(12):
      length = struct.unpack('<Q', header[:8])[0] if len(header) == 12 else 0
      data = file.read(length + 4)
      if len(header) < 12 or len(data) < length + 4:
        raise ValueError(f'{path} is cut off after byte {file.tell()}.')
      yield data[:length]


if __name__ == '__main__':
  main()

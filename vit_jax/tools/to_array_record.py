"""Convert a TFDS data set from TFRecord to ArrayRecord, without TensorFlow.

    python -m vit_jax.tools.to_array_record ~/tensorflow_datasets/mnist/3.0.1

The new files are written next to the old ones, which are kept. After an
interruption, run the command again: it skips complete files.
"""

import pathlib
from collections.abc import Sequence

from vit_jax.io import terminal
from vit_jax.io.files import read_json, replacing, write_json
from vit_jax.tools import parsers
from vit_jax.types import UserError


@terminal.one_message()
def main(argv: Sequence[str] | None = None) -> None:
  from array_record.python.array_record_module import ArrayRecordWriter
  from grain.experimental import TFRecordIterDataset

  parser = parsers.parser(__doc__, 'tools.to_array_record FOLDER')
  parser.add_argument('folder', help='with dataset_info.json')
  folder = pathlib.Path(parser.parse_args(argv).folder).expanduser()
  if not (files := sorted(folder.glob('*.tfrecord-*'))):
    raise UserError(f'{folder} has no files named *.tfrecord-*.')
  for path in terminal.track(files, len(files), unit='files'):
    target = path.with_name(path.name.replace('.tfrecord-', '.array_record-'))
    if target.exists():
      continue
    with replacing(target) as partial:
      # One record per group, as TFDS writes them: single examples are read.
      writer = ArrayRecordWriter(str(partial), 'group_size:1')
      for record in TFRecordIterDataset(str(path)):
        writer.write(record)
      writer.close()
  # TFDS reads here which other formats exist. Written when all files do.
  info = folder / 'dataset_info.json'
  content = read_json(info)
  formats = {*content.get('alternativeFileFormats', ()), 'array_record'}
  content['alternativeFileFormats'] = sorted(formats)
  write_json(info, content)


if __name__ == '__main__':
  main()

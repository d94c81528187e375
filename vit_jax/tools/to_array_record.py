"""Convert a TFDS data set from TFRecord to ArrayRecord, without TensorFlow.

    python -m vit_jax.tools.to_array_record ~/tensorflow_datasets/mnist/3.0.1

The new files are written next to the old ones, which are kept. After an
interruption, run the command again: it skips complete files.
"""

import json
import pathlib
from collections.abc import Sequence

from vit_jax.data import workers
from vit_jax.runs import terminal
from vit_jax.runs.files import replacing, write_atomically
from vit_jax.tools import parsers
from vit_jax.types import PathLike, UserError


def main(argv: Sequence[str] | None = None) -> None:
  parser = parsers.parser(__doc__, 'tools.to_array_record DIRECTORY')
  parser.add_argument('directory', help='folder with dataset_info.json')
  with terminal.one_message():
    convert(parser.parse_args(argv).directory)


def convert(directory: PathLike) -> None:
  """Write an ArrayRecord file for each TFRecord file of the directory."""
  directory = pathlib.Path(directory).expanduser()
  files = sorted(directory.glob('*.tfrecord-*'))
  if not files:
    raise UserError(
      f'{directory} has no files named *.tfrecord-*. Expected the folder of a'
      ' prepared TFDS data set, with its dataset_info.json.'
    )
  done = workers.read_ahead(_convert_file, files, workers.cores())
  list(terminal.track(done, len(files), unit='files'))
  # TFDS reads here which other formats exist. Written last, when all files do.
  info = directory / 'dataset_info.json'
  content = json.loads(info.read_text())
  formats = set(content.get('alternativeFileFormats', ()))
  content['alternativeFileFormats'] = sorted(formats | {'array_record'})
  write_atomically(info, json.dumps(content, indent=2))


def _convert_file(path):
  """Copy the records of a file, unless the target exists."""
  from array_record.python.array_record_module import ArrayRecordWriter
  from grain.experimental import TFRecordIterDataset

  target = path.with_name(path.name.replace('.tfrecord-', '.array_record-'))
  if target.exists():
    return
  with replacing(target) as partial:
    # One record per group, as TFDS writes them: single examples are read.
    writer = ArrayRecordWriter(str(partial), 'group_size:1')
    for record in TFRecordIterDataset(str(path)):
      writer.write(record)
    writer.close()


if __name__ == '__main__':
  main()

"""Write a data set once, as sharded ArrayRecord files that are read by name.

  python -m vit_jax.tools.prepare SOURCE DEST [options]
  python -m vit_jax.tools.prepare --verify DEST

A folder of images, re-encoded to a short side of 256 pixels:

  python -m vit_jax.tools.prepare /data/flowers /data/sets/flowers \\
      --short_side=256

ImageNet from its own tar files, in a shuffled order; then the second split:

  python -m vit_jax.tools.prepare imagenet:/data/downloads:train \\
      /data/sets/imagenet --short_side=256 --shuffle_seed=0
  python -m vit_jax.tools.prepare imagenet:/data/downloads:validation \\
      /data/sets/imagenet --short_side=256

ImageNet-21k without copies of evaluation images, which copies-train.csv lists:

  python -m vit_jax.tools.prepare tar:/data/fall11_whole.tar \\
      /data/sets/imagenet21k --short_side=256 --shuffle_seed=0 \\
      --on_error=skip --leave_out=tfds:cifar10:test \\
      --leave_out=imagenet:/data/downloads:validation

SOURCE is a folder of images, or a name such as 'tar:FILES', 'wds:FILES',
'parquet:FILES', 'hf:NAME:SPLIT', 'tfds:NAME:SPLIT', 'imagenet:FOLDER:SPLIT',
see docs/data.md. DEST is a new folder, NAME or NAME/VERSION; other splits are
added to it by more commands.

Run the same command to continue after Ctrl-C, a kill or a crash: complete
shards are kept. At the end all shards are read back and compared with their
checksums. The exit status is 0; 1 after an error or for a damaged shard; 2 for
wrong arguments.
"""

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Sequence

import rich.filesize

from vit_jax.data import workers
from vit_jax.runs import terminal
from vit_jax.tools import parsers
from vit_jax.tools.prepare import duplicates, run


def main(argv: Sequence[str] | None = None) -> None:
  made = parser()
  args = made.parse_args(argv)
  with terminal.one_message():
    if args.verify:
      folder = args.dest or args.source
      if not folder:
        made.error('--verify needs the folder of a data set')
      count = run.verify(folder)
      run.say(f'{folder} is verified: {count:,} examples.')
      return
    if not (args.source and args.dest):
      made.error('SOURCE and DEST are required')
    if args.num_workers is not None:
      workers.check_count('num_workers', args.num_workers)
    try:
      record = _prepare(args)
    except KeyboardInterrupt:
      print(
        '\nInterrupted. Complete shards are kept: the same command continues.',
        file=sys.stderr,
      )
      sys.exit(128 + signal.SIGINT)
    _report(record, args.dest)


def parser() -> argparse.ArgumentParser:
  made = parsers.parser(__doc__, 'tools.prepare SOURCE DEST [options]')
  add = made.add_argument
  add('source', metavar='SOURCE', nargs='?', help='folder, or name of a source')
  add('dest', metavar='DEST', nargs='?', help='folder of the data set')
  add('--verify', action='store_true', help='read DEST back, and do no more')
  add(
    '--split',
    help="name of the prepared split (the source's, or train); chooses the"
    ' split of a source that has several',
  )
  group = made.add_argument_group('images')
  group.add_argument(
    '--short_side',
    type=parsers.count,
    metavar='N',
    help='re-encode images with a larger short side (bytes are copied)',
  )
  group.add_argument(
    '--quality',
    type=parsers.count,
    default=95,
    metavar='N',
    help='of the JPEG files, 4:2:0, with --short_side (95)',
  )
  group.add_argument(
    '--on_error',
    choices=('raise', 'skip'),
    default='raise',
    help='for unreadable images; skip lists them in unreadable-SPLIT.csv',
  )
  group = made.add_argument_group('shards')
  group.add_argument(
    '--shards',
    type=parsers.count,
    metavar='N',
    help='number of shards (by their bytes: about 150 MB each)',
  )
  group.add_argument(
    '--shuffle_seed',
    type=int,
    metavar='SEED',
    help='order of the examples (as in the source)',
  )
  group.add_argument(
    '--num_workers',
    type=int,
    metavar='N',
    help='processes; 0: threads (one per core, threads for small sets)',
  )
  group = made.add_argument_group('copies of evaluation examples')
  group.add_argument(
    '--leave_out',
    metavar='SOURCE',
    action='append',
    default=[],
    help='leave out copies of examples of this source, and list them in'
    ' copies-SPLIT.csv; may be repeated',
  )
  group.add_argument(
    '--compare_with',
    metavar='SOURCE',
    action='append',
    default=[],
    help='list copies, but leave none out; may be repeated',
  )
  group.add_argument(
    '--max_distance',
    type=int,
    default=duplicates.MAX_DISTANCE,
    metavar='N',
    help='of 64 bits between the hashes of near copies'
    f' ({duplicates.MAX_DISTANCE}); 0 finds little more than equal images',
  )
  group = made.add_argument_group('how the source is read')
  group.add_argument(
    '--source_split',
    metavar='SPLIT',
    help="split or slice, such as 'train[:90%%]', if it is not --split",
  )
  group.add_argument('--csv', help='table of path,label')
  group.add_argument('--image_key', help='field with the image')
  group.add_argument('--label_key', help='field with the label')
  group.add_argument(
    '--class_names', metavar='FILE', help='names, one per line, or a JSON list'
  )
  group.add_argument(
    '--channels', type=int, choices=(1, 3), help='1 for grey (3)'
  )
  group.add_argument(
    '--max_image_bytes',
    type=parsers.count,
    metavar='N',
    default=run.Options.max_image_bytes,
    help='limit on height x width x channels of an image',
  )
  return made


def _prepare(args):
  options = run.Options(
    short_side=args.short_side,
    quality=args.quality,
    shards=args.shards,
    shuffle_seed=args.shuffle_seed,
    on_error=args.on_error,
    leave_out=tuple(args.leave_out),
    compare_with=tuple(args.compare_with),
    max_distance=args.max_distance,
    max_image_bytes=args.max_image_bytes,
  )
  keys = ('csv', 'image_key', 'label_key', 'class_names', 'channels')
  given = {key: getattr(args, key) for key in keys}
  return run.prepare(
    args.source,
    args.dest,
    options,
    split=args.split,
    source_split=args.source_split,
    source_options={k: v for k, v in given.items() if v is not None},
    num_workers=args.num_workers,
  )


def _report(record, dest):
  """Print what was prepared, and the command that trains on it."""
  folder = os.path.abspath(os.path.expanduser(dest))
  split, size = record['split'], rich.filesize.decimal(record['bytes'])
  run.say(f'{folder}: {record["examples"]:,} examples of {split}, {size}.')
  notes = {
    'unreadable': f'unreadable examples are in unreadable-{split}.csv',
    'copies': f'copies of evaluation examples are in copies-{split}.csv',
    'left_out': 'of them are left out',
    'turned': 'images keep an EXIF orientation, which TensorFlow ignores, and'
    ' vit_jax without exif=True; --short_side applies it',
  }
  for key, text in notes.items():
    if record[key]:
      run.say(f'{record[key]:,} {text}.')
  parent, name = os.path.split(folder)
  if name == record['version']:
    parent, name = os.path.dirname(parent), f'{record["name"]}:{name}'
  source = shlex.quote(f'tfds:{folder}:{split}')
  fields = {
    'target': 'vit_jax.data.tfds.Tfds',
    'name': name,
    'data_dir': parent,
    'split': split,
  }
  flags = ' '.join(
    f'--config.data.source.{key}={shlex.quote(value)}'
    for key, value in fields.items()
  )
  exif = ' --config.data.source.exif=True' if record['turned'] else ''
  run.say(
    'Train a small model on it, or set the source of any config:\n'
    '  python -m vit_jax.main --config=configs/train_folder.py'
    f' --config.data.source.path={source}{exif} --workdir=DIR\n  {flags}{exif}'
  )


if __name__ == '__main__':
  main()

"""Write a data set once, as sharded ArrayRecord files that are read by name.

  python -m vit_jax.tools.prepare [SPLIT=]SOURCE [...] DEST [options]

A folder of images, shrunk to a short side of 256 pixels:

  python -m vit_jax.tools.prepare /data/flowers /data/sets/flowers \\
      --short_side=256

ImageNet from its own tar files, in a shuffled order:

  python -m vit_jax.tools.prepare train=imagenet:/data/downloads:train \\
      validation=imagenet:/data/downloads:validation /data/sets/imagenet \\
      --short_side=256 --shuffle

ImageNet-21k without copies of evaluation images, which left_out.csv lists:

  python -m vit_jax.tools.prepare tar:/data/fall11_whole.tar \\
      /data/sets/imagenet21k --short_side=256 --shuffle --on_error=skip \\
      --leave_out=tfds:cifar10:test \\
      --leave_out=imagenet:/data/downloads:validation

SOURCE is a folder of images, a name such as 'tfds:NAME:SPLIT' or
'hf:NAME:SPLIT', see docs/data.md, a tar file 'tar:FILE', or 'imagenet:FOLDER:
SPLIT' for the tar files of image-net.org. SPLIT is 'train' by default, or the
split that the name ends with. DEST is a new folder, NAME or NAME/VERSION. Until
it is complete, it is called DEST.part.
"""

import argparse
import os
import re
import shlex
from collections.abc import Sequence

from vit_jax.data import workers
from vit_jax.data.sources import open_source
from vit_jax.runs import terminal
from vit_jax.tools import parsers
from vit_jax.tools.prepare import tars, write
from vit_jax.tools.prepare.copies import Copies, perceptual_hash

_SOURCE_OPTIONS = {
  'csv': 'table of path,label',
  'image_key': 'field with the image',
  'label_key': 'field with the label',
  'class_names': 'file with the names, one per line, or a JSON list',
}


def main(argv: Sequence[str] | None = None) -> None:
  args = parser().parse_args(argv)
  with terminal.one_message():
    sources = {_split(text): _open(text, args) for text in args.sources}
    if len(sources) < len(args.sources):
      raise ValueError(
        f'{args.sources} name a split twice. Write SPLIT=SOURCE for each.'
      )
    copies = _copies(args) if args.leave_out else None
    counts = write.write(
      args.dest,
      {
        split: write.Maker(source, args.short_side, args.quality, copies)
        for split, source in sources.items()
      },
      shuffle=args.shuffle,
      shards=args.shards,
      skip=args.on_error == 'skip',
    )
    _report(args.dest, counts)


def parser() -> argparse.ArgumentParser:
  made = parsers.parser(__doc__, 'tools.prepare SOURCE [...] DEST [options]')
  add = made.add_argument
  add('sources', metavar='[SPLIT=]SOURCE', nargs='+', help='name of a source')
  add('dest', metavar='DEST', help='folder of the data set')
  add(
    '--short_side',
    type=parsers.count,
    metavar='N',
    help='shrink images with a larger short side (bytes are copied)',
  )
  add(
    '--quality',
    type=parsers.count,
    default=95,
    metavar='N',
    help='of the JPEG files that are shrunk, 4:2:0 (95)',
  )
  add(
    '--shards',
    type=parsers.count,
    metavar='N',
    help='number of files of each split (by their bytes)',
  )
  add('--shuffle', action='store_true', help='write in a shuffled order')
  add(
    '--on_error',
    choices=('raise', 'skip'),
    default='raise',
    help='for unreadable images; skip lists them in left_out.csv',
  )
  add(
    '--leave_out',
    metavar='SOURCE',
    action='append',
    default=[],
    help='leave out copies of images of this source, and list them in'
    ' left_out.csv; may be repeated',
  )
  add(
    '--max_distance',
    type=int,
    default=6,
    metavar='N',
    help='of 64 bits, in which the hash of a copy may differ (6)',
  )
  group = made.add_argument_group('how sources are read')
  for name, text in _SOURCE_OPTIONS.items():
    group.add_argument(f'--{name}', help=text)
  group.add_argument(
    '--channels', type=int, choices=(1, 3), default=3, help='1 for grey (3)'
  )
  return made


def _split(text):
  """Return the split that 'SPLIT=SOURCE' or 'tfds:cifar10:test' names."""
  match = re.match(r'([A-Za-z]\w*)=', text)
  match = match or re.search(r':([A-Za-z]\w*)(\[[^\]]*\])?$', text)
  return match[1] if match else 'train'


def _open(text, args=None):
  """Return the source of '[SPLIT=]SOURCE'."""
  name = re.sub(r'^[A-Za-z]\w*=', '', text)
  kind, _, rest = name.partition(':')
  if kind == 'tar':
    return tars.Tar(rest)
  if kind == 'imagenet':
    return tars.imagenet_tar(*rest.rsplit(':', 1))
  if args is None:
    return open_source(name)
  options = {key: getattr(args, key) for key in _SOURCE_OPTIONS}
  return open_source(name, channels=args.channels, **options)


def _copies(args):
  """Return the hashes of the images of --leave_out."""

  def hashes(source):
    def hashed(read):
      name, example = read()
      return name, perceptual_hash(write.decoded(source, example)[0])

    threads = 2 * workers.cores()
    return workers.Threads(hashed, write.readers(source), threads)

  found = [
    (f'{text}: {name}', value)
    for text in args.leave_out
    for name, value in hashes(_open(text))
  ]
  terminal.say(f'Comparing with {len(found):,} evaluation images.')
  return Copies(found, args.max_distance)


def _report(dest, counts):
  """Print what was prepared, and a command that trains on it."""
  folder = os.path.abspath(os.path.expanduser(dest))
  sizes = ', '.join(f'{n:,} examples of {split}' for split, n in counts.items())
  source = shlex.quote(f'tfds:{folder}:{next(iter(counts))}')
  terminal.say(
    f'{folder}: {sizes}. Train a small model on it, or set the source of any'
    ' config:\n  python -m vit_jax.main --config=configs/train_folder.py'
    f' --config.data.source.path={source} --workdir=DIR'
  )


if __name__ == '__main__':
  main()

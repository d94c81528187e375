"""Write a data set once, as sharded ArrayRecord files that are read by name.

  python -m vit_jax.tools.prepare [SPLIT=]SOURCE [...] DEST [options]

A folder of images, shrunk to a short side of 256 pixels:

  python -m vit_jax.tools.prepare /data/flowers /data/sets/flowers \\
      --short_side=256

ImageNet-21k without copies of evaluation images, in a shuffled order:

  python -m vit_jax.tools.prepare tar:/data/fall11_whole.tar \\
      /data/sets/imagenet21k --short_side=256 --shuffle \\
      --leave_out=tfds:cifar10:test \\
      --leave_out=imagenet:/data/downloads:validation

SOURCE is a folder of images, a name such as 'tfds:NAME:SPLIT' or
'hf:NAME:SPLIT', see docs/data.md, a tar file 'tar:FILE', or 'imagenet:FOLDER:
SPLIT' for the tar files of image-net.org. SPLIT is 'train' by default, or the
split that the name ends with. DEST is a new folder. Until it is complete, it is
called DEST.part. Unreadable images and copies are left out, and listed in
DEST/left_out.csv.
"""

import argparse
import os
import re
import shlex
from collections.abc import Sequence

from vit_jax.data.sources import open_source
from vit_jax.runs import terminal
from vit_jax.tools import parsers
from vit_jax.tools.prepare import tars, write
from vit_jax.types import UserError

_SOURCE_OPTIONS = {
  'csv': 'table of path,label',
  'image_key': 'field with the image',
  'label_key': 'field with the label',
  'class_names': 'file with the names, one per line, or a JSON list',
}


def main(argv: Sequence[str] | None = None) -> None:
  args = parser().parse_args(argv)
  options = {key: getattr(args, key) for key in _SOURCE_OPTIONS}
  with terminal.one_message():
    sources = {_split(x): _open(x, **options) for x in args.sources}
    if len(sources) < len(args.sources):
      raise UserError(
        f'{args.sources} name a split twice. Write SPLIT=SOURCE for each.'
      )
    counts = write.write(
      args.dest,
      sources,
      short_side=args.short_side,
      shuffle=args.shuffle,
      leave_out={x: _open(x) for x in args.leave_out},
    )
  folder = os.path.abspath(os.path.expanduser(args.dest))
  sizes = ', '.join(f'{n:,} examples of {split}' for split, n in counts.items())
  source = shlex.quote(f'tfds:{folder}:{next(iter(counts))}')
  terminal.say(
    f'{folder}: {sizes}. Train a small model on it, or set the source of any'
    ' config:\n  python -m vit_jax.main --config=configs/train_folder.py'
    f' --config.data.source.path={source} --workdir=DIR'
  )


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
  add('--shuffle', action='store_true', help='write in a shuffled order')
  add(
    '--leave_out',
    metavar='SOURCE',
    action='append',
    default=[],
    help='leave out copies of images of this source; may be repeated',
  )
  for name, text in _SOURCE_OPTIONS.items():
    add(f'--{name}', help=f'{text} of the sources')
  return made


def _split(text):
  """Return the split that 'SPLIT=SOURCE' or 'tfds:cifar10:test' names."""
  match = re.match(r'([A-Za-z]\w*)=', text)
  match = match or re.search(r':([A-Za-z]\w*)(\[[^\]]*\])?$', text)
  return match[1] if match else 'train'


def _open(text, **options):
  """Return the source of '[SPLIT=]SOURCE'."""
  name = re.sub(r'^[A-Za-z]\w*=', '', text)
  kind, _, rest = name.partition(':')
  if kind == 'tar':
    return tars.Tar(rest)
  if kind == 'imagenet':
    return tars.imagenet(*rest.rsplit(':', 1))
  return open_source(name, **options)


if __name__ == '__main__':
  main()

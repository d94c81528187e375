r"""List models by name, or summarise one.

  python -m vit_jax.names                       all names
  python -m vit_jax.names 'patch16*384'         those that contain this text
  python -m vit_jax.names ViT-B/16 --summary    its modules

A filter is part of one of our names or of timm's, in upper or lower case; * and
? stand for any text and any character. More names exist than are listed: see
`vit_jax.models.names.settings`.
"""

import argparse
import fnmatch
import re
import signal
import textwrap
from collections.abc import Sequence

from vit_jax.models import names
from vit_jax.tools import parsers
from vit_jax.types import UserError


def main(argv: Sequence[str] | None = None) -> None:
  if hasattr(signal, 'SIGPIPE'):  # `| head` ends the process without a message
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
  made = parser()
  args = made.parse_args(argv)
  if args.summary and not args.name:
    made.error('--summary needs the name of a model, as in ViT-B/16 --summary')
  try:
    print(_summary(args) if args.summary else _table(args.name or ''))
  except ValueError as error:
    made.exit(1, f'{error}\n')


def parser() -> argparse.ArgumentParser:
  parser = parsers.parser(__doc__, "names ['FILTER'] or NAME --summary")
  add = parser.add_argument
  add('name', nargs='?', metavar='FILTER', help='part of the names; or a name')
  add(
    '--summary',
    action='store_true',
    help='print the modules of the model with this name: shapes, parameters '
    'and FLOPs',
  )
  what = 'for --summary: height and width in pixels (that of the name, or 224)'
  add('--image_size', type=parsers.count, metavar='N', help=what)
  what = 'for --summary (1000)'
  add('--num_classes', type=parsers.count, default=1000, metavar='N', help=what)
  return parser


def _table(text):
  """Return the table of the names that contain a text."""
  rows = []
  for name, others in names.models().items():
    if not matches(name, text):
      others = [other for other in others if matches(other, text)]
      if not others:
        continue
    others = textwrap.wrap(' '.join(others), 62) or ['']
    rows.append((f'{name:<16}' + f'\n{"":<16}'.join(others)).rstrip())
  if not rows:
    raise UserError(
      f'No name contains {text!r}. `python -m vit_jax.names` lists all.'
    )
  return '\n'.join([f'{"name":<16}also (in timm)', *rows])


def matches(name: str, text: str) -> bool:
  """Return whether a name contains a text, in which * and ? are wildcards."""
  return fnmatch.fnmatchcase(name.lower(), f'*{text.lower()}*')


def _summary(args):
  """Return the text of --summary."""
  import jax  # the table of names does not need it
  import jax.numpy as jnp

  from vit_jax.analysis import flops

  model = names.create(args.name, num_classes=args.num_classes)
  in_name = re.search(r'_(\d{3})(?:\.|$)', args.name)  # vit_base_patch16_384
  size = args.image_size or int(in_name[1] if in_name else 224)
  title = f'{args.name}: {type(model).__name__}, {size}x{size} pixels'
  if hasattr(model, 'scan'):  # all layers share a row
    model = model.clone(scan=True)
  images = jnp.zeros((1, size, size, 3))
  console = {'width': 120, 'color_system': None}
  text = model.tabulate(
    jax.random.key(0), images, depth=2, console_kwargs=console
  )
  products = flops.forward(model, jax.typeof(images)) / 1e9
  return (
    f'{title}\n\n{text.strip()}\n\n{products:,.3f} GFLOPs for one image. '
    'A multiply-add is two FLOPs; only products and convolutions count.'
  )


if __name__ == '__main__':
  main()

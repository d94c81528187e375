r"""List models by name, or summarise one.

  python -m vit_jax.names                       all names
  python -m vit_jax.names 'patch16*384'         those that contain this text
  python -m vit_jax.names ViT-B/16 --summary    its modules

A filter is part of one of our names or of timm's, in upper or lower case; * and
? stand for any text and any character. More names exist than are listed: see
`vit_jax.models.names.settings`.
"""

import argparse
import difflib
import fnmatch
import heapq
import re
import signal
import textwrap
from collections.abc import Sequence

from vit_jax.models import names
from vit_jax.tools import parsers


def main(argv: Sequence[str] | None = None) -> None:
  if hasattr(signal, 'SIGPIPE'):  # `| head` ends the process without a message
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
  made = parser()
  args = made.parse_args(argv)
  try:
    print(_summary(made, args) if args.summary else _table(made, args))
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
  add('--num_classes', type=parsers.count, metavar='N', help=what)
  return parser


def _table(made, args):
  """Return the table of the names that match the filter."""
  for flag in ('image_size', 'num_classes'):
    if getattr(args, flag) is not None:
      made.error(f'--{flag} is for --summary')
  rows = []
  for name, others in names.models().items():
    if not matches(name, args.name):
      others = [other for other in others if matches(other, args.name)]
      if not others:
        continue
    others = textwrap.wrap(' '.join(others), 62) or ['']
    rows.append((f'{name:<16}' + f'\n{"":<16}'.join(others)).rstrip())
  if not rows:
    raise ValueError(
      f'No name contains {args.name!r}. Similar names: '
      f'{", ".join(_closest(args.name))}. `python -m vit_jax.names` lists all.'
    )
  return '\n'.join([f'{"name":<16}also (in timm)', *rows])


def matches(name: str, text: str | None) -> bool:
  """Return whether a name contains a text, in which * and ? are wildcards."""
  return fnmatch.fnmatchcase(name.lower(), f'*{(text or "").lower()}*')


def _summary(made, args):
  """Return the text of --summary."""
  if not args.name:
    made.error('--summary needs the name of a model, as in ViT-B/16 --summary')
  name = _one_name(args.name)
  in_name = re.search(r'_(\d{3})(?:\.|$)', name)  # vit_base_patch16_384
  size = args.image_size or int(in_name[1] if in_name else 224)
  from vit_jax.analysis import summary  # imports jax, which the table need not

  model = names.create(name, num_classes=args.num_classes or 1000)
  target = names.settings(name)['target']
  title = f'{name}: {target}, {size}x{size} pixels'
  return f'{title}\n\n{summary.table(model, (size, size, 3))}'


def _one_name(text):
  """Return the name itself, or the only listed name that contains the text."""
  try:
    names.settings(text)
    return text
  except ValueError as error:
    found = [name for name in _known() if matches(name, text)]
    found = [x for x in found if x.lower() == text.lower()] or found
    if not found:
      raise
    if len(found) > 1:
      raise ValueError(
        f'--summary is for one model, and {len(found)} names contain {text!r}: '
        f'{", ".join(found)}.'
      ) from error
    return found[0]


def _known():
  """Return all names that are listed, ours and timm's."""
  return [
    name for ours, others in names.models().items() for name in (ours, *others)
  ]


def _closest(text):
  """Return the three names of which a part is most similar to the text."""
  text = re.sub('[*?]', '', text).lower()

  def similarity(name):
    starts = range(max(1, len(name) - len(text) + 1))
    parts = (name[i : i + len(text)].lower() for i in starts)
    compare = difflib.SequenceMatcher(b=text)
    ratios = []
    for part in parts:
      compare.set_seq1(part)
      ratios.append(compare.ratio())
    return max(ratios)

  return heapq.nlargest(3, _known(), key=similarity)


if __name__ == '__main__':
  main()

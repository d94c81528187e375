r"""Draw what a model attends to, its filters and its position embeddings.

  python -m vit_jax.tools.look --weights=WEIGHTS --output=DIR IMAGES ...
  python -m vit_jax.tools.look --weights=WEIGHTS --output=DIR

WEIGHTS and IMAGES are as for predict; without images, only the figures of the
weights are drawn. Each figure has its numbers (npz) next to it:

  maps       maps-NAME: attention of each layer and head, for the first images
  rollout    rollout, rollout-2, ...: sheets of images, each next to what the
             model attends to over all layers (paper, Figs. 6 and 14), with
             its class folder below
  distance   mean attention distance of each head, by layer (Figs. 7, 11)
  tsne       a map of the images by their features (t-SNE), colored by class
             folder, as in PATH/CLASS/IMAGE
  filters    principal components of the patch embedding (Fig. 7 left)
  positions  similarity of position embeddings (Figs. 7, 10)

Attention is that of the class token. Models without one use the mean over
patches, or the MAP head's probe. --query=ROW,COLUMN uses a patch.

The paths of the figures go to stdout, everything else to stderr. The exit
status is that of predict.
"""

import argparse
import re
import sys
from collections.abc import Sequence

from vit_jax.analysis import attention
from vit_jax.data import image_files
from vit_jax.reports.attention import STYLES
from vit_jax.runs import terminal
from vit_jax.tools import arguments, parsers, predict
from vit_jax.tools.look import arrays
from vit_jax.tools.look.figures import Figures

_CHOICES = {
  'prefix': (attention.PREFIXES, 'distance to class token and registers'),
  'style': (STYLES, 'rollout as a dark mask, or as a heat map'),
}


def parser() -> argparse.ArgumentParser:
  """Return the ArgumentParser."""
  made = parsers.parser(
    __doc__, 'tools.look --weights=WEIGHTS --output=DIR IMAGES ...'
  )
  arguments.add_weights(made)
  arguments.add_images(made, batch_size=8, nargs='*')
  group = made.add_argument_group('figures')
  add = group.add_argument
  add('--output', required=True, metavar='DIR', help='folder for the figures')
  add(
    '--figures',
    type=arguments.several(arrays.FIGURES),
    metavar='A,B,...',
    help=f'some of {",".join(arrays.FIGURES)} (all that can be drawn)',
  )
  add('--format', choices=('png', 'pdf'), default='png', help='(png)')
  for name, (choices, what) in _CHOICES.items():
    default = next(iter(choices))
    help = f'{what} ({default})'
    add(f'--{name}', choices=choices, default=default, help=help)
  add(
    '--query',
    type=_cell,
    metavar='ROW,COLUMN',
    help='maps and rollout of this patch, counted from 0',
  )
  arguments.add_counts(
    group,
    num_maps=(4, 'images with attention maps'),
    per_sheet=(50, 'images on a sheet of rollout'),
    num_points=(2000, 'images in tsne'),
    num_filters=(28, 'principal components'),
  )
  return made


def _cell(text):
  if not (found := re.fullmatch(r'(\d+),(\d+)', text)):
    raise argparse.ArgumentTypeError(
      f'{text!r}: expected ROW,COLUMN, as in 3,5'
    )
  return int(found[1]), int(found[2])


def _run(args):
  paths = image_files.find(args.images) if args.images else []
  weights = arguments.read(args)
  names = _choose(args.figures, weights, paths)
  figures = Figures(weights, args.output, args.format)
  if 'filters' in names:
    figures.filters(args.num_filters)
  if 'positions' in names:
    figures.positions()
  of_images = [name for name in names if name in arrays.OF_IMAGES]
  if not of_images:
    return 0
  if of_images == ['tsne']:
    paths = arrays.sample(paths, args.num_points)
  looks = arrays.look_at(
    weights,
    paths,
    figures=of_images,
    prefix=args.prefix,
    query=args.query,
    batch_size=args.batch_size,
    on_error=args.on_error,
  )
  skipped: list[str] = []
  looks = terminal.track(looks, len(paths), unit='images')
  looks = list(_kept(predict.without_errors(looks, skipped), args.num_maps))
  classes = arrays.classes([x['path'] for x in looks], weights.class_names)
  for look, name in zip(looks, classes or ()):
    look['class'] = name
  if 'maps' in names:
    figures.maps(looks[: args.num_maps])
  if 'rollout' in names:
    figures.rollout(looks, args.style, args.per_sheet)
  if 'distance' in names:
    figures.distance(looks)
  if 'tsne' in names:
    figures.tsne(looks, args.num_points)
  return predict.exit_status(skipped, len(paths))


def _choose(asked, weights, paths):
  """Return the names of the figures to draw; all that can be, by default."""
  found = arrays.obstacles(weights)
  if not paths:
    found = dict.fromkeys(arrays.OF_IMAGES, 'no images are given') | found
  elif len(paths) < arrays.LEAST:
    found.setdefault('tsne', f'it needs at least {arrays.LEAST} images')
  names = [name for name in arrays.FIGURES if name not in found]
  arrays.check(weights, asked or (() if names else found), found)
  if not asked:
    for name, reason in found.items():
      print(f'Not drawn: {name}: {reason}', file=sys.stderr)
  return asked or names


def _kept(looks, num_maps):
  """Yield the looks; only the first have maps, which are large."""
  for i, look in enumerate(looks):
    if i >= num_maps:
      look = {k: x for k, x in look.items() if not k.startswith('maps')}
    yield look


def main(argv: Sequence[str] | None = None) -> None:
  """Run the command, and end with its exit status."""
  args = parser().parse_intermixed_args(argv)
  with terminal.one_message():
    sys.exit(_run(args))


if __name__ == '__main__':
  main()

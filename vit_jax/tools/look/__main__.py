r"""Draw what a model attends to, its filters and its position embeddings.

  python -m vit_jax.tools.look --weights=WEIGHTS --output=DIR IMAGES ...
  python -m vit_jax.tools.look --weights=WEIGHTS --output=DIR

WEIGHTS and IMAGES are as for predict; without images, only the figures of the
weights are drawn. Each figure has its numbers (npz) next to it:

  maps       maps-NAME: attention of each layer and head, for the first images
  rollout    rollout, rollout-2, ...: sheets of images, each next to what the
             model attends to over all layers (paper, Figs. 6 and 14)
  distance   mean attention distance of each head, by layer (Figs. 7, 11)
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

from vit_jax import terminal
from vit_jax.analysis import attention
from vit_jax.data import image_files
from vit_jax.reports.attention import STYLES
from vit_jax.tools import arguments
from vit_jax.tools.look import arrays
from vit_jax.tools.look.figures import Figures


def main(argv=None):
  args = parser().parse_intermixed_args(argv)
  with terminal.one_message():
    sys.exit(_run(args))


def parser():
  parser = arguments.parser(
    __doc__, 'look --weights=WEIGHTS --output=DIR IMAGES ...'
  )
  add, count = parser.add_argument, arguments.count
  add('images', nargs='*', help='images, folders, globs; local or gs://...')
  add('--weights', required=True, help='workdir, file or folder')
  add('--output', required=True, metavar='DIR', help='folder for the figures')
  add(
    '--figures',
    type=_figures,
    metavar='A,B,...',
    help=f'some of {",".join(arrays.FIGURES)} (all that can be drawn)',
  )
  add('--format', choices=('png', 'pdf'), default='png', help='(png)')
  add('--batch_size', type=count, default=8, metavar='N', help='(8)')
  add('--num_workers', type=count, metavar='N', help='threads that decode')
  add('--on_error', choices=('raise', 'skip'), default='raise')
  add = parser.add_argument_group('what is shown').add_argument
  add(
    '--heads',
    choices=attention.HEADS,
    default='mean',
    help='how rollout combines heads (mean)',
  )
  add(
    '--residual',
    choices=attention.RESIDUALS,
    default='half',
    help='rollout of half skip connection and half attention, or of attention',
  )
  add(
    '--prefix',
    choices=attention.PREFIXES,
    default='left_out',
    help='distance: attention to class token and registers is left out, or has '
    'distance zero',
  )
  add(
    '--query',
    type=_cell,
    metavar='ROW,COLUMN',
    help='maps and rollout of this patch, counted from 0',
  )
  add(
    '--style',
    choices=STYLES,
    default='mask',
    help='rollout as a dark mask, or as a heat map',
  )
  add(
    '--as_seen',
    action='store_true',
    help="draw images at the model's size, not at a finer one",
  )
  for name, default, what in (
    ('--num_maps', 4, 'images with attention maps'),
    ('--per_sheet', 50, 'images on a sheet of rollout'),
    ('--num_filters', 28, 'principal components'),
  ):
    help = f'{what} ({default})'
    add(name, type=count, default=default, metavar='N', help=help)
  return parser


def _figures(text):
  names = text.split(',')
  for name in names:
    if name not in arrays.FIGURES:
      raise argparse.ArgumentTypeError(
        f'{name!r} must be one of {", ".join(arrays.FIGURES)}'
      )
  return names


def _cell(text):
  if not (found := re.fullmatch(r'(\d+),(\d+)', text)):
    raise argparse.ArgumentTypeError(
      f'{text!r}: expected ROW,COLUMN, as in 3,5'
    )
  return int(found[1]), int(found[2])


def _run(args):
  """Draw the figures, and return the exit status."""
  paths = image_files.find(args.images) if args.images else []
  weights = arguments.read(args.weights, args)
  weights, report = arguments.fit(weights, image_size=args.image_size)
  if report:
    print(report, file=sys.stderr)
  names = _choose(args.figures, weights, paths)
  of_images = [name for name in names if name in arrays.OF_IMAGES]
  if of_images:
    looks = arrays.look_at(
      weights,
      paths,
      figures=of_images,
      heads=args.heads,
      residual=args.residual,
      prefix=args.prefix,
      query=args.query,
      batch_size=args.batch_size,
      num_workers=args.num_workers,
      on_error=args.on_error,
    )
  figures = Figures(weights, args.output, args.format)
  if 'filters' in names:
    figures.filters(args.num_filters)
  if 'positions' in names:
    figures.positions()
  if not of_images:
    return 0
  looks, errors = _collect(looks, len(paths), args.num_maps)
  px = min(weights.image_shape[:2]) if args.as_seen else None
  if 'maps' in names:
    figures.maps(looks[: args.num_maps], px=px)
  if 'rollout' in names:
    figures.rollout(looks, args.style, args.per_sheet, px=px)
  if 'distance' in names:
    figures.distance(looks)
  if errors:
    print(f'{len(errors)} of {len(paths)} skipped:', file=sys.stderr)
    print('\n'.join(errors), file=sys.stderr)
  return 1 if errors else 0


def _choose(asked, weights, paths):
  """Return the names of the figures to draw.

  By default these are all that can be drawn. A figure that is asked for and
  cannot be drawn is an error.
  """
  obstacles = arrays.obstacles(weights)
  if not paths:
    reason = 'no images are given: add images, folders or globs'
    obstacles = dict.fromkeys(arrays.OF_IMAGES, reason) | obstacles
  names = asked or arrays.FIGURES
  missing = [name for name in names if name in obstacles]
  reasons = '\n'.join(f'  {name}: {obstacles[name]}' for name in missing)
  if missing and (asked or len(missing) == len(names)):
    raise ValueError(f'{weights.origin}: cannot draw\n{reasons}')
  if missing:
    print(f'Not drawn:\n{reasons}', file=sys.stderr)
  return [name for name in names if name not in obstacles]


def _collect(looks, total, num_maps):
  """Return (results, errors of skipped images); maps of the first few only."""
  found, errors = [], []
  for look in terminal.track(looks, total, unit='images'):
    if 'error' in look:
      errors.append(look['error'])
      continue
    if len(found) >= num_maps:
      look = {k: v for k, v in look.items() if not k.startswith('maps')}
    found.append(look)
  if not found:
    raise ValueError('No image could be read:\n' + '\n'.join(errors))
  return found, errors


if __name__ == '__main__':
  main()

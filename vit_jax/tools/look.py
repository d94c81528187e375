r"""Looks inside a model: its attention to pictures, its filters and positions.

  python -m vit_jax.tools.look --weights=WEIGHTS --output=DIR PICTURES ...
  python -m vit_jax.tools.look --weights=WEIGHTS --output=DIR

WEIGHTS and PICTURES are as for predict; without pictures there are the figures
of the weights alone. Each figure comes as a picture and as its numbers (npz):

  maps       maps-NAME: attention of each layer and head, for a few pictures
  rollout    rollout, rollout-2, ...: sheets of pictures beside what the model
             attends to, over all layers (paper, Figs. 6 and 14)
  distance   mean attention distance of each head over the layers (Figs. 7, 11)
  filters    principal components of the patch embedding (Fig. 7 left)
  positions  similarity of position embeddings (Figs. 7, 10)

Attention is that of the class token. Without one it is that of the mean over
patches or of the MAP head's probe; --query=ROW,COLUMN is that of a patch.

The paths of the figures go to stdout, everything else to stderr. The exit
status is as predict's.
"""

import argparse
import re
import sys

from vit_jax import terminal
from vit_jax.analysis import attention
from vit_jax.data import image_files
from vit_jax.reports.attention import STYLES
from vit_jax.tools import arguments, inspection
from vit_jax.tools.inspect_figures import Figures


def main(argv=None):
  args = parser().parse_intermixed_args(argv)
  with terminal.one_message():
    sys.exit(_run(args))


def parser():
  parser = arguments.parser(
    __doc__, 'inspect --weights=WEIGHTS --output=DIR PICTURES ...'
  )
  add = parser.add_argument
  add('pictures', nargs='*', help='images, folders, globs; local or gs://...')
  add('--weights', required=True, help='workdir, file or folder')
  add('--output', required=True, metavar='DIR', help='folder for the figures')
  add(
    '--figures',
    type=_names,
    metavar='A,B,...',
    help=f'some of {",".join(inspection.FIGURES)} (all that there are)',
  )
  add('--format', choices=('png', 'pdf'), default='png', help='(png)')
  add('--batch_size', type=arguments.count, default=8, metavar='N', help='(8)')
  add('--num_workers', type=arguments.count, metavar='N')
  add('--on_error', choices=('raise', 'skip'), default='raise')
  _add_choices(parser)
  return parser


def _add_choices(parser):
  add = parser.add_argument_group('what is shown').add_argument
  add(
    '--heads',
    choices=attention.HEADS,
    default='mean',
    help='how rollout makes one head of all (mean)',
  )
  add(
    '--residual',
    choices=attention.RESIDUALS,
    default='half',
    help='of rollout: half skip connection, half attention; or attention alone',
  )
  add(
    '--prefix',
    choices=attention.PREFIXES,
    default='left_out',
    help='of the distance: attention to class token and registers is left out, '
    'or has distance zero',
  )
  add(
    '--query',
    type=_cell,
    metavar='ROW,COLUMN',
    help='maps and rollout of this patch, from 0, not of the class token',
  )
  add(
    '--style',
    choices=STYLES,
    default='mask',
    help='of rollout: dark where the model does not look (mask), or colours',
  )
  add(
    '--as_seen',
    action='store_true',
    help="pictures at the model's size, not at the finest that looks well",
  )
  for name, default, what in (
    ('--num_maps', 4, 'pictures that maps are drawn of, the first ones'),
    ('--per_sheet', 50, 'pictures to a sheet of rollout'),
    ('--num_filters', 28, 'principal components of the filters'),
  ):
    add(
      name,
      type=arguments.count,
      default=default,
      metavar='N',
      help=f'{what} ({default})',
    )


def _names(text):
  found = text.split(',')
  for name in found:
    if name not in inspection.FIGURES:
      raise argparse.ArgumentTypeError(
        f'{name!r} is none of {", ".join(inspection.FIGURES)}'
      )
  return found


def _cell(text):
  found = re.fullmatch(r'(\d+),(\d+)', text)
  if not found:
    raise argparse.ArgumentTypeError(
      f'{text!r}; expected ROW,COLUMN, as in 3,5'
    )
  return tuple(int(number) for number in found.groups())


def _run(args):
  """Exit status."""
  paths = image_files.find(args.pictures) if args.pictures else []
  weights = arguments.read(args.weights, args)
  weights, report = arguments.fit(weights, image_size=args.image_size)
  if report:
    print(report, file=sys.stderr)
  names = _chosen(args.figures, weights, paths)
  of_pictures = [name for name in names if name in inspection.OF_PICTURES]
  if of_pictures:
    looks = inspection.look(
      weights,
      paths,
      figures=of_pictures,
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
  if not of_pictures:
    return 0
  looks, skipped = _collect(looks, len(paths), args.num_maps)
  px = min(weights.image_shape[:2]) if args.as_seen else None
  if 'maps' in names:
    figures.maps(looks[: args.num_maps], px=px)
  if 'rollout' in names:
    figures.rollout(looks, args.style, args.per_sheet, px=px)
  if 'distance' in names:
    figures.distance(looks)
  if skipped:
    print(f'{len(skipped)} of {len(paths)} skipped:', file=sys.stderr)
    print('\n'.join(skipped), file=sys.stderr)
  return 1 if skipped else 0


def _chosen(asked, weights, paths):
  """Names of the figures to draw; by default all that can be.

  What is asked for and cannot be drawn is an error.
  """
  obstacles = dict(inspection.obstacles(weights))
  if not paths:
    why = 'there are no pictures: name images, folders or globs'
    obstacles = dict.fromkeys(inspection.OF_PICTURES, why) | obstacles
  missing = [f for f in asked or inspection.FIGURES if f in obstacles]
  told = '\n'.join(f'  {f}: {obstacles[f]}' for f in missing)
  if missing and (asked or len(missing) == len(inspection.FIGURES)):
    raise ValueError(f'Of {weights.origin} cannot be drawn:\n{told}')
  if missing:
    print(f'Left out:\n{told}', file=sys.stderr)
  return [f for f in asked or inspection.FIGURES if f not in obstacles]


def _collect(looks, total, num_maps):
  """(results, errors of what was skipped); maps of the first few alone."""
  found, skipped = [], []
  for look in terminal.track(looks, total, unit='pictures'):
    if 'error' in look:
      skipped.append(look['error'])
      continue
    if len(found) >= num_maps:
      look = {k: v for k, v in look.items() if not k.startswith('maps')}
    found.append(look)
  if not found:
    raise ValueError('No picture could be read:\n' + '\n'.join(skipped))
  return found, skipped


if __name__ == '__main__':
  main()

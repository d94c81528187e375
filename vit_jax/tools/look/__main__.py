r"""Draw what a model attends to, its features, filters and position embeddings.

  python -m vit_jax.tools.look --weights=WEIGHTS --output=DIR IMAGES ...
  python -m vit_jax.tools.look --weights=WEIGHTS --output=DIR

WEIGHTS is as for predict, IMAGES files, folders and globs; without them, only
the figures of the weights are drawn. Each has its numbers (npz) next to it:

  maps       maps-1, ...: attention of each layer and head, for the first images
  rollout    rollout, rollout-2, ...: sheets of images, each next to what the
             model attends to over all layers (paper, Figs. 6 and 14), and
             where this is more than the mean over the images
  distance   mean attention distance of each head, by layer (Figs. 7, 11)
  tsne       a map of the images by their features (t-SNE), colored by class
             folder, as in PATH/CLASS/IMAGE
  norms      norms of tokens by layer: norms, a histogram of patches, and
             norms-maps, the first images next to the norms of their patches
             (artefacts are patches of far higher norm)
  pca        the first images next to three principal components of their
             patches (of the last layer, of all these images) as colors
  similarity the first images next to the similarity (cosine) of each of four
             red patches of the last layer to all patches
  filters    principal components of the patch embedding (Fig. 7 left)
  positions  similarity of position embeddings (Figs. 7, 10)

The figures show the attention of the class token; without one, the mean over
patches or the MAP head's probe. Images that keep their aspect ratio elsewhere
(KeepAspect) are squeezed to one shape.

The paths of the figures go to stdout, everything else to stderr. The exit
status is that of predict.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from vit_jax.data.sources import image_files
from vit_jax.io import terminal
from vit_jax.reports.attention_figures import STYLES
from vit_jax.tools import arguments, parsers, predict
from vit_jax.tools.look import arrays, figures
from vit_jax.types import UserError
from vit_jax.weights import bundle

_LEAST = 30  # images for t-SNE; of fewer, the distances mean nothing


def parser() -> argparse.ArgumentParser:
  made = parsers.parser(
    __doc__, 'tools.look --weights=WEIGHTS --output=DIR IMAGES ...'
  )
  arguments.add_weights(made)
  arguments.add_images(made, (8, 'images that are computed at once'))
  group = made.add_argument_group('figures')
  add = group.add_argument
  add('--output', required=True, metavar='DIR', help='folder for the figures')
  add(
    '--figure',
    action='append',
    choices=arrays.FIGURES,
    help='may be repeated (all that can be drawn)',
  )
  add(
    '--format',
    choices=('png', 'jpg', 'pdf'),
    help='(jpg for sheets of images, which need a tenth of the bytes of png)',
  )
  add(
    '--style',
    choices=STYLES,
    default=STYLES[0],
    help='rollout as a dark mask (default), or as a heat map',
  )
  parsers.add_counts(
    group,
    num_maps=(4, 'images with attention maps'),
    num_points=(2000, 'images in tsne'),
  )
  return made


def _choose(asked, weights, paths):
  """Return the names of the figures to draw; all that can be, by default."""
  found = arrays.obstacles(weights)
  if not paths:
    found = dict.fromkeys(arrays.OF_IMAGES, 'no images are given') | found
  elif len(paths) < _LEAST:
    found.setdefault('tsne', f'it needs at least {_LEAST} images')
  if refused := [f'\n  {x}: {found[x]}' for x in asked or () if x in found]:
    raise UserError(f'{weights.origin}: cannot draw{"".join(refused)}')
  if not asked:
    for name, reason in found.items():
      print(f'Not drawn: {name}: {reason}', file=sys.stderr)
  return asked or [name for name in arrays.FIGURES if name not in found]


@terminal.one_message()
def main(argv: Sequence[str] | None = None) -> None:
  args = parser().parse_intermixed_args(argv)
  weights = bundle.squeeze(arguments.read(args))
  for note in weights.notes:
    print(note, file=sys.stderr)
  decode = weights.decode
  paths = image_files.find(args.images, decode) if args.images else []
  names = _choose(args.figure, weights, paths)
  output = pathlib.Path(args.output).expanduser()
  output.mkdir(parents=True, exist_ok=True)
  ending = dict.fromkeys(figures.SHEETS, args.format or 'jpg')
  rest = args.format or 'png'
  files = {x: output / f'{x}.{ending.get(x, rest)}' for x in names}
  of_images = [name for name in names if name in arrays.OF_IMAGES]
  for name in names:
    if name not in of_images:
      getattr(figures, name)(weights, files[name])
  if not of_images:
    sys.exit()
  if of_images == ['tsne']:
    paths = arrays.sample(paths, args.num_points)
  options = {'batch_size': args.batch_size, 'figures': of_images}
  options['max_image_bytes'] = args.max_image_bytes
  looks = arrays.look_at(weights, paths, **options)
  skipped: list[str] = []
  looks = predict.readable(looks, len(paths), skipped)
  # Only the first looks keep what is large.
  counts = {'maps': args.num_maps, 'patches': figures.PER_SHEET}
  looks = [
    {k: x for k, x in look.items() if i < counts.get(k, i + 1)}
    for i, look in enumerate(looks)
  ]
  for look, name in zip(looks, arrays.classes([x['path'] for x in looks])):
    look |= {'class': name, 'prediction': arrays.in_words(weights, look)}
  fewer = {
    'maps': ('--num_maps', looks[: args.num_maps]),
    'tsne': ('--num_points', arrays.sample(looks, args.num_points)),
  }
  for name in of_images if looks else ():
    flag, shown = fewer.get(name, ('', looks))
    if len(shown) < len(looks):
      text = f'{name}: {len(shown):,} of {len(looks):,} images ({flag})'
      print(text, file=sys.stderr)
    options = {'style': args.style} if name == 'rollout' else {}
    getattr(figures, name)(weights, files[name], shown, **options)
  sys.exit(predict.exit_status(skipped, len(paths)))


if __name__ == '__main__':
  main()

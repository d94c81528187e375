"""Recommend one of AugReg's checkpoints by accuracy on held-out data.

  python -m vit_jax.tools.augreg B/16
  python -m vit_jax.tools.augreg B/16 --adapted=imagenet2012 --resolution=384

"How to train your ViT?" released 50,000 checkpoints and a table of them, which
is downloaded once. Without --adapted or --resolution, pre-trained models are
listed, else fine-tuned ones. The first line is the recommendation; load it by
`pretrained.load(PATH)` or `--config.init_from.path=PATH`.
"""

import csv
import re
from collections.abc import Mapping, Sequence

from vit_jax.runs import terminal
from vit_jax.tools import arguments, parsers
from vit_jax.weights.files import fetch

FOLDER = 'gs://vit_models/augreg'
MODELS = ('Ti/16', 'S/32', 'S/16', 'B/32', 'B/16', 'B/8', 'L/16')
MODELS += ('R+Ti/16', 'R26+S/32', 'R50+L/32')
_COLUMNS = {'filename', 'ds', 'final_val', 'adapt_filename', 'adapt_ds'}
_COLUMNS |= {'adapt_resolution', 'adapt_final_val'}


def read_index(path: str = f'{FOLDER}/index.csv') -> list[dict[str, str]]:
  """Return the rows of the table, each a dict by column, with 'model'.

  Raises:
    ValueError: it cannot be read, or lacks columns.
  """
  try:
    with fetch(path).open(encoding='utf-8', newline='') as f:
      rows = list(csv.DictReader(f))
  except (UnicodeDecodeError, csv.Error) as e:
    raise ValueError(f'{path} is not a CSV table: {e}') from e
  if missing := sorted(_COLUMNS.difference(rows[0] if rows else ())):
    raise ValueError(f'{path} lacks the columns {", ".join(missing)}.')
  return [row | {'model': row['filename'].split('-')[0]} for row in rows]


def best(
  rows: Sequence[Mapping[str, str]],
  model: str,
  *,
  dataset: str = 'i21k',
  adapted: str | None = None,
  resolution: int | None = None,
) -> list[tuple[float, str]]:
  """Return [(accuracy, path)], the best first.

  Args:
    rows: of `read_index`.
    model: one of MODELS.
    dataset: of the pre-training: 'i1k', 'i21k' or 'i21k_30' (30 epochs).
    adapted: data set of the fine-tuning, such as 'imagenet2012'.
    resolution: image size of the fine-tuning, in pixels.

  Raises:
    ValueError: there is none; lists what there is.
  """
  wanted: dict[str, str | int | None] = {
    'model': re.sub('[+/]', '_', model),
    'ds': dataset,
  }
  wanted |= {'adapt_ds': adapted, 'adapt_resolution': resolution}
  for key, value in wanted.items():
    if value is not None:
      there = sorted({row[key] for row in rows})
      rows = [row for row in rows if row[key] == str(value)]
      if not rows:
        raise ValueError(f'No file has {key}={value}; there is {there}.')
  prefix = 'adapt_' if adapted or resolution else ''
  found = {
    (row[f'{prefix}final_val'], row[f'{prefix}filename']) for row in rows
  }
  ranked = sorted(((float(v), f) for v, f in found if v and f), reverse=True)
  return [(v, f'{FOLDER}/{f.removesuffix(".npz")}.npz') for v, f in ranked]


def main(argv: Sequence[str] | None = None) -> None:
  parser = parsers.parser(__doc__, 'tools.augreg MODEL [options]')
  add = parser.add_argument
  add('model', choices=MODELS, metavar='MODEL', help=', '.join(MODELS))
  add('--dataset', default='i21k', help='of pre-training (i21k)')
  add('--adapted', metavar='DATASET', help='of fine-tuning')
  add('--resolution', type=int, metavar='PIXELS', help='of fine-tuning')
  add('--index', default=f'{FOLDER}/index.csv', help='the table')
  arguments.add_counts(parser, count=(5, 'lines to print'))
  args = parser.parse_args(argv)
  with terminal.one_message():
    chosen = {'adapted': args.adapted, 'resolution': args.resolution}
    rows = read_index(args.index)
    found = best(rows, args.model, dataset=args.dataset, **chosen)
    for accuracy, path in found[: args.count]:
      print(f'{accuracy:.4f}  {path}')


if __name__ == '__main__':
  main()

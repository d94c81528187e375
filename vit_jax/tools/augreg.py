"""Recommend one of AugReg's checkpoints by accuracy on held-out data.

  python -m vit_jax.tools.augreg B/16
  python -m vit_jax.tools.augreg B/16 --adapted=imagenet2012 --resolution=384

"How to train your ViT?" released 50,000 checkpoints and a table of them, which
is downloaded once. Without --adapted or --resolution, pre-trained models are
listed, else fine-tuned ones. The first line is the recommendation; load it by
`pretrained.load(PATH)` or `--config.init_from.path=PATH`.
"""

import argparse
import csv

from vit_jax import terminal
from vit_jax.tools import arguments
from vit_jax.weights.files import fetch

FOLDER = 'gs://vit_models/augreg'
MODELS = {  # our name: name in the files
  'Ti/16': 'Ti_16',
  'S/32': 'S_32',
  'S/16': 'S_16',
  'B/32': 'B_32',
  'B/16': 'B_16',
  'B/8': 'B_8',
  'L/16': 'L_16',
  'R+Ti/16': 'R_Ti_16',
  'R26+S/32': 'R26_S_32',
  'R50+L/32': 'R50_L_32',
}


def read_index(path=f'{FOLDER}/index.csv'):
  """Return the rows of the table, each a dict by column.

  Raises:
    ValueError: it cannot be read, or lacks columns.
  """
  try:
    with fetch(path).open(encoding='utf-8', newline='') as f:
      rows = list(csv.DictReader(f))
  except (UnicodeDecodeError, csv.Error) as e:
    raise ValueError(f'{path} is not a CSV table: {e}') from e
  needed = {'filename', 'ds', 'final_val', 'adapt_filename', 'adapt_ds'}
  needed |= {'adapt_resolution', 'adapt_final_val'}
  if missing := sorted(needed.difference(rows[0] if rows else ())):
    raise ValueError(f'{path} lacks the columns {", ".join(missing)}.')
  return rows


def best(rows, model, *, dataset='i21k', adapted=None, resolution=None):
  """Return [(accuracy, path)], the best first.

  Args:
    rows: of `read_index`.
    model: a key of MODELS; 'ViT-' may precede the size.
    dataset: of the pre-training: 'i1k', 'i21k' or 'i21k_30' (30 epochs).
    adapted: data set of the fine-tuning, such as 'imagenet2012'.
    resolution: image size of the fine-tuning, in pixels.

  Raises:
    ValueError: there is none; lists what there is.
  """
  name = model.replace('ViT-', '')
  if name not in MODELS:
    raise ValueError(f'AugReg has no {model}; it has {", ".join(MODELS)}.')
  wanted = {'model': MODELS[name], 'ds': dataset}
  if adapted:
    wanted['adapt_ds'] = adapted
  if resolution:
    wanted['adapt_resolution'] = str(resolution)
  prefix = 'adapt_' if adapted or resolution else ''
  for key, value in wanted.items():
    values = {key: lambda row, key=key: row[key]}
    values['model'] = lambda row: row['filename'].split('-')[0]
    there = sorted(set(map(values[key], rows)))
    rows = [row for row in rows if values[key](row) == value]
    if not rows:
      raise ValueError(f'No file has {key}={value}; there is {there}.')
  found = {
    (float(row[f'{prefix}final_val']), row[f'{prefix}filename'])
    for row in rows
    if row[f'{prefix}final_val'] and row[f'{prefix}filename']
  }
  return [
    (accuracy, f'{FOLDER}/{file.removesuffix(".npz")}.npz')
    for accuracy, file in sorted(found, reverse=True)
  ]


def main(argv=None):
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add('model', choices=MODELS, metavar='MODEL', help=', '.join(MODELS))
  add('--dataset', default='i21k', help='of pre-training (i21k)')
  add('--adapted', metavar='DATASET', help='of fine-tuning')
  add('--resolution', type=int, metavar='PIXELS', help='of fine-tuning')
  add('--index', default=f'{FOLDER}/index.csv', help='the table')
  add('--count', type=arguments.count, default=5, help='lines to print (5)')
  args = parser.parse_args(argv)
  with terminal.one_message():
    chosen = {'adapted': args.adapted, 'resolution': args.resolution}
    rows = read_index(args.index)
    found = best(rows, args.model, dataset=args.dataset, **chosen)
    for accuracy, path in found[: args.count]:
      print(f'{accuracy:.4f}  {path}')


if __name__ == '__main__':
  main()

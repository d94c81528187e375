"""Find AugReg's checkpoints of a model, the most accurate ones first.

  python docs/find_augreg.py B/16
  python docs/find_augreg.py B/16 --adapted=imagenet2012 --resolution=384

"How to train your ViT?" released 50,000 checkpoints and a table of them, which
is downloaded once. Without --adapted or --resolution, pre-trained models are
listed by accuracy on held-out data, else fine-tuned ones. Load a file by
`pretrained.load(PATH)` or `--config.init_from.path=PATH`.
"""

import argparse
import csv
import re

from vit_jax.weights.array_files import fetch

FOLDER = 'gs://vit_models/augreg'


def ranked(rows, model, dataset='i21k', adapted=None, resolution=None):
  """Return [(accuracy, path)], the best first.

  Args:
    rows: of the table, each a dict by column.
    model: such as 'B/16' or 'R26+S/32'.
    dataset: of the pre-training: 'i1k', 'i21k' or 'i21k_30' (30 epochs).
    adapted: data set of the fine-tuning, such as 'imagenet2012'.
    resolution: image size of the fine-tuning, in pixels.
  """
  prefix = 'adapt_' if adapted or resolution else ''
  start = re.sub('[+/]', '_', model) + '-'
  wanted = {'ds': dataset, 'adapt_ds': adapted, 'adapt_resolution': resolution}
  wanted = {key: str(value) for key, value in wanted.items() if value}
  found = {
    (float(row[f'{prefix}final_val']), row[f'{prefix}filename'])
    for row in rows
    if row['filename'].startswith(start)
    and row[f'{prefix}final_val']
    and wanted.items() <= row.items()
  }
  return [
    (value, f'{FOLDER}/{name.removesuffix(".npz")}.npz')
    for value, name in sorted(found, reverse=True)
  ]


def main(argv=None):
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('model', help='such as Ti/16, B/16, R26+S/32')
  parser.add_argument('--dataset', default='i21k', help='of the pre-training')
  parser.add_argument('--adapted', help='data set of the fine-tuning')
  parser.add_argument('--resolution', type=int, help='of the fine-tuning')
  parser.add_argument('--count', type=int, default=5, help='lines to print')
  parser.add_argument('--index', default=f'{FOLDER}/index.csv')
  args = parser.parse_args(argv)
  with open(fetch(args.index), newline='') as file:
    rows = list(csv.DictReader(file))
  found = ranked(rows, args.model, args.dataset, args.adapted, args.resolution)
  for accuracy, path in found[: args.count]:
    print(f'{accuracy:.4f}  {path}')


if __name__ == '__main__':
  main()

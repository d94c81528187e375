r"""Photographs of solar cells: two classes, grades, or a number?

    pip install -e '.[elpv]'
    python -m vit_jax.main --config=configs/studies/photographs_labels.py \
        --workdir=DIR

Experts gave each cell a probability of a defect: 0, 1/3, 2/3 or 1. The recipe
of train_folder.py learns two classes (at least 0.5, or not), the four grades in
their order, or the probability as a number, and is tested on the two classes.
docs/labels.md has the result.

Arguments (separated by commas):
  seeds=3    divisions into training and test images
  tiny       one seed, few steps, to check that it runs
"""

from configs import arguments, common, labels, train_folder

KINDS = {  # name: (title, argument of train_folder.py, columns, scores)
  'classes': ('two classes', '', ('class',), (0.0, 1.0)),
  'order': (
    'four grades',
    'order=0<1/3<2/3<1',
    ('grade',),
    (0.0, 0.0, 1.0, 1.0),
  ),
  'number': ('a number', 'number=probability', ('probability',), None),
}
METRICS = {
  'auc': 'AUC',
  'accuracy': 'accuracy',
  'mean_per_class_accuracy': 'mean over classes',
}


def get_config(argument=''):
  args = arguments.parse(argument, ('tiny',), seeds=3)
  runs = {}
  for seed in range(1 if args.tiny else args.seeds):
    for name in KINDS:
      runs[f'{name}_seed{seed}'] = train(args, name, seed)
  cells = [
    {'row': title, 'column': column}
    | {'runs': rf'{name}_seed\d+', 'metric': f'cells/{metric}'}
    for name, (title, *_) in KINDS.items()
    for metric, column in METRICS.items()
  ]
  title = '656 test photographs, defective or not'
  return common.study(runs, [common.table(cells, title=title, name='defects')])


def train(args, name, seed):
  """Return a training of train_folder.py that learns one kind of labels."""
  _, argument, columns, values = KINDS[name]
  config = train_folder.get_config(argument + ',tiny' * args.tiny)
  kind = labels.KINDS.get(name, labels.CLASSES)
  targets = common.make(f'data.targets.{kind.targets}')
  targets |= dict(config.data.source.get('targets', {}))
  targets['columns'] = columns

  def cells(split, **fields):
    fields |= {'split': split, 'seed': seed}
    return common.make('data.sources.elpv.Elpv', **fields)

  config.seed = seed
  config.data.source = cells('train', targets=targets)
  test = config.evals.test.data
  test.source = cells('test', targets=targets)
  kind.fit(config)
  config.evals.cells = common.make(
    'science.cells.Defects',
    data=common.data(
      cells('test'), test.transforms, batch_size=test.batch_size
    ),
    values=values,
  )
  return config

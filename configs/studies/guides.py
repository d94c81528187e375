"""Do guides make representations follow, or forget, a column of the data?

    pip install -e '.[elpv]'
    python -m vit_jax.main --config=configs/studies/guides.py --workdir=DIR

Small ViTs learn by LeJEPA, with guides (objectives/guides.py) that follow or
forget the font of glyphs, or the type (mono or poly) of photographs of solar
cells. Linear classifiers then read out what should stay, the character or the
defect, and the column itself. The centroids of these short runs have a momentum
of 0.9. Nothing was chosen on test images. docs/self_supervised.md has the
result.

Arguments (separated by commas):
  seeds=5    of training
  steps=120  of 128 glyphs, or 64 photographs
  tiny       one seed, few steps: minutes, to check that it runs
"""

from configs import arguments, common, embedded, pretrain_folder
from configs.studies import photographs, self_supervised_embedded

PX = self_supervised_embedded.PX
ARMS = {'none': 'no guide', 'follow': 'follow', 'forget': 'forget'}
SETS = {  # name: (title, column, readout of what should stay)
  'glyphs': ('Glyphs', 'font', 'character'),
  'cells': ('Photographs', 'type', 'defect'),
}
WEIGHT = 0.3  # ten times that of FINO, as the runs are short


def get_config(argument=''):
  args = arguments.parse(argument, ('tiny',), seeds=5, steps=120)
  if args.tiny:
    args.seeds, args.steps = 1, 4
  runs = {}
  for seed in range(args.seeds):
    for name, make in {'glyphs': glyphs, 'cells': cells}.items():
      for arm in ARMS:
        config = make(args, seed)
        if arm != 'none':
          columns = {SETS[name][1]: arm == 'forget'}
          fields = {'weight': WEIGHT, 'momentum': 0.9}
          pretrain_folder.add_guides(config, columns, **fields)
        runs[f'{name}_{arm}_seed{seed}'] = config
  return common.study(runs, reports(), discard='.*')


def glyphs(args, seed):
  """Return a training without labels on glyphs, and its readouts."""
  config = self_supervised_embedded.pretrain(args, 'lejepa', '', seed, 2e-3)
  config.data.source.num_examples = args.steps * config.data.batch_size

  def split(first, count):
    source = embedded.glyphs(PX, seed=first, num_examples=count, num_classes=64)
    return {'source': source, 'transforms': (), 'batch_size': 128}

  count = 128 if args.tiny else 1920
  data = {'train': split(1001, 2 * count), 'test': split(1002, count)}
  config.evals = readouts(data, 'character', 'font')
  return config


def cells(args, seed):
  """Return a training without labels on photographs, and its readouts."""
  config = photographs.pretrain(args, 'lejepa', seed)
  config.total_steps = args.steps
  crops = config.data.transforms[0]
  if not args.tiny:
    crops.update(size=64, local_size=32)
  images = common.resize(16 if args.tiny else 64, antialias=True)
  data = photographs.cells(args, images, seed)['cells']
  config.evals = readouts(data, 'defect', 'type')
  return config


def readouts(data, kept, column):
  """Return evaluators of the labels and of a column."""
  by_column = {
    split: x
    | {
      'source': common.make(
        'data.encoded.LabelledBy', source=x['source'], column=column
      )
    }
    for split, x in data.items()
  }
  linear = {'linear': common.make('evals.logistic.Logistic', C=(0.1,))}
  return {
    name: common.frozen({'images': x}, linear)
    for name, x in {kept: data, column: by_column}.items()
  }


def reports():
  """Yield tables of both readouts, and of differences to no guide."""
  for name, (title, column, kept) in SETS.items():
    table = [
      {'row': row, 'column': of, 'runs': rf'{name}_{arm}_seed(?P<seed>\d+)'}
      | {'metric': f'{of}/images/linear/mean_per_class_accuracy'}
      for arm, row in ARMS.items()
      for of in (kept, column)
    ]
    yield common.table(table, title=title, name=name)
    paired = f'{title}: differences to no guide'
    yield common.paired(table, title=paired, name=f'{name}_differences')

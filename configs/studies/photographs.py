"""A few thousand photographs: what works without weights from elsewhere.

    pip install -e '.[elpv]'
    python -m vit_jax.main --config=configs/studies/photographs.py --workdir=DIR

A small ViT learns to find defects in photographs of solar cells (see
vit_jax/data/sources/elpv.py, also for the licence) from 10, 50, 200 or all
labels of each class: from scratch, or after MAE, DINO or LeJEPA. Baselines are
logistic regression on pixels and on histograms of oriented gradients, and a
small ResNet. Runs are short: 128 px (ResNet: 64), and the steps in SHOTS. No
setting was chosen on test images. docs/photographs.md has the result.

Arguments (separated by commas):
  seeds=3    divisions into training and test images
  tiny       one seed, few steps: a minute, to check that it runs
"""

from configs import arguments, common, train_folder
from configs.studies import self_supervised_embedded
from vit_jax.zoo import names as models

PX, VIEW_PX, LOCAL_PX, RESNET_PX = 128, 96, 64, 64
SHOTS = {  # name: (title, cells of each kind, steps)
  'n10': ('10 per class', 10, 60),
  'n50': ('50 per class', 50, 120),
  'n200': ('200 per class', 200, 200),
  'all': ('all 1,968', None, 400),
}
METHODS = {  # name: (title, steps of 64 images, learning rate)
  'mae': ('MAE', 600, 1e-3),
  'dino': ('DINO', 120, 2e-3),
  'lejepa': ('LeJEPA', 120, 2e-3),
}
HOG_CROP = common.resize(100, antialias=True)
LOGISTIC = common.make(
  'evals.logistic.Logistic', C=(0.01, 0.1, 1.0, 10.0), max_iter=100
)
PLAIN = {  # name: (title, transforms)
  'pixels': ('pixels', common.resize(32, antialias=True)),
  'hog': ('HOG', [*HOG_CROP, common.make('science.hog.Hog')]),
}
RESNET = {'target': models.RESNET, 'stages': (1, 1)}
METRICS = {
  'accuracy': 'accuracy',
  'mean_per_class_accuracy': 'mean over classes',
}
# Rows of the tables that the picture has, too.
DRAWN = (
  'from scratch',
  'LeJEPA, linear',
  'LeJEPA, fine-tuned',
  'MAE, fine-tuned',
  'pixels, linear',
)


def get_config(argument=''):
  args = arguments.parse(argument, ('tiny',), seeds=3)
  args.seeds = 1 if args.tiny else args.seeds
  runs = {}
  for seed in range(args.seeds):
    for name, (_, transforms) in PLAIN.items():
      runs[f'{name}_seed{seed}'] = plain(args, transforms, seed)
    for name in METHODS:
      runs[f'{name}_seed{seed}'] = pretrain(args, name, seed)
    for shots in shown(args):
      runs[f'scratch_{shots}_seed{seed}'] = train(args, shots, seed)
      runs[f'resnet_{shots}_seed{seed}'] = train(args, shots, seed, 'resnet')
      for name in METHODS:
        run = train(args, shots, seed, name, lr=1e-3)
        run.init_from = {'path': f'{{workdir}}/{name}_seed{seed}'}
        runs[f'{name}_{shots}_seed{seed}'] = run
    frozen = readouts(args, common.resize(px(args), antialias=True), seed)
    runs[f'scratch_all_seed{seed}'].evals.frozen = frozen
  return common.study(runs, reports(args), discard=r'.*_(n\d+|all)_seed\d+')


def shown(args):
  """Return SHOTS; the last one with `tiny`."""
  return {'all': SHOTS['all']} if args.tiny else SHOTS


def px(args, name=''):
  """Return the size of the images of a model, in pixels."""
  found = RESNET_PX if name == 'resnet' else PX
  return found // 4 if args.tiny else found


def model(args, name=''):
  """Return the model of train_folder.py; MAE's has patches, and no stem."""
  if name == 'resnet':
    return dict(RESNET)
  found = train_folder.model('stem')
  if name == 'mae':
    patches = {'target': models.PATCHES, 'patch_size': 4 if args.tiny else 16}
    found |= {'embedding': patches, 'depth': 4}
  elif args.tiny:
    found['embedding']['widths'] = (8, 8)
  if args.tiny:
    found |= {'width': 32, 'depth': 1, 'mlp_dim': 64}
  return found


def photographs(split, seed, shots=None, channels=1):
  """Return the source of a split, or of some cells of each kind."""
  fields = {'split': split, 'seed': seed, 'channels': channels}
  source = common.make('data.sources.elpv.Elpv', **fields)
  if not shots:
    return source
  subset = {'source': source, 'per_class': shots, 'seed': seed}
  return common.make('data.subsets.Subset', **subset)


def train(args, shots, seed, name='', lr=None):
  """Return a training as of train_folder.py on some cells of each kind."""
  _, count, steps = SHOTS[shots]
  config = train_folder.get_config(f'size={px(args, name)}')
  if lr:
    config.schedule.lr = lr
  config.model = model(args, name)
  config.data.source = photographs('train', seed, count)
  test = photographs('test', seed, 20 if args.tiny else None)
  config.evals.test.data.source = test
  del config.evals.test.every_fraction
  return finish(args, config, steps, seed)


def pretrain(args, name, seed):
  """Return a training without labels on all cells for training."""
  _, steps, lr = METHODS[name]
  config = train_folder.get_config(f'size={px(args)}')
  config.model = model(args, name) | {'num_classes': 0}
  config.data.source, config.data.labels = photographs('train', seed), False
  del config.data.order
  config.data.batch_size = 64
  self_supervised_embedded.SETTINGS[name](config)
  if name != 'mae':
    crops = config.data.transforms[0]
    crops.update(area=(0.4, 1.0), local_area=(0.1, 0.4), antialias=True)
    size, local_size = (16, 8) if args.tiny else (VIEW_PX, LOCAL_PX)
    crops.update(size=size, local_size=local_size)
  config.optimizer = common.adam(b2=0.95, weight_decay=0.05, clip_norm=1.0)
  config.schedule.lr = lr
  test = common.resize(px(args), antialias=True)
  config.evals = {'frozen': readouts(args, test, seed)}
  return finish(args, config, steps, seed)


def finish(args, config, steps, seed):
  """Set the length and the seed of a run, which `tiny` shortens."""
  del config.total_epochs
  config.update(total_steps=4 if args.tiny else steps, seed=seed)
  config.logging = {'every_fraction': 0.25}
  if args.tiny:
    config.data.batch_size = 16
  return config


def readouts(args, transforms, seed, **fields):
  """Return the evaluator of logistic regression on some cells of each kind."""
  found = by_shots(args, seed, LOGISTIC)
  return common.frozen(cells(args, transforms, seed), found, **fields)


def cells(args, transforms, seed, channels=1):
  """Return {'cells': data of both splits}, whose features are computed once."""
  some = 20 if args.tiny else None
  sources = {x: photographs(x, seed, some, channels) for x in ('train', 'test')}
  return {
    'cells': {
      split: common.data(source, transforms, batch_size=64)
      for split, source in sources.items()
    }
  }


def by_shots(args, seed, readout, name='{}'):
  """Return {name: the readout of some cells of each kind}."""
  few = common.make('evals.frozen.Few', readout=readout, seed=seed)
  return {
    name.format(shots): few | {'per_class': count} if count else readout
    for shots, (_, count, _) in shown(args).items()
  }


def plain(args, transforms, seed):
  """Return an evaluation of logistic regression without a model."""
  return {
    'run': 'vit_jax.evaluate.evaluate',
    'model': model(args),
    'image_shape': (px(args), px(args), 1),
    'evals': {'frozen': readouts(args, transforms, seed, features='pixels')},
  }


def reports(args):
  rows = {'from scratch': ('scratch_{}', 'test/{}')}
  frozen = 'frozen/cells/SHOTS/{}'
  for name, (title, *_) in METHODS.items():
    rows[f'{title}, linear'] = name, frozen
    rows[f'{title}, fine-tuned'] = f'{name}_{{}}', 'test/{}'
  rows['labels of all, linear'] = 'scratch_all', frozen
  rows |= {f'{title}, linear': (k, frozen) for k, (title, _) in PLAIN.items()}
  rows['ResNet'] = 'resnet_{}', 'test/{}'
  made, panels = [], []
  for metric, title in METRICS.items():
    cells, lines = [], {}
    for row, (runs, path) in rows.items():
      points = []
      for name, (column, count, _) in shown(args).items():
        of = runs.format(name) + r'_seed(?P<seed>\d+)'
        found = path.replace('SHOTS', name).format(metric)
        spec = {'runs': of, 'metric': found}
        cells.append({'row': row, 'column': column} | spec)
        points.append({'x': 2 * count if count else 1968, 'y': spec})
      if row in DRAWN:
        lines[row] = tuple(points)
    about = f'656 test photographs, {title}'
    made.append(common.table(cells, title=about, name=metric))
    about = f'Differences to training from scratch, {title}'
    made.append(common.paired(cells, title=about, name=f'paired_{metric}'))
    how = {'ticks': {20: '20', 100: '100', 400: '400', 1968: '1,968'}}
    title = title[0].upper() + title[1:]
    panel = common.panel(title, 'labelled photographs', lines, '%', **how)
    panels.append(panel)
  title = 'Photographs of solar cells'
  return *made, common.figure(*panels, title=title, name='photographs')

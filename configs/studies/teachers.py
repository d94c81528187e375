"""Does a trained teacher help a small model, and an anchor a continued one?

    pip install -e '.[elpv,dinov2]'
    python -m vit_jax.main --config=configs/studies/teachers.py --workdir=DIR

The small model of train_folder.py learns photographs of solar cells (see
photographs.py) without labels, from the features of a DINOv2-S that pip brings
or by LeJEPA, and is then fine-tuned; or it trains with labels from scratch. All
three take the same CPU time, the teacher's forward pass included. DINOv2-S also
continues on the photographs, by LeJEPA and by DINOv2's objective, with and
without an anchor. Nothing was chosen on test images. docs/self_supervised.md
has the result.

Arguments (separated by commas):
  seeds=5    divisions into training and test images; continued: two of them
  tiny       one seed, few steps: minutes, to check that it runs
"""

from configs import arguments, common, pretrain_folder
from configs.studies import photographs, photographs_trained

PX, LOCAL_PX, TEACHER_PX, SMALL_PX = 128, 64, 112, 56
# About the CPU seconds of a step on one core; the page has what was measured.
COST = {'lejepa': 1.7, 'distilled': 2.2, 'labels': 0.225}
ALONE, LABELLED = 160, 100  # CPU seconds without labels, and with them
CONTINUED_STEPS = 12
METHODS = {'lejepa': 'LeJEPA', 'distilled': 'distilled'}
CONTINUED = {
  'lejepa_free': 'LeJEPA, no anchor',
  'lejepa_anchor': 'LeJEPA, anchor',
  'dinov2_free': "DINOv2's objective, no anchor",
  'dinov2_anchor': "DINOv2's objective, anchor",
}


def get_config(argument=''):
  args = arguments.parse(argument, ('tiny',), seeds=5)
  args.seeds = 1 if args.tiny else args.seeds
  shared, runs = common.ConfigDict({'weights': photographs_trained.WEIGHTS}), {}
  weights = shared.get_oneway_ref('weights')
  for seed in range(args.seeds):
    for name in METHODS:
      runs[f'{name}_seed{seed}'] = student(args, name, seed, weights)
      run = labelled(args, LABELLED, seed, lr=1e-3)
      run.init_from = {'path': f'{{workdir}}/{name}_seed{seed}'}
      runs[f'tuned_{name}_seed{seed}'] = run
    runs[f'tuned_scratch_seed{seed}'] = labelled(args, ALONE + LABELLED, seed)
  for seed in range(min(2, args.seeds)):
    runs[f'start_seed{seed}'] = start(args, seed, weights)
    for name in CONTINUED:
      run = continued(name, 32, weights)
      run.data.source = photographs.photographs('train', seed)
      run.seed, run.evals = seed, linear(args, seed)
      runs[f'{name}_seed{seed}'] = finish(args, run, CONTINUED_STEPS)
  discard = 'tuned.*|.*_(free|anchor)_.*'
  return common.study(runs, reports(), shared=shared, discard=discard)


def student(args, name, seed, weights):
  """Return a training of the small model without labels."""
  config = photographs.pretrain(args, 'lejepa', seed)
  if name == 'distilled':
    crop = {'size': PX, 'area': (0.4, 1.0), 'antialias': True}
    crop = common.make('data.transforms.InceptionCrop', **crop)
    config.data.transforms = (crop,)
    config.objective = common.make(
      'objectives.feature_distillation.FeatureDistillation',
      teacher={'path': weights, 'image_size': TEACHER_PX},
      queue=512,
    )
  return finish(args, config, ALONE / COST[name])


def labelled(args, seconds, seed, lr=None):
  """Return a training of the small model with all labels."""
  config = photographs.train(args, 'all', seed, lr=lr)
  return finish(args, config, seconds / COST['labels'])


def start(args, seed, weights):
  """Return an evaluation of the weights, as `continued` has."""
  config = common.evaluation(TEACHER_PX)
  config.init_from.path = weights
  config.evals = linear(args, seed)
  return config


def continued(name, batch, weights):
  """Return a training without labels or length that starts from weights."""
  objective, anchor = name.split('_')
  config = pretrain_folder.get_config(
    f'{objective},from_weights,size={TEACHER_PX},local={SMALL_PX},'
    f'batch={batch},anchor'
  )
  del config.total_epochs
  config.init_from.path = weights
  config.objective.weight = 0.0 if anchor == 'free' else 1.0
  return config


def linear(args, seed):
  images = common.resize(TEACHER_PX, antialias=True)
  readouts = {'linear': photographs.LOGISTIC}
  cells = photographs.cells(args, images, seed, channels=3)
  return {'frozen': common.frozen(cells, readouts)}


def finish(args, config, steps):
  """Set the length, and give images the three channels of the teacher."""
  config.total_steps = 4 if args.tiny else round(steps)
  if args.tiny:
    config.data.batch_size = 8
  evals = (x.data for x in config.evals.values())
  for data in common.every_data(config.data, *evals):
    data.source.get('source', data.source).channels = 3
  return config


def reports():
  """Yield the tables of the students and of the continued model."""
  of = r'{}_seed(?P<seed>\d+)'
  students = {'from scratch': ('tuned_scratch', 'test/{}')}
  for name, title in METHODS.items():
    students[f'{title}, fine-tuned'] = f'tuned_{name}', 'test/{}'
    students[f'{title}, linear'] = name, 'frozen/cells/all/{}'
  after = 'frozen/cells/linear/{}'
  trunks = {'the weights': ('start', after)}
  trunks |= {title: (name, after) for name, title in CONTINUED.items()}
  drift = {'column': 'drift', 'metric': 'train/anchor'}
  for title, rows in {'Small models': students, 'DINOv2-S': trunks}.items():
    cells = [
      {'row': row, 'column': column, 'runs': of.format(runs)}
      | {'metric': path.format(metric)}
      for row, (runs, path) in rows.items()
      for metric, column in photographs.METRICS.items()
    ]
    first = next(iter(rows))
    yield common.paired(cells, title=f'Differences to {first}', name=first)
    if rows is trunks:
      cells += [
        {'row': row, 'runs': of.format(runs)} | drift
        for row, (runs, _) in list(rows.items())[1:]
      ]
    yield common.table(cells, title=title, name=title)

"""Does a teacher help a small model, and an anchor a continued one? On a CPU.

    python -m vit_jax.main --config=configs/studies/teachers.py --workdir=DIR

A small ViT learns drawn glyphs with labels, by LeJEPA, or from the features of
a larger one, at equal compute; the larger one also continues on other images,
with and without an anchor. Small models have the best of three learning rates
at half the compute, and fine-tuning the best of two, chosen on training digits
alone with one more seed. Result (68 minutes): docs/self_supervised.md.

Arguments (separated by commas):
  seeds=3    of each model
  tiny       one seed, few steps: minutes, to check that it runs
"""

import functools
import itertools

from configs import arguments, common, embedded, pretrain_folder
from configs.studies import self_supervised_embedded as alone

PX = alone.PX
TEACHER_STEPS, CONTINUED_STEPS = 400, 50
RATE, RATES, TUNING_RATES = 2e-3, (5e-4, 2e-3, 8e-3), (1e-3, 3e-3)
SMALL = {'width': 32, 'mlp_dim': 128, 'num_heads': 2}
METHODS = {  # name: (title, FLOPs of a step relative to 'lejepa')
  'lejepa': ('LeJEPA', 1.0),
  'labels': ('labels', 0.21),
  'distilled': ('distilled', 0.833),
}
STEPS = {'half': 120, 'full': 240}  # of LeJEPA, with 128 images
FRACTIONS = {'tenth': ('a tenth of the rate', 0.1), 'whole': ('the rate', 1.0)}
ANCHORS = {'free': ('no anchor', 0.0), 'anchor': ('anchor', 1.0)}
COLUMNS = {
  'nearest neighbours': 'digits/digits/knn/k5_t0.07',
  'linear, 10 per class': 'digits/digits/fewshot/10shot',
}


def get_config(argument=''):
  args = arguments.parse(argument, ('tiny',), seeds=3)
  args.seeds, args.tuning_steps = (1, 4) if args.tiny else (args.seeds, 200)
  seeds, runs = range(args.seeds), {}
  for seed in seeds:
    runs[f'teacher_seed{seed}'] = teacher(args, seed)
  for name in METHODS:
    for rate in RATES[:1] if args.tiny else RATES:
      run = student(args, name, 'half', embedded.TRIAL, rate)
      runs[f'{name}_lr{rate:.0e}'] = run
    for length, seed in itertools.product(STEPS, seeds):
      run = student(args, name, length, seed)
      metric = 'trial/digits/fewshot/10shot'
      run.best_of = common.best_of(f'{name}_lr.*', metric)
      runs[f'{name}_{length}_seed{seed}'] = run
  for name in (*METHODS, 'scratch'):
    make = functools.partial(finetune, args, name)
    embedded.tune(runs, f'tuned_{name}', make, args, TUNING_RATES)
  for rate, anchor, seed in itertools.product(FRACTIONS, ANCHORS, seeds):
    run = continued(args, rate, anchor, seed)
    runs[f'{rate}_{anchor}_seed{seed}'] = run
  discard = '.*_lr.*|.*_half.*|(tuned|tenth|whole).*'
  return common.study(runs, reports(), discard=discard)


def pretrain(args, name, seed, steps, lr=RATE):
  """Return a run of self_supervised_embedded.py of this length."""
  args.steps = 4 if args.tiny else steps
  return alone.pretrain(args, name, seed, lr=lr)


def teacher(args, seed):
  config = pretrain(args, 'lejepa', seed, TEACHER_STEPS)
  if not args.tiny:
    config.model.update(embedded.SIZES[96])
  return config


def student(args, name, length, seed, lr=RATE):
  """Return a training of the small model on glyphs, compared with a teacher."""
  start = 'labels' if name == 'distilled' else name
  steps = round(STEPS[length] / METHODS[name][1])
  config = pretrain(args, start, seed, steps, lr)
  config.model.update(SMALL)
  path = f'{{workdir}}/teacher_seed{0 if seed == embedded.TRIAL else seed}'
  if name == 'distilled':
    distil(config, path)
  config.evals.watch.teacher = {'path': path}
  return config


def distil(config, path):
  crop = {'size': PX, 'area': (0.5, 1.0), 'method': 'torch'}
  crop = common.make('data.transforms.InceptionCrop', **crop)
  config.data.update(transforms=(crop,), labels=False)
  config.model.num_classes = 0
  config.objective = common.make(
    'objectives.feature_distillation.FeatureDistillation',
    teacher={'path': path},
    queue=2048,
    views=alone.views(),
  )


def finetune(args, name, seed, lr):
  of = 0 if seed == embedded.TRIAL else seed
  start = name if name == 'scratch' else f'{name}_full_seed{of}'
  config = alone.finetune(args, start, seed)
  config.model.update(SMALL)
  config.schedule.lr = lr
  return config


def continued(args, rate, anchor, seed):
  """Return a training without labels on scans that starts from the teacher."""
  config = teacher(args, seed)
  config.total_steps = 4 if args.tiny else CONTINUED_STEPS
  scans = embedded.digits('train', PX)
  config.data.source = scans['source']
  config.data.transforms = (*scans['transforms'], *config.data.transforms)
  config.init_from = {'path': f'{{workdir}}/teacher_seed{seed}'}
  pretrain_folder.follow_weights(config, 'fraction')
  config.schedule.lr = RATE * FRACTIONS[rate][1]
  config.objective = common.make(
    'objectives.anchor.Anchored',
    objective=config.objective.to_dict(),
    start={'init_from': config.get_oneway_ref('init_from')},
    weight=ANCHORS[anchor][1],
  )
  return config


def reports():
  return *of_students(), *of_continued()


def of_students():
  columns = COLUMNS | {'shared neighbours': 'watch/shared_neighbours'}
  cells, panels, paired = [], [], {length: [] for length in STEPS}

  def add(row, column, runs, metric='val/accuracy', length='full'):
    y = embedded.measured(runs, metric)
    label = row if row == 'from scratch' else f'{row}, {length}'
    cells.append({'row': label, 'column': column} | y)
    paired[length].append({'row': row, 'column': column} | y)
    return {'x': embedded.measured(runs, 'exaflops'), 'y': y}

  for column, metric in columns.items():
    lines = {
      title: [
        add(title, column, f'{name}_{length}', metric, length)
        for length in STEPS
      ]
      for name, (title, _) in METHODS.items()
    }
    if column in COLUMNS:
      y = embedded.measured('teacher', metric)
      cells.append({'row': 'the teacher', 'column': column} | y)
      unit = embedded.measured('lejepa_full', 'exaflops')
      how = {'relative_to': unit, 'ticks': {0.5: '1/2', 1: '1'}}
      title = f'small model, {column}'
      panels.append(alone.panel(title, 'compute', lines, **how))
  for name, title in {**METHODS, 'scratch': ('from scratch',)}.items():
    add(title[0], 'fine-tuned, 10 per class', f'tuned_{name}')
  yield common.table(cells, title='A small model on 768 scans of digits')
  for length, found in paired.items():
    title = f'Differences to LeJEPA, {length}'
    yield common.paired(found, title=title, name=f'paired_{length}')
  panels.append(of_drift())
  yield embedded.figure(panels, 'Teachers and anchors', 'teachers')


def of_drift():
  """Return a panel of the accuracy of continued models against the drift."""
  start = embedded.measured('teacher', COLUMNS['linear, 10 per class'])
  lines = {'start': [{'x': 5e-4, 'y': start}]}
  for rate, anchor in itertools.product(FRACTIONS, ANCHORS):
    runs = f'{rate}_{anchor}'
    x = embedded.measured(runs, 'train/anchor')
    y = embedded.measured(runs, COLUMNS['linear, 10 per class'])
    title = f'{FRACTIONS[rate][0]}, {ANCHORS[anchor][0]}'
    lines[title] = [{'x': x, 'y': y}]
  ticks = {0.05: '0', 0.1: '0.1', 0.3: '0.3', 1.0: '1'}
  how = {'relative_to': {'value': 0.01}, 'ticks': ticks, 'joined': False}
  return alone.panel('teacher continued, linear', 'drift, x 100', lines, **how)


def of_continued():
  cells, gains, changes = [], [], []
  for column, metric in {**COLUMNS, 'drift, x 100': 'train/anchor'}.items():
    if column in COLUMNS:
      start = embedded.measured('teacher', metric)
      gains.append({'row': 'start', 'column': column} | start)
    for rate, anchor in itertools.product(FRACTIONS, ANCHORS):
      y = embedded.measured(f'{rate}_{anchor}', metric)
      words, title = FRACTIONS[rate][0], ANCHORS[anchor][0]
      cell = {'row': f'{words}, {title}', 'column': column} | y
      (gains if column in COLUMNS else cells).append(cell)
      changes.append({'row': title, 'column': f'{column}, {words}'} | y)
  title = 'The teacher continues on digits'
  yield common.table(gains + cells, title=title, name='continued')
  title = 'Differences to the start'
  yield common.paired(gains, title=title, name='paired_start')
  title = 'Differences to continuing without an anchor'
  yield common.paired(changes, title=title, name='paired_anchor')

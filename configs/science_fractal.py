"""Is one fractal enough to pre-train a ViT, and how different must copies be?

"Scaling Backwards" (arXiv 2408.00677): a ViT-Ti learns to tell apart 1,000
perturbations of one fractal, and is fine-tuned on CIFAR-100. Perturbations of
width 0.1 give 84.2%, 0.2 83.4%, 0.05 83.0%, but 0.01 only 19.9%. Here the
perturbations are 250, and the other task is handwritten digits.
"""

import functools

from configs import common, embedded

PX, CLASSES, SHOTS = 24, 250, 10
RATES, TUNING_RATES = (5e-4, 2e-3, 8e-3), (1e-3, 3e-3)
SPREADS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
ARMS = {f'spread{1000 * x:g}': {'spread': x} for x in SPREADS}
ARMS['fractals'] = {}  # as many other fractals


def study(args):
  steps, rates = (4, 1) if args.tiny else (600, None)
  runs = {}
  for name, fields in ARMS.items():
    make = functools.partial(pretrain, args, fields, steps)
    metric = 'trial/digits/fewshot/10shot'
    how = {'seeds': args.seeds, 'metric': metric, 'rates': RATES[:rates]}
    embedded.tune(runs, name, make, **how)
  for name in (*ARMS, 'scratch'):
    make = functools.partial(finetune, args, name)
    how = {'seeds': args.seeds, 'rates': TUNING_RATES[:rates]}
    embedded.tune(runs, f'tuned_{name}', make, metric='val/accuracy', **how)
  return runs, reports()


def model(**fields):
  sizes = {'width': 64, 'depth': 4, 'mlp_dim': 256, 'num_heads': 4}
  return embedded.vit(**sizes, patch_size=4, **fields)


def pretrain(args, fields, steps, seed, lr):
  """Return a pre-training on one image of each class, cropped and flipped."""
  source = common.make(
    'data.embedded.fractals.Fractals',
    num_classes=16 if args.tiny else CLASSES,
    images_per_class=1,
    image_size=PX,
    seed=seed,
    **fields,
  )
  images = common.inception_crop(PX, area=(0.5, 1.0))
  evals = {
    'trial': few(args, 'train[:50%]', 'train[50%:]'),
    'digits': few(args, 'train', 'test'),
  }
  data = common.data(source, images, batch_size=64)
  return embedded.run(model(), data, evals, steps=steps, lr=lr, seed=seed)


def few(args, train, test):
  """Return the evaluator of a linear classifier of digits, 'NAME[SLICE]'."""
  data = {}
  for key, split in {'train': train, 'test': test}.items():
    name, bracket, bounds = split.partition('[')
    data[key] = embedded.digits(name, PX)
    if bracket:
      source, bounds = data[key]['source'], bracket + bounds
      data[key]['source'] = common.make(
        'data.views.Slice', source=source, bounds=bounds, stratified=True
      )
  readouts = {'fewshot': common.few_shot((SHOTS,), (0, 1, 2, 3, 4))}
  return common.frozen({'digits': data}, readouts)


def finetune(args, name, seed, lr):
  is_trial = seed == embedded.TRIAL
  start = {'path': f'{{workdir}}/{name}_seed{0 if is_trial else seed}'}
  data = embedded.digits('train', PX + 3, crop=PX, batch_size=50)
  val = embedded.digits('test', PX)
  half = common.make('data.views.Slice', source=data['source'])
  if is_trial:  # on training digits that no result is measured on
    val['source'] = half | {'bounds': '[50%:]'}
  half['bounds'] = '[:50%]'
  data['source'] = common.make(
    'data.views.Subset', source=half, per_class=SHOTS, seed=seed
  )
  return embedded.run(
    model(),
    data,
    {'val': common.classification(val)},
    steps=4 if args.tiny else 200,
    lr=lr,
    seed=seed,
    init_from=None if name == 'scratch' else start,
  )


def reports():
  columns = {
    'linear, frozen': ('{}', 'digits/digits/fewshot/10shot'),
    'fine-tuned': ('tuned_{}', 'val/accuracy'),
  }
  cells, panels = [], []
  for column, (run, metric) in columns.items():
    points = []
    for name, fields in ARMS.items():
      runs = run.format(rf'{name}_seed(?P<seed>\d+)')
      y = {'runs': runs, 'metric': metric}
      row = f'width {fields["spread"]:g}' if fields else 'other fractals'
      cells.append({'row': row, 'column': column} | y)
      if fields:
        points.append({'x': fields['spread'], 'y': y})
    panels.append(
      {'title': f'Digits, {SHOTS} per class, {column}'}
      | {'xlabel': 'width of the perturbations', 'ylabel': 'accuracy (%)'}
      | {'lines': {'one fractal': tuple(points)}}
    )
  scratch = {'runs': r'tuned_scratch_seed(?P<seed>\d+)', 'metric': metric}
  cells.append({'row': 'from scratch', 'column': column} | scratch)
  return (
    common.table(cells, title='Accuracy on 768 scans of digits'),
    common.figure(*panels, title='One fractal', name='fractal'),
  )

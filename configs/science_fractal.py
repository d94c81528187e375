"""Is one fractal enough to pre-train a ViT, and how different must copies be?

"Scaling Backwards" (arXiv 2408.00677): the classes are 1,000 perturbations of
one fractal. A ViT-Ti learns them, and is fine-tuned on CIFAR-100: 84.2% with
perturbations of width 0.1, 83.4% with 0.2, 83.0% with 0.05, but 19.9% with
0.01. Here there are 250 classes, and the other task is handwritten digits.

Result: fine-tuned, width 0.01 loses 7.5 ± 6.3 points to no pre-training, 0.02
gains 2.6 ± 2.4; of the rest no difference is shown.
"""

import functools

from configs import common, embedded

PX, CLASSES, SHOTS = 24, 250, 10
RATES = (1e-3, 3e-3)
SPREADS = (0.01, 0.02, 0.05, 0.1, 0.2)
BASELINES = {'scratch': 'from scratch', 'fractals': 'as many other fractals'}
METRIC = f'digits/digits/fewshot/{SHOTS}shot'


def spread(width):
  return f'spread{1000 * width:g}'


ARMS = {spread(x): {'spread': x} for x in SPREADS} | {'fractals': {}}


def study(args):
  steps, rates = (4, RATES[:1]) if args.tiny else (500, RATES)
  runs = {}
  for name, fields in ARMS.items():
    make = functools.partial(pretrain, args, fields, steps)
    metric = METRIC.replace('digits', 'trial', 1)
    how = {'seeds': args.seeds, 'metric': metric, 'rates': rates}
    embedded.tune(runs, name, make, **how)
  for name in (*ARMS, 'scratch'):
    make = functools.partial(finetune, args, name)
    how = {'seeds': args.seeds, 'rates': rates}
    embedded.tune(runs, f'tuned_{name}', make, metric='val/accuracy', **how)
  return runs, reports()


def model(**fields):
  return embedded.vit(**embedded.SIZES[64], patch_size=4, **fields)


def pretrain(args, fields, steps, seed, lr):
  """Return a pre-training on one image of each class, cropped and flipped."""
  source = common.make(
    'science.fractals.Fractals',
    num_classes=16 if args.tiny else CLASSES,
    images_per_class=1,
    image_size=PX,
    seed=seed,
    **fields,
  )
  images = common.inception_crop(PX, area=(0.5, 1.0))
  readouts = {'fewshot': common.few_shot((SHOTS,), (0, 1, 2, 3, 4))}
  evals = embedded.frozen_on_digits(PX, readouts)
  data = common.data(source, images, batch_size=64)
  return embedded.run(model(), data, evals, steps=steps, lr=lr, seed=seed)


def finetune(args, name, seed, lr):
  of = 0 if seed == embedded.TRIAL else seed
  start = {'path': f'{{workdir}}/{name}_seed{of}'}
  how = {'shots': SHOTS, 'seed': seed, 'batch_size': 50}
  data, val = embedded.few_digits(PX, PX + 3, **how)
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
    'fine-tuned': ('tuned_{}', 'val/accuracy', ('scratch', 'fractals')),
    'linear, frozen': ('{}', METRIC, ('fractals',)),
  }
  cells, panels = [], []
  for column, (run, metric, baselines) in columns.items():
    lines = {}
    for name in (*baselines, *SPREADS):
      arm = name if name in baselines else spread(name)
      y = {'runs': run.format(rf'{arm}_seed(?P<seed>\d+)'), 'metric': metric}
      row = BASELINES.get(name, f'one fractal, width {name}')
      cells.append({'row': row, 'column': column} | y)
      at = SPREADS[:: len(SPREADS) - 1] if name in baselines else (name,)
      line = lines.setdefault(BASELINES.get(name, 'one fractal'), [])
      line += [{'x': x, 'y': y} for x in at]
    panels.append(
      {'title': f'Digits, {SHOTS} per class, {column}', 'lines': lines}
      | {'xlabel': 'width of the perturbations', 'ylabel': 'accuracy (%)'}
      | {'ticks': {x: f'{x:g}' for x in SPREADS}}
    )
  figure = common.figure(
    *panels, title='One fractal', name='fractal', intervals=True
  )
  return embedded.paired(cells, 'from scratch, or other fractals'), figure

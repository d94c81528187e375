"""Is one fractal enough to pre-train a ViT, and how different must copies be?

The classes are 250 perturbations of one fractal; the other task is handwritten
digits. Result: fine-tuned, width 0.01 loses 7.5 ± 6.3 points to no
pre-training, 0.02 gains 2.6 ± 2.4. See docs/science.md.
"""

from configs import common, embedded

PX, CLASSES = 24, 250
RATES = (1e-3, 3e-3)
SPREADS = (0.01, 0.02, 0.05, 0.1, 0.2)
BASELINES = {'scratch': 'from scratch', 'fractals': 'as many other fractals'}
METRIC = 'digits/digits/fewshot/10shot'


def spread(width):
  return f'spread{1000 * width:g}'


ARMS = {spread(x): {'spread': x} for x in SPREADS} | {'fractals': {}}


def study(args):
  runs = {}
  for name, fields in ARMS.items():
    metric = METRIC.replace('digits', 'trial', 1)
    embedded.tune(runs, name, args, RATES, pretrain, fields, metric=metric)
  for name in (*ARMS, 'scratch'):
    embedded.tune(runs, f'tuned_{name}', args, RATES, finetune, name)
  return runs, reports()


def pretrain(args, fields, seed, lr):
  """Return a pre-training on one image of each class, cropped and flipped."""
  source = common.make(
    'science.fractals.Fractals',
    num_classes=16 if args.tiny else CLASSES,
    image_size=PX,
    seed=seed,
    **fields,
  )
  images = common.inception_crop(PX, area=(0.5, 1.0))
  evals = embedded.frozen_on_digits(PX)
  data = common.data(source, images, batch_size=64)
  how = {'steps': 4 if args.tiny else 500, 'lr': lr, 'seed': seed}
  return embedded.run(embedded.vit(64), data, evals, **how)


def finetune(args, name, seed, lr):
  of = 0 if seed == embedded.TRIAL else seed
  start = {'path': f'{{workdir}}/{name}_seed{of}'}
  start = None if name == 'scratch' else start
  fields = {'steps': 4 if args.tiny else 200, 'lr': lr, 'init_from': start}
  return embedded.finetune(embedded.vit(64), PX, seed=seed, **fields)


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
      y = embedded.measured(run.format(arm), metric)
      row = BASELINES.get(name, f'one fractal, width {name}')
      cells.append({'row': row, 'column': column} | y)
      at = SPREADS[:: len(SPREADS) - 1] if name in baselines else (name,)
      line = lines.setdefault(BASELINES.get(name, 'one fractal'), [])
      line += [{'x': x, 'y': y} for x in at]
    xlabel, ticks = 'width of the perturbations', {x: f'{x:g}' for x in SPREADS}
    title = f'Digits, 10 per class, {column}'
    panels.append(common.panel(title, xlabel, lines, ticks=ticks))
  figure = embedded.figure(panels, 'One fractal', 'fractal')
  return embedded.paired(cells, 'from scratch, or other fractals'), figure

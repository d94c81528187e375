r"""Learning with and without labels on drawn images, compared on a CPU.

    python -m vit_jax.main --workdir=DIR \
        --config=configs/studies/self_supervised_embedded.py

A small ViT is pre-trained on glyphs with their labels, by masked patches, MAE,
DINO or LeJEPA, at equal steps and at equal compute, and meets handwritten
digits. Learning rates are tried with one more seed, on the training digits
alone: a linear classifier learns 10 per class of one half and is tested on the
other half; the rate of fine-tuning is chosen in the same way for each method.
20 more runs of LeJEPA test whether its loss predicts the accuracy. Result (67
minutes): docs/self_supervised.md.

Arguments (separated by commas):
  seeds=3    of each method
  steps=300  of 128 images
  tiny       one seed, few steps: minutes, to check that it runs
"""

from configs import arguments, common, embedded, masked_patches

PX, LOCAL_PX, PATCH = 20, 12, 4
RATES, TUNING_RATES = (5e-4, 2e-3, 8e-3), (1e-3, 3e-3)
METHODS = {  # name: (title, FLOPs of a step relative to 'labels')
  'labels': ('labels', 1.0),
  'masked': ('masked patches', 1.0),
  'mae': ('MAE', 0.37),
  'dino': ('DINO', 4.2),
  'lejepa': ('LeJEPA', 3.8),
}
COMPUTE = 2  # times that of `steps` steps of 'labels'
BUDGETS = {'steps': 'equal steps', 'compute': 'equal compute'}
# Of the runs that test whether the loss of LeJEPA predicts the accuracy.
LOSS_RATES = (2e-4, 5e-4, 2e-3, 8e-3)
WEIGHTS = (0.002, 0.01, 0.05, 0.2, 0.5)


def get_config(argument=''):
  args = arguments.parse(argument, ('tiny',), seeds=3, steps=300)
  args.rates, args.tuning_steps = None, 200  # all rates
  if args.tiny:
    args.seeds, args.steps, args.rates, args.tuning_steps = 1, 4, 1, 4
  runs, metric = {}, 'trial/digits/fewshot/10shot'
  for name in METHODS:
    embedded.try_rates(runs, name, args, RATES, pretrain, name, 'steps')
    for budget in BUDGETS:
      arm = f'{name}_{budget}', args, RATES, pretrain, name, budget
      embedded.tune(runs, *arm, metric=metric, of=name)
  for name in METHODS:
    how = args, TUNING_RATES, finetune
    embedded.try_rates(runs, f'tuned_{name}', *how, f'{name}_steps')
    for start in (f'{name}_{budget}' for budget in BUDGETS):
      embedded.tune(runs, f'tuned_{start}', *how, start, of=f'tuned_{name}')
  embedded.tune(runs, 'tuned_scratch', args, TUNING_RATES, finetune, 'scratch')
  for i, weight in enumerate(WEIGHTS[: args.rates]):
    for lr in LOSS_RATES[: args.rates]:
      run = pretrain(args, 'lejepa', 'half', embedded.TRIAL, lr)
      run.objective.regularizer.weight = weight
      runs[f'loss{i}_lr{lr:.0e}'] = run
  return common.study(runs, reports(args), discard='.*_lr.*|tuned.*')


def pretrain(args, name, budget, seed, lr):
  """Return a pre-training that evaluates its features on digits."""
  factor = {'compute': COMPUTE / METHODS[name][1], 'half': 0.5}.get(budget, 1)
  steps = round(factor * args.steps)
  source = embedded.glyphs(PX, seed=1 + seed)
  data = common.data(source, (), batch_size=16 if args.tiny else 128)
  fields = {'steps': steps, 'lr': lr, 'seed': seed}
  config = embedded.run(model(args), data, {}, **fields)
  SETTINGS[name](config)
  if name != 'labels':
    config.data.labels = False
  knn = common.make('evals.knn.Knn', k=(5,))
  evals = embedded.frozen_on_digits(PX, tiny=args.tiny, knn=knn)
  config.evals = evals | {'watch': watch(args)}
  return config


def labels(config):
  config.model.num_classes = None
  config.objective = common.xent('softmax', label_smoothing=0.1)


def masked(config):
  masked_patches.set_task(
    config, 'downsampled', channels=1, ratio=0.5, downsampled_to=4
  )
  config.model.pooling.class_token = False


def mae(config):
  decoder = {'width': 32, 'depth': 2, 'num_heads': 2}
  config.objective = common.make('objectives.mae.Mae', decoder=decoder)


def dino(config):
  head = {'hidden': 256, 'bottleneck': 64, 'outputs': 1024}
  config.objective = common.make('objectives.dino.Dino', head=head)
  config.objective.update(momentum=0.99, freeze_last_layer_fraction=0.05)
  crop(config)


def lejepa(config):
  projector = {'embedding': 128, 'hidden': (512, 512), 'outputs': 16}
  config.objective = common.make(
    'objectives.lejepa.LeJepa',
    projector=projector,
    regularizer=common.make('objectives.lejepa.Sigreg', weight=0.04),
  )
  crop(config)


SETTINGS = {x.__name__: x for x in (labels, masked, mae, dino, lejepa)}


def crop(config):
  """Give a run two large and four small crops of each image."""
  crops = {'size': PX, 'area': (0.5, 1.0)}
  crops |= {'local_size': LOCAL_PX, 'local_area': (0.15, 0.5)}
  crops |= {'local_count': 4, 'interpolation': 'bilinear', 'antialias': False}
  config.data.transforms = (common.make('data.transforms.MultiCrop', **crops),)
  config.objective.views = views()


def views():
  """Return colours of views that are not flipped."""
  colour = common.make('objectives.colours.Colour', flip=0.0)
  return {'globals': (colour,), 'local': colour}


def model(args):
  fields = {'width': 32, 'depth': 1, 'mlp_dim': 64} if args.tiny else {}
  fields['pooling'] = common.make('models.pooling.Mean')
  return embedded.vit(64, patch_size=PATCH, num_classes=0, **fields)


def watch(args):
  """Return an evaluator of the representation of other glyphs."""
  source = embedded.glyphs(PX, num_examples=96 if args.tiny else 960)
  data = common.data(source, (), batch_size=32)
  return common.make('evals.representation.Representation', data=data)


def finetune(args, start, seed, lr):
  """Return a fine-tuning of a run on digits, or a training from scratch."""
  of = 0 if seed == embedded.TRIAL else seed
  path = {'path': f'{{workdir}}/{start}_seed{of}'}
  fields = {'init_from': None if start == 'scratch' else path}
  fields |= {'steps': args.tuning_steps, 'lr': lr, 'seed': seed}
  return embedded.finetune(model(args) | {'num_classes': None}, PX, **fields)


def reports(args):
  columns = {  # title: (runs, metric)
    'nearest neighbours': ('{}', 'digits/digits/knn/k5_t0.07'),
    'linear, 10 per class': ('{}', 'digits/digits/fewshot/10shot'),
    'fine-tuned, 10 per class': ('tuned_{}', 'val/accuracy'),
  }
  cells, panels, paired = [], [], {budget: [] for budget in BUDGETS}
  unit = {'runs': r'labels_steps_seed\d+', 'metric': 'exaflops'}
  xlabel = f'compute ({args.steps} steps of labels = 1)'
  for column, (runs, metric) in columns.items():
    lines = {}
    for name, (title, _) in METHODS.items():
      lines[title] = []
      for budget, words in BUDGETS.items():
        of = f'{name}_{budget}'
        y = embedded.measured(runs.format(of), metric)
        x = embedded.measured(of, 'exaflops')
        lines[title].append({'x': x, 'y': y})
        cells.append({'row': f'{title}, {words}', 'column': column} | y)
        paired[budget].append({'row': title, 'column': column} | y)
    how = {'relative_to': unit, 'ticks': {x: f'{x:g}' for x in (0.5, 1, 2, 4)}}
    panels.append(common.panel(column, xlabel, lines, **how))
  scratch = embedded.measured('tuned_scratch', metric)
  cells.append({'row': 'from scratch', 'column': column} | scratch)
  tables = [common.table(cells, title='Accuracy on 768 scans of digits')]
  for budget, words in BUDGETS.items():
    about = {'title': f'Differences to labels, {words}'}
    about['name'] = f'paired_{budget}'
    tables.append(common.paired(paired[budget], **about))
  return (
    *tables,
    common.figure(*panels, title='Accuracy against compute'),
    common.figure(*of_loss(args, columns), title='LeJEPA: loss', name='loss'),
  )


def of_loss(args, columns):
  """Return panels of the loss of LeJEPA against frozen accuracies."""
  panels = []
  for column, (_, metric) in list(columns.items())[:2]:
    lines = {}
    for i, weight in enumerate(WEIGHTS[: args.rates]):
      runs = [f'loss{i}_lr{lr:.0e}' for lr in LOSS_RATES[: args.rates]]
      lines[f'weight {weight:g}'] = [
        {'x': {'runs': run, 'metric': 'train/loss'}}
        | {'y': {'runs': run, 'metric': metric}}
        for run in runs
      ]
    how = {'joined': False, 'correlate': True}
    panels.append(common.panel(column, 'training loss', lines, **how))
  return panels

r"""Which parts of a recipe help a small ViT, and which optimizer, on a CPU.

    python -m vit_jax.main --config=configs/studies/recipes_embedded.py \
        --workdir=DIR

A baseline (AdamW, random crops) gets one part more (RECIPES), or another of
OPTIMIZERS. docs/science.md has the protocol and the result (23 minutes).

Arguments (separated by commas):
  seeds=3    seeds for each recipe and optimizer
  steps=600  steps of 32 images, on glyphs
  tiny       one seed, few steps: minutes, to check that it runs
"""

from configs import arguments, common, embedded

PX, LOAD_PX, IMAGES = 16, 18, 960  # random crops of PX
TASKS = {
  'glyphs': 'glyphs',
  'finetune': 'digits, fine-tuned',
  'scratch': 'digits, from scratch',
}


def model(**fields):
  return embedded.vit(48, scan=True, **fields)


def mixed(**fields):
  return {'objective': common.mixed(common.xent('softmax'), **fields)}


SMOOTHED = {'objective': common.xent('softmax', label_smoothing=0.1)}
RAND_AUGMENT = common.make(
  'data.augment.rand_augment', policy='rand-m9-mstd0.5-inc1', fill=0
)
ERASING = common.make('data.augment.RandomErasing', mean=64, std=83)  # glyphs'
RECIPES = {  # title: (name, settings of a run, transforms after the crop)
  'baseline': ('baseline', {}, ()),
  'RandAugment': ('randaugment', {}, (RAND_AUGMENT,)),
  'mixup': ('mixup', mixed(mixup=0.2), ()),
  'CutMix': ('cutmix', mixed(cutmix=1.0, probability=0.5), ()),
  'random erasing': ('erasing', {}, (ERASING,)),
  'stochastic depth': ('depth', {'model': model(stochastic_depth=0.1)}, ()),
  'EMA': ('ema', {'ema': {'decay': 0.99, 'debias': True}}, ()),
  'label smoothing': ('smoothing', SMOOTHED, ()),
}

NADAMW = {'optimizer': embedded.adam() | {'target': 'optax.nadamw'}}
MUON = {'optimizer': embedded.muon()}
SGD = {'optimizer': common.sgd(weight_decay=1e-4, clip_norm=1.0)}
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
OPTIMIZERS = {  # title: (name, settings of a run, learning rates to try)
  'AdamW': ('baseline', {}, RATES),
  'NAdamW': ('nadamw', NADAMW, RATES),
  'Muon': ('muon', MUON, RATES),
  'SGD': ('sgd', SGD, (0.03, 0.1, 0.3)),
}


def get_config(argument=''):
  args = arguments.parse(argument, ('tiny',), seeds=3, steps=600)
  args.digits_steps = 150
  if args.tiny:
    args.seeds, args.steps, args.digits_steps = 1, 4, 4
  runs, tried = {}, []
  for task, title in TASKS.items():
    rules = list(OPTIMIZERS)[: None if task == 'glyphs' else 1]
    for rule in rules:
      name, settings, rates = OPTIMIZERS[rule]
      arm = f'{task}_{name}', args, rates, train, task, settings, ()
      embedded.try_rates(runs, *arm)
      for rate in rates[:1] if args.tiny else rates:
        cell = {'row': f'{title}: {rule}', 'column': f'{rate:g}'}
        run = f'{task}_{name}_lr{rate:.0e}'
        tried.append(cell | {'runs': run, 'metric': 'val/accuracy'})
    how = args, RATES, train, task
    for name, *recipe in RECIPES.values():
      of = f'{task}_baseline'
      embedded.tune(runs, f'{task}_{name}', *how, *recipe, of=of)
    for name, settings, _ in (OPTIMIZERS[rule] for rule in rules[1:]):
      of = f'{task}_{name}'
      embedded.tune(runs, of, *how, settings, (), of=of)
  for name, _, _ in OPTIMIZERS.values():
    for seed in range(args.seeds):
      evals = runs[f'glyphs_{name}_seed{seed}'].evals
      evals.during = common.classification(evals.val.data, every_steps=25)
  # Fine-tuning starts from the baseline.
  discard = '(?!glyphs_baseline_seed).*'
  return common.study(runs, reports(tried), discard=discard)


def train(args, task, settings, transforms, seed, lr):
  """Return a run of a task; TRIAL has data that the results do not have."""
  steps, evals, init_from = args.digits_steps, {}, None
  if task == 'glyphs':
    steps = args.steps
    test = seed if seed == embedded.TRIAL else 0
    data = glyphs('RandomCrop', seed=1 + seed)
    val = glyphs('CentralCrop', seed=test)
    evals['frozen'] = embedded.linear_on_digits(PX, tiny=args.tiny)
  else:
    data, val = embedded.few_digits(PX, LOAD_PX, seed=seed, batch_size=48)
  if task == 'finetune':
    start = 0 if seed == embedded.TRIAL else seed
    init_from = {'path': f'{{workdir}}/glyphs_baseline_seed{start}'}
  evals['val'] = common.classification(val)
  fields = {'seed': seed, 'init_from': init_from, 'model': model()} | settings
  data['transforms'] += transforms
  run = embedded.run(data=data, evals=evals, steps=steps, lr=lr, **fields)
  if args.tiny:
    run.model.update(width=24, depth=1, mlp_dim=48)
  return run


def glyphs(crop, *, seed):
  transforms = [common.make(f'data.transforms.{crop}', size=PX)]
  return embedded.drawn(LOAD_PX, seed, IMAGES, transforms) | {'batch_size': 32}


def reports(tried):
  recipes = {title: name for title, (name, *_) in RECIPES.items()}
  rules = {title: name for title, (name, *_) in OPTIMIZERS.items()}
  of_glyphs = {
    'glyphs, held out': ('glyphs', 'val/accuracy'),
    'digits, linear': ('glyphs', 'frozen/digits/fewshot/10shot'),
  }
  of_digits = {
    TASKS[task]: (task, 'val/accuracy') for task in ('finetune', 'scratch')
  }
  lines = {
    row: (embedded.measured(f'glyphs_{name}')['runs'], 'during/accuracy')
    for row, name in rules.items()
  }
  title = 'Pre-training on glyphs (mean ± std of the seeds)'
  panel = {'title': title, 'ylabel': 'accuracy on held-out glyphs (%)'}
  return (
    common.table(tried, title='Learning rates tried', name='rates'),
    paired(recipes, of_glyphs | of_digits, name='recipes'),
    paired(rules, of_glyphs, name='optimizers'),
    common.curves([panel | {'lines': lines}]),
  )


def paired(rows, columns, *, name):
  """Return the differences to the first row."""
  cells = (
    {'row': row, 'column': title} | embedded.measured(f'{task}_{run}', metric)
    for row, run in rows.items()
    for title, (task, metric) in columns.items()
  )
  title = f'Differences to {next(iter(rows))}'
  return common.paired(cells, title=title, name=name)

"""VTAB-1k, its 19 tasks and their table, as one study: paper, tables 9 and 2.

    python -m vit_jax.main --config=configs/vtab.py:L/16 \
        --config.shared.weights=gs://vit_models/imagenet21k/ViT-L_16.npz \
        --workdir=DIR

Each task is fine-tuned on its 1,000 examples, with three seeds, and tested on
its full test set. The settings are the paper's, the same for all: SGD with
momentum 0.9, learning rate .01, 2500 steps of 512 images, cosine decay, no
weight decay, gradients clipped at norm 1, 384 pixels. (They were chosen among
two rates and two schedules on the 200 validation examples.) The preprocessing
is BiT's, which crops and mirrors where that leaves the label as it is.

One command does all 57 runs, and goes on where it was stopped; on a cluster,
--study_member=0, 1, ... does one. What the runs have in common is set once, as
--config.shared.weights and .data_dir: see transfer.py.

Arguments (between commas; the first of a list is the default):
  B/16, ...  the model that the weights are of, as in finetune.py
  natural, specialized, structured   only the tasks of these groups, and
  caltech101, cifar100, dtd, flowers, pets, sun397, svhn, camelyon, eurosat,
  resisc45, retinopathy, clevr_count, clevr_distance, dmlab, kitti,
  dsprites_location, dsprites_orientation, snorb_azimuth, snorb_elevation
             these; all by default
  seeds=3    runs of each task
  sweep      first the rates .001 .003 .01 .03 for 500 and 2500 steps on 800 of
             the examples, the best on the 200 others being used on all 1,000,
             for each task: AugReg's protocol, another 152 runs
  size=384   pixels; 378 for H/14 (384 does not divide into its patches), 224
             for Mixers
  postact    a ResNet of the released code's form, not BiT's
  tiny       seconds for each run, for weights of a tiny run; tests on the
             first 20 examples only

Expected: the table's own columns. There the means of the groups are computed
from table 9, and that of all tasks is table 2's, with its deviation.

Not in the paper: warm-up, 200 steps (scenic's, for ViT-G; AugReg's for 2500
steps; 100 for 500), softmax loss, a bfloat16 momentum, the 378 pixels.

No run keeps its checkpoint: they would be 0.5 GB each for a B/16, 1.8 GB for an
L/16. --config.discard= keeps them all.
"""

import re

from ml_collections import config_dict

from configs import arguments, common, finetune, published, transfer
from vit_jax.data import vtab

TASKS = tuple(vtab.TASKS)
RATES = (0.001, 0.003, 0.01, 0.03)
WARMUP_STEPS = {500: 100, 2500: 200}  # of so many
VARIANTS = (
  '',
  'L/16,sweep,seeds=1',
  'H/14,natural,kitti',
  'R50x1,specialized,size=224,postact',
  'Mixer-B/16,structured',
  'tiny',
  'seeds=1,sweep,dtd,clevr_count,tiny',
)


def get_config(argument=''):
  args = arguments.parse(
    argument,
    model=finetune.MODELS,
    **{word: False for word in (*vtab.GROUPS, *TASKS)},
    seeds=3,
    sweep=False,
    size=0,
    postact=False,
    tiny=False,
  )
  chosen = [
    task
    for task in TASKS
    if getattr(args, task) or getattr(args, vtab.TASKS[task].group)
  ] or TASKS
  runs = {}
  for task in chosen:
    if args.sweep:
      runs |= grid(task, args)
    runs |= finals(task, args)
  report = {
    'target': 'vit_jax.reports.table.Table',
    'title': f'VTAB-1k, {args.model}{transfer.spread(args)}',
    'cells': cells(chosen),
  }
  return transfer.study(runs, (report,), discard='.*')


def grid(task, args):
  """{name: config} of AugReg's settings, on 800 examples."""
  return {
    f'{task}_lr{rate:.0e}_steps{steps}': finetuning(
      task, args, 'train800', 'val', rate, steps
    )
    for rate in RATES
    for steps in WARMUP_STEPS
  }


def finals(task, args):
  """{name: config} of each seed, on 1,000 examples."""
  best = {
    'runs': f'{task}_lr.*',
    'metric': 'val/accuracy',
    'take': ('schedule.lr', 'schedule.warmup_steps', 'total_steps'),
  }
  runs = {}
  for seed in range(args.seeds):
    run = finetuning(task, args, 'train800val200', 'test', 0.01, 2500)
    run.seed = seed
    if args.sweep:
      run.best_of = best
    runs[f'{task}_seed{seed}'] = run
  return runs


def finetuning(task, args, split, evaluator, lr, steps):
  """A run on the split, evaluated at its end, as 'val' or 'test'."""
  size = args.size or pixels(args.model)
  held_out = {'val': 'val200', 'test': 'test'}[evaluator]
  config = common.training()
  config.total_steps = steps
  config.model = common.model(args.model)
  common.set_form(config, args.postact)
  config.init_from = {'path': config_dict.placeholder(str), 'ema': 'auto'}
  config.data = images(task, split, size, train=True)
  config.objective = {
    'target': 'vit_jax.objectives.classification.softmax_xent',
    'label_smoothing': 0.0,
  }
  config.optimizer = {
    'target': 'vit_jax.optim.sgd',
    'momentum': 0.9,
    'accumulator_dtype': 'bfloat16',
    'clip_norm': 1.0,
  }
  warmup_steps = WARMUP_STEPS[steps]
  config.schedule = {'lr': lr, 'decay': 'cosine', 'warmup_steps': warmup_steps}
  config.evals = {
    evaluator: {
      'target': 'vit_jax.evals.classification.Classification',
      'loss': 'softmax',
      'data': images(task, held_out, size, train=False),
    }
  }
  if args.tiny:
    common.tiny(config)
    source = config.evals[evaluator].data.source
    source.split = first(source.split, 20)
  return config


def images(task, split, size, *, train):
  """The data of a task."""
  return common.data(
    vtab.settings(task, split, data_dir=config_dict.placeholder(str)),
    vtab.transforms(task, size=size, train=train),
    batch_size=512,
  )


def pixels(model):
  """The size of images, where the argument does not say."""
  if model == 'H/14':
    return 378
  return 224 if model.startswith('Mixer') else 384


def first(split, count):
  """The first examples of a TFDS split, to be quick; of '50%:', 1%."""
  name, start, unit = re.fullmatch(r'(\w+)(?:\[(\d*)(%?):.*)?', split).groups()
  if unit:
    return f'{name}[{start}%:{int(start) + 1}%]'
  start = int(start or 0)
  return f'{name}[{start}:{start + count}]'


def cells(chosen):
  """Of the table: rows of the tasks, then of their groups' means."""
  rows = [(vtab.TASKS[task].title, [task]) for task in chosen]
  for group in vtab.GROUPS:
    tasks = [task for task in chosen if vtab.TASKS[task].group == group]
    if len(tasks) > 1:
      rows.append((f'{group.capitalize()} ({len(tasks)})', tasks))
  if len(chosen) > 1:
    rows.append((f'Mean of {len(chosen)}', chosen))
  found = []
  for row, tasks in rows:
    runs = f'(?:{"|".join(tasks)})_seed(?P<seed>.*)'
    spec = {'runs': runs, 'metric': 'test/accuracy'}
    found.append({'row': row, 'column': 'ours', **spec})
    for (pretrained, model), numbers in published.TABLE_9.items():
      column = f'{model} {"JFT" if pretrained == "jft" else "I21k"}'
      percent = sum(numbers[task] for task in tasks) / len(tasks)
      if len(tasks) == len(TASKS):
        percent = published.TABLE_2[pretrained, model]['vtab']
      spec = {'value': published.fraction(percent)}
      found.append({'row': row, 'column': column, **spec})
  return tuple(found)

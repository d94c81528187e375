r"""VTAB-1k, its 19 tasks and their table, as one study: paper, tables 9 and 2.

    python -m vit_jax.main --config=configs/vtab.py:L/16 \
        --config.shared.weights=gs://vit_models/imagenet21k/ViT-L_16.npz \
        --workdir=DIR

Each task is fine-tuned on its 1,000 examples, with three seeds, and tested on
its full test set. The settings are the paper's, the same for all tasks. The
preprocessing is BiT's, which crops and flips only where the label allows it.
These are 57 runs; see transfer.py for their common settings. None keeps its
checkpoint, unless with --config.discard=

Arguments (separated by commas; the first of a list is the default):
  B/16, ...  the model of the weights, as in finetune.py; or from_weights
  natural, specialized, structured   only the tasks of these groups, and
  caltech101, cifar100, dtd, flowers, pets, sun397, svhn, camelyon, eurosat,
  resisc45, retinopathy, clevr_count, clevr_distance, dmlab, kitti,
  dsprites_location, dsprites_orientation, snorb_azimuth, snorb_elevation
             these; all by default
  seeds=3    runs of each task
  sweep      AugReg's protocol, another 152 runs: for each task, first try 4
             rates for 500 and 2500 steps on 800 of the examples; then use the
             best on the 200 others for all 1,000
  size=384   pixels; 378 for H/14 (384 does not divide into its patches), 224
             for Mixers
  tiny       seconds for each run, for weights of a tiny run; tests on the 200
             validation examples only

Expected: the published columns of the table. Their means of groups are computed
from table 9; the mean of all tasks and its deviation are table 2's.

Not in the paper: warm-up, 200 steps (scenic's for ViT-G and AugReg's; 100 for
500), softmax loss, a bfloat16 momentum, the 378 pixels, and random crops at 224
pixels, which are from 256 as in scenic.
"""

import itertools

from configs import arguments, common, finetune, published, transfer
from vit_jax.data import vtab

TASKS = tuple(vtab.TASKS)
RATES = (0.001, 0.003, 0.01, 0.03)
STEPS = (500, 2500)


def get_config(argument=''):
  args = arguments.parse(
    argument,
    (*vtab.GROUPS, *TASKS, 'sweep', 'tiny'),
    model=(*finetune.MODELS, 'from_weights'),
    seeds=3,
    size=int,
  )
  tasks = [x for x in TASKS if getattr(args, vtab.TASKS[x].group)]
  tasks += [x for x in TASKS if getattr(args, x)]
  chosen = [x for x in TASKS if x in tasks or not tasks]
  runs = {}
  for task in chosen:
    for rate, steps in itertools.product(RATES, STEPS) if args.sweep else ():
      name = f'{task}_lr{rate:.0e}_steps{steps}'
      runs[name] = finetuning(task, args, 'train800', 'val', rate, steps)
    for seed in range(args.seeds):
      run = finetuning(task, args, 'train800val200', 'test', 0.01, 2500)
      runs[f'{task}_seed{seed}'] = run
      run.seed = seed
      if args.sweep:
        take = ('schedule.lr', 'schedule.warmup_steps', 'total_steps')
        run.best_of = common.best_of(f'{task}_lr.*', 'val/accuracy', take)
  title = f'VTAB-1k, {args.model}{transfer.spread(args)}'
  report = common.table(cells(chosen), title=title)
  return transfer.study(runs, (report,), discard='.*')


def finetuning(task, args, split, evaluator, lr, steps):
  """Return a run on the split that is evaluated at its end."""
  size = args.size or (378 if args.model == 'H/14' else 384)
  if args.model.startswith('Mixer'):
    size = args.size or 224
  config = finetune.table_4(args, lr)
  config.total_steps = steps
  config.data = images(task, split, size, train=True)
  config.schedule.warmup_steps = finetune.WARMUP_STEPS[steps]
  held_out = 'val200' if args.tiny or evaluator == 'val' else 'test'
  test = images(task, held_out, size, train=False)
  config.evals = {evaluator: common.classification(test)}
  finetune.follow_size(config, args)
  return common.finish(config, args)


def images(task, split, size, *, train):
  source = vtab.settings(task, split, data_dir=common.placeholder(str))
  transforms = vtab.transforms(task, size=size, train=train)
  return common.data(source, transforms, batch_size=512)


def cells(chosen):
  """Yield the cells: a row per task, then the means of groups."""
  rows = [(vtab.TASKS[task].title, [task]) for task in chosen]
  for group in vtab.GROUPS:
    tasks = [task for task in chosen if vtab.TASKS[task].group == group]
    if len(tasks) > 1:
      rows.append((f'{group.capitalize()} ({len(tasks)})', tasks))
  if len(chosen) > 1:
    rows.append((f'Mean of {len(chosen)}', chosen))
  for row, tasks in rows:
    runs = f'(?:{"|".join(tasks)})_seed(?P<seed>.*)'
    spec = {'runs': runs, 'metric': 'test/accuracy'}
    yield {'row': row, 'column': 'ours', **spec}
    for (pretrained, model), numbers in published.TABLE_9.items():
      column = f'{model} {"JFT" if pretrained == "jft" else "I21k"}'
      percent = sum(numbers[task] for task in tasks) / len(tasks)
      if len(tasks) == len(TASKS):
        percent = published.TABLE_2[pretrained, model]['vtab']
      yield {'row': row, 'column': column, 'value': published.fraction(percent)}

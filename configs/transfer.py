"""The paper's transfer to five data sets, as one study: tables 4, 5 and 2.

    python -m vit_jax.main --config=configs/transfer.py:L/16,imagenet21k \
        --config.shared.weights=gs://vit_models/imagenet21k/ViT-L_16.npz \
        --workdir=DIR

For each data set all learning rates of table 4 are tried on the dev split; the
one with the best dev/accuracy is used to train on the entire train set, with
three seeds, and to test on the test set (appendix B.1.1). The result is a table
of mean and standard deviation beside the published numbers, and a picture of
the accuracies during the runs. ImageNet is tested on its ReaL labels, too.

One command does all 35 runs, and goes on where it was stopped; on a cluster,
--study_member=0, 1, ... does one. What they have in common is set once:

    --config.shared.weights=PATH     of any format that vit_jax/weights reads
    --config.shared.data_dir=PATH    of TFDS
    --config.shared.accum_steps=8    micro-batches, where memory is short
    --config.shared.num_workers=16   processes that decode images
    --config.shared.model.dropout=.1, .pooling=gap and so on

Arguments (between commas; the first of a list is the default):
  B/16, ...  the model that the weights are of, as in finetune.py
  imagenet21k, jft, imagenet1k   what it was pre-trained on: chooses the
             published numbers, of table 5, or 6 for what 5 does not have
  imagenet, cifar10, cifar100, pets, flowers   only these; all by default
  seeds=3    of the final runs
  bit        also three final runs by BiT-HyperRule for each data set, in a
             column of their own: of ResNets the paper reports the better
  polyak, size=384, inception, resize, resize_small, postact   as in
             finetune.py; polyak is for ImageNet alone, as in table 2
  tiny       seconds for each run, for weights of a tiny run

Expected: the table's own columns. Those of table 2 have other settings for
ImageNet: 512 (L/16) or 518 pixels (H/14), and `polyak`.

Runs of the grid keep no checkpoint, the others theirs with the momentum: 0.5 GB
for a B/16, 1.8 GB for an L/16. What is not in the paper is told in finetune.py.
"""

import ml_collections
from ml_collections import config_dict

from configs import arguments, finetune, published

RATES = {  # table 4
  'imagenet': (0.003, 0.01, 0.03, 0.06),
  'cifar10': (0.001, 0.003, 0.01, 0.03),
  'cifar100': (0.001, 0.003, 0.01, 0.03),
  'pets': (0.001, 0.003, 0.01, 0.03),
  'flowers': (0.001, 0.003, 0.01, 0.03),
}
TITLES = {
  'imagenet': 'ImageNet',
  'real': 'ImageNet-ReaL',
  'cifar10': 'CIFAR-10',
  'cifar100': 'CIFAR-100',
  'pets': 'Pets',
  'flowers': 'Flowers',
}
PRETRAINED = ('imagenet21k', 'jft', 'imagenet1k')
VARIANTS = (
  '',
  'imagenet,L/16,jft,polyak',
  'H/14,cifar10,pets,seeds=1',
  'R50x1,jft,flowers,bit',
  'R50+B/16,jft,imagenet,size=224,resize',
  'tiny',
  'R50x1,pets,bit,tiny',
)


def get_config(argument=''):
  args = arguments.parse(
    argument,
    model=finetune.MODELS,
    pretrained=PRETRAINED,
    **{data: False for data in RATES},
    seeds=3,
    bit=False,
    polyak=False,
    size=0,
    crop=finetune.CROPS,
    postact=False,
    tiny=False,
  )
  chosen = [x for x in RATES if getattr(args, x)] or list(RATES)
  runs = {}
  for data in chosen:
    runs |= grid(data, args) | finals(data, args)
  table = {
    'target': 'vit_jax.reports.table.Table',
    'title': f'{args.model}{spread(args)}',
    'cells': cells(chosen, args),
    'digits': 2,
  }
  curves = {
    'target': 'vit_jax.reports.curves.Curves',
    'panels': tuple(panel(data, args) for data in chosen),
  }
  return study(runs, (table, curves), discard='.*_dev_.*')


def spread(args):
  """What the numbers are, to end a title with."""
  return f': mean and std of {args.seeds} runs' if args.seeds > 1 else ''


def study(runs, report, *, discard):
  """A study of runs that start from the same weights, with the same model.

  Args:
    runs: {name: training config}, in order.
    report: targets.
    discard: the runs whose checkpoints are removed when they are done.
  """
  config = ml_collections.ConfigDict()
  config.run = 'vit_jax.study.study'
  config.shared = {
    'weights': config_dict.placeholder(str),
    'data_dir': config_dict.placeholder(str),
    'accum_steps': 1,
    'num_workers': 0,
    'model': next(iter(runs.values())).model,
  }
  refer = config.shared.get_oneway_ref
  for run in runs.values():
    run.model = config.shared.model  # one and the same
    run.init_from.path = refer('weights')
    run.accum_steps = refer('accum_steps')
    for part in (run, *run.evals.values()):
      part.data.num_workers = refer('num_workers')
      part.data.source.data_dir = refer('data_dir')
  config.runs = runs
  config.order = tuple(runs)
  config.report = report
  config.discard = discard
  return config


def grid(data, args):
  """{name: config} of all learning rates, on the dev split."""
  return {
    f'{data}_dev_lr{rate:.0e}': _finetuning(data, args, 'dev', f'lr={rate}')
    for rate in RATES[data]
  }


def finals(data, args):
  """{name: config} of the best rate and of `bit`, on the entire train set."""
  best = {
    'runs': rf'{data}_dev_lr.*',
    'metric': 'dev/accuracy',
    'take': ('schedule.lr',),
  }
  runs = {}
  for seed in range(args.seeds):
    runs[f'{data}_final_seed{seed}'] = _finetuning(data, args, 'final')
    runs[f'{data}_final_seed{seed}'].best_of = best
  for seed in range(args.seeds if args.bit else 0):
    runs[f'{data}_bit_seed{seed}'] = _finetuning(data, args, 'final', 'bit')
  for name, run in runs.items():
    run.seed = int(name.rpartition('seed')[2])
    if data == 'imagenet':
      run.evals.real = real(run)
  return runs


def _finetuning(data, args, *words):
  words = [data, args.model, *words]
  if args.size:
    words.append(f'size={args.size}')
  if 'bit' not in words:
    words.append(args.crop)
  if args.polyak and data == 'imagenet':
    words.append('polyak')
  words += [x for x in ('postact', 'tiny') if getattr(args, x)]
  return finetune.get_config(','.join(words))


def real(run):
  """The evaluator `test` at its end, on ImageNet's ReaL labels."""
  evaluator = run.evals.test.copy_and_resolve_references()
  del evaluator.every_fraction
  evaluator.data.source.update(
    name='imagenet2012_real',
    label_key='real_label',
    label_fn={'target': 'vit_jax.data.imagenet.RealLabels'},
  )
  return evaluator


def cells(chosen, args):
  """Of the table: a row for each data set, the published numbers beside."""
  found = []
  for row, data, metric in _rows(chosen):
    columns = {'ours': f'{data}_final_seed.*'}
    if args.bit:
      columns['ours, BiT-HyperRule'] = f'{data}_bit_seed.*'
    for column, runs in columns.items():
      spec = {'runs': runs, 'metric': f'{metric}/accuracy'}
      found.append({'row': TITLES[row], 'column': column, **spec})
    for column, numbers in _published(args):
      spec = {'value': published.fraction(numbers[row])}
      found.append({'row': TITLES[row], 'column': column, **spec})
  return tuple(found)


def _rows(chosen):
  """(key of the published number, data set, evaluator) of each."""
  for data in chosen:
    yield data, data, 'test'
    if data == 'imagenet':
      yield 'real', data, 'real'


def _published(args):
  """(column, {data set: percent}) of each table with this model."""
  key = (args.pretrained, args.model)
  if key in published.TABLE_5:
    yield 'table 5', published.TABLE_5[key]
  elif args.pretrained == 'jft':
    of_model = [k for k in published.TABLE_6 if k[0] == args.model]
    for _, epochs in sorted(of_model)[-1:]:
      column = f'table 6, {epochs} epochs'
      yield column, published.TABLE_6[args.model, epochs]
  if key in published.TABLE_2:
    yield 'table 2', published.TABLE_2[key]


def panel(data, args):
  """Of the picture: every rate on the dev split, the best on the test set."""
  lines = {
    f'dev, lr {rate}': (rf'{data}_dev_lr{rate:.0e}', 'dev/accuracy')
    for rate in RATES[data]
  }
  lines['test'] = (f'{data}_final_seed.*', 'test/accuracy')
  if args.bit:
    lines['test, BiT-HyperRule'] = (f'{data}_bit_seed.*', 'test/accuracy')
  return {'title': TITLES[data], 'ylabel': 'accuracy', 'lines': lines}

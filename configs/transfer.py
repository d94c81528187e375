r"""The paper's transfer to five data sets, as one study: tables 4, 5 and 2.

    python -m vit_jax.main --config=configs/transfer.py:L/16,imagenet21k \
        --config.shared.weights=gs://vit_models/imagenet21k/ViT-L_16.npz \
        --workdir=DIR

For each data set all learning rates of table 4 are tried on the dev split. The
rate with the best dev/accuracy is used to train on the entire train set, with
three seeds, and to test on the test set (appendix B.1.1), ImageNet also on its
ReaL labels. These are 35 runs; rerun the command to continue. Their common
settings are --config.shared.weights, .data_dir (of TFDS), .accum_steps,
.num_workers, and fields of the model such as .model.dropout.

Arguments (separated by commas; the first of a list is the default):
  B/16, ...  the model of the weights, as in finetune.py
  imagenet21k, jft, imagenet1k   its pre-training data; selects the published
             numbers: table 5, or table 6 for models that table 5 lacks
  imagenet, cifar10, cifar100, pets, flowers   only these; all by default
  seeds=3    of the final runs
  augreg     AugReg's protocol: its data sets (imagenet, cifar100, pets,
             resisc45, kitti), rates and numbers of steps, see finetune.py.
             With imagenet21k, ImageNet-V2 selects the setting for ImageNet
  bit        also three final runs by BiT-HyperRule for each data set, in a
             separate column: for ResNets the paper reports the better of both
  polyak, size=384, inception, resize   as in finetune.py; polyak applies to
             ImageNet only, as in table 2
  tiny       seconds for each run, for weights of a tiny run

Expected: the published columns of the table. Table 2 has other settings for
ImageNet: 512 (L/16) or 518 pixels (H/14), and `polyak`.

Only final runs keep a checkpoint, with the momentum (B/16: 0.5 GB).
"""

from configs import arguments, common, finetune, published

OTHERS = ('cifar10', 'cifar100', 'pets', 'flowers')
RATES = {'imagenet': (0.003, 0.01, 0.03, 0.06)}  # table 4
RATES |= dict.fromkeys(OTHERS, (0.001, 0.003, 0.01, 0.03))
TITLES = {
  'imagenet': 'ImageNet',
  'real': 'ImageNet-ReaL',
  'cifar10': 'CIFAR-10',
  'cifar100': 'CIFAR-100',
  'pets': 'Pets',
  'flowers': 'Flowers',
  'resisc45': 'Resisc45',
  'kitti': 'KITTI-Dist',
}
DATA = tuple(x for x in TITLES if x != 'real')
PRETRAINED = ('imagenet21k', 'jft', 'imagenet1k')


def get_config(argument=''):
  args = arguments.parse(
    argument,
    ('augreg', 'bit', 'polyak', 'tiny', *DATA),
    model=finetune.MODELS,
    pretrained=PRETRAINED,
    seeds=3,
    size=int,
    crop=finetune.CROPS,
  )
  known = finetune.AUGREG if args.augreg else RATES
  chosen = arguments.chosen(args, known, refused=DATA)
  runs = {}
  for data in chosen:
    runs |= runs_on(data, args)
  title = f'{args.model}{spread(args)}'
  table = common.table(cells(chosen, args), title=title, digits=2)
  curves = common.curves(panel(data, args) for data in chosen)
  return study(runs, (table, curves), discard='.*_dev_.*')


def spread(args):
  return f': mean and std of {args.seeds} runs' if args.seeds > 1 else ''


def study(runs, report, *, discard):
  """Return a study of {name: run} that start from the same weights."""
  model = next(iter(runs.values())).model
  shared = common.shared(weights=common.placeholder(str), model=model)
  for run in runs.values():
    run.model = shared.model  # the same object in all runs
    run.init_from.path = shared.get_oneway_ref('weights')
    common.follow(run, shared)
  return common.study(runs, report, shared=shared, discard=discard)


def settings(data, args):
  """Yield (run on the dev split, learning rate, steps or None: table 4's)."""
  rates, steps = RATES.get(data), (None,)
  if args.augreg:
    rates, steps, _ = finetune.AUGREG[data]
  for each in sorted(steps) if args.augreg else steps:
    for rate in sorted(rates):
      name = f'{data}_dev_lr{rate:.0e}'
      yield name + (f'_steps{each}' if each else ''), rate, each


def runs_on(data, args):
  """Return {name: run}: all settings on the dev split, then the final runs."""
  tried, final = {}, {}
  for name, rate, steps in settings(data, args):
    words = ['dev', f'lr={rate}', *[f'steps={steps}'] * bool(steps)]
    tried[name] = _finetuning(data, args, *words)
  more = ('total_steps', 'schedule.warmup_steps') if args.augreg else ()
  take = ('schedule.lr', *more)
  for seed in range(args.seeds):
    run = final[f'{data}_final_seed{seed}'] = _finetuning(data, args)
    run.best_of = common.best_of(f'{data}_dev_lr.*', 'dev/accuracy', take)
  for seed in range(args.seeds if args.bit else 0):
    final[f'{data}_bit_seed{seed}'] = _finetuning(data, args, 'bit')
  for name, run in final.items():
    run.seed = int(name.rpartition('seed')[2])
    if data == 'imagenet':
      run.evals.real = real(run.evals.test)
  return tried | final


def _finetuning(data, args, *words):
  words = [data, args.model, *words]
  if args.size:
    words.append(f'size={args.size}')
  if 'bit' not in words and data != 'kitti':
    words.append(args.crop)
  if args.augreg:
    words.append('augreg')
    seen = (data, args.pretrained) == ('imagenet', 'imagenet21k')
    words += ['v2'] if seen and 'dev' in words else []
  if args.polyak and data == 'imagenet':
    words.append('polyak')
  return finetune.get_config(','.join(words + ['tiny'] * args.tiny))


def real(test):
  """Return the evaluator on ImageNet's ReaL labels, at the end only."""
  evaluator = test.copy_and_resolve_references()
  del evaluator.every_fraction
  labels = common.make('data.imagenet.RealLabels')
  evaluator.data.source.update(name='imagenet2012_real', label_fn=labels)
  evaluator.data.source.label_key = 'real_label'
  return evaluator


def cells(chosen, args):
  """Yield the cells: a row per data set, published numbers as columns."""
  rows = [(data, data, 'test') for data in chosen]
  if 'imagenet' in chosen:
    rows.insert(1, ('real', 'imagenet', 'real'))
  for row, data, evaluator in rows:
    columns = {'ours': f'{data}_final_seed.*'}
    if args.bit:
      columns['ours, BiT-HyperRule'] = f'{data}_bit_seed.*'
    for column, runs in columns.items():
      spec = {'runs': runs, 'metric': f'{evaluator}/accuracy'}
      yield {'row': TITLES[row], 'column': column, **spec}
    for column, numbers in _published(args):
      if row in numbers:
        value = published.fraction(numbers[row])
        yield {'row': TITLES[row], 'column': column, 'value': value}


def _published(args):
  """Yield (column, {data set: percent}) of each table with this model."""
  if args.augreg:
    of_weights = [args.pretrained, args.size or 384]
    for (*key, epochs), table in published.AUGREG.items():
      if key == of_weights and args.model in table:
        yield f'AugReg, {epochs} epochs', {'imagenet': table[args.model]}
    return
  key = (args.pretrained, args.model)
  if key in published.TABLE_5:
    yield 'table 5', published.TABLE_5[key]
  elif args.pretrained == 'jft':
    of_model = [k for k in published.TABLE_6 if k[0] == args.model]
    for best in sorted(of_model)[-1:]:
      yield f'table 6, {best[1]} epochs', published.TABLE_6[best]
  if key in published.TABLE_2:
    yield 'table 2', published.TABLE_2[key]


def panel(data, args):
  """Return a panel: all rates on the dev split, the best on the test set."""
  lines = {}
  for run, rate, steps in settings(data, args):
    name = f'dev, lr {rate}' + (f', {steps} steps' if steps else '')
    lines[name] = (run, 'dev/accuracy')
  lines['test'] = (f'{data}_final_seed.*', 'test/accuracy')
  if args.bit:
    lines['test, BiT-HyperRule'] = (f'{data}_bit_seed.*', 'test/accuracy')
  return {'title': TITLES[data], 'ylabel': 'accuracy (%)', 'lines': lines}

"""Parts that the studies on embedded data share; nothing is downloaded."""

from configs import common
from vit_jax.zoo import names

TRIAL = 100  # seed of the runs that try learning rates
SHOTS, DRAWS = 10, (0, 1, 2, 3, 4)  # digits per class, seeds that draw them
SIZES = {  # of small ViTs, by their width
  48: {'width': 48, 'depth': 4, 'mlp_dim': 192, 'num_heads': 3},
  64: {'width': 64, 'depth': 4, 'mlp_dim': 256, 'num_heads': 4},
  96: {'width': 96, 'depth': 4, 'mlp_dim': 384, 'num_heads': 3},
}


def vit(size, *, patch_size=4, stages=None, **fields):
  """Return a ViT of one of SIZES; with `stages` of a ResNet a hybrid.

  The paper initialises position embeddings with a std of 0.02, which suits long
  training. With 0.5 positions matter from the first step, and a small budget
  gives a much better model.
  """
  embedding = {'target': names.PATCHES, 'patch_size': patch_size}
  if stages:
    embedding |= {'target': names.HYBRID, 'stages': stages}
  posemb = common.make('models.posemb.Learned', init_std=0.5)
  default = {'target': names.VIT, 'embedding': embedding, 'posemb': posemb}
  return default | SIZES[size] | fields


def run(model, data, evals, *, steps, lr, **fields):
  """Return a training run; `fields` are more keys, or other values."""
  config = {
    'run': 'vit_jax.train.train',
    'total_steps': steps,
    'logging': {'every_fraction': 0.25},
    'model': model,
    'data': data,
    'evals': evals,
    'objective': common.xent('softmax'),
    'optimizer': adam(),
    'schedule': {'lr': lr, 'decay': 'cosine', 'warmup_fraction': 0.1},
  }
  return common.ConfigDict(config | fields)


def adam():
  """Return the optimizer of the pre-trainings, for few steps."""
  return common.adam(b2=0.95, weight_decay=0.05, clip_norm=1.0)


def muon():
  """Return Muon, with `adam` for the parameters that are not matrices."""
  return adam() | {'target': 'vit_jax.optim.optimizers.muon'}


def glyphs(size, **fields):
  """Return drawn letters and symbols in 480 classes; none is a digit."""
  return common.make('data.sources.glyphs.Glyphs', image_size=size, **fields)


def digits(split, size, *, batch_size=128, crop=None, **fields):
  """Return data of handwritten digits: 'train', or 'test' by other writers.

  Scans are resized to `size`, then cropped at random to `crop` pixels.
  """
  transforms = common.resize(size)
  if crop:
    transforms.append(common.make('data.transforms.RandomCrop', size=crop))
  source = common.make('data.sources.digits.Digits', split=split, **fields)
  return {'source': source, 'transforms': transforms, 'batch_size': batch_size}


def linear_on_digits(
  size, *, shots=(SHOTS,), seeds=DRAWS, features='pre_logits', tiny=False
):
  """Return the evaluator that fits a linear classifier to a few digits."""
  few = {'examples_per_class': 2 * max(shots)} if tiny else {}
  data = {split: digits(split, size, **few) for split in ('train', 'test')}
  readouts = {'fewshot': common.few_shot(shots, seeds)}
  return common.frozen({'digits': data}, readouts, features=features)


def frozen_on_digits(size, *, tiny=False, **more):
  """Return evaluators of readouts: on all digits, and to try learning rates.

  The readouts are the linear one of SHOTS digits per class and `more`. 'trial'
  has halves of the training digits, which no result is measured on.
  """
  few = {'examples_per_class': 20} if tiny else {}
  train, test = (digits(split, size, **few) for split in ('train', 'test'))
  readouts = more | {'fewshot': common.few_shot((SHOTS,), DRAWS)}

  def half(bounds):
    source = common.make('data.subsets.Slice', source=train['source'])
    return train | {'source': source | {'bounds': bounds, 'stratified': True}}

  data = {
    'trial': {'train': half('[:50%]'), 'test': half('[50%:]')},
    'digits': {'train': train, 'test': test},
  }
  return {k: common.frozen({'digits': x}, readouts) for k, x in data.items()}


def few_digits(size, load, *, seed, batch_size):
  """Return (data, tested data): SHOTS of each digit, from half of the scans.

  With the seed TRIAL the other half of the training scans is tested, which no
  result is measured on; else the scans by other writers are.
  """
  data = digits('train', load, crop=size, batch_size=batch_size)
  val = digits('test', size)
  half = common.make('data.subsets.Slice', source=data['source'])
  if seed == TRIAL:
    val['source'] = half | {'bounds': '[50%:]'}
  half['bounds'] = '[:50%]'
  data['source'] = common.make(
    'data.subsets.Subset', source=half, per_class=SHOTS, seed=seed
  )
  return data, val


def finetune(model, size, *, seed, **fields):
  """Return a training on a few digits, from `init_from` or from scratch."""
  data, val = few_digits(size, size + 3, seed=seed, batch_size=50)
  evals = {'val': common.classification(val)}
  return run(model, data, evals, seed=seed, **fields)


def digits_table(rows):
  """Return a table with a column for each number of examples per class.

  `rows` are {title: (runs, numbers of examples, metric)}; SHOTS in a metric
  stands for each of the numbers.
  """
  cells = []
  for row, (runs, all_shots, metric) in rows.items():
    for shots in all_shots:
      cell = {'row': row, 'column': f'{shots} per class', 'runs': runs}
      cells.append(cell | {'metric': metric.replace('SHOTS', str(shots))})
  title = 'Accuracy on handwritten digits, 768 test scans'
  return common.table(cells, title=title)


def paired(cells, baseline):
  """Return a table of differences within seeds to a row, the first one."""
  return common.paired(cells, title=f'Differences to: {baseline}')


def figure(panels, title, name):
  """Return a scaling figure with intervals."""
  return common.figure(*panels, title=title, name=name, intervals=True)


def tune(runs, name, args, rates, train, *arm, metric='val/accuracy', of=None):
  """Add the runs of one arm of a study, with the best of some rates.

  `train(args, *arm, seed, lr)` returns a run. NAME_lrRATE try the rates with
  the seed TRIAL; NAME_seedS have the rate with the highest `metric` there.
  `args` has seeds, their number, and tiny, which tries the first rate only.
  With `of`, the name of earlier trials, no rate is tried, and those count.
  """
  if not of:
    try_rates(runs, name, args, rates, train, *arm)
  for seed in range(args.seeds):
    run = train(args, *arm, seed, rates[0])
    run.best_of = common.best_of(f'{of or name}_lr.*', metric)
    runs[f'{name}_seed{seed}'] = run


def try_rates(runs, name, args, rates, train, *arm):
  """Add the trials of `tune` only."""
  for rate in rates[:1] if args.tiny else rates:
    runs[f'{name}_lr{rate:.0e}'] = train(args, *arm, TRIAL, rate)


def measured(name, metric='val/accuracy'):
  """Return the results of all runs NAME_seedS, for a report."""
  return {'runs': rf'{name}_seed(?P<seed>\d+)', 'metric': metric}


def drawn(size, seed, count=2**20, transforms=()):
  """Return data of `count` glyphs in 64 classes."""
  source = glyphs(size, seed=seed, num_examples=count, num_classes=64)
  return common.data(source, transforms, batch_size=64)


def held_out(args, size, seed=0, transforms=()):
  """Return glyphs to test on, the same for all seeds except TRIAL."""
  test = seed if seed == TRIAL else 0
  return drawn(size, test, 64 if args.tiny else 1920, transforms)

"""Parts that the studies on embedded data share; nothing is downloaded."""

from configs import common
from vit_jax.zoo import names

TRIAL = 100  # seed of the runs that try learning rates
SIZES = {  # of small ViTs, by their width
  48: {'width': 48, 'depth': 4, 'mlp_dim': 192, 'num_heads': 3},
  64: {'width': 64, 'depth': 4, 'mlp_dim': 256, 'num_heads': 4},
}


def vit(*, patch_size, stages=None, **fields):
  """Return a small ViT; with `stages` of a ResNet a hybrid.

  The paper initialises position embeddings with a std of 0.02, which suits long
  training. With 0.5 positions matter from the first step, and a small budget
  gives a much better model.
  """
  embedding = {'target': names.PATCHES, 'patch_size': patch_size}
  if stages:
    embedding |= {'target': names.HYBRID, 'stages': stages}
  posemb = common.make('models.posemb.Learned', init_std=0.5)
  fields |= {'embedding': embedding, 'posemb': posemb}
  return {'target': names.VIT, **fields}


def run(model, data, evals, *, steps, lr, **fields):
  """Return a training run; `fields` are more keys, or other values."""
  return {
    'run': 'vit_jax.train.train',
    'total_steps': steps,
    'logging': {'every_fraction': 0.25},
    'model': model,
    'data': data,
    'evals': evals,
    'objective': common.xent('softmax'),
    'optimizer': adam(),
    'schedule': {'lr': lr, 'decay': 'cosine', 'warmup_fraction': 0.1},
    **fields,
  }


def adam():
  """Return the optimizer of the pre-trainings, for few steps."""
  return common.adam(b2=0.95, weight_decay=0.05, clip_norm=1.0)


def glyphs(size, **fields):
  """Return drawn letters and symbols in 480 classes; none is a digit."""
  path = 'data.embedded.glyphs.Glyphs'
  return common.make(path, image_size=size, **fields)


def digits(split, size, *, batch_size=128, crop=None, **fields):
  """Return data of handwritten digits: 'train', or 'test' by other writers.

  Scans are resized to `size`, then cropped at random to `crop` pixels.
  """
  path = 'data.embedded.digits.Digits'
  transforms = common.resize(size)
  if crop:
    transforms.append(common.make('data.transforms.RandomCrop', size=crop))
  source = common.make(path, split=split, **fields)
  return {'source': source, 'transforms': transforms, 'batch_size': batch_size}


def linear_on_digits(size, *, shots, seeds, features='pre_logits', tiny=False):
  """Return the evaluator that fits a linear classifier to a few digits."""
  few = {'examples_per_class': 2 * max(shots)} if tiny else {}
  data = {split: digits(split, size, **few) for split in ('train', 'test')}
  readouts = {'fewshot': common.few_shot(shots, seeds)}
  return common.frozen({'digits': data}, readouts, features=features)


def frozen_on_digits(size, readouts, *, tiny=False):
  """Return evaluators of readouts: on all digits, and to try learning rates.

  'trial' has halves of the training digits, which no result is measured on.
  """
  few = {'examples_per_class': 20} if tiny else {}
  train, test = (digits(split, size, **few) for split in ('train', 'test'))

  def half(bounds):
    source = common.make('data.views.Slice', source=train['source'])
    return train | {'source': source | {'bounds': bounds, 'stratified': True}}

  data = {
    'trial': {'train': half('[:50%]'), 'test': half('[50%:]')},
    'digits': {'train': train, 'test': test},
  }
  return {k: common.frozen({'digits': x}, readouts) for k, x in data.items()}


def few_digits(size, load, *, shots, seed, batch_size):
  """Return (data, tested data): `shots` of each digit, from half of the scans.

  With the seed TRIAL the other half of the training scans is tested, which no
  result is measured on; else the scans by other writers are.
  """
  data = digits('train', load, crop=size, batch_size=batch_size)
  val = digits('test', size)
  half = common.make('data.views.Slice', source=data['source'])
  if seed == TRIAL:
    val['source'] = half | {'bounds': '[50%:]'}
  half['bounds'] = '[:50%]'
  data['source'] = common.make(
    'data.views.Subset', source=half, per_class=shots, seed=seed
  )
  return data, val


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
  title = f'Differences to: {baseline}'
  return common.make('reports.table.Paired', cells=tuple(cells), title=title)


def tune(runs, name, make, *, rates, seeds, metric):
  """Add the runs of one arm of a study, with the best of some rates.

  `make(seed, lr)` returns a run. NAME_lrRATE try the rates with the seed TRIAL;
  NAME_seedS have the rate with the highest `metric` there.
  """
  for rate in rates:
    runs[f'{name}_lr{rate:.0e}'] = common.ConfigDict(make(TRIAL, rate))
  for seed in range(seeds):
    run = common.ConfigDict(make(seed, rates[0]))
    run.best_of = {
      'runs': f'{name}_lr.*',
      'metric': metric,
      'take': ('schedule.lr',),
    }
    runs[f'{name}_seed{seed}'] = run


def drawn(size, seed, count, *, batch_size=64, **fields):
  """Return data of `count` glyphs, without augmentation."""
  source = glyphs(size, seed=seed, num_examples=count, **fields)
  return common.data(source, (), batch_size=batch_size)

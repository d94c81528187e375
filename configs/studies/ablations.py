r"""The paper's ablations of parts of a model and of its training.

    python -m vit_jax.main --workdir=DIR \
        --config=configs/studies/ablations.py:positions,name=my_set \
        --config.shared.data_dir=TFDS_DIR
    python -m vit_jax.main --workdir=DIR \
        --config=configs/studies/ablations.py:positions,embedded

Models that differ in one property are pre-trained by pretrain_paper.py and
evaluated on ImageNet by 5-shot linear regression, with the spread of 3 draws.
The second command does the same with data that needs no download. For single
runs and shared settings see scaling.py.

Arguments (separated by commas; the first of a list is the default):
  positions  table 8: none, 1-D, 2-D, relative; at the stem, at every layer
  pooling    figure 9: class token against mean, at their learning rates
  head       an MLP (one tanh layer) against a linear head
  axial      figure 13: axial ViTs and an axial ResNet against the plain models
  optimizer  table 7: ResNets with Adam and SGD, fine-tuned on five data sets
  name=jft, classes=18291   the data set of pre-training, see scaling.py
  epochs=7   epochs of all runs (table 3 has 7 for these models)
  seeds=1    with `optimizer`: fine-tunings; with `embedded`: runs of each model
  embedded   glyphs instead of JFT and digits (10-shot) instead of ImageNet;
             models of width 64 on 24 px, see scaling_embedded.py
  steps=1200 with `embedded`
  tiny       `embedded` in about a minute: 8 steps, to check that it runs

Expected: TABLE_8 and TABLE_7 in published.py. Figures 9 and 13 and a linear
head have no numbers: both poolings work equally well, each with its own rate
(from memory); axial B/32 and B/16 are better than plain ones, and cost more.

Not stated, so our choice: the embeddings of relative positions, and how a class
token takes part in them and in 2-D ones; everything about the axial models
except their idea, with the rates of the plain ones; that figure 9 and `head`
use B/16.
"""

import types

from configs import arguments, common
from configs.published import TABLE_7, TABLE_8, fraction
from configs.studies import scaling, scaling_embedded
from configs.transfer import RATES, TITLES
from vit_jax.zoo.names import AXIAL_RESNET, AXIAL_VIT

STUDIES = {  # title of the table
  'positions': 'Positions',
  'pooling': 'Pooling and its learning rate',
  'head': 'Head of pre-training',
  'axial': 'Axial attention',
  'optimizer': 'Adam and SGD for ResNets',
}
KINDS = {  # name of the run, class in models/posemb.py
  'none': ('none', None),
  '1-D': ('learned', 'Learned'),
  '2-D': ('learned2d', 'Learned2d'),
  'relative': ('relative', 'Relative'),
}
PLACES = {'every layer': 'layers', 'every layer, shared': 'layers_shared'}
MEAN = common.make('models.pooling.Mean')


def member(model='B/16', *, row, column=None, lr=None, words=(), **fields):
  """Return one model of a study: pretrain_paper.py's with changed `fields`.

  `row` and `column` are the position of its result in the table; without a
  column the table has all its results, in columns of their own. `lr` replaces
  table 3's; `embedded` scales its own in proportion.
  """
  return types.SimpleNamespace(**locals())


def _positions():
  for row, columns in TABLE_8.items():
    name, kind = KINDS[row]
    for column in columns:
      posemb = common.make(f'models.posemb.{kind}') if kind else None
      if column != 'stem':
        posemb['at'] = PLACES[column]
      run = name if column == 'stem' else f'{name}_{PLACES[column]}'
      yield run, member(row=row, column=column, posemb=posemb)


MEMBERS = {
  'positions': dict(_positions()),
  'pooling': {
    'token_8e-4': member(row='class token, 8e-4', lr=8e-4),
    'gap_8e-4': member(row='mean, 8e-4', lr=8e-4, pooling=MEAN),
    'gap_3e-4': member(row='mean, 3e-4', lr=3e-4, pooling=MEAN),
  },
  'head': {
    'mlp': member(row='MLP'),
    'linear': member(row='linear', head={'representation_size': None}),
  },
  'axial': {
    'B32': member('B/32', row='B/32'),
    'B16': member('B/16', row='B/16'),
    'axial_B32': member('B/32', row='Axial-B/32', target=AXIAL_VIT),
    'axial_B16': member('B/16', row='Axial-B/16', target=AXIAL_VIT),
    'R50x1': member('R50x1', row='R50x1'),
    'axial_R50x1': member('R50x1', row='Axial-R50x1', target=AXIAL_RESNET),
  },
  'optimizer': {
    f'{model}_{rule}': member(model, row=f'{model}, {title}', words=words)
    for model in ('R50x1', 'R152x2')
    for rule, title, words in (('adam', 'Adam', ()), ('sgd', 'SGD', ('sgd',)))
  },
}


def get_config(argument=''):
  args = arguments.parse(
    argument,
    ('embedded', 'tiny'),
    study=tuple(STUDIES),
    name='jft',
    classes=18_291,
    epochs=float,
    seeds=1,
    steps=1200,
  )
  if args.tiny:
    args.embedded, args.seeds, args.steps = True, 1, 8
  make = _embedded if args.embedded else _on_jft
  runs, fields = make(args, MEMBERS[args.study])
  return common.study(runs, _reports(args, MEMBERS[args.study]), **fields)


def _on_jft(args, members):
  """Return (runs, fields of the study)."""
  values, runs = scaling.shared(), {}
  for name, x in members.items():
    fields = {'epochs': args.epochs, 'lr': x.lr, 'words': x.words}
    config = scaling.jft(x.model, args, values, **fields)
    _change(config.model, x.fields)
    runs[f'pretrain_{name}'] = scaling.add_few_shot(config, values)
  for name, x in members.items() if args.study == 'optimizer' else ():
    for data in RATES:
      runs |= scaling.finetunings(values, args, data, x.model, path=name)
  return runs, {'shared': values}


def _change(model, fields):
  """Change fields of the model, in place."""
  if 'posemb' in fields and fields['posemb'] is None:
    model.posemb = None  # ConfigDict.update cannot replace a dict by None
  model.update(fields)


def _embedded(args, members):
  """Return the same on glyphs and digits."""
  size = scaling_embedded.BATCH * args.steps  # no image is seen twice
  args = types.SimpleNamespace(**vars(args), lr=3e-3)
  runs = {}
  for seed in range(args.seeds):
    for name, x in members.items():
      kind = 'ResNet' if 'x' in x.model else 'ViT'
      config = scaling_embedded.run_config(args, kind, size, seed)
      _shrink(config.model, x)
      config.schedule.lr *= (x.lr or 8e-4) / 8e-4
      if 'sgd' in x.words:
        config.optimizer = common.sgd(weight_decay=1e-4, clip_norm=1.0)
        config.schedule.lr = 0.1
      runs[f'pretrain_{name}' + f'_seed{seed}' * (args.seeds > 1)] = config
  return runs, {}


def _shrink(model, x):
  """Make a model of scaling_embedded.py the member x."""
  if 'stages' in model:
    model.stages = (1, 1) if x.model == 'R50x1' else (2, 2)
  else:
    model.scan = True  # compiles faster
    model.head = {'representation_size': model.width}
    model.embedding.patch_size = int(x.model.split('/')[1]) // 4
  _change(model, x.fields)


def _reports(args, members):
  """Return the table and, for axial, figure 13: accuracy against compute."""
  cells, lines = [], {}
  for name, x in members.items():
    results = _results(args, name)
    metric, found = next(iter(results.items()))
    if x.column:
      results = {x.column: found}
    for column, spec in results.items():
      cells.append({'row': x.row, 'column': column, **spec})
    if not args.embedded:
      cells += _published(args.study, x)
    kind = 'Axial' if x.row.startswith('Axial') else 'Plain'
    kind += ' ResNet' if 'x' in x.model else ' ViT'
    compute = {'runs': found['runs'], 'metric': 'exaflops'}
    lines.setdefault(kind, []).append({'x': compute, 'y': found, 'name': x.row})
  title = STUDIES[args.study]
  title += f', {metric}' if args.study == 'positions' else ''
  table = common.table(cells, title=title, digits=2, name=args.study)
  if args.study != 'axial':
    return [table]
  xlabel = 'pre-training compute (exaFLOPs)'
  panel = common.panel(title, xlabel, lines, f'{metric} (%)')
  return [table, common.figure(panel, title='Figure 13', name='figure_13')]


def _results(args, name):
  """Return {column: what a report takes}."""
  runs = f'pretrain_{name}' + r'_seed\d+' * (args.embedded and args.seeds > 1)
  held_out = {'runs': runs, 'metric': 'val/accuracy'}
  if args.embedded:
    few_shot = {'runs': runs, 'metric': 'frozen/digits/fewshot/10shot'}
    return {'digits, 10-shot': few_shot, 'glyphs, held out': held_out}
  if args.study == 'optimizer':
    out = {TITLES[data]: scaling.finetuned(name, data) for data in RATES}
    return out | {'Average': scaling.finetuned(name, *RATES)}
  few_shot = scaling.few_shot(runs)
  return {'ImageNet, 5-shot': few_shot, f'{args.name}, held out': held_out}


def _published(study, x):
  """Yield the published numbers, the cells of the next row."""
  found = {}
  if study == 'positions':
    found = {x.column: TABLE_8[x.row][x.column]}
  if study == 'optimizer':
    numbers = TABLE_7[tuple(x.row.split(', '))]
    found = {TITLES[data]: numbers[data] for data in RATES}
    found['Average'] = sum(found.values()) / len(found)
  for column, value in found.items():
    yield {'row': f'{x.row} paper', 'column': column, 'value': fraction(value)}

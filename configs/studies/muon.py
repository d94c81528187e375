"""Does Muon beat AdamW, and does that depend on the augmentation?

Both learn 960 glyphs with random crops alone, and with mixup, CutMix and
RandAugment. Result: Muon has 7.0 ± 4.2 and 20.6 ± 2.0 points more. See
docs/science.md.
"""

from configs import common, embedded

PX, LOAD_PX, IMAGES = 16, 18, 960
RATES = (1e-3, 3e-3, 1e-2)
OPTIMIZERS = {'AdamW': embedded.adam(), 'Muon': embedded.muon()}
AUGMENTATIONS = {'crops': False, 'all augmentations': True}
KINDS = {  # title: kernel of a layer whose stable rank is drawn
  'first MLP layers': 'mlp/fc1',
  'last MLP layers': 'mlp/fc2',
  'values': 'attn/value',
}


def study(args):
  runs = {}
  for optimizer, settings in OPTIMIZERS.items():
    for title, strong in AUGMENTATIONS.items():
      name = run_name(optimizer, title)
      embedded.tune(runs, name, args, RATES, train, settings, strong)
  return runs, reports()


def run_name(optimizer, title):
  return f'{optimizer}_{title.partition(" ")[0]}'.lower()


def train(args, settings, strong, seed, lr):
  transforms = [common.make('data.transforms.RandomCrop', size=PX)]
  objective = common.xent('softmax')
  if strong:
    policy = {'policy': 'rand-m9-mstd0.5-inc1', 'fill': 0}
    transforms.append(common.make('data.augment.rand_augment', **policy))
    objective = common.mixed(objective, mixup=0.2, cutmix=1.0)
  crop = [common.make('data.transforms.CentralCrop', size=PX)]
  every = {'every_fraction': 0.1}
  held_out = embedded.held_out(args, LOAD_PX, seed, crop)
  data = embedded.drawn(LOAD_PX, 1 + seed, IMAGES, transforms)
  ranks = common.make(
    'science.gradients.StableRank',
    data=data | {'transforms': crop},
    objective=common.xent('softmax'),
    **every,
  )
  return embedded.run(
    embedded.vit(48),
    data | {'batch_size': 32},
    {'val': common.classification(held_out, **every), 'rank': ranks},
    steps=8 if args.tiny else 2000,
    lr=lr,
    seed=seed,
    objective=objective,
    optimizer=settings,
  )


def reports():
  cells, panels = [], []
  for title in AUGMENTATIONS:
    lines = {}
    for optimizer in OPTIMIZERS:
      y = embedded.measured(run_name(optimizer, title))
      cells.append({'row': optimizer, 'column': title} | y)
      lines[optimizer] = y['runs'], y['metric']
    panels.append(
      {'title': title, 'ylabel': 'held-out accuracy (%)', 'lines': lines}
    )
  ranks = []
  for kind, path in KINDS.items():
    lines = {}
    for optimizer in OPTIMIZERS:
      for title in AUGMENTATIONS:
        runs = rf'{run_name(optimizer, title)}_seed\d+'
        lines[f'{optimizer}, {title}'] = runs, f'rank/block_3/{path}/kernel'
    ranks.append(
      {'title': f'{kind}, layer 4', 'ylabel': 'stable rank', 'lines': lines}
    )
  return (
    common.table(cells, title='Held-out glyphs'),
    embedded.paired(cells, 'AdamW'),
    common.curves(panels),
    common.make('reports.curves.Curves', panels=tuple(ranks), name='ranks'),
  )

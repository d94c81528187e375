"""Does Muon beat AdamW, and does that depend on the augmentation?

arXiv 2605.24770 (its abstract; no numbers seen): Muon always wins, by far more
with mixup, CutMix and RandAugment; without them the spectrum of the last MLP
layers' gradients collapses late. Here both optimizers learn 960 glyphs, many
times, with random crops alone and with all three; the stable rank of the
gradients is measured on the training images.

Result (16 minutes on 2 CPU cores, next to other work): AdamW 57.8 ± 1.2 and
34.3 ± 0.8%, Muon 7.0 ± 4.2 and 20.6 ± 2.0 points more (95% intervals).
"""

import functools

from configs import common, embedded

PX, LOAD_PX, CLASSES, IMAGES = 16, 18, 64, 960
RATES = (1e-3, 3e-3, 1e-2)
MUON = {'target': 'vit_jax.optim.optimizers.muon'}
OPTIMIZERS = {'AdamW': {}, 'Muon': MUON}
AUGMENTATIONS = {'crops': False, 'all augmentations': True}
KINDS = {  # title: kernel of a layer whose stable rank is drawn
  'first MLP layers': 'mlp/fc1',
  'last MLP layers': 'mlp/fc2',
  'values': 'attn/value',
}


def study(args):
  steps, rates = (8, RATES[:1]) if args.tiny else (2000, RATES)
  runs = {}
  for optimizer, settings in OPTIMIZERS.items():
    for title, strong in AUGMENTATIONS.items():
      make = functools.partial(train, args, settings, strong, steps)
      name = run_name(optimizer, title)
      how = {'rates': rates, 'seeds': args.seeds, 'metric': 'val/accuracy'}
      embedded.tune(runs, name, make, **how)
  return runs, reports()


def run_name(optimizer, title):
  return f'{optimizer}_{title.partition(" ")[0]}'.lower()


def train(args, settings, strong, steps, seed, lr):
  model = embedded.vit(**embedded.SIZES[48], patch_size=4)
  transforms = [common.make('data.transforms.RandomCrop', size=PX)]
  objective = common.xent('softmax')
  if strong:
    policy = {'policy': 'rand-m9-mstd0.5-inc1', 'fill': 0}
    transforms.append(common.make('data.augment.rand_augment', **policy))
    objective = common.mixed(objective, mixup=0.2, cutmix=1.0)
  source = embedded.glyphs(
    LOAD_PX, num_classes=CLASSES, num_examples=IMAGES, seed=1 + seed
  )
  crop = [common.make('data.transforms.CentralCrop', size=PX)]
  test = seed if seed == embedded.TRIAL else 0
  val = embedded.glyphs(
    LOAD_PX,
    num_classes=CLASSES,
    num_examples=64 if args.tiny else 1920,
    seed=test,
  )
  ranks = common.make(
    'science.gradients.StableRank',
    data=common.data(source, crop, batch_size=64),
    objective=common.xent('softmax'),
  )
  val = common.classification(common.data(val, crop, batch_size=64))
  return embedded.run(
    model,
    common.data(source, transforms, batch_size=32),
    {
      name: x | {'every_fraction': 0.1}
      for name, x in {'val': val, 'rank': ranks}.items()
    },
    steps=steps,
    lr=lr,
    seed=seed,
    objective=objective,
    optimizer=embedded.adam() | settings,
  )


def reports():
  cells, panels = [], []
  for title in AUGMENTATIONS:
    lines = {}
    for optimizer in OPTIMIZERS:
      runs = rf'{run_name(optimizer, title)}_seed(?P<seed>\d+)'
      cells.append(
        {'row': optimizer, 'column': title}
        | {'runs': runs, 'metric': 'val/accuracy'}
      )
      lines[optimizer] = runs, 'val/accuracy'
    panels.append(
      {'title': title, 'ylabel': 'held-out accuracy (%)', 'lines': lines}
    )
  ranks = []
  for kind, path in KINDS.items():
    lines = {}
    for optimizer in OPTIMIZERS:
      for title in AUGMENTATIONS:
        lines[f'{optimizer}, {title}'] = (
          rf'{run_name(optimizer, title)}_seed\d+',
          f'rank/block_3/{path}/kernel',
        )
    ranks.append(
      {'title': f'{kind}, layer 4', 'ylabel': 'stable rank', 'lines': lines}
    )
  return (
    common.table(cells, title='Held-out glyphs'),
    embedded.paired(cells, 'AdamW'),
    common.curves(panels),
    common.make('reports.curves.Curves', panels=tuple(ranks), name='ranks'),
  )

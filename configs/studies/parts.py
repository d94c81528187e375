"""Which parts of the recipes of 2026 help a small ViT?

A plain ViT gets one part more, on drawn glyphs and on photographs of solar
cells; on glyphs a ViT with all parts gets one part less, too. At equal compute
a part has as many steps as take the CPU time of the plain ViT, by COST, and the
rate that it has at equal steps. One part less has the rate of all parts, but
without Muon a rate of its own.

Result: on glyphs Muon gains 20.2 ± 2.2 points, rotary positions 4.2 ± 1.5, and
LayerScale loses 7.5 ± 1.3. See docs/science.md.
"""

from configs import common, embedded
from vit_jax.zoo import names

RATES = (1e-3, 4e-3, 1.6e-2)
DATA = {  # name: pixels of an image, pixels of a patch, steps
  'glyphs': (16, 4, 400),
  'photographs': (48, 8, 200),
}
LEARNED = embedded.vit(48)['posemb']
PARTS = {  # name: (title, settings of a training run)
  'rms': ('RMSNorm', {'model.block.norm': 'rms'}),
  'qk': ('normalised q and k', {'model.block.qk_norm': True}),
  'registers': ('4 registers', {'model.pooling.num_registers': 4}),
  'rope': (
    'rotary positions',
    {
      'model.posemb': common.make(
        'models.rotary.RotaryAxial', temperature=100.0, learned=LEARNED
      )
    },
  ),
  'scale': ('LayerScale', {'model.block.layerscale_init': 1e-4}),
  'gate': ('gate', {'model.block.gate': True}),
  'muon': ('Muon', {'optimizer': embedded.muon()}),
  'decay': ('decay by rate²', {'optimizer.corrected_weight_decay': True}),
}
ARMS = {'plain': (), **{name: (name,) for name in PARTS}, 'all': tuple(PARTS)}
TITLES = {'plain': 'plain', **{k: x for k, (x, _) in PARTS.items()}}
TITLES['all'] = 'all of them'
# CPU time of a step of glyphs, the plain ViT's is 1: the fastest of 27
# intervals of five steps, to about 5%. Parts that are not here add less. For
# photographs, where it was measured less well, the same is assumed.
COST = {'qk': 1.1, 'registers': 1.15, 'gate': 1.05, 'muon': 1.1, 'all': 1.4}
METRIC = 'val/mean_per_class_accuracy'


def study(args, data):
  runs = {}

  def add(name, parts, cost=1.0, of=None):
    arm = data, parts, cost
    embedded.tune(runs, name, args, RATES, train, *arm, metric=METRIC, of=of)

  for name, parts in ARMS.items():
    add(f'steps_{name}', parts)
  for name, parts in less(data).items():
    add(f'less_{name}', parts, of=None if name == 'muon' else 'steps_all')
  for name, cost in COST.items():
    add(f'compute_{name}', ARMS[name], cost, of=f'steps_{name}')
  return runs, tuple(reports(data))


def less(data):
  """Return {part: all others}, of glyphs only."""
  parts = PARTS if data == 'glyphs' else ()
  return {name: tuple(x for x in PARTS if x != name) for name in parts}


def train(args, data, parts, cost, seed, lr):
  """Return a training on glyphs or photographs with these parts."""
  px, patch_size, steps = DATA[data]
  make = {'glyphs': glyphs, 'photographs': photographs}[data]
  images, test = make(args, px, seed)
  fields = {'pooling': f'{names.POOLING}.ClassToken', 'block': names.BLOCK}
  fields = {k: {'target': x} for k, x in fields.items()}
  config = embedded.run(
    embedded.vit(48, patch_size=patch_size, **fields),
    images,
    {'val': common.classification(test)},
    steps=4 if args.tiny else round(steps / cost),
    lr=lr,
    seed=seed,
  )
  for part in parts:
    config.update_from_flattened_dict(PARTS[part][1])
  return config


def glyphs(args, px, seed):
  return embedded.drawn(px, 1 + seed), embedded.held_out(args, px, seed)


def photographs(args, px, seed):
  resize = common.resize(px, antialias=True)
  flip = common.make('data.transforms.FlipLR')
  trial = seed == embedded.TRIAL
  cells = common.make('data.sources.elpv.Elpv', seed=0 if trial else seed)
  train, test = cells | {'split': 'train'}, cells | {'split': 'test'}
  if trial:
    part = common.make('data.subsets.Slice', source=train, stratified=True)
    train, test = part | {'bounds': '[:75%]'}, part | {'bounds': '[75%:]'}
  train = common.data(train, [*resize, flip], batch_size=64)
  train['order'] = common.make('data.order.Balanced')
  return train, common.data(test, resize, batch_size=64)


def reports(data):
  def cell(column, runs, row):
    return {'row': row, 'column': column} | embedded.measured(runs, METRIC)

  steps = [cell('equal steps', f'steps_{x}', TITLES[x]) for x in ARMS]
  compute = [cell('equal compute', 'steps_plain', TITLES['plain'])]
  compute += [cell('equal compute', f'compute_{x}', TITLES[x]) for x in COST]
  yield embedded.paired(steps + compute, 'plain')
  if parts := less(data):
    cells = [cell('equal steps', 'steps_all', TITLES['all'])]
    for part in parts:
      row = f'without {TITLES[part]}'
      cells.append(cell('equal steps', f'less_{part}', row))
    title = 'Differences to: all of them'
    yield common.paired(cells, title=title, name='paired_less')

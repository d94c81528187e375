"""When does a ViT overtake a ResNet? It needs images whose structure is global.

A fraction of the patches of all images moves to the same other places. Result:
with 4,800 images the ResNet stays ahead everywhere; with 76,800 and all patches
shuffled the ViT has +2.6 ± 3.5 points. See docs/science.md.
"""

import itertools

from configs import common, embedded
from vit_jax.zoo import names

PX, PATCH = 24, 4
RATES = (1e-3, 3e-3)
FRACTIONS = (0.0, 0.5, 1.0)
STEPS = {4_800: 500, 76_800: 1_200}  # by the number of images
MODELS = {  # 15 to 16 MFLOP forward, as in scaling_embedded.py
  'ViT': embedded.vit(64, patch_size=PATCH),
  'ResNet': {'target': names.RESNET, 'stages': (1, 1)},
}


def study(args):
  runs = {}
  for arm in itertools.product(STEPS, FRACTIONS, MODELS):
    embedded.tune(runs, run_name(*arm), args, RATES, train, *arm)
  return runs, reports()


def run_name(count, fraction, model):
  return f'{model}_{100 * fraction:g}_{count}'


def train(args, count, fraction, model, seed, lr):
  shuffle = common.make(
    'science.shuffle.ShufflePatches', patch_size=PATCH, fraction=fraction
  )
  data = embedded.drawn(PX, 1 + seed, count)
  held_out = embedded.held_out(args, PX, seed)
  for part in (data, held_out):
    part['transforms'] = [shuffle]
  evals = {'val': common.classification(held_out)}
  fields = {'steps': 4 if args.tiny else STEPS[count], 'lr': lr, 'seed': seed}
  return embedded.run(MODELS[model], data, evals, **fields)


def reports():
  cells, panels = [], []
  for count in STEPS:
    lines = {model: [] for model in MODELS}
    for fraction, model in itertools.product(FRACTIONS, reversed(MODELS)):
      y = embedded.measured(run_name(count, fraction, model))
      lines[model].append({'x': 100 * fraction, 'y': y})
      column = f'{count:,} images, {fraction:.0%} shuffled'
      cells.append({'row': model, 'column': column} | y)
    how = {'ylabel': 'accuracy on held-out glyphs (%)', 'log': False}
    title, xlabel = f'{count:,} images', 'shuffled patches (%)'
    panels.append(common.panel(title, xlabel, lines, **how))
  figure = embedded.figure(panels, 'Crossing', 'crossing')
  return embedded.paired(cells, 'ResNet'), figure

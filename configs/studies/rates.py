"""Does the best learning rate of a narrow ViT suit a wide one, with Muon?

With muP, Muon's updates have singular values of about sqrt(max(1, outputs /
inputs)), and the head's rate falls with the width. Result: with muP 0.032 is
best for widths of 48 to 384; without, the best rate falls to 0.008. See
docs/science.md.
"""

import itertools

from configs import common, embedded

PX, PATCH_SIZE = 20, 10
WIDTHS = (48, 96, 192, 384)
RATES = (4e-3, 8e-3, 16e-3, 32e-3, 64e-3)
ARMS = {'rms': 'without muP', 'mup': 'muP'}


def study(args):
  runs = {}
  arms = itertools.product(ARMS, WIDTHS, RATES, range(args.seeds))
  for arm, width, lr, seed in arms:
    name = f'{arm}_{width}_lr{lr:.0e}_seed{seed}'
    runs[name] = train(args, arm, width, lr, seed)
  return runs, reports()


def train(args, arm, width, lr, seed):
  model = embedded.vit(48, patch_size=PATCH_SIZE)
  model |= {'depth': 2, 'width': width, 'mlp_dim': 4 * width}
  optimizer = embedded.muon()
  if arm == 'mup':
    multipliers = (('head/.*', WIDTHS[0] / width),)
    optimizer |= {'consistent_rms': None, 'lr_multipliers': multipliers}
  evals = {'val': common.classification(embedded.held_out(args, PX))}
  return embedded.run(
    model | {'num_heads': width // 16},
    embedded.drawn(PX, 1 + seed),
    evals,
    steps=4 if args.tiny else 60,
    lr=lr,
    seed=seed,
    optimizer=optimizer,
  )


def reports():
  cells, panels = [], []
  for arm, title in ARMS.items():
    lines = {}
    for width in WIDTHS:
      lines[f'width {width}'] = points = []
      for lr in RATES:
        y = embedded.measured(f'{arm}_{width}_lr{lr:.0e}')
        points.append({'x': lr, 'y': y})
        row, column = f'{title}, {lr:g}', f'width {width}'
        cells.append({'row': row, 'column': column} | y)
    ticks = {lr: f'{lr:g}' for lr in RATES}
    panels.append(common.panel(title, 'learning rate', lines, ticks=ticks))
  title = 'Accuracy on held-out glyphs'
  yield common.table(cells, title=title)
  yield embedded.figure(panels, 'Learning rates over widths', 'rates')

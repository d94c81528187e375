"""Are smaller patches always better, down to single pixels?

A ViT learns glyphs of 16 px with patches of 8 to 1, at equal steps and at equal
compute. Result: the opposite, in short training: 86, 75, 21 and 4% at equal
compute. See docs/science.md.
"""

from configs import common, embedded

PX = 16
RATES = (1e-3, 3e-3)
COST = {8: 0.065, 4: 0.227, 2: 1.0, 1: 6.1}  # FLOPs, relative to patches of 2
BUDGETS = {'equal epochs': 'epochs', 'equal compute': 'compute'}


def study(args):
  steps = 8 if args.tiny else 300
  runs = {}
  for patch, cost in COST.items():
    for budget in BUDGETS.values():
      scale = 1 if budget == 'epochs' else 1 / cost
      arm = patch, max(1, round(scale * steps))
      embedded.tune(runs, f'p{patch}_{budget}', args, RATES, train, *arm)
  return runs, reports()


def train(args, patch, steps, seed, lr):
  model = embedded.vit(48, patch_size=patch)
  data = embedded.drawn(PX, 1 + seed)
  evals = {'val': common.classification(embedded.held_out(args, PX, seed))}
  return embedded.run(model, data, evals, steps=steps, lr=lr, seed=seed)


def reports():
  cells, panels = [], []
  for title, budget in BUDGETS.items():
    points = []
    for patch in COST:
      y = embedded.measured(f'p{patch}_{budget}')
      points.append({'x': patch, 'y': y})
      cells.append({'row': f'{patch} px', 'column': title} | y)
    xlabel = f'side of a patch (of images of {PX} px)'
    how = {'ylabel': 'accuracy on held-out glyphs (%)'}
    how['ticks'] = {patch: str(patch) for patch in COST}
    panels.append(common.panel(title, xlabel, {'ViT': points}, **how))
  figure = embedded.figure(panels, 'Patch size', 'patches')
  return embedded.paired(cells, '8 px'), figure

"""Which position embeddings extrapolate to images of other sizes?

A ViT learns glyphs of 32 px and is tested on the same glyphs, drawn at 24 to 64
px. Result: at 64 px DINOv3's rotary embeddings have 39%, learned ones 13%,
axial and mixed ones 12% and 8%. See docs/science.md.
"""

from configs import common, embedded

PX, SIZES = 32, (24, 40, 48, 64)
RATES = (1e-3, 3e-3, 1e-2)
LEARNED = common.make('models.posemb.Learned', init_std=0.5)
ROTARY = 'models.rotary.Rotary'
ARMS = {  # name: (title, position embedding)
  'learned': ('learned', LEARNED),
  'sincos': ('sin-cos', common.make('models.posemb.SinCos2d')),
  'axial': ('RoPE, axial', common.make(f'{ROTARY}Axial', temperature=100.0)),
  'mixed': ('RoPE, mixed', common.make(f'{ROTARY}Mixed')),
  'dino': ('RoPE, DINOv3', common.make(f'{ROTARY}Dino', rescale=1.0)),
  'rescaled': ('RoPE, DINOv3, rescaled', common.make(f'{ROTARY}Dino')),
}


def study(args):
  runs = {}
  for name, (_, posemb) in ARMS.items():
    embedded.tune(runs, name, args, RATES, train, posemb)
    for seed in range(args.seeds):
      for size in SIZES:
        runs[f'{name}_seed{seed}_at{size}'] = {
          'run': 'vit_jax.evaluate.evaluate',
          'init_from': {'path': f'{{workdir}}/{name}_seed{seed}'},
          'image_shape': (size, size, 1),
          'evals': held_out(args, size),
        }
  return runs, reports()


def train(args, posemb, seed, lr):
  pooling = common.make('models.pooling.Mean')
  model = embedded.vit(64, posemb=posemb, pooling=pooling)
  data, evals = embedded.drawn(PX, 1 + seed), held_out(args, PX, seed)
  steps = 4 if args.tiny else 600
  return embedded.run(model, data, evals, steps=steps, lr=lr, seed=seed)


def held_out(args, size, seed=0):
  return {'val': common.classification(embedded.held_out(args, size, seed))}


def reports():
  cells, lines = [], {}
  for name, (title, _) in ARMS.items():
    lines[title] = []
    for x in sorted((*SIZES, PX)):
      y = embedded.measured(name)
      y['runs'] += f'_at{x}' * (x != PX)
      lines[title].append({'x': x, 'y': y})
      cells.append({'row': title, 'column': f'{x} px'} | y)
  title, xlabel = f'Trained at {PX} px', 'pixels of the test images'
  ticks = {size: str(size) for size in (*SIZES, PX)}
  panel = common.panel(title, xlabel, lines, ticks=ticks)
  figure = embedded.figure([panel], 'Positions', 'positions')
  return embedded.paired(cells, 'learned'), figure

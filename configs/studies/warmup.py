"""Does a warm-up on formal grammars help a ViT to learn images?

Sentences have 36 tokens, as the glyphs of 24 px have patches; 1% is 5 steps, so
most arms warm up for 10%. Result: only crossing brackets are shown to help, by
2.8 ± 1.9 points; as many more steps on images give 4.0 ± 2.5. See
docs/science.md.
"""

from configs import common, embedded

PX = 24
RATES = (1e-3, 3e-3)
NESTED = {'nested brackets': {'kind': 'dyck'}}
GRAMMARS = {
  **NESTED,
  'crossing brackets': {'kind': 'shuffle'},
  'copies': {'kind': 'copy'},
  'brackets in random order': {'kind': 'dyck', 'permuted': True},
}
SHARES = {'1%': (0.01, NESTED), '10%': (0.1, GRAMMARS)}


def study(args):
  steps = 8 if args.tiny else 500
  runs, rows = {}, {'none': 'none'}
  embedded.tune(runs, 'none', args, RATES, learn, steps, None)
  for title, (share, grammars) in SHARES.items():
    warm = max(2, round(share * steps))
    name = f'more{warm}'
    rows[f'{title} more images'] = name
    embedded.tune(runs, name, args, RATES, learn, steps + warm, None)
    for grammar, fields in grammars.items():
      name = f'{fields["kind"]}{"_permuted" * ("permuted" in fields)}{warm}'
      rows[f'{title} {grammar}'] = name
      for seed in (embedded.TRIAL, *range(args.seeds)):
        runs[f'warm_{name}_{seed}'] = warm_up(fields, warm, seed)
      embedded.tune(runs, name, args, RATES, learn, steps, f'warm_{name}')
  return runs, reports(rows)


def warm_up(fields, steps, seed):
  """Return a training that predicts half of the tokens of sentences."""
  source = common.make(
    'science.grammars.Grammar', side=PX // 4, seed=1 + seed, **fields
  )
  parts = {
    'embedding': common.make('science.tokens.FrozenTokens', mask_token=True),
    'pooling': common.make('models.pooling.NoPooling', class_token=True),
  }
  return embedded.run(
    embedded.vit(64, num_classes=128, **parts),
    common.data(source, (), batch_size=64),
    {},
    steps=steps,
    lr=RATES[0],
    seed=seed,
    objective=common.make(
      'objectives.masked_patches.MaskedPatches',
      task={'predict': 'tokens', 'ratio': 0.5},
    ),
    preprocess={'mean': 0.0, 'std': 1.0},
  )


def learn(args, steps, start, seed, lr):
  """Return a training on glyphs, perhaps from the layers of a warm-up."""
  init_from = None
  if start:
    rule = '(head|embedding|pos_embedding|cls).*'
    init_from = {'path': f'{{workdir}}/{start}_{seed}', 'head_rule': rule}
  held_out = embedded.held_out(args, PX, seed)
  return embedded.run(
    embedded.vit(64),
    embedded.drawn(PX, 1 + seed),
    {'val': common.classification(held_out, every_fraction=0.1)},
    steps=steps,
    lr=lr,
    seed=seed,
    init_from=init_from,
  )


def reports(rows):
  cells = (
    {'row': row, 'column': 'held-out glyphs'} | embedded.measured(name)
    for row, name in rows.items()
  )
  lines = {
    row: (rf'{name}_seed\d+', 'val/accuracy')
    for row, name in rows.items()
    if not row.startswith('1% ')
  }
  panel = {'title': 'Warm-ups of 10%', 'ylabel': 'held-out accuracy (%)'}
  curves = common.curves([panel | {'lines': lines}])
  return embedded.paired(cells, 'no warm-up'), curves

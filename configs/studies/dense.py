r"""Do patches become better for classes of pixels when a model continues?

    pip install -e '.[elpv,dinov2]'
    python -m vit_jax.tools.samples MASKED --masks
    python -m vit_jax.main --config=configs/studies/dense.py \
        --config.shared.masked=MASKED --workdir=DIR

DINOv2-S, that pip brings, continues on the training images without their masks,
by LeJEPA and by DINOv2's objective, with and without an anchor; and with PaKA
(terms.py): kernels of patches as those of the weights, in the anchor's place,
or as those of the EMA. So few steps do not move an EMA of momentum 0.9995, so
it is 0.8. The readouts of evals/patches.py learn from it before and after, and
from random weights. Nothing was chosen on test images. docs/evaluation.md has
the result.

Arguments (separated by commas):
  seeds=5    of training; the weights before are one model
  steps=12   of 16 images
  tiny       one seed, few steps: minutes, to check that it runs
"""

from configs import arguments, common
from configs.studies import teachers
from configs.studies.photographs_trained import WEIGHTS

PX, BATCH = teachers.TEACHER_PX, 16
COLUMNS = {'linear': 'linear', 'linear_9': 'layer 9', 'near': 'nearest'}
BEFORE = {'start': 'the weights', 'random': 'random weights'}
KERNELS = {
  'lejepa_kernel': 'LeJEPA, kernels of the weights',
  'dinov2_kernel': "DINOv2's objective, kernels of the weights",
  'dinov2_ema': "DINOv2's objective, kernels of the EMA",
}
CONTINUED = teachers.CONTINUED | KERNELS


def get_config(argument=''):
  args = arguments.parse(argument, ('tiny',), seeds=5, steps=12)
  if args.tiny:
    args.seeds, args.steps = 1, 4
  shared = {'weights': WEIGHTS, 'masked': common.placeholder(str)}
  shared, runs = common.ConfigDict(shared), {}
  weights, masked = map(shared.get_oneway_ref, ('weights', 'masked'))
  for seed in range(args.seeds):
    of_seed = {name: before(name, weights) for name in BEFORE}
    for name in CONTINUED:
      of_seed[name] = continued(args, name, weights)
      of_seed[name].data.source.path = masked
    for name, config in of_seed.items():
      config.seed = seed
      config.evals = {'patches': common.patches(PX, (9,), path=masked)}
      runs[f'{name}_seed{seed}'] = config
  return common.study(
    runs, reports(), shared=shared, discard='(lejepa|dinov2)_.*'
  )


def before(name, weights):
  """Return an evaluation of the weights, or of random ones."""
  config = common.evaluation(PX)
  config.init_from.path = weights
  if name == 'random':
    config.init_from.update(head='reset', head_rule='.*')
  return config


def continued(args, name, weights):
  """Return a short training without labels that starts from weights."""
  objective, kind = name.split('_')
  anchored = 'free' if kind in ('free', 'ema') else 'anchor'
  config = teachers.continued(f'{objective}_{anchored}', BATCH, weights)
  config.total_steps = args.steps
  config.data.source.split = 'train/images'
  config.data.transforms[0]['local_count'] = 2
  if objective == 'dinov2':
    config.objective.objective.momentum = 0.8  # its features are of the EMA
  if kind == 'kernel':
    config.objective.difference = common.make(
      'objectives.terms.kernel_difference'
    )
  if kind == 'ema':
    config.objective.objective.terms = {
      'kernel': common.make('objectives.terms.patch_kernel')
    }
  return config


def reports():
  """Yield tables of mIoU, and of its differences to the weights."""
  rows = BEFORE | CONTINUED
  cells = [
    {'row': row, 'column': column, 'runs': rf'{name}_seed(?P<seed>\d+)'}
    | {'metric': f'patches/{readout}/miou'}
    for name, row in rows.items()
    for readout, column in COLUMNS.items()
  ]
  yield common.table(cells, title='mIoU', name='mIoU')
  title = 'Differences to the weights'
  yield common.paired(cells, title=title, name='differences')

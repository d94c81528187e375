"""Evaluates a run's checkpoint on other data.

    python -m vit_jax.main --config=configs/evaluate.py:folder \
        --config.init_from.path=WORKDIR_OF_A_RUN --workdir=DIR \
        --config.evals.test.data.source.path=PATH

Arguments (between commas; the first of a list is the default):
  folder, tfds   where the images are: PATH/CLASS/*.jpg, or a prepared TFDS set
             (--config.evals.test.data.source.name=NAME and .split=SPLIT)
  accuracy, fewshot, knn, logistic, probe   one or several. accuracy (the
             default): top-1, top-5, loss and calibration of the classifier. The
             others are readouts of frozen features and take labels of any
             classes; their sources are config.evals.frozen.data.images.train
             .source and .test.source. fewshot is the paper's (section 4.1), of
             5 and 10 examples of each class in `train`; the rest fit all of
             `train`: nearest neighbours, logistic regression and a linear layer
             by SGD, settings chosen on a tenth of it that is held out
  size=224   pixels: smaller side resized to 8/7 of it, central crop. If the run
             was trained at another size, its positions are interpolated, which
             is reported

The model and its preprocessing are those of the run.
"""

from ml_collections import config_dict

from configs import arguments, common

VARIANTS = (
  'folder',
  'tfds',
  'folder,fewshot',
  'tfds,fewshot,size=384',
  'tfds,accuracy,knn,logistic,probe',
)
READOUTS = {
  'fewshot': {
    'target': 'vit_jax.evals.fewshot.FewShot',
    'shots': (5, 10),
    'seeds': (0, 1, 2),
  },
  'knn': {
    'target': 'vit_jax.evals.knn.Knn',
    'k': (1, 5, 10, 20),
    'temperature': (0.07,),
    'held_out': 0.1,
  },
  'logistic': {
    'target': 'vit_jax.evals.logistic.Logistic',
    'C': tuple(10.0**power for power in range(-6, 5)),
  },
  'probe': {'target': 'vit_jax.evals.linear_probe.LinearProbe'},
}


def get_config(argument=''):
  args = arguments.parse(
    argument,
    data=('folder', 'tfds'),
    accuracy=False,
    **{name: False for name in READOUTS},
    size=224,
  )
  readouts = {k: v for k, v in READOUTS.items() if getattr(args, k)}
  config = common.evaluation(args.size)
  config.evals = {}
  if args.accuracy or not readouts:
    config.evals.test = {
      'target': 'vit_jax.evals.classification.Classification',
      'data': data(args, 'test'),
    }
  if readouts:
    config.evals.frozen = {
      'target': 'vit_jax.evals.frozen.Frozen',
      'features': 'pre_logits',
      'data': {
        'images': {'train': data(args, 'train'), 'test': data(args, 'test')}
      },
      'readouts': readouts,
    }
  return config


def data(args, split):
  if args.data == 'tfds':
    source = common.tfds(config_dict.placeholder(str), split)
  else:
    source = common.folder(None)
    source['split'] = config_dict.placeholder(str)
  return {
    'source': source,
    'transforms': common.resize_crop(args.size * 8 // 7, args.size),
    'batch_size': 128,
    'num_workers': 0,
    'on_error': 'raise',
  }

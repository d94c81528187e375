"""Evaluates an ImageNet model on the validation images and their relatives.

    python -m vit_jax.main \
        --config=configs/evaluate_imagenet.py:val,real,size=384,resize \
        --config.init_from.path=WEIGHTS --workdir=DIR

WEIGHTS are a run's workdir or published ones of any format, with a head for
ImageNet's 1,000 classes. Accuracies come with 95% intervals, and as
DIR/results-*.csv in the columns of timm's validate.

Arguments (between commas; the first of a list is the default):
  val, real, v2, a, r, sketch   which data; without any of them, all:
    val     the 50,000 validation images
    real    the same images, labelled anew (ReaL): any number of classes each,
            and the likeliest one must be among them. About 3,500 images were
            given none; they do not count (`num_unlabelled` says how many)
    v2      10,000 new images, collected as ImageNet's were (-V2)
    a, r    photographs that ResNet-50 gets wrong (-A), and renditions such as
            paintings and toys (-R), of 200 classes, which are the only ones
            that the model chooses among
    sketch  50,889 sketches
  matched-frequency, threshold-0.7, topimages   how V2's images were chosen
  size=224   pixels. If the model was trained at another size, its positions are
             interpolated, which is reported
  resize_crop, resize   smaller side resized to 8/7 of it, central crop (87.5%),
             as AugReg's and others' at 224; or resized as a whole, its aspect
             not kept, as in the released code of the paper
  binomial, bootstrap, no_intervals   Wilson's intervals; or bootstrap, of loss
             and calibration error, too

All are data sets of TFDS by the names below; what is not prepared is an error
that shows the command which does. They share data_dir, batch_size and
num_workers: set any one, such as --config.evals.val.data.batch_size=512.
Weights trained with a sigmoid: --config.evals.val.loss=sigmoid (also shared);
only loss and calibration differ. Accuracy of each class, too:
--config.evals.val.per_class=True.

Published (table 5 of the paper, in %: validation, ReaL; pre-trained on these,
fine-tuned at 384 px):

            B/16         B/32         L/16         L/32         H/14
  ImageNet  77.91 83.57  73.38 79.56  76.53 82.19  71.16 77.83
  -21k      83.97 88.35  81.28 86.63  85.15 88.40  80.99 85.65  85.13 88.70
  JFT       84.15 88.85  80.73 86.27  87.12 89.99  84.37 88.28  88.04 90.33

Table 2, with averaged parameters, at 512 px (L/16) and 518 px (H/14): L/16 from
ImageNet-21k 85.30 88.62, from JFT 87.76 90.54, H/14 from JFT 88.55 90.72.
"""

from ml_collections import config_dict

from configs import arguments, common

SETS = {  # TFDS name, split
  'val': ('imagenet2012', 'validation'),
  'real': ('imagenet2012_real', 'validation'),
  'v2': ('imagenet_v2', 'test'),
  'a': ('imagenet_a', 'test'),
  'r': ('imagenet_r', 'test'),
  'sketch': ('imagenet_sketch', 'test'),
}
VARIANTS = ('', 'val,real,size=384,resize', 'v2,topimages', 'a,r,bootstrap')


def get_config(argument=''):
  args = arguments.parse(
    argument,
    **dict.fromkeys(SETS, False),
    v2_images=('matched-frequency', 'threshold-0.7', 'topimages'),
    size=224,
    view=('resize_crop', 'resize'),
    intervals=('binomial', 'bootstrap', 'no_intervals'),
  )
  config = common.evaluation(args.size)
  config.name = config_dict.placeholder(str)  # of the model in the CSV
  chosen = [name for name in SETS if getattr(args, name)] or list(SETS)
  shared = {
    'data_dir': config_dict.FieldReference(None, field_type=str),
    'batch_size': config_dict.FieldReference(128),
    'num_workers': config_dict.FieldReference(0),
    'loss': config_dict.FieldReference('softmax'),
  }
  config.evals = {name: evaluator(args, name, shared) for name in chosen}
  return config


def evaluator(args, name, shared):
  """One of config.evals."""
  tfds_name, split = SETS[name]
  if name == 'v2':
    tfds_name += f'/{args.v2_images}'
  source = common.tfds(tfds_name, split) | {'data_dir': shared['data_dir']}
  if name == 'real':
    source['label_key'] = 'real_label'
    source['label_fn'] = {'target': 'vit_jax.data.imagenet.RealLabels'}
  if args.view == 'resize':
    transforms = common.resize(args.size)
  else:
    transforms = common.resize_crop(args.size * 8 // 7, args.size)
  return {
    'target': 'vit_jax.evals.classification.Classification',
    'loss': shared['loss'],
    'restrict': 'present' if name in ('a', 'r') else None,
    'per_class': False,
    'confidence': None if args.intervals == 'no_intervals' else args.intervals,
    # All of these sets number the classes as ImageNet does, 0 to 999 by WordNet
    # id, and so do published heads, which may name them in words, or not at
    # all. A model with another number of classes is an error.
    'same_classes': False,
    'data': {
      'source': source,
      'transforms': transforms,
      'batch_size': shared['batch_size'],
      'num_workers': shared['num_workers'],
      'on_error': 'raise',
    },
  }

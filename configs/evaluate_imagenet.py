r"""Evaluation of an ImageNet model on ImageNet's test sets and their variants.

    python -m vit_jax.main \
        --config=configs/evaluate_imagenet.py:val,real,size=384,original \
        --config.init_from.path=WEIGHTS --workdir=DIR

WEIGHTS are a run's workdir or published weights in any format, with a head for
ImageNet's 1,000 classes. Accuracies have 95% intervals (Wilson score).

Arguments (separated by commas; the first of a list is the default):
  val, real, v2, a, r, sketch   the data; all if none is given: the 50,000
             validation images; the same, labelled again (ReaL), where any of an
             image's classes is correct, and images without one do not count;
             ImageNet-V2; -A and -R, of 200 classes, among which the model
             chooses; 50,889 sketches
  matched-frequency, threshold-0.7, topimages   how V2's images were selected
  size=224   pixels; position embeddings of another size are interpolated
  resize_crop, original, big_vision, timm   the test images. resize_crop:
             resize the smaller side to 8/7 of it and crop the centre (87.5%),
             as AugReg and others at 224. The others are those of code bases,
             see `evaluation` in vit_jax/data/transforms.py
  flip       average the probabilities of each image and its mirror image

The TFDS data sets share data_dir, batch_size, num_workers and the loss: set any
one, such as --config.evals.val.data.batch_size=512, or, for calibration of
weights trained with a sigmoid, --config.evals.val.loss=sigmoid.

Published: tables 2 and 5 in published.py.
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


def get_config(argument=''):
  args = arguments.parse(
    argument,
    (*SETS, 'flip'),
    v2_images=('matched-frequency', 'threshold-0.7', 'topimages'),
    size=224,
    view=('resize_crop', 'original', 'big_vision', 'timm'),
  )
  config = common.evaluation(args.size)
  shared = {'data_dir': common.placeholder(str)}
  shared['num_workers'] = common.placeholder(int)
  shared['batch_size'] = config_dict.FieldReference(128)
  shared['loss'] = config_dict.FieldReference('softmax')
  config.evals = {
    name: evaluator(args, name, shared) for name in arguments.chosen(args, SETS)
  }
  return config


def evaluator(args, name, shared):
  """Return the evaluator of one of SETS."""
  tfds_name, split = SETS[name]
  if name == 'v2':
    tfds_name += f'/{args.v2_images}'
  source = common.tfds(tfds_name, split, data_dir=shared['data_dir'])
  if name == 'real':
    source['label_key'] = 'real_label'
    source['label_fn'] = common.make('data.imagenet.RealLabels')
  images = common.resize_crop(args.size)
  if args.view != 'resize_crop':
    images = common.evaluation_images(args.view, args.size)
  data = common.data(source, images, batch_size=shared['batch_size'])
  return common.classification(
    data | {'num_workers': shared['num_workers']},
    loss=shared['loss'],
    restrict='present' if name in ('a', 'r') else None,
    per_class=False,
    flip=args.flip,
    intervals=True,
    # All of these sets number the classes like ImageNet, 0 to 999 by WordNet
    # id, and so do published heads, whose class names may be words or missing.
    # A model with another number of classes is an error.
    same_classes=False,
  )

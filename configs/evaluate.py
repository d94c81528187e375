r"""Evaluation of a run's checkpoint, or of other weights, on other data.

    python -m vit_jax.main --config=configs/evaluate.py:folder \
        --config.init_from.path=WORKDIR_OF_A_RUN --workdir=DIR \
        --config.evals.test.data.source.path=PATH

The model and its preprocessing are those of the run.

Arguments (separated by commas; the first of a list is the default):
  folder, tfds   where the images are: PATH/CLASS/*.jpg or another source, see
             vit_jax/data/sources/named.py; or a prepared TFDS set
             (--config.evals.test.data.source.name=NAME and .split=SPLIT)
  accuracy, fewshot, knn, logistic   one or several. accuracy (the default) is
             top-1, top-5, loss and calibration of the classifier. The others
             are readouts of frozen features, for any classes; their sources are
             config.evals.frozen.data.images.train.source and .test.source.
             fewshot is the paper's (section 4.1), on 5 and 10 examples of each
             class; nearest neighbours and logistic regression, whose strength
             is chosen on a held-out tenth, use all
  patches    a linear classifier and nearest neighbours of patches, for images
             with masks (docs/evaluation.md) in PATH/train and PATH/test, or in
             the columns image and mask of a table;
             --config.evals.patches.data.train.source.path=PATH
  layers=6+8+10+12   readouts learn from these layers of a ViT instead of its
             pooled output: the mean, maximum and deviation over patches, which
             show small things better (docs/photographs.md). Readouts of patches
             learn from the last tokens, each of these layers, and all of them
  flip       accuracy averages the probabilities of each image and its mirror
             image, readouts average their features
  labels=a+b, number=age, order=0<1<2   weights that have learned other labels
             than one class, see labels.py
  size=224   pixels: smaller side resized to 8/7 of it, central crop; position
             embeddings are interpolated, which is reported. By default the
             size, resize and crop of the weights; with patches 224
"""

from configs import arguments, common, finetune, labels

READOUTS = {
  'fewshot': common.few_shot((5, 10)),
  'knn': common.make('evals.knn.Knn', k=(1, 5, 10, 20), temperature=(0.07,)),
  'logistic': common.make(
    'evals.logistic.Logistic', C=tuple(10.0**power for power in range(-6, 5))
  ),
}
OF_LAYERS = {'standardize': True, 'C': (0.001, 0.01, 0.1, 1.0)}


def get_config(argument=''):
  args = arguments.parse(
    argument,
    ('accuracy', *READOUTS, 'flip', 'patches'),
    data=('folder', 'tfds'),
    size=int,
    layers='',
    **labels.OPTIONS,
  )
  readouts = {k: v for k, v in READOUTS.items() if getattr(args, k)}
  layers = [int(x) for x in args.layers.split('+') if x]
  if args.patches:
    args.size = args.size or 224
  config = common.evaluation(args.size)
  config.evals = {}
  if args.patches:
    config.evals.patches = common.patches(args.size, layers)
  test = data(args, config, 'test')
  if not (args.accuracy or readouts) and args.patches:
    if args.flip or labels.targets(args):
      raise ValueError("'flip' and labels are not for 'patches' alone.")
  elif args.accuracy or not readouts:
    kind, _ = labels.of(args)
    config.evals.test = common.make(f'evals.{kind.evaluator}', data=test)
    if args.flip:
      config.evals.test.flip = True
  if readouts:
    images = {'train': data(args, config, 'train'), 'test': test}
    fields = {'flip': args.flip}
    if layers:
      fields |= common.of_layers(layers)
      if args.logistic:
        readouts['logistic'] = READOUTS['logistic'] | OF_LAYERS
    config.evals.frozen = common.frozen({'images': images}, readouts, **fields)
  elif layers and not args.patches:
    raise ValueError(
      f"'layers={args.layers}' is for readouts. Add one: "
      f'{", ".join(READOUTS)}, patches.'
    )
  return config


def data(args, config, split):
  if args.data == 'tfds':
    source = common.tfds(common.placeholder(str), split, **labels.targets(args))
  else:
    source = common.own_images(common.placeholder(str), **labels.targets(args))
    source['decode'] = finetune.follow(config, 'decode')
  images = common.resize_crop(args.size or 224)
  made = common.data(source, images, batch_size=128)
  if not args.size:
    made['transforms'] = finetune.follow(config, 'transforms')
  return made

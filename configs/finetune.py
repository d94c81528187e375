r"""Fine-tuning of a pre-trained model: the paper's table 4 and appendix B.1.1.

    python -m vit_jax.main --config=configs/finetune.py:cifar100 \
        --config.init_from.path=PRETRAINING_WORKDIR --workdir=DIR
    python -m vit_jax.main --config=configs/finetune.py:folder \
        --config.init_from.path=gs://vit_models/imagenet21k/ViT-B_16.npz \
        --config.data.source.path=PATH --workdir=DIR

The weights are a workdir, or a file in any format that vit_jax/weights reads;
they are needed to resume, too. The second command trains on your own images, in
PATH/CLASS/*.jpg (or png, webp, bmp); docs/data.md lists what else PATH can be.

Arguments (separated by commas; the first of a list is the default):
  imagenet, cifar10, cifar100, pets, flowers   the data sets of table 4
  resisc45, kitti   two more of AugReg's, with `augreg` only
  folder     your own: 90% of each class to train, 10% to test; held_out=20 is
             20%. For sub-folders PATH/train and PATH/val add
             --config.data.source.split=train
             --config.evals.test.data.source.split=val
  from_weights   the architecture (without head), preprocessing and, if they
             are of this project, dtype of the weights
  B/16, ...  or a model by name, one of MODELS, without dropout and for pixels
             in [-1, 1]. It must be that of the weights, with their settings,
             e.g. --config.model.pooling.target=vit_jax.models.pooling.Mean
  final, dev   'final' trains on the entire train set and tests on the test set;
             'dev' holds out the part of train that selects the learning rate
             (1% ImageNet, 2% CIFAR, 10% others) and never reads the test set
  lr=RATE    the defaults are below
  size=384   pixels; 518 for H/14 (384 does not divide into its patches); 224
             for Mixers, as in the released code. With from_weights these are
             for weights of 224 px, see pretrained.finetuning_size
  max_patches=N   instead of a size: images keep their aspect ratio, and have
             up to N patches; for from_weights
  polyak     EMA of the parameters with decay 0.9999, and for L/16 by name
             size=512: the ImageNet numbers of table 2
  inception  crops as in the released code: inception crop and flip; test images
             are resized to a square. Resizes of a folder's images antialias,
             and with from_weights they interpolate as the weights' images
  resize     BiT's crops as in big_vision: resize to 448 px (7/6 of the size;
             256 for 224), random 384 crop, flip; for tests, smaller side to 448
             and central 384
  bit        BiT-HyperRule instead of table 4, see below
  augreg     AugReg's protocol instead of table 4, see below; steps=N is another
             of its numbers of steps, and v2 selects on ImageNet-V2 in 'dev'
  adam       AdamW (weight decay .05, rate .001) instead of SGD, not in the
             paper: small models need fewer epochs with it
  epochs=100   for folder only; the paper's data sets have a number of steps
  balanced, class_weights   visit each class equally often (rare images repeat);
             or weight the training loss of an example by n / (K n_c), for n
             images in K classes and n_c in its class
  channels=13   for folder only: files of so many channels and of any depth, as
             in train_folder.py; the kernel of each new channel is the mean of
             those of the weights
  labels=a+b, number=age, order=0<1<2   for folder only: other labels than one
             class, see labels.py
  tiny       seconds on a CPU, for a checkpoint made with `tiny`

Table 4: SGD with momentum 0.9, batch 512, cosine decay, no weight decay,
clipping at norm 1. transfer.py chooses among its rates as the paper does; the
defaults here are those of the released code for ImageNet and CIFAR, AugReg's
best for a B/32 on pets and flowers, and for a folder VTAB's, with batch 64 for
from_weights. The head is replaced by a zero-initialised one without tanh layer.

Expected: published.py. From the released ImageNet-21k weights the authors' own
code later gave the following, without and with dropout 0.1, at 384 px:

                 CIFAR-10         CIFAR-100        ImageNet
    R50+B/16  98.72 / 98.94    90.88 / 92.30    83.72 / 85.08
    B/16      99.02 / 98.76    92.06 / 91.92    84.53 / 84.12
    B/32      98.88 / 98.75    92.31 / 92.05    81.66 / 81.31
    L/16      99.13 / 99.14    92.91 / 93.22    84.47 / 85.05
    L/32      99.06 / 99.09    93.29 / 93.34    81.89 / 81.13

Not in the paper: warm-up, 500 steps as in the released code, 100 for pets and
flowers as in big_vision; softmax loss and a bfloat16 momentum, both code bases;
crops; the split of flowers, 'train' (1,020 images) as in big_vision; where
Polyak averaging starts, here at the first step. Table 4 has no dropout; the
released L/16 and H/14 configs keep 0.1.

`bit` is BiT-HyperRule, with which the paper fine-tuned ResNets too (the better
result counts): rate .003, a tenth of it after 30, 60 and 90% of the steps, no
clipping; crops as `resize`, for CIFAR 160 and 128 px, and tests as `inception`;
mixup(0.1) for ImageNet and CIFAR. A folder has 500 steps, or epochs=.

`augreg` is the protocol of "How to train your ViT?": table 4's settings at 384
or 224 px, and on the dev split each of the rates, steps and splits in AUGREG;
the first ones are the defaults (best for a B/32 in big_vision, or .01). Both
'dev' and 'final' train without the dev split (derived). Weights trained on
ImageNet-21k have seen the held-out 1% of ImageNet: AugReg then selects on
ImageNet-V2, and so does `v2` (matched-frequency; which of its sets is not
stated). Nor are the crops stated; kitti has none, as they change distances.
"""

from configs import arguments, common, labels
from vit_jax.data import vtab

TABLE_4 = {  # TFDS name, steps, % of train held out in dev, test, default rate
  'imagenet': ('imagenet2012', 20_000, 1, 'validation', 0.03),
  'cifar10': ('cifar10', 10_000, 2, 'test', 0.01),
  'cifar100': ('cifar100', 10_000, 2, 'test', 0.03),
  'pets': ('oxford_iiit_pet', 500, 10, 'test', 0.003),
  'flowers': ('oxford_flowers102', 500, 10, 'test', 0.003),
}
WARMUP_STEPS = {500: 100, 2500: 200, 10_000: 500, 20_000: 500}
# fmt: off
AUGREG = {  # learning rates and steps (the first: default), (train, dev, test)
  'imagenet': (
    (.03, .01), (20_000,), ('train[:99%]', 'train[99%:]', 'validation')),
  'cifar100': (
    (.01, .003, .001), (10_000, 2500), ('train[:98%]', 'train[98%:]', 'test')),
  'pets': (
    (.003, .001, .01), (500, 2500), ('train[:90%]', 'train[90%:]', 'test')),
  'resisc45': (
    (.01, .003, .001), (10_000, 2500),
    ('train[:60%]', 'train[60%:80%]', 'train[80%:]')),
  'kitti': (
    (.01, .003, .001), (500, 2500), ('train', 'validation', 'test')),
}
MODELS = (
  'B/16', 'B/32', 'L/16', 'L/32', 'H/14', 'S/16', 'S/32', 'Ti/16',
  'R50+B/16', 'R50+B/32', 'R50+L/16', 'R50+L/32',
  'R26+S/32', 'R26+B/32', 'R+Ti/16',
  'R50x1', 'R50x2', 'R50x3', 'R101x1', 'R101x3',
  'R152x1', 'R152x2', 'R152x4', 'R200x3',
  'Mixer-B/16', 'Mixer-B/32', 'Mixer-L/16',
)
# fmt: on
CROPS = ('inception', 'resize')


def get_config(argument=''):
  args = arguments.parse(
    argument,
    (
      *('polyak', 'bit', 'adam', 'augreg', 'v2'),
      *('balanced', 'class_weights', 'tiny'),
    ),
    data=tuple(dict.fromkeys((*TABLE_4, *AUGREG, 'folder'))),
    model=('from_weights', *MODELS),
    mode=('final', 'dev'),
    lr=float,
    size=int,
    max_patches=int,
    crop=CROPS,
    steps=int,
    epochs=float,
    held_out=int,
    channels=int,
    **labels.OPTIONS,
  )
  check(args)
  source, held_out, lr, steps = protocol(args)
  config = table_4(args, args.lr or lr)
  train_images, test_images = transforms(args)
  of_weights = args.model == 'from_weights'
  if args.max_patches:
    config.model.keep_aspect = True
    test_images = follow(config, 'keep_aspect')
    test_images['max_patches'] = args.max_patches
    train_images = test_images | {'area': (0.05, 1.0)}
  if args.polyak:
    config.ema = {'decay': 0.9999}
  # 512 is table 4's. A folder of weights of any size may be small.
  batch_size = 64 if of_weights and args.data == 'folder' else 512
  config.data = common.data(source, train_images, batch_size=batch_size)
  if steps:
    config.total_steps = steps
    config.schedule.warmup_steps = WARMUP_STEPS[steps]
  else:
    config.total_epochs = args.epochs or 100.0
    config.schedule.warmup_fraction = 0.05 if args.bit else 0.1
  if args.bit:
    config.optimizer = common.sgd()
    config.schedule.update(decay='step', milestones=(0.3, 0.6, 0.9))
    if args.data == 'imagenet' or args.data.startswith('cifar'):
      config.objective = common.mixed(config.objective, mixup=0.1)
  if args.adam:
    config.optimizer = common.adam(weight_decay=0.05, clip_norm=1.0)
    config.schedule.lr = args.lr or 1e-3
  config.evals = common.held_out_evals(
    config, held_out, test_images, every_fraction=0.1
  )
  if args.channels:
    common.use_rasters(config, args.channels)
  elif of_weights and args.data == 'folder':
    config.data.source.decode = follow(config, 'decode')
    config.evals.test.data.source.decode = follow(config, 'decode')
  labels.learn(config, args)
  if args.v2:
    images = {'name': 'imagenet_v2/matched-frequency', 'split': 'test'}
    config.evals.dev.data.source.update(images)
  if not args.max_patches and default_size(args) != 128:
    follow_size(config, args)
  if of_weights and args.data == 'folder':  # others are not antialiased
    for part in (config, *config.evals.values()):
      part.data.interpolation = follow(config, 'interpolation')
  return common.finish(config, args)


def check(args):
  """Raise ValueError for words that the data or the protocol do not have."""
  known = tuple(AUGREG) if args.augreg else (*TABLE_4, 'folder')
  if args.data not in known:
    change = 'Leave out' if args.augreg else 'Add'
    raise ValueError(
      f"{change} 'augreg' for {args.data!r}, or use one of {', '.join(known)}."
    )
  on_folder = args.data == 'folder'
  steps = AUGREG[args.data][1] if args.augreg else ()
  selects_imagenet = (args.data, args.mode) == ('imagenet', 'dev')
  unused = {
    'epochs': args.epochs and not on_folder,
    'held_out': args.held_out and not on_folder,
    'channels': args.channels and not on_folder,
    **{x: getattr(args, x) and not on_folder for x in labels.KINDS},
    'dev': on_folder and args.mode == 'dev',
    'steps': args.steps not in (None, *steps),
    'v2': args.v2 and not (args.augreg and selects_imagenet),
    'bit': args.bit and args.augreg,
    'polyak': args.polyak and args.augreg,
    'adam': args.adam and (args.bit or args.augreg),
    args.crop: args.crop != CROPS[0] and (args.bit or args.data == 'kitti'),
    'max_patches': args.max_patches and args.model != 'from_weights',
  }
  for word in filter(unused.get, unused):
    raise ValueError(
      f'This value of {word!r} does not go with the other words. See the '
      'arguments in configs/finetune.py.'
    )


def table_4(args, lr):
  """Return a fine-tuning by table 4, without its data and length."""
  config = common.training()
  config.init_from = {'path': common.placeholder(str)}
  if args.model == 'from_weights':
    config.model = follow(config, args.model)
    config.preprocess = follow(config, 'preprocess')
  else:
    config.model = common.model(args.model)
  config.objective = common.xent('softmax')
  config.optimizer = common.sgd(accumulator_dtype='bfloat16', clip_norm=1.0)
  config.schedule = {'lr': lr, 'decay': 'cosine'}
  return config


def follow_size(config, args):
  """Make sizes multiples of that of the weights, if they follow the weights."""
  if args.model != 'from_weights' or args.size:
    return
  image_size = follow(config, 'finetuning_size')
  for part in (config, *config.evals.values()):
    sized = [each for each in part.data.transforms if 'size' in each]
    last = sized[-1]['size']
    for each in sized:
      each['size'] /= last
    part.data.image_size = image_size
    image_size = config.data.get_oneway_ref('image_size')


def follow(config, name):
  """Return the settings of vit_jax.pretrained.NAME for the weights."""
  init_from = config.get_oneway_ref('init_from')
  return common.make(f'pretrained.{name}', init_from=init_from)


def protocol(args):
  """Return (source, {evaluator: split}, rate, steps or None for epochs)."""
  if args.data == 'folder':
    source, held_out = labels.held_out(args.held_out or 10, args)
    lr, steps = 0.01, 500 if args.bit and not args.epochs else None
  elif args.augreg:
    rates, steps, (train, dev, test) = AUGREG[args.data]
    lr, steps = rates[0], args.steps or steps[0]
    source = common.tfds('imagenet2012', train)
    if args.data != 'imagenet':
      data_dir = common.placeholder(str)
      source = vtab.settings(args.data, 'test', data_dir=data_dir)
      source['split'] = train
    held_out = {'dev': dev} if args.mode == 'dev' else {'test': test}
  else:
    name, steps, percent, test, lr = TABLE_4[args.data]
    train, held_out = 'train', {'test': test}
    if args.mode == 'dev':
      train = f'train[:{100 - percent}%]'
      held_out = {'dev': f'train[{100 - percent}%:]'}
    source = common.tfds(name, train)
  return source, held_out, 0.003 if args.bit else lr, steps


def default_size(args):
  if args.model == 'H/14':
    return 518
  if args.model.startswith('Mixer'):
    return 224
  if args.bit and args.data.startswith('cifar'):
    return 128
  return 512 if args.polyak and args.model == 'L/16' else 384


def transforms(args):
  size = args.size or default_size(args)
  fields = {'antialias': True} if args.data == 'folder' else {}
  test = common.resize(size, **fields)
  flip = common.make('data.transforms.FlipLR')
  if args.data == 'kitti':
    return [*test, flip], test
  if args.crop == 'inception' and not args.bit:
    return common.inception_crop(size, **fields), test
  loads = {128: 160, 480: 512} if args.bit else {224: 256}
  load = loads.get(size, size * 7 // 6)
  crop = common.make('data.transforms.RandomCrop', size=size)
  images = [*common.resize(load, **fields), crop, flip]
  return images, test if args.bit else common.resize_crop(size, load)

"""Fine-tuning of a pre-trained model: the paper's table 4 and appendix B.1.1.

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
  adapt_channels   images may have other channels than those of the weights:
             kernels are repeated and scaled, or summed
  final, dev   'final' trains on the entire train set and tests on the test set;
             'dev' holds out the part of train that selects the learning rate
             (1% ImageNet, 2% CIFAR, 10% others) and never reads the test set
  lr=RATE    the defaults are below
  size=384   pixels; 518 for H/14 (384 does not divide into its patches); 224
             for Mixers, as in the released code. With from_weights these are
             for weights of 224 px, see pretrained.finetuning_size
  layer_decay=RATE   multiply the learning rate of each layer by this, once for
             each layer after it (not in the paper; 0.65 to 0.9 is usual)
  polyak     EMA of the parameters with decay 0.9999, and for L/16 by name
             size=512: the ImageNet numbers of table 2
  inception, resize, resize_small   how images are cropped, see below
  bit        BiT-HyperRule instead of table 4, see below
  augreg     AugReg's protocol instead of table 4, see below; steps=N is another
             of its numbers of steps, and v2 selects on ImageNet-V2 in 'dev'
  epochs=100   for folder only; the paper's data sets have a number of steps
  balanced, class_weights   visit each class equally often (rare images repeat);
             or weight the training loss of an example by n / (K n_c), for n
             images in K classes and n_c in its class
  tiny       seconds on a CPU, for a checkpoint made with `tiny`

Table 4: SGD with momentum 0.9, batch 512, cosine decay, no weight decay,
gradients clipped at norm 1, and

              steps   learning rates          default, from
    imagenet  20000   .003 .01 .03 .06        .03   released code
    cifar10   10000   .001 .003 .01 .03       .01   released code, for B/16
    cifar100  10000   .001 .003 .01 .03       .03   released code
    pets        500   .001 .003 .01 .03       .003  AugReg's best for a B/32
    flowers     500   .001 .003 .01 .03       .003  AugReg's best for a B/32
    folder            (not in the paper)      .01   the one that VTAB has; batch
                                                    64 with from_weights

The text has .06 for ResNets and hybrids only. transfer.py chooses the rate as
the paper does. Head and tanh layer are replaced by a zero-initialised head, and
position embeddings are interpolated (section 3.2).

Expected: published.py. From the released ImageNet-21k weights the authors' own
code later gave the following, without and with dropout 0.1, at 384 px:

                 CIFAR-10         CIFAR-100        ImageNet
    R50+B/16  98.72 / 98.94    90.88 / 92.30    83.72 / 85.08
    B/16      99.02 / 98.76    92.06 / 91.92    84.53 / 84.12
    B/32      98.88 / 98.75    92.31 / 92.05    81.66 / 81.31
    L/16      99.13 / 99.14    92.91 / 93.22    84.47 / 85.05
    L/32      99.06 / 99.09    93.29 / 93.34    81.89 / 81.13

Not in the paper:
- warm-up: 500 steps as in the released code, 100 for pets and flowers as in
  big_vision. Softmax loss and a bfloat16 momentum: both code bases.
- crops. 'inception', the released code's: inception crop and flip; test images
  are resized to a square. 'resize', BiT's as in big_vision: resize to 448 x
  448 (7/6 of the size; 256 for 224), random 384 crop, flip; the smaller side of
  test images is resized to 448, and the central 384 are cropped. In
  'resize_small' the smaller side is 448 in training, too.
- dropout: table 4 has none; the released L/16 and H/14 configs keep 0.1.
- flowers trains on the split 'train', 1,020 images, as in big_vision.
- Polyak averaging is in neither code base; here it starts at the first step.

`bit` is BiT-HyperRule, with which the paper fine-tuned ResNets too (the better
result counts): rate .003, a tenth of it after 30, 60 and 90% of the steps, no
clipping; resize to 448 px and a random 384 crop with flip, for CIFAR 160 and
128; test images are resized to a square; mixup(0.1) for ImageNet and CIFAR. A
folder has 500 steps, or epochs=. From the released code: the warm-up, 100 of
500 steps, else 500 (5% with epochs=).

`augreg` is the protocol of "How to train your ViT?": table 4's settings at 384
or 224 px (size=224), and on the dev split each of the rates, steps and splits
in AUGREG below; the first ones are the defaults (best for a B/32 in big_vision,
or .01). Both 'dev' and 'final' train without the dev split (derived). Weights
trained on ImageNet-21k have seen the held-out 1% of ImageNet: AugReg then
selects on ImageNet-V2, and so does `v2` (matched-frequency; which of its sets
is not stated). Nor are the crops stated; kitti has none, which would change the
distances.
"""

from configs import arguments, common
from vit_jax.data import vtab

TABLE_4 = {  # TFDS name, steps, % of train held out in dev, test split, ...
  'imagenet': ('imagenet2012', 20_000, 1, 'validation', 0.03, 500),
  'cifar10': ('cifar10', 10_000, 2, 'test', 0.01, 500),
  'cifar100': ('cifar100', 10_000, 2, 'test', 0.03, 500),
  'pets': ('oxford_iiit_pet', 500, 10, 'test', 0.003, 100),
  'flowers': ('oxford_flowers102', 500, 10, 'test', 0.003, 100),
}  # ... and, not from table 4: default learning rate, warm-up steps
WARMUP_STEPS = {500: 100, 2500: 200, 10_000: 500, 20_000: 500}  # AugReg's
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
CROPS = ('inception', 'resize', 'resize_small')


def get_config(argument=''):
  args = arguments.parse(
    argument,
    data=tuple(dict.fromkeys((*TABLE_4, *AUGREG, 'folder'))),
    model=('from_weights', *MODELS),
    adapt_channels=False,
    mode=('final', 'dev'),
    lr=float,
    layer_decay=float,
    size=int,
    polyak=False,
    crop=CROPS,
    bit=False,
    augreg=False,
    steps=int,
    v2=False,
    epochs=float,
    held_out=float,
    balanced=False,
    class_weights=False,
    tiny=False,
  )
  words = {word.strip() for word in argument.split(',')}
  for own in words & {'bit', 'kitti'}:
    if given := words & {*CROPS}:
      raise ValueError(f'{own!r} has its own crops; leave out {given.pop()!r}.')
  check(args)
  make = own_folder if args.data == 'folder' else table_4
  if args.augreg:
    make = augreg
  source, held_out, lr, warmup, total = make(args)
  train_images, test_images = transforms(args)
  config = common.training()
  config.update(total)
  config.init_from = {'path': common.placeholder(str)}
  if args.adapt_channels:
    config.init_from.adapt_channels = True
  config.model = model(args, config)
  if args.polyak:
    config.ema = {'decay': 0.9999}
  # 512 is table 4's. A folder of weights of any size may be small.
  of_weights = args.data == 'folder' and args.model == 'from_weights'
  config.data = common.data(
    source, train_images, batch_size=64 if of_weights else 512
  )
  config.objective = common.xent('softmax')
  config.optimizer = common.finetuning_sgd()
  config.schedule = {'lr': args.lr or lr, 'decay': 'cosine', **warmup}
  if args.bit:
    config.optimizer = common.sgd()
    config.schedule.update(decay='step', milestones=(0.3, 0.6, 0.9))
    if args.data == 'imagenet' or args.data.startswith('cifar'):
      config.objective = common.mixed(config.objective, mixup=0.1)
  if args.layer_decay:
    config.optimizer.layer_decay = {'rate': args.layer_decay}
  common.balance(
    config, balanced=args.balanced, class_weights=args.class_weights
  )
  config.evals = common.held_out_evals(
    config, held_out, test_images, every_fraction=0.1
  )
  if args.v2:
    images = {'name': 'imagenet_v2/matched-frequency', 'split': 'test'}
    config.evals.dev.data.source.update(images)
  if args.model == 'from_weights':
    follow_weights(args, config)
  return common.tiny(config) if args.tiny else config


def model(args, config):
  """Return the model that the argument names, or that of the weights."""
  if args.model != 'from_weights':
    return common.model(args.model)
  target = 'vit_jax.pretrained.from_weights'
  return {'target': target, 'init_from': config.get_oneway_ref('init_from')}


def follow_weights(args, config):
  """Take the image size and the preprocessing, in place, from the weights."""

  def of_weights(name):
    init_from = config.get_oneway_ref('init_from')
    return {'target': f'vit_jax.pretrained.{name}', 'init_from': init_from}

  config.preprocess = of_weights('preprocess')
  if args.size or (args.bit and args.data.startswith('cifar')):
    return
  for part in (config, *config.evals.values()):
    part.data.image_size = of_weights('finetuning_size')


def table_4(args):
  """Return (source, {evaluator: split}, rate, warm-up, duration)."""
  name, steps, dev, test, lr, warmup_steps = TABLE_4[args.data]
  train, held_out = 'train', {'test': test}
  if args.mode == 'dev':
    train = f'train[:{100 - dev}%]'
    held_out = {'dev': f'train[{100 - dev}%:]'}
  if args.bit:
    lr, warmup_steps = 0.003, 100 if steps == 500 else 500
  warmup, total = {'warmup_steps': warmup_steps}, {'total_steps': steps}
  return common.tfds(name, train), held_out, lr, warmup, total


def check(args):
  """Check that the arguments belong to the data and to the protocol."""
  steps = AUGREG.get(args.data, (None, ()))[1]
  problems = {
    "epochs= and held_out= are for 'folder'; table 4 states steps and splits": (
      args.data != 'folder' and (args.epochs or args.held_out)
    ),
    "'folder' has no test set, so 'dev' has no meaning": (
      args.data == 'folder' and args.mode == 'dev'
    ),
    f"{args.data!r} is for AugReg's protocol: add 'augreg'": (
      not args.augreg and args.data not in (*TABLE_4, 'folder')
    ),
    "steps= and v2 are for AugReg's protocol: add 'augreg'": (
      not args.augreg and (args.steps or args.v2)
    ),
    f'AugReg has no {args.data!r}. It has {", ".join(AUGREG)}': (
      args.augreg and args.data not in AUGREG
    ),
    "'augreg' contradicts 'bit' and 'polyak'": (
      args.augreg and (args.bit or args.polyak)
    ),
    f'AugReg has no steps={args.steps} for {args.data!r}. It has '
    f'{", ".join(map(str, steps))}': (
      args.augreg and args.steps and args.steps not in steps
    ),
    "'v2' is for 'imagenet' with 'dev'": (
      args.v2 and (args.data, args.mode) != ('imagenet', 'dev')
    ),
  }
  for problem, found in problems.items():
    if found:
      raise ValueError(f'{problem}.')


def augreg(args):
  """Return what `table_4` returns, by AugReg's protocol."""
  rates, steps, (train, dev, test) = AUGREG[args.data]
  if args.data == 'imagenet':
    source = common.tfds('imagenet2012', train)
  else:
    data_dir = common.placeholder(str)
    source = vtab.settings(args.data, 'test', data_dir=data_dir)
    source['split'] = train
  held_out = {'dev': dev} if args.mode == 'dev' else {'test': test}
  total_steps = args.steps or steps[0]
  warmup = {'warmup_steps': WARMUP_STEPS[total_steps]}
  return source, held_out, rates[0], warmup, {'total_steps': total_steps}


def own_folder(args):
  """Return what `table_4` returns, for a folder of the user's."""
  lr, warmup = 0.01, {'warmup_fraction': 0.1}
  total = {'total_epochs': args.epochs or 100.0}
  if args.bit:
    lr, warmup = 0.003, {'warmup_fraction': 0.05}
    if not args.epochs:
      warmup, total = {'warmup_steps': 100}, {'total_steps': 500}
  train, test = common.split_off(args.held_out)
  return common.own_slice(train), {'test': test}, lr, warmup, total


def size(args):
  """Return the default image size."""
  if args.model == 'H/14':
    return 518
  if args.model.startswith('Mixer'):
    return 224
  if args.bit and args.data.startswith('cifar'):
    return 128
  return 512 if args.polyak and args.model == 'L/16' else 384


def transforms(args):
  """Return the transforms of training and of test images."""
  crop = args.size or size(args)
  if args.bit:
    load = {128: 160, 480: 512}.get(crop, crop * 7 // 6)
    return common.random_crop('Resize', load, crop), common.resize(crop)
  if args.data == 'kitti':
    flipped = [*common.resize(crop), common.transform('FlipLR')]
    return flipped, common.resize(crop)
  if args.crop == 'inception':
    return common.inception_crop(crop), common.resize(crop)
  load = 256 if crop == 224 else crop * 7 // 6
  resize = 'Resize' if args.crop == 'resize' else 'ResizeSmall'
  return (
    common.random_crop(resize, load, crop),
    common.resize_crop(load, crop),
  )

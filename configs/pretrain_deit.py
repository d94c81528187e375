r"""DeiT on ImageNet, also distilled ("Training data-efficient image
transformers & distillation through attention", Touvron et al., 2021).

    python -m vit_jax.main --config=configs/pretrain_deit.py:S/16 --workdir=DIR
    python -m vit_jax.main --config=configs/pretrain_deit.py:S/16,distilled \
        --config.objective.objective.teacher.path=WEIGHTS --workdir=DIR

WEIGHTS is a workdir or a file of any format, with the 1000 classes of ImageNet.

Arguments (separated by commas; the first of a list is the default):
  S/16, Ti/16, B/16   the model
  distilled   with a distillation token, which learns the teacher's most
              probable class
  soft        the same, but with the teacher's probabilities
  epochs=300
  folder      instead of TFDS's imagenet2012, images in PATH/train/CLASS and
              PATH/val/CLASS: --config.data.source.path=PATH, or
              imagenet:PATH (its tar files), wds:FILES; see docs/data.md
  tiny        seconds on a CPU, on the same data

Published: top-1 in % on the validation set at 224 px. The distilled models are
those of the hard distillation by a RegNetY-16GF (82.9, from memory), which this
project does not have:

              Ti/16   S/16   B/16
    DeiT       72.2   79.9   81.8
    distilled  74.5   81.2   83.4
    deit3-jax  73.1   79.7   81.5

The last line is DeiT without distillation in JAX, by another project.

DeiT's script (main.py), and here: AdamW, learning rate 5e-4 per 512 images,
weight decay 0.05, no clipping, 5 epochs of warm-up, cosine to 1e-5, stochastic
depth 0.1, label smoothing 0.1, an EMA of 0.99996; repeated augmentation (3),
bicubic random crops, flip, RandAugment rand-m9-mstd0.5-inc1, mixup 0.8 or
CutMix 1.0 with equal probability, one draw per batch, and random erasing 0.25.
The script has colour jitter, too, but timm leaves it out where there is
RandAugment (from memory). The whole of train, and the mean and deviation of
ImageNet's pixels. Kernels start from a normal distribution of 0.02.

Batch 1024 and the test images (smaller side to 256 px, bicubic, central 224)
are also those of deit3-jax. From memory: the stochastic depth grows linearly;
crops cover 8 to 100% of an image; exact GELU; weight decay is for kernels only;
and the settings of the distillation: hard labels and weight 0.5, or soft ones,
temperature 3 and weight 0.1.

Different here: the warm-up starts at 0 instead of 1e-6, and rates change with
each step instead of each epoch; class and distillation token start at 0, their
positions do not; the noise of random erasing is clipped to [0, 255]. Evaluators
use the EMA; the script reports the parameters themselves.

Precision: products in bfloat16; parameters, the gradients of kernels and their
sums over devices in float32 (--config.grad_dtype=bfloat16 rounds gradients).
"""

from configs import arguments, common

MODELS = ('S/16', 'Ti/16', 'B/16')
MEAN, DEVIATION = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


def get_config(argument=''):
  args = arguments.parse(
    argument,
    model=MODELS,
    distilled=False,
    soft=False,
    epochs=300.0,
    folder=False,
    tiny=False,
  )
  distilled = args.distilled or args.soft
  pooling = {'pooling': common.pooling('DistillationToken')}
  source, held_out = common.imagenet(args.folder, minival=False)
  config = common.training()
  config.total_epochs = args.epochs
  config.model = transformer(
    args.model, stochastic_depth=0.1, **(pooling if distilled else {})
  )
  config.preprocess = normalize()
  train_images = [
    *crop(224),
    rand_augment(),
    common.augmentation('RandomErasing', probability=0.25),
  ]
  config.data = common.data(source, train_images, batch_size=1024)
  config.data.order = repeated()
  objective = common.xent('softmax', label_smoothing=0.1)
  if args.soft:
    objective = common.distillation(
      objective, kind='soft', weight=0.1, temperature=3.0
    )
  elif distilled:
    objective = common.distillation(objective, kind='hard', weight=0.5)
  # Outside of the distillation: teacher and student see the same mixed images.
  config.objective = common.mixed(objective, mixup=0.8, cutmix=1.0)
  config.optimizer = common.adam(weight_decay=0.05)
  config.schedule = cosine(1e-3)
  config.ema_decay = 0.99996
  test_images = common.evaluation_images('timm', 224, crop=0.875)
  config.evals = common.held_out_evals(
    config, held_out, test_images, every_steps=5000
  )
  return common.tiny(config) if args.tiny else config


# Parts that DeiT III shares.


def transformer(name, *, block=None, **fields):
  """Return a model with DeiT's GELU and initialisation."""
  model = common.model(
    name,
    block={'gelu': 'exact', 'init_std': 0.02} | (block or {}),
    head={'init_std': 0.02},
    **fields,
  )
  model['embedding']['init_std'] = 0.02
  return model


def normalize():
  """Return the preprocessing: the mean and deviation of ImageNet's pixels."""
  target = 'vit_jax.preprocess.Normalize'
  return {'target': target, 'mean': MEAN, 'std': DEVIATION}


def crop(size):
  """Return torchvision's random crop, bicubic, and a flip."""
  return common.inception_crop(
    size,
    area=(0.08, 1.0),
    method='torch',
    interpolation='bicubic',
    antialias=True,
  )


def rand_augment():
  """Return DeiT's RandAugment; pixels from outside have ImageNet's mean."""
  return common.augmentation(
    'rand_augment',
    policy='rand-m9-mstd0.5-inc1',
    interpolation='bicubic',
    fill=(124, 116, 104),
  )


def repeated():
  """Return the order of repeated augmentation."""
  return {'target': 'vit_jax.data.order.Repeated', 'times': 3}


def cosine(lr):
  """Return the schedule of DeiT's scripts."""
  return {'lr': lr, 'decay': 'cosine', 'end_lr': 1e-5, 'warmup_epochs': 5.0}

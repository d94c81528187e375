r"""DeiT III: pre-training on ImageNet or ImageNet-21k ("DeiT III: Revenge of
the ViT", Touvron et al., 2022).

    python -m vit_jax.main --config=configs/pretrain_deit3.py:imagenet,B/16 \
        --workdir=DIR

Then fine-tune it with finetune_deit3.py. Only S/16 on ImageNet is complete
without, at 224 px.

Arguments (separated by commas; the first of a list is the default):
  imagenet, imagenet21k   the data; see pretrain_imagenet21k.py for the latter
  S/16, M/16, B/16, L/16, H/14   the model
  epochs=EPOCHS   ImageNet 800; ImageNet-21k 240, H/14 90
  folder      instead of TFDS's imagenet2012, images in PATH/train/CLASS and
              PATH/val/CLASS: --config.data.source.path=PATH, or
              imagenet:PATH (its tar files), wds:FILES; see docs/data.md
  fsdp        shard parameters and optimizer state over all devices
  tensor=1    devices that share the heads and hidden units of each layer
  tiny        seconds on a CPU, on the same data

Published: top-1 in % on ImageNet's validation set after fine-tuning; of the
paper's models, and at 224 px of a JAX implementation (deit3-jax on GitHub):

                     epochs    S/16    M/16    B/16    L/16    H/14
    ImageNet, 224 px    800    81.4    83.0    83.8    84.9    85.2
              384 px    800    83.4       -    85.0    85.8       -
      deit3-jax         800   81.44       -   83.91       -       -
                        400    80.7       -    83.6   84.62   85.12
    ImageNet-21k, 224   240    83.1    84.5    85.7    87.0       -
                         90       -       -       -       -    87.2
              384 px    240    84.8       -    86.7    87.7       -
      deit3-jax         240   83.39       -   85.68       -       -
                         90   83.04       -   85.35   86.83   86.78

deit3-jax has a weight decay of 0.02 and a stochastic depth of 0, .1, .4 and .5
(S, B, L, H) for 400 epochs, and for 90 epochs of B/16 a learning rate of 3e-3:
epochs=400 with --config.optimizer.weight_decay=0.02 and
--config.model.stochastic_depth="(0.1,0.1)", epochs=90 with
--config.schedule.lr=3e-3. Its ImageNet-21k is the one of winter 2021, with
19,167 classes.

The commands of its README and its code, and here: batch 2048, 5 epochs of
warm-up, LAMB, cosine to 1e-5, no dropout, and

                             ImageNet                    ImageNet-21k
    learning rate            3e-3, S/16 4e-3             1e-3
    weight decay             0.05                        0.02
    px, S M B L H            224 224 192 192 154         224 224 224 224 126
    stochastic depth         .05 .1 .2 .45 .6            .05 .05 .1 .3 .5
    crop                     8 to 100% of an image       simple random crop
    repeated augmentation    3                           none
    mixup, CutMix            0.8, 1.0                    none, 1.0
    loss                     mean sigmoid cross-entropy  softmax, smoothing 0.1

Both have a flip, 3-Augment and colour jitter 0.3, and the mean and deviation of
ImageNet's pixels. A mixed image has both classes as targets of 1 for the
sigmoid cross-entropy. The model: LayerScale that starts at 1e-4 on both
branches, position embeddings of the patches only, to which the class token is
prepended, stochastic depth constant over depth, exact GELU, epsilon 1e-6 of
LayerNorms, a linear head, kernels from a normal distribution of 0.02. (That is
PyTorch's truncated one, which ends at -2 and 2.)

From deit3-jax: LAMB's epsilon of 1e-8 and clipping at norm 1; test images
(smaller side to the size of training, bicubic, cropped to a square); 154 and
126 px of H/14, which has 160 and 128 in the README: patches of 14 do not cover
the rest. See vit_jax.optim.optimizers.lamb for more details of LAMB.

Not known: the settings of M/16, which the README lacks. The stochastic depth,
224 px and 3e-3 are our choice.

Different here: the warm-up starts at 0 instead of 1e-6, and rates change with
each step instead of each epoch. The patch kernel is initialised like all others
(PyTorch's default has a deviation of 0.021); the class token starts at 0. The
query, key and value are one parameter of LAMB there. The script also has an
EMA, which it does not report. ImageNet-21k has 21,843 classes, and 51,200 of
its images are held out.

Precision: products in bfloat16; parameters, the gradients of kernels and their
sums over devices in float32 (--config.grad_dtype=bfloat16 rounds gradients).

If memory is short: --config.accum_steps=8 --config.model.remat=full
--config.model.scan=True, and the words fsdp and tensor=2. None of them changes
the result.
"""

from configs import arguments, common, pretrain_deit

SIZES = {  # px on ImageNet, ImageNet-21k; a multiple of the patches
  'S/16': (224, 224),
  'M/16': (224, 224),
  'B/16': (192, 224),
  'L/16': (192, 224),
  'H/14': (154, 126),
}
STOCHASTIC_DEPTH = {  # on ImageNet, ImageNet-21k
  'S/16': (0.05, 0.05),
  'M/16': (0.1, 0.05),
  'B/16': (0.2, 0.1),
  'L/16': (0.45, 0.3),
  'H/14': (0.6, 0.5),
}
DATA = ('imagenet', 'imagenet21k')


def get_config(argument=''):
  args = arguments.parse(
    argument,
    data=DATA,
    model=tuple(SIZES),
    epochs=float,
    folder=False,
    fsdp=False,
    tensor=1,
    tiny=False,
  )
  which = DATA.index(args.data)
  size = SIZES[args.model][which]
  config = common.training()
  config.model = transformer(args.model, STOCHASTIC_DEPTH[args.model][which])
  config.preprocess = pretrain_deit.normalize()
  if args.data == 'imagenet':
    epochs, loss = 800.0, 'sigmoid'
    source, held_out = common.imagenet(args.folder, minival=False)
    train_images = three_augment(pretrain_deit.crop(size))
    config.data = common.data(source, train_images, batch_size=2048)
    config.data.order = pretrain_deit.repeated()
    config.objective = common.mixed(common.bce(), mixup=0.8, cutmix=1.0)
    config.optimizer = lamb(weight_decay=0.05)
    lr = 4e-3 if args.model == 'S/16' else 3e-3
  else:
    if args.folder:
      raise ValueError("'folder' is for 'imagenet'.")
    epochs, loss = 90.0 if args.model == 'H/14' else 240.0, 'softmax'
    source, held_out = common.imagenet21k(args.tiny)
    config.model.num_classes = 21_843
    train_images = three_augment(simple_crop(size))
    config.data = common.data(source, train_images, batch_size=2048)
    config.objective = smoothed_cutmix()
    config.optimizer = lamb(weight_decay=0.02)
    lr = 1e-3
  config.total_epochs = args.epochs or epochs
  config.schedule = pretrain_deit.cosine(lr)
  config.evals = common.held_out_evals(
    config, held_out, test_images(size), loss=loss, every_steps=5000
  )
  common.split_over_devices(config, fsdp=args.fsdp, tensor=args.tensor)
  return common.tiny(config) if args.tiny else config


# Parts that finetune_deit3.py shares.


def transformer(name, stochastic_depth):
  """Return a model of DeiT III; the stochastic depth is that of each layer."""
  return pretrain_deit.transformer(
    name,
    block={'layerscale_init': 1e-4},
    posemb=common.posemb('Learned', prefix=False),
    stochastic_depth=(stochastic_depth, stochastic_depth),
  )


def simple_crop(size):
  """Return DeiT III's simple random crop, and a flip."""
  crop = common.transform('SimpleRandomCrop', size=size)
  return [crop, common.transform('FlipLR')]


def three_augment(crop):
  """Return the transforms with DeiT III's augmentation after them."""
  three, jitter = map(common.augmentation, ('ThreeAugment', 'ColorJitter'))
  return [*crop, three, jitter]


def test_images(size):
  """Return the test transforms."""
  return common.evaluation_images('timm', size, crop=1.0)


def smoothed_cutmix():
  """Return the softmax cross-entropy for smoothed labels, with CutMix."""
  return common.mixed(common.xent('softmax', label_smoothing=0.1), cutmix=1.0)


def lamb(*, weight_decay):
  """Return DeiT III's LAMB."""
  return {
    'target': 'vit_jax.optim.optimizers.lamb',
    'eps': 1e-8,
    'weight_decay': weight_decay,
    'clip_norm': 1.0,
  }

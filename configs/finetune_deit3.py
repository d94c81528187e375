r"""Fine-tuning on ImageNet as in DeiT III, after pretrain_deit3.py.

    python -m vit_jax.main --config=configs/finetune_deit3.py:imagenet,B/16 \
        --config.init_from.path=PRETRAINING_WORKDIR --workdir=DIR

or from the published weights, in timm's format:

        --config.init_from.path=hf://timm/deit3_base_patch16_224.fb_in1k

Arguments (separated by commas; the first of a list is the default):
  imagenet, imagenet21k   the data on which the weights were pre-trained
  S/16, M/16, B/16, L/16, H/14   the model, which must be that of the weights
  size=PX     224; for `imagenet` and S/16, which is trained at 224 px, 384
  epochs=EPOCHS   20 after ImageNet, 50 after ImageNet-21k
  layer_decay=RATE   multiply the learning rate of each layer by this, once for
              each layer after it; not in DeiT III. 0.65 to 0.75 is usual
  folder      instead of TFDS's imagenet2012, images in PATH/train/CLASS and
              PATH/val/CLASS: --config.data.source.path=PATH, or
              imagenet:PATH (its tar files), wds:FILES; see docs/data.md
  fsdp        shard parameters and optimizer state over all devices
  tensor=1    devices that share the heads and hidden units of each layer
  tiny        seconds on a CPU, for a checkpoint made with `tiny`

Published: the table in the docstring of pretrain_deit3.py.

The commands of its README, and here: 5 epochs of warm-up, softmax with label
smoothing 0.1, and

                        after ImageNet                after ImageNet-21k
    optimizer           AdamW                         LAMB
    learning rate       1e-5                          3e-4
    weight decay        0.1                           0.02
    batch               512                           2048
    stochastic depth    S .0, B .2, L .45, H .55      .05 .1 .15 .4 .45
    augmentation        RandAugment, random crop      3-Augment, simple crop
    mixup, CutMix       0.8, 1.0                      none, 1.0
    head                kept                          new

RandAugment is rand-m9-mstd0.5-inc1. The rate of the cosine ends at 1e-5, so the
first is constant after the warm-up. For 384 px after ImageNet-21k, apply
`imagenet,size=384` to the result of `imagenet21k`.

Not known: M/16, where the stochastic depth is our choice (0.1 in both); that of
S/16 at 224 px, which the README does not fine-tune.

Different here: position embeddings are interpolated by a cubic kernel with a =
-0.5, in PyTorch -0.75 (from memory); the new head starts at a normal
distribution of 0.02, as there; and what pretrain_deit3.py names. deit3-jax
instead keeps those rows of the head of ImageNet-21k that are classes of
ImageNet.

Precision: products in bfloat16; parameters, the gradients of kernels and their
sums over devices in float32 (--config.grad_dtype=bfloat16 rounds gradients).
"""

from configs import arguments, common, pretrain_deit, pretrain_deit3

STOCHASTIC_DEPTH = {  # after ImageNet, after ImageNet-21k
  'S/16': (0.0, 0.05),
  'M/16': (0.1, 0.1),
  'B/16': (0.2, 0.15),
  'L/16': (0.45, 0.4),
  'H/14': (0.55, 0.45),
}


def get_config(argument=''):
  args = arguments.parse(
    argument,
    data=pretrain_deit3.DATA,
    model=tuple(STOCHASTIC_DEPTH),
    size=int,
    epochs=float,
    layer_decay=float,
    folder=False,
    fsdp=False,
    tensor=1,
    tiny=False,
  )
  which = pretrain_deit3.DATA.index(args.data)
  same_classes = args.data == 'imagenet'
  size = args.size or (384 if args.model == 'S/16' and same_classes else 224)
  source, held_out = common.imagenet(args.folder, minival=False)
  config = common.training()
  config.init_from = {
    'path': common.placeholder(str),
    'head': 'keep' if same_classes else 'reset',
    'posemb_resize': 'bicubic_antialias',
  }
  config.model = pretrain_deit3.transformer(
    args.model, STOCHASTIC_DEPTH[args.model][which]
  )
  config.preprocess = pretrain_deit.normalize()
  if same_classes:
    epochs, lr = 20.0, 1e-5
    images = [*pretrain_deit.crop(size), pretrain_deit.rand_augment()]
    config.data = common.data(source, images, batch_size=512)
    inner = common.xent('softmax', label_smoothing=0.1)
    config.objective = common.mixed(inner, mixup=0.8, cutmix=1.0)
    config.optimizer = common.adam(weight_decay=0.1)
  else:
    epochs, lr = 50.0, 3e-4
    images = pretrain_deit3.three_augment(pretrain_deit3.simple_crop(size))
    config.data = common.data(source, images, batch_size=2048)
    config.objective = pretrain_deit3.smoothed_cutmix()
    config.optimizer = pretrain_deit3.lamb(weight_decay=0.02)
  if args.layer_decay:
    config.optimizer.layer_decay = {'rate': args.layer_decay}
  config.total_epochs = args.epochs or epochs
  config.schedule = pretrain_deit.cosine(lr)
  config.evals = common.held_out_evals(
    config, held_out, pretrain_deit3.test_images(size), every_fraction=0.1
  )
  common.split_over_devices(config, fsdp=args.fsdp, tensor=args.tensor)
  return common.tiny(config) if args.tiny else config

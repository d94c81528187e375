r"""BiT: ResNets on ImageNet (BiT-S) or ImageNet-21k (BiT-M), by its own recipe.

    python -m vit_jax.main --config=configs/pretrain_bit.py:imagenet21k,R50x1 \
        --workdir=DIR

Arguments (separated by commas; the first of a list is the default):
  imagenet, imagenet21k   the data: BiT-S, BiT-M; see pretrain_paper.py
  R50x1, R50x3, R101x1, R101x3, R152x2, R152x4   the model, in BiT's form; that
           of the ViT paper's released code is --config.model.form=postact
  epochs=90
  folder, tiny   see "Config options" in docs/training.md

Expected: top-1 in % after fine-tuning the released BiT-M like finetune.py's
`bit` (with mixup, at 480 px; CIFAR with batch 128 and rate 0.001), from the
README of the released code:

              ImageNet   CIFAR-10   CIFAR-100
    R50x1        80.68       97.3        86.4
    R152x2       85.15       98.5        91.2
    R101x3           -       98.4        91.2

The settings are those of "Big Transfer" (2020). From big_vision's configs
bit_i1k and bit_i21k: the loss and head bias; weight decay for kernels only;
crops, splits and test images. Different there: a cosine schedule, clipping at
norm 1, and for ImageNet a rate of 0.1 per 256 images and 1k steps of warm-up.
"""

from configs import arguments, common

MODELS = ('R50x1', 'R50x3', 'R101x1', 'R101x3', 'R152x2', 'R152x4')


def get_config(argument=''):
  args = arguments.parse(
    argument,
    ('folder', 'tiny'),
    data=('imagenet', 'imagenet21k'),
    model=MODELS,
    epochs=90.0,
  )
  loss = 'sigmoid' if args.data == 'imagenet21k' else 'softmax'
  config = common.pretraining(*common.splits(args), loss=loss)
  config.total_epochs = args.epochs
  config.model = common.model(args.model)
  if args.data == 'imagenet21k':
    config.model.update(num_classes=21_843, head={'bias_init': -10.0})
  config.objective = common.xent(loss)
  common.set_bit_sgd(config, milestones=(30 / 90, 60 / 90, 80 / 90))
  return common.finish(config, args)

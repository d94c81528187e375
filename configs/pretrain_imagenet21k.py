"""Pre-training on ImageNet-21k: the ImageNet-21k rows of the paper's table 3.

    python -m vit_jax.main --config=configs/pretrain_imagenet21k.py:L/16 \
        --workdir=DIR

Arguments (separated by commas; the first of a list is the default):
  L/16, L/32, B/16, B/32   the model
  epochs=90   table 3 has 90, and for the two L also 30
  fsdp        shard parameters, optimizer state and EMA over all devices
  tensor=1    devices that share the heads and hidden units of each layer
  tiny        seconds on a CPU, on the same data

TFDS has no public ImageNet-21k. Prepare a set yourself, named as in
big_vision's config: 'imagenet21k' (--config.data.source.name=NAME for another)
with one split, 'full', an 'image' and a 'label' below 21,843.

Expected (table 5): top-1 in % after fine-tuning at 384 px with finetune.py; the
paper does not state it before fine-tuning, nor how many epochs the L have. The
last line is table 2: ImageNet at 512 px with Polyak averaging.

           ImageNet   ReaL   CIFAR-10   CIFAR-100   Flowers    Pets
    B/16      83.97  88.35      98.95       91.67     99.38   94.43
    B/32      81.28  86.63      98.79       91.97     99.11   93.02
    L/16      85.15  88.40      99.16       93.44     99.61   94.73
    L/32      80.99  85.65      99.13       93.04     99.19   93.09
    L/16      85.30  88.62      99.15       93.25     99.61   94.67

Table 3 and section 4.1: Adam, batch 4096, learning rate 1e-3 with 10k steps of
warm-up and linear decay, weight decay 0.03, dropout 0.1, 224 px, a head with a
tanh layer; the paper mentions gradient clipping only for ImageNet.

Not in the paper:
- weight decay, crop and flip: see pretrain_imagenet.py.
- loss and head bias: sigmoid, -10, as in big_vision's config for this data.
- the split, 51,200 images kept for validation and test, and the test images
  (smaller side to 256 px, central 224): as in big_vision.

Precision: products in bfloat16; parameters, the gradients of kernels and their
sums over devices in float32 (--config.grad_dtype=bfloat16 rounds gradients).

If memory is short: --config.accum_steps=8 --config.model.remat=full
--config.model.scan=True, and the words fsdp and tensor=2. None of them changes
the result.
"""

from configs import arguments, common

MODELS = ('L/16', 'L/32', 'B/16', 'B/32')


def get_config(argument=''):
  args = arguments.parse(
    argument, model=MODELS, epochs=90.0, fsdp=False, tensor=1, tiny=False
  )
  source, held_out = common.imagenet21k(args.tiny)
  config = common.pretraining(
    args.model,
    source=source,
    num_classes=21_843,
    held_out=held_out,
    epochs=args.epochs,
    lr=1e-3,
    decay='linear',
    weight_decay=0.03,
    dropout=0.1,
  )
  common.split_over_devices(config, fsdp=args.fsdp, tensor=args.tensor)
  return common.tiny(config) if args.tiny else config

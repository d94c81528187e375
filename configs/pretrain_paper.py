r"""The paper's pre-training on ImageNet, ImageNet-21k or JFT-300M: table 3.

    python -m vit_jax.main --config=configs/pretrain_paper.py:imagenet,B/16 \
        --workdir=DIR
    python -m vit_jax.main --workdir=DIR \
        --config=configs/pretrain_paper.py:jft,L/16,name=my_set,classes=0

Arguments (separated by commas; the first of a list is the default):
  imagenet, imagenet21k, jft   the data
  B/16, B/32, L/16, L/32, H/14   the model; H/14 not on imagenet21k
  R50+B/16, R50+B/32, R50+L/16, R50+L/32   hybrids, on jft
  R50x1, R50x2, R101x1, R152x1, R152x2, R200x3   BiT's ResNets, on jft
  sgd            for a ResNet: table 7's SGD instead of Adam
  name=jft, classes=18291   of jft: the TFDS data set and its number of classes;
                 0 for as many as the data set says it has
  epochs=EPOCHS, lr=RATE   replace table 3's. The paper has no rate of R200x3
  folder, fsdp, tensor=1, tiny   see "Config options" in docs/training.md

TFDS has no public ImageNet-21k. Prepare a set named 'imagenet21k' with one
split, 'full', an 'image' and a 'label' below 21,843. JFT is not public: a large
set of your own needs a split 'train' (its first 50,000 images are kept for
validation), an 'image' and a 'label', an int or one weight for each class.

Expected: top-1 in % after fine-tuning at 384 px with finetune.py (tables 5 and
6 in published.py), such as 77.91 for B/16 on imagenet, 85.15 for L/16 on
imagenet21k, 88.08 for H/14 on jft. The paper has no numbers before fine-tuning.

Where table 3 has two numbers of epochs, the larger is the default. Not in the
paper: sigmoid loss and head bias, as in scenic's ViT baselines (which reach
73.7 with B/16 after 90 epochs) and big_vision; decoupled weight decay of
kernels only, splits and test images, as in big_vision; inception crop and flip,
which AugReg states for its own ViTs; label smoothing (here 0); clipping, except
for ImageNet; the SGD of table 7, here BiT's, see pretrain_bit.py. BiT trains 40
epochs on JFT, and its rate falls to a tenth at epochs 10, 23, 30 and 37; the
same fractions of 7 epochs are our choice.
"""

from configs import arguments, common

VITS = ('B/16', 'B/32', 'L/16', 'L/32', 'H/14')
TABLE_3 = {  # {data: {model: (learning rate, epochs)}}
  'imagenet': dict.fromkeys(VITS, (3e-3, 300)),
  'imagenet21k': dict.fromkeys(VITS[:-1], (1e-3, 90)),
  'jft': {
    'B/16': (8e-4, 7),
    'B/32': (8e-4, 7),
    'L/16': (4e-4, 14),
    'L/32': (6e-4, 7),
    'H/14': (3e-4, 14),
    'R50+B/16': (8e-4, 7),
    'R50+B/32': (8e-4, 7),
    'R50+L/16': (4e-4, 14),
    'R50+L/32': (2e-4, 7),
    'R50x1': (1e-3, 7),
    'R50x2': (1e-3, 7),
    'R101x1': (8e-4, 7),
    'R152x1': (6e-4, 7),
    'R152x2': (6e-4, 7),
    'R200x3': (None, 14),  # table 6
  },
}
REGULARISATION = {  # decay, weight decay, dropout, clipping; classes
  'imagenet': ('cosine', 0.3, 0.1, 1.0, None),
  'imagenet21k': ('linear', 0.03, 0.1, None, 21_843),
  'jft': ('linear', 0.1, 0.0, None, None),
}
BIT_L_MILESTONES = tuple(epoch / 40 for epoch in (10, 23, 30, 37))


def get_config(argument=''):
  args = arguments.parse(
    argument,
    ('sgd', 'folder', 'fsdp', 'tiny'),
    data=tuple(TABLE_3),
    model=tuple(TABLE_3['jft']),
    name='jft',
    classes=18_291,
    epochs=float,
    lr=float,
    tensor=1,
  )
  known = TABLE_3[args.data]
  if args.model not in known:
    raise ValueError(
      f'{args.model} is not in table 3 for {args.data!r}. Use one of '
      f'{", ".join(known)}.'
    )
  is_resnet = 'x' in args.model
  if args.sgd and not is_resnet:
    raise ValueError(f"'sgd' is for ResNets (table 7), not for {args.model}.")
  lr, epochs = known[args.model]
  lr = args.lr or lr
  if lr is None and not args.sgd:
    raise ValueError(
      f'The paper does not state the learning rate of {args.model}. Give one, '
      'lr=RATE; table 3 has 1e-3 for R50x2 and 6e-4 for R152x2.'
    )
  decay, weight_decay, dropout, clip_norm, classes = REGULARISATION[args.data]
  config = common.pretraining(*common.splits(args), loss='sigmoid')
  config.total_epochs = float(args.epochs or epochs)
  config.model = common.model(args.model, head={'bias_init': -10.0})
  if classes := args.classes if args.data == 'jft' else classes:
    config.model.num_classes = classes
  if not is_resnet:
    config.model.head.representation_size = config.model.width  # tanh layer
    config.model.dropout = dropout
  config.objective = common.xent('sigmoid')
  config.optimizer = common.adam(weight_decay=weight_decay, clip_norm=clip_norm)
  config.schedule = {'lr': lr, 'decay': decay, 'warmup_steps': 10_000}
  if args.sgd:
    common.set_bit_sgd(config, milestones=BIT_L_MILESTONES, lr=args.lr)
  return common.finish(config, args)

r"""DeiT with a distillation token, on ImageNet ("Training data-efficient image
transformers & distillation through attention", Touvron et al., 2021).

    python -m vit_jax.main --config=configs/distill_deit.py:S/16 \
        --config.objective.teacher.path=WEIGHTS --workdir=DIR

WEIGHTS is a workdir or a file of any format, with the 1000 classes of ImageNet.

Arguments (separated by commas; the first of a list is the default):
  S/16, Ti/16, B/16   the student
  soft        the teacher's probabilities instead of its most probable class
  epochs=300
  folder      instead of TFDS's imagenet2012, images in PATH/train/CLASS and
              PATH/val/CLASS: --config.data.source.path=PATH, or
              imagenet:PATH (its tar files), wds:FILES; see docs/data.md
  tiny        seconds on a CPU, on the same data

Published: top-1 in % on the validation set at 224 px, without and with
distillation by a RegNetY-16GF (82.9, from memory), which this project does not
have:

              Ti/16   S/16   B/16
    DeiT       72.2   79.9   81.8
    distilled  74.5   81.2   83.4

LEFT OUT: RandAugment, colour jitter, random erasing, mixup and CutMix. Without
them expect less. Mixing has to be outside of the distillation, so that teacher
and student see the same mixed images.

DeiT's script: AdamW, learning rate 5e-4 per 512 images, weight decay 0.05, 5
epochs of warm-up, cosine decay, stochastic depth 0.1, label smoothing 0.1, EMA
of 0.99996, repeated augmentation (3), exact GELU. Batch 1024 and the form of
the stochastic depth are from memory; so are the settings of the distillation:
hard labels and weight 0.5, or soft ones, temperature 3 and weight 0.1.

Differences: the warm-up starts at 0 instead of 1e-6; the cosine ends at 0;
weight decay is for kernels only (DeiT excludes biases, norms, tokens and
positions); the initialisation is that of this project instead of a truncated
normal of 0.02. Trained on 99% of train; 'minival' is the rest. Test images:
smaller side to 256 px, central 224.
"""

from configs import arguments, common

MODELS = ('S/16', 'Ti/16', 'B/16')


def get_config(argument=''):
  args = arguments.parse(
    argument, model=MODELS, soft=False, epochs=300.0, folder=False, tiny=False
  )
  source, held_out = common.imagenet(args.folder)
  config = common.training()
  config.total_epochs = args.epochs
  config.model = common.model(
    args.model,
    pooling=common.pooling('DistillationToken'),
    block={'gelu': 'exact'},
    stochastic_depth=0.1,
  )
  config.data = common.data(source, common.inception_crop(224), batch_size=1024)
  config.data.order = {'target': 'vit_jax.data.order.Repeated', 'times': 3}
  inner = common.xent('softmax', label_smoothing=0.1)
  how = {'kind': 'hard', 'weight': 0.5}
  if args.soft:
    how = {'kind': 'soft', 'weight': 0.1, 'temperature': 3.0}
  config.objective = common.distillation(inner, **how)
  config.optimizer = common.adam(weight_decay=0.05)
  config.schedule = {
    'lr': 1e-3,
    'decay': 'cosine',
    'warmup_fraction': 5 / args.epochs,
  }
  config.ema_decay = 0.99996
  config.evals = common.held_out_evals(
    config, held_out, common.resize_crop(256, 224), every_steps=5000
  )
  return common.tiny(config) if args.tiny else config

r"""Pre-training on JFT-3B as in "Scaling Vision Transformers" (Zhai et al.,
2021), also of SoViT-400m ("Getting ViT in Shape", 2023).

    python -m vit_jax.main --workdir=DIR \
        --config=configs/pretrain_scaling_vit.py:G/14,fsdp,name=my_set,classes=0

JFT-3B is not public; a set of your own needs what pretrain_paper.py says.

Arguments (separated by commas; the first of a list is the default):
  G/14, g/14, So400m/14, L/16, B/16, B/32, S/16, S/32, Ti/16   the model
  name=jft_3b, classes=29593   the TFDS data set and its number of classes; 0
                for as many as the data set says it has
  epochs=EPOCHS   instead of 1M steps, or 40 billion examples of So400m/14
  fsdp, tensor=1, tiny   see "Config options" in docs/training.md. The number
                of shards should divide the model's width (G/14: 128 shards)

Published: top-1 in % on ImageNet after fine-tuning, and of a linear regression
with 10 images per class at 224 px (abstract of "Scaling ViT"; tables 1 and 3 of
SoViT's paper):

                           px    ImageNet   ReaL     V2    10-shot
    L/16                  384        88.5   90.4   80.4       81.5
    So400m/14             224        88.9   90.3   80.7       84.1
                          384        90.0   90.9   83.2
                          518        90.3   91.0   83.4
    g/14                  518        90.2   90.9      -       84.0
    G/14                  518       90.45   90.8   83.3      84.86

The settings are those of big_vision's train_vit_g.py, which is for g/14 and
G/14; SoViT's paper has the same (table 5). Its fine-tuning (table 8) is, except
for RandAugment (2, 10), mixup 0.2 and a sigmoid loss, finetune.py with the
words imagenet,size=518,lr=0.03, --config.optimizer.layer_decay.rate=0.9 and
--config.total_steps=50000. Not known: the batch of So400m/14, here 16,384, and
the settings of the smaller models. Different here: the data and its split;
position embeddings start at a deviation of 0.02, 1 / sqrt(width) in big_vision.
"""

from configs import arguments, common

MODELS = (
  *('G/14', 'g/14', 'So400m/14'),
  *('L/16', 'B/16', 'B/32', 'S/16', 'S/32', 'Ti/16'),
)


def get_config(argument=''):
  args = arguments.parse(
    argument,
    ('fsdp', 'tiny'),
    model=MODELS,
    name='jft_3b',
    classes=29_593,
    epochs=float,
    tensor=1,
  )
  config = common.pretraining(
    *common.splits(args, 'jft_3b'), batch_size=16_384, loss='sigmoid'
  )
  if args.epochs:
    config.total_epochs = args.epochs
  elif args.model == 'So400m/14':
    config.total_examples = 40_000_000_000
  else:
    config.total_steps = 1_000_000
  pooling = common.make('models.pooling.Map')
  config.model = common.model(
    args.model, pooling=pooling, head={'bias_init': -10.0}
  )
  if args.classes:
    config.model.num_classes = args.classes
  config.objective = common.xent('sigmoid')
  config.optimizer = common.make(
    'optim.optimizers.adafactor',
    weight_decay=0.03,
    decay_multipliers=(('head/.*', 100.0),),
    clip_norm=1.0,
  )
  config.schedule = {'lr': 8e-4, 'decay': 'rsqrt', 'timescale': 10_000}
  config.schedule.update(warmup_steps=10_000, cooldown_steps=50_000)
  for evaluator in config.evals.values():
    evaluator.data.batch_size = 4096
  return common.finish(config, args)

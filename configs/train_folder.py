r"""Training from scratch on your own images, in PATH/CLASS/*.jpg.

    python -m vit_jax.main --config=configs/train_folder.py \
        --config.data.source.path=PATH --workdir=DIR

docs/data.md lists what else PATH can be. If there are weights to start from,
configs/finetune.py:folder is better: with some hundred images per class a model
from scratch stays far behind a fine-tuned one.

Arguments (separated by commas; the first of a list is the default):
  Ti/16, ...  the model, one of MODELS of finetune.py
  size=128   pixels, a multiple of the patches. 224 is usual on a GPU
  epochs=100 visits of each image, or of as many images with `balanced`
  held_out=10   percent of each class that is not trained on but tested
  balanced, class_weights   as in finetune.py
  lr=1e-3    peak learning rate
  tiny       seconds on a CPU, to try out the data

The recipe, ours for small data sets, has parts of pretrain_better_plain.py. An
image that cannot be read stops the run with its name; to skip such images add
--config.data.on_error=skip
"""

from configs import arguments, common, finetune

MODELS = ('Ti/16', *(x for x in finetune.MODELS if x != 'Ti/16'))


def get_config(argument=''):
  args = arguments.parse(
    argument,
    ('balanced', 'class_weights', 'tiny'),
    model=MODELS,
    size=128,
    epochs=100.0,
    held_out=10,
    lr=1e-3,
  )
  config = common.training()
  config.total_epochs = args.epochs
  config.model = common.model(args.model)
  if 'num_heads' in config.model:  # ViTs and hybrids
    config.model.pooling = common.make('models.pooling.Mean')
    config.model.posemb = common.make('models.posemb.SinCos2d')
  source, held_out = common.own_classes(args.held_out)
  images = common.inception_crop(args.size, area=(0.25, 1.0), antialias=True)
  config.data = common.data(source, images, batch_size=64)
  config.objective = common.xent('softmax', label_smoothing=0.1)
  config.optimizer = common.adam(weight_decay=0.05, clip_norm=1.0)
  config.schedule = {'lr': args.lr, 'decay': 'cosine', 'warmup_fraction': 0.1}
  common.balance(config, args)
  test = common.resize(args.size, antialias=True)
  config.evals = common.held_out_evals(
    config, held_out, test, every_fraction=0.1
  )
  return common.finish(config, args)

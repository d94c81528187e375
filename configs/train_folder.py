r"""Training from scratch on your own images, in PATH/CLASS/*.jpg.

    python -m vit_jax.main --config=configs/train_folder.py \
        --config.data.source.path=PATH --workdir=DIR

docs/data.md lists what else PATH can be. If there are weights to start from,
configs/finetune.py:folder is better: with some hundred images per class a model
from scratch stays far behind a fine-tuned one.

Arguments (separated by commas; the first of a list is the default):
  stem, Ti/16, ...  the model: a convolutional stem and two layers, for up to
             some ten thousand images, which cannot be converted to timm, but to
             StableHLO; or one of MODELS of finetune.py
  size=160   pixels, a multiple of the patches (32 for `stem`)
  max_patches=N   instead of a size: images keep their aspect ratio, and have
             up to N patches; for models such as Ti/16
  epochs=30  visits of each image
  held_out=10   percent of each class that is not trained on but tested
  balanced, class_weights   as in finetune.py; by default classes are visited in
             proportion to the square root of their size
  channels=13   files of so many channels and of any depth (TIFF, PNG, NPY,
             DICOM), in their own values, see vit_jax/data/rasters.py
  labels=a+b, number=age, order=0<1<2   other labels than one class, see
             labels.py
  lr=RATE    peak learning rate; 4e-3 for `stem`, 1e-3 for other models
  tiny       seconds on a CPU, to try out the data

The recipe is ours; docs/photographs.md has what it reaches with some thousand
photographs, and what each part of it gives. An image that cannot be read stops
the run with its name; to skip such images add --config.data.on_error=skip
"""

from configs import arguments, common, finetune, labels
from vit_jax.zoo import names

MODELS = ('stem', 'Ti/16', *(x for x in finetune.MODELS if x != 'Ti/16'))


def get_config(argument=''):
  args = arguments.parse(
    argument,
    ('balanced', 'class_weights', 'tiny'),
    model=MODELS,
    size=160,
    max_patches=int,
    channels=int,
    epochs=30.0,
    held_out=10,
    lr=float,
    **labels.OPTIONS,
  )
  config = common.training()
  config.total_epochs = args.epochs
  config.model = model(args.model)
  source, held_out = labels.held_out(args.held_out, args)
  images = common.inception_crop(args.size, area=(0.6, 1.0), antialias=True)
  config.data = common.data(source, images, batch_size=32)
  if not args.class_weights:
    config.data.order = common.make('data.order.Balanced', power=0.5)
  config.objective = common.xent('softmax')
  config.optimizer = common.make(
    'optim.optimizers.muon', weight_decay=0.05, clip_norm=1.0
  )
  lr = args.lr or (4e-3 if args.model == 'stem' else 1e-3)
  config.schedule = {'lr': lr, 'decay': 'cosine', 'warmup_fraction': 0.1}
  test = common.resize(args.size, antialias=True)
  if args.max_patches:
    if args.model == 'stem':
      raise ValueError("max_patches needs another model, such as 'Ti/16'.")
    keep = {'max_patches': args.max_patches}
    keep['patch_size'] = config.model.embedding.patch_size[0]
    keep = common.make('data.transforms.KeepAspect', **keep)
    config.data.transforms = [images[1], keep | {'area': (0.6, 1.0)}]
    test = [keep]
  config.evals = common.held_out_evals(
    config, held_out, test, every_fraction=0.1
  )
  if args.channels:
    common.use_rasters(config, args.channels)
  labels.learn(config, args)
  return common.finish(config, args)


def model(name):
  """Return the settings of the model with that name."""
  if name == 'stem':
    found = {
      'target': names.VIT,
      'width': 128,
      'depth': 2,
      'mlp_dim': 512,
      'num_heads': 4,
      'embedding': common.make(
        'models.stem.ConvStem', patch_size=(1, 1), widths=(32, 48, 96, 128)
      ),
    }
  else:
    found = common.model(name)
  if 'num_heads' in found:  # ViTs and hybrids
    found['pooling'] = common.make('models.pooling.Mean')
    found['posemb'] = common.make('models.posemb.SinCos2d')
  return found

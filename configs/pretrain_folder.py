r"""Pre-training on your own images without labels: LeJEPA, DINO or MAE.

    python -m vit_jax.main --config=configs/pretrain_folder.py:lejepa,S/16 \
        --config.data.source.path=PATH --workdir=DIR

takes all images below PATH (docs/data.md lists what else PATH can be). Then DIR
is the path of weights for configs/finetune.py:folder, configs/fewshot.py,
`python -m vit_jax.tools.predict --features`, and all else that reads weights.
DIR/report.html shows the crops or reconstructions, patches in colours, the
nearest neighbours of ten images, and curves: the loss, and the rank and spread
of the representation, which fall if it collapses.

Arguments (separated by commas; the first of a list is the default):
  lejepa     crops of an image agree, and all images are spread out; no teacher
  dino       crops of an image agree with a teacher, the EMA of the student
  mae        the pixels of hidden patches are predicted: one view, and a good
             start for fine-tuning, but the worst features without it
  visreg, simdino   other losses of lejepa and dino
  S/16, ...  the model, one of MODELS; or from_weights: continue from the model
             and weights of --config.init_from.path, in any format
  size=224   pixels of the large crops
  local=96   pixels of the small crops, a multiple of the patches (98 for 14)
  epochs=200 visits of each image
  batch=128  images
  lr=RATE    the defaults are below
  labels     PATH/CLASS/IMAGE: a tenth of each class is held out, and nearest
             neighbours and a linear classifier predict its classes
  imagenet   the published settings for ImageNet-1k instead, see below
  folder     of `imagenet`: PATH/train/CLASS and PATH/val/CLASS, not TFDS
  tiny       seconds on a CPU, to try out the data

Settings, for both: mae has rates of 1.5e-4 per 256 images, AdamW with b2 0.95
and weight decay 0.05, 5% of warm-up; dino 5e-4 per 256 images, weight decay
from 0.04 to 0.4, clipping at norm 3, 10% of warm-up; lejepa 5e-4, weight decay
0.05, 5% of warm-up; dino and lejepa have stochastic depth 0.1. A teacher of
small batches changes more slowly (momentum 0.9995), as its authors advise.

With such settings, without tuning, ViT-S/16 reached on Imagenette (9,469 images
of 224 px, 200 epochs; linear / 20 nearest neighbours, %): VISReg 90.2 / 86.5,
LeJEPA 87.1 / 85.4, DINO 86.1 / 83.8, MAE 84.1 / 72.1 (stable-pretraining's
benchmark). With 500 images expect much less.

`imagenet`: mae is B/16 in batches of 4,096 for 800 epochs, fine-tuned 83.6%
(from memory of the paper); dino S/16 in batches of 1,024 for 100 epochs: 74.0%
linear, 69.3% kNN (300 epochs: 76.0, 73.3); simdino B/16, 100 epochs: 77.3%
linear; lejepa S/16 in batches of 512 for 100 epochs: 64.0% linear, by lightly
(its authors have not published their settings).
"""

from configs import arguments, common, finetune

MODELS = ('S/16', 'from_weights', 'Ti/16', 'B/16', 'L/16', 'H/14')
METHODS = ('lejepa', 'dino', 'mae', 'visreg', 'simdino')
IMAGENET = {  # images in a batch, epochs
  'mae': (4096, 800.0),
  'dino': (1024, 100.0),
  'lejepa': (512, 100.0),
}
TINY = {
  'mae': {'decoder': {'width': 32, 'depth': 1, 'num_heads': 2}},
  'dino': {'head': {'hidden': 32, 'bottleneck': 16, 'outputs': 64}},
  'lejepa': {'projector': {'embedding': 32, 'hidden': (64,)}},
}
FAMILY = {'visreg': 'lejepa', 'simdino': 'dino'}


def get_config(argument=''):
  args = arguments.parse(
    argument,
    ('labels', 'imagenet', 'folder', 'tiny'),
    method=METHODS,
    model=MODELS,
    size=224,
    local=int,
    epochs=float,
    batch=int,
    lr=float,
  )
  family = FAMILY.get(args.method, args.method)
  unused = {
    'local': args.local and family == 'mae',
    'labels': args.labels and args.imagenet,
    'folder': args.folder and not args.imagenet,
  }
  for word in filter(unused.get, unused):
    raise ValueError(f'{word!r} does not go with the other words.')
  batch, epochs = IMAGENET[family] if args.imagenet else (128, 200.0)
  batch, epochs = args.batch or batch, args.epochs or epochs
  config = common.training()
  config.total_epochs = epochs
  source, held_out = sources(args)
  config.data = common.data(source, (), batch_size=batch)
  config.data.labels = False
  if args.model == 'from_weights':
    config.init_from = {'path': common.placeholder(str)}
    config.model = finetune.follow(config, args.model) | {'num_classes': 0}
    config.preprocess = finetune.follow(config, 'preprocess')
  else:
    config.model = common.model(args.model, num_classes=0)
  SETTINGS[family](config, args)
  if args.tiny:
    config.objective.update(TINY[family])
  if args.lr:
    config.schedule.lr = args.lr
  config.evals = evaluators(config, args, held_out)
  return common.finish(config, args)


def sources(args):
  """Return the training images, and the splits that labels are tested on."""
  if args.imagenet:
    source, held_out = common.splits(args, 'imagenet', minival=False)
    return source, held_out['val']
  if args.labels:
    source, held_out = common.own_classes(10)
    return source, held_out['test']
  return common.own_images('[:]', channels=3, classes=False), None


def mae(config, args):
  crop = common.inception_crop(
    args.size, area=(0.2, 1.0), interpolation='bicubic', antialias=True
  )
  config.data.transforms = crop
  config.objective = common.make('objectives.mae.Mae')
  config.optimizer = common.adam(b2=0.95, weight_decay=0.05)
  schedule(config, 1.5e-4 * config.data.batch_size / 256, 0.05)
  if args.model != 'from_weights':
    config.model.posemb = common.make('models.posemb.SinCos2d')


def dino(config, args):
  crop(config, args, (0.4, 1.0), 8, (0.05, 0.4))
  name = {'dino': 'Dino', 'simdino': 'SimDino'}[args.method]
  config.objective = common.make(f'objectives.dino.{name}')
  if config.data.batch_size < 512:
    config.objective.momentum = 0.9995
  config.optimizer = common.adam(weight_decay=0.04, clip_norm=3.0)
  config.optimizer.final_weight_decay = 0.4
  schedule(config, 5e-4 * config.data.batch_size / 256, 0.1, end_lr=1e-6)
  mask = ('(.*/)?kernel', 'cls', '.*pos_embedding')
  config.optimizer.decay_mask = mask  # all but biases and norms
  if args.model != 'from_weights':
    posemb = common.make('models.posemb.Learned', resize_method='dinov2_offset')
    config.model.posemb = posemb
  if args.method == 'dino':
    config.objective.teacher_temperature = 0.07
    head = {'norm_last_layer': not args.model.startswith('S')}
    config.objective.update(head=head, teacher_warmup_fraction=0.3)


def lejepa(config, args):
  crop(config, args, (0.3, 1.0), 6, (0.05, 0.3))
  regularizer = common.make('objectives.lejepa.Visreg')
  if args.method == 'lejepa':  # its weight is for batches of 256
    weight = min(0.5, 0.02 * 256 / config.data.batch_size)
    regularizer = common.make('objectives.lejepa.Sigreg', weight=weight)
  config.objective = common.make('objectives.lejepa.LeJepa')
  config.objective.regularizer = regularizer
  config.optimizer = common.adam(weight_decay=0.05)
  schedule(config, 5e-4, 0.05, end_lr=5e-7)


SETTINGS = {x.__name__: x for x in (mae, dino, lejepa)}


def schedule(config, lr, warmup, **fields):
  fields |= {'lr': lr, 'decay': 'cosine', 'warmup_fraction': warmup}
  config.schedule = fields


def crop(config, args, area, local_count, local_area):
  """Cut two large crops of each image, and small ones."""
  crops = {'size': args.size, 'area': area, 'local_size': args.local or 96}
  crops |= {'local_count': local_count, 'local_area': local_area}
  crops = common.make('data.transforms.MultiCrop', **crops)
  config.data.transforms = (crops,)
  if args.model != 'from_weights':
    config.model.stochastic_depth = 0.1


def evaluators(config, args, held_out):
  """Return what watches the run: without labels, and with them."""
  test = common.resize_crop(args.size)
  source = common.references(config.data.source)

  def images(split):
    split = {} if split is None else {'split': split}
    batch_size = min(256, config.data.batch_size)
    return common.data(source | split, test, batch_size=batch_size)

  some = held_out if args.labels else f'{held_out or ""}[:2048]'
  watch = common.make('evals.representation.Representation')
  evals = {'watch': watch | {'data': images(some), 'every_fraction': 0.05}}
  if held_out:
    data = {'own': {'train': images(None), 'test': images(held_out)}}
    readouts = {
      'knn': common.make('evals.knn.Knn', k=(20,)),
      'linear': common.make('evals.logistic.Logistic', C=(1e-2, 1.0)),
    }
    evals['labels'] = common.frozen(data, readouts, every_fraction=0.25)
  return evals

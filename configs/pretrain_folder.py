r"""Pre-training on your own images without labels: LeJEPA, DINO, MAE, others.

    python -m vit_jax.main --config=configs/pretrain_folder.py:lejepa,S/16 \
        --config.data.source.path=PATH --workdir=DIR

takes all images below PATH (docs/data.md lists what else PATH can be). Then DIR
is the path of weights for configs/finetune.py:folder, configs/fewshot.py,
`python -m vit_jax.tools.predict --features`, and all else that reads weights.
DIR/report.html shows the crops or reconstructions, patches in colours, the
nearest neighbours of ten images, and curves: the loss, and the rank and spread
of the representation, which fall if it collapses.

Arguments (separated by commas; the first of a list is the default):
{words}
  S/16, ...  the model, one of MODELS; or from_weights: continue from the model
             and weights of --config.init_from.path, in any format. The heads
             are new, and are trained alone in the first half of the warm-up.
             The rate is a tenth of that of METHODS, and constant after it. Or
             stem: the small model of train_folder.py, with sizes that are
             multiples of 32, not with mae, dinov2 and dinov3
  size=224   pixels of the large crops
  local=96   pixels of the small crops, a multiple of the patches; 98 for H/14
  epochs=200 visits of each image
  batch=128  images
  lr=RATE    the defaults are those of METHODS
  guide=KEY, forget=KEY  a column of the table (data.source.csv) whose classes
             the representation follows, or forgets, see objectives/guides.py;
             not with mae
  anchor     with from_weights, not with mae: the patches of an image stay about
             as alike as the weights see them, see objectives/anchor.py
  labels     PATH/CLASS/IMAGE: a tenth of each class is held out, and nearest
             neighbours and a linear classifier predict its classes
  patches    images with masks of their own judge the patches, as in evaluate.py
  imagenet   the published settings for ImageNet-1k, see self_supervised.md
  folder     with `imagenet`: PATH/train/CLASS and PATH/val/CLASS, not TFDS
  tiny       a minute on a CPU, most of it to compile, to try out the data

The teacher of small batches changes more slowly (momentum 0.9995), as the
authors of DINO advise. What METHODS says of results was published: on
Imagenette (9,469 images of 224 px) after 200 epochs of ViT-S/16, without
tuning, by stable-pretraining; with 500 images expect much less.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from configs import arguments, common, finetune, labels, train_folder

VITS = ('Ti/16', 'B/16', 'L/16', 'L/14', 'H/14')
MODELS = ('S/16', 'from_weights', 'stem', *VITS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
  """A way of learning without labels, in all that names it."""

  learns: str  # what is learned
  step: str  # and from which images
  imagenette: str = ''  # published results, see above; '': none
  on_imagenet: str = ''
  objective: Mapping[str, Any]
  tiny: Mapping[str, Any]  # more arguments of the objective, for `tiny`
  # Changes what batch and model decide.
  fit: Callable[[Any, str], None] = lambda config, model: None
  # Arguments of MultiCrop; None: one crop, of 0.2 to 1 of the area.
  crops: Mapping[str, Any] | None = None
  posemb: Mapping[str, Any] | None = None  # None: that of the model
  optimizer: Mapping[str, Any]
  schedule: Mapping[str, Any]  # its lr is for 256 images if `scaled`
  scaled: bool = True
  warmup: tuple[float, float] = (0.1, 10.0)  # fraction; epochs with `imagenet`
  # Default model, images in a batch, and epochs.
  run: tuple[str, int, float] = ('S/16', 128, 200.0)
  imagenet: Mapping[str, Any]  # attributes that `imagenet` replaces


def slow_teacher(config, model):
  if config.data.batch_size < 512:
    config.objective.momentum = 0.9995


def warm_teacher(config):
  (warmup,) = (x for x in config.schedule if x.startswith('warmup'))
  config.objective[f'teacher_{warmup}'] = 3 * config.schedule[warmup]


def dino_of_batch(config, model):
  slow_teacher(config, model)
  last = 'lengths' if model.startswith('S') else 'unit'
  config.objective.head = {'last_layer': last}
  warm_teacher(config)


def dinov2_of_batch(config, model):
  """Scale the rate, and add a mask vector, to new models also LayerScale."""
  slow_teacher(config, model)
  warm_teacher(config)
  config.schedule.lr *= math.sqrt(config.data.batch_size / 1024)
  config.model.update(embedding={'mask_token': True})
  if model != 'from_weights':
    config.model.update(block={'layerscale_init': 1e-5})
  if model.startswith('L'):
    del config.model.stochastic_depth  # a tuple cannot replace a number
    config.model.stochastic_depth = 0.3, 0.3  # the same in all layers


def sigreg_of_batch(config, model):
  """Set the weight, which is for batches of 256."""
  weight = min(0.5, 0.02 * 256 / config.data.batch_size)
  regularizer = common.make('objectives.lejepa.Sigreg', weight=weight)
  config.objective.regularizer = regularizer


# All but biases and norms, as in the released codes; `length`: their weight_g.
DECAYED = ('(.*/)?(kernel|length|cls|mask|.*pos_embedding)',)
WIDE = common.make(  # most runs in scripts/launch_*.md of LeJEPA's repository
  'objectives.lejepa.LeJepa',
  projector={'outputs': 512},
  regularizer=common.make('objectives.lejepa.Sigreg', weight=0.05, slices=1000),
)
LEJEPA = Method(
  learns='crops of an image agree, and all images are spread out normally',
  step='2 large and 6 small crops',
  imagenette='87.1% linear, 85.4% kNN',
  on_imagenet='ViT-L: 79.5%, the mean of eight other data sets',
  objective=common.make('objectives.lejepa.LeJepa'),
  tiny={'projector': {'embedding': 32, 'hidden': (64,)}},
  fit=sigreg_of_batch,
  crops={'area': (0.3, 1.0), 'local_count': 6, 'local_area': (0.05, 0.3)},
  optimizer=common.adam(weight_decay=0.05),
  schedule={'lr': 5e-4, 'end_lr': 5e-7},
  scaled=False,
  warmup=(0.05, 5.0),
  imagenet={'run': ('L/14', 512, 100.0), 'fit': Method.fit, 'objective': WIDE},
)
DINO = Method(
  learns='crops agree with a teacher, the moving average of the student',
  step='2 large and 8 small crops, 2 of the teacher',
  imagenette='86.1%, 83.8%',
  on_imagenet='S/16: 76.0% linear, 73.3% kNN',
  objective=common.make('objectives.dino.Dino', teacher_temperature=0.07),
  tiny={'head': {'hidden': 32, 'bottleneck': 16, 'outputs': 64}},
  fit=dino_of_batch,
  crops={'area': (0.4, 1.0), 'local_count': 8, 'local_area': (0.05, 0.4)},
  posemb=common.make('models.posemb.Learned', resize_method='dinov2_offset'),
  optimizer=common.adam(
    weight_decay=0.04, final_weight_decay=0.4, clip_norm=3.0, decay_mask=DECAYED
  ),
  schedule={'lr': 5e-4, 'end_lr': 1e-6},
  imagenet={'run': ('S/16', 1024, 300.0)},
)
SELF_DISTILLATION = common.make(
  'objectives.dinov2.DinoV2', teacher_temperature=0.07, momentum=0.992
)
PATCHES_SLOWLY = (('embedding/.*', 0.2),)
SMALL_HEAD = {'outputs': 8192, 'last_layer': 'lengths'}  # our choice
LINEAR = {'last_layer': 'linear'}
TINY_HEAD = DINO.tiny['head']
DINOV2 = dataclasses.replace(
  DINO,
  learns='as dino, and hidden patches as its teacher sees them: for millions '
  'of images, stalls with ten thousand',
  step='as dino, with blocks of patches hidden in half of the large crops',
  imagenette='42.1% (not finished)',
  on_imagenet='L/16: 82.9% linear, 81.6% kNN',
  objective=SELF_DISTILLATION | {'head': SMALL_HEAD, 'patch_head': SMALL_HEAD},
  tiny={'head': TINY_HEAD, 'patch_head': TINY_HEAD},
  fit=dinov2_of_batch,
  crops={'area': (0.32, 1.0), 'local_count': 8, 'local_area': (0.05, 0.32)},
  optimizer=DINO.optimizer
  | {'layer_decay': {'rate': 0.9}, 'lr_multipliers': PATCHES_SLOWLY},
  schedule={'lr': 4e-3, 'end_lr': 1e-6},
  scaled=False,
  imagenet={
    # 100 times 1,250 steps, of which 10 times are warm-up, and prototypes are
    # frozen once.
    **{'run': ('L/16', 2048, 200.0), 'warmup': (0.1, 20.0)},
    'objective': SELF_DISTILLATION
    | {'freeze_last_layer_epochs': 2.0, 'patch_head': None}
    | {'centre': common.make('objectives.dino.Centre')},
  },
)
METHODS = {
  'lejepa': LEJEPA,
  'dino': DINO,
  'mae': Method(
    learns='the pixels of hidden patches: a good start for fine-tuning',
    step='a quarter of the patches, and a small decoder',
    imagenette='84.1%, 72.1%',
    on_imagenet='B/16: 83.6% fine-tuned',
    objective=common.make('objectives.mae.Mae'),
    tiny={'decoder': {'width': 32, 'depth': 1, 'num_heads': 2}},
    posemb=common.make('models.posemb.SinCos2d', endpoint=False),
    optimizer=common.adam(b2=0.95, weight_decay=0.05, decay_mask=DECAYED),
    schedule={'lr': 1.5e-4},
    warmup=(0.05, 40.0),
    imagenet={'run': ('B/16', 4096, 1600.0)},
  ),
  'visreg': dataclasses.replace(
    LEJEPA,
    learns='as lejepa, with a cheaper comparison with the normal distribution',
    imagenette='90.2%, 86.5%',
    on_imagenet='',
    objective=common.make(
      'objectives.lejepa.LeJepa',
      regularizer=common.make('objectives.lejepa.Visreg'),
    ),
    fit=Method.fit,
    imagenet={'run': ('S/16', 512, 100.0)},
  ),
  'dinov2': DINOV2,
  'dinov3': dataclasses.replace(
    DINOV2,
    learns='as dinov2, with rotary positions and other heads',
    step='as dinov2',
    imagenette='48.9% (not finished)',
    on_imagenet='L/16: 83.3% linear, 82.2% kNN',
    objective=SELF_DISTILLATION
    | {x: SMALL_HEAD | LINEAR for x in ('head', 'patch_head')},
    posemb=common.make('models.rotary.RotaryDino', rescale=1.0),
    schedule={'lr': 1e-3, 'end_lr': 1e-6},
    imagenet=DINOV2.imagenet
    | {
      'objective': SELF_DISTILLATION
      | {'freeze_last_layer_epochs': 2.0, 'head': LINEAR, 'patch_head': LINEAR}
    },
  ),
  'simdino': dataclasses.replace(
    DINO,
    learns='as dino, with a coding rate instead of prototypes and a centre',
    imagenette='',
    on_imagenet='B/16: 77.3% linear, 74.9% kNN',
    objective=common.make('objectives.dino.SimDino'),
    fit=slow_teacher,
    imagenet={
      'run': ('B/16', 512, 100.0),
      'crops': DINO.crops | {'local_count': 10},
    },
  ),
}


def table():
  """Return the rows of docs/self_supervised.md."""
  head = ' method | what is learned | one step | Imagenette | ImageNet '
  rows = [
    f' `{name}` | {x.learns} | {x.step} | {x.imagenette} | {x.on_imagenet} '
    for name, x in METHODS.items()
  ]
  return '\n'.join(f'|{row}|' for row in (head, '---|' * 4 + '---', *rows))


__doc__ = __doc__.replace(
  '{words}', '\n'.join(f'  {name:10} {x.learns}' for name, x in METHODS.items())
)


def get_config(argument=''):
  args = arguments.parse(
    argument,
    ('anchor', 'labels', 'patches', 'imagenet', 'folder', 'tiny'),
    method=tuple(METHODS),
    model=(None, *MODELS),
    size=224,
    local=int,
    epochs=float,
    batch=int,
    channels=int,
    lr=float,
    guide=str,
    forget=str,
  )
  method = METHODS[args.method]
  if args.imagenet:
    method = dataclasses.replace(method, **method.imagenet)
  model, batch, epochs = method.run
  args.model, batch = args.model or model, args.batch or batch
  unused = {
    'anchor': args.anchor
    and not (args.model == 'from_weights' and method.crops),
    'local': args.local and not method.crops,
    'guide': args.guide and not method.crops,
    'forget': args.forget and (not method.crops or args.forget == args.guide),
    'labels': args.labels and args.imagenet,
    'folder': args.folder and not args.imagenet,
  }
  for word in filter(unused.get, unused):
    raise ValueError(f'{word!r} does not go with the other words.')
  config = common.training()
  config.total_epochs = args.epochs or epochs
  source, held_out = own(args)
  if args.imagenet:
    source, held_out = common.splits(args, 'imagenet', minival=False)
    held_out = held_out['val']
  config.data = common.data(source, crops(args, method), batch_size=batch)
  config.data.labels = False
  if args.model == 'from_weights':
    config.init_from = {'path': common.placeholder(str)}
    config.model = finetune.follow(config, args.model) | {'num_classes': 0}
    config.preprocess = finetune.follow(config, 'preprocess')
  else:
    make = train_folder.model if args.model == 'stem' else common.model
    config.model = make(args.model) | {'num_classes': 0}
    if method.crops:
      config.model.stochastic_depth = 0.1
    if method.posemb:
      config.model.posemb = method.posemb
    if args.imagenet:
      std = {'init_std': 0.02 if method.crops else None}  # MAE: as in the paper
      config.model.update(
        block={'mlp': {'form': 'exact'}, **std}, embedding=std
      )
      config.preprocess = common.imagenet_colours()
  config.objective = dict(method.objective)
  config.schedule = {'decay': 'cosine', **method.schedule}
  unit = 'epochs' if args.imagenet else 'fraction'
  config.schedule[f'warmup_{unit}'] = method.warmup[args.imagenet]
  method.fit(config, args.model)
  if args.tiny:
    config.objective.update(method.tiny)
  config.optimizer = method.optimizer
  if method.scaled:
    config.schedule.lr *= batch / 256
  if args.model == 'from_weights':
    follow_weights(config, unit)
  if args.channels and method.crops:
    change = common.make('objectives.colours.Channels')
    views = {'globals': (change,), 'local': change}
    config.objective.views = common.make('objectives.colours.Views', **views)
  columns = {args.guide: False, args.forget: True}
  if columns := {k: x for k, x in columns.items() if k}:
    warmup = {f'warmup_{unit}': config.schedule[f'warmup_{unit}']}
    add_guides(config, columns, weight=0.03, **warmup)
  if args.anchor:
    config.objective = common.make(
      'objectives.anchor.Anchored',
      objective=config.objective.to_dict(),
      start={'init_from': config.get_oneway_ref('init_from')},
    )
  if args.lr:
    config.schedule.lr = args.lr
  config.evals = evaluators(config, args, held_out)
  if args.channels:
    common.use_rasters(config, args.channels)
  return common.finish(config, args)


def add_guides(config, columns, **fields):
  """Let the classes of {column: whether it is forgotten} guide a run."""
  config.data.keep = {
    key: common.make('data.targets.Classes') for key in columns
  }
  target = 'objectives.guides.Prototypes'
  config.objective.terms = {
    key: common.make(target, key=key, adversarial=is_forgotten, **fields)
    for key, is_forgotten in columns.items()
  }


def follow_weights(config, unit):
  """Train new heads alone at first, then all at a low, constant rate."""
  schedule, optimizer = config.schedule, config.optimizer
  schedule.update(decay='constant', lr=schedule.lr / 10)
  optimizer.freeze = ('(?!objective/|mask$).*',)
  optimizer[f'thaw_{unit}'] = schedule[f'warmup_{unit}'] / 2
  for part, name in ((schedule, 'end_lr'), (optimizer, 'final_weight_decay')):
    if name in part:
      del part[name]


def crops(args, method):
  """Return the transforms of the training images."""
  if not method.crops:
    crop = common.torch_crop(args.size, (0.2, 1.0))
    return crop, common.make('data.transforms.FlipLR')
  local = args.local or (98 if args.model.endswith('/14') else 96)
  sizes = {'size': args.size, 'local_size': local}
  return (common.make('data.transforms.MultiCrop', **sizes, **method.crops),)


def own(args):
  """Return the user's images, and the split that labels are tested on."""
  if args.labels:
    source, held_out = labels.held_out(10)
    return source, held_out['test']
  return common.own_images('[:]', channels=3, classes=False), None


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
  if args.patches:
    evals['patches'] = common.patches(args.size) | {'every_fraction': 0.25}
  return evals

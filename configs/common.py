"""Parts that the configs of this folder share."""

from ml_collections import config_dict

from vit_jax import config as config_lib
from vit_jax.data import transforms
from vit_jax.zoo import names

ConfigDict = config_dict.ConfigDict
placeholder = config_dict.placeholder


def make(path, /, **fields):
  """Return the settings of an object: vit_jax.PATH and its arguments."""
  return {'target': f'vit_jax.{path}', **fields}


# Runs.


def training():
  """Return a training run without its parts."""
  checkpoints = {'every_steps': 1000}
  return ConfigDict({'run': 'vit_jax.train.train', 'checkpoints': checkpoints})


def evaluation(size):
  """Return an evaluation of weights, at `size` pixels or their own size."""
  fields = {'init_from': {'path': placeholder(str)}}
  if size:
    fields['image_shape'] = (size, size, 3)
  return ConfigDict({'run': 'vit_jax.evaluate.evaluate', **fields})


def pretraining(source, held_out, images=None, *, batch_size=4096, **fields):
  """Return a training run at 224 px, evaluated like big_vision's.

  `source` and `held_out` are from `splits`, `images` the transforms of training
  (None: `inception_crop`); `fields` are more arguments of the evaluators.
  """
  config = training()
  images = images or inception_crop(224)
  config.data = data(source, images, batch_size=batch_size)
  config.evals = held_out_evals(
    config, held_out, resize_crop(224), every_steps=5000, **fields
  )
  return config


def finish(config, args):
  """Shard and shrink a run by fsdp, tensor and tiny of `args`; return it."""
  config.data.on_error = 'raise'  # of evaluators, too
  for part in every_data(*(x.data for x in config.evals.values())):
    part.on_error = config.data.get_oneway_ref('on_error')
  fsdp, tensor = (getattr(args, x, 0) for x in ('fsdp', 'tensor'))
  if fsdp or tensor > 1:
    config.mesh = {'data': -1, 'fsdp': -1 if fsdp else 1, 'model': tensor}
  return tiny(config) if args.tiny else config


def tiny(config):
  """Shrink a run to seconds on a CPU, to try out data and for tests.

  The number of tokens stays the same: patches and images are 8 times smaller (7
  times for patches of 14).
  """
  # A model of weights is as small as they are.
  factor = 8 if 'init_from' in config.model else _shrink(config.model)
  for part in every_data(config.data, *(x.data for x in config.evals.values())):
    part.batch_size = 16
    for each in part.transforms if 'image_size' not in part else ():
      for key in {'size', 'local_size', 'patch_size'}.intersection(each):
        each[key] //= factor
  for total in {'total_epochs', 'total_examples'}.intersection(config):
    del config[total]
  config.update(total_steps=4, logging={'every_steps': 2})
  if 'warmup_epochs' in config.schedule:
    del config.schedule.warmup_epochs
    config.schedule.warmup_steps = 2
  shorter = {'warmup_steps': 2, 'cooldown_steps': 1}
  shorter |= {'every_steps': 4, 'every_fraction': 0.5}
  for durations in config.schedule, config.checkpoints, *config.evals.values():
    for name in shorter.keys() & durations.keys():
      durations[name] = shorter[name]
  return config


def every_data(*parts):
  """Yield the data of parts, which may be in mappings."""
  for part in parts:
    if 'source' in part:
      yield part
    else:
      yield from every_data(*part.values())


def _shrink(model):
  """Make the model tiny; return the factor that images must shrink by."""
  if model['target'] == names.RESNET:
    model.update(stages=(1, 1), width_factor=1)
    return 8
  patch = model.embedding.patch_size[0]
  factor = 7 if patch % 7 == 0 else 8
  model.embedding.patch_size = (max(1, patch // factor),) * 2
  if 'stages' in model.embedding:  # of a hybrid
    model.embedding.stages = (1,)
  if 'widths' in model.embedding:  # of a stem
    model.embedding.widths = (8,)
  model.update(width=32, depth=1)
  if 'num_heads' in model:
    model.update(mlp_dim=128, num_heads=2)
  else:  # Mixer
    model.update(tokens_mlp_dim=16, channels_mlp_dim=128)
  if model.get('head', {}).get('representation_size'):
    model.head.representation_size = model.width
  return factor


def model(name, **fields):
  """Return the model of this name, computing in bfloat16.

  Parameters and gradients of kernels are float32, as in vision_transformer and
  big_vision. `num_classes` comes from the training data unless `fields` has it.
  """
  return names.settings(name) | {'dtype': 'bfloat16'} | fields


# Studies.


def study(runs, reports, **fields):
  """Return a study of the runs {name: config}, in this order."""
  fields |= {'runs': runs, 'order': tuple(runs), 'report': tuple(reports)}
  return ConfigDict({'run': 'vit_jax.study.study', **fields})


def shared(**more):
  """Return what the command line sets once for all runs of a study."""
  values = {'data_dir': placeholder(str), 'num_workers': placeholder(int)}
  return ConfigDict(values | {'accum_steps': 1} | more)


def follow(config, values):
  """Make a run whose data are all from TFDS use `shared` values; return it."""
  config.accum_steps = values.get_oneway_ref('accum_steps')
  for part in (config, *config.evals.values()):
    part.data.source.data_dir = values.get_oneway_ref('data_dir')
    part.data.num_workers = values.get_oneway_ref('num_workers')
  return config


def best_of(runs, metric, take=('schedule.lr',)):
  """Return `best_of`: what a run takes from the best of `runs`."""
  return {'runs': runs, 'metric': metric, 'take': take}


def table(cells, **fields):
  """Return a table; see vit_jax/reports/table.py for cells and fields."""
  return make('reports.table.Table', cells=tuple(cells), **fields)


def paired(cells, **fields):
  """Return a table of differences within seeds to the first row."""
  return make('reports.table.Paired', cells=tuple(cells), **fields)


def curves(panels):
  """Return learning curves; see vit_jax/reports/curves.py for panels."""
  return make('reports.curves.Curves', panels=tuple(panels))


def panel(title, xlabel, lines, ylabel='accuracy (%)', **fields):
  """Return a panel of `figure`."""
  labels = {'title': title, 'xlabel': xlabel, 'ylabel': ylabel}
  return labels | {'lines': lines} | fields


def figure(*panels, **fields):
  """Return a scaling figure; see vit_jax/reports/scaling.py for panels."""
  return make('reports.scaling.Scaling', panels=panels, **fields)


# Data.


def data(source, transforms, *, batch_size):
  """Return the data of a run or an evaluator; `batch_size` is global."""
  if not isinstance(transforms, dict):
    transforms = [dict(x) for x in transforms]
  return {'source': source, 'transforms': transforms, 'batch_size': batch_size}


def tfds(name, split, **fields):
  """Return a TFDS source; data_dir=None is ~/tensorflow_datasets."""
  source = make('data.sources.tfds.Tfds', name=name, split=split)
  keys = {'image_key': 'image', 'label_key': 'label'}
  return source | keys | {'data_dir': placeholder(str)} | fields


def few_shot_data(name, train, test, size, *, data_dir, batch_size):
  """Return {'train': data, 'test': data} of two splits of a TFDS set.

  Images are resized to 8/7 of `size` without keeping the aspect ratio.
  """
  transforms = resize_crop(size, resize='Resize')
  sources = [tfds(name, x, data_dir=data_dir) for x in (train, test)]
  parts = [data(x, transforms, batch_size=batch_size) for x in sources]
  return {'train': parts[0], 'test': parts[1]}


def own_images(split, **fields):
  """Return a source of data/sources/named.py, whose path the user sets."""
  # References of evaluators have only keys that are here.
  keys = ('path', 'csv', 'image_key', 'label_key', 'split_key', 'group_key')
  unset = {key: placeholder(str) for key in keys}
  unset |= {'class_names': placeholder(object), 'exif': placeholder(bool)}
  unset['classes'] = True
  return make(
    'data.sources.named.open_source', split=split, **{**unset, **fields}
  )


def use_rasters(config, channels):
  """Read files of so many channels of any depth, see data/rasters.py."""
  decode = make('data.rasters.Raster', channels=channels)
  decode |= {'axis': placeholder(str), 'missing': placeholder(float)}
  decode |= {'bands': placeholder(tuple), 'shown': placeholder(tuple)}
  decode |= {'files': ()}
  config.data.source.decode = decode
  for part in every_data(*(x.data for x in config.evals.values())):
    part.source.decode = config.data.source.get_oneway_ref('decode')
  moments = make('data.rasters.moments')
  config.preprocess = make('models.dense.Standardize', moments=moments)
  if 'init_from' in config:
    config.init_from.adapt_channels = 'mean'


def splits(args, data=None, *, minival=True):
  """Return (source, {evaluator: split}) of a data set for pre-training.

  Args:
    args: with tiny and, where they apply, folder (ImageNet as a folder with
      train and val) and name (of a large set; the first 50,000 are held out).
    data: 'imagenet', 'imagenet21k' or another; None: args.data.
    minival: whether to hold out the last 1% of ImageNet's train, too.
  """
  data = data or args.data
  folder = getattr(args, 'folder', False)
  if data == 'imagenet':
    train, held_out = 'train', {'val': 'val' if folder else 'validation'}
    if minival:
      train, held_out = 'train[:99%]', {'minival': 'train[99%:]', **held_out}
    source = own_images(train) if folder else tfds('imagenet2012', train)
    return source, held_out
  if folder:
    raise ValueError("'folder' is for 'imagenet'.")
  if data == 'imagenet21k':  # as in big_vision's config
    n = 32 if args.tiny else 51_200
    held_out = {'val': f'full[{n // 2}:{n}]', 'test': f'full[:{n // 2}]'}
    return tfds(data, f'full[{n}:]'), held_out
  n = 16 if args.tiny else 50_000
  return tfds(args.name, f'train[{n}:]'), {'val': f'train[:{n}]'}


def held_out_evals(config, splits, transforms, **fields):
  """Return evaluators on {name: other split} of the training data.

  Changes of config.data.source, e.g. on the command line, apply to them too.
  """
  batch_size = config.data.batch_size
  evals = {}
  for name, split in splits.items():
    source = references(config.data.source) | {'split': split}
    images = data(source, transforms, batch_size=batch_size)
    evals[name] = classification(images, **fields)
  return evals


def references(part):
  """Return {key: one-way reference} of a part of a config."""
  return {key: part.get_oneway_ref(key) for key in part}


# Transforms.


def inception_crop(size, **fields):
  """Return the training crop of the paper's released code and big_vision."""
  crop = make('data.transforms.InceptionCrop', size=size, **fields)
  return [crop, make('data.transforms.FlipLR')]


def torch_crop(size, area):
  """Return torchvision's random crop, bicubic."""
  fields = {'method': 'torch', 'interpolation': 'bicubic', 'antialias': True}
  return make('data.transforms.InceptionCrop', size=size, area=area, **fields)


def resize(size, **fields):
  """Return the test transform of the paper's released code, to a square."""
  return [make('data.transforms.Resize', size=size, **fields)]


def resize_crop(size, small_size=None, resize='ResizeSmall'):
  """Return a resize, by default to 8/7 of the size, and a central crop."""
  small_size = small_size or size * 8 // 7
  crop = make('data.transforms.CentralCrop', size=size)
  return [make(f'data.transforms.{resize}', size=small_size), crop]


def evaluation_images(convention, size, *, crop=None):
  """Return test transforms as configs; see `transforms.evaluation`."""
  made = transforms.evaluation(convention, size, crop=crop)
  described = [config_lib.describe(each) for each in made]
  described[-1]['size'] = size  # as elsewhere, an int stands for a square
  return described


def rand_augment(magnitude, *, faults):
  """Return big_vision's RandAugment with 2 layers; see its class."""
  fields = {'magnitude': float(magnitude), 'faults': faults}
  return make('data.augment.RandAugment', num_layers=2, **fields)


def imagenet_colours():
  """Return PyTorch's usual preprocessing: ImageNet's mean and deviation."""
  mean, std = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
  return make('models.dense.Normalize', mean=mean, std=std)


# Objectives, optimizers, evaluators.


def xent(activation, **fields):
  """Return the 'softmax' or 'sigmoid' cross-entropy."""
  return make(f'objectives.classification.{activation}_xent', **fields)


def bce(*, threshold=0.0, **fields):
  """Return DeiT III's loss: the mean sigmoid cross-entropy over all classes."""
  return xent('sigmoid', threshold=threshold, mean_over_classes=True, **fields)


def mixed(objective, *, mixup=0.0, cutmix=0.0, probability=1.0):
  """Return an objective for mixed images, one draw for each batch.

  `mixup` and `cutmix` are the alphas of each, which are equally likely, and
  `probability` is that a batch is mixed.
  """
  mixers = tuple(
    make(f'objectives.mixing.{name}', alpha=alpha)
    for name, alpha in (('Mixup', mixup), ('Cutmix', cutmix))
    if alpha
  )
  if not mixers:
    return objective
  mixer = mixers[0]
  if len(mixers) > 1 or probability < 1:
    fields = {'probabilities': (probability / len(mixers),) * len(mixers)}
    mixer = make('objectives.mixing.Choice', mixers=mixers, **fields)
  return make('objectives.mixing.Mixed', mixer=mixer, objective=objective)


def distillation(objective, **fields):
  """Return distillation from weights that the user names, as a wrapper."""
  fields |= {'teacher': {'path': placeholder(str)}, 'objective': objective}
  return make('objectives.distillation.Distillation', **fields)


def adam(*, weight_decay=0.0, b2=0.999, **fields):
  """Return the paper's Adam; the schedule multiplies the weight decay."""
  settings = {'b1': 0.9, 'b2': b2, 'weight_decay': weight_decay}
  return {'target': 'optax.adamw', **settings, **fields}


def clipped_adam(**fields):
  """Return big_vision's Adam, with first moments in bfloat16."""
  return adam(clip_norm=1.0, mu_dtype='bfloat16', **fields)


def sgd(**fields):
  """Return SGD with momentum 0.9; its weight decay is coupled."""
  return make('optim.optimizers.sgd', momentum=0.9, **fields)


def set_bit_sgd(config, *, milestones, lr=None):
  """Set the optimizer and schedule of BiT's pre-training.

  The rate, by default 0.03 per 256 images of a batch, falls to a tenth at each
  milestone, a fraction of the run.
  """
  lr = lr or 0.03 * config.data.batch_size / 256
  config.optimizer = sgd(weight_decay=1e-4)
  config.schedule = {'lr': lr, 'decay': 'step', 'milestones': milestones}
  config.schedule.warmup_steps = 5000


def classification(data, **fields):
  """Return an evaluator of the model's own predictions."""
  return make('evals.classification.Classification', data=data, **fields)


def frozen(data, readouts, **fields):
  """Return an evaluator of {data set: {'train': data, 'test': data}}."""
  fields = {'features': 'pre_logits', 'data': data, **fields}
  return make('evals.frozen.Frozen', readouts=readouts, **fields)


def of_layers(numbers):
  """Return the arguments of `frozen` for layers of a ViT, counted from 1."""
  blocks = tuple(f'block_{number - 1}' for number in numbers)
  return {'features': blocks, 'statistics': ('mean', 'max', 'std')}


def patches(size, layers=(), **fields):
  """Return the evaluator of patches of the last tokens and of layers.

  `fields` are of the source of images and masks, which the user may set.
  """
  unset = {key: placeholder(str) for key in ('path', 'csv', 'image_key')}
  unset |= {'mask_key': 'mask', 'class_names': placeholder(object)}
  unset |= {key: placeholder(tuple) for key in ('values', 'void')} | fields
  source = make('data.sources.masks.open_masked', split='train', **unset)
  square = resize(size, interpolation='bicubic', antialias=True)
  train = ConfigDict(data(source, square, batch_size=32))
  test = data(source, square, batch_size=32)
  test['source'] = references(train.source) | {'split': 'test'}
  maps = {f'_{number}': (f'map_{number - 1}',) for number in layers}
  if len(layers) > 1:
    maps['_layers'] = tuple(x for (x,) in maps.values())
  readouts = {
    f'{name}{of}': make(f'evals.patch_readouts.{kind}', features=features)
    for name, kind in (('linear', 'Linear'), ('near', 'Neighbours'))
    for of, features in {'': ('map_-1',), **maps}.items()
  }
  sets = {'train': train, 'test': test}
  return make('evals.patches.Patches', data=sets, readouts=readouts)


def few_shot(shots, seeds=(0, 1, 2), **fields):
  """Return the paper's few-shot readout; each seed draws other examples."""
  return make('evals.fewshot.FewShot', shots=shots, seeds=seeds, **fields)

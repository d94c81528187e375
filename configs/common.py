"""Parts that the configs of this folder share."""

from ml_collections import config_dict

from vit_jax import config as config_lib
from vit_jax.data import transforms
from vit_jax.models import names

ConfigDict = config_dict.ConfigDict
placeholder = config_dict.placeholder


def training():
  """Return the keys of every training run."""
  checkpoints = {'every_steps': 1000}
  return ConfigDict({'run': 'vit_jax.train.train', 'checkpoints': checkpoints})


def evaluation(size):
  """Return the keys of every evaluation of weights, at `size` pixels.

  None: at the size and with the channels of the weights.
  """
  fields = {'init_from': {'path': placeholder(str)}}
  if size:
    fields['image_shape'] = (size, size, 3)
  return ConfigDict({'run': 'vit_jax.evaluate.evaluate', **fields})


def pretraining(source, held_out, images=None, *, batch_size=4096, **fields):
  """Return a training run at 224 px, evaluated like big_vision's.

  Args:
    source, held_out: see `imagenet`.
    images: transforms of training; None: `inception_crop`.
    batch_size: global.
    **fields: more arguments of the evaluators.
  """
  config = training()
  images = images or inception_crop(224)
  config.data = data(source, images, batch_size=batch_size)
  config.evals = held_out_evals(
    config, held_out, resize_crop(256, 224), every_steps=5000, **fields
  )
  return config


def study(runs, reports, **fields):
  """Return a study of the runs {name: config}, in this order."""
  fields |= {'runs': runs, 'order': tuple(runs), 'report': tuple(reports)}
  return ConfigDict({'run': 'vit_jax.study.study', **fields})


def shared(**more):
  """Return what the command line sets once for all runs of a study.

  For example --config.shared.data_dir=PATH. `follow` makes a run use it.
  """
  values = {
    'data_dir': placeholder(str),
    'num_workers': placeholder(int),
    'accum_steps': 1,
  }
  return ConfigDict(values | more)


def follow(config, values):
  """Make a run whose data are all from TFDS use `shared` values; return it."""
  config.accum_steps = values.get_oneway_ref('accum_steps')
  for part in (config, *config.evals.values()):
    part.data.source.data_dir = values.get_oneway_ref('data_dir')
    part.data.num_workers = values.get_oneway_ref('num_workers')
  return config


def model(name, **fields):
  """Return the model of this name, computing in bfloat16.

  Parameters are float32, and so are the gradients of kernels and their sums
  over devices, as in vision_transformer and big_vision. `num_classes` comes
  from the training data unless `fields` has it.
  """
  return names.settings(name) | {'dtype': 'bfloat16'} | fields


def pooling(name, **fields):
  """Return a pooling of vit_jax/models/pooling.py."""
  return {'target': f'vit_jax.models.pooling.{name}', **fields}


def posemb(name, **fields):
  """Return position embeddings of vit_jax/models/posemb.py."""
  return {'target': f'vit_jax.models.posemb.{name}', **fields}


def _family(settings):
  return settings['target'].rpartition('.')[2]


# Data.


def data(source, transforms, *, batch_size):
  """Return the data of a run or an evaluator; `batch_size` is global."""
  transforms = [dict(x) for x in transforms]
  return {'source': source, 'transforms': transforms, 'batch_size': batch_size}


def tfds(name, split, **fields):
  """Return a TFDS source; data_dir=None is ~/tensorflow_datasets."""
  return {
    'target': 'vit_jax.data.tfds.Tfds',
    'name': name,
    'split': split,
    'data_dir': placeholder(str),
    'image_key': 'image',
    'label_key': 'label',
    **fields,
  }


def split_off(percent):
  """Return the slices of a folder (training, held out); None is 10 percent."""
  percent = 10 if percent is None else percent
  if percent != int(percent) or not 1 <= percent <= 99:
    raise ValueError(
      f'held_out={percent:g} must be a whole number of percent, 1 to 99.'
    )
  return f'[:{100 - int(percent)}%]', f'[{100 - int(percent)}%:]'


def own_images(split, **fields):
  """Return images of the user's; the user sets their path.

  It is a folder, or the name of another source, see data/sources.py.
  """
  return {
    'target': 'vit_jax.data.sources.open_source',
    'path': placeholder(str),
    'split': split,
    'csv': placeholder(str),
    'image_key': placeholder(str),
    'label_key': placeholder(str),
    **fields,
  }


def own_slice(split):
  """Return a slice of images of the user's, the same in each class."""
  return own_images(split, stratified=True, channels=3)


def imagenet(from_folder, *, minival=True):
  """Return (source, {evaluator: split}): 99% of train; the rest is 'minival'.

  A folder, or what its path names instead, has the splits train and val.
  Without `minival`, training is on all of train.
  """
  held_out = {'val': 'val' if from_folder else 'validation'}
  train = 'train'
  if minival:
    train, held_out = 'train[:99%]', {'minival': 'train[99%:]', **held_out}
  source = own_images(train) if from_folder else tfds('imagenet2012', train)
  return source, held_out


def imagenet21k(tiny):
  """Return (source, {evaluator: split}), the splits of big_vision's config."""
  held_out = 32 if tiny else 51_200
  return tfds('imagenet21k', f'full[{held_out}:]'), {
    'val': f'full[{held_out // 2}:{held_out}]',
    'test': f'full[:{held_out // 2}]',
  }


def imagenet_or_21k(args, *, minival=True):
  """Return what `imagenet` or `imagenet21k` does; args: data, folder, tiny."""
  if args.data == 'imagenet':
    return imagenet(args.folder, minival=minival)
  if args.folder:
    raise ValueError("'folder' is for 'imagenet'.")
  return imagenet21k(args.tiny)


def large_tfds(name, tiny):
  """Return (source, {evaluator: split}) of a set for pre-training like JFT.

  The first 50,000 images are kept for validation.
  """
  first = 16 if tiny else 50_000
  return tfds(name, f'train[{first}:]'), {'val': f'train[:{first}]'}


def transform(name, **fields):
  """Return a transform of vit_jax/data/transforms.py."""
  return {'target': f'vit_jax.data.transforms.{name}', **fields}


def augmentation(name, **fields):
  """Return an augmentation of vit_jax/data/augment.py."""
  return {'target': f'vit_jax.data.augment.{name}', **fields}


def rand_augment(magnitude, *, faults):
  """Return big_vision's RandAugment with 2 layers; see its class."""
  return augmentation(
    'RandAugment', num_layers=2, magnitude=float(magnitude), faults=faults
  )


def inception_crop(size, **fields):
  """Return the training crop of the paper's released code and big_vision.

  `fields` are more of InceptionCrop, e.g. interpolation='bicubic'.
  """
  return [transform('InceptionCrop', size=size, **fields), transform('FlipLR')]


def resize(size):
  """Return the test transform of the paper's released code.

  It resizes to `size` x `size` without keeping the aspect ratio.
  """
  return [transform('Resize', size=size)]


def resize_crop(small_size, size, resize='ResizeSmall'):
  """Return a resize and a central crop; by default big_vision's for tests."""
  crop = transform('CentralCrop', size=size)
  return [transform(resize, size=small_size), crop]


def evaluation_images(convention, size, *, crop=None):
  """Return the test transforms of 'original', 'big_vision' or 'timm'.

  `crop` is the fraction of the smaller side that is kept; None: that of the
  convention.
  """
  *others, last = transforms.evaluation(convention, size, crop=crop)
  # As in the other functions, an int stands for a square.
  return [
    *(config_lib.describe(each) for each in others),
    config_lib.describe(last) | {'size': size},
  ]


def random_crop(resize, load_size, size):
  """Return BiT's training crop; `resize` is 'Resize' or 'ResizeSmall'."""
  return [
    transform(resize, size=load_size),
    transform('RandomCrop', size=size),
    transform('FlipLR'),
  ]


# Objectives, optimizers, evaluators.


def xent(activation, **fields):
  """Return the 'softmax' or 'sigmoid' cross-entropy."""
  target = f'vit_jax.objectives.classification.{activation}_xent'
  return {'target': target, **fields}


def mixed(objective, *, mixup=0.0, cutmix=0.0, probability=1.0):
  """Return an objective for mixed images, one draw for each batch.

  Args:
    objective: as of `xent`.
    mixup, cutmix: alpha of each; 0: without it. Both are equally likely.
    probability: that a batch is mixed.
  """
  module = 'vit_jax.objectives.mixing'
  mixers = tuple(
    {'target': f'{module}.{name}', 'alpha': alpha}
    for name, alpha in (('Mixup', mixup), ('Cutmix', cutmix))
    if alpha
  )
  if not mixers:
    return objective
  mixer = mixers[0]
  if len(mixers) > 1 or probability < 1:
    weights = (probability / len(mixers),) * len(mixers)
    mixer = {
      'target': f'{module}.Choice',
      'mixers': mixers,
      'probabilities': weights,
    }
  return {'target': f'{module}.mixed', 'mixer': mixer, 'objective': objective}


def bce(*, threshold=0.0, **fields):
  """Return DeiT III's loss: the mean sigmoid cross-entropy over all classes.

  Targets above the threshold are 1, all others 0; `fields` are more arguments
  of `sigmoid_xent`.
  """
  return xent('sigmoid', threshold=threshold, mean_over_classes=True, **fields)


def adam(*, weight_decay=0.0, b2=0.999, **fields):
  """Return the paper's Adam; the schedule multiplies the weight decay."""
  settings = {'b1': 0.9, 'b2': b2, 'weight_decay': weight_decay}
  return {'target': 'optax.adamw', **settings, **fields}


def sgd(**fields):
  """Return SGD with momentum 0.9; its weight decay is coupled."""
  target = 'vit_jax.optim.optimizers.sgd'
  return {'target': target, 'momentum': 0.9, **fields}


def finetuning_sgd():
  """Return the optimizer of the paper's fine-tuning (table 4)."""
  return sgd(accumulator_dtype='bfloat16', clip_norm=1.0)


def set_bit_sgd(config, *, milestones, lr=None):
  """Set the optimizer and schedule of BiT's pre-training.

  Args:
    config: a training run that has its data.
    milestones: fractions of the run after which the learning rate falls to a
      tenth.
    lr: learning rate; None is 0.03 per 256 images of a batch.
  """
  config.optimizer = sgd(weight_decay=1e-4)
  config.schedule = {
    'lr': lr or 0.03 * config.data.batch_size / 256,
    'decay': 'step',
    'milestones': milestones,
    'warmup_steps': 5000,
  }


def distillation(objective, **fields):
  """Return distillation from weights that the user names, as a wrapper."""
  target = 'vit_jax.objectives.distillation.distillation'
  fields |= {'teacher': {'path': placeholder(str)}, 'objective': objective}
  return {'target': target, **fields}


def classification(data, **fields):
  """Return an evaluator of the model's own predictions."""
  target = 'vit_jax.evals.classification.Classification'
  return {'target': target, 'data': data, **fields}


def frozen(data, readouts, **fields):
  """Return an evaluator of frozen features.

  Args:
    data: {data set: {'train': data, 'test': data}}.
    readouts: {name: readout}.
    **fields: more arguments of Frozen.
  """
  target = 'vit_jax.evals.frozen.Frozen'
  settings = {'features': 'pre_logits', 'data': data, 'readouts': readouts}
  return {'target': target, **settings, **fields}


def few_shot(shots, seeds=(0, 1, 2), **fields):
  """Return the paper's few-shot readout; each seed draws other examples."""
  target = 'vit_jax.evals.fewshot.FewShot'
  return {'target': target, 'shots': shots, 'seeds': seeds, **fields}


def balance(config, *, balanced, class_weights):
  """Make a training run, in place, treat all classes alike.

  Args:
    config: a training run that has its data and objective.
    balanced: whether each class is visited equally often.
    class_weights: whether the loss of an example has the weight n / (K n_c),
      for n examples in K classes and n_c in its class.
  """
  if balanced and class_weights:
    raise ValueError(
      "'balanced' and 'class_weights' both make up for rare classes. Keep one."
    )
  if balanced:
    config.data.order = {'target': 'vit_jax.data.order.Balanced'}
  if class_weights:
    objective = config.objective
    while 'objective' in objective:  # that another one wraps
      objective = objective.objective
    objective.class_weights = {
      'target': 'vit_jax.data.balance.class_weights',
      'source': references(config.data.source),
    }


def references(part):
  """Return a dict with one-way references to the keys of a part of a config.

  Changes of the part, e.g. on the command line, apply to the dict too.
  """
  return {key: part.get_oneway_ref(key) for key in part}


def held_out_evals(config, splits, transforms, **fields):
  """Return evaluators on other splits of the training data.

  Args:
    config: a training run that has its data.
    splits: {evaluator: split}.
    transforms: of the test images.
    **fields: more arguments, such as every_steps=5000.
  """
  return {
    name: classification(held_out(config, split, transforms), **fields)
    for name, split in splits.items()
  }


def held_out(config, split, transforms):
  """Return the data of another split of the training data.

  Changes of config.data.source, e.g. on the command line, apply to it too.
  """
  source = references(config.data.source) | {'split': split}
  return data(source, transforms, batch_size=config.data.batch_size)


# Reports of studies.


def table(cells, **fields):
  """Return a table; see vit_jax/reports/table.py for cells and fields."""
  target = 'vit_jax.reports.table.Table'
  return {'target': target, 'cells': tuple(cells), **fields}


def curves(panels):
  """Return learning curves; see vit_jax/reports/curves.py for panels."""
  return {'target': 'vit_jax.reports.curves.Curves', 'panels': tuple(panels)}


def figure(panels, **fields):
  """Return a scaling figure; see vit_jax/reports/scaling.py for panels."""
  target = 'vit_jax.reports.scaling.Scaling'
  return {'target': target, 'panels': tuple(panels), **fields}


# Sizes.


def split_over_devices(config, *, fsdp, tensor):
  """Shard a model that is too large for one device.

  Args:
    config: a training run.
    fsdp: whether parameters, optimizer state and EMA are sharded over all
      devices; mesh.data=N keeps N complete copies of them instead of one.
    tensor: number of devices that share the heads and hidden units of each
      layer.
  """
  if not fsdp and tensor == 1:
    return
  rest = 'fsdp' if fsdp else 'data'
  config.mesh = {'data': 1, 'fsdp': 1, 'model': tensor} | {rest: -1}


def tiny(config):
  """Shrink a run to seconds on a CPU, to try out data and for tests.

  All parts stay, but the model has the size 'mu', patches and images are 8
  times smaller (7 times for patches of 14), so that the number of tokens stays
  the same, batches have 16 images, and there are 4 steps. ResNets keep one unit
  in each of two stages, hybrids keep one unit in the first stage.
  """
  # A model of weights is as small as they are.
  of_weights = 'init_from' in config.model
  factor = 8 if of_weights else _shrink(config.model)
  for part in (config.data, *(x.data for x in config.evals.values())):
    part.batch_size = 16
    for each in part.transforms:
      if 'size' in each:
        each['size'] //= factor
  for total in {'total_epochs', 'total_examples'}.intersection(config):
    del config[total]
  config.update(total_steps=4, logging={'every_steps': 2})
  config.checkpoints.every_steps = 4
  shorter = {
    'warmup_steps': 2,
    'cooldown_steps': 1,
    'every_steps': 4,
    'every_fraction': 0.5,
  }
  if 'warmup_epochs' in config.schedule:
    del config.schedule.warmup_epochs
    config.schedule.warmup_steps = shorter['warmup_steps']
  for durations in (config.schedule, *config.evals.values()):
    for name in shorter.keys() & durations.keys():
      durations[name] = shorter[name]
  return config


def _shrink(model):
  """Make the model tiny; return by which factor images must shrink."""
  if _family(model) == 'ResNet':
    model.update(stages=(1, 1), width_factor=1)
    return 8
  patch = model.embedding.patch_size[0]
  factor = 7 if patch % 7 == 0 else 8
  model.embedding.patch_size = (max(1, patch // factor),) * 2
  if model.embedding.get('stages'):
    model.embedding.stages = (1,)
  model.update(width=32, depth=1)
  if _family(model) == 'MlpMixer':
    model.update(tokens_mlp_dim=16, channels_mlp_dim=128)
  else:
    model.update(mlp_dim=128, num_heads=2)
  if model.get('head', {}).get('representation_size'):
    model.head.representation_size = model.width
  return factor

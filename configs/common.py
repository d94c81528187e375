"""The parts that the configs of this folder share."""

from ml_collections import config_dict

from vit_jax.models import names

_TRANSFORMS = 'vit_jax.data.transforms'


def training():
  """What every training run has. What is None here is off."""
  return config_dict.ConfigDict(
    {
      'run': 'vit_jax.train.train',
      'seed': 0,
      'accum_steps': 1,  # more of them, less memory; the result is the same
      'ema_decay': config_dict.placeholder(float),
      'log_every_steps': 50,
      'checkpoint': {'every_steps': 1000, 'keep_last': 1},
    }
  )


def evaluation(size):
  """What every evaluation of weights has, at `size` pixels."""
  return config_dict.ConfigDict(
    {
      'run': 'vit_jax.evaluate.evaluate',
      'seed': 0,
      'image_shape': (size, size, 3),
      'init_from': {
        'path': config_dict.placeholder(str),
        'step': config_dict.placeholder(int),
        'ema': 'auto',
      },
    }
  )


def model(name, **fields):
  """A model of that name, in bfloat16 on float32 parameters.

  Its number of classes is the training data's unless `fields` has it. A ResNet
  is of BiT's form, 'preact', unless `fields` says 'postact'.
  """
  settings = names.settings(name)
  shared = {
    'target': settings['target'],
    'num_classes': config_dict.placeholder(int),
    'head_bias_init': 0.0,
    'dtype': 'bfloat16',
    'remat': 'none',
  }
  own = {
    'VisionTransformer': {
      'pooling': 'token',
      'representation_size': config_dict.placeholder(int),
      'posemb': 'learned',
      'dropout': 0.0,
      'stochastic_depth': 0.0,
      'scan': False,
      'attention': 'auto',
    },
    'ResNet': {'form': 'preact'},
    'MlpMixer': {'stochastic_depth': 0.0, 'scan': False},
  }[_family(settings)]
  return shared | own | settings | fields


def _family(settings):
  return settings['target'].rpartition('.')[2]


def set_form(config, postact):
  """Makes the model a ResNet of the released code's form, if so wished."""
  if postact and 'form' not in config.model:
    raise ValueError(
      "'postact' is a form of ResNets; the ResNet of a hybrid has no other. "
      'Leave it out.'
    )
  if postact:
    config.model.form = 'postact'


def tfds(name, split):
  """A TFDS data set; data_dir None is TFDS's own, ~/tensorflow_datasets."""
  return {
    'target': 'vit_jax.data.tfds.Tfds',
    'name': name,
    'split': split,
    'data_dir': config_dict.placeholder(str),
    'image_key': 'image',
    'label_key': 'label',
  }


def folder(split):
  """A folder of images, whose path the command line gives."""
  return {
    'target': 'vit_jax.data.folder.Folder',
    'path': config_dict.placeholder(str),
    'split': split,
    'csv': config_dict.placeholder(str),
  }


def imagenet(from_folder):
  """99% of the training images; of a folder, whose splits are train and val."""
  split = 'train[:99%]'
  return folder(split) if from_folder else tfds('imagenet2012', split)


def imagenet_held_out(from_folder):
  """{evaluator: split} to go with it."""
  return {
    'minival': 'train[99%:]',
    'val': 'val' if from_folder else 'validation',
  }


def imagenet21k(tiny):
  """(source, {evaluator: split}), as in big_vision's config for it."""
  held_out = 32 if tiny else 51_200
  return tfds('imagenet21k', f'full[{held_out}:]'), {
    'val': f'full[{held_out // 2}:{held_out}]',
    'test': f'full[:{held_out // 2}]',
  }


def inception_crop(size):
  """The training images of the paper's released code and of big_vision."""
  return [_transform('InceptionCrop', size=size), _transform('FlipLR')]


def resize(size):
  """The test images of the paper's released code: no crop, aspect not kept."""
  return [_transform('Resize', size=size)]


def central_crop(size):
  """The middle of images that are large enough."""
  return [_transform('CentralCrop', size=size)]


def resize_crop(small_size, size):
  """big_vision's test images."""
  return [
    _transform('ResizeSmall', size=small_size),
    _transform('CentralCrop', size=size),
  ]


def random_crop(resize_name, load_size, size):
  """BiT's training images; resize_name is 'Resize' or 'ResizeSmall'."""
  return [
    _transform(resize_name, size=load_size),
    _transform('RandomCrop', size=size),
    _transform('FlipLR'),
  ]


def _transform(name, **fields):
  return {'target': f'{_TRANSFORMS}.{name}', **fields}


def accuracy(config, split, transforms, *, loss='softmax', **every):
  """An evaluator on another split of the training data."""
  return {
    'target': 'vit_jax.evals.classification.Classification',
    'loss': loss,
    'data': held_out(config, split, transforms),
    **every,
  }


def held_out(config, split, transforms):
  """Another split of the training data, for an evaluator.

  All else that the command line sets in config.data.source holds for it too.
  """
  source = config.data.source
  source = {key: source.get_oneway_ref(key) for key in source}
  source['split'] = split
  return data(source, transforms, batch_size=config.data.batch_size)


def pretraining(
  name,
  *,
  source,
  held_out,
  epochs,
  lr,
  decay,
  weight_decay,
  dropout,
  clip_norm=None,
  num_classes=None,
):
  """A row of the paper's table 3; the arguments are its columns.

  ViTs and hybrids have a tanh layer in their heads, ResNets have none.

  Not in the paper are loss and head bias (here those of scenic's ViT baselines
  and big_vision's ImageNet-21k config), that only kernels decay (big_vision),
  and the crop (AugReg's, for the same team's ViTs).

  Args:
    name: of the model.
    source: of the training images.
    held_out: {name of evaluator: split}.
    epochs, lr, decay, weight_decay, dropout: as in table 3.
    clip_norm: which the paper has for ImageNet only.
    num_classes: the data's if None.
  """
  config = training()
  config.total_epochs = float(epochs)
  config.model = model(
    name, num_classes=_maybe(int, num_classes), head_bias_init=-10.0
  )
  if _family(config.model) == 'VisionTransformer':
    config.model.representation_size = config.model.width  # the tanh layer
    config.model.dropout = dropout
  config.data = data(source, inception_crop(224), batch_size=4096)
  config.objective = {
    'target': 'vit_jax.objectives.classification.sigmoid_xent',
    'label_smoothing': 0.0,
  }
  config.optimizer = {
    'target': 'vit_jax.optim.adam',
    'b1': 0.9,
    'b2': 0.999,
    'weight_decay': weight_decay,  # times the learning rate, as in AdamW
    'clip_norm': _maybe(float, clip_norm),
    'mu_dtype': config_dict.placeholder(str),  # of the first moment
  }
  config.schedule = {'lr': lr, 'decay': decay, 'warmup_steps': 10_000}
  config.evals = {
    key: accuracy(
      config, split, resize_crop(256, 224), loss='sigmoid', every_steps=5000
    )
    for key, split in held_out.items()
  }
  return config


def split_over_devices(config, *, fsdp, tensor):
  """Sets mesh and sharding, in place, where a model is too large for a device.

  Args:
    config: of a training run.
    fsdp: whether parameters, optimizer state and average are split over all
      devices; mesh.data=N makes N whole copies of them in place of one.
    tensor: devices that share the heads and hidden units of each layer.
  """
  if not fsdp and tensor == 1:
    return
  split = 'fsdp' if fsdp else 'data'
  config.mesh = {'data': 1, 'fsdp': 1, 'model': tensor} | {split: -1}
  config.sharding = {
    'target': 'vit_jax.recipes.fsdp',
    'axis': 'fsdp',
    'beside': {'target': 'vit_jax.recipes.tensor_parallel', 'axis': 'model'},
  }


def bit_sgd(config, *, milestones, lr=None):
  """BiT's optimizer and schedule of pre-training, in place.

  Args:
    config: with its data.
    milestones: where the rate falls to a tenth, in fractions of the run.
    lr: 0.03 for each 256 images of a batch, if None.
  """
  config.optimizer = {
    'target': 'vit_jax.optim.sgd',
    'momentum': 0.9,
    'weight_decay': 1e-4,  # coupled: it is added to the gradient
    'clip_norm': config_dict.placeholder(float),
  }
  config.schedule = {
    'lr': lr or 0.03 * config.data.batch_size / 256,
    'decay': 'stair',
    'milestones': milestones,
    'warmup_steps': 5000,
  }


def data(source, transforms, *, batch_size):
  """The training data; batch_size is that of all devices together."""
  return {
    'source': source,
    'transforms': transforms,
    'batch_size': batch_size,
    'num_workers': 0,
    'on_error': 'raise',
  }


def _maybe(kind, value):
  """The value; if None, a place where the command line may put one."""
  return config_dict.placeholder(kind) if value is None else value


def tiny(config):
  """Shrinks a run to seconds on a CPU: to try out data, and for tests.

  Everything stays in place, but the model is of the size 'mu', patches and
  images are 8 times smaller (so the grid of tokens is the same; 7 times where
  the patch is 14), batches have 16 images, and there are 4 steps. ResNets keep
  one unit in each of two stages, hybrids in the first.
  """
  factor = _shrink(config.model)
  for part in (config.data, *(x.data for x in config.evals.values())):
    part.batch_size = 16
    for transform in part.transforms:
      if 'size' in transform:
        transform['size'] //= factor
  if 'total_epochs' in config:
    del config.total_epochs
  config.total_steps = 4
  config.log_every_steps = 2
  config.checkpoint.every_steps = 4
  shorter = {'warmup_steps': 2, 'every_steps': 4, 'every_fraction': 0.5}
  shorter['cooldown_steps'] = 1
  for durations in (config.schedule, *config.evals.values()):
    for name in shorter.keys() & durations.keys():
      durations[name] = shorter[name]
  return config


def _shrink(model):
  """Makes the model tiny, in place; by what its images must be smaller."""
  if _family(model) == 'ResNet':
    model.update({'stages': (1, 1), 'width_factor': 1})
    return 8
  patch = model.patch_size[0]
  factor = 7 if patch % 7 == 0 else 8
  mu = names.settings(f'mu/{max(1, patch // factor)}')
  del mu['target']
  if _family(model) == 'MlpMixer':
    del mu['num_heads'], mu['mlp_dim']
    mu |= {'tokens_mlp_dim': 16, 'channels_mlp_dim': 128}
  elif model.get('resnet_stages'):
    mu['resnet_stages'] = (1,)
  model.update(mu)
  if model.get('representation_size'):
    model.representation_size = model.width
  return factor

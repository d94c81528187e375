"""What the configs of this folder share: their argument and their parts.

The argument of a config is what follows `FILE.py:` on the command line, words
between commas: `L/16,epochs=30,tiny`.
"""

import types

from ml_collections import config_dict

from vit_jax.models import vit as models

_TRANSFORMS = 'vit_jax.data.transforms'


def parse(argument, **options):
  """The values of a config's options, as attributes.

  Args:
    argument: the words; '' for the defaults.
    **options: name and default of each. A tuple of words takes one of them,
      given by itself (the first is the default); False is a switch, given by
      its name; a str or a number takes name=value; the type float takes
      name=NUMBER and is None by default.

  Raises:
    ValueError: a word that is none of these, or a second value for the same
      option; lists what is allowed.
  """
  values = {name: _default(option) for name, option in options.items()}
  given = {}
  for word in filter(None, (x.strip() for x in (argument or '').split(','))):
    name, value = _interpret(word, options)
    if name in given:
      raise ValueError(
        f'{given[name]!r} and {word!r} both set {name!r}; keep one.'
      )
    given[name], values[name] = word, value
  return types.SimpleNamespace(**values)


def _default(option):
  if isinstance(option, tuple):
    return option[0]
  return None if option is float else option


def _interpret(word, options):
  """(name, value) of one word."""
  name, is_assignment, text = word.partition('=')
  if not is_assignment:
    for option_name, option in options.items():
      if isinstance(option, tuple) and word in option:
        return option_name, word
      if option is False and word == option_name:
        return option_name, True
  elif name in options and not isinstance(options[name], tuple | bool):
    option = options[name]
    kind = option if isinstance(option, type) else type(option)
    try:
      return name, kind(text)
    except ValueError:
      pass
  allowed = [_describe(*item) for item in options.items()]
  raise ValueError(
    f'The config does not take the argument {word!r}. It takes, with commas '
    f'between them:\n  ' + '\n  '.join(allowed)
  )


def _describe(name, option):
  if isinstance(option, tuple):
    return f'one of {", ".join(option)}'
  if option is False:
    return name
  if isinstance(option, str):
    return f'{name}=NAME (default {option})'
  kind = 'WHOLE_NUMBER' if isinstance(option, int) else 'NUMBER'
  return f'{name}={kind}' + ('' if option is float else f' (default {option})')


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


def vit(name, **fields):
  """A ViT of that name, in bfloat16 on float32 parameters.

  Its number of classes is the training data's unless `fields` has it.
  """
  settings = {
    'target': 'vit_jax.models.vit.VisionTransformer',
    'num_classes': config_dict.placeholder(int),
    'pooling': 'token',
    'representation_size': config_dict.placeholder(int),
    'posemb': 'learned',
    'dropout': 0.0,
    'stochastic_depth': 0.0,
    'head_bias_init': 0.0,
    'dtype': 'bfloat16',
    'scan': False,
    'remat': 'none',
  }
  return settings | models.variant(name) | fields


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


def inception_crop(size):
  """The training images of the paper's released code and of big_vision."""
  return [_transform('InceptionCrop', size=size), _transform('FlipLR')]


def resize(size):
  """The test images of the paper's released code: no crop, aspect not kept."""
  return [_transform('Resize', size=size)]


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
  """An evaluator on another split of the training data.

  All else that the command line sets in config.data.source holds for it too.
  """
  source = config.data.source
  source = {key: source.get_oneway_ref(key) for key in source}
  return {
    'target': 'vit_jax.evals.classification.Classification',
    'loss': loss,
    'data': {
      'source': source | {'split': split},
      'transforms': transforms,
      'batch_size': config.data.batch_size,
      'num_workers': 0,
      'on_error': 'raise',
    },
    **every,
  }


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
  config.model = vit(
    name,
    num_classes=_maybe(int, num_classes),
    representation_size=models.variant(name)['width'],  # the tanh layer
    dropout=dropout,
    head_bias_init=-10.0,
  )
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
  }
  config.schedule = {'lr': lr, 'decay': decay, 'warmup_steps': 10_000}
  config.evals = {
    key: accuracy(
      config, split, resize_crop(256, 224), loss='sigmoid', every_steps=5000
    )
    for key, split in held_out.items()
  }
  return config


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
  the patch is 14), batches have 16 images, and there are 4 steps.
  """
  patch = config.model.patch_size[0]
  factor = 7 if patch % 7 == 0 else 8
  config.model.update(models.variant(f'mu/{patch // factor}'))
  if config.model.representation_size:
    config.model.representation_size = config.model.width
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
  for durations in (config.schedule, *config.evals.values()):
    for name in shorter.keys() & durations.keys():
      durations[name] = shorter[name]
  return config

"""The parts that the scaling studies share: scaling_*.py."""

import re

from ml_collections import config_dict

from configs import arguments, common, finetune, pretrain_jft, transfer


def shared():
  """What the command line sets once for all runs: --config.shared.KEY=."""
  return config_dict.ConfigDict(
    {
      'data_dir': config_dict.placeholder(str),
      'label_key': 'label',  # of the set that stands for JFT
      'num_workers': 0,
      'accum_steps': 1,
      'remat': 'none',
    }
  )


def study(runs, report, values):
  """The config of a study; `values` is what `shared` returned."""
  return config_dict.ConfigDict(
    {
      'run': 'vit_jax.study.study',
      'shared': values,
      'runs': runs,
      'order': tuple(runs),
      'report': tuple(report),
    }
  )


def link(config, values):
  """Makes a run that has TFDS data only follow `values`."""
  for key in ('accum_steps', 'remat'):
    part = config if key in config else config.model
    part[key] = values.get_oneway_ref(key)
  for part in (config, *config.evals.values()):
    part.data.source.data_dir = values.get_oneway_ref('data_dir')
    part.data.num_workers = values.get_oneway_ref('num_workers')
  return config


def jft(model, args, values, *, epochs=None, lr=None, words=()):
  """Pre-training of `model` by pretrain_jft.py.

  Args:
    model: its name.
    args: with name, classes and tiny, as there.
    values: of `shared`.
    epochs, lr: in place of table 3's.
    words: further arguments of pretrain_jft.py.
  """
  words = [model, f'name={args.name}', f'classes={args.classes}', *words]
  words += [f'epochs={epochs}'] * (epochs is not None)
  words += [f'lr={lr}'] * (lr is not None)
  config = pretrain_jft.get_config(','.join(words + ['tiny'] * args.tiny))
  config.data.source.label_key = values.get_oneway_ref('label_key')
  return link(config, values)


def add_few_shot(config, values, tiny):
  """Few-shot ImageNet whenever 'val' is evaluated, in place.

  As big_vision has it: its images, of which the first 65,000 give each class 30
  and more. `tiny` has 64 images, of which it reads one of each class; as there
  is nothing else of these classes it tests on the same.
  """
  size = config.data.transforms[0]['size']

  def part(split):
    source = common.tfds('imagenet2012', split)
    crop = {'target': 'vit_jax.data.transforms.CentralCrop', 'size': size}
    return {
      'source': source | {'data_dir': values.get_oneway_ref('data_dir')},
      'transforms': [*common.resize(size * 8 // 7), crop],
      'batch_size': config.data.batch_size,
      'num_workers': values.get_oneway_ref('num_workers'),
      'on_error': 'raise',
    }

  train, test = ('train[:64]',) * 2 if tiny else ('train[:65000]', 'validation')
  config.evals.frozen = {
    'target': 'vit_jax.evals.frozen.Frozen',
    'data': {'imagenet': {'train': part(train), 'test': part(test)}},
    'readouts': {
      'fewshot': {
        'target': 'vit_jax.evals.fewshot.FewShot',
        'shots': (1,) if tiny else (5, 10),
        'seeds': (0, 1, 2),
      }
    },
    'features': 'pre_logits',
    'every_steps': config.evals.val.every_steps,
  }


def few_shot(runs, tiny, **best):
  """What a report takes: 5-shot ImageNet, mean and std of the draws."""
  metric = rf'frozen/imagenet/fewshot/{1 if tiny else 5}shot_seed(?P<seed>\d)'
  return {'runs': runs, 'metric': metric, **best}


def add_finetuning(runs, values, *words, path, args):
  """Adds the fine-tunings of a pre-training on one data set, in place.

  Args:
    runs: {name: config}; new names are finetune_PATH_DATA_seedN, and with grid
      dev_PATH_DATA_lrRATE.
    values: of `shared`.
    *words: arguments of finetune.py, data first.
    path: name of the run, pretrain_PATH, that they start from.
    args: with seeds, how many; tiny; grid, whether the rate is the best of
      table 4's on the dev split; real, whether ImageNet has ReaL labels, too.
  """
  data = words[0]
  grid = args.grid and 'bit' not in words  # BiT's rule has its rate

  def make(*more):
    words_of_all = (*words, *more, *(['tiny'] if args.tiny else []))
    config = finetune.get_config(','.join(words_of_all))
    config.init_from.path = f'{{workdir}}/pretrain_{path}'
    return config

  dev = f'dev_{path}_{data}_lr'
  if grid:
    for rate in transfer.RATES[data]:
      runs[f'{dev}{rate:.0e}'] = link(make('dev', f'lr={rate}'), values)
  for seed in range(args.seeds):
    config = make()
    config.seed = seed
    if args.real and data == 'imagenet':
      config.evals.real = transfer.real(config)
    if grid:
      config.best_of = {
        'runs': f'{dev}.*',
        'metric': 'dev/accuracy',
        'take': ('schedule.lr',),
      }
    runs[f'finetune_{path}_{data}_seed{seed}'] = link(config, values)


def finetuned(path, *data, metric='test/accuracy'):
  """What a report takes: an accuracy, averaged over data sets, by seed."""
  of_data = data[0] if len(data) == 1 else f'({"|".join(data)})'
  runs = rf'finetune_{path}_{of_data}_seed(?P<seed>\d+)'
  return {'runs': runs, 'metric': metric}


def exaflops(path):
  """What a report takes: the compute of a pre-training, at its end."""
  return {'runs': f'pretrain_{path}', 'metric': 'exaflops'}


def run_name(model):
  """A model in the name of a run: 'R50+B/16' is R50_B16."""
  return model.replace('+', '_').replace('/', '')


def parse(argument, models, **options):
  """`arguments.parse` of what all scaling studies have, and of `options`.

  Any of `models` may be given; the result's `models` are these, else all.
  """
  args = arguments.parse(
    argument,
    **{model: False for model in models},
    name='jft',
    classes=18_291,
    tiny=False,
    **options,
  )
  given = tuple(model for model in models if getattr(args, model))
  args.models = given or tuple(models)
  return args


def kind(model):
  """The name that figure 5 has for its family."""
  if re.fullmatch(r'R\d+x\d+', model):
    return 'ResNet (BiT)'
  return 'Hybrid' if '+' in model else 'Transformer (ViT)'


def figure(panels, *, title, name):
  """A picture with its table."""
  target = 'vit_jax.reports.scaling.Scaling'
  return {'target': target, 'panels': panels, 'title': title, 'name': name}

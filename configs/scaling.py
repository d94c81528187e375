"""Parts that the scaling studies, scaling_*.py, and ablations.py share.

These studies take the arguments
  name=jft        the TFDS data set of pre-training. JFT is not public, see
                  pretrain_jft.py for what a set of your own must have
  classes=18291   those of JFT; 0 for as many as the data set says it has

and what is set for all runs at once: --config.shared.data_dir, .label_key (of
the data set `name`), .num_workers, .accum_steps and .remat. --study_member=NAME
does one run (`order` has the names), --study_report reports what is done.
"""

import re

from configs import arguments, common, finetune, pretrain_jft, transfer


def shared():
  """Return common.shared, and the label key of the set used for JFT."""
  return common.shared(label_key='label', remat='none')


def follow(config, values):
  """Make a run use `shared` values; return it."""
  config.model.remat = values.get_oneway_ref('remat')
  return common.follow(config, values)


def jft(model, args, values, *, epochs=None, lr=None, words=()):
  """Return the pre-training of `model` by pretrain_jft.py.

  Args:
    model: its name.
    args: with name, classes and tiny, as in pretrain_jft.py.
    values: what `shared` returned.
    epochs, lr: replace those of table 3.
    words: more arguments of pretrain_jft.py.
  """
  words = [model, f'name={args.name}', f'classes={args.classes}', *words]
  words += [f'epochs={epochs}'] * (epochs is not None)
  words += [f'lr={lr}'] * (lr is not None)
  config = pretrain_jft.get_config(','.join(words + ['tiny'] * args.tiny))
  config.data.source.label_key = values.get_oneway_ref('label_key')
  return follow(config, values)


def add_few_shot(config, values, tiny):
  """Add few-shot ImageNet, evaluated whenever 'val' is.

  As in big_vision the examples come from the first 65,000 training images,
  which have at least 30 of each class. `tiny` has 64 images, of which one of
  each class is used; it tests on the same images, as there are no others of
  these classes.
  """
  size = config.data.transforms[0]['size']
  transforms = common.resize_crop(size * 8 // 7, size, 'Resize')

  def part(split):
    source = common.tfds(
      'imagenet2012', split, data_dir=values.get_oneway_ref('data_dir')
    )
    batch_size = config.data.batch_size
    data = common.data(source, transforms, batch_size=batch_size)
    return data | {'num_workers': values.get_oneway_ref('num_workers')}

  train, test = ('train[:64]',) * 2 if tiny else ('train[:65000]', 'validation')
  config.evals.frozen = common.frozen(
    {'imagenet': {'train': part(train), 'test': part(test)}},
    {'fewshot': common.few_shot((1,) if tiny else (5, 10))},
    every_steps=config.evals.val.every_steps,
  )


def add_finetuning(runs, values, *words, path, args):
  """Add the fine-tunings of a pre-trained model on one data set to `runs`.

  Args:
    runs: {name: config}. New names are finetune_PATH_DATA_seedN, and with
      args.grid also dev_PATH_DATA_lrRATE.
    values: what `shared` returned.
    *words: arguments of finetune.py, the data set first.
    path: the runs start from the run pretrain_PATH.
    args: with seeds, their number; tiny; grid, whether the learning rate is the
      best of table 4's on the dev split; real, whether ImageNet is tested on
      its ReaL labels too.
  """
  data = words[0]
  grid = args.grid and 'bit' not in words  # BiT's rule states its rate

  def make(*more):
    all_words = (*words, *more, *(['tiny'] if args.tiny else []))
    config = finetune.get_config(','.join(all_words))
    config.init_from.path = f'{{workdir}}/pretrain_{path}'
    return config

  dev = f'dev_{path}_{data}_lr'
  if grid:
    for rate in transfer.RATES[data]:
      runs[f'{dev}{rate:.0e}'] = follow(make('dev', f'lr={rate}'), values)
  for seed in range(args.seeds):
    config = make()
    config.seed = seed
    if args.real and data == 'imagenet':
      config.evals.real = transfer.real(config)
    if grid:
      config.best_of = transfer.best_of(f'{dev}.*', 'dev')
    runs[f'finetune_{path}_{data}_seed{seed}'] = follow(config, values)


# Functions that reports use.


def few_shot(runs, tiny, **best):
  """Return 5-shot ImageNet accuracy: mean and std over the draws."""
  metric = rf'frozen/imagenet/fewshot/{1 if tiny else 5}shot_seed(?P<seed>\d)'
  return {'runs': runs, 'metric': metric, **best}


def finetuned(path, *data, metric='test/accuracy'):
  """Return an accuracy, averaged over data sets for each seed."""
  of_data = data[0] if len(data) == 1 else f'({"|".join(data)})'
  runs = rf'finetune_{path}_{of_data}_seed(?P<seed>\d+)'
  return {'runs': runs, 'metric': metric}


def exaflops(path):
  """Return the compute of a whole pre-training."""
  return {'runs': f'pretrain_{path}', 'metric': 'exaflops'}


def run_name(model):
  """Return a model's name inside that of a run: R50_B16 for 'R50+B/16'."""
  return model.replace('+', '_').replace('/', '')


def kind(model):
  """Return the name of its family in figure 5."""
  if re.fullmatch(r'R\d+x\d+', model):
    return 'ResNet (BiT)'
  return 'Hybrid' if '+' in model else 'Transformer (ViT)'


def parse(argument, models, **options):
  """Return the values of `options` and of what all scaling studies have.

  `models` are the chosen ones of `models`; all if none is chosen.
  """
  args = arguments.parse(
    argument,
    **arguments.switches(models),
    name='jft',
    classes=18_291,
    may_be_zero=('classes',),
    tiny=False,
    **options,
  )
  args.models = arguments.chosen(args, models)
  return args

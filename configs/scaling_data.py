"""Figures 3 and 4: accuracy against the size of the data of pre-training.

    python -m vit_jax.main --config=configs/scaling_data.py:name=my_set \
        --workdir=DIR --config.shared.data_dir=TFDS_DIR

Arguments (between commas; the first of a list is the default):
  fig4, fig3   which of the figures, see below
  b/32, B/32, L/16, L/32, R50x1, R152x2   of fig4, and
  B/32, B/16, L/32, L/16, H/14, R50x1, R152x2   of fig3: any of them; all, if
                none is given
  name=jft      the TFDS data set of pre-training. JFT is not public, see
                pretrain_jft.py for what a set of your own must have
  classes=18291   those of JFT; 0 for as many as the data set says it has
  images=303000000   its size, of fig4: with the epochs how long it trains, and
                the last x
  epochs=7      of fig4: passes over that many images
  sizes=9M+30M+90M+all   of fig4's subsets; k is a thousand
  i21k=imagenet21k   fig3's TFDS data set of ImageNet-21k, which is not public
                either, see pretrain_imagenet21k.py
  seeds=1       of fig3: fine-tunings of each kind
  grid          of fig3: their rate is the best of table 4's on the dev split
  tiny          all of it in miniature, on the same data: subsets have 9, 30 and
                90 images

For all runs at once: --config.shared.data_dir, and .label_key (of the data
`name`), .num_workers, .accum_steps, .remat. --study_member=NAME does one run
(`order` has the names), --study_report shows what there is.

`fig4`: few-shot accuracy on ImageNet against random subsets of JFT. The models
are pre-trained with pretrain_jft.py's settings, the same for all sizes, and
with nothing added to regularise. Every 5000 steps both the accuracy on 50,000
images kept for validation and that of the 5-shot linear readout are measured;
the figure shows the latter where the former was best, the paper's early
stopping, with the spread of 3 draws of the shots. The paper has a picture only;
by its text, from memory, B/32 is far below R50x1 on 9M images and above it from
90M on, and so L/16 with R152x2. Left open there, and our choice:
- how long: for each size as many steps as 7 epochs of all images are: the same
  hyper-parameters, and what early stopping is for. (7 epochs of 9M images would
  be 15k steps, 10k of them warm-up.)
- which images: the first of TFDS's order, which is random, so that a subset
  holds the smaller ones. (A set prepared with disable_shuffling is not random.)
- that "best validation accuracy" is of the pre-training's own labels.
- ViT-b, "all hidden dimensions halved": 6 heads. Its rate is B/32's.
- ridge strength and images of the few-shot readout: big_vision's.

`fig3`: ImageNet accuracy after pre-training on ImageNet, ImageNet-21k and JFT.
ViTs by pretrain_imagenet.py, pretrain_imagenet21k.py and pretrain_jft.py, each
with its row of table 3 (the smaller the data the more regularised), fine-tuned
by finetune.py. H/14 is on JFT only, for table 3 has it nowhere else but among
"all ViT" of ImageNet. BiT's ResNets by pretrain_bit.py, and on JFT by table 7's
SGD, fine-tuned by finetune.py's `bit`; the paper draws the region between a
small and a large one, here the two are lines.

Expected of fig3 (table 5, of ResNets table 7), which figure_3_paper.png draws:

              ImageNet   ImageNet-21k   JFT-300M
    B/32         73.38          81.28      80.73
    B/16         77.91          83.97      84.15
    L/32         71.16          80.99      84.37
    L/16         76.53          85.15      87.12
    H/14             -          85.13      88.04
    R50x1            -              -      78.24
    R152x2           -              -      84.37

The label smoothing with which the paper regularises on small data is not known.
"""

import re

from configs import (
  pretrain_bit,
  pretrain_imagenet,
  pretrain_imagenet21k,
  scaling,
)
from configs.published import TABLE_5, fraction
from vit_jax.models import names

FIGURES = {
  'fig4': ('b/32', 'B/32', 'L/16', 'L/32', 'R50x1', 'R152x2'),
  'fig3': ('B/32', 'B/16', 'L/32', 'L/16', 'H/14', 'R50x1', 'R152x2'),
}
MODELS = tuple(dict.fromkeys((*FIGURES['fig3'], *FIGURES['fig4'])))
RESNETS = ('R50x1', 'R152x2')
UNITS = {'': 1, 'k': 1000, 'M': 1_000_000}
IMAGES = {  # data of fig3, in the names of published.py
  'imagenet1k': (1_280_000, 'ImageNet'),
  'imagenet21k': (14_200_000, 'ImageNet-21k'),
  'jft': (303_000_000, 'JFT-300M'),
}
TABLE_7_SGD = {'R50x1': 78.24, 'R152x2': 84.37}
VARIANTS = (
  '',
  'name=my_set,classes=0,images=5000000,sizes=500k+1M+all,B/32,R50x1',
  'fig3',
  'fig3,B/16,H/14,R50x1,seeds=3,grid',
  'tiny',
  'B/32,sizes=9M+all,tiny',
  'fig3,tiny',
)


def get_config(argument=''):
  args = scaling.parse(
    argument,
    MODELS,
    figure=tuple(FIGURES),
    images=303_000_000,
    epochs=7.0,
    sizes='9M+30M+90M+all',
    i21k='imagenet21k',
    seeds=1,
    grid=False,
  )
  known = FIGURES[args.figure]
  models = args.models if args.models != MODELS else known
  if other := [model for model in models if model not in known]:
    raise ValueError(
      f'{args.figure} does not have {", ".join(other)}. It has '
      f'{", ".join(known)}.'
    )
  args.real = False
  return {'fig3': figure_3, 'fig4': figure_4}[args.figure](models, args)


def figure_4(models, args):
  """Subsets of one data set, few-shot."""
  values, runs, lines = scaling.shared(), {}, {}
  sizes = _sizes(args)
  for model in models:
    lines[_label(model)] = points = []
    for size, count in sizes.items():
      name = f'pretrain_{_name(model)}_{size}'
      runs[name] = _on_subset(model, count, args, values)
      best = scaling.few_shot(name, args.tiny, best='val/accuracy')
      points.append({'x': count or args.images, 'y': best})
  ticks = {count or args.images: size for size, count in sizes.items()}
  panel = {
    'title': f'Pre-training on subsets of {args.name}',
    'xlabel': 'images of pre-training',
    'ylabel': 'linear 5-shot ImageNet accuracy (%)',
    'ticks': ticks,
    'lines': lines,
  }
  title = 'Few-shot accuracy against the size of the data'
  report = scaling.figure((panel,), title=title, name='figure_4')
  return scaling.study(runs, (report,), values)


def _sizes(args):
  """{as written: number of images, None for all}."""
  sizes = {}
  for size in args.sizes.split('+'):
    match = re.fullmatch(r'([1-9]\d*)([kM]?)', size)
    if not match and size != 'all':
      raise ValueError(
        f'sizes={args.sizes}: {size!r} is no size; write such as 500k, 9M or '
        'all, with + between them.'
      )
    unit = UNITS[match[2]] if match and not args.tiny else 1
    sizes[size] = int(match[1]) * unit if match else None
  return sizes


def _on_subset(model, count, args, values):
  """Pre-training on the first images, for as long as on all of them."""
  base = {'b/32': 'B/32'}.get(model, model)
  config = scaling.jft(base, args, values)
  if base != model and not args.tiny:
    half = names.settings('S/32')  # but for the heads it is B/32, halved
    config.model.update(half | {'representation_size': half['width']})
  held_out = _held_out(config)
  end = '' if count is None else held_out + count
  config.data.source.split = f'train[{held_out}:{end}]'
  if not args.tiny:
    del config.total_epochs
    num_examples = args.epochs * args.images
    config.total_steps = int(num_examples / config.data.batch_size)
  scaling.add_few_shot(config, values, args.tiny)
  return config


def _held_out(config):
  """How many images validation has: the first."""
  return int(re.fullmatch(r'train\[(\d+):\]', config.data.source.split)[1])


def figure_3(models, args):
  """Three data sets, fine-tuned on ImageNet."""
  values, runs = scaling.shared(), {}
  measured, published = {}, {}
  for model in models:
    for data, (images, _) in IMAGES.items():
      if model == 'H/14' and data != 'jft':
        continue
      path = f'{data}_{_name(model)}'
      runs[f'pretrain_{path}'] = _pretraining(model, data, args, values)
      words = ['imagenet', model] + ['bit'] * (model in RESNETS)
      scaling.add_finetuning(runs, values, *words, path=path, args=args)
      point = {'x': images, 'y': scaling.finetuned(path, 'imagenet')}
      measured.setdefault(_label(model), []).append(point)
  for model in FIGURES['fig3']:
    published[_label(model)] = [
      {'x': images, 'y': {'value': fraction(value)}}
      for data, (images, _) in IMAGES.items()
      if (value := _published(model, data)) is not None
    ]
  title = 'ImageNet accuracy against the data of pre-training'
  report = (
    scaling.figure((_panel(measured),), title=title, name='figure_3'),
    scaling.figure(
      (_panel(published),),
      title=f'{title}, as published',
      name='figure_3_paper',
    ),
  )
  return scaling.study(runs, report, values)


def _pretraining(model, data, args, values):
  tiny = ['tiny'] * args.tiny
  if data == 'jft':
    sgd = ['sgd'] if model in RESNETS else []
    return scaling.jft(model, args, values, words=sgd)
  if model in RESNETS:
    words = [{'imagenet1k': 'imagenet'}.get(data, data), model, *tiny]
    config = pretrain_bit.get_config(','.join(words))
  elif data == 'imagenet1k':
    config = pretrain_imagenet.get_config(','.join([model, *tiny]))
  else:
    config = pretrain_imagenet21k.get_config(','.join([model, *tiny]))
  if data == 'imagenet21k':
    config.data.source.name = args.i21k
  return scaling.link(config, values)


def _published(model, data):
  if model in RESNETS:
    return TABLE_7_SGD[model] if data == 'jft' else None
  return TABLE_5.get((data, model), {}).get('imagenet')


def _panel(lines):
  return {
    'title': 'ImageNet',
    'xlabel': 'data of pre-training',
    'ylabel': 'top-1 accuracy (%)',
    'ticks': dict(IMAGES.values()),
    'lines': lines,
  }


def _label(model):
  return f'{model} (BiT)' if model in RESNETS else f'ViT-{model}'


def _name(model):
  # A file system may not tell b32 from B32.
  return 'half_B32' if model == 'b/32' else scaling.run_name(model)

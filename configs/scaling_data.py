"""Figures 3 and 4: accuracy against the size of the data of pre-training.

    python -m vit_jax.main --config=configs/scaling_data.py:name=my_set \
        --workdir=DIR --config.shared.data_dir=TFDS_DIR

Arguments (separated by commas; the first of a list is the default):
  fig4, fig3   which of the figures, see below
  b/32, B/32, L/16, L/32, R50x1, R152x2   of fig4, and
  B/32, B/16, L/32, L/16, H/14, R50x1, R152x2   of fig3: any of them; all, if
                none is given
  name=jft, classes=18291   the data set of pre-training, see scaling.py
  images=303000000   fig4: size of the data set; with `epochs` it determines the
                number of steps, and it is the last x
  epochs=7      fig4: passes over that many images
  sizes=9M+30M+90M+all   fig4: subsets; k is a thousand
  i21k=imagenet21k   fig3: the TFDS data set of ImageNet-21k, which is not
                public either, see pretrain_imagenet21k.py
  seeds=1       fig3: fine-tunings of each kind
  grid          fig3: choose their rate among table 4's on the dev split
  tiny          all of it in miniature, on the same data: subsets have 9, 30 and
                90 images

scaling.py says how to set values for all runs, and how to do single runs.

`fig4`: few-shot accuracy on ImageNet against the size of random subsets of JFT.
The models are pre-trained with pretrain_jft.py's settings, the same for all
sizes, without additional regularisation. Every 5000 steps the accuracy on
50,000 held-out images and the accuracy of the 5-shot linear readout are
measured. The figure shows the second where the first was best (the paper's
early stopping), with the spread of 3 draws of the shots. The paper has no
numbers; according to its text, from memory, B/32 is far below R50x1 on 9M
images and above it from 90M on, and L/16 relates to R152x2 in the same way. The
paper leaves the following open; these are our choices:
- duration: for each size as many steps as 7 epochs of all images have. The
  hyper-parameters are then the same, and early stopping has a purpose. (7
  epochs of 9M images would be 15k steps, 10k of them warm-up.)
- images: the first in TFDS's order, which is random, so that a subset contains
  the smaller ones. (A set prepared with disable_shuffling is not random.)
- "best validation accuracy" refers to the labels of the pre-training.
- ViT-b, "all hidden dimensions halved", has 6 heads and B/32's rate.
- ridge strength and images of the few-shot readout are big_vision's.

`fig3`: ImageNet accuracy after pre-training on ImageNet, ImageNet-21k and JFT.
ViTs are pre-trained by pretrain_imagenet.py, pretrain_imagenet21k.py and
pretrain_jft.py, each with its row of table 3 (the less data, the more
regularisation), and fine-tuned by finetune.py. H/14 is pre-trained on JFT only,
because table 3 lists it elsewhere only as part of "all ViT" of ImageNet. BiT's
ResNets are pre-trained by pretrain_bit.py, on JFT by table 7's SGD, and
fine-tuned by finetune.py's `bit`. The paper draws the region between a small
and a large ResNet; here the two are lines.

Expected for fig3: TABLE_5 (ResNets: TABLE_7) in configs/published.py, which
figure_3_paper.png draws: from 73.38% for B/32 on ImageNet to 88.04% for H/14 on
JFT. The paper regularises on small data with label smoothing of an unknown
value.
"""

import re

from configs import (
  common,
  pretrain_bit,
  pretrain_imagenet,
  pretrain_imagenet21k,
  pretrain_jft,
  scaling,
)
from configs.published import TABLE_5, TABLE_7, fraction
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
  """Return few-shot accuracy against subsets of one data set."""
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
  report = common.figure((panel,), title=title, name='figure_4')
  return common.study(runs, (report,), shared=values)


def _sizes(args):
  """Return {size as written: number of images, None for all}."""
  sizes = {}
  for size in args.sizes.split('+'):
    match = re.fullmatch(r'([1-9]\d*)([kM]?)', size)
    if not match and size != 'all':
      raise ValueError(
        f'sizes={args.sizes}: {size!r} is not a size. Write e.g. 500k+9M+all.'
      )
    unit = UNITS[match[2]] if match and not args.tiny else 1
    sizes[size] = int(match[1]) * unit if match else None
  return sizes


def _on_subset(model, count, args, values):
  """Return the pre-training on the first images, with the steps of all."""
  base = {'b/32': 'B/32'}.get(model, model)
  config = scaling.jft(base, args, values)
  if base != model and not args.tiny:
    config.model.update(names.settings('S/32'))  # B/32 halved, except heads
    config.model.head.representation_size = config.model.width
  held_out = pretrain_jft.held_out(args.tiny)
  end = '' if count is None else held_out + count
  config.data.source.split = f'train[{held_out}:{end}]'
  if not args.tiny:
    del config.total_epochs
    num_examples = args.epochs * args.images
    config.total_steps = int(num_examples / config.data.batch_size)
  scaling.add_few_shot(config, values, args.tiny)
  return config


def figure_3(models, args):
  """Return ImageNet accuracy after pre-training on three data sets."""
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
    common.figure((_panel(measured),), title=title, name='figure_3'),
    common.figure(
      (_panel(published),),
      title=f'{title}, as published',
      name='figure_3_paper',
    ),
  )
  return common.study(runs, report, shared=values)


def _pretraining(model, data, args, values):
  argument = model + ',tiny' * args.tiny
  if data == 'jft':
    sgd = ['sgd'] if model in RESNETS else []
    return scaling.jft(model, args, values, words=sgd)
  if model in RESNETS:
    name = {'imagenet1k': 'imagenet'}.get(data, data)
    config = pretrain_bit.get_config(f'{name},{argument}')
  elif data == 'imagenet1k':
    config = pretrain_imagenet.get_config(argument)
  else:
    config = pretrain_imagenet21k.get_config(argument)
  if data == 'imagenet21k':
    config.data.source.name = args.i21k
  return scaling.follow(config, values)


def _published(model, data):
  if model in RESNETS:
    return TABLE_7[model, 'SGD']['imagenet'] if data == 'jft' else None
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
  # Some file systems do not distinguish b32 from B32.
  return 'half_B32' if model == 'b/32' else scaling.run_name(model)

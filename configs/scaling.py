"""The paper's scaling studies: figures 3, 4, 5 and 8, and table 6.

    python -m vit_jax.main --config=configs/scaling.py:compute,name=my_set \
        --workdir=DIR --config.shared.data_dir=TFDS_DIR

Models are pre-trained by pretrain_paper.py (ResNets of fig3 by pretrain_bit.py)
and evaluated on ImageNet. These are many runs: --study_member=NAME does one
(`order` has the names), --study_report reports what is done. All share
--config.shared.data_dir, .label_key (of the data set `name`), .num_workers,
.accum_steps and .remat.

Arguments (separated by commas; the first of a list is the default):
  compute   figure 5 and table 6: accuracy after fine-tuning on ImageNet,
            CIFAR-10, CIFAR-100, Pets and Flowers against the compute of
            pre-training
  data      with fig4 (the default) or fig3: ImageNet accuracy against the size
            of the pre-training data
  shape     figure 8: which dimension of a ViT is worth its compute
  B/32, ..., b/32   any models of the study (MODELS below), and
  depth, width, mlp, patch, all   any families of shape; all, if none is given
  name=jft, classes=18291   the data set, see pretrain_paper.py
  seeds=1   fine-tunings of each kind in compute and fig3
  grid      choose their learning rate among table 4's on the dev split
  real      compute: test ImageNet on its ReaL labels too
  r200_lr=RATE   compute: of R200x3, which the paper does not state; without it
            this model is left out
  images=303000000, sizes=9M+30M+90M+all   fig4: size of the data set, and its
            subsets; k is a thousand
  i21k=imagenet21k   fig3: the TFDS data set of ImageNet-21k
  lr=6e-4   shape: learning rate
  epochs=7  fig4 and shape
  tiny      all of it in miniature, on the same data

Expected: the numbers of published.py, which the reports show next to the
results.

`compute`: exaFLOPs are counted as in table 6: three times the forward pass, two
for each multiply-add, images x epochs. Our counts of ViTs are within 0.1% of
the printed ones (B/32: 2.3% above), those of ResNets 3.5% (R50x2) to 5.0%
(R50x1) above, as if the paper did not count the products with zeros of the
padding. A ViT needs 2 to 4 times less compute than a ResNet for the same
average. The paper fine-tunes a ResNet in two ways, this one and BiT's, and
reports the better; here all models are fine-tuned in the same way.

`data,fig4`: models pre-trained on random subsets, without additional
regularisation, at the step with the best accuracy on held-out images. The paper
has no numbers: from memory, B/32 is far below R50x1 on 9M images and above it
from 90M on. Our choices: each size has as many steps as 7 epochs of all images;
a subset has the first images in TFDS's order, which is random; ViT-b, "all
hidden dimensions halved", has 6 heads and B/32's rate.

`data,fig3`: H/14 is pre-trained on JFT only. ResNets are pre-trained by BiT's
recipe, on JFT by table 7's SGD, and fine-tuned by finetune.py's `bit`.

`shape`: 5-shot accuracy relative to BASE. The paper says that depth helps most,
up to 64 layers, but less and less after 16; that width changes least; and that
smaller patches help. Our choices: the values in FAMILIES, from memory powers of
2 around the base (only the 64 layers are certain; 56 is the nearest divisor of
224 to 64); heads of 64 dimensions; table 3's rate of L/32; 7 epochs.
"""

import re

from configs import (
  arguments,
  common,
  finetune,
  pretrain_bit,
  pretrain_paper,
  transfer,
)
from configs.published import TABLE_5, TABLE_6, TABLE_7, fraction
from configs.transfer import RATES, TITLES
from vit_jax.models import names

FIGURE_3 = ('B/32', 'B/16', 'L/32', 'L/16', 'H/14', 'R50x1', 'R152x2')
FIGURE_4 = ('b/32', 'B/32', 'L/16', 'L/32', 'R50x1', 'R152x2')
DATA = {  # of figure 3, in the names of published.py: images, label
  'imagenet1k': (1_280_000, 'ImageNet'),
  'imagenet21k': (14_200_000, 'ImageNet-21k'),
  'jft': (303_000_000, 'JFT-300M'),
}
BASE = {'depth': 8, 'width': 1024, 'mlp_dim': 2048, 'patch': 32}
FAMILIES = {  # changes of the base in figure 8
  'depth': [{'depth': d} for d in (2, 4, 16, 32, 64)],
  'width': [{'width': w} for w in (256, 512, 2048)],
  'mlp': [{'mlp_dim': m} for m in (512, 1024, 4096, 8192)],
  'patch': [{'patch': p} for p in (56, 16, 8)],
  'all': [
    {'depth': 4, 'width': 512, 'mlp_dim': 1024, 'patch': 56},
    {'depth': 16, 'width': 2048, 'mlp_dim': 4096, 'patch': 16},
  ],
}
MODELS = tuple(dict.fromkeys((*(model for model, _ in TABLE_6), 'b/32')))


def get_config(argument=''):
  args = arguments.parse(
    argument,
    study=('compute', 'data', 'shape'),
    figure=('fig4', 'fig3'),
    **arguments.switches((*MODELS, *FAMILIES)),
    name='jft',
    classes=18_291,
    may_be_zero=('classes',),
    seeds=1,
    grid=False,
    real=False,
    r200_lr=float,
    images=303_000_000,
    sizes='9M+30M+90M+all',
    i21k='imagenet21k',
    lr=6e-4,
    epochs=7.0,
    tiny=False,
  )
  study, known = {
    'compute': (compute, MODELS[:-1]),
    'data': {'fig4': (figure_4, FIGURE_4), 'fig3': (figure_3, FIGURE_3)}[
      args.figure
    ],
    'shape': (shape, tuple(FAMILIES)),
  }[args.study]
  chosen = [x for x in (*MODELS, *FAMILIES) if getattr(args, x)]
  if others := [x for x in chosen if x not in known]:
    raise ValueError(
      f'{", ".join(others)} is not in this study. Use {", ".join(known)}.'
    )
  values = shared()
  runs, reports = study(
    [x for x in known if x in chosen] or known, args, values
  )
  return common.study(runs, reports, shared=values)


# Figure 5 and table 6.


def compute(models, args, values):
  """Return (runs, reports): accuracy after fine-tuning against compute."""
  if args.R200x3 and args.r200_lr is None:
    raise ValueError(
      'The paper does not state the learning rate of R200x3. Give one, '
      'r200_lr=RATE; table 3 has 1e-3 for R50x2 and 6e-4 for R152x2.'
    )
  rows = [
    (model, epochs)
    for model, epochs in TABLE_6
    if model in models and (model != 'R200x3' or args.r200_lr)
  ]
  runs = {}
  for model, epochs in rows:
    path = _path(model, epochs)
    lr = args.r200_lr if model == 'R200x3' else None
    runs[f'pretrain_{path}'] = jft(model, args, values, epochs=epochs, lr=lr)
    for data in RATES:
      add_finetuning(runs, values, data, model, path=path, args=args)
  title = 'Accuracy against compute'
  return runs, (
    common.figure(_panels(rows, _measured), title=title, name='figure_5'),
    common.figure(
      _panels(TABLE_6, _published),
      title=f'{title}, as published',
      name='figure_5_paper',
    ),
    common.table(
      _cells(rows, args.real),
      title='Model, epochs; fine-tuned at 384 px',
      digits=2,
      name='table_6',
    ),
  )


def _path(model, epochs):
  return f'{run_name(model)}_{epochs}ep'


def _measured(model, epochs, *data):
  path = _path(model, epochs)
  return {'x': exaflops(path), 'y': finetuned(path, *data)}


def _published(model, epochs, *data):
  row = TABLE_6[model, epochs]
  mean = sum(row[name] for name in data) / len(data)
  return {'x': row['exaflops'], 'y': {'value': fraction(mean)}}


def _panels(rows, point_of):
  """Return figure 5's panels; point_of(model, epochs, *data) is {x, y}."""
  panels = []
  for title, data in (
    ('Average of 5', tuple(RATES)),
    (TITLES['imagenet'], ('imagenet',)),
  ):
    lines = {}
    for model, epochs in rows:
      kind = 'Hybrid' if '+' in model else 'Transformer (ViT)'
      kind = 'ResNet (BiT)' if 'x' in model else kind
      point = point_of(model, epochs, *data) | {'name': f'{model}, {epochs}'}
      lines.setdefault(kind, []).append(point)
    panels.append(
      {
        'title': title,
        'xlabel': 'pre-training compute (exaFLOPs)',
        'ylabel': 'transfer accuracy (%)',
        'joined': False,
        'lines': lines,
      }
    )
  return panels


def _cells(rows, real):
  """Yield table 6, with a row of results and one of published numbers."""
  columns = {TITLES[data]: (data,) for data in RATES}
  columns['Average'] = tuple(RATES)
  for model, epochs in rows:
    for of, point_of in (('', _measured), (' paper', _published)):
      row = {'row': f'{model}, {epochs}{of}'}
      for column, data in columns.items():
        yield row | {'column': column} | point_of(model, epochs, *data)['y']
  for model, epochs in rows if real else ():
    row, column = f'{model}, {epochs}', TITLES['real']
    spec = finetuned(_path(model, epochs), 'imagenet', metric='real/accuracy')
    yield {'row': row, 'column': column, **spec}
    value = fraction(TABLE_6[model, epochs]['real'])
    yield {'row': f'{row} paper', 'column': column, 'value': value}


# Figure 4.


def figure_4(models, args, values):
  """Return (runs, reports): few-shot accuracy against subsets of the data."""
  runs, lines, sizes = {}, {}, _sizes(args)
  for model in models:
    lines[_label(model)] = points = []
    for size, count in sizes.items():
      name = f'pretrain_{run_name(model)}_{size}'
      runs[name] = _on_subset(model, count, args, values)
      best = few_shot(name, args.tiny, best='val/accuracy')
      points.append({'x': count or args.images, 'y': best})
  panel = {
    'title': f'Pre-training on subsets of {args.name}',
    'xlabel': 'images of pre-training',
    'ylabel': 'linear 5-shot ImageNet accuracy (%)',
    'ticks': {count or args.images: size for size, count in sizes.items()},
    'lines': lines,
  }
  title = 'Few-shot accuracy against the size of the data'
  return runs, (common.figure((panel,), title=title, name='figure_4'),)


def _sizes(args):
  """Return {size as written: number of images, None for all}."""
  sizes = {}
  for size in args.sizes.split('+'):
    match = re.fullmatch(r'([1-9]\d*)([kM]?)', size)
    if not match and size != 'all':
      raise ValueError(
        f'sizes={args.sizes}: {size!r} is not a size. Write e.g. 500k+9M+all.'
      )
    unit = {'': 1, 'k': 1000, 'M': 1_000_000}[match[2]] if match else 1
    count = int(match[1]) * (1 if args.tiny else unit) if match else None
    sizes[size] = count
  return sizes


def _on_subset(model, count, args, values):
  """Return the pre-training on the first images, with the steps of all."""
  base = {'b/32': 'B/32'}.get(model, model)
  config = jft(base, args, values)
  if base != model and not args.tiny:
    config.model.update(names.settings('S/32'))  # B/32 halved, except heads
    config.model.head.representation_size = config.model.width
  if count is not None:
    start = int(re.search(r'\d+', config.data.source.split)[0])
    config.data.source.split = f'train[{start}:{start + count}]'
  if not args.tiny:
    del config.total_epochs
    num_examples = args.epochs * args.images
    config.total_steps = int(num_examples / config.data.batch_size)
  add_few_shot(config, values, args.tiny)
  return config


# Figure 3.


def figure_3(models, args, values):
  """Return (runs, reports): accuracy after pre-training on three data sets."""
  runs, measured, published = {}, {}, {}
  for model in models:
    is_resnet = 'x' in model
    for data, (images, _) in DATA.items():
      if model == 'H/14' and data != 'jft':
        continue
      path = f'{data}_{run_name(model)}'
      runs[f'pretrain_{path}'] = _pretraining(model, data, args, values)
      words = ['imagenet', model] + ['bit'] * is_resnet
      add_finetuning(runs, values, *words, path=path, args=args)
      point = {'x': images, 'y': finetuned(path, 'imagenet')}
      measured.setdefault(_label(model), []).append(point)
  for model in FIGURE_3:
    for data, (images, _) in DATA.items():
      row = TABLE_5.get((data, model), {})
      if data == 'jft':
        row = TABLE_7.get((model, 'SGD'), row)
      if row:
        point = {'x': images, 'y': {'value': fraction(row['imagenet'])}}
        published.setdefault(_label(model), []).append(point)
  title = 'ImageNet accuracy against the data of pre-training'
  return runs, tuple(
    common.figure(
      (
        {
          'title': 'ImageNet',
          'xlabel': 'data of pre-training',
          'ylabel': 'top-1 accuracy (%)',
          'ticks': dict(DATA.values()),
          'lines': lines,
        },
      ),
      title=title + more,
      name=name,
    )
    for lines, more, name in (
      (measured, '', 'figure_3'),
      (published, ', as published', 'figure_3_paper'),
    )
  )


def _pretraining(model, data, args, values):
  is_resnet = 'x' in model
  if data == 'jft':
    return jft(model, args, values, words=['sgd'] * is_resnet)
  recipe = pretrain_bit if is_resnet else pretrain_paper
  words = [
    {'imagenet1k': 'imagenet'}.get(data, data),
    model,
    *['tiny'] * args.tiny,
  ]
  config = recipe.get_config(','.join(words))
  if data == 'imagenet21k':
    config.data.source.name = args.i21k
  return follow(config, values)


def _label(model):
  return f'{model} (BiT)' if 'x' in model else f'ViT-{model}'


# Figure 8.


def shape(families, args, values):
  """Return (runs, reports): few-shot accuracy of ViTs of other shapes."""

  def point(name):
    y = few_shot(f'pretrain_{name}', args.tiny)
    return {'x': exaflops(name), 'y': y, 'name': name}

  runs, lines = {'pretrain_base': _of_shape({}, args, values)}, {}
  for family in families:
    points = [point('base')]
    for change in FAMILIES[family]:
      name = f'{family}_{next(iter(change.values()))}'
      runs[f'pretrain_{name}'] = _of_shape(change, args, values)
      points.append(point(name))
    lines[family] = points
  panel = {
    'title': 'Shape of a ViT',
    'xlabel': 'relative compute',
    'ylabel': 'ImageNet 5-shot accuracy (%)',
    'relative_to': exaflops('base'),
    'lines': lines,
  }
  title = 'Accuracy against compute, by dimension'
  return runs, (common.figure((panel,), title=title, name='figure_8'),)


def _of_shape(change, args, values):
  """Return the pre-training of L/32 with another shape."""
  shape = BASE | change
  config = jft('L/32', args, values, epochs=args.epochs, lr=args.lr)
  # Images and patches of `tiny` are 8 times smaller.
  thinner, lower = (32, 8) if args.tiny else (1, 1)
  width, patch = shape['width'] // thinner, shape['patch'] // lower
  config.model.update(
    width=width,
    depth=max(1, shape['depth'] // lower),
    mlp_dim=shape['mlp_dim'] // thinner,
    num_heads=max(1, shape['width'] // 64 // lower),
    head={'representation_size': width},
    embedding={'patch_size': (patch, patch)},
  )
  add_few_shot(config, values, args.tiny)
  return config


# Parts that ablations.py shares.


def shared():
  """Return common.shared, and the label key of the set used for JFT."""
  return common.shared(label_key='label', remat='none')


def follow(config, values):
  """Make a run use `shared` values; return it."""
  config.model.remat = values.get_oneway_ref('remat')
  return common.follow(config, values)


def jft(model, args, values, *, epochs=None, lr=None, words=()):
  """Return the pre-training of a model on JFT by pretrain_paper.py.

  Args:
    model: its name.
    args: with name, classes and tiny, as in pretrain_paper.py.
    values: what `shared` returned.
    epochs, lr: replace those of table 3.
    words: more arguments of pretrain_paper.py.
  """
  words = ['jft', model, f'name={args.name}', f'classes={args.classes}', *words]
  words += [f'epochs={epochs}'] * (epochs is not None)
  words += [f'lr={lr}'] * (lr is not None)
  config = pretrain_paper.get_config(','.join(words + ['tiny'] * args.tiny))
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
    for rate in RATES[data]:
      runs[f'{dev}{rate:.0e}'] = follow(make('dev', f'lr={rate}'), values)
  for seed in range(args.seeds):
    config = make()
    config.seed = seed
    if args.real and data == 'imagenet':
      config.evals.real = transfer.real(config)
    if grid:
      config.best_of = transfer.best_of(f'{dev}.*', 'dev')
    runs[f'finetune_{path}_{data}_seed{seed}'] = follow(config, values)


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
  if model == 'b/32':  # some file systems do not distinguish b32 from B32
    return 'half_B32'
  return model.replace('+', '_').replace('/', '')

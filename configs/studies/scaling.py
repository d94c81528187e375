r"""The paper's scaling studies: figures 3, 4, 5 and 8, and table 6.

    python -m vit_jax.main --workdir=DIR \
        --config=configs/studies/scaling.py:compute,name=my_set \
        --config.shared.data_dir=TFDS_DIR

Models are pre-trained by pretrain_paper.py (ResNets of fig3 by pretrain_bit.py)
and evaluated on ImageNet. These are many runs: --study_member=NAME does one,
--study_report reports what is done. All share --config.shared.data_dir,
.label_key (of the data set `name`), .num_workers, .accum_steps and .remat.

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
  lr=RATE   shape: 6e-4. compute: the rate of R200x3, which the paper omits;
            without it this model is left out
  images=303000000, sizes=9M+30M+90M+all   fig4: size of the data set, and its
            subsets; k is a thousand
  epochs=7  fig4 and shape
  tiny      all of it in miniature, on the same data

Expected: the numbers of published.py, which the reports show.

`compute`: exaFLOPs are counted as in table 6: three times the forward pass, two
for each multiply-add, images x epochs. Our counts of ViTs are within 0.1% of
the printed ones (B/32: 2.3% above), those of ResNets 3.5% (R50x2) to 5.0%
(R50x1) above, as if the paper did not count the products with zeros of the
padding. Fine-tuning has finetune.py's default rates, for ResNets too, where the
paper reports the better of this and BiT's.

`data,fig4`: 5-shot accuracy at the step with the best one on held-out images.
The paper has no numbers: from memory, B/32 is far below R50x1 on 9M images and
above it from 90M on. Our choices: each size has as many steps as 7 epochs of
all images; a subset has the first images in TFDS's order, which is random;
ViT-b, "all hidden dimensions halved", has 6 heads and B/32's rate.

`data,fig3`: H/14 is pre-trained on JFT only. ResNets are pre-trained by BiT's
recipe, on JFT by table 7's SGD, and fine-tuned by finetune.py's `bit`.

`shape`: 5-shot accuracy relative to BASE. The paper says that depth helps most,
up to 64 layers, width least, and that smaller patches help. Our choices: the
values in FAMILIES, from memory powers of 2 around the base (only the 64 layers
are certain; 56 is the nearest divisor of 224 to 64); heads of 64 dimensions;
table 3's rate of L/32; 7 epochs.
"""

import itertools
import re

from configs import arguments, common, finetune
from configs.pretrain_bit import get_config as pretrain_bit
from configs.pretrain_paper import get_config as pretrain_paper
from configs.published import TABLE_5, TABLE_6, TABLE_7, fraction
from configs.transfer import RATES, TITLES
from vit_jax.zoo import names

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
    (*MODELS, *FAMILIES, 'tiny'),
    study=('compute', 'data', 'shape'),
    figure=('fig4', 'fig3'),
    name='jft',
    classes=18_291,
    seeds=1,
    lr=float,
    images=303_000_000,
    sizes='9M+30M+90M+all',
    epochs=7.0,
  )
  study, known = {
    'compute': (compute, MODELS[:-1]),
    'fig4': (figure_4, FIGURE_4),
    'fig3': (figure_3, FIGURE_3),
    'shape': (shape, FAMILIES),
  }[args.figure if args.study == 'data' else args.study]
  chosen = arguments.chosen(args, known, refused=(*MODELS, *FAMILIES))
  values = shared()
  runs, reports = study(chosen, args, values)
  return common.study(runs, reports, shared=values)


# Figure 5 and table 6.


def compute(models, args, values):
  """Return (runs, reports): accuracy after fine-tuning against compute."""
  if not (args.lr or args.R200x3):
    models = [x for x in models if x != 'R200x3']
  rows = [row for row in TABLE_6 if row[0] in models]
  runs = {}
  for model, epochs in rows:
    path = _path(model, epochs)
    lr = args.lr if model == 'R200x3' else None
    runs[f'pretrain_{path}'] = jft(model, args, values, epochs=epochs, lr=lr)
    for data in RATES:
      runs |= finetunings(values, args, data, model, path=path)
  measured, published = _panels(rows, _measured), _panels(TABLE_6, _published)
  title = 'Accuracy against compute'
  of_paper = {'title': f'{title}, as published', 'name': 'figure_5_paper'}
  of_table = {'title': 'Model, epochs; fine-tuned at 384 px', 'digits': 2}
  return runs, (
    common.figure(*measured, title=title, name='figure_5'),
    common.figure(*published, **of_paper),
    common.table(_cells(rows), **of_table, name='table_6'),
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
  """Yield figure 5's panels; point_of(model, epochs, *data) is {x, y}."""
  xlabel = 'pre-training compute (exaFLOPs)'
  how = {'ylabel': 'transfer accuracy (%)', 'joined': False}
  for title, data in (('Average of 5', RATES), ('ImageNet', ['imagenet'])):
    lines = {}
    for model, epochs in rows:
      kind = 'Hybrid' if '+' in model else 'Transformer (ViT)'
      kind = 'ResNet (BiT)' if 'x' in model else kind
      point = point_of(model, epochs, *data) | {'name': f'{model}, {epochs}'}
      lines.setdefault(kind, []).append(point)
    yield common.panel(title, xlabel, lines, **how)


def _cells(rows):
  """Yield table 6, with a row of results and one of published numbers."""
  columns = {TITLES[data]: (data,) for data in RATES}
  columns['Average'] = tuple(RATES)
  for model, epochs in rows:
    for of, point_of in (('', _measured), (' paper', _published)):
      row = {'row': f'{model}, {epochs}{of}'}
      for column, data in columns.items():
        yield row | {'column': column} | point_of(model, epochs, *data)['y']


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
  how = {'ylabel': 'linear 5-shot ImageNet accuracy (%)'}
  how['ticks'] = {count or args.images: size for size, count in sizes.items()}
  about = f'Pre-training on subsets of {args.name}'
  panel = common.panel(about, 'images of pre-training', lines, **how)
  title = 'Few-shot accuracy against the size of the data'
  return runs, (common.figure(panel, title=title, name='figure_4'),)


def _sizes(args):
  """Return {size as written: number of images, None for all}."""
  units, sizes = {'k': 1000, 'M': 1_000_000}, {}
  for size in args.sizes.split('+'):
    unit = 1 if args.tiny else units.get(size[-1:], 1)
    sizes[size] = None if size == 'all' else int(size.rstrip('kM')) * unit
  return sizes


def _on_subset(model, count, args, values):
  """Return the pre-training on the first images, with the steps of all."""
  config = jft(model.upper() if model == 'b/32' else model, args, values)
  if model == 'b/32' and not args.tiny:
    config.model.update(names.settings('S/32'))  # B/32 halved, except heads
    config.model.head.representation_size = config.model.width
  if count is not None:
    start = int(re.search(r'\d+', config.data.source.split)[0])
    config.data.source.split = f'train[{start}:{start + count}]'
  if not args.tiny:
    del config.total_epochs
    config.total_steps = int(args.epochs * args.images / config.data.batch_size)
  return add_few_shot(config, values, args.tiny)


# Figure 3.


def figure_3(models, args, values):
  """Return (runs, reports): accuracy after pre-training on three data sets."""
  runs, measured, published = {}, {}, {}
  for model, (data, (images, _)) in itertools.product(FIGURE_3, DATA.items()):
    row = TABLE_5.get((data, model))
    if data == 'jft':
      row = TABLE_7.get((model, 'SGD'), row)
    if row:
      point = {'x': images, 'y': {'value': fraction(row['imagenet'])}}
      published.setdefault(_label(model), []).append(point)
    if model in models and (model != 'H/14' or data == 'jft'):
      path = f'{data}_{run_name(model)}'
      runs[f'pretrain_{path}'] = _pretraining(model, data, args, values)
      words = ['imagenet', model] + ['bit'] * ('x' in model)
      runs |= finetunings(values, args, *words, path=path)
      point = {'x': images, 'y': finetuned(path, 'imagenet')}
      measured.setdefault(_label(model), []).append(point)
  how = {'ylabel': 'top-1 accuracy (%)', 'ticks': dict(DATA.values())}
  ours, papers = (
    common.panel('ImageNet', 'data of pre-training', lines, **how)
    for lines in (measured, published)
  )
  title = 'ImageNet accuracy against the data of pre-training'
  of_paper = {'title': f'{title}, as published', 'name': 'figure_3_paper'}
  return runs, (
    common.figure(ours, title=title, name='figure_3'),
    common.figure(papers, **of_paper),
  )


def _pretraining(model, data, args, values):
  is_resnet = 'x' in model
  if data == 'jft':
    return jft(model, args, values, words=['sgd'] * is_resnet)
  recipe = pretrain_bit if is_resnet else pretrain_paper
  words = ['imagenet' if data == 'imagenet1k' else data, model]
  words += ['tiny'] * args.tiny
  return follow(recipe(','.join(words)), values)


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
    lines[family] = [point('base')]
    for change in FAMILIES[family]:
      name = f'{family}_{next(iter(change.values()))}'
      runs[f'pretrain_{name}'] = _of_shape(change, args, values)
      lines[family].append(point(name))
  how = {'ylabel': 'ImageNet 5-shot accuracy (%)'}
  how['relative_to'] = exaflops('base')
  panel = common.panel('Shape of a ViT', 'relative compute', lines, **how)
  title = 'Accuracy against compute, by dimension'
  return runs, (common.figure(panel, title=title, name='figure_8'),)


def _of_shape(change, args, values):
  """Return the pre-training of L/32 with another shape."""
  shape, lr = BASE | change, args.lr or 6e-4
  config = jft('L/32', args, values, epochs=args.epochs, lr=lr)
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
  return add_few_shot(config, values, args.tiny)


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

  `args` has its name, classes and tiny; `epochs` and `lr` replace table 3's;
  `words` are more of its arguments.
  """
  words = ['jft', model, f'name={args.name}', f'classes={args.classes}', *words]
  words += [f'epochs={epochs}'] * (epochs is not None)
  words += [f'lr={lr}'] * (lr is not None)
  config = pretrain_paper(','.join(words + ['tiny'] * args.tiny))
  config.data.source.label_key = values.get_oneway_ref('label_key')
  return follow(config, values)


def add_few_shot(config, values, tiny=False):
  """Evaluate few-shot ImageNet whenever 'val' is; return the run.

  As in big_vision the examples come from the first 65,000 training images,
  which have at least 30 of each class. `tiny` has one image of each class among
  64, and tests on the same images.
  """
  train, test = ('train[:64]',) * 2 if tiny else ('train[:65000]', 'validation')
  size = config.data.transforms[0]['size']
  how = {'data_dir': values.get_oneway_ref('data_dir')}
  how['batch_size'] = config.data.batch_size
  parts = common.few_shot_data('imagenet2012', train, test, size, **how)
  for part in parts.values():
    part['num_workers'] = values.get_oneway_ref('num_workers')
  config.evals.frozen = common.frozen(
    {'imagenet': parts},
    {'fewshot': common.few_shot((1,) if tiny else (5, 10))},
    every_steps=config.evals.val.every_steps,
  )
  return config


def finetunings(values, args, *words, path):
  """Return {finetune_PATH_DATA_seedN: fine-tuning} of the run pretrain_PATH.

  `words` are arguments of finetune.py, the data set first; `args` has seeds,
  their number, and tiny.
  """
  runs = {}
  for seed in range(args.seeds):
    config = finetune.get_config(','.join([*words, *['tiny'] * args.tiny]))
    config.init_from.path = f'{{workdir}}/pretrain_{path}'
    config.seed = seed
    runs[f'finetune_{path}_{words[0]}_seed{seed}'] = follow(config, values)
  return runs


def few_shot(runs, tiny=False, **best):
  """Return 5-shot ImageNet accuracy: mean and std over the draws."""
  metric = rf'frozen/imagenet/fewshot/{1 if tiny else 5}shot_seed(?P<seed>\d)'
  return {'runs': runs, 'metric': metric, **best}


def finetuned(path, *data):
  """Return an accuracy, averaged over data sets for each seed."""
  of_data = data[0] if len(data) == 1 else f'({"|".join(data)})'
  runs = rf'finetune_{path}_{of_data}_seed(?P<seed>\d+)'
  return {'runs': runs, 'metric': 'test/accuracy'}


def exaflops(path):
  """Return the compute of a whole pre-training."""
  return {'runs': f'pretrain_{path}', 'metric': 'exaflops'}


def run_name(model):
  """Return a model's name inside that of a run: R50_B16 for 'R50+B/16'."""
  if model == 'b/32':  # some file systems do not distinguish b32 from B32
    return 'half_B32'
  return model.replace('+', '_').replace('/', '')

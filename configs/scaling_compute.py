"""Figure 5 and table 6: accuracy against the compute of pre-training.

    python -m vit_jax.main --config=configs/scaling_compute.py:name=my_set \
        --workdir=DIR --config.shared.data_dir=TFDS_DIR

One study: each model is pre-trained by pretrain_jft.py, and fine-tuned by
finetune.py on ImageNet, CIFAR-10, CIFAR-100, Pets and Flowers. 17 pre-trainings
and 85 fine-tunings are a lot for one machine; scaling.py says how to do single
runs, and how to set values for all runs at once.

Arguments (separated by commas):
  B/32, B/16, L/32, L/16, H/14, R50x1, R50x2, R101x1, R152x1, R152x2, R200x3,
  R50+B/32, R50+B/16, R50+L/32, R50+L/16   any of them; all, if none is given
  r200_lr=RATE    of R200x3. The paper does not state it; without it the study
                  leaves this model out
  name=jft, classes=18291   the data set of pre-training, see scaling.py
  seeds=1         fine-tunings of each kind; more give error bars
  grid            choose each fine-tuning's rate among table 4's on the dev
                  split (4 more runs each) instead of finetune.py's default
  real            test ImageNet on its ReaL labels too, as in table 6
  tiny            all of it in miniature, on the same data

To set a value of one run: --config.runs.pretrain_H14_14ep.accum_steps=16.

Reports: figure_5.png (.md, .json) shows the results; figure_5_paper.png the
published numbers, drawn in the same way; table_6.md both, line by line. Panels,
axes and lines are the paper's: the average of the five data sets, and ImageNet,
against exaFLOPs of pre-training on a log axis.

exaFLOPs are counted as in table 6: three times the forward pass, two for each
multiply-add, images x epochs. Our counts of ViTs are within 0.1% of the printed
ones (B/32: 2.3% above), those of ResNets 3.5% (R50x2) to 5.0% (R50x1) above, as
if the paper did not count the products with zeros of the padding. The epochs
are table 6's on any data, so that the x axis shows the compute on your data.

Expected: TABLE_6 in configs/published.py, which the reports show; with ReaL it
is also in the docstring of pretrain_jft.py. According to the paper's text a ViT
needs 2 to 4 times less compute than a ResNet for the same average. (The 859
exaFLOPs that table 6 has for R50+L/16, 7 epochs, do not fit 1668 / 2.)

Different from the paper, in addition to what pretrain_jft.py and finetune.py
list: the paper fine-tunes a ResNet in two ways, this one and BiT's, and reports
the better; here all models are fine-tuned in the same way (finetune.py's `bit`
is the other). Without `grid` the learning rate is not chosen at all.
"""

from configs import common, scaling
from configs.published import TABLE_6, fraction
from configs.transfer import RATES, TITLES

DATA = tuple(RATES)
AVERAGE = 'Average of 5'
COMPUTE = 'pre-training compute (exaFLOPs)'


def get_config(argument=''):
  models = tuple(dict.fromkeys(model for model, _ in TABLE_6))
  args = scaling.parse(
    argument, models, r200_lr=float, seeds=1, grid=False, real=False
  )
  values = scaling.shared()
  runs = {}
  rows = tuple(_rows(args))
  for model, epochs in rows:
    path = _path(model, epochs)
    lr = args.r200_lr if model == 'R200x3' else None
    runs[f'pretrain_{path}'] = scaling.jft(
      model, args, values, epochs=epochs, lr=lr
    )
    for data in DATA:
      scaling.add_finetuning(runs, values, data, model, path=path, args=args)
  reports = (
    common.figure(
      _panels(rows, _measured),
      title='Accuracy against compute',
      name='figure_5',
    ),
    common.figure(
      _panels(TABLE_6, _published),
      title='Accuracy against compute, as published',
      name='figure_5_paper',
    ),
    common.table(
      _cells(rows, args.real),
      title='Model, epochs; fine-tuned at 384 px',
      digits=2,
      name='table_6',
    ),
  )
  return common.study(runs, reports, shared=values)


def _rows(args):
  """Yield the chosen (model, epochs) of table 6 whose rate is known."""
  if args.R200x3 and args.r200_lr is None:
    raise ValueError(
      'The paper does not state the learning rate of R200x3. Give one, '
      'r200_lr=RATE; table 3 has 1e-3 for R50x2 and 6e-4 for R152x2.'
    )
  for model, epochs in TABLE_6:
    if model in args.models and (model != 'R200x3' or args.r200_lr):
      yield model, epochs


def _path(model, epochs):
  return f'{scaling.run_name(model)}_{epochs}ep'


def _measured(model, epochs, *data):
  path = _path(model, epochs)
  return {'x': scaling.exaflops(path), 'y': scaling.finetuned(path, *data)}


def _published(model, epochs, *data):
  row = TABLE_6[model, epochs]
  mean = sum(row[name] for name in data) / len(data)
  return {'x': row['exaflops'], 'y': {'value': fraction(mean)}}


def _panels(rows, point_of):
  """Return figure 5's panels; point_of(model, epochs, *data) is {x, y}."""
  panels = []
  for title, data in ((AVERAGE, DATA), (TITLES['imagenet'], ('imagenet',))):
    lines = {}
    for model, epochs in rows:
      point = point_of(model, epochs, *data)
      name = f'{model}, {epochs}'
      lines.setdefault(scaling.kind(model), []).append(point | {'name': name})
    panels.append(
      {
        'title': title,
        'xlabel': COMPUTE,
        'ylabel': 'transfer accuracy (%)',
        'joined': False,
        'lines': lines,
      }
    )
  return tuple(panels)


def _cells(rows, real):
  """Yield table 6, with a row of results and one of published numbers."""
  columns = {TITLES[data]: (data,) for data in DATA} | {'Average': DATA}
  for model, epochs in rows:
    for of, point_of in (('', _measured), (' paper', _published)):
      row = {'row': f'{model}, {epochs}{of}'}
      for column, data in columns.items():
        yield row | {'column': column} | point_of(model, epochs, *data)['y']
  for model, epochs in rows if real else ():
    row, path = f'{model}, {epochs}', _path(model, epochs)
    spec = scaling.finetuned(path, 'imagenet', metric='real/accuracy')
    column = TITLES['real']
    yield {'row': row, 'column': column, **spec}
    value = fraction(TABLE_6[model, epochs]['real'])
    yield {'row': f'{row} paper', 'column': column, 'value': value}

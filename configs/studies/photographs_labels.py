r"""Photographs of solar cells: two classes, grades, or a number?

    pip install -e '.[elpv]'
    python -m vit_jax.main --config=configs/studies/photographs_labels.py \
        --workdir=DIR

Experts gave each cell a probability of a defect: 0, 1/3, 2/3 or 1. The recipe
of train_folder.py learns two classes (at least 0.5, or not), the four grades in
their order, or the probability as a number, and is tested on the two classes.
docs/labels.md has the result.

Arguments (separated by commas):
  seeds=3    divisions into training and test images
  tiny       one seed, few steps, to check that it runs
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs import arguments, common, labels, train_folder
from configs.studies import photographs
from vit_jax.data.pipeline import Data
from vit_jax.evals.collect import Collector
from vit_jax.types import ACCURACY

KINDS = {  # name: (title, argument of train_folder.py, columns, scores)
  'classes': ('two classes', '', ('class',), (0.0, 1.0)),
  'order': (
    'four grades',
    'order=0<1/3<2/3<1',
    ('grade',),
    (0.0, 0.0, 1.0, 1.0),
  ),
  'number': ('a number', 'number=probability', ('probability',), None),
}
METRICS = {'auc': 'AUC', **photographs.METRICS}


@dataclasses.dataclass(eq=False)
class Defects:
  """AUC, accuracy and mean over both classes of a score of at least 0.5.

  The score is the mean of `values` under the probabilities of the classes, or
  the model's number if they are None. `data` has the two classes of Elpv.
  """

  model: Any
  preprocess: Any
  mesh: Any
  data: Data
  values: Any = None

  metrics = dict.fromkeys(METRICS, ACCURACY)

  def __post_init__(self):
    self._collect = Collector(
      self._score, data=self.data, mesh=self.mesh, num_classes=2
    )

  def _score(self, params, batch):
    out = self.model.apply({'params': params}, self.preprocess(batch['image']))
    if self.values is None:
      return {'score': out[:, 0]}
    return {'score': jax.nn.softmax(out) @ jnp.array(self.values)}

  def run(self, params):
    from sklearn import metrics

    columns = self._collect(params)
    true, score = columns['label'] == 1, columns['score']
    hits = true == (score >= 0.5)
    of_both = [hits[true].mean(), hits[~true].mean()]
    return {
      'auc': float(metrics.roc_auc_score(true, score)),
      'accuracy': float(hits.mean()),
      'mean_per_class_accuracy': float(np.mean(of_both)),
    }


def get_config(argument=''):
  args = arguments.parse(argument, ('tiny',), seeds=3)
  runs = {}
  for seed in range(1 if args.tiny else args.seeds):
    for name in KINDS:
      runs[f'{name}_seed{seed}'] = train(args, name, seed)
  cells = [
    {'row': title, 'column': column}
    | {'runs': rf'{name}_seed\d+', 'metric': f'cells/{metric}'}
    for name, (title, *_) in KINDS.items()
    for metric, column in METRICS.items()
  ]
  title = '656 test photographs, defective or not'
  return common.study(runs, [common.table(cells, title=title, name='defects')])


def train(args, name, seed):
  """Return a training of train_folder.py that learns one kind of labels."""
  _, argument, columns, values = KINDS[name]
  config = train_folder.get_config(argument + ',tiny' * args.tiny)
  kind = labels.KINDS.get(name, labels.CLASSES)
  targets = common.make(f'data.targets.{kind.targets}')
  targets |= dict(config.data.source.get('targets', {}))
  targets['columns'] = columns

  def cells(split, **fields):
    fields |= {'split': split, 'seed': seed}
    return common.make('data.sources.elpv.Elpv', **fields)

  config.seed = seed
  config.data.source = cells('train', targets=targets)
  test = config.evals.test.data
  test.source = cells('test', targets=targets)
  kind.fit(config)
  images = common.data(
    cells('test'), test.transforms, batch_size=test.batch_size
  )
  config.evals.cells = {
    'target': 'configs.studies.photographs_labels.Defects',
    'data': images,
    'values': values,
  }
  return config

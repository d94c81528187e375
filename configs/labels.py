"""Kinds of labels that configs take as an argument, next to classes.

  labels=a+b+c   columns of 0 and 1, or one column of lists: any of several
  number=age     one or several (age+weight) columns of numbers
  order=0<1<2    the classes of the column of the label, in their order

docs/labels.md has an example of each. The shell needs quotes around `<`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from configs import common


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
  """A kind of labels, in all that names it."""

  targets: str  # class in vit_jax/data/targets.py
  argument: str = 'columns'  # of this class, for the names
  separator: str = '+'  # between the names
  evaluator: str  # module and class in vit_jax/evals
  best: str  # metric of the best checkpoint; '': none is kept
  # Sets objective, head and evaluators.
  fit: Callable[[Any], None] = lambda config: None
  # What class_weights sets: an argument of the objective, and the function of
  # its name in vit_jax/data/balance.py; '': nothing.
  weights: str = ''
  has_classes: bool = False  # whether each image has one class


def sigmoid(config):
  config.objective = common.make('objectives.classification.labels_xent')
  for evaluator in config.evals.values():  # chooses thresholds
    evaluator.train = common.references(config.data.source)


def scaled(config):
  moments = common.make('data.balance.moments')
  config.model.head = common.make('models.pooling.ScaledHead', moments=moments)
  config.objective = common.make('objectives.classification.squared_error')


def ordinal(config):
  config.model.head = common.make('models.pooling.OrdinalHead')


CLASSES = Kind(
  targets='Classes',
  evaluator='classification.Classification',
  best='',
  weights='class_weights',
  has_classes=True,
)
KINDS = {
  'labels': Kind(
    targets='Labels',
    evaluator='multi_label.MultiLabel',
    best='mean_average_precision',
    fit=sigmoid,
    weights='positive_weights',
  ),
  'number': Kind(
    targets='Numbers', evaluator='regression.Regression', best='r2', fit=scaled
  ),
  'order': dataclasses.replace(
    CLASSES,
    targets='Grades',
    argument='order',
    separator='<',
    evaluator='grades.Grades',
    best='quadratic_weighted_kappa',
    fit=ordinal,
  ),
}
OPTIONS = dict.fromkeys(KINDS, '')  # of arguments.parse


def of(args):
  """Return (Kind, its names) of `args`."""
  given = [x for x in KINDS if getattr(args, x, '')]
  if len(given) > 1:
    raise ValueError(f'{", ".join(given)} are kinds of labels. Keep one.')
  if not given:
    return CLASSES, ()
  kind = KINDS[given[0]]
  return kind, tuple(getattr(args, given[0]).split(kind.separator))


def targets(args):
  """Return the argument of a source for the kind of labels of `args`."""
  kind, names = of(args)
  if not names:
    return {}
  made = common.make(f'data.targets.{kind.targets}')
  return {'targets': made | {kind.argument: names}}


def held_out(percent, args=None):
  """Return (source, {'test': split}), the same percentage of each class."""
  if percent >= 100:
    raise ValueError(f'held_out={percent} must be below 100 (percent).')
  fields = {'channels': 3, 'stratified': of(args)[0].targets != 'Numbers'}
  bound = f'{100 - percent}%'
  source = common.own_images(f'[:{bound}]', **fields, **targets(args))
  return source, {'test': f'[{bound}:]'}


def learn(config, args):
  """Learn the kind of labels of `args`, and treat rare classes as they say.

  Then a metric of the kind says which checkpoint is best; with `balanced` or
  `class_weights` of classes, the mean over classes, not the accuracy.
  """
  kind, _ = of(args)
  if args.balanced and args.class_weights:
    raise ValueError(
      "'balanced' and 'class_weights' both make up for rare classes. Keep one."
    )
  if args.balanced and not kind.has_classes:
    raise ValueError("'balanced' is for images that have one class each.")
  if args.class_weights and not kind.weights:
    raise ValueError("'class_weights' is for classes, and labels of 0 and 1.")
  for each in config.evals.values():
    each.target = f'vit_jax.evals.{kind.evaluator}'
  kind.fit(config)
  if args.balanced:
    config.data.order = common.make('data.order.Balanced')
  elif not kind.has_classes and 'order' in config.data:
    del config.data.order
  if args.class_weights:
    weights = common.make(f'data.balance.{kind.weights}')
    config.objective[kind.weights] = weights
  best = kind.best
  if args.balanced or args.class_weights:
    best = best or 'mean_per_class_accuracy'
  if best:
    name, first = next(iter(config.evals.items()))
    config.checkpoints = {
      'every_fraction': first.every_fraction,
      'best_metric': f'{name}/{best}',
    }

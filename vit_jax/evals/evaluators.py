"""Evaluators: how they are made, checked and run.

An evaluator is an object with `run(params)`, which returns {metric: number}. It
is made by a class or function that takes `(model, *, preprocess, mesh)` and the
arguments of its config. Optional attributes of an evaluator:

  check(abstract_params)  raises an error before the first training step
  metrics                 {name: types.Kind} of results; 'NAME/': all below it
  class_names             of the data; the model must have the same
  predictions             reports.confusion.Predictions, or another with `write`
  transforms              of its images, which predictions need, too
  pictures(params)        {title: rows of images}, see attention_figures.sheet
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.data.pipeline import Data
from vit_jax.data.subsets import ByNames
from vit_jax.data.targets import Labels
from vit_jax.io import terminal
from vit_jax.runs import compiled
from vit_jax.runs.records import OF_A_RUN
from vit_jax.types import Kind, Model, Params, Preprocess, UserError


class Evaluator(Protocol):
  def run(self, params: Any) -> Mapping[str, float]: ...


Evaluators = Mapping[str, Evaluator]
# (model, *, preprocess, mesh) -> Evaluator.
Factory = Annotated[
  Callable[..., Evaluator],
  tuple((x, x) for x in ('model', 'preprocess', 'mesh')),
]


def make(
  evals: Mapping[str, Factory],
  model: Model,
  *,
  preprocess: Preprocess,
  mesh: Mesh,
  class_names: Sequence[str] | None,
  abstract_params: Params,
) -> dict[str, Evaluator]:
  """Return {name: evaluator}, with the data of each opened and checked."""
  reserved = {'step', 'time', *(x.partition('/')[0] for x in OF_A_RUN)}
  if bad := [x for x in evals if not x or '/' in x or x in reserved]:
    raise UserError(
      f'evals.{bad[0]}: metrics and files cannot begin with {bad[0]!r}. Use a '
      f'name without "/" other than {", ".join(sorted(reserved))}.'
    )
  made = {}
  for name, factory in evals.items():
    try:
      made[name] = factory(model, preprocess=preprocess, mesh=mesh)
      names = getattr(made[name], 'class_names', None)
      remedy = f'--config.evals.{name}.same_classes=False'
      source = f'evals.{name}.data.source'
      check_class_names('model', class_names, names, remedy, source)
      if check := getattr(made[name], 'check', None):
        check(abstract_params)
    except UserError as error:
      raise type(error)(f'evals.{name}: {error}') from error
  return made


def by_names(factory: Any, weights: Any) -> Any:
  """Return a factory whose data have the classes or columns of weights.

  UserError if their labels are of another kind.
  """
  given = getattr(factory, 'keywords', {})
  data, names = given.get('data'), weights.class_names
  if not isinstance(data, Data) or not given.get('same_classes', True):
    return factory
  if not (data.labels and getattr(factory.func, 'labelled', True)):
    return factory
  kind = getattr(data.source, 'targets', None) or weights.targets
  if kind.outputs != weights.targets.outputs or (
    isinstance(kind, Labels) != isinstance(weights.targets, Labels)
  ):
    raise UserError(
      f'The data has {type(kind).__name__}, and the weights are of '
      f'{type(weights.targets).__name__}. Use the same word (labels=, number=).'
    )
  known = getattr(data.source, 'class_names', None)
  if not names or not known or [*known] == [*names]:
    return factory
  changed, train = dict(given), given.get('train')
  try:
    source = ByNames(data.source, names)
    changed['data'] = dataclasses.replace(data, source=source)
    if train is not None:
      changed['train'] = ByNames(train, names)
  except UserError:  # of other classes, see check_class_names
    return factory
  terminal.say(f'Labels are numbered by the names of the weights: {names[:9]}')
  return functools.partial(factory.func, *factory.args, **changed)


def check_class_names(
  what: str,
  expected: Sequence[str] | None,
  found: Sequence[str] | None,
  remedy: str,
  source: str = 'data.source',
) -> None:
  """Raise UserError if data has other classes than `what` it is given to."""
  if not found or not expected or list(found) == list(expected):
    return
  other = sorted(set(found) ^ set(expected))[:5]
  raise UserError(
    f'The data has {len(found)} classes and the {what} {len(expected)}, with '
    f'other names ({other}) or in another order. For a folder, list them in '
    f'a file: --config.{source}.class_names=FILE. If they are the same '
    f'classes in the same order under other names, add {remedy}.'
  )


def check_best_metric(metric: str | None, evaluators: Evaluators) -> None:
  """Raise ValueError if no evaluator returns the metric 'EVALUATOR/METRIC'."""
  name, _, found = (metric or '').partition('/')
  known = getattr(evaluators.get(name), 'metrics', None)
  if known is None or any(
    found == x or (x.endswith('/') and found.startswith(x)) for x in known
  ):
    return
  raise UserError(
    f'checkpoints.best_metric={metric!r}: the evaluator {name!r} has no such '
    f'metric. It has {", ".join(known)}.'
  )


def run(evaluators: Evaluators, params: Params, step: int) -> dict[str, float]:
  """Run evaluators, and return {'EVALUATOR/METRIC': int or float}.

  Results that are NaN or Inf are named. Evaluators may transfer arrays.
  """
  results = {}
  for name, evaluator in evaluators.items():
    remedy = (
      f'It cannot hold a batch of the evaluator evals.{name}. Use smaller '
      f'ones: --config.evals.{name}.data.batch_size=N'
    )
    with jax.transfer_guard('allow'), compiled.explaining(remedy):
      for metric, value in evaluator.run(params).items():
        results[f'{name}/{metric}'] = np.asarray(value).item()
  if bad := [f'{k}={v}' for k, v in results.items() if not math.isfinite(v)]:
    terminal.say(
      f'Step {step}: evaluators returned {", ".join(bad)}. The records keep '
      'the value; no checkpoint and no run is chosen as the best by it.'
    )
  return results


def kinds(evaluators: Evaluators) -> dict[str, Kind]:
  """Return what the metrics of evaluators are, {'EVALUATOR/METRIC': Kind}."""
  return {
    f'{name}/{metric}': kind
    for name, evaluator in evaluators.items()
    for metric, kind in getattr(evaluator, 'metrics', {}).items()
  }

"""Time left of a study, estimated from the arithmetic of its runs.

The time of a run is its FLOPs at the speed of the runs that are done, plus a
constant for everything else: start-up, compilation, checkpoints. The constant
is the mean of the runs that are done, separately for the first run of a program
and for runs that reuse the programs of an earlier run. Until a run of the
second kind is done, its constant is 0.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax import config as configs
from vit_jax.analysis import flops
from vit_jax.data.pipeline import Data
from vit_jax.optim.durations import Timeline
from vit_jax.runs import reuse

_RUNS = ('vit_jax.train.train', 'vit_jax.evaluate.evaluate')
_CLASSES = 100


@dataclasses.dataclass(frozen=True)
class Cost:
  """Arithmetic of a run.

  Attributes:
    train, evaluation: FLOPs.
    first: whether no earlier run has the same programs.
  """

  train: float
  evaluation: float
  first: bool

  @property
  def total(self) -> float:
    return self.train + self.evaluation


@dataclasses.dataclass(frozen=True)
class Spent:
  """Seconds of a run that is done: all of them, and those of training steps."""

  total: float
  steps: float | None = None


def seconds_left(
  costs: Mapping[str, Cost], spent: Mapping[str, Spent]
) -> float:
  """Return the estimated seconds of the runs that are not done.

  Args:
    costs: {name of each run: Cost}.
    spent: {name of each run that is done: Spent}; at least one.
  """
  done = [(costs[name], seconds) for name, seconds in spent.items()]
  timed = [(c.train, s.steps) for c, s in done if s.steps and c.train]
  timed = timed or [(c.total, s.total) for c, s in done]
  flops_, seconds = map(sum, zip(*timed))
  per_flop = seconds / flops_ if flops_ else 0.0

  def constant(first):
    rest = [s.total - per_flop * c.total for c, s in done if c.first == first]
    return max(0.0, sum(rest) / len(rest)) if rest else 0.0

  constants = {first: constant(first) for first in (True, False)}
  left = [cost for name, cost in costs.items() if name not in spent]
  return sum(per_flop * cost.total + constants[cost.first] for cost in left)


def costs(runs: Mapping[str, Any]) -> dict[str, Cost] | None:
  """Return {name: Cost} of the configs of all runs, in the order of the study.

  This opens their data and traces their models. Returns None if the arithmetic
  of a run is not known: its function is not `train` or `evaluate`, or its model
  is that of a weights file.
  """
  found: dict[str, Cost] = {}
  known: dict[str, tuple[float, float] | None] = {}
  seen = set()
  for name, config in runs.items():
    key = repr([config.get(x) for x in ('run', 'model', 'data', 'evals')])
    key += repr({k: v for k, v in config.items() if k.startswith('total')})
    if key not in known:
      known[key] = _flops(config)
    flops = known[key]
    if flops is None:
      return None
    programs = reuse.programs(config)
    found[name] = Cost(flops[0], flops[1], first=programs not in seen)
    seen.add(programs)
  return found


def _flops(config):
  """Return (FLOPs of training, FLOPs of evaluation) of a run, or None."""
  config = config.copy_and_resolve_references()
  if 'best_of' in config:
    del config.best_of
  if config.run not in _RUNS or not config.get('model'):
    return None
  plan, _ = configs.plan_run(config)
  names = ('model', 'data', 'total', 'evals')
  model, data, total, evals = (
    configs.make(plan.kwargs.get(name)) for name in names
  )
  if data is None:  # evaluate()
    return 0.0, sum(_forward(model, part) for part in _parts(evals))
  timeline = Timeline(data.batch_size, len(data.source))
  steps = timeline.steps(total)
  timeline = dataclasses.replace(timeline, total_steps=steps)
  train = 3 * _of_an_image(model, data) * data.batch_size * steps
  evaluation = 0.0
  for each in (evals or {}).values():
    times = math.ceil(steps / (timeline.steps(each.every) or steps))
    parts = _parts(each.evaluator)
    evaluation += times * sum(_forward(model, part) for part in parts)
  return train, evaluation


def _parts(value):
  """Yield the Data in the arguments of evaluators, at any depth."""
  if isinstance(value, Data):
    yield value
  elif isinstance(value, functools.partial):
    yield from _parts(value.keywords)
  elif isinstance(value, Mapping):
    for inner in value.values():
      yield from _parts(inner)


def _forward(model, data):
  return len(data.source) * _of_an_image(model, data)


def _of_an_image(model, data):
  """Return the FLOPs of the model on one image of the data."""
  image = data.first_example()['image']
  # The head is negligible, and equal models are traced once.
  if isinstance(model, functools.partial):
    model = model(num_classes=_CLASSES)
  elif model.num_classes is None:
    model = model.clone(num_classes=_CLASSES)
  return _traced(model, image.shape)


@functools.lru_cache
def _traced(model, shape):
  return flops.forward(model, jax.ShapeDtypeStruct((1, *shape), jnp.float32))

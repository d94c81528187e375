"""Evaluators: how they are made, checked and run.

An evaluator is an object with `run(params)`, which returns {metric: number}. It
is made by a class or function that takes `(model, *, preprocess, mesh)` and the
arguments of its config. Optional attributes of an evaluator:

  check(abstract_params)  raises an error before the first training step
  metrics                 names of what `run` returns, to check the metric of
                          the best checkpoint; 'NAME/' for all below it
  class_names             of the data; the model must have the same
  predictions             `evals.classification.Predictions` of the last run,
                          which are then written, see reports/confusion.py
"""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.runs import compiled
from vit_jax.types import Model, Params, Preprocess


class Evaluator(Protocol):
  """Interface of evaluators, see the module docstring."""

  def run(self, params: Any) -> Mapping[str, float]: ...


# (model, *, preprocess, mesh) -> Evaluator.
Factory = Callable[..., Evaluator]


def make(
  evals: Mapping[str, Factory],
  model: Model,
  *,
  preprocess: Preprocess,
  mesh: Mesh,
  class_names: Sequence[str] | None,
  abstract_params: Params,
) -> dict[str, Evaluator]:
  """Return {name: evaluator}, with the data of each opened and checked.

  Args:
    evals: {name: function (model, *, preprocess, mesh) -> evaluator}.
    model: Flax module.
    preprocess: uint8 -> float images.
    mesh: as returned by `sharding.make_mesh`.
    class_names: of the model's outputs, or None if they are not known.
    abstract_params: ShapeDtypeStructs of the parameters.

  Raises:
    ValueError: from an evaluator; or its labels have other class names.
  """
  made = {}
  for name, factory in evals.items():
    with _named(name):
      evaluator = factory(model, preprocess=preprocess, mesh=mesh)
      _check_class_names(class_names, evaluator)
      if check := getattr(evaluator, 'check', None):
        check(abstract_params)
    made[name] = evaluator
  return made


@contextlib.contextmanager
def _named(name):
  """Context manager that prepends the config key of an evaluator to errors."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f'evals.{name}: {error}') from error


def _check_class_names(class_names, evaluator):
  """Folders with different sub-folders number their classes differently."""
  found = getattr(evaluator, 'class_names', None)
  if not found or not class_names or list(found) == list(class_names):
    return
  other = sorted(set(found) ^ set(class_names))[:5]
  raise ValueError(
    f'The data has {len(found)} classes and the model {len(class_names)}, with '
    f'other names ({other}) or in another order. For a folder, set '
    'data.source.class_names. If they are the same classes in the same order '
    'under other names, set same_classes=False.'
  )


def check_metric(
  argument: str, metric: str | None, evaluators: Mapping[str, Evaluator]
) -> None:
  """Raise ValueError if it is known that no evaluator returns the metric.

  Args:
    argument: that has the metric, for the message.
    metric: 'EVALUATOR/METRIC', or None.
    evaluators: by name.
  """
  name, _, found = (metric or '').partition('/')
  known = getattr(evaluators.get(name), 'metrics', None)
  if known is None or found in known:
    return
  if any(k.endswith('/') and found.startswith(k) for k in known):
    return
  raise ValueError(
    f'{argument}={metric!r}: the evaluator {name!r} has no such metric. It has '
    f'{", ".join(known)}.'
  )


def run(name: str, evaluator: Evaluator, params: Params) -> dict[str, float]:
  """Run an evaluator, and return {metric: int or float}.

  Evaluators may copy between host and devices as they like: the transfer guard
  of the training loop does not apply to them.

  Raises:
    ValueError: from the evaluator.
    compiled.OutOfMemoryError: with what to do.
  """
  explain = functools.partial(_explain_memory, name, evaluator)
  with jax.transfer_guard('allow'), compiled.explaining(explain):
    found = evaluator.run(params)
    return {str(k): np.asarray(value).item() for k, value in found.items()}


def _explain_memory(name, evaluator):
  data = getattr(evaluator, 'data', None)
  size = getattr(data, 'batch_size', 'unknown size')
  return (
    f'The evaluator evals.{name} has batches of {size}. Use smaller ones: '
    f'--config.evals.{name}.data.batch_size=N'
  )


def non_finite(step: int, results: Mapping[str, float]) -> str:
  """Return a line that names the metrics that are NaN or Inf; '' if none is.

  Args:
    step: of the training.
    results: {'EVALUATOR/METRIC': value}.
  """
  bad = [f'{k}={v}' for k, v in results.items() if not math.isfinite(v)]
  if not bad:
    return ''
  return (
    f'Step {step}: evaluators returned {", ".join(bad)}. The records keep the '
    'value; no checkpoint and no run is chosen as the best by it.'
  )

"""Evaluators: how they are made, checked and run.

An evaluator is an object with `run(params)`, which returns {metric: number}.
Whatever makes it (a class, a function, a partial) gets of `model`, `preprocess`
and `mesh` what it takes. Optional attributes of an evaluator:

  check(abstract_params)  raises an error before the first training step
  metrics                 names of what `run` returns, to check the metric of
                          the best checkpoint; 'NAME/' for all below it
  class_names             of the data; must be those of the model
  predictions             `evals.classification.Predictions` of the last run,
                          which are then written, see reports/confusion.py
"""

import contextlib
import difflib
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.data.pipeline import Data
from vit_jax.runs import device_memory
from vit_jax.types import Model, Params, Preprocess


class Evaluator(Protocol):
  """Interface of evaluators, see the module docstring."""

  def run(self, params: Any) -> Mapping[str, float]: ...


# In a config, `data` of an evaluator is a Data without being annotated so.
Factory = Annotated[Callable[..., Evaluator], ('data', Data)]


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
    evals: {name: class or function that makes an evaluator, or an evaluator}.
    model: Flax module.
    preprocess: uint8 -> float images.
    mesh: as returned by `sharding.make_mesh`.
    class_names: of the model's outputs, or None if they are not known.
    abstract_params: ShapeDtypeStructs of the parameters.

  Raises:
    ValueError: from an evaluator; its labels have other class names; or it has
      no method `run`.
  """
  made = {}
  for name, factory in evals.items():
    with _named(name):
      evaluator = _make(factory, model, preprocess=preprocess, mesh=mesh)
    if not callable(getattr(evaluator, 'run', None)):
      raise ValueError(
        f'evals.{name} is {evaluator!r}, which has no method run(params). '
        'Expected an object whose run(params) returns {metric: number}.'
      )
    _check_class_names(name, class_names, evaluator)
    if check := getattr(evaluator, 'check', None):
      with _named(name):
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
  near = difflib.get_close_matches(found, known, n=1)
  hint = f' (did you mean {f"{name}/{near[0]}"!r}?)' if near else ''
  raise ValueError(
    f'{argument}={metric!r}: the evaluator {name!r} has no metric '
    f'{found!r}{hint}. It has {", ".join(known)}.'
  )


def _make(factory, model, **options):
  """Call the factory with those of the arguments that it takes."""
  if hasattr(factory, 'run') and not inspect.isclass(factory):
    return factory  # it is an evaluator
  parameters = inspect.signature(factory).parameters
  kinds = {parameter.kind for parameter in parameters.values()}
  if inspect.Parameter.VAR_KEYWORD not in kinds:
    options = {k: v for k, v in options.items() if k in parameters}
  if 'model' in parameters:
    return factory(**options, model=model)
  # A first argument of another name that nothing else sets is the model.
  first = next(iter(parameters.values()), None)
  takes_model = (
    first is not None
    and first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD)
    and first.default is first.empty
    and first.name not in options
  )
  return factory(*[model] * takes_model, **options)


def _check_class_names(name, class_names, evaluator):
  """Folders with different sub-folders number their classes differently."""
  found = getattr(evaluator, 'class_names', None)
  if not found or not class_names or list(found) == list(class_names):
    return
  only_here = sorted(set(found) - set(class_names))[:5]
  missing = sorted(set(class_names) - set(found))[:5]
  raise ValueError(
    f'evals.{name} has {len(found)} classes and the model {len(class_names)}, '
    f'with other names or in another order (only in evals.{name}: {only_here}; '
    f'only in the model: {missing}), so its labels would mean other classes. '
    "For a folder, set class_names in the evaluator's data.source. If they are "
    'the same classes in the same order under other names (WordNet ids and '
    f'words), set evals.{name}.same_classes=False.'
  )


def run(name: str, evaluator: Evaluator, params: Params) -> dict[str, float]:
  """Run an evaluator, and return {metric: int or float}.

  Evaluators may copy between host and devices as they like: the transfer guard
  of the training loop does not apply to them.

  Raises:
    ValueError: from the evaluator; or it did not return {metric: number}.
    device_memory.OutOfMemoryError: with what to do.
  """
  explain = functools.partial(_explain_memory, name, evaluator)
  with jax.transfer_guard('allow'), device_memory.explaining(explain):
    found = evaluator.run(params)
    if not isinstance(found, Mapping):
      raise ValueError(
        f'evals.{name}: run(params) returned {found!r}. Expected a dict '
        '{metric: number}.'
      )
    return {str(k): _number(name, k, value) for k, value in found.items()}


def _explain_memory(name, evaluator):
  batch_size = getattr(getattr(evaluator, 'data', None), 'batch_size', None)
  if batch_size is None:
    return f'The evaluator evals.{name} needs more. Use smaller batches in it.'
  per_device = batch_size / jax.device_count()
  return (
    f'The evaluator evals.{name} has batches of {batch_size} images, '
    f'{per_device:g} per device. Use a smaller batch: '
    f'--config.evals.{name}.data.batch_size={max(1, batch_size // 2)}'
  )


def _number(name, metric, value):
  value = np.asarray(value)
  if value.size != 1 or value.dtype.kind not in 'biuf':
    raise ValueError(
      f'evals.{name}: run(params) returned an array of {value.dtype} '
      f'{value.shape} for {metric!r}. Expected one number for each metric.'
    )
  return float(value.item()) if value.dtype.kind == 'f' else int(value.item())


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

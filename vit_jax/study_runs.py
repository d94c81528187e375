"""The runs of a study: their order, what each builds on, and their data."""

import json
import re

import ml_collections

from vit_jax import terminal
from vit_jax.config import resolve
from vit_jax.metrics import read_records
from vit_jax.weights import formats

DONE = 'done.json'


def is_done(path):
  """Whether the run in this directory is over."""
  return (path / DONE).exists()


def read_done(path):
  """What the study noted at its end: seconds, and 'diverged' if it was."""
  return json.loads((path / DONE).read_text())


def ordered(runs, order, workdir):
  """{name: ConfigDict} in order, '{workdir}' filled in."""
  order = order or tuple(runs)
  if sorted(order) != sorted(runs):
    raise ValueError(f'order={order} must name each of {list(runs)} once.')
  filled = {}
  for name in order:
    values = _map_text(
      runs[name].to_dict(), lambda x: x.replace('{workdir}', str(workdir))
    )
    filled[name] = ml_collections.ConfigDict(values)
  return filled


def _map_text(value, fn):
  """A config's values with fn applied to every text."""
  if isinstance(value, str):
    return fn(value)
  if isinstance(value, dict):
    return {k: _map_text(v, fn) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return type(value)(_map_text(v, fn) for v in value)
  return value


def needs(name, runs, workdir):
  """Names of the runs that must be done before this one.

  Raises ValueError where that is itself, a later one, or none.
  """
  found, config = [], runs[name]
  texts = []
  _map_text(config.to_dict(), texts.append)
  for other in runs:
    path = str(workdir / other)
    if any(t == path or t.startswith(path + '/') for t in texts):
      found.append(other)
  if best := config.get('best_of'):
    if sorted(best) != ['metric', 'runs', 'take']:
      raise ValueError(
        f'runs.{name}.best_of must have runs, metric and take; it has '
        f'{sorted(best)}.'
      )
    candidates = [x for x in runs if re.fullmatch(best.runs, x)]
    if not candidates:
      raise ValueError(
        f'runs.{name}.best_of: {best.runs!r} matches none of the runs: '
        f'{", ".join(runs)}.'
      )
    found += candidates
  earlier = list(runs)[: list(runs).index(name)]
  if late := [x for x in found if x not in earlier]:
    raise ValueError(
      f'runs.{name} builds on {", ".join(late)}, which must come before it in '
      'order.'
    )
  return found


def check_ready(name, needed, workdir):
  """Raises ValueError unless the runs that this one needs are done."""
  if missing := [x for x in needed if not is_done(workdir / x)]:
    raise ValueError(
      f'The study member {name} builds on runs that are not done: '
      f'{", ".join(missing)}. Do these first (--study_member=...), or run the '
      'study without --study_member.'
    )


def with_best(config, runs, workdir):
  """The config with the values that `best_of` takes; the first of equals."""
  config = config.copy_and_resolve_references()
  best = config.get('best_of')
  if not best:
    return config
  del config.best_of
  scores = {}
  for name in runs:
    if re.fullmatch(best.runs, name):
      last = {k: v for r in read_records(workdir / name) for k, v in r.items()}
      if 'diverged' in read_done(workdir / name):
        continue
      if best.metric not in last:
        raise ValueError(
          f'best_of: {name} has no metric {best.metric!r}; it has '
          f'{", ".join(k for k in last if "/" in k)}.'
        )
      scores[name] = last[best.metric]
  if not scores:
    raise ValueError(f'All of {best.runs} diverged: none to take values from.')
  winner = max(scores, key=scores.get)
  taken = {}
  with config.unlocked():
    for path in best.take:
      *parents, key = path.split('.')
      source, target = runs[winner], config
      for parent in parents:
        source, target = source[parent], target[parent]
      taken[path] = target[key] = source[key]
  shown = ', '.join(f'{k}={v}' for k, v in taken.items())
  terminal.console().print(
    f'{shown} of {winner}, whose {best.metric} {scores[winner]:.4g} is the '
    f'best of {len(scores)}',
    soft_wrap=True,
  )
  return config


def check_sources(runs):
  """Opens the data of all these runs; ValueError with all that is missing."""
  seen, problems = set(), []
  for config in runs.values():
    for source in _sources(config.to_dict()):
      key = repr(source)
      if key in seen:
        continue
      seen.add(key)
      try:
        resolve(source)
      except ValueError as error:
        if str(error) not in problems:
          problems.append(str(error))
  if problems:
    text = '\n\n'.join(problems)
    raise ValueError(f'The study lacks data of its runs:\n\n{text}')


def check_weights(runs, shared, workdir):
  """Raises ValueError unless each run's init_from is there, or will be."""
  paths = {}
  for name, config in runs.items():
    start = config.get('init_from', {})
    if 'path' in start:
      paths.setdefault(start['path'], name)
  for path, name in paths.items():
    if path is None:
      flag = f'runs.{name}.init_from.path'
      flag = 'shared.weights' if 'weights' in shared else flag
      raise ValueError(
        f'The run {name} is to start from weights (init_from), and none are '
        f'given: --config.{flag}=PATH'
      )
    if not path.startswith(f'{workdir}/'):
      formats.find(path)


def _sources(value):
  """Every 'source' of a config, at any depth."""
  if isinstance(value, dict):
    for key, inner in value.items():
      if key == 'source' and isinstance(inner, dict):
        yield inner
      else:
        yield from _sources(inner)
  elif isinstance(value, list | tuple):
    for inner in value:
      yield from _sources(inner)

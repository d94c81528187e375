"""From a config to calls: every key is checked before any call is made."""

import collections.abc
import contextlib
import copy
import dataclasses
import json
import typing
from collections.abc import Mapping
from typing import Any

from vit_jax.config import domains
from vit_jax.config.calls import Call, has_calls, make
from vit_jax.config.domains import hints_of
from vit_jax.config.entries import Entry, entries
from vit_jax.config.errors import ConfigError, suggest
from vit_jax.config.signatures import (
  full_name,
  is_duration,
  is_number,
  is_required,
  item_of,
  join,
  keys_of,
  lacks_text,
  locate,
  missing_of,
  of_factory,
  parameters_of,
  rest_field_of,
  stem_of,
  takes_partials,
  without_none,
)
from vit_jax.config.values import (
  ConfigDict,
  as_dict,
  check_filled,
  to_set,
)
from vit_jax.optim.durations import Duration
from vit_jax.runs.files import PathLike

# Arguments that a config cannot set.
HIDDEN = ('workdir', 'record', 'preset', 'entries', 'allow_changes')


def plan_run(config: Any, **supplied: Any) -> tuple[Call, dict[str, Any]]:
  """Return the Call of the function that config.run names, all keys checked.

  Args:
    config: ConfigDict with `run`.
    **supplied: arguments that the config cannot set; those that the function
      does not take are left out.

  Returns:
    (Call, dict of supplied arguments).

  Raises:
    ConfigError: with all problems at once: values that the user has to set,
      unknown keys (with a suggestion), missing arguments, targets that cannot
      be imported.
  """
  check_filled(config)
  values = as_dict(config)
  fn = values.pop('run', None)
  if not fn:
    raise ConfigError(
      "The config has no key 'run', the function to call with it, such as "
      "'vit_jax.train.train'."
    )
  fn = locate(fn)
  taken = {k: v for k, v in supplied.items() if k in parameters_of(fn)}
  hidden = (*HIDDEN, *taken)
  problems: list[str] = []
  found = _plan_call(fn, values, '', problems, hidden)
  _require_all(found, hidden, problems)
  _raise_all(problems)
  return found, taken


def run(
  config: Any,
  workdir: PathLike,
  *,
  preset: Mapping[str, Any] | None = None,
  **supplied: Any,
) -> Any:
  """Call the function that config.run names with the objects of the config.

  Args:
    config: ConfigDict.
    workdir: the first argument of the function.
    preset: JSON values that say where the config is from: 'config' (the config
      file and its argument) and 'changed' (see `changes`). 'defaults' is added:
      {key: text} of what the config does not set.
    **supplied: more arguments of the function, see `plan_run`.

  Raises:
    ConfigError: as of `plan_run`, or a value is None that must be set.
  """
  check_filled(config)
  record = json.loads(config.to_json_best_effort())
  preset = dict(preset or {})
  listed: list[Entry] = []
  found, taken = plan_run(
    config, record=record, preset=preset, entries=listed, **supplied
  )
  check_set(found, config)
  listed += entries(found)
  preset['defaults'] = dict(
    each.line().split(' = ', 1) for each in listed if not each.is_set
  )
  return found.make(workdir, **taken)


def check_set(call: Call, config: Any, prefix: str = '') -> None:
  """Raise ConfigError if required arguments are None, and name their flags.

  Args:
    call: the Call of `plan_run`.
    config: its ConfigDict. A value that refers to another one is not named.
    prefix: path of the config in the config of the command line, with a dot.
  """
  filled, unset = copy.deepcopy(config), []
  # A value is named by its shortest path: others refer to it.
  for path in sorted(_none(call), key=lambda path: path.count('.')):
    *parents, key = path.split('.')
    node = filled
    for parent in parents:
      is_list = isinstance(node, list | tuple)
      node = node[int(parent) if is_list else parent]
    if node[key] is None:
      unset.append(f'{prefix}{path}')
      # A None that is no placeholder has no reference.
      with contextlib.suppress(ValueError):
        if isinstance(node, ConfigDict):
          node.get_ref(key).set('set', type_safe=False)
  if unset:
    raise ConfigError(to_set(unset))


def _none(value):
  """Yield the paths of required arguments that are None."""
  if isinstance(value, Call):
    parameters = parameters_of(value.fn)
    for name, inner in value.kwargs.items():
      parameter = parameters.get(name)
      if inner is None and parameter and is_required(parameter):
        yield join(value.where, name)
      yield from _none(inner)
  elif isinstance(value, dict | list | tuple):
    inners = value.values() if isinstance(value, dict) else value
    for inner in inners:
      yield from _none(inner)


def resolve(value: Any) -> Any:
  """Return objects for a config value: every target in it is called."""
  problems: list[str] = []
  check_filled(value)
  found = _plan(value, Any, '', problems)
  _raise_all(problems)
  return make(found)


def _raise_all(problems):
  if problems:
    raise ConfigError('\n'.join(dict.fromkeys(problems)))


def _plan(value, annotation, where, problems, hint=''):
  """A config value with a Call in the place of every target in it.

  `hint` is for the error that a target is missing.
  """
  annotation = without_none(annotation)
  if annotation is ConfigDict:
    return value  # such as the runs of a study, whose turn comes later
  origin = typing.get_origin(annotation) or annotation
  if isinstance(value, Mapping | ConfigDict):
    values = as_dict(value)
    wants = dataclasses.is_dataclass(annotation)
    if wants and rest_field_of(annotation):
      return _plan_flat(annotation, values, where, problems, hint)
    if 'target' in values:
      return _plan_target(values, annotation, where, problems)
    if wants:
      found = _plan_call(annotation, values, where, problems)
      _require_all(found, (), problems)
      return found
    inner = Any
    if isinstance(origin, type) and issubclass(origin, Mapping):
      inner = (*typing.get_args(annotation), Any, Any)[1]
    complete = [k for k, v in values.items() if _has_target(v)]
    return {
      k: _plan(v, inner, join(where, k), problems, suggest(k, complete))
      for k, v in values.items()
    }
  if isinstance(value, list | tuple):
    inner = next(iter(typing.get_args(annotation)), Any)
    return type(value)(
      _plan(v, inner, join(where, i), problems) for i, v in enumerate(value)
    )
  return value


def _has_target(value):
  return isinstance(value, Mapping | ConfigDict) and 'target' in value


def _plan_target(values, annotation, where, problems, also=()):
  try:
    fn = locate(values.pop('target'))
  except ConfigError as error:
    problems.append(f'{where}.target: {error}' if where else str(error))
    return None
  if not callable(fn):
    problems.append(f'{where}: {fn!r} is not a class or a function.')
    return None
  types = of_factory(annotation)
  found = _plan_call(fn, values, where, problems, also=also, types=types)
  found.later = types is not None
  if not takes_partials(annotation):
    _require_all(found, (), problems)
  return found


def _require_all(call, supplied, problems):
  """Add a problem if required arguments of a Call are missing.

  A key that is misspelt is reported as unknown; that is enough.
  """
  if any(p.startswith(f'{call.where}.') for p in problems if call.where):
    return
  if missing := missing_of(call.fn, call.kwargs, 0, supplied):
    where = f'{call.where}: ' if call.where else ''
    problems.append(f'{where}{lacks_text(call.fn, missing)}')


def _plan_flat(cls, values, where, problems, hint):
  """The Call of a dataclass that has a `rest` field, from one flat dict."""
  field, own = rest_field_of(cls), {}
  names = {f.name for f in dataclasses.fields(cls)} - {field.name}
  for key in list(values):
    if key in names or stem_of(key) in names:
      own[key] = values.pop(key)
  if 'target' not in values:
    problems.append(
      f"{where} needs a 'target', the dotted path of a class or function"
      f'{hint}{f"; it has {list(values)}" if values else ""}.'
    )
    return None
  found = _plan_call(cls, own, where, problems)
  own_keys = [k for n in names for k in keys_of(n, hints_of(cls).get(n))]
  annotation = hints_of(cls)[field.name]
  target = _plan_target(values, annotation, where, problems, own_keys)
  if target is not None:
    problems += _misfits(target, annotation, where)
  found.kwargs[field.name] = target
  return found


def _plan_call(fn, values, where, problems, supplied=(), also=(), types=None):
  parameters, hints = parameters_of(fn), {**hints_of(fn)}
  for name, annotation in (types or {}).items():
    value = values.get(name)
    has_source = isinstance(value, Mapping | ConfigDict) and 'source' in value
    if dataclasses.is_dataclass(annotation):
      if has_source:
        hints.setdefault(name, annotation)
    elif not domains.is_known(hints.get(name, Any)):
      hints[name] = annotation  # of a library, whose annotation says less
  takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
  kwargs, known = {}, [n for n in parameters if n not in supplied]
  for key, value in values.items():
    name, path = key, join(where, key)
    if key not in known and stem_of(key) in known:
      name = stem_of(key)
      value = _duration(key, value, path, problems)
    elif key not in known and (key in supplied or not takes_any):
      takes = [k for n in known for k in keys_of(n, hints.get(n))] + [*also]
      problems.append(
        f'{path}: {full_name(fn)} has no argument '
        f'{key!r}{suggest(key, takes)}. It takes: {", ".join(takes)}.'
      )
      continue
    if name in kwargs:
      problems.append(f'{path}: {name} is set in two units. Keep one.')
      continue
    if key == name and is_duration(hints.get(name)) and value is not None:
      problems.append(
        f'{path}={value!r} has no unit. Use one of '
        f'{", ".join(keys_of(name, Duration))}.'
      )
      continue
    parameter, found = parameters.get(name), len(problems)
    if parameter and isinstance(value, str) and is_number(parameter):
      problems.append(f'{path}={value!r} is text, not a number or bool.')
    if value is None and name != key:  # a unit that is not used
      if any(x.startswith(f'{path}: ') for x in problems):
        kwargs[name] = None
      continue
    fields = annotation = hints.get(name, Any)
    if parameter and dataclasses.is_dataclass(parameter.default):
      fields = type(parameter.default)  # without a target
    kwargs[name] = _plan(value, fields, path, problems)
    # A required argument that is None is reported with its flag, by check_set.
    to_be_set = value is None and parameter and is_required(parameter)
    if len(problems) == found and not to_be_set:
      problems += _misfits(kwargs[name], annotation, path)
  return Call(fn, kwargs, where, tuple(supplied))


def _misfits(value, annotation, path):
  """Yield the error of each part of a planned value that does not fit."""
  if isinstance(value, Call):
    if what := domains.expected(value, annotation):
      yield f'{path}.target={full_name(value.fn)!r} is not {what}.'
  elif has_calls(value):
    inner = item_of(annotation)
    wanted = without_none(annotation)
    kind = typing.get_origin(wanted) or wanted
    if isinstance(value, dict) and kind is collections.abc.Callable:
      yield (
        f"{path} needs a 'target', the dotted path of a class or function; it "
        f'has {list(value)}.'
      )
      return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in items:
      yield from _misfits(each, inner, join(path, key))
  elif what := domains.expected(value, annotation):
    value = getattr(value, 'value', value)  # of a Duration
    yield f'{path}={domains.shown(value)} must be {what}.'


def _duration(key, value, path, problems):
  if value is None:
    return None
  if isinstance(value, ConfigDict):  # whose text has several lines
    value = value.to_dict()
  try:
    return Duration(value, key.rpartition('_')[2])
  except ValueError as error:
    problems.append(f'{path}: {error}')

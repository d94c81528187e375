"""Runs of a config, their arguments as JSON, and objects from JSON."""

import contextlib
import dataclasses
import functools
import inspect
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vit_jax.config import calls, values
from vit_jax.durations import Duration
from vit_jax.types import PathLike, UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """A value that a config can set."""

  key: str  # dotted path in the config
  value: Any  # JSON value; the full name of a class or function for 'target'
  is_set: bool = True  # whether the config sets it
  marks: frozenset[str] = frozenset()  # see `marks_of`


def entries(
  value: Any, key: str = '', marks: frozenset[str] = frozenset()
) -> Iterator[Entry]:
  """Yield the entries of a Call, or of the objects that it would make.

  Defaults are among them, so that two runs can be compared entry by entry.
  `value` is a Call of `plan_run`, or any value or object in one, at `key`.
  """
  if (call := _as_call(value)) is not None:
    yield from _of_call(call, key, marks)
  elif isinstance(value, Duration):
    yield Entry(key=f'{key}_{value.unit}', value=value.value, marks=marks)
  elif values.is_dict(value) and len(value):
    for name in value:
      yield from entries(value[name], values.join(key, name), marks)
  elif isinstance(value, list | tuple) and any(map(_is_nested, value)):
    for index, inner in enumerate(value):
      yield from entries(inner, values.join(key, index), marks)
  else:
    is_plain = value is None or isinstance(
      value, bool | int | float | str | list | tuple | Mapping | os.PathLike
    )
    where = key if is_plain else values.join(key, 'target')
    yield Entry(key=where, value=plain(value), marks=marks)


def _of_call(call, key, marks):
  flat = calls.rest_field_of(call.fn)
  if flat:  # the target and its keywords stand next to the own fields
    yield from entries(call.kwargs[flat.name], key, marks)
  elif key:
    name = values.join(key, 'target')
    yield Entry(key=name, value=calls.full_name(call.fn), marks=marks)
  elif not dataclasses.is_dataclass(fn := call.run or call.fn):
    yield Entry(key='run', value=calls.full_name(fn), marks=marks)
  parameters, hints = calls.parameters_of(call.fn), values.hints_of(call.fn)
  for name in dict.fromkeys([*parameters, *call.kwargs]):
    if flat and name == flat.name:
      continue
    path, inside = values.join(key, name), marks | marks_of(hints.get(name))
    if name in call.kwargs:
      yield from entries(call.kwargs[name], path, inside)
    elif name not in call.hidden and not calls.is_required(parameters[name]):
      for each in entries(_default(call.fn, parameters[name]), path, inside):
        yield dataclasses.replace(each, is_set=False)


def marks_of(annotation: Any) -> frozenset[str]:
  """Return HARMLESS and MACHINE of an argument, if its Annotated has them."""
  found = (
    text
    for each in (annotation, *values.alternatives(annotation))
    for text in getattr(each, '__metadata__', ())
    if isinstance(text, str)
  )
  return frozenset(found)


def _default(fn, parameter):
  field = getattr(fn, '__dataclass_fields__', {}).get(parameter.name)
  make = getattr(field, 'default_factory', None)
  return make() if callable(make) else parameter.default


def _as_call(value):
  """Return the Call that would make an object, if the object shows it."""
  if isinstance(value, calls.Call):
    return value
  if isinstance(value, functools.partial):
    return calls.Call(value.func, dict(value.keywords))
  if _is_nested(value) and not isinstance(value, dict | Duration):
    fields = [x.name for x in dataclasses.fields(value) if x.init]
    kept = [x for x in fields if x not in ('parent', 'name')]  # of Flax
    return calls.Call(type(value), {x: getattr(value, x) for x in kept})
  return None


def _is_nested(value):
  is_object = dataclasses.is_dataclass(value) and not isinstance(value, type)
  return isinstance(value, calls.Call | dict) or is_object


def plain(value: Any) -> Any:
  """Return JSON values that are equal for equal values, on every machine.

  Tuples become lists, arrays nested lists, objects the names of their types.
  """
  if values.is_dict(value):
    return {str(name): plain(value[name]) for name in value}
  if isinstance(value, list | tuple):
    return [plain(inner) for inner in value]
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)  # JSON has none, and nan differs from nan
  if value is None or isinstance(value, bool | int | float | str):
    return value
  if isinstance(value, os.PathLike):
    return os.fspath(value)
  if inspect.isclass(value) or inspect.isroutine(value):
    return calls.full_name(value)
  if hasattr(value, 'tolist'):
    return plain(value.tolist())
  return calls.full_name(type(value))


def settings(call: calls.Call) -> Iterator[str]:
  """Yield 'config.KEY = VALUE' of all that can be set; defaults are marked."""
  for each in entries(_with_sizes(call)):
    is_name = each.key.rpartition('.')[2] in ('target', 'run')
    shown = each.value if is_name else repr(each.value)
    yield f'config.{each.key} = {shown}{"" if each.is_set else "  # default"}'


def _with_sizes(value):
  """Return a value with image sizes in place of the Calls that compute them."""
  if isinstance(value, dict):
    return {k: _with_sizes(v) for k, v in value.items()}
  if not isinstance(value, calls.Call):
    return value
  if values.is_size_of(value.fn):
    with contextlib.suppress(UserError, OSError):  # weights that do not exist
      return value.make()
  return dataclasses.replace(value, kwargs=_with_sizes(value.kwargs))


@dataclasses.dataclass(frozen=True)
class Provenance:
  """The config that a run is called with."""

  # As JSON values, saved as config.json.
  config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # Its file and what the command line changed, saved as preset.json.
  preset: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # Every argument by key, defaults included. A run that resumes is compared
  # with them, except for keys that may differ, see runs/workdirs.py.
  entries: Sequence[Entry] = ()
  allow_changes: Sequence[str] = ()


def run(
  config: Any,
  workdir: PathLike,
  *,
  preset: Mapping[str, Any] | None = None,
  allow_changes: Sequence[str] = (),
  **supplied: Any,
) -> Any:
  """Call the function that config.run names with the objects of the config.

  For `config` and `supplied` see `plan_run`; no value that must be set may be
  None. `preset` has JSON values that say where the config is from: 'config'
  (the config file and its argument) and 'changed' (see `override`). 'defaults'
  is added: {key: text} of what the config does not set.
  """
  found = calls.plan_run(config, **supplied)
  calls.check_set(found, config)
  listed = tuple(entries(found))
  defaults = {each.key: str(each.value) for each in listed if not each.is_set}
  provenance = Provenance(
    config=json.loads(config.to_json_best_effort()),
    preset={**(preset or {}), 'defaults': defaults},
    entries=listed,
    allow_changes=allow_changes,
  )
  return found.make(workdir, provenance=provenance, **supplied)


# Classes that a file of weights may name. Nothing else is imported for it,
# because whoever wrote the file must not choose what runs here.
TRUSTED_MODULES = (
  *('vit_jax.models.', 'vit_jax.science.', 'vit_jax.data.augment.'),
  *('vit_jax.data.rasters.', 'vit_jax.data.targets.'),
  'vit_jax.data.transforms.',
)
TRUSTED = ('vit_jax.data.images.Colours', 'vit_jax.data.vtab.Scale')


def describe(value: Any) -> Any:
  """Return JSON values that `build` turns into an equal object.

  It is a dataclass, a Flax module, a partial, what JSON can hold, or lists,
  tuples and dicts of these; anything else, such as an array, raises UserError.
  Fields with their default value are left out.
  """
  if (call := _as_call(value)) is not None:
    parameters = calls.parameters_of(call.fn)
    kept = {
      name: describe(inner)
      for name, inner in call.kwargs.items()
      if name not in parameters
      or calls.is_required(parameters[name])
      or inner != _default(call.fn, parameters[name])
    }
    return {'target': calls.full_name(call.fn), **kept}
  if isinstance(value, Mapping):
    return {str(k): describe(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return [describe(v) for v in value]
  if value is None or isinstance(value, bool | int | float | str):
    return value
  if inspect.isclass(value) or inspect.isfunction(value):
    return {'target': calls.full_name(value)}
  raise UserError(
    f'{value!r} cannot be described in JSON. Make it a dataclass whose fields '
    'are numbers, texts, or dataclasses.'
  )


def build(settings: Any, *, trust: Sequence[str] = ()) -> Any:
  """Return the object that settings of `describe`, from a file, describe.

  Packages in `trust` are others whose classes and functions the file may name.
  A target that is not trusted, or that settings do not fit, raises UserError.
  """
  for path, target in values.walk(settings):
    if path.rpartition('.')[2] == 'target' and not _is_trusted(target, trust):
      package = str(target).split('.')[0]
      raise UserError(
        f'The file names {target!r}, which is not in the list of trusted '
        f'names. If you trust that package, pass trust=({package!r},) or '
        f'--trust={package}.'
      )
  return calls.resolve(values.with_tuples(settings))


def _is_trusted(target, trust):
  if not isinstance(target, str):
    return False
  # One name in a module: no path through what the module itself imports.
  parent, _, name = target.rpartition('.')
  for module in TRUSTED_MODULES:
    if target.startswith(module) and not name.startswith('_'):
      found = calls.locate(target)
      is_class = inspect.isclass(found) and dataclasses.is_dataclass(found)
      return is_class and found.__module__ == parent
  return target in TRUSTED or any(target.startswith(f'{p}.') for p in trust)

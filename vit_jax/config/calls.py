"""Conversion of a config to checked calls, and of calls to objects."""

import contextlib
import copy
import dataclasses
import functools
import inspect
import pkgutil
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.config.values import (
  ConfigDict,
  ConfigError,
  hints_of,
  is_dict,
  join,
  misfit,
  suggest,
  walk,
  without_none,
)
from vit_jax.durations import UNITS, Duration
from vit_jax.types import Dtype

# Arguments that a config cannot set.
HIDDEN = ('workdir', 'provenance')


class Partial(functools.partial):
  """A target that lacks required arguments; called when they are known.

  Two of them are equal if they would call the same function in the same way. A
  call that leaves some out, or sets one twice, raises ConfigError.
  """

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, Partial):
      return False
    own, others = ((x.func, x.args, x.keywords) for x in (self, other))
    try:
      return own == others
    except ValueError:  # arrays, which are compared element by element
      with contextlib.suppress(AssertionError, ValueError):
        np.testing.assert_equal(own, others)
        return True
      return False

  def __hash__(self) -> int:  # also of arguments that have none
    return hash((len(self.args), *sorted(self.keywords)))

  def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
    if twice := sorted(self.keywords.keys() & kwargs.keys()):
      raise ConfigError(
        f'{full_name(self.func)}: {", ".join(twice)} is set by the code that '
        'calls it. Remove it from the config.'
      )
    try:
      inspect.signature(self.func).bind(
        *self.args, *args, **self.keywords, **kwargs
      )
    except TypeError as error:
      given = ', '.join([*(type(x).__name__ for x in args), *kwargs])
      raise ConfigError(
        f'{full_name(self.func)}: {error}. It is called with {given}. See '
        '"Adding something" in CONTRIBUTING.md for what each part gets.'
      ) from error
    return super().__call__(*args, **kwargs)


def supply(value: Any, name: str, call: Callable[[Any], Any]) -> Any:
  """Return a value with call(x) for the partials x in it that lack only `name`.

  They are found in keywords of others, and in fields of dataclasses.
  """
  if isinstance(value, functools.partial):
    if missing_of(value.func, value.keywords, len(value.args)) == [name]:
      return call(value)
    old = value.keywords
  elif dataclasses.is_dataclass(value) and not isinstance(value, type):
    fields = [x.name for x in dataclasses.fields(value) if x.init]
    old = {x: getattr(value, x) for x in fields}
  else:
    return value
  new = {k: supply(v, name, call) for k, v in old.items()}
  if not (changed := {k: v for k, v in new.items() if v is not old[k]}):
    return value
  if isinstance(value, functools.partial):
    return type(value)(value.func, *value.args, **{**old, **changed})
  return dataclasses.replace(value, **changed)


@dataclasses.dataclass
class Call:
  """A target with its arguments, checked but not yet called."""

  fn: Any  # what the target names
  kwargs: dict[str, Any]  # calls within them are not made yet either
  where: str = ''  # dotted path in the config
  hidden: Sequence[str] = ()  # arguments that the config cannot set
  run: Any = None  # function (workdir, what is made, ...), of a whole config

  def make(self, *args: Any, **supplied: Any) -> Any:
    """Make all calls, innermost first, and return the result of this one."""
    if self.run:
      made = dataclasses.replace(self, run=None).make()
      return self.run(*args, made, **supplied)
    kwargs = {name: make(value) for name, value in self.kwargs.items()}
    if missing_of(self.fn, kwargs | supplied, len(args)):
      return Partial(self.fn, *args, **kwargs, **supplied)
    return self.fn(*args, **kwargs, **supplied)


def make(value: Any) -> Any:
  """Return the value with every Call in it made, innermost first."""
  if isinstance(value, Call):
    return value.make()
  if isinstance(value, dict):
    return {k: make(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return type(value)(make(v) for v in value)
  return value


def plan_run(config: Any, **supplied: Any) -> Call:
  """Return the Call of the function that config.run names, all of it checked.

  For a function (workdir, settings, *, ...) it is the Call of its settings.
  `supplied` are arguments that the command line sets; the config cannot. A
  ConfigError lists all problems: unknown keys (with a suggestion), missing
  arguments, values that do not fit, targets that cannot be imported.
  """
  values = dict(config.items())
  if not (name := values.pop('run', None)):
    raise ConfigError(
      "The config has no key 'run', the function to call with it, such as "
      "'vit_jax.train.train'."
    )
  fn, plan = locate(name), _Plan()
  if unknown := sorted(supplied.keys() - parameters_of(fn).keys()):
    raise ConfigError(
      f'{name} has no argument {", ".join(unknown)}, which a flag sets. Leave '
      'the flag out.'
    )
  schema = schema_of(fn)
  call = plan.call(schema or fn, values, '', hidden=(*HIDDEN, *supplied))
  plan.require_all(call, call.hidden)
  plan.finish()
  return dataclasses.replace(call, run=fn if schema else None)


def resolve(value: Any) -> Any:
  """Return objects for a config value: every target in it is called."""
  plan = _Plan(is_complete=True)
  found = plan.value(value, Any, '')
  plan.finish()
  return make(found)


def check_set(call: Call, config: Any, prefix: str = '') -> None:
  """Raise ConfigError naming the flags of required arguments that are None.

  Values that refer to another one are not named. `prefix` is the path of the
  config in the config of the command line, with a dot.
  """
  filled, flags = copy.deepcopy(config), []
  for path in sorted(_unset(call), key=len):
    *parents, key = path.split('.')
    node = filled
    for parent in parents:
      node = node[int(parent) if isinstance(node, list | tuple) else parent]
    if node[key] is None:
      flags.append(f'--config.{prefix}{path}=...')
      with contextlib.suppress(ValueError):  # None, not a placeholder
        node.get_ref(key).set('set', type_safe=False)
  if flags:
    raise ConfigError(
      f'The config leaves values to be set by you. Add {" ".join(flags)}'
    )


def _unset(value):
  """Yield the paths of required arguments that are None.

  One with the mark 'or NAME' is required if the argument NAME is None, too.
  """
  if isinstance(value, Call):
    parameters = parameters_of(value.fn)
    for name, inner in value.kwargs.items():
      if inner is None and name in parameters:
        marks = getattr(hints_of(value.fn).get(name), '__metadata__', ())
        others = [x[3:] for x in marks if str(x).startswith('or ')]
        given = any(value.kwargs.get(x) is not None for x in others)
        if is_required(parameters[name]) or (others and not given):
          yield join(value.where, name)
      yield from _unset(inner)
  elif isinstance(value, dict | list | tuple):
    for inner in value.values() if isinstance(value, dict) else value:
      yield from _unset(inner)


@dataclasses.dataclass
class _Plan:
  """The calls that a config describes; `problems` are all mistakes in it."""

  is_complete: bool = False  # no flag sets a required argument that is None
  problems: list[str] = dataclasses.field(default_factory=list)

  def finish(self) -> None:
    if self.problems:
      raise ConfigError('\n'.join(dict.fromkeys(self.problems)))

  def value(self, value, annotation, where, others=()):
    """Return a config value with a Call in the place of every target in it.

    `others` are keys next to it that have a target, for the message.
    """
    annotation = without_none(annotation)
    if annotation is ConfigDict:
      return value  # such as the runs of a study, whose turn comes later
    if is_dict(value):
      values = dict(value.items())
      is_part = dataclasses.is_dataclass(annotation)
      if rest_field_of(annotation):
        return self.flat(annotation, values, where, others)
      inner = item_of(annotation)
      if 'target' in values and rest_field_of(inner):
        self.problems.append(f'{where}.target: set {where}.NAME.target.')
        return {}
      if 'target' in values:
        return self.target(values, annotation, where)
      if is_part:
        call = self.call(annotation, values, where)
        self.require_all(call)
        return call
      complete = [k for k, v in values.items() if is_dict(v) and 'target' in v]
      return {
        k: self.value(v, inner, join(where, k), complete)
        for k, v in values.items()
      }
    if isinstance(value, list | tuple):
      inner = item_of(annotation)
      return type(value)(
        self.value(v, inner, join(where, i)) for i, v in enumerate(value)
      )
    return value

  def target(self, values, annotation, where, also=()):
    """Return the Call of a dict with a target, None if there is no such name.

    `also` are keys that the dict may have had, for the message.
    """
    try:
      fn = locate(values.pop('target'))
    except ConfigError as error:
      self.problems.append(f'{join(where, "target")}: {error}')
      return None
    if not callable(fn):
      self.problems.append(f'{where}: {fn!r} is not a class or a function.')
      return None
    marks = getattr(annotation, '__metadata__', ())
    supplied = dict(x for each in marks if type(each) is tuple for x in each)
    for key in [x for x in supplied if x in values]:
      del values[key]
      self.problems.append(
        f'{join(where, key)}: the code that calls {full_name(fn)} sets it. Set '
        f'{supplied[key]} instead.'
      )
    call = self.call(fn, values, where, (*supplied,), also)
    if not takes_partials(annotation):
      self.require_all(call)
    return call

  def flat(self, cls, values, where, others):
    """Return the Call of a dataclass that has a `rest` field."""
    rest, own = rest_field_of(cls), {}
    names = [f.name for f in dataclasses.fields(cls) if f is not rest]
    for key in list(values):
      if key in names or stem_of(key) in names:
        own[key] = values.pop(key)
    if 'target' not in values:
      near = suggest(where.rpartition('.')[2], others)
      self.problems.append(
        f"{where} needs a 'target', the dotted path of a class or function"
        f'{near}{f"; it has {list(values)}" if values else ""}.'
      )
      return None
    call, hints = self.call(cls, own, where), hints_of(cls)
    also = [k for n in names for k in keys_of(n, hints.get(n))]
    call.kwargs[rest.name] = self.target(values, hints[rest.name], where, also)
    return call

  def call(self, fn, values, where, hidden=(), also=()):
    """Return a Call, all names and plain values checked."""
    parameters, hints = parameters_of(fn), hints_of(fn)
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    known = [name for name in parameters if name not in hidden]
    kwargs = {}
    for key, value in values.items():
      path, name = join(where, key), key
      if key not in known and stem_of(key) in known:
        name = stem_of(key)
      elif key not in known and (key in hidden or not takes_any):
        takes = [k for n in known for k in keys_of(n, hints.get(n))] + [*also]
        parts = [x for x, _ in walk(values) if x.endswith(f'.{key}')]
        near = suggest(key, parts or takes)
        self.problems.append(
          f'{path}: {full_name(fn)} has no argument {key!r}{near}. '
          f'It takes: {", ".join(takes)}.'
        )
        continue
      if name != key and value is None:
        continue  # a unit that is not used
      if name in kwargs:
        self.problems.append(f'{path}: {name} is set in two units. Keep one.')
        continue
      parameter, hint = parameters.get(name), hints.get(name, Any)
      kwargs[name] = self.argument(key, name, value, parameter, hint, path)
    return Call(fn, kwargs, where, hidden)

  def argument(self, key, name, value, parameter, annotation, path):
    if name != key:
      try:
        value = Duration(value, key.rpartition('_')[2])
      except ValueError as error:
        self.problems.append(f'{path}: {error}')
        return None
    elif is_duration(annotation) and value is not None:
      self.problems.append(
        f'{path}={value!r} has no unit. Use one of '
        f'{", ".join(keys_of(name, annotation))}.'
      )
      return None
    if key.endswith('dtype') and annotation == Any | None:  # as optax has it
      annotation = Dtype | None
    fields, kind = annotation, type(getattr(parameter, 'default', None))
    has_target = is_dict(value) and 'target' in value
    if dataclasses.is_dataclass(kind) and not has_target:
      fields = kind
    planned = self.value(value, fields, path)
    # A required argument that is None is reported with its flag, by check_set.
    to_be_set = value is None and parameter and is_required(parameter)
    if (to_be_set and not self.is_complete) or has_calls(planned):
      return planned
    if reason := misfit(planned, annotation):
      value = getattr(planned, 'value', planned)  # of a Duration
      shown = repr(value) if len(repr(value)) < 100 else f'{value!r:.97}...'
      self.problems.append(f'{path}={shown}: {reason}.')
    return planned

  def require_all(self, call, hidden=()):
    """Add a problem if arguments of a Call are missing, and it has no other."""
    start = f'{call.where}.'
    if call.where and any(x.startswith(start) for x in self.problems):
      return
    if missing := missing_of(call.fn, {*call.kwargs, *hidden}):
      hints, where = hints_of(call.fn), f'{call.where}: ' if call.where else ''
      keys = [k for name in missing for k in keys_of(name, hints.get(name))]
      self.problems.append(
        f'{where}{full_name(call.fn)}: {", ".join(map(repr, missing))} '
        f'missing. Set {", ".join(f"{key}=..." for key in keys)}. It takes: '
        f'{", ".join(parameters_of(call.fn))}.'
      )


def has_calls(value: Any) -> bool:
  """Return whether a value is a Call, or has one in its lists and dicts."""
  if isinstance(value, dict):
    return any(map(has_calls, value.values()))
  if isinstance(value, list | tuple):
    return any(map(has_calls, value))
  return isinstance(value, Call)


# Functions and classes that a config can name, and their arguments.


def locate(dotted_path: Any) -> Any:
  """Return the object that 'package.module.name' (or 'Class.method') names."""
  if not isinstance(dotted_path, str) or '.' not in dotted_path:
    raise ConfigError(
      f'{dotted_path!r} cannot be imported. A target is a dotted path such as '
      "'vit_jax.models.vit.VisionTransformer'."
    )
  try:
    return pkgutil.resolve_name(dotted_path)
  except ModuleNotFoundError as error:
    if not (dotted_path + '.').startswith(f'{error.name}.'):
      raise  # a module that exists and fails to import something says so
    raise ConfigError(
      f'{dotted_path!r} cannot be imported: there is no module '
      f'{error.name!r}. Is its package installed?'
    ) from error
  except AttributeError as error:
    names = [x for x in dir(error.obj) if not x.startswith('_')]
    raise ConfigError(
      f'{dotted_path!r}: {error}{suggest(str(error.name), names)}.'
    ) from error
  except ValueError as error:
    raise ConfigError(f'{dotted_path!r} cannot be imported: {error}') from error


def parameters_of(fn: Any) -> Mapping[str, inspect.Parameter]:
  """Return {name: parameter} without those that Flax adds to modules."""
  found = dict(inspect.signature(fn).parameters)
  if hasattr(fn, 'clone') and 'parent' in found:
    found = {k: v for k, v in found.items() if k not in ('parent', 'name')}
  positional = inspect.Parameter.VAR_POSITIONAL
  return {k: v for k, v in found.items() if v.kind != positional}


def schema_of(fn: Any) -> Any:
  """Return the dataclass that `fn(workdir, settings, *, ...)` takes, or None.

  Then the keys of a config that runs `fn` are the fields of its settings.
  """
  named = inspect.Parameter.POSITIONAL_OR_KEYWORD
  names = [k for k, p in parameters_of(fn).items() if p.kind == named]
  found = hints_of(fn).get(names[1]) if len(names) == 2 else None
  return found if dataclasses.is_dataclass(found) else None


def is_required(parameter: inspect.Parameter) -> bool:
  """Return whether a parameter has no default."""
  return parameter.default is parameter.empty


def missing_of(fn: Any, given: Any, num_args: int = 0) -> list[str]:
  """Return the names of required parameters of fn that are not given."""
  parameters = list(parameters_of(fn).values())[num_args:]
  return [
    p.name
    for p in parameters
    if is_required(p)
    and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    and p.name not in given
  ]


def keys_of(name: str, annotation: Any) -> list[str]:
  """Return the keys by which a config sets a parameter."""
  if is_duration(annotation):
    return [f'{name}_{unit}' for unit in UNITS]
  return [name]


def is_duration(annotation: Any) -> bool:
  """Return whether the key of such a parameter has a unit."""
  annotation = without_none(annotation)
  while hasattr(annotation, '__metadata__'):
    annotation = without_none(annotation.__origin__)
  return annotation is Duration


def stem_of(key: str) -> str:
  """Return the key without its unit; '' if it has none."""
  stem, _, unit = key.rpartition('_')
  return stem if unit in UNITS else ''


def takes_partials(annotation: Any) -> bool:
  """Return whether a target that lacks arguments fits the annotation."""
  annotation = getattr(annotation, '__origin__', annotation)
  origin = typing.get_origin(annotation) or annotation
  return annotation is Any or origin in (Callable, functools.partial)


def item_of(annotation: Any) -> Any:
  """Return the annotation of the items of a list or dict."""
  origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
  if not inner or not inspect.isclass(origin):
    return Any
  return inner[1] if issubclass(origin, Mapping) else inner[0]


def rest_field_of(cls: Any) -> Any:
  """Return the field of a dataclass that holds a target, or None."""
  fields = getattr(cls, '__dataclass_fields__', {}).values()
  return next((f for f in fields if f.metadata.get('rest')), None)


def full_name(fn: Any) -> str:
  """Return the dotted path of a class or function."""
  module = getattr(fn, '__module__', '')
  return f'{module}.{getattr(fn, "__qualname__", "?")}'

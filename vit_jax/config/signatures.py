"""Functions and classes that a config can name, and their arguments."""

import collections.abc
import dataclasses
import functools
import inspect
import pkgutil
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.config import domains
from vit_jax.config.domains import hints_of
from vit_jax.config.errors import ConfigError, suggest
from vit_jax.optim.durations import UNITS, Duration


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
    module, name = error.obj, str(error.name)
    have = [n for n in dir(module) if not n.startswith('_')]
    raise ConfigError(
      f'{dotted_path!r}: {getattr(module, "__name__", module)} has no '
      f'{name!r}{suggest(name, have)}.'
    ) from error
  except ValueError as error:
    raise ConfigError(f'{dotted_path!r} cannot be imported: {error}') from error


def parameters_of(fn: Any) -> Mapping[str, inspect.Parameter]:
  """Return {name: parameter} without those that Flax adds to modules."""
  try:
    hash(fn)
  except TypeError:  # an object with a list in it
    return _parameters_of.__wrapped__(fn)
  return _parameters_of(fn)


@functools.cache
def _parameters_of(fn):
  try:
    found = dict(inspect.signature(fn).parameters)
  except ValueError:  # some built-ins have no signature
    empty = inspect.Parameter('kwargs', inspect.Parameter.VAR_KEYWORD)
    return {'kwargs': empty}
  if hasattr(fn, 'clone') and 'parent' in found:
    found = {k: v for k, v in found.items() if k not in ('parent', 'name')}
  positional = inspect.Parameter.VAR_POSITIONAL
  return {k: v for k, v in found.items() if v.kind != positional}


def missing_of(
  fn: Any, given: Any, num_args: int, supplied: Sequence[str] = ()
) -> list[str]:
  """Return the names of required parameters of fn that are not given."""
  parameters = list(parameters_of(fn).values())[num_args:]
  keywords = (
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
  )
  return [
    p.name
    for p in parameters
    if p.default is p.empty
    and p.kind in keywords
    and p.name not in given
    and p.name not in supplied
  ]


def is_required(parameter: inspect.Parameter) -> bool:
  """Return whether a parameter has no default."""
  return parameter.default is parameter.empty


def default_of(fn: Any, name: str) -> Any:
  """Return the default of an argument; Parameter.empty if it has none."""
  parameter = parameters_of(fn).get(name)
  if parameter is None:  # one of **kwargs
    return inspect.Parameter.empty
  if inspect.isclass(fn) and dataclasses.is_dataclass(fn):
    for field in dataclasses.fields(fn):
      if field.name == name and callable(field.default_factory):
        return field.default_factory()
  return parameter.default


def owner_of(fn: Any, name: str) -> str:
  """Return 'FUNCTION.NAME' of an argument; of a class, where it is defined."""
  for cls in inspect.getmro(fn) if inspect.isclass(fn) else ():
    if name in vars(cls).get('__annotations__', ()):
      return f'{full_name(cls)}.{name}'
  return f'{full_name(fn)}.{name}'


def lacks_text(fn: Any, missing: Sequence[str]) -> str:
  """Return the error that required arguments are missing."""
  hints, text = hints_of(fn), ''
  for name in missing:
    if is_duration(hints.get(name)):
      keys = (f'{key}=...' for key in keys_of(name, hints[name]))
      text += f'Set one of {", ".join(keys)}. '
  return (
    f'{full_name(fn)}: {", ".join(map(repr, missing))} '
    f'{"is" if len(missing) == 1 else "are"} missing. {text}'
    f'It takes: {", ".join(parameters_of(fn))}.'
  )


def keys_of(name: str, annotation: Any) -> list[str]:
  """Return the keys by which a config sets a parameter."""
  if is_duration(annotation):
    return [f'{name}_{unit}' for unit in UNITS]
  return [name]


def is_duration(annotation: Any) -> bool:
  """Return whether the key of such a parameter has a unit."""
  annotation = without_none(annotation)
  return getattr(annotation, '__origin__', annotation) is Duration


def stem_of(key: str) -> str:
  """Return the key without its unit; '' if it has none."""
  stem, _, unit = key.rpartition('_')
  return stem if unit in UNITS else ''


def of_factory(annotation: Any) -> dict[str, Any] | None:
  """Return {argument: type} of Annotated[Callable, ...], else None."""
  metadata = getattr(annotation, '__metadata__', ())
  found: dict[str, Any] = dict(
    each for each in metadata if isinstance(each, tuple)
  )
  return found or None


def takes_partials(annotation: Any) -> bool:
  """Return whether a target that lacks arguments fits the annotation."""
  annotation = getattr(annotation, '__origin__', annotation)
  origin = typing.get_origin(annotation) or annotation
  return annotation is Any or origin is collections.abc.Callable


def item_of(annotation: Any) -> Any:
  """Return the annotation of the items of a list or dict."""
  annotation = without_none(annotation)
  origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
  if not inner or not inspect.isclass(origin):
    return Any
  return inner[1] if issubclass(origin, Mapping) else inner[0]


def makes(fn: Any, annotation: Any, *, is_partial: bool) -> bool:
  """Return whether what a class or function makes fits an annotation.

  Args:
    fn: a function without an annotation of its result may make anything.
    annotation: without a union, see `domains.alternatives`.
    is_partial: whether the call is left to the code that gets it.
  """
  if hasattr(annotation, '__metadata__'):
    annotation = annotation.__origin__
  made = fn if inspect.isclass(fn) else hints_of(fn).get('return', Any)
  wanted = typing.get_origin(annotation) or annotation
  inner = typing.get_args(annotation)
  if wanted is functools.partial or (
    wanted is collections.abc.Callable and (is_partial or not inner)
  ):
    return _is_a(made, inner[-1] if inner else Any)
  if wanted is collections.abc.Callable and inspect.isclass(made):
    if not domains.has(made, '__call__'):
      return domains.is_opaque(made)
    result = hints_of(inspect.getattr_static(made, '__call__'))
    return _is_a(result.get('return', Any), inner[-1])
  return annotation is Any or (not is_partial and _is_a(made, annotation))


def _is_a(made, wanted):
  """Return whether an instance of `made` may be what is wanted."""
  made = typing.get_origin(made) or made
  wanted = typing.get_origin(wanted) or wanted
  if Any in (made, wanted) or made is wanted:
    return True
  if wanted is collections.abc.Callable:
    return not inspect.isclass(made) or domains.has(made, '__call__')
  if inspect.isclass(made) and domains.is_opaque(made):
    return True
  if getattr(wanted, '_is_protocol', False):
    names = domains.members(wanted)
    return domains.has(made, *names) and (
      '__call__' not in names or _takes_arguments_of(made, wanted)
    )
  if inspect.isclass(made) and inspect.isclass(wanted):
    is_like = getattr(wanted, 'duck_typed', False)
    return issubclass(made, wanted) or (
      is_like and domains.has(made, '__call__')
    )
  return not inspect.isclass(made)


def _takes_arguments_of(made, protocol):
  """Return whether a class can be called as a protocol says."""
  call = inspect.signature(inspect.getattr_static(made, '__call__'))
  given = inspect.signature(protocol.__call__).parameters.values()
  keywords = {p.name: p for p in given if p.kind == p.KEYWORD_ONLY}
  try:
    call.bind(*(p for p in given if p.name not in keywords), **keywords)
  except TypeError:
    return False
  return True


def without_none(annotation: Any) -> Any:
  """Return X for X | None, and Any for other unions."""
  if typing.get_origin(annotation) in (typing.Union, types.UnionType):
    inner = [a for a in typing.get_args(annotation) if a is not type(None)]
    return inner[0] if len(inner) == 1 else Any
  return annotation


def rest_field_of(cls: Any) -> Any:
  """Return the field of a dataclass that holds a target, or None."""
  fields = (f for f in dataclasses.fields(cls) if f.metadata.get('rest'))
  return next(fields, None)


def is_number(parameter: inspect.Parameter) -> bool:
  """Return whether a parameter is a number or a bool."""
  return parameter.annotation in (bool, int, float) or isinstance(
    parameter.default, int | float
  )


def join(where: str, key: Any) -> str:
  """Return the path of a key in a part of the config."""
  return f'{where}.{key}' if where else str(key)


def full_name(fn: Any) -> str:
  """Return the dotted path of a class or function."""
  module = getattr(fn, '__module__', '')
  return f'{module}.{getattr(fn, "__qualname__", "?")}'

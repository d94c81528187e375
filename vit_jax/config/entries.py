"""Everything that a run is called with, defaults included, as flat entries."""

import dataclasses
import functools
import inspect
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from vit_jax.config.calls import Call
from vit_jax.config.signatures import (
  default_of,
  full_name,
  join,
  owner_of,
  parameters_of,
  rest_field_of,
)
from vit_jax.config.values import ConfigDict
from vit_jax.optim.durations import Duration


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
  """A value that a config can set.

  Attributes:
    key: dotted path in the config.
    value: the value; the full name of a class or function for 'target'.
    is_set: whether the config sets it.
    is_default: whether the value is the default, set or not.
    is_required: whether there is no default.
    arguments: full names ('vit_jax.train.train.seed') of the arguments that it
      belongs to, outermost first.
  """

  key: str
  value: Any
  is_set: bool = True
  is_default: bool = False
  is_required: bool = False
  arguments: tuple[str, ...] = ()

  def line(self) -> str:
    """Return 'config.KEY = VALUE'."""
    is_name = self.key.rpartition('.')[2] in ('target', 'run')
    return f'config.{self.key} = {self.value if is_name else repr(self.value)}'


def entries(
  value: Any, key: str = '', arguments: tuple[str, ...] = ()
) -> Iterator[Entry]:
  """Yield the entries of a Call, or of the objects that it would make.

  Args:
    value: a Call, as `plan_run` returns it, or any value or object in one.
    key: dotted path of the value.
    arguments: see Entry.
  """
  if (call := _as_call(value)) is not None:
    yield from _of_call(call, key, arguments)
  elif isinstance(value, Duration):
    yield Entry(
      key=f'{key}_{value.unit}', value=value.value, arguments=arguments
    )
  elif isinstance(value, Mapping | ConfigDict) and len(value):
    for name in value:
      yield from entries(value[name], join(key, name), arguments)
  elif isinstance(value, list | tuple) and any(map(_is_nested, value)):
    for index, inner in enumerate(value):
      yield from entries(inner, join(key, index), arguments)
  elif _is_plain(value):
    yield Entry(key=key, value=value, arguments=arguments)
  else:  # a class, a function, or an object that does not show its arguments
    name = plain(value)
    yield Entry(key=join(key, 'target'), value=name, arguments=arguments)


def _of_call(call, key, arguments):
  flat = dataclasses.is_dataclass(call.fn) and rest_field_of(call.fn)
  if flat:  # the target and its keywords stand next to the own fields
    yield from entries(call.kwargs[flat.name], key, arguments)
  else:
    name = join(key, 'target' if key else 'run')
    yield Entry(key=name, value=full_name(call.fn), arguments=arguments)
  parameters = parameters_of(call.fn)
  for name in dict.fromkeys([*parameters, *call.kwargs]):
    if flat and name == flat.name:
      continue
    path = join(key, name)
    inside = (*arguments, owner_of(call.fn, name))
    default = default_of(call.fn, name)
    required = default is inspect.Parameter.empty
    standard = [] if required else list(entries(default, path, inside))
    if name in call.kwargs:
      expected = {each.key: plain(each.value) for each in standard}
      for each in entries(call.kwargs[name], path, inside):
        is_default = each.is_default or (
          each.key in expected and expected[each.key] == plain(each.value)
        )
        is_required = each.is_required or (required and each.key == path)
        yield dataclasses.replace(
          each, is_default=is_default, is_required=is_required
        )
    elif name not in call.hidden:
      for each in standard:
        yield dataclasses.replace(each, is_set=False, is_default=True)


def _as_call(value):
  """Return the Call that would make an object, if the object shows it."""
  if isinstance(value, Call):
    return value
  if isinstance(value, functools.partial):
    return Call(value.func, dict(value.keywords))
  if _is_dataclass(value) and not isinstance(value, Duration):
    names = [
      field.name
      for field in dataclasses.fields(value)
      if field.init and field.name not in ('parent', 'name')
    ]
    return Call(type(value), {name: getattr(value, name) for name in names})
  return None


def _is_dataclass(value):
  return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_nested(value):
  return isinstance(value, Call | dict) or _is_dataclass(value)


def _is_plain(value):
  kinds = bool | int | float | str | list | tuple | set | frozenset | Mapping
  return (
    value is None
    or isinstance(value, kinds | ConfigDict | os.PathLike)
    or (hasattr(value, 'tolist') and not isinstance(value, type))
  )


def plain(value: Any) -> Any:
  """Return JSON values that are equal for equal values, on every machine.

  Tuples become lists, arrays nested lists, and objects the names of their
  types.
  """
  if isinstance(value, Mapping | ConfigDict):
    return {str(name): plain(value[name]) for name in value}
  if isinstance(value, list | tuple):
    return [plain(inner) for inner in value]
  if isinstance(value, set | frozenset):
    return sorted(map(str, value))
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)  # JSON has none, and nan differs from nan
  if value is None or isinstance(value, bool | int | float | str):
    return value
  if isinstance(value, os.PathLike):
    return os.fspath(value)
  if inspect.isclass(value) or inspect.isroutine(value):
    return full_name(value)
  if hasattr(value, 'tolist'):
    return plain(value.tolist())
  return full_name(type(value))


def settings(call: Call) -> Iterator[str]:
  """Yield a line 'config.KEY = VALUE' for everything that can be set in a Call.

  Values that the config does not set are their defaults, and marked so.
  """
  for each in entries(call):
    if each.value is None and each.is_required:
      yield f'{each.line()}  # to be set by you'
    else:
      yield each.line() + ('' if each.is_set else '  # default')

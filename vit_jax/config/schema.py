"""One check of plain values against the annotations of arguments.

An annotation is the schema of an argument: `accum_steps: Count = 1`, see
types.py. Pydantic validates strictly: no text becomes a number, and no number a
bool. Objects that a config describes are not plain values; they are checked by
the code that uses them.
"""

import dataclasses
import difflib
import functools
import inspect
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any


class ConfigError(ValueError):
  """A config that cannot be used as it is."""


def suggest(word: str, words: Iterable[str]) -> str:
  """Return ' (did you mean ...?)' for the most similar word, or ''."""
  near = difflib.get_close_matches(str(word), words, n=1)
  return f' (did you mean {near[0]!r}?)' if near else ''


def misfit(value: Any, annotation: Any) -> str:
  """Return why a plain value does not fit an annotation; '' if it fits.

  Args:
    value: numbers, texts, None, and lists and dicts of these.
    annotation: of the argument. Annotations that pydantic cannot read, such as
      protocols, fit every value.
  """
  reasons: list[str] = []
  for each in alternatives(annotation):
    if not (reason := _misfit(value, each)):
      return ''
    reasons.append(reason)
  choices = [x for x in _literals(annotation) if isinstance(x, str)]
  hint = suggest(value, choices) if isinstance(value, str) else ''
  return f'{" or ".join(dict.fromkeys(reasons))}{hint}'


def _misfit(value, annotation):
  if annotation is Any or (adapter := _adapter(annotation)) is None:
    return ''
  import pydantic  # not on machines that only benchmark and test models

  reason = ''
  for candidate in (value, with_tuples(value)):  # strict: a list is no tuple
    try:
      adapter.validate_python(candidate)
      return ''
    except pydantic.ValidationError as error:
      reason = _reason(error.errors()[0])
    except TypeError:  # a protocol
      return ''
  return reason


def alternatives(annotation: Any) -> tuple[Any, ...]:
  """Return the members of a union, else the annotation itself."""
  if typing.get_origin(annotation) in (typing.Union, types.UnionType):
    return typing.get_args(annotation)
  return (annotation,)


def without_none(annotation: Any) -> Any:
  """Return X for X | None, and Any for other unions."""
  inner = [a for a in alternatives(annotation) if a is not type(None)]
  return inner[0] if len(inner) == 1 else Any


def hints_of(fn: Any) -> Mapping[str, Any]:
  """Return {name: annotation} of the arguments of a class or function."""
  fn = fn.__init__ if inspect.isclass(fn) else fn
  try:
    return typing.get_type_hints(fn, include_extras=True)
  except (NameError, TypeError, AttributeError):  # names of type checkers only
    return {}


def _adapter(annotation):
  try:
    return _cached_adapter(annotation)
  except TypeError:  # an unhashable annotation
    return _cached_adapter.__wrapped__(annotation)


@functools.cache
def _cached_adapter(annotation):
  """Return the validator of an annotation, None if there cannot be one."""
  try:
    import pydantic
  except ModuleNotFoundError:
    return None
  if dataclasses.is_dataclass(annotation):  # objects, whose parts were checked
    return pydantic.TypeAdapter(pydantic.InstanceOf[annotation])
  settings = pydantic.ConfigDict(
    strict=True, arbitrary_types_allowed=True, allow_inf_nan=False
  )
  try:
    return pydantic.TypeAdapter(annotation, config=settings)
  except Exception:  # of several kinds: pydantic cannot read the annotation
    return None


def with_tuples(value: Any) -> Any:
  """Return the value with a tuple in the place of every list."""
  if isinstance(value, Mapping):
    return {k: with_tuples(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return tuple(with_tuples(v) for v in value)
  return value


def _reason(error):
  text = error['msg'].replace('Value error, ', 'Input should be ')
  return text.replace('Input should be', 'must be')


def _literals(annotation):
  """Yield the values that an annotation lists."""
  if typing.get_origin(annotation) is typing.Literal:
    yield from typing.get_args(annotation)
  else:
    for inner in typing.get_args(annotation):
      yield from _literals(inner)

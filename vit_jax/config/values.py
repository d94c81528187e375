"""Values in a config: walked, set from the command line, and checked once.

An annotation is the schema of an argument: `accum_steps: Count = 1`, see
types.py. Pydantic validates strictly: no text becomes a number, and no number a
bool. Objects that a config describes are checked by the code that uses them.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import json
import pkgutil
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from vit_jax.types import ComputedSize, UserError

try:
  from ml_collections import ConfigDict
except ModuleNotFoundError:  # config files need it; models by name do not

  class ConfigDict(dict):  # type: ignore[no-redef]
    """Placeholder: without ml_collections there are no config files."""


class ConfigError(UserError):
  """A config that cannot be used as it is."""


def suggest(word: str, words: Iterable[str]) -> str:
  """Return ' (did you mean ...?)' for the most similar word, or ''."""
  near = difflib.get_close_matches(str(word), words, n=1, cutoff=0.55)
  return f' (did you mean {near[0]!r}?)' if near else ''


def walk(value: Any, path: str = '') -> Iterator[tuple[str, Any]]:
  """Yield (dotted path, leaf) of nested dicts, and of lists that have dicts.

  Empty dicts and lists of plain values are leaves.
  """
  if isinstance(value, list | tuple) and _has_dict(value):
    value = {str(i): inner for i, inner in enumerate(value)}
  if is_dict(value) and len(value):
    for key, inner in value.items():
      yield from walk(inner, join(path, key))
  else:
    yield path, value


def _has_dict(value):
  if isinstance(value, list | tuple):
    return any(map(_has_dict, value))
  return is_dict(value)


def is_dict(value: Any) -> bool:
  """Return whether a value is a dict or a ConfigDict."""
  return isinstance(value, Mapping | ConfigDict)


def join(path: str, key: Any) -> str:
  """Return the dotted path of a key in a part of the config."""
  return f'{path}.{key}' if path else str(key)


def override(config: Any, assignments: Sequence[str]) -> dict[str, Any]:
  """Set values in a ConfigDict, in place.

  Assignments are texts 'a.b=VALUE'. A value is a Python literal or, if it is
  not one, text; it must fit the value that it replaces. Keys that the config
  does not have are added; `a.0.b` reaches into a list. Returns {key: [value
  before, value after]} of what has changed, as JSON values. Keys next to a new
  target keep their values, and a line on stderr lists them.
  """
  before = dict(walk(config.copy_and_resolve_references()))
  for assignment in assignments:
    path, equals, text = assignment.partition('=')
    *parents, key = path.split('.')
    if not all((*parents, key)):
      raise ConfigError(
        f'--config.{assignment} lacks a key. Write --config.KEY=VALUE, as in '
        '--config.seed=1 or --config.data.batch_size=64.'
      )
    if parents == ['shared'] and key not in config.get('shared', ()):
      known = list(config.get('shared', ()))
      raise ConfigError(
        f'--config.{path}: no run refers to {key!r}{suggest(key, known)}. '
        f'Shared values: {", ".join(known) or "none"}.'
      )
    node = config
    for parent in parents:
      node = _child(node, parent, f'--config.{path}')
    value = _parse(text) if equals else True
    _set(node, key, value, text, path, f'--config.{assignment}')
  after = dict(walk(config))
  changed = {
    key: [before.get(key), after.get(key)]
    for key in before | after
    if before.get(key) != after.get(key)
  }
  typed = [x.partition('=')[0] for x in assignments]
  for path in (x for x in typed if x in changed and x.endswith('.target')):
    part = path.removesuffix('target')
    kept = [
      f'{key.removeprefix(part)}={value!r}'
      for key, value in before.items()
      if key.startswith(part) and key not in typed and value is not None
    ]
    if kept:
      shown = f'--config.{path} keeps {", ".join(kept)} of the config file.'
      print(shown, file=sys.stderr)
  return json.loads(json.dumps(changed, default=str))


def _child(node, key, what):
  """Return the dict or list under a key; a new dict where there is none."""
  if isinstance(node, list | tuple):
    if not key.isdecimal() or int(key) >= len(node):
      raise ConfigError(f'{what}: {key!r} is not an index below {len(node)}.')
    return node[int(key)]
  if node.get(key) is None:
    _set(node, key, ConfigDict(), '', key, what)
  child = node[key]
  if not isinstance(child, Mapping | ConfigDict | list | tuple):
    raise ConfigError(f'{what}: {key} is {child!r}, which has no keys.')
  return child


def _set(node, key, value, text, path, what):
  if not isinstance(node, ConfigDict):  # a dict or list in a list
    node[int(key) if isinstance(node, list) else key] = value
    return
  if key in node and node.get_type(key) is str and value is not None:
    value = text
  old = node.get(key)
  if isinstance(old, ConfigDict) and is_size_of(old.get('target')):
    node.get_ref(key).set(value, type_safe=False)  # instead of computing it
    return
  try:
    with node.unlocked():
      node[key] = value
  except (TypeError, ValueError) as error:
    if isinstance(node[key], ConfigDict):
      reason = (
        f'it has keys of its own: {", ".join(node[key])}. Set these, as in '
        f'--config.{path}.KEY=VALUE.'
      )
    else:
      kind = node.get_type(key).__name__
      reason = f'it is {node[key]!r} here. Give a value of type {kind}.'
    raise ConfigError(f'{what}: {reason}') from error


def _parse(text):
  if text in ('true', 'false'):
    text = text.capitalize()
  try:
    return ast.literal_eval(text)
  except (SyntaxError, ValueError):
    return text


def misfit(value: Any, annotation: Any) -> str:
  """Return why a plain value does not fit an annotation; '' if it fits.

  Annotations that pydantic cannot read, such as protocols, fit every value.
  """
  reasons: list[str] = []
  for each in alternatives(annotation):
    if not (reason := _misfit(value, each)):
      return ''
    reasons.append(reason)
  plain = [x for x in reasons if 'an instance' not in x]  # a config has these
  reasons = plain if len(plain) > 1 else reasons
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
      text = error.errors()[0]['msg'].replace('Value error,', 'must be')
      reason = text.replace('Input should be', 'must be')
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
  except NameError:  # a name for type checkers only, in one of them
    found = inspect.get_annotations(fn)
    return {k: v for k, v in found.items() if not isinstance(v, str)}
  except (TypeError, AttributeError):
    return {}


def is_size_of(fn: Any) -> bool:
  """Return whether a function, or its dotted path, computes an image size."""
  fn = pkgutil.resolve_name(fn) if isinstance(fn, str) else fn
  return hints_of(fn).get('return') == ComputedSize


@functools.cache
def _adapter(annotation):
  """Return the validator of an annotation, None if there cannot be one."""
  try:
    import pydantic
  except ModuleNotFoundError:
    return None
  kind = getattr(annotation, '__origin__', annotation)  # of an Annotated
  if dataclasses.is_dataclass(kind):  # objects, whose parts were checked
    conditions = getattr(annotation, '__metadata__', ())
    checked = Annotated[kind, pydantic.InstanceOf(), *conditions]
    return pydantic.TypeAdapter(checked)
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


def _literals(annotation):
  """Yield the values that an annotation lists."""
  if typing.get_origin(annotation) is typing.Literal:
    yield from typing.get_args(annotation)
  else:
    for inner in typing.get_args(annotation):
      yield from _literals(inner)

"""Values in a config: set from the command line, and walked."""

import ast
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from vit_jax.config.schema import ConfigError, suggest

try:
  from ml_collections import ConfigDict
  from ml_collections.config_dict import RequiredValueError
except ModuleNotFoundError:  # config files need it; models by name do not

  class ConfigDict(dict):  # type: ignore[no-redef]
    """Placeholder: without ml_collections there are no config files."""

  RequiredValueError = KeyError


def items(config: Any) -> Iterator[tuple[str, Any]]:
  """Yield (key, value) of a dict; None for a value that users have to set."""
  for key in config:
    try:
      yield key, config[key]
    except RequiredValueError:
      yield key, None


def walk(value: Any, path: str = '') -> Iterator[tuple[str, Any]]:
  """Yield (dotted path, leaf) of nested dicts, and of lists that have dicts.

  Empty dicts and lists of plain values are leaves.
  """
  if isinstance(value, list | tuple) and _has_dict(value):
    value = {str(i): inner for i, inner in enumerate(value)}
  if _is_dict(value) and len(value):
    for key, inner in items(value):
      yield from walk(inner, join(path, key))
  else:
    yield path, value


def _has_dict(value):
  if isinstance(value, list | tuple):
    return any(map(_has_dict, value))
  return _is_dict(value)


def _is_dict(value):
  return isinstance(value, Mapping | ConfigDict)


def join(path: str, key: Any) -> str:
  """Return the dotted path of a key in a part of the config."""
  return f'{path}.{key}' if path else str(key)


def override(config: Any, assignments: Iterable[str]) -> dict[str, Any]:
  """Set values in a ConfigDict, in place.

  Args:
    config: ConfigDict.
    assignments: texts 'a.b=VALUE'. A value is a Python literal or, if it is not
      one, text. Keys that the config does not have are added; `a.0.b` reaches
      into a list.

  Returns:
    {key: [value before, value after]} of what has changed, as JSON values.

  Raises:
    ConfigError: an assignment that does not fit the value that it replaces.
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

"""Values in a config: set from the command line, listed, compared."""

import ast
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vit_jax.config.errors import ConfigError, suggest
from vit_jax.config.signatures import join

try:
  from ml_collections import ConfigDict
  from ml_collections.config_dict import RequiredValueError
except ModuleNotFoundError:  # config files need it; models by name do not

  class ConfigDict(dict):  # type: ignore[no-redef]
    """Placeholder: without ml_collections there are no config files."""

  RequiredValueError = KeyError


def override(config: Any, assignments: Iterable[str]) -> None:
  """Set values in a ConfigDict, in place.

  Args:
    config: ConfigDict.
    assignments: texts 'a.b=VALUE'. A value is a Python literal or, if it is not
      one, text. Keys that the config does not have are added; `a.0.b` reaches
      into a list.

  Raises:
    ConfigError: an assignment that does not fit the value that it replaces.
  """
  for assignment in assignments:
    path, equals, text = assignment.partition('=')
    *parents, key = path.split('.')
    if not all((*parents, key)):
      raise ConfigError(
        f'--config.{assignment} lacks a key. Expected --config.KEY=VALUE, as '
        'in --config.seed=1 or --config.data.batch_size=64.'
      )
    if parents == ['shared'] and key not in config.get('shared', ()):
      known = ', '.join(config.get('shared', ())) or 'none'
      raise ConfigError(
        f'--config.{path}: no run refers to {key!r}'
        f'{suggest(key, list(config.get("shared", ())))}. Shared values: '
        f'{known}.'
      )
    node = config
    for parent in parents:
      node = _child(node, parent, f'--config.{path}')
    value = _parse(text) if equals else True
    _set(node, key, value, text, f'--config.{assignment}')


def _child(node, key, what):
  """The dict or list under a key; a new dict where there is none."""
  if isinstance(node, list | tuple):
    if not key.isdecimal() or int(key) >= len(node):
      raise ConfigError(f'{what}: {key!r} is not an index below {len(node)}.')
    return node[int(key)]
  if node.get(key) is None:
    _set(node, key, ConfigDict(), '', what)
  child = node[key]
  if not isinstance(child, Mapping | ConfigDict | list | tuple):
    raise ConfigError(f'{what}: {key} is {child!r}, which has no keys.')
  return child


def _set(node, key, value, text, what):
  if isinstance(node, ConfigDict):
    if key in node and node.get_type(key) is str and value is not None:
      value = text
    try:
      with node.unlocked():
        node[key] = value
    except (TypeError, ValueError) as error:
      raise ConfigError(f'{what}: {_misfit(node, key, value)}') from error
  elif isinstance(node, list):
    node[int(key)] = value
  elif isinstance(node, dict):
    node[key] = value
  else:
    raise ConfigError(f'{what}: cannot set {key!r} of {node!r}.')


def _misfit(node, key, value):
  """Return why a key of a ConfigDict cannot have a value."""
  if isinstance(node[key], ConfigDict):
    return (
      f'{key} is not a value but has keys of its own: {", ".join(node[key])}. '
      f'Set these, as in --config.{key}.KEY=VALUE.'
    )
  kind = node.get_type(key).__name__
  return f'{value!r} is not of type {kind}. {key} is {node[key]!r} here.'


def _parse(text):
  if text in ('true', 'false'):
    text = text.capitalize()
  try:
    return ast.literal_eval(text)
  except (SyntaxError, ValueError):
    return text


def check_filled(config: Any) -> None:
  """Raise ConfigError naming the required placeholders that are not set."""
  if unset := unset_paths(config, ''):
    raise ConfigError(to_set(unset))


def unset_paths(config: Any, prefix: str = '') -> list[str]:
  """Return the paths of required placeholders that are not set."""
  if not isinstance(config, ConfigDict):
    return []
  paths = []
  for key in config:
    try:
      paths += unset_paths(config[key], f'{prefix}{key}.')
    except RequiredValueError:
      paths.append(f'{prefix}{key}')
  return paths


def to_set(paths: Sequence[str]) -> str:
  """Return the error that the user has to set these values."""
  flags = ' '.join(f'--config.{path}=...' for path in paths)
  return f'The config leaves values to be set by you. Add {flags}'


def leaves(config: Any, where: str = '') -> dict[str, Any]:
  """Return {'a.b': value} of a config; a value to be set by users is None."""
  if isinstance(config, list | tuple) and any(
    isinstance(inner, Mapping | ConfigDict) for inner in config
  ):
    config = {str(i): inner for i, inner in enumerate(config)}
  if not isinstance(config, Mapping | ConfigDict):
    return {where: config}
  found: dict[str, Any] = {}
  for key in config:
    try:
      value = config[key]
    except RequiredValueError:
      value = None
    found |= leaves(value, join(where, key))
  return found


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
  """Return {key: [value before, value after]} of two results of `leaves`.

  Values are JSON; None stands for a key that is not there.
  """
  pairs = {k: [before.get(k), after.get(k)] for k in (before | after)}
  found = {k: pair for k, pair in pairs.items() if pair[0] != pair[1]}
  return json.loads(json.dumps(found, default=str))


def as_dict(value: Any) -> dict[str, Any]:
  """Return the first level of a config as a dict."""
  return {key: value[key] for key in value}

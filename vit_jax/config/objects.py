"""From objects to JSON and back: the models in files of weights."""

import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.config.plan import resolve
from vit_jax.config.signatures import full_name, locate

# Classes that a file with weights may name. Nothing else is imported for it,
# because whoever wrote the file must not choose what runs here.
TRUSTED_MODULES = (
  'vit_jax.models.',
  'vit_jax.preprocess.',
  'vit_jax.data.augment.',
  'vit_jax.data.transforms.',
)
TRUSTED = ('vit_jax.data.vtab.Scale',)


def describe(value: Any) -> Any:
  """Return JSON values from which `build` makes an equal object.

  Args:
    value: a dataclass, a Flax module, a partial, or what JSON can hold; lists,
      tuples and dicts of these. Fields with their default value are left out.

  Raises:
    ValueError: something else, such as an array.
  """
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return {'target': full_name(type(value)), **_changed_fields(value)}
  if isinstance(value, functools.partial):
    if value.args:
      raise ValueError(f'{value!r} has positional arguments. Name them.')
    settings = {k: describe(v) for k, v in value.keywords.items()}
    return {'target': full_name(value.func), **settings}
  if isinstance(value, Mapping):
    return {str(k): describe(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return [describe(v) for v in value]
  if value is None or isinstance(value, bool | int | float | str):
    return value
  if callable(getattr(value, 'item', None)) and not getattr(value, 'ndim', 0):
    return value.item()
  if inspect.isclass(value) or inspect.isfunction(value):
    return {'target': full_name(value)}
  raise ValueError(
    f'{value!r} cannot be described in JSON. Make it a dataclass whose fields '
    'are numbers, texts, or dataclasses.'
  )


def _changed_fields(value):
  settings = {}
  for field in dataclasses.fields(value):
    if not field.init or field.name in ('parent', 'name'):
      continue
    here, default = getattr(value, field.name), field.default
    if field.default_factory is not dataclasses.MISSING:
      default = field.default_factory()
    if default is dataclasses.MISSING or here != default:
      settings[field.name] = describe(here)
  return settings


def build(settings: Any, *, trust: Sequence[str] = ()) -> Any:
  """Return the object that settings from a file describe.

  Args:
    settings: as `describe` returns them.
    trust: packages besides this one whose names the file may use.

  Raises:
    ValueError: a target that is not trusted, or settings that do not fit it.
  """
  for target in _targets(settings):
    if not _is_trusted(target, trust):
      package = str(target).split('.')[0]
      raise ValueError(
        f'The file names {target!r}, which is not in the list of what a file '
        f'may name. If you trust that package, pass trust=({package!r},) or '
        f'--trust={package}.'
      )
  return resolve(_with_tuples(settings))


def _is_trusted(target, trust):
  if not isinstance(target, str):
    return False
  # One name in a module: no path through what the module itself imports.
  parent, _, name = target.rpartition('.')
  for module in TRUSTED_MODULES:
    if target.startswith(module) and not name.startswith('_'):
      found = locate(target)
      is_class = inspect.isclass(found) and dataclasses.is_dataclass(found)
      return is_class and found.__module__ == parent
  return target in TRUSTED or any(target.startswith(f'{p}.') for p in trust)


def _targets(value):
  if isinstance(value, Mapping):
    if 'target' in value:
      yield value['target']
    value = value.values()
  elif not isinstance(value, list | tuple):
    return
  for item in value:
    yield from _targets(item)


def _with_tuples(value):
  """JSON has no tuples; fields of modules must be hashable."""
  if isinstance(value, Mapping):
    return {k: _with_tuples(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return tuple(_with_tuples(v) for v in value)
  return value

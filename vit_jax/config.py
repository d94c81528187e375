"""From config to objects: a dotted path names the thing, the rest are keywords.

    config.model = dict(target='vit_jax.models.vit.VisionTransformer', width=64)
    model = instantiate(config.model, num_classes=10)

There is no registry: whatever can be imported can be named, inside this
repository or outside of it. A key that nothing takes is an error, so a typo
never trains silently; `Reader` gives the same promise for keys that are read
one by one.
"""

import difflib
import importlib
import inspect
from collections.abc import Mapping

import ml_collections


class ConfigError(ValueError):
  """Something in a config cannot be honoured."""


def locate(dotted_path):
  """The object that 'package.module.name' (or '...Class.method') names."""
  parts = dotted_path.split('.') if isinstance(dotted_path, str) else []
  for cut in range(len(parts) - 1, 0, -1):
    module_name = '.'.join(parts[:cut])
    try:
      found = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
      # Only a missing piece of the path itself means "look one level up"; a
      # module that exists and fails to import something must say so.
      if e.name and (module_name + '.').startswith(e.name + '.'):
        continue
      raise
    for name in parts[cut:]:
      if not hasattr(found, name):
        have = [n for n in dir(found) if not n.startswith('_')]
        raise ConfigError(
          f'{dotted_path!r}: {module_name} has no {name!r}'
          f'{_suggest(name, have)}.'
        )
      found = getattr(found, name)
    return found
  raise ConfigError(
    f'{dotted_path!r} cannot be imported. A target is a dotted path such as '
    "'vit_jax.models.vit.VisionTransformer'; is its package installed?"
  )


def instantiate(config, *args, **kwargs):
  """Calls config.target(*args, **rest of config, **kwargs).

  Values that have a target of their own are instantiated first, also within
  lists and plain dicts.

  Raises:
    ConfigError: no target; a key that the target does not take, with the
      nearest one that it does; an argument that is missing or given twice.
  """
  values = resolve(config, descend=False)
  if 'target' not in values:
    raise ConfigError(f"A 'target' is missing from {dict(values)}.")
  return call(locate(values.pop('target')), values, *args, **kwargs)


def call(fn, config, *args, **kwargs):
  """fn(*args, **config, **kwargs) with the checks of `instantiate`."""
  given = {k: resolve(v) for k, v in resolve(config, descend=False).items()}
  if twice := sorted(given.keys() & kwargs.keys()):
    raise ConfigError(f'{_name(fn)}: {twice} cannot be set in the config here.')
  check_arguments(fn, given | kwargs, num_args=len(args))
  return fn(*args, **given, **kwargs)


def resolve(value, *, descend=True):
  """Plain Python of a config value, every target within it instantiated."""
  if isinstance(value, Reader):
    value = value.read_all()
  if isinstance(value, ml_collections.ConfigDict):
    check_filled(value)
    value = {key: value[key] for key in value}
  if isinstance(value, Mapping):
    if not descend:
      return dict(value)
    if 'target' in value:
      return instantiate(value)
    return {k: resolve(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return type(value)(resolve(v) for v in value)
  return value


def check_filled(config, prefix=''):
  """Raises ConfigError naming the required placeholders that are not set."""
  if unset := _unset(config, prefix):
    how = ' '.join(f'--config.{path}=...' for path in unset)
    raise ConfigError(
      f'The config leaves {", ".join(unset)} to be set by you: {how}'
    )


def _unset(config, prefix):
  paths = []
  for key in config:
    try:
      value = config[key]
    except ml_collections.config_dict.RequiredValueError:
      paths.append(f'{prefix}{key}')
      continue
    if isinstance(value, ml_collections.ConfigDict):
      paths += _unset(value, f'{prefix}{key}.')
  return paths


def check_arguments(fn, given, *, num_args=0, also=()):
  """Raises ConfigError unless fn can be called with what is given.

  Args:
    fn: function or class.
    given: {keyword: value}; text for a number is an error here too.
    num_args: how many positional arguments come before them.
    also: further keywords that are honoured where this is called from.
  """
  if not callable(fn):
    raise ConfigError(f'{fn!r} is no target: name a class or a function.')
  try:
    takes = list(inspect.signature(fn).parameters.values())
  except ValueError:  # some built-ins have no signature
    return
  named = [
    p.name for p in takes if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
  ]
  problems = []
  if not any(p.kind == p.VAR_KEYWORD for p in takes):
    known = [*named, *also]
    for key in sorted(given.keys() - set(known)):
      problems.append(f'no argument {key!r}{_suggest(key, known)}')
  for p in takes[num_args:]:
    required = p.default is p.empty and p.name in named
    if required and p.name not in given:
      problems.append(f'argument {p.name!r} is missing')
  for p in takes:
    value = given.get(p.name)
    if isinstance(value, str) and _is_number(p):
      problems.append(f'{p.name}={value!r} is text, not a number or bool')
  if problems:
    beside = f' Beside that: {", ".join(also)}.' if also else ''
    raise ConfigError(
      f'{_name(fn)}: {"; ".join(problems)}. '
      f'It takes: {", ".join(named)}.{beside}'
    )


def _is_number(parameter):
  return parameter.annotation in (bool, int, float) or isinstance(
    parameter.default, int | float
  )


def _name(fn):
  return getattr(fn, '__module__', '') + '.' + getattr(fn, '__qualname__', '?')


def _suggest(word, words):
  near = difflib.get_close_matches(word, words, n=1)
  return f' (did you mean {near[0]!r}?)' if near else ''


class Reader:
  """Read-only view of a config that remembers which keys were read.

  `train()` and its like read their config through it and call
  `check_all_read` before any long work starts. Required placeholders that are
  not set are a ConfigError at once.
  """

  def __init__(self, config, prefix=''):
    check_filled(config, prefix)
    self._config, self._prefix = config, prefix
    self._read = {'run'}  # main has read it
    self._children = {}

  def __getattr__(self, key):
    if key.startswith('_'):
      raise AttributeError(key)
    if key not in self:
      raise ConfigError(
        f"The config lacks '{self._prefix}{key}'"
        f'{_suggest(key, list(self._config))}. '
        f'It has: {", ".join(self._config)}.'
      )
    return self.get(key)

  def get(self, key, default=None):
    """The value of key (nested configs as Readers); default if absent."""
    self._read.add(key)
    value = self._config.get(key)
    if value is None:
      return default
    if isinstance(value, ml_collections.ConfigDict):
      prefix = f'{self._prefix}{key}.'
      return self._children.setdefault(key, Reader(value, prefix))
    return value

  def __contains__(self, key):
    return self._config.get(key) is not None

  def __iter__(self):
    return iter(self._config)

  def items(self):
    """(key, value) pairs, all of them read by this."""
    return [(key, self.get(key)) for key in self._config]

  def read_all(self):
    """The whole config beneath, every key counted as read."""
    self._read.update(self._config)
    for child in self._children.values():
      child.read_all()
    return self._config

  def unread(self, prefix=''):
    """Paths 'a.b' of the keys that nothing has read."""
    paths = []
    for key in self._config:
      child = self._children.get(key)
      if key not in self._read:
        paths.append(f'{prefix}{key}')
      elif child is not None and not child.is_all_read():
        paths.extend(child.unread(f'{prefix}{key}.'))
    return paths

  def is_all_read(self):
    return not self.unread()

  def check_all_read(self, where):
    """Raises ConfigError naming every key that nothing has read."""
    if unread := self.unread():
      known = sorted(self._read)
      hints = [f'{k!r}{_suggest(k.split(".")[-1], known)}' for k in unread]
      raise ConfigError(
        f'{where} reads no config key {", ".join(hints)}. Remove or rename '
        f'what is not meant; keys it knows here: {", ".join(known)}.'
      )

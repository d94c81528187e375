"""From a config file to objects, and from objects to JSON.

    config.model = dict(target='vit_jax.models.vit.VisionTransformer', width=64)

A `target` is the dotted path of a class or function; the keys next to it are
its keyword arguments. There is no registry: whatever can be imported can be
named, in this package or in another. Five rules turn a config into objects:

- Nested targets are called first. If required arguments are still missing,
  the result is a partial: the code that receives it supplies the rest, such as
  `objective(model, preprocess=...)`. So an objective can wrap an objective.
- Annotations are the schema. A dict without a target becomes the dataclass
  that is the default of the parameter, or its annotation.
- A dataclass may have one field with metadata {'rest': True}: then its own
  fields and a target with its keywords stand in one flat dict, as in
  `evals.test = dict(target=..., data=..., every_steps=1000)`.
- `Annotated[Callable, ('data', Data)]` is always a partial: the code that gets
  it makes the call. If its argument `data` has no annotation, a dict with a
  `source` becomes a Data.
- `every_steps=1000` sets a parameter `every` to Duration(1000, 'steps'); the
  units are those of durations.py.

All keys are checked before anything is called, so that a typo costs nothing.
"""

import ast
import collections.abc
import copy
import dataclasses
import difflib
import functools
import importlib.util
import inspect
import json
import os
import pathlib
import pkgutil
import sys
import traceback
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from vit_jax.durations import UNITS, Duration
from vit_jax.files import PathLike

try:
  from ml_collections import ConfigDict
  from ml_collections.config_dict import RequiredValueError
except ModuleNotFoundError:  # config files need it; models by name do not

  class ConfigDict(dict):  # type: ignore[no-redef]
    """Placeholder: without ml_collections there are no config files."""

  RequiredValueError = KeyError

# Classes that a file with weights may name. Nothing else is imported for it,
# because whoever wrote the file must not choose what runs here.
TRUSTED_MODULES = (
  'vit_jax.models.',
  'vit_jax.preprocess.',
  'vit_jax.data.transforms.',
)
TRUSTED = ('vit_jax.data.vtab.Scale',)


_DEFAULT = '  # default'


class ConfigError(ValueError):
  """A config that cannot be used as it is."""


def load(spec: Any) -> Any:
  """Return the ConfigDict of a config file.

  Args:
    spec: 'FILE.py', or 'vit_jax:NAME' for a config of this project, which an
      installed package has, too. Text after the next colon is the argument of
      the file's get_config: 'FILE.py:ARGUMENT', 'vit_jax:NAME:ARGUMENT'.

  Raises:
    ConfigError: one line: no such file, no get_config in it, an argument that
      it does not take, or any other exception in the file.
  """
  path, argument = _find(str(spec))
  module_spec: Any = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(module_spec)
  try:
    import_configs(path.parent)
    module_spec.loader.exec_module(module)
    make = getattr(module, 'get_config', None)
    if not callable(make):
      raise ConfigError('it has no function get_config([argument]).')
    arguments = () if argument is None else (argument,)
    try:
      inspect.signature(make).bind(*arguments)
    except TypeError as error:
      raise ConfigError(f'its get_config: {error}.') from None
    return make(*arguments)
  except Exception as error:
    reason = ' '.join(str(error).split())
    if not isinstance(error, ValueError):  # not about the argument: a bug
      reason = f'{_place(error, path)}: {type(error).__name__}: {reason}'
    raise ConfigError(f'--config={spec}: {reason}') from error


def _find(spec):
  """Return (path of the file, argument or None) of a `spec` of `load`."""
  file, colon, argument = spec.partition(':')
  if file == 'vit_jax':
    name, colon, argument = argument.partition(':')
    known = shipped_configs()
    path = known.get(name.removesuffix('.py'))
    if path is None:
      raise ConfigError(
        f'--config={spec}: there is no config {name!r}{suggest(name, known)}. '
        f'This project has {", ".join(known)}.'
      )
  else:
    path = pathlib.Path(os.path.abspath(pathlib.Path(file).expanduser()))
  if not path.is_file():
    here = {str(pathlib.Path(file).with_name(x.name)) for x in _files(path)}
    hint = suggest(file, sorted(here))
    if path.stem in shipped_configs():
      hint = f' (did you mean vit_jax:{path.stem}?)'
    raise ConfigError(f'--config={spec}: {path} is not a file{hint}.')
  return path, argument if colon else None


def _files(path):
  """Return the Python files next to a path."""
  return path.parent.glob('*.py') if path.parent.is_dir() else ()


def _place(error, path):
  """Return the file and line of an exception that a config has raised."""
  if isinstance(error, SyntaxError) and error.filename:
    return f'{error.filename}, line {error.lineno}'
  frames = traceback.extract_tb(error.__traceback__)
  lines = [x.lineno for x in frames if x.filename == str(path)]
  return f'{path}, line {lines[-1]}' if lines else str(path)


def shipped_configs() -> dict[str, Any]:
  """Return {name: path} of the configs of this project, sorted by name."""
  files = sorted(_shipped().glob('*.py'))
  return {x.stem: x for x in files if '\ndef get_config(' in x.read_text()}


def _shipped():
  """Return configs/ of a clone, or the copy that an installed package has."""
  package = pathlib.Path(__file__).absolute().parent
  inside = package / 'configs'
  return inside if inside.is_dir() else package.parent / 'configs'


def import_configs(folder: pathlib.Path | None = None) -> None:
  """Make `from configs import ...` work from any working directory.

  The package `configs` has the files of all folders of that name on sys.path,
  and the files that this project ships. If two files have the same name, the
  file of the user is imported; for a config that this project ships it is the
  other way round.

  Args:
    folder: that of a config. The modules next to it can be imported, and if its
      name is `configs`, it is the first folder of the package.
  """
  shipped, first = str(_shipped()), []
  if folder is not None:
    if folder.name == 'configs' or str(folder) == shipped:
      first = [str(folder)]
    if str(folder) != shipped and str(folder) not in sys.path:
      sys.path.insert(0, str(folder))
    if str(folder) != shipped and str(folder.parent) not in sys.path:
      sys.path.append(str(folder.parent))
  try:
    package = importlib.import_module('configs')
  except ModuleNotFoundError:
    package = sys.modules['configs'] = types.ModuleType('configs')
  found = list(getattr(package, '__path__', ()))
  others = [x for x in found if x != shipped]
  package.__path__ = list(dict.fromkeys([*first, *others, shipped]))
  if package.__path__ != found:  # files of other folders may come first now
    for name in [x for x in sys.modules if x.startswith('configs.')]:
      del sys.modules[name]
      vars(package).pop(name.split('.')[1], None)


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


def suggest(word: str, words: Iterable[str]) -> str:
  """Return ' (did you mean ...?)' for the most similar word, or ''."""
  near = difflib.get_close_matches(str(word), words, n=1)
  return f' (did you mean {near[0]!r}?)' if near else ''


class Partial(functools.partial):
  """A target that still lacks required arguments; called when they are known.

  Two of them are equal if they would call the same function in the same way.

  Raises:
    ConfigError: on a call that leaves some of them out, or sets one twice.
  """

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Partial) and self._key == other._key

  def __hash__(self) -> int:
    return hash((self.func, self.args, tuple(sorted(self.keywords.items()))))

  @property
  def _key(self):
    return self.func, self.args, self.keywords

  def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
    if twice := sorted(self.keywords.keys() & kwargs.keys()):
      raise ConfigError(
        f'{_name(self.func)}: {", ".join(twice)} is set by the code that calls '
        'it. Remove it from the config.'
      )
    if missing := _missing(self.func, self.keywords | kwargs, len(args)):
      raise ConfigError(_lacks(self.func, missing))
    return super().__call__(*args, **kwargs)


@dataclasses.dataclass
class Call:
  """A target with its arguments, checked but not yet called.

  Attributes:
    fn: what the target names.
    kwargs: its arguments; calls within them are not made yet either.
    where: dotted path in the config.
    hidden: arguments that the config cannot set.
    later: whether the code makes the call itself, even if nothing is missing.
  """

  fn: Any
  kwargs: dict[str, Any]
  where: str = ''
  hidden: tuple[str, ...] = ()
  later: bool = False

  def make(self, *args: Any, **supplied: Any) -> Any:
    """Make all calls, innermost first, and return the result of this one."""
    kwargs = {name: make(value) for name, value in self.kwargs.items()}
    if self.later or _missing(self.fn, kwargs | supplied, len(args)):
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


def plan_run(config: Any, **supplied: Any) -> tuple[Call, dict[str, Any]]:
  """Return the Call of the function that config.run names, all keys checked.

  Args:
    config: ConfigDict with `run`.
    **supplied: arguments that the config cannot set; those that the function
      does not take are left out.

  Returns:
    (Call, dict of supplied arguments).

  Raises:
    ConfigError: with all problems at once: values that the user has to set,
      unknown keys (with a suggestion), missing arguments, targets that cannot
      be imported.
  """
  check_filled(config)
  values = _as_dict(config)
  fn = values.pop('run', None)
  if not fn:
    raise ConfigError(
      "The config has no key 'run', the function to call with it, such as "
      "'vit_jax.train.train'."
    )
  fn = locate(fn)
  taken = {k: v for k, v in supplied.items() if k in _parameters(fn)}
  hidden = ('workdir', 'record', 'preset', *taken)
  problems: list[str] = []
  found = _plan_call(fn, values, '', problems, hidden)
  _require_all(found, hidden, problems)
  _raise_all(problems)
  return found, taken


def run(
  config: Any,
  workdir: PathLike,
  *,
  preset: Mapping[str, Any] | None = None,
  **supplied: Any,
) -> Any:
  """Call the function that config.run names with the objects of the config.

  Args:
    config: ConfigDict.
    workdir: the first argument of the function.
    preset: JSON values that say where the config is from: 'config' (the config
      file and its argument) and 'changed' (see `changes`). 'defaults' is added:
      {key: text} of what the config does not set.
    **supplied: more arguments of the function, see `plan_run`.

  Raises:
    ConfigError: as of `plan_run`, or a value is None that must be set.
  """
  check_filled(config)
  record = json.loads(config.to_json_best_effort())
  preset = dict(preset or {})
  found, taken = plan_run(config, record=record, preset=preset, **supplied)
  check_set(found, config)
  lines = [x.removesuffix(_DEFAULT) for x in settings(found) if _DEFAULT in x]
  preset['defaults'] = dict(x.split(' = ', 1) for x in lines)
  return found.make(workdir, **taken)


def check_set(call: Call, config: Any, prefix: str = '') -> None:
  """Raise ConfigError if required arguments are None, and name their flags.

  Args:
    call: the Call of `plan_run`.
    config: its ConfigDict. A value that refers to another one is not named.
    prefix: path of the config in the config of the command line, with a dot.
  """
  filled, unset = copy.deepcopy(config), []
  # A value is named by its shortest path: others refer to it.
  for path in sorted(_none(call), key=lambda path: path.count('.')):
    *parents, key = path.split('.')
    node = filled
    for parent in parents:
      is_list = isinstance(node, list | tuple)
      node = node[int(parent) if is_list else parent]
    if node[key] is None:
      unset.append(f'{prefix}{path}')
      if isinstance(node, ConfigDict):
        node.get_ref(key).set('set', type_safe=False)
  if unset:
    raise ConfigError(_to_set(unset))


def _to_set(paths):
  flags = ' '.join(f'--config.{path}=...' for path in paths)
  return f'The config leaves values to be set by you. Add {flags}'


def _none(value):
  """Yield the paths of required arguments that are None."""
  if isinstance(value, Call):
    parameters = _parameters(value.fn)
    for name, inner in value.kwargs.items():
      parameter = parameters.get(name)
      if inner is None and parameter and _is_required(parameter):
        yield _join(value.where, name)
      yield from _none(inner)
  elif isinstance(value, dict | list | tuple):
    inners = value.values() if isinstance(value, dict) else value
    for inner in inners:
      yield from _none(inner)


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
    found |= leaves(value, _join(where, key))
  return found


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
  """Return {key: [value before, value after]} of two results of `leaves`.

  Values are JSON; None stands for a key that is not there.
  """
  pairs = {k: [before.get(k), after.get(k)] for k in (before | after)}
  found = {k: pair for k, pair in pairs.items() if pair[0] != pair[1]}
  return json.loads(json.dumps(found, default=str))


def resolve(value: Any) -> Any:
  """Return objects for a config value: every target in it is called."""
  problems: list[str] = []
  check_filled(value)
  found = _plan(value, Any, '', problems)
  _raise_all(problems)
  return make(found)


def _raise_all(problems):
  if problems:
    raise ConfigError('\n'.join(dict.fromkeys(problems)))


def check_filled(config: Any) -> None:
  """Raise ConfigError naming the required placeholders that are not set."""
  if unset := _unset(config, ''):
    raise ConfigError(_to_set(unset))


def _unset(config, prefix):
  if not isinstance(config, ConfigDict):
    return []
  paths = []
  for key in config:
    try:
      paths += _unset(config[key], f'{prefix}{key}.')
    except RequiredValueError:
      paths.append(f'{prefix}{key}')
  return paths


def _as_dict(value):
  return {key: value[key] for key in value}


def _has_target(value):
  return isinstance(value, Mapping | ConfigDict) and 'target' in value


def _plan(value, annotation, where, problems, hint=''):
  """A config value with a Call in the place of every target in it.

  `hint` is for the error that a target is missing.
  """
  annotation = _without_none(annotation)
  if annotation is ConfigDict:
    return value  # such as the runs of a study, whose turn comes later
  origin = typing.get_origin(annotation) or annotation
  if isinstance(value, Mapping | ConfigDict):
    values = _as_dict(value)
    wants = dataclasses.is_dataclass(annotation)
    if wants and _rest_field(annotation):
      return _plan_flat(annotation, values, where, problems, hint)
    if 'target' in values:
      return _plan_target(values, annotation, where, problems)
    if wants:
      found = _plan_call(annotation, values, where, problems)
      _require_all(found, (), problems)
      return found
    inner = Any
    if isinstance(origin, type) and issubclass(origin, Mapping):
      inner = (*typing.get_args(annotation), Any, Any)[1]
    complete = [k for k, v in values.items() if _has_target(v)]
    return {
      k: _plan(v, inner, _join(where, k), problems, suggest(k, complete))
      for k, v in values.items()
    }
  if isinstance(value, list | tuple):
    inner = next(iter(typing.get_args(annotation)), Any)
    return type(value)(
      _plan(v, inner, _join(where, i), problems) for i, v in enumerate(value)
    )
  return value


def _plan_target(values, annotation, where, problems, also=()):
  try:
    fn = locate(values.pop('target'))
  except ConfigError as error:
    problems.append(f'{where}.target: {error}' if where else str(error))
    return None
  if not callable(fn):
    problems.append(f'{where}: {fn!r} is not a class or a function.')
    return None
  types = _of_factory(annotation)
  found = _plan_call(fn, values, where, problems, also=also, types=types)
  found.later = types is not None
  if not _takes_partials(annotation):
    _require_all(found, (), problems)
  return found


def _require_all(call, supplied, problems):
  """Add a problem if required arguments of a Call are missing.

  A key that is misspelt is reported as unknown; that is enough.
  """
  if any(p.startswith(f'{call.where}.') for p in problems if call.where):
    return
  if missing := _missing(call.fn, call.kwargs, 0, supplied):
    where = f'{call.where}: ' if call.where else ''
    problems.append(f'{where}{_lacks(call.fn, missing)}')


def _plan_flat(cls, values, where, problems, hint):
  """The Call of a dataclass that has a `rest` field, from one flat dict."""
  field, own = _rest_field(cls), {}
  names = {f.name for f in dataclasses.fields(cls)} - {field.name}
  for key in list(values):
    if key in names or _stem(key) in names:
      own[key] = values.pop(key)
  if 'target' not in values:
    problems.append(
      f"{where} needs a 'target', the dotted path of a class or function"
      f'{hint}{f"; it has {list(values)}" if values else ""}.'
    )
    return None
  found = _plan_call(cls, own, where, problems)
  own_keys = [k for n in names for k in _keys(n, _hints(cls).get(n))]
  found.kwargs[field.name] = _plan_target(
    values, _hints(cls)[field.name], where, problems, own_keys
  )
  return found


def _plan_call(fn, values, where, problems, supplied=(), also=(), types=None):
  parameters, hints = _parameters(fn), _hints(fn)
  for name, annotation in (types or {}).items():
    value = values.get(name)
    if isinstance(value, Mapping | ConfigDict) and 'source' in value:
      hints.setdefault(name, annotation)
  takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
  kwargs, known = {}, [n for n in parameters if n not in supplied]
  for key, value in values.items():
    name, path = key, _join(where, key)
    if key not in known and _stem(key) in known:
      name = _stem(key)
      value = _duration(key, value, path, problems)
    elif key not in known and (key in supplied or not takes_any):
      takes = [k for n in known for k in _keys(n, hints.get(n))] + [*also]
      problems.append(
        f'{path}: {_name(fn)} has no argument {key!r}{suggest(key, takes)}. '
        f'It takes: {", ".join(takes)}.'
      )
      continue
    if name in kwargs:
      problems.append(f'{path}: {name} is set in two units. Keep one.')
      continue
    if key == name and _is_duration(hints.get(name)) and value is not None:
      problems.append(
        f'{path}={value!r} has no unit. Use one of '
        f'{", ".join(_keys(name, Duration))}.'
      )
      continue
    parameter = parameters.get(name)
    if parameter and isinstance(value, str) and _is_number(parameter):
      problems.append(f'{path}={value!r} is text, not a number or bool.')
    if value is None and name != key:  # a unit that is not used
      if any(x.startswith(f'{path}: ') for x in problems):
        kwargs[name] = None
      continue
    annotation = hints.get(name, Any)
    if parameter and dataclasses.is_dataclass(parameter.default):
      annotation = type(parameter.default)  # its fields, without a target
    kwargs[name] = _plan(value, annotation, path, problems)
  return Call(fn, kwargs, where, tuple(supplied))


def _duration(key, value, path, problems):
  if value is None:
    return None
  try:
    return Duration(value, key.rpartition('_')[2])
  except ValueError as error:
    problems.append(f'{path}: {error}')


def _keys(name, annotation):
  """The keys by which a config sets a parameter."""
  if _is_duration(annotation):
    return [f'{name}_{unit}' for unit in UNITS]
  return [name]


def _is_duration(annotation):
  return _without_none(annotation) is Duration


def _stem(key):
  stem, _, unit = key.rpartition('_')
  return stem if unit in UNITS else ''


def _parameters(fn):
  """{name: inspect.Parameter} without those that Flax adds to modules."""
  try:
    found = dict(inspect.signature(fn).parameters)
  except ValueError:  # some built-ins have no signature
    empty = inspect.Parameter('kwargs', inspect.Parameter.VAR_KEYWORD)
    return {'kwargs': empty}
  if hasattr(fn, 'clone') and 'parent' in found:
    found = {k: v for k, v in found.items() if k not in ('parent', 'name')}
  positional = inspect.Parameter.VAR_POSITIONAL
  return {k: v for k, v in found.items() if v.kind != positional}


def _hints(fn):
  try:
    fn = fn.__init__ if inspect.isclass(fn) else fn
    return typing.get_type_hints(fn, include_extras=True)
  except (NameError, TypeError, AttributeError):
    return {}


def _missing(fn, given, num_args, supplied=()):
  """Names of required parameters of fn that are not given."""
  parameters = list(_parameters(fn).values())[num_args:]
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


def _is_required(parameter):
  return parameter.default is parameter.empty


def _lacks(fn, missing):
  return (
    f'{_name(fn)}: {", ".join(map(repr, missing))} '
    f'{"is" if len(missing) == 1 else "are"} missing. '
    f'It takes: {", ".join(_parameters(fn))}.'
  )


def _of_factory(annotation):
  """Return {argument: type} of Annotated[Callable, ...], else None."""
  found = getattr(annotation, '__metadata__', None)
  return None if found is None else dict(found)


def _takes_partials(annotation):
  annotation = getattr(annotation, '__origin__', annotation)
  origin = typing.get_origin(annotation) or annotation
  return annotation is Any or origin is collections.abc.Callable


def _without_none(annotation):
  if typing.get_origin(annotation) in (typing.Union, types.UnionType):
    inner = [a for a in typing.get_args(annotation) if a is not type(None)]
    return inner[0] if len(inner) == 1 else Any
  return annotation


def _rest_field(cls):
  fields = (f for f in dataclasses.fields(cls) if f.metadata.get('rest'))
  return next(fields, None)


def _is_number(parameter):
  return parameter.annotation in (bool, int, float) or isinstance(
    parameter.default, int | float
  )


def _join(where, key):
  return f'{where}.{key}' if where else str(key)


def _name(fn):
  return getattr(fn, '__module__', '') + '.' + getattr(fn, '__qualname__', '?')


def describe(value: Any) -> Any:
  """Return JSON values from which `build` makes an equal object.

  Args:
    value: a dataclass, a Flax module, a partial, or what JSON can hold; lists,
      tuples and dicts of these. Fields with their default value are left out.

  Raises:
    ValueError: something else, such as an array.
  """
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return {'target': _name(type(value)), **_changed_fields(value)}
  if isinstance(value, functools.partial):
    if value.args:
      raise ValueError(f'{value!r} has positional arguments. Name them.')
    settings = {k: describe(v) for k, v in value.keywords.items()}
    return {'target': _name(value.func), **settings}
  if isinstance(value, Mapping):
    return {str(k): describe(v) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return [describe(v) for v in value]
  if value is None or isinstance(value, bool | int | float | str):
    return value
  if callable(getattr(value, 'item', None)) and not getattr(value, 'ndim', 0):
    return value.item()
  if inspect.isclass(value) or inspect.isfunction(value):
    return {'target': _name(value)}
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


def settings(
  value: Any, where: str = 'config', note: str = ''
) -> Iterator[str]:
  """Yield a line 'KEY = VALUE' for everything that can be set in a Call.

  Values that the config does not set are their defaults, and marked so.

  Args:
    value: a Call, as `plan_run` returns it, or a value in one.
    where: dotted path of the value.
    note: appended to each line.
  """
  if isinstance(value, Call):
    flat = dataclasses.is_dataclass(value.fn) and _rest_field(value.fn)
    if flat:  # the target and its keywords stand next to the own fields
      yield from settings(value.kwargs[flat.name], where, note)
    else:
      key = 'target' if value.where else 'run'
      yield f'{where}.{key} = {_name(value.fn)}{note}'
    for name, parameter in _parameters(value.fn).items():
      path = f'{where}.{name}'
      if name in value.kwargs and not (flat and name == flat.name):
        unset = value.kwargs[name] is None and _is_required(parameter)
        more = '  # to be set by you' if unset else ''
        yield from settings(value.kwargs[name], path, note + more)
      elif parameter.default is not parameter.empty and (
        name not in value.hidden
      ):
        yield from settings(parameter.default, path, _DEFAULT)
  elif isinstance(value, Duration):
    yield f'{where}_{value.unit} = {value.value!r}{note}'
  elif isinstance(value, Mapping | ConfigDict) and len(value):
    for key in value:
      yield from settings(value[key], f'{where}.{key}', note)
  elif isinstance(value, list | tuple) and any(
    isinstance(inner, Call | dict) for inner in value
  ):
    for index, inner in enumerate(value):
      yield from settings(inner, f'{where}.{index}', note)
  elif inspect.isclass(value) or inspect.isfunction(value):
    yield f'{where}.target = {_name(value)}{note}'
  elif dataclasses.is_dataclass(value):
    for field in dataclasses.fields(value):
      if field.init and field.name not in ('parent', 'name'):
        inner = getattr(value, field.name)
        yield from settings(inner, f'{where}.{field.name}', note)
  else:
    yield f'{where} = {value!r}{note}'

"""Config files: those that this project ships, and files of users."""

import importlib.util
import inspect
import os
import pathlib
import sys
import traceback
import types
from typing import Any

from vit_jax.config.schema import ConfigError, suggest


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
  package = pathlib.Path(__file__).absolute().parents[1]
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

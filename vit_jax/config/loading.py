"""Config files: those that this project ships, and files of users."""

import ast
import importlib.util
import inspect
import pathlib
import sys
import types
from typing import Any

from vit_jax.config.values import ConfigError, suggest


def load(spec: Any) -> Any:
  """Return the ConfigDict of a config file.

  `spec` is 'FILE.py', or 'vit_jax:NAME' for a config of this project, which an
  installed package has, too. Text after the next colon is the argument of the
  file's get_config: 'FILE.py:ARGUMENT', 'vit_jax:NAME:ARGUMENT'. What cannot be
  found or taken is a ConfigError; other exceptions keep their traceback.
  """
  path, arguments = _find(str(spec))
  import_configs(path.parent)
  module_spec: Any = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(module_spec)
  module_spec.loader.exec_module(module)
  if not (make := getattr(module, 'get_config', None)):
    raise ConfigError(
      f'--config={spec}: it has no function get_config([argument]).'
    )
  try:
    inspect.signature(make).bind(*arguments)
  except TypeError as error:
    raise ConfigError(f'--config={spec}: its get_config: {error}.') from None
  try:
    return make(*arguments)
  except ValueError as error:
    raise ConfigError(f'--config={spec}: {error}') from error


def about(spec: Any) -> str:
  """Return the first sentence of the docstring of a config file."""
  doc = ast.get_docstring(ast.parse(_find(str(spec))[0].read_text())) or ''
  return ' '.join(doc.partition('\n\n')[0].split())


def _find(spec):
  """Return (path of the file, arguments of get_config) of a `spec`."""
  file, colon, argument = spec.partition(':')
  known = shipped_configs()
  if file == 'vit_jax':
    name, colon, argument = argument.partition(':')
    path = known.get(name.removesuffix('.py'))
    if path is None:
      raise ConfigError(
        f'--config={spec}: there is no config {name!r}{suggest(name, known)}. '
        f'This project has {", ".join(known)}.'
      )
  else:
    path = pathlib.Path(file).expanduser().absolute()
  if not path.is_file():
    hint = suggest(path.stem, known)
    raise ConfigError(
      f'--config={spec}: {path} is not a file{hint}. Configs of this project '
      'are found from any folder as vit_jax:NAME.'
    )
  return path, (argument,) if colon else ()


def shipped_configs() -> dict[str, pathlib.Path]:
  """Return {name: path} of the configs of this project, sorted by name."""
  files = sorted(_shipped().rglob('*.py'), key=lambda x: x.stem)
  return {x.stem: x for x in files if '\ndef get_config(' in x.read_text()}


def _shipped():
  """Return configs/ of a clone, or the copy that an installed package has."""
  package = pathlib.Path(__file__).absolute().parents[1]
  inside = package / 'configs'
  return inside if inside.is_dir() else package.parent / 'configs'


def import_configs(folder: pathlib.Path | None = None) -> None:
  """Make `from configs import ...` work from any working directory.

  Modules in the folder of a config can be imported. If it is called `configs`,
  its files take precedence over the files of this project.
  """
  paths = [str(_shipped())]
  if folder is not None and str(folder) not in paths:
    sys.path.insert(0, str(folder))
    own = folder.parent if folder.name == 'studies' else folder
    if own.name == 'configs':
      paths.insert(0, str(own))
  if getattr(sys.modules.get('configs'), '__path__', None) == paths:
    return
  for name in [x for x in sys.modules if x.startswith('configs.')]:
    del sys.modules[name]
  package: Any = types.ModuleType('configs')
  package.__path__ = paths
  sys.modules['configs'] = package

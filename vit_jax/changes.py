"""Which changes between hosts, or between two starts of a run, are allowed.

An argument that is not listed here changes results. Arguments are named where
they are defined, as in Entry.arguments.
"""

import hashlib
import json
import pathlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from vit_jax import config as configs
from vit_jax import workdirs

# These may even differ between the hosts of one run. Files of data may lie
# elsewhere if the data is the same, which its fingerprint shows.
OF_THE_MACHINE = (
  'vit_jax.data.pipeline.Data.num_workers',
  'vit_jax.data.folder.Folder.path',
  'vit_jax.data.tfds.Tfds.data_dir',
  'vit_jax.data.imagenet.Real.json',
  'vit_jax.data.embedded.fractals.Fractals.cache_dir',
  'vit_jax.data.embedded.fractals.Fractals.show_progress',
)


def facts(call: configs.Call, supplied: Mapping[str, Any]) -> dict[str, str]:
  """Return what must be equal on all hosts, as {name: text}.

  Args:
    call: of the function that the config names.
    supplied: its arguments that the config cannot set.
  """
  entries = [
    each
    for each in configs.entries(call)
    if not set(each.arguments) & set(OF_THE_MACHINE)
  ]
  found = {f'config.{each.key}': _text(each.value) for each in entries}
  found |= {f'--{name}': _text(value) for name, value in supplied.items()}
  versions = workdirs.versions()
  found |= {f'version of {name}': str(x) for name, x in versions.items()}
  package = pathlib.Path(__file__).parent
  files = {f'vit_jax/{x.relative_to(package)}': x for x in _sources(package)}
  files |= _modules(each.value for each in entries if _is_name(each))
  found |= {
    f'code of {name}': hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    for name, file in files.items()
  }
  return found


def _text(value):
  return json.dumps(configs.plain(value), sort_keys=True)


def _sources(folder):
  return sorted(folder.rglob('*.py'))


def _is_name(entry):
  return entry.key.rpartition('.')[2] == 'target'


def _modules(names: Iterable[str]) -> dict[str, pathlib.Path]:
  """Return {module: file} of the modules in which targets are defined."""
  found = {}
  for name in names:
    module = name.rpartition('.')[0]
    while module and module not in sys.modules:  # of a method or inner class
      module = module.rpartition('.')[0]
    file = getattr(sys.modules.get(module), '__file__', None) or ''
    if file.endswith('.py') and not module.startswith('vit_jax.'):
      found[module] = pathlib.Path(file)
  return found

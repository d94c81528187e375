"""A run's directory: made, checked, and told what is run in it."""

import importlib.metadata
import json
import platform
import sys

import jax
from etils import epath

from vit_jax.build import ConfigError

_PACKAGES = (
  'jax',
  'jaxlib',
  'flax',
  'optax',
  'orbax-checkpoint',
  'grain',
  'tensorflow-datasets',
  'numpy',
  'opencv-python-headless',
)


def prepare(workdir):
  """Creates workdir; ConfigError unless it can be written to."""
  path = epath.Path(workdir)
  probe = path / f'.write_test_{jax.process_index()}'
  try:
    path.mkdir(parents=True, exist_ok=True)
    probe.write_text('')
    probe.unlink()
  except Exception as e:  # each file system has errors of its own
    raise ConfigError(
      f'--workdir={workdir} cannot be written to: {e}. Choose another, or '
      'get the permission.'
    ) from e


def record(workdir, config):
  """Saves the resolved config, package versions and devices (first host)."""
  if jax.process_index():
    return
  path = epath.Path(workdir)
  text = config.to_json_best_effort(indent=2)
  (path / 'config.json').write_text(text + '\n')
  environment = {
    'argv': sys.argv,
    'python': platform.python_version(),
    'packages': {name: _version(name) for name in _PACKAGES},
    'process_count': jax.process_count(),
    'devices': [str(d) for d in jax.devices()],
    'device_kind': jax.devices()[0].device_kind,
  }
  text = json.dumps(environment, indent=2)
  (path / 'environment.json').write_text(text + '\n')


def _version(package):
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None

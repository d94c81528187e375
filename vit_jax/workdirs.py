"""A run's directory: made, checked, and told what is run in it."""

import importlib.metadata
import json
import platform
import sys

import jax
from etils import epath

from vit_jax import distributed

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
  """Creates workdir; ValueError unless all hosts can write to it."""
  path = epath.Path(workdir)
  probe = path / f'.write_test_{jax.process_index()}'
  try:
    path.mkdir(parents=True, exist_ok=True)
    probe.write_text('')
    probe.unlink()
  except Exception as e:  # each file system has errors of its own
    raise ValueError(
      f'--workdir={workdir} cannot be written to: {e}. Choose another, or '
      'get the permission.'
    ) from e
  distributed.check_shared(path)


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


def describe(workdir, config, model, image_shape, class_names):
  """Saves what a checkpoint needs in order to be used by itself.

  model.json: the model's settings with the number of classes filled in, what
  makes an image of a picture (the transforms of the first evaluator that has
  any) and a float image of that, the shape [H, W, C] of the images, the
  classes' names, and what makes probabilities of logits.
  """
  if jax.process_index():
    return
  settings = json.loads(config.to_json_best_effort())
  content = {
    'model': settings['model'] | {'num_classes': model.num_classes},
    'preprocess': settings.get('preprocess') or _PREPROCESS,
    'transforms': _test_transforms(settings),
    'image_shape': list(image_shape),
    'class_names': None if class_names is None else list(class_names),
    'activation': _activation(settings),
  }
  text = json.dumps(content, indent=2)
  (epath.Path(workdir) / 'model.json').write_text(text + '\n')


def description(path, *, missing_ok=False):
  """What `describe` saved, of a workdir or of a checkpoint in one.

  Raises ValueError if there is none, or returns None if that is missing_ok.
  """
  path = epath.Path(path)
  for folder in (path, path.parent, path.parent.parent):
    if (file := folder / 'model.json').exists():
      return json.loads(file.read_text())
  if missing_ok:
    return None
  raise ValueError(
    f'{path} is not the workdir of a training run, nor a checkpoint in one: '
    'no model.json there.'
  )


def _test_transforms(settings):
  """Those that the run is evaluated with; None if it is not."""
  for evaluator in settings.get('evals', {}).values():
    if found := evaluator.get('data', {}).get('transforms'):
      return found
  return None


def _activation(settings):
  sigmoid = settings['objective']['target'].endswith('sigmoid_xent')
  return 'sigmoid' if sigmoid else 'softmax'


_PREPROCESS = {'target': 'vit_jax.preprocess.Normalize'}


def _version(package):
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None

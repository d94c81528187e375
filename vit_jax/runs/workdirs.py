"""The directory of a run: created, claimed, and described by files.

config.json       the config that the run was started with
preset.json       the config file, what the command line changed, the defaults
environment.json  command line, git commit, package versions, devices
model.json        what a checkpoint needs in order to be used by itself
"""

import datetime
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
from etils import epath

from vit_jax import config
from vit_jax.parallel import hosts
from vit_jax.runs.files import PathLike, read_json, write_atomically
from vit_jax.types import Preprocess, Shape, UserError

# Packages that compute, read or write something of a run.
_PACKAGES = (
  *('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'tensorstore'),
  *('grain', 'array-record', 'tensorflow-datasets', 'ml-collections', 'etils'),
  *('numpy', 'scipy', 'scikit-learn', 'pillow', 'opencv-python-headless'),
  *('datasets', 'libtpu', 'jax-cuda12-plugin', 'jax-cuda13-plugin'),
)


def prepare(workdir: PathLike) -> None:
  """Create the directory. Raise ValueError unless all hosts share it."""
  path = epath.Path(workdir)
  try:
    path.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise UserError(
      f'--workdir={workdir} cannot be created: {error}. Choose another '
      'directory, or get permission to write to it.'
    ) from error
  hosts.check_shared(path)


class Claim:
  """Claim of a process to write into a workdir, until another start claims it.

  Two starts of a run can overlap: a process that was stopped continues, or a
  user runs the same command twice. The last start wins. The other one ends
  before its next write.
  """

  def __init__(self, workdir: PathLike) -> None:
    self._path = epath.Path(workdir) / '.claim'
    now = datetime.datetime.now(datetime.UTC).isoformat()
    self._own = f'process {os.getpid()} of {platform.node()}, {now}'
    if jax.process_index() == 0:
      write_atomically(self._path, self._own)

  def check(self) -> None:
    """Raise ValueError if the run was started again; call before a write."""
    if jax.process_index() == 0 and self._path.read_text() != self._own:
      raise UserError(
        f'The run in {self._path.parent} was started again by '
        f'{self._path.read_text()}. This process ends and writes nothing more. '
        'Start a run once, or use another workdir.'
      )


def record_config(workdir: PathLike, provenance: config.Provenance) -> None:
  """Save config.json, preset.json and environment.json, on the first host."""
  _write(workdir, 'config.json', provenance.config)
  _write(workdir, 'preset.json', provenance.preset)
  python, *packages = versions().items()
  environment = {
    'argv': sys.argv,
    'git_commit': git_commit(),
    'python': python[1],
    'packages': dict(packages),
    'process_count': jax.process_count(),
    'devices': [str(d) for d in jax.devices()],
    'device_kind': jax.devices()[0].device_kind,
  }
  _write(workdir, 'environment.json', environment)


def record_model(
  workdir: PathLike,
  *,
  model: Any,
  preprocess: Preprocess,
  transforms: Sequence[Any] | None,
  image_shape: Shape,
  class_names: Sequence[str] | None,
  activation: str,
) -> None:
  """Save model.json, on the first host.

  Args:
    workdir: of the run.
    model: Flax module, with its number of classes.
    preprocess: uint8 -> float images.
    transforms: sequence that makes an image for the model from a decoded one,
      or None if it is not known.
    image_shape: (H, W, C) of the training images.
    class_names: of the outputs, or None.
    activation: converts logits to probabilities, 'softmax' or 'sigmoid'.
  """
  content = {
    'model': config.describe(model),
    'preprocess': config.describe(preprocess),
    'transforms': None if not transforms else config.describe(transforms),
    'image_shape': list(image_shape),
    'class_names': None if class_names is None else list(class_names),
    'activation': activation,
  }
  _write(workdir, 'model.json', content)


def read_choices(workdir: PathLike) -> dict[str, str]:
  """Return the implementations of attention that a run has chosen, by case."""
  file = epath.Path(workdir) / 'attention.json'
  return json.loads(file.read_text()) if file.exists() else {}


def record_choices(workdir: PathLike, choices: dict[str, str]) -> None:
  """Save attention.json, on the first host, if a choice was made."""
  if choices:
    _write(workdir, 'attention.json', choices)


def description(path: PathLike) -> dict[str, Any]:
  """Return the content of model.json of a workdir, or of a checkpoint in it."""
  path = epath.Path(path)
  for folder in (path, path.parent, path.parent.parent):
    if (file := folder / 'model.json').exists():
      return read_json(file)
  raise UserError(
    f'{path} is not the workdir of a training run, nor a checkpoint in one: '
    'there is no model.json. Give a workdir or a weights file.'
  )


def is_step(name: str) -> bool:
  """Return whether the name of a folder is that of a complete checkpoint."""
  return re.fullmatch('0|[1-9][0-9]*', name) is not None


def steps(folder: PathLike) -> list[int]:
  """Return the steps of the checkpoints in a folder, sorted."""
  folder = epath.Path(folder)
  if not folder.exists():
    return []
  return sorted(int(x.name) for x in folder.iterdir() if is_step(x.name))


def newest_step(workdir: PathLike) -> int | None:
  """Return the step of the newest checkpoint in a workdir, or None."""
  return max(steps(epath.Path(workdir) / 'checkpoints'), default=None)


def written(workdir: PathLike) -> str:
  """Return a line that names the files and folders in workdir."""
  names = sorted(path.name for path in epath.Path(workdir).iterdir())
  shown = [name for name in names if not name.startswith('.')]
  more = f' and {len(shown) - 12} more' * (len(shown) > 12)
  return f'Written to {workdir}: {", ".join(shown[:12])}{more}'


def _write(workdir, name, content):
  if jax.process_index() == 0:
    text = json.dumps(content, indent=2) + '\n'
    write_atomically(epath.Path(workdir) / name, text)


@functools.cache
def git_commit() -> str | None:
  """Return the git commit of the code, with '+dirty' if files are modified.

  It is the commit of the checkout with this file, or the one from which pip
  installed the package (`pip install git+...`); None if neither is known.
  """
  file = pathlib.Path(__file__).resolve()

  def git(*words):
    command = ['git', '-C', str(file.parent), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None

  try:
    # A virtual environment can lie in a repository that does not track it.
    if git('ls-files', '--error-unmatch', file.name):
      words = ('--always', '--abbrev=40', '--exclude=*', '--dirty=+dirty')
      return git('describe', *words)
    found = importlib.metadata.distribution('vit_jax')
  except (OSError, importlib.metadata.PackageNotFoundError):
    return None  # there is no git, or the package is not installed
  url = json.loads(found.read_text('direct_url.json') or '{}')
  return url.get('vcs_info', {}).get('commit_id')


def versions() -> dict[str, str | None]:
  """Return the versions of Python and of packages; None: not installed."""
  found: dict[str, str | None] = {'Python': platform.python_version()}
  for name in _PACKAGES:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      found[name] = None
  return found

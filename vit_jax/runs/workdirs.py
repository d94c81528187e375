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
  *('datasets', 'libtpu', 'jax-cuda12-plugin', 'jax-cuda13-plugin', 'vit_jax'),
)


def prepare(workdir: PathLike) -> None:
  """Create the directory. Raise UserError unless all hosts share it."""
  epath.Path(workdir).mkdir(parents=True, exist_ok=True)
  hosts.check_shared(workdir)


class Claim:
  """Claim of a process to write into a workdir, until another start claims it.

  Of two processes that run at the same time, the one that started first ends
  before its next write.
  """

  def __init__(self, workdir: PathLike) -> None:
    self._path = epath.Path(workdir) / '.claim'
    now = datetime.datetime.now(datetime.UTC).isoformat()
    self._own = f'process {os.getpid()} of {platform.node()}, {now}'
    if jax.process_index() == 0:
      write_atomically(self._path, self._own)

  def check(self) -> None:
    """Raise UserError if the run was started again; call before a write."""
    if jax.process_index() == 0 and self._path.read_text() != self._own:
      raise UserError(
        f'The run in {self._path.parent} was started again by '
        f'{self._path.read_text()}. This process ends and writes nothing more. '
        'Start a run once, or use another workdir.'
      )


def write(workdir: PathLike, name: str, content: Any) -> None:
  """Write a JSON file into the directory, on the first host."""
  if jax.process_index() == 0:
    text = json.dumps(content, indent=2) + '\n'
    write_atomically(epath.Path(workdir) / name, text)


def record_config(workdir: PathLike, provenance: config.Provenance) -> None:
  """Write config.json, preset.json and environment.json."""
  write(workdir, 'config.json', provenance.config)
  write(workdir, 'preset.json', provenance.preset)
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
  write(workdir, 'environment.json', environment)


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
  """Write model.json.

  Args:
    workdir: of the run.
    model: Flax module, with its number of classes.
    preprocess: uint8 -> float images.
    transforms: from a decoded image to the model's, or None: not known.
    image_shape: (H, W, C) of the training images.
    class_names: of the outputs, or None.
    activation: converts logits to probabilities, 'softmax' or 'sigmoid'.
  """
  content = {
    'model': config.describe(model),
    'preprocess': config.describe(preprocess),
    'transforms': config.describe(transforms) if transforms else None,
    'image_shape': image_shape,
    'class_names': None if class_names is None else list(class_names),
    'activation': activation,
  }
  write(workdir, 'model.json', content)


def read_choices(workdir: PathLike) -> dict[str, str]:
  """Return the implementations of attention that a run has chosen, by case."""
  file = epath.Path(workdir) / 'attention.json'
  return read_json(file) if file.exists() else {}


def record_choices(workdir: PathLike, choices: dict[str, str]) -> None:
  """Write attention.json, if a choice was made."""
  if choices:
    write(workdir, 'attention.json', choices)


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


def steps(folder: PathLike) -> list[int]:
  """Return the steps of the complete checkpoints in a folder, sorted."""
  folder = epath.Path(folder)
  names = [x.name for x in folder.iterdir()] if folder.exists() else []
  return sorted(int(name) for name in names if name.isdecimal())


def newest_step(workdir: PathLike) -> int | None:
  """Return the step of the newest checkpoint in a workdir, or None."""
  return max(steps(epath.Path(workdir) / 'checkpoints'), default=None)


@functools.cache
def git_commit() -> str | None:
  """Return the git commit of the code, with '+dirty' if files are modified.

  None if the code is not in a checkout, or there is no git.
  """
  file = pathlib.Path(__file__)

  def git(*words):
    command = ['git', '-C', str(file.parent), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True)

  try:
    # A virtual environment can lie in a repository that does not track it.
    git('ls-files', '--error-unmatch', file.name)
    words = ('--always', '--abbrev=40', '--exclude=*', '--dirty=+dirty')
    return git('describe', *words).stdout.strip()
  except (OSError, subprocess.CalledProcessError):
    return None


def versions() -> dict[str, str | None]:
  """Return the versions of Python and of packages; None: not installed."""
  found: dict[str, str | None] = {'Python': platform.python_version()}
  for name in _PACKAGES:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      found[name] = None
  return found

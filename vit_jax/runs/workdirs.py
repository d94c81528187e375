"""The directory of a run: checked, created, and described by files.

config.json       the config that the run was started with
preset.json       the config file, what the command line changed, the defaults
environment.json  command line, git commit, package versions, devices
model.json        what a checkpoint needs in order to be used by itself
attention.json    on accelerators, the measured choice of attention
"""

import contextlib
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
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from etils import epath

from vit_jax import config
from vit_jax.parallel import hosts as distributed
from vit_jax.runs import storage
from vit_jax.runs.files import (
  PathLike,
  check_remote,
  read_json,
  write_atomically,
)
from vit_jax.types import Preprocess, Shape

# Packages that compute, read or write something of a run.
_PACKAGES = (
  *('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'tensorstore'),
  *('grain', 'array-record', 'tensorflow-datasets', 'ml-collections', 'etils'),
  *('numpy', 'scipy', 'scikit-learn', 'pillow', 'opencv-python-headless'),
  *('matplotlib', 'libtpu', 'jax-cuda12-plugin', 'jax-cuda13-plugin'),
)


def prepare(workdir: PathLike) -> None:
  """Create the directory; ValueError unless all hosts can write to it."""
  check_remote(workdir)
  path = epath.Path(workdir)
  probe = path / f'.write_test_{jax.process_index()}'
  try:
    path.mkdir(parents=True, exist_ok=True)
    probe.write_text(4096 * ' ')  # An empty file fits a full disk.
    probe.unlink()
  except Exception as e:  # each file system has its own errors
    raise ValueError(
      f'--workdir={workdir} cannot be written to: {e}. Choose another '
      'directory, or get permission to write to it.'
    ) from e
  distributed.check_shared(path)


class Claim:
  """Claim of a process to write into a workdir, until the run starts again.

  A process that was stopped can continue after the run was started again. It
  must not write into the files of that run. As a context manager, it turns
  errors that the other process has caused, such as missing files, into one that
  names that process.

  Args:
    workdir: of the run. The first host writes `.claim` there.
  """

  def __init__(self, workdir: PathLike) -> None:
    self._path = epath.Path(workdir) / storage.MARK
    self._own = f'process {os.getpid()} of {platform.node()}, '
    self._own += datetime.datetime.now(datetime.UTC).isoformat()
    self._checked = time.monotonic()
    if jax.process_index() == 0:
      write_atomically(self._path, self._own)

  def __enter__(self) -> 'Claim':
    return self

  def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
    if isinstance(error, Exception):
      self._verify()

  def check(self) -> None:
    """Raise ValueError if the run was started again; before each write.

    The file is read at most every 10 seconds of the clock, which also runs
    while the process is stopped.
    """
    if time.monotonic() - self._checked >= 10:
      self._verify()
      self._checked = time.monotonic()

  def _verify(self):
    found = self._own
    if jax.process_index() == 0:
      with contextlib.suppress(OSError):
        found = self._path.read_text()
    if found != self._own:
      raise ValueError(
        f'The run in {self._path.parent} was started again by {found}, while '
        f'this process was still there. This process (process {os.getpid()} of '
        f'{platform.node()}) ends and writes nothing more. Start a run once, '
        'or use another workdir.'
      )


def record_config(
  workdir: PathLike,
  record: Mapping[str, Any] | None,
  preset: Mapping[str, Any] | None = None,
) -> None:
  """Save config.json, preset.json and environment.json, on the first host."""
  _write(workdir, 'config.json', record or {})
  _write(workdir, 'preset.json', preset or {})
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

  Raises:
    ValueError: a model, preprocess or transform that is not a dataclass.
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


def description(
  path: PathLike, *, missing_ok: bool = False
) -> dict[str, Any] | None:
  """Return the content of model.json of a workdir, or of a checkpoint in it.

  Raises:
    ValueError: it is not valid JSON; or there is none (with missing_ok, None is
      returned instead).
  """
  path = epath.Path(path)
  for folder in (path, path.parent, path.parent.parent):
    if (file := folder / 'model.json').exists():
      return read_json(file)
  if missing_ok:
    return None
  raise ValueError(
    f'{path} is not the workdir of a training run, nor a checkpoint in one: '
    'there is no model.json. Give a workdir or a weights file.'
  )


def is_step(name: str) -> bool:
  """Return whether the name of a folder is that of a complete checkpoint."""
  return re.fullmatch('0|[1-9][0-9]*', name) is not None


def steps(folder: PathLike) -> list[int]:
  """Return the steps of the checkpoints in a folder, sorted.

  They are read off the names of its folders, which need not be checkpoints.
  """
  folder = epath.Path(folder)
  if not folder.exists():
    return []
  return sorted(int(x.name) for x in folder.iterdir() if is_step(x.name))


def newest_step(workdir: PathLike) -> int | None:
  """Return the step of the newest checkpoint in a workdir, or None."""
  return max(steps(epath.Path(workdir) / 'checkpoints'), default=None)


def written(workdir: PathLike) -> str:
  """Return a line that names the files and folders in workdir.

  A name without a suffix counts as a folder; asking an object store is slow.
  """
  names = sorted(path.name for path in epath.Path(workdir).iterdir())
  names = [name for name in names if not name.startswith('.')]
  files = [name for name in names if '.' in name]
  folders = [f'{name}/' for name in names if '.' not in name]
  shown = [
    ', '.join(found[:9]) + (f' and {len(found) - 9} more' * (len(found) > 9))
    for found in (folders, files)
    if found
  ]
  return f'Written to {workdir}: {", ".join(shown)}'


def _write(workdir, name, content):
  if jax.process_index() == 0:
    text = json.dumps(content, indent=2) + '\n'
    write_atomically(epath.Path(workdir) / name, text)


@functools.cache
def git_commit(file: PathLike = __file__) -> str | None:
  """Return the git commit of the code, with '+dirty' if files are modified.

  It is that of the checkout with this file, or the one from which pip installed
  the package (`pip install git+...`). None: neither is known.
  """
  folder = pathlib.Path(file).resolve().parent

  def git(*words):
    done = subprocess.run(
      ['git', '-C', str(folder), *words],
      capture_output=True,
      text=True,
      timeout=30,
    )
    return done.stdout.strip() if done.returncode == 0 else None

  try:
    # A virtual environment can lie in a repository that does not track it.
    if git('ls-files', '--error-unmatch', pathlib.Path(file).name):
      words = ('--always', '--abbrev=40', '--exclude=*', '--dirty=+dirty')
      return git('describe', *words)
  except (OSError, subprocess.SubprocessError):
    pass  # there is no git
  return _installed_commit(folder)


def _installed_commit(folder):
  try:
    found = importlib.metadata.distribution('vit_jax')
  except importlib.metadata.PackageNotFoundError:
    return None
  if pathlib.Path(found.locate_file('vit_jax')).resolve() != folder:
    return None  # the code is not the installed one
  text = found.read_text('direct_url.json')
  vcs = json.loads(text).get('vcs_info', {}) if text else {}
  return vcs.get('commit_id')


def versions() -> dict[str, str | None]:
  """Return the versions of Python and of packages; None: not installed."""
  found: dict[str, str | None] = {'Python': platform.python_version()}
  for name in _PACKAGES:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      found[name] = None
  return found

"""The directory of a run: its files, its claim, and changes between two starts.

config.json       the config that the run was started with
preset.json       the config file, what the command line changed, the defaults
environment.json  command line, git commit, versions, hashes of code, devices
model.json        model, transforms and class names, to use a checkpoint
resume.json       every argument, hashes of code and a fingerprint of the data,
                  to compare with the next start
changes.jsonl     differences that --allow_changes has permitted
"""

import contextlib
import dataclasses
import datetime
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from etils import epath

from vit_jax import config
from vit_jax.data.subsets import changed_rows
from vit_jax.io import terminal
from vit_jax.io.files import is_local, read_json, write_atomically, write_json
from vit_jax.parallel import hosts
from vit_jax.types import HARMLESS, MACHINE, PathLike, UserError

# Packages that compute, read or write something of a run.
_PACKAGES = (
  *('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'tensorstore'),
  *('grain', 'array-record', 'tensorflow-datasets', 'ml-collections', 'etils'),
  *('numpy', 'scipy', 'scikit-learn', 'pillow', 'opencv-python-headless'),
  *('datasets', 'libtpu', 'jax-cuda12-plugin', 'jax-cuda13-plugin', 'vit_jax'),
)

# Evaluators, whose batches may become smaller, and probes change no training.
_HARMLESS_KEYS = re.compile(r'evals|evals\..*\bbatch_size|probes\b.*')

# What results depend on: 'config' is {key: JSON value} of the arguments and of
# their code, 'data' {key: value} of the fingerprints of the sources.
Basis = Mapping[str, Mapping[str, Any]]
STATISTICS = 'statistics.json'  # what is computed from the training data


class Claim:
  """Exclusive write lock of a workdir, until it is closed.

  Another process cannot claim it. Where files cannot be locked, as at URLs, it
  can, and the first one ends before its next write. All hosts must see the
  claim of host 0: in separate folders no checkpoint would be complete.
  """

  def __init__(self, workdir: PathLike) -> None:
    self._path = epath.Path(workdir) / '.claim'
    self._lock = _lock(self._path) if jax.process_index() == 0 else None
    now = datetime.datetime.now(datetime.UTC).isoformat()
    own = f'process {os.getpid()} of {platform.node()}, {now}'
    if jax.process_index() == 0:
      write_atomically(self._path, own)
    self._own = hosts.broadcast(own)
    is_there = self._path.exists() and self._path.read_text() == self._own
    if jax.process_count() > 1 and (blind := hosts.on_any(not is_there)):
      raise UserError(
        f'--workdir={workdir} is not the same folder on all hosts: hosts '
        f'{blind} do not see what host 0 writes there.'
      )

  def close(self) -> None:
    """Let other processes claim the workdir."""
    if self._lock:
      self._lock.close()

  def check(self) -> None:
    """Raise UserError if the run was started again; call before a write."""
    if jax.process_index() == 0 and self._path.read_text() != self._own:
      raise UserError(
        f'The run in {self._path.parent} was started again by '
        f'{self._path.read_text()}. This process ends and writes nothing more. '
        'Start a run once, or use another workdir.'
      )


def _lock(path):
  """Return an open file that no other process can lock; None at a URL."""
  if not is_local(path):
    return None
  # Not .claim: to close it after reading would release the lock.
  file = io.FileIO(f'{path}.lock', 'w')
  try:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except (BlockingIOError, PermissionError) as error:
    file.close()
    by = path.read_text() if path.exists() else 'another process'
    raise UserError(
      f'The run in {path.parent} is already running as {by}. Wait for its end, '
      'stop it, or use another workdir.'
    ) from error
  except OSError:  # a file system without locks
    pass
  return file


def make(workdir: PathLike, kind: str, arguments: Mapping[str, Any]) -> None:
  """Make the directory of a 'train', 'evaluate' or 'study'.

  It may have no results of another kind, which would be changed, and no source
  in the arguments may search it for images.
  """
  place, found = epath.Path(workdir), ''
  with contextlib.suppress(UserError):  # damaged: it is written again
    found = str(read(place, 'config.json').get('run')).rpartition('.')[2]
  if (place / 'model.json').exists():
    found = 'train'
  if found in {'train', 'evaluate', 'study'} - {kind}:
    raise UserError(
      f'--workdir={place} has the results of another kind of run, {found}. Use '
      f'another folder, such as --workdir={place / kind}.'
    )
  real = epath.Path(os.path.realpath(workdir))
  for key, data in _sources(arguments):
    root = getattr(getattr(data, 'source', None), 'root', None)
    if root and real.is_relative_to(os.path.realpath(root)):
      raise UserError(
        f'--workdir={place} is inside {root}, where {key} finds images. Use a '
        'directory outside of it, and move an earlier run there.'
      )
  place.mkdir(parents=True, exist_ok=True)


def write(workdir: PathLike, name: str, content: Any) -> None:
  """Write a JSON file into the directory, on the first host."""
  if jax.process_index() == 0:
    write_json(epath.Path(workdir) / name, content)


def read(workdir: PathLike, name: str) -> dict[str, Any]:
  """Return the content of a JSON file in the directory; {} if it is missing."""
  file = epath.Path(workdir) / name
  return read_json(file) if file.exists() else {}


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
    'code': {x.key: x.value for x in _codes(provenance.entries)},
    'process_count': jax.process_count(),
    'devices': [str(d) for d in jax.devices()],
    'device_kind': jax.devices()[0].device_kind,
  }
  write(workdir, 'environment.json', environment)


def record_model(workdir: PathLike, **facts: Any) -> None:
  """Write model.json: facts as in `Weights`; transforms of None are unknown."""
  write(workdir, 'model.json', config.describe(facts))


def statistics(workdir: PathLike) -> dict[str, Any]:
  """Return what a run has computed from its data; {} before a checkpoint.

  Until then its data may change, see `check_changes`.
  """
  has_steps = steps(epath.Path(workdir) / 'checkpoints')
  return read(workdir, STATISTICS) if has_steps else {}


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


def find_checkpoint(path: PathLike, step: int | None = None) -> epath.Path:
  """Return the directory of one checkpoint, by default of the newest.

  `path` is a workdir, its checkpoints folder, or one checkpoint (.../500).
  """
  path = epath.Path(path)
  if path.name.isdecimal() and (path / 'params').exists():
    return path
  folder = path / 'checkpoints' if (path / 'checkpoints').exists() else path
  known = steps(folder)
  if step is None and known:
    step = known[-1]
  if step not in known:
    wanted = 'checkpoint' if step is None else f'step {step}'
    seen = f'has no {wanted}; it has {known}'
    raise UserError(
      f'{path} {seen if path.exists() else "does not exist"}. Use a workdir, '
      'WORKDIR/checkpoints/STEP, or a file (.npz, .safetensors, .onnx).'
    )
  return folder / str(step)


@functools.cache
def git_commit() -> str | None:
  """Return the git commit of the checkout or image; '+dirty' if modified."""
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
    return os.environ.get('VIT_JAX_COMMIT') or None


def versions() -> dict[str, str | None]:
  """Return the versions of Python and of packages; None: not installed."""
  found = {'Python': platform.python_version(), **dict.fromkeys(_PACKAGES)}
  for name in _PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[name] = importlib.metadata.version(name)
  return found


@functools.cache
def code_of(package: str) -> str:
  """Return a hash of the files of a package or module; '' if it has none."""
  try:
    spec = importlib.util.find_spec(package)
  except ValueError:  # a module that is no file
    spec = None
  places = spec and (spec.submodule_search_locations or [str(spec.origin)])
  paths = map(pathlib.Path, places or ())
  files = (y for x in paths for y in (x, *sorted(x.rglob('*.py'))))
  found = [file.read_bytes() for file in files if file.is_file()]
  return hashlib.sha256(b''.join(found)).hexdigest()[:12] if found else ''


def _codes(entries):
  """Yield an entry KEY.code for each KEY.target that is not of this package."""
  for each in entries:
    is_name = each.key.rpartition('.')[2] in ('target', 'run')
    package = str(each.value).partition('.')[0]
    # Versions are recorded; in a script are also the arguments of the run.
    is_own = is_name and package not in (*_PACKAGES, '__main__')
    if is_own and (code := code_of(package)):
      key = re.sub('(target|run)$', 'code', each.key)
      yield dataclasses.replace(each, key=key, value=code)


class ChangedRunError(UserError):
  """A run would resume with changes that its results depend on."""


class Change(NamedTuple):  # between two Basis; JSON values
  key: str
  old: Any
  new: Any


def basis_of(
  entries: Iterable[config.Entry], arguments: Mapping[str, Any] | None = None
) -> Basis:
  """Return the Basis of `config.entries`, and of the data in the arguments."""
  entries = [*entries]
  found = {
    each.key: each.value
    for each in (*entries, *_codes(entries))
    if not each.marks & {HARMLESS, MACHINE}
  }
  data = {
    f'{key}.{name}': value
    for key, source in _sources(arguments or {})
    for name, value in config.plain(source.fingerprint()).items()
  }
  return {'config': found, 'data': data}


def _sources(value: Any, key: str = '') -> Iterator[tuple[str, Any]]:
  """Yield (key, object) of data and of teachers, which have a fingerprint."""
  if callable(getattr(type(value), 'fingerprint', None)):
    yield key, value
  elif isinstance(value, Mapping):
    for name, inner in value.items():
      yield from _sources(inner, f'{key}.{name}' if key else str(name))
  elif hasattr(value, 'keywords'):  # a partial
    yield from _sources(value.keywords, key)
  elif dataclasses.is_dataclass(value) and hasattr(value, 'evaluator'):
    yield from _sources(value.evaluator, key)


def compare(
  before: Basis, now: Basis, without: Sequence[str] = ()
) -> list[Change]:
  """Return the changes that results depend on, except those of some keys."""
  known = {_evaluator(key) for key in before['config']}
  pairs = [
    (key, *(basis['config'].get(key, 'not set') for basis in (before, now)))
    for key in dict.fromkeys([*now['config'], *before['config']])
    if _evaluator(key) in known  # others are new
    and key not in without
    and not _HARMLESS_KEYS.fullmatch(key)
  ]
  for key, new in now['data'].items():
    old = before['data'].get(key, new)
    if key.endswith('.rows') and old != new:
      old, new = 'as before', changed_rows(old, new)
    pairs.append((key, old, new))
  # A version may have other keys, whose None says that there is no such part.
  same = (None, 'not set'), ('not set', None)
  return [Change(*x) for x in pairs if x[1] != x[2] and x[1:] not in same]


def _evaluator(key):
  """Return the name in 'evals.NAME.KEY'; '' for a key of something else."""
  return key.split('.')[1] if key.startswith('evals.') else ''


def check_changes(
  workdir: PathLike,
  now: Basis,
  allow_changes: Sequence[str] = (),
  *,
  without: Sequence[str] = (),
  is_done: bool = False,
) -> list[Change]:
  """Return the changes since the last start; ChangedRunError if not allowed.

  `allow_changes` has keys of the config, or of parts of it; those in `without`
  are not compared. A run without a checkpoint may change, unless it is done.
  """
  file = epath.Path(workdir) / 'resume.json'
  if not is_done and not steps(file.parent / 'checkpoints'):
    return []
  if not file.exists():
    terminal.say(f'{file} is missing: changes of the run cannot be found.')
    return []
  before = read_json(file)
  if any(now[part] and not before.get(part) for part in now):
    raise UserError(
      f'{file} is damaged: it does not say how the run was started. Put a good '
      'copy there, or remove it to resume without a comparison.'
    )
  found = compare(before, now, without)
  if refused := [x for x in found if not _is_in(x.key, allow_changes)]:
    lines = '\n'.join(f'  {k}: {x!r:.200} -> {y!r:.200}' for k, x, y in refused)
    # The target of an object stands for its arguments, too.
    keys = {x.key.removesuffix('.target'): None for x in refused}
    parts = [k for k in keys if not _is_in(k, [x for x in keys if x != k])]
    raise ChangedRunError(
      f'The run in {workdir} was started with another config, data or code:\n'
      f'{lines}\nUse these again, or another --workdir. If the changes are '
      'intended, add\n'
      f'  --allow_changes={",".join([*allow_changes, *parts])}'
    )
  return found


def _is_in(key, parts):
  """Return whether one of the keys is this one, or a part that contains it."""
  return any(part == '' or f'{key}.'.startswith(f'{part}.') for part in parts)


def record_start(
  workdir: PathLike,
  now: Basis,
  found: Sequence[Change] = (),
  step: int | None = None,
) -> None:
  """Save the Basis of a start; add the allowed changes to changes.jsonl."""
  if found and jax.process_index() == 0:
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
    about = {'date': date, 'step': step}
    lines = [json.dumps(about | each._asdict()) for each in found]
    file = epath.Path(workdir) / 'changes.jsonl'
    earlier = file.read_bytes() if file.exists() else b''
    write_atomically(file, earlier + ('\n'.join(lines) + '\n').encode())
  write(workdir, 'resume.json', now)


def of_run(allow_changes: Sequence[str], name: str) -> list[str]:
  """Return the allowed keys of one run, of 'runs.NAME.KEY' or 'KEY' for all."""
  if {'runs', f'runs.{name}'} & {*allow_changes}:
    return ['']  # all of it
  return [key.removeprefix(f'runs.{name}.') for key in allow_changes]


def facts(call: config.Call, supplied: Mapping[str, Any]) -> dict[str, str]:
  """Return what must be equal on all hosts; `supplied` are other arguments."""
  entries = [x for x in config.entries(call) if MACHINE not in x.marks]
  entries += _codes(entries)
  found = {f'config.{x.key}': json.dumps(x.value) for x in entries}
  found |= {f'--{name}': repr(value) for name, value in supplied.items()}
  found |= {f'version of {name}': str(x) for name, x in versions().items()}
  return found | {'code of vit_jax': code_of('vit_jax')}

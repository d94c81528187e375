"""Changes of a run between two starts, and differences between its hosts.

A run that resumes is compared with its last start: every argument, defaults
included, and a fingerprint of each source of data. An argument on which results
do not depend is marked HARMLESS where it is declared, and MACHINE if it may
even differ between the hosts of a run, see types.py.
"""

import dataclasses
import datetime
import hashlib
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from vit_jax import config
from vit_jax.data.pipeline import Data
from vit_jax.data.views import fingerprint
from vit_jax.runs import workdirs
from vit_jax.runs.files import PathLike, read_json, write_atomically
from vit_jax.types import HARMLESS, MACHINE, UserError

_SAVED, _HISTORY = 'resume.json', 'changes.jsonl'
_NOT_SET = 'not set'
# Evaluators do not change the training: batches may become smaller.
_HARMLESS_KEYS = re.compile(r'evals|evals\..*\bbatch_size')

# What results depend on: 'config' is {key: JSON value} of the arguments, 'data'
# {key: value} of the fingerprints of the sources.
Basis = Mapping[str, Mapping[str, Any]]


class ChangedRunError(UserError):
  """A run would resume with changes that its results depend on."""


@dataclasses.dataclass(frozen=True)
class Change:
  """A difference between two Basis: its key, and JSON values."""

  key: str
  old: Any
  new: Any

  def __str__(self) -> str:
    old, new = (x if x == _NOT_SET else repr(x) for x in (self.old, self.new))
    return f'{self.key}: {old:.200} -> {new:.200}'


def basis_of(
  workdir: PathLike,
  entries: Iterable[config.Entry],
  arguments: Mapping[str, Any] | None = None,
) -> Basis:
  """Return the Basis of a run.

  Args:
    workdir: of the run. Paths in its parent are kept relative to it, so that
      the runs of a study can be moved together.
    entries: see `config.entries`.
    arguments: objects, in which the sources of data are found.
  """
  parent = f'{epath.Path(workdir).parent}/'
  found = {}
  for each in entries:
    if not each.marks & {HARMLESS, MACHINE}:
      value = each.value
      if isinstance(value, str) and value.startswith(parent):
        value = f'../{value.removeprefix(parent)}'
      found[each.key] = value
  sources = dict(_sources(arguments or {}))
  shared = {id(x): x for x in sources.values()}  # evaluators often share one
  prints = {key: config.plain(fingerprint(x)) for key, x in shared.items()}
  data = {
    f'{key}.{name}': value
    for key, source in sources.items()
    for name, value in prints[id(source)].items()
  }
  return {'config': found, 'data': data}


def _sources(value: Any, key: str = '') -> Iterator[tuple[str, Any]]:
  """Yield (key, object) of sources of data and of teachers."""
  if isinstance(value, Data):
    yield f'{key}.source', value.source
  elif callable(getattr(type(value), 'fingerprint', None)):
    yield key, value
  elif isinstance(value, Mapping):
    for name, inner in value.items():
      yield from _sources(inner, f'{key}.{name}' if key else str(name))
  elif hasattr(value, 'keywords'):  # a partial
    yield from _sources(value.keywords, key)
  elif dataclasses.is_dataclass(value) and hasattr(value, 'evaluator'):
    yield from _sources(value.evaluator, key)


def saved(workdir: PathLike) -> Basis | None:
  """Return the Basis of the last start in a workdir; None if there is none."""
  file = epath.Path(workdir) / _SAVED
  return read_json(file) if file.exists() else None


def compare(
  before: Basis, now: Basis, without: Sequence[str] = ()
) -> list[Change]:
  """Return the changes that results depend on, except those of some keys."""
  known = {_evaluator(key) for key in before['config']}
  pairs = [
    (key, *(basis['config'].get(key, _NOT_SET) for basis in (before, now)))
    for key in dict.fromkeys([*now['config'], *before['config']])
    if _evaluator(key) in known  # others are new
    and key not in without
    and not _HARMLESS_KEYS.fullmatch(key)
  ]
  pairs += [
    (key, before['data'][key], value)
    for key, value in now['data'].items()
    if key in before['data']
  ]
  return [Change(key, old, new) for key, old, new in pairs if old != new]


def _evaluator(key):
  """Return the name in 'evals.NAME.KEY'; '' for a key of something else."""
  return key.split('.')[1] if key.startswith('evals.') else ''


def check(
  workdir: PathLike, now: Basis, allow_changes: Sequence[str] = ()
) -> list[Change]:
  """Return the changes of a run that resumes, all of which are allowed.

  A run without a checkpoint starts from scratch, so everything is allowed.
  `allow_changes` are keys of the config, or of parts of it.
  """
  before, step = saved(workdir), workdirs.newest_step(workdir)
  if step is None or before is None:
    return []
  found = compare(before, now)
  refuse(
    found,
    allow_changes,
    f'The run in {workdir} was started with another config or other data, and '
    f'has {step} steps:',
    'Use these again, or another --workdir',
  )
  return found


def refuse(
  found: Sequence[Change], allow_changes: Sequence[str], what: str, remedy: str
) -> None:
  """Raise ChangedRunError (what, a diff, remedy) unless all are allowed."""
  refused = [x for x in found if not is_allowed(x.key, allow_changes)]
  if not refused:
    return
  lines = '\n'.join(f'  {x}' for x in refused)
  # The target of an object stands for its arguments, too.
  keys = {x.key.removesuffix('.target'): None for x in refused}
  parts = [k for k in keys if not is_allowed(k, [x for x in keys if x != k])]
  raise ChangedRunError(
    f'{what}\n{lines}\n{remedy}. If the changes are intended, add\n'
    f'  --allow_changes={",".join([*allow_changes, *parts])}'
  )


def is_allowed(key: str, allow_changes: Sequence[str]) -> bool:
  """Return whether one of the keys is this one, or a part that contains it."""
  return any(
    part == '' or f'{key}.'.startswith(f'{part}.') for part in allow_changes
  )


def record(
  workdir: PathLike, now: Basis, found: Sequence[Change], step: int | None
) -> None:
  """Save the Basis of a start, and the changes that were allowed.

  changes.jsonl gets a line for each change. Only the first host writes.
  """
  if found and jax.process_index() == 0:
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
    about = {'date': date, 'step': step}
    lines = [json.dumps(about | dataclasses.asdict(each)) for each in found]
    file = epath.Path(workdir) / _HISTORY
    earlier = file.read_text() if file.exists() else ''
    write_atomically(file, earlier + '\n'.join(lines) + '\n')
  workdirs.write(workdir, _SAVED, now)


def of_run(allow_changes: Sequence[str], name: str) -> list[str]:
  """Return the allowed keys of one run of a study.

  `allow_changes` has 'runs.NAME.KEY' for one run, 'KEY' for all.
  """
  if {'runs', f'runs.{name}'} & {*allow_changes}:
    return ['']  # all of it
  return [key.removeprefix(f'runs.{name}.') for key in allow_changes]


def facts(call: config.Call, supplied: Mapping[str, Any]) -> dict[str, str]:
  """Return what must be equal on all hosts, as {name: text}.

  Args:
    call: of the function that the config names.
    supplied: its arguments that the config cannot set.
  """
  entries = [x for x in config.entries(call) if MACHINE not in x.marks]
  found = {f'config.{x.key}': json.dumps(x.value) for x in entries}
  found |= {f'--{name}': repr(value) for name, value in supplied.items()}
  versions = workdirs.versions()
  found |= {f'version of {name}': str(x) for name, x in versions.items()}
  files = sorted(pathlib.Path(__file__).parents[1].rglob('*.py'))
  code = hashlib.sha256(b''.join(file.read_bytes() for file in files))
  return found | {'code of vit_jax': code.hexdigest()[:12]}

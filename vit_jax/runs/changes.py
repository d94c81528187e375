"""Rules for changes of a run, and for differences between its hosts.

A run that resumes is compared with what was saved of its last start: every
argument, defaults included, and a fingerprint of each source of data. Hosts are
compared with each other. An argument that is not listed here changes results.
"""

import collections
import dataclasses
import datetime
import hashlib
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from vit_jax import config as configs
from vit_jax.data import fingerprints
from vit_jax.data.pipeline import Data
from vit_jax.runs import workdirs
from vit_jax.runs.files import PathLike, write_atomically

# Arguments that do not change results, by the function or class that defines
# them; everything below such an argument is free, too.
#
# These may even differ between the hosts of a run. Files of data may lie
# elsewhere, because their fingerprint is compared.
OF_THE_MACHINE = frozenset(
  {
    'vit_jax.data.pipeline.Data.num_threads',
    'vit_jax.data.pipeline.Data.num_workers',
    'vit_jax.data.pipeline.Data.prefetch',
    'vit_jax.data.folder.Folder.path',
    'vit_jax.data.folder.Folder.csv',
    'vit_jax.data.tfds.Tfds.data_dir',
    'vit_jax.data.sources.open_source.path',
    'vit_jax.data.sources.open_source.csv',
    'vit_jax.data.hugging_face.HuggingFace.cache_dir',
    'vit_jax.data.embedded.fractals.Fractals.cache_dir',
    'vit_jax.data.embedded.fractals.Fractals.show_progress',
    # So is the fingerprint of a teacher.
    'vit_jax.objectives.teacher.Teacher.path',
  }
)
HARMLESS = OF_THE_MACHINE | {
  # Files that a run writes.
  'vit_jax.train.train.log_every',
  'vit_jax.train.train.writers',
  'vit_jax.train.train.profile',
  'vit_jax.train.train.checkpoint',
  'vit_jax.train.train.dry_run',
  'vit_jax.train.Evaluation.every',
  'vit_jax.evaluate.evaluate.writers',
  'vit_jax.evaluate.evaluate.dry_run',
  # Layout of the computation: results are equal up to rounding.
  'vit_jax.train.train.mesh',
  'vit_jax.train.train.sharding',
  'vit_jax.evaluate.evaluate.mesh',
  'vit_jax.evaluate.evaluate.sharding',
  'vit_jax.models.vit.VisionTransformer.remat',
  'vit_jax.models.resnet.ResNet.remat',
  'vit_jax.models.mixer.MlpMixer.remat',
  # Behaviour of a run that cannot continue. Before that they do nothing.
  'vit_jax.train.train.on_nan',
  'vit_jax.train.train.max_rollbacks',
  'vit_jax.data.pipeline.Data.on_error',
  'vit_jax.data.pipeline.Data.max_worker_restarts',
  'vit_jax.data.pipeline.Data.max_image_bytes',
}

# Targets of older configs that make the same objects today: the fingerprints of
# the data are compared.
_SUCCESSORS = {'vit_jax.data.folder.Folder': 'vit_jax.data.sources.open_source'}
_SAVED, _HISTORY = 'resume.json', 'changes.jsonl'
_NOT_SET = 'not set'
_BALANCED = 'vit_jax.data.sampling.Balanced'


class ChangedRunError(ValueError):
  """A run would resume with changes that its results depend on."""


@dataclasses.dataclass(frozen=True)
class Basis:
  """Arguments and data that the results of a run depend on.

  Attributes:
    config: {key: JSON value} of the arguments.
    defaults: keys whose value is the default.
    harmless: keys that results do not depend on; they are not in `config`.
    data: {key: fingerprint} of the sources of data.
  """

  config: Mapping[str, Any]
  defaults: frozenset[str] = frozenset()
  harmless: frozenset[str] = frozenset()
  data: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def keys(self) -> frozenset[str]:
    """All keys, also of parts of the config."""
    whole = [*self.config, *self.harmless, *self.data]
    parts = (key.split('.') for key in whole)
    return frozenset(
      '.'.join(part[:end]) for part in parts for end in range(1, len(part) + 1)
    )


@dataclasses.dataclass(frozen=True)
class Change:
  """A difference between two Basis: its key, JSON values, and a text."""

  key: str
  old: Any
  new: Any
  text: str


def basis_of(
  workdir: PathLike,
  entries: Iterable[configs.Entry],
  arguments: Mapping[str, Any] | None = None,
) -> Basis:
  """Return the Basis of a run from its entries.

  Args:
    workdir: of the run. Paths in its parent are kept relative to it, so that
      the runs of a study can be moved together.
    entries: see `config.entries`.
    arguments: objects, in which the sources of data are found.
  """
  config, defaults, harmless = {}, set(), set()
  for each in entries:
    if HARMLESS.isdisjoint(each.arguments):
      value = _relative(configs.plain(each.value), workdir)
      if _is_name(each):  # the public name: packages move what is private
        value = re.sub(r'\._.*\.', '.', value)
      config[each.key] = value
    else:
      harmless.add(each.key)
  seen: dict[int, Any] = {}  # evaluators often share a source
  data = {}
  for key, source in _sources(arguments or {}):
    if id(source) not in seen:
      own = getattr(source, 'fingerprint', None)
      found = fingerprints.fingerprint(source) if own is None else own()
      seen[id(source)] = configs.plain(found)
    data[key] = seen[id(source)]
  return Basis(config, frozenset(defaults), frozenset(harmless), data)


def basis_of_call(
  workdir: PathLike,
  fn: Callable[..., Any],
  arguments: Mapping[str, Any],
  entries: Iterable[configs.Entry] | None,
) -> Basis:
  """Return the Basis of a function that was called, such as `train`.

  Args:
    workdir, entries: see `basis_of`. None: the entries are those of the
      arguments, as far as objects show how they were made.
    fn: the function.
    arguments: all of its arguments.
  """
  if entries is None:
    kept = {k: v for k, v in arguments.items() if k not in configs.HIDDEN}
    entries = configs.entries(configs.Call(fn, kept, hidden=configs.HIDDEN))
  return basis_of(workdir, entries, arguments)


def _relative(value, workdir):
  parent = f'{epath.Path(workdir).parent}/'
  if isinstance(value, str) and value.startswith(parent):
    return f'../{value.removeprefix(parent)}'
  return value


def _sources(value: Any, key: str = '') -> Iterator[tuple[str, Any]]:
  """Yield (key, object) of sources, orders with files and teachers."""
  if isinstance(value, Data):
    yield f'{key}.source', value.source
    return
  if hasattr(type(value), 'fingerprint'):
    yield key, value
    return
  if isinstance(value, list | tuple):
    value = dict(enumerate(value))
  elif hasattr(value, 'keywords') and hasattr(value, 'func'):
    value = value.keywords
  elif dataclasses.is_dataclass(value) and not isinstance(value, type):
    names = [f.name for f in dataclasses.fields(value) if f.init]
    rest = {f.name for f in dataclasses.fields(value) if f.metadata.get('rest')}
    for name in names:
      if name not in ('parent', 'name', 'model'):
        inside = key if name in rest else f'{key}.{name}'
        yield from _sources(getattr(value, name, None), inside)
    return
  if isinstance(value, Mapping):
    for name, inner in value.items():
      yield from _sources(inner, f'{key}.{name}' if key else str(name))


def saved(workdir: PathLike) -> Basis | None:
  """Return the Basis of the last start in a workdir; None if there is none.

  A workdir of older code has no resume.json. There it is that of config.json if
  that config still fits the code, without data.
  """
  folder = epath.Path(workdir)
  if (file := folder / _SAVED).exists():
    found = json.loads(file.read_text())
    config = _upgraded(found['config'])
    return Basis(config, frozenset(found['defaults']), data=found['data'])
  if not (file := folder / 'config.json').exists():
    return None
  content = json.loads(file.read_text())
  try:
    call, _ = configs.plan_run(configs.ConfigDict(_upgraded(content)))
  except Exception:  # names of older code, or whatever was in that file
    return None
  return basis_of(workdir, configs.entries(call))


def _upgraded(config):
  """Return a config of older code, which had data.balanced for data.order.

  Args:
    config: nested, or {key: value} with dotted keys.
  """
  found: dict[str, Any] = {}
  for key, value in config.items():
    stem = key.removesuffix('balanced')
    if isinstance(value, Mapping):
      found[key] = _upgraded(value)
    elif stem == key or f'{stem}batch_size' not in config:
      found[key] = value
    elif value and stem:
      found[f'{stem}order.target'] = _BALANCED
    elif value:
      found['order'] = {'target': _BALANCED}
  return found


def compare(
  before: Basis, now: Basis, without: Sequence[str] = ()
) -> list[Change]:
  """Return the changes that results depend on.

  An argument that only one of them has is no change if it has its default: code
  of another version has other arguments.

  Args:
    before, now: Basis of two starts.
    without: keys that are not compared.
  """
  found = []
  for key in dict.fromkeys([*now.config, *before.config]):
    old, new = (x.config.get(key, _NOT_SET) for x in (before, now))
    if isinstance(old, str) and _SUCCESSORS.get(old) == new:
      continue
    by_default = (key not in before.config and key in now.defaults) or (
      key not in now.config and key in before.defaults
    )
    if old != new and not by_default and key not in {*without, *now.harmless}:
      found.append(Change(key, old, new, f'{_shown(old)} -> {_shown(new)}'))
  for key in [key for key in now.data if key in before.data]:
    old, new = before.data[key], now.data[key]
    if lines := fingerprints.differences(old, new):
      found.append(Change(key, _summary(old), _summary(new), '; '.join(lines)))
  return found


def _shown(value):
  return value if value is _NOT_SET else repr(value)


def _summary(fingerprint):
  """A fingerprint without the names of classes, which may be thousands."""
  return {k: v for k, v in fingerprint.items() if k != 'classes'}


def check(
  workdir: PathLike, now: Basis, allow_changes: Sequence[str] = ()
) -> list[Change]:
  """Return the changes of a run that resumes, all of which are allowed.

  A run without a checkpoint starts from scratch, so that all is allowed.

  Args:
    workdir: of the run.
    now: its Basis.
    allow_changes: keys of the config, or of parts of it.

  Raises:
    ChangedRunError: other changes; with a diff.
    ConfigError: an unknown key in allow_changes.
  """
  before, step = saved(workdir), workdirs.newest_step(workdir)
  check_keys(allow_changes, now.keys | (before.keys if before else set()))
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


def check_keys(allow_changes: Sequence[str], keys: Iterable[str]) -> None:
  """Raise ConfigError for a key that the config does not have."""
  keys = sorted(keys)
  for key in allow_changes:
    if key and key not in keys:
      raise configs.ConfigError(
        f'--allow_changes={key}: the config has no key {key!r}'
        f'{configs.suggest(key, keys)}. Give keys, or parts such as data, '
        'separated by commas: --allow_changes=seed,data.batch_size'
      )


def refuse(
  found: Sequence[Change], allow_changes: Sequence[str], what: str, remedy: str
) -> None:
  """Raise ChangedRunError unless all changes are allowed.

  Args:
    found: the changes.
    allow_changes: see `check`.
    what, remedy: begin of the message, and what to do.
  """
  refused = [x for x in found if not is_allowed(x.key, allow_changes)]
  if not refused:
    return
  lines = '\n'.join(f'  {x.key}: {x.text}' for x in refused[:30])
  if len(refused) > 30:
    lines += f'\n  and {len(refused) - 30} more'
  flag = ','.join([*allow_changes, *_parts([x.key for x in refused])])
  raise ChangedRunError(
    f'{what}\n{lines}\n{remedy}. If the changes are intended, add\n'
    f'  --allow_changes={flag}'
  )


def is_allowed(key: str, allow_changes: Sequence[str]) -> bool:
  """Return whether one of the keys is this one, or a part that contains it."""
  return any(
    part == '' or key == part or key.startswith(f'{part}.')
    for part in allow_changes
  )


def _parts(keys):
  """Return the keys or parts to allow, none of which contains another."""
  keys = [x.removesuffix('.target') for x in keys]  # so are its arguments
  in_runs = collections.Counter(x.split('.', 2)[-1] for x in keys)
  parts = list(
    dict.fromkeys(
      x.split('.', 2)[2]
      if x.startswith('runs.') and in_runs[x.split('.', 2)[2]] > 1
      else x
      for x in keys
    )
  )
  return [
    part
    for part in parts
    if not is_allowed(part, [other for other in parts if other != part])
  ]


def record(
  workdir: PathLike, now: Basis, found: Sequence[Change], step: int | None
) -> None:
  """Save the Basis of a start, and the changes that were allowed.

  With changes, config.json is kept as config_until_STEP.json, and changes.jsonl
  gets a line for each. Only the first host writes.
  """
  if jax.process_index():
    return
  folder = epath.Path(workdir)
  if found:
    _keep(folder, step)
    date = datetime.datetime.now(datetime.UTC)
    lines = [
      json.dumps(
        {
          'date': date.isoformat(timespec='seconds'),
          'step': step,
          'key': each.key,
          'old': each.old,
          'new': each.new,
        }
      )
      for each in found
    ]
    file = folder / _HISTORY
    earlier = file.read_text() if file.exists() else ''
    write_atomically(file, earlier + '\n'.join(lines) + '\n')
  content = {
    'config': now.config,
    'defaults': sorted(now.defaults),
    'data': now.data,
  }
  write_atomically(folder / _SAVED, json.dumps(content, indent=2) + '\n')


def _keep(folder, step):
  """Copy config.json, unless the config up to this step is kept already."""
  file, kept = folder / 'config.json', folder / f'config_until_{step or 0}.json'
  if file.exists() and not kept.exists():
    write_atomically(kept, file.read_text())


def of_run(allow_changes: Sequence[str], name: str, keys: Any) -> list[str]:
  """Return the allowed keys of one run of a study.

  Args:
    allow_changes: 'runs.NAME.KEY' for one run, 'KEY' for all that have it.
    name: of the run.
    keys: of its config; others are left out.
  """
  found = []
  for key in allow_changes:
    if key in ('runs', f'runs.{name}'):
      found.append('')  # all of it
    key = key.removeprefix(f'runs.{name}.')
    if key in keys:
      found.append(key)
  return found


# Hosts.


def facts(call: configs.Call, supplied: Mapping[str, Any]) -> dict[str, str]:
  """Return what must be equal on all hosts, as {name: text}.

  Args:
    call: of the function that the config names.
    supplied: its arguments that the config cannot set.
  """
  entries = [
    each
    for each in configs.entries(call)
    if OF_THE_MACHINE.isdisjoint(each.arguments)
  ]
  found = {f'config.{each.key}': _text(each.value) for each in entries}
  found |= {f'--{name}': _text(value) for name, value in supplied.items()}
  versions = workdirs.versions()
  found |= {f'version of {name}': str(x) for name, x in versions.items()}
  package = pathlib.Path(__file__).parent
  files = {f'vit_jax/{x.relative_to(package)}': x for x in _files(package)}
  files |= _modules(each.value for each in entries if _is_name(each))
  found |= {
    f'code of {name}': hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    for name, file in files.items()
  }
  return found


def _text(value):
  return json.dumps(configs.plain(value), sort_keys=True)


def _files(folder):
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

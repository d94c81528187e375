"""Mutations of the shipped configs: each is refused, or it has a meaning.

The mutations are made from the configs and from the signatures of everything
that they name: wrong types, numbers out of range, misspelt keys, missing keys,
wrong targets, two units. A process of its own runs them (`python -m
tests.faults.configs` reads them from stdin), because some must be stopped.
"""

import contextlib
import copy
import dataclasses
import functools
import inspect
import io
import json
import math
import os
import pathlib
import random
import re
import select
import subprocess
import sys
import tempfile
import time
import traceback
import typing
from collections.abc import Iterator
from typing import Any

import ml_collections
import numpy as np

from vit_jax import config as configs
from vit_jax.durations import UNITS, Duration

from .harness import Case, fault

ROOT = pathlib.Path(__file__).parents[2]
SECONDS = 40  # for one mutation; each starts with a fresh trace

# Outcomes. The first two are what a user wants.
REFUSED = 'refused'
ACCEPTED = 'accepted, has a meaning'
UNCLEAR = 'refused, but the message does not name the key and the value'
MEANINGLESS = 'accepted, has no meaning'
TRACEBACK = 'traceback'
HANG = 'hang or crash'
OUTCOMES = (REFUSED, ACCEPTED, UNCLEAR, MEANINGLESS, TRACEBACK, HANG)

# One argument of each shipped config. Their data are replaced.
# Runs come before studies: a mutation is made in the first base that has the
# argument, and the dry run of a study does not trace its runs.
BASES = (
  *('pretrain_imagenet:B/16,tiny', 'finetune:cifar10,S/16,dev,polyak,tiny'),
  *('finetune:cifar10,Mixer-B/16,tiny', 'finetune:flowers,R50x1,bit,tiny'),
  *('masked_patches:B/16,imagenet,tiny', 'train_folder:tiny'),
  *('pretrain_bit:imagenet,R50x1,tiny', 'pretrain_imagenet21k:B/16,tiny'),
  *('pretrain_jft:G/14,fsdp,tensor=2,tiny', 'pretrain_jft:R50+L/32,tiny'),
  *('pretrain_s16_better_plain:tiny', 'evaluate_imagenet', 'fewshot'),
  'evaluate:tfds,accuracy,knn,logistic,probe',
  *('masked_patches_embedded:tiny', 'quickstart:tiny', 'ablations:shape,tiny'),
  *('scaling_compute:tiny', 'scaling_data:tiny', 'scaling_embedded:tiny'),
  *('scaling_shape:tiny', 'transfer:R50x1,pets,bit,tiny'),
  'vtab:seeds=1,sweep,dtd,tiny',
)


class Mutation(typing.NamedTuple):
  """A change of one key of a base.

  Attributes:
    base: config and argument, one of BASES.
    path: dotted path of the key.
    kind: what is changed.
    new: the key that is set; the old one is removed. None: the key is removed.
    value: of it, as Python source: it may be nan.
    annotation: of the argument, as text.
    argument: full name of the argument, for which a mutation is made once.
  """

  base: str
  path: str
  kind: str
  new: str | None
  value: str
  annotation: str
  argument: str

  def __str__(self) -> str:
    *parents, _ = self.path.split('.')
    where = '.'.join([*parents, self.new or ''])
    if self.new is None:
      return f'{self.base} without {self.path}'
    return f'{self.base} {where}={self.value}'


NUMBERS = {
  'out of range': (
    *('0', '-1', 'math.nan', 'math.inf', '-math.inf', '10**9', '2**70'),
    *('1e-300', '1e300'),
  ),
  'wrong type': ("'3'", "'many'", 'None', '[1]', 'True', "{'a': 1}", '1.5'),
}
TEXTS = {
  'out of range': ("''", "'bogus'", "'['"),
  'wrong type': ('3', '1.5', 'None', "['a']", 'True', "{'a': 1}"),
}
BOOLS = {'wrong type': ("'yes'", '2', 'None', '[True]', '0.5', "{'a': 1}")}
LISTS = {
  'out of range': ('()', '(0,)', '(-1, -1)', '(math.nan,)', '(10**9, 10**9)'),
  'wrong type': ("'text'", '3.5', 'None', "('x', None)", '((),)', "{'a': 1}"),
}
OTHERS = {'wrong type': ("'text'", '3', '[1]', "{'a': 1}", 'True')}
TARGETS = {
  'wrong target': (
    *("'no_such.module.Name'", "'vit_jax.models.vit.VisionTransfromer'"),
    *("'vit_jax.optim'", "'os.getcwd'", "'vit_jax.data.transforms.FlipLR'"),
    *("'vit_jax.evals.classification.Classification'", "'optax.adamw'"),
    *("'vit_jax.models.pooling.Mean'", 'None', '3', "''"),
  )
}


@functools.cache
def base(name: str) -> ml_collections.ConfigDict:
  """Return a base that can run here: its data are small and embedded."""
  config = configs.load(f'vit_jax:{name}').copy_and_resolve_references()
  with config.unlocked():
    for part in (config, *config.get('runs', {}).values()):
      is_evaluation = part.run == 'vit_jax.evaluate.evaluate'
      if is_evaluation:
        part.image_shape = (24, 24, 3)
        part.model = _model()
      _embed(part, 24 if is_evaluation else None)
      for key in ('init_from', 'mesh'):  # weights and devices that are not here
        if key in part:
          del part[key]
    if 'shared' in config:
      del config.shared
  return config


def _model():
  config = configs.load('vit_jax:pretrain_imagenet:B/16,tiny')
  return config.model.to_dict() | {'num_classes': 10}


def _embed(value, size=None):
  """Replace every source in a config, in place, by one without files.

  If a size is given, all images are resized to it.
  """
  items = value.items() if isinstance(value, ml_collections.ConfigDict) else ()
  for key, inner in list(items):
    if key == 'source':
      if 'embedded' not in inner.target:
        value.source = {
          'target': 'vit_jax.data.embedded.digits.Synthetic',
          **{'image_size': 48, 'num_classes': 10, 'num_examples': 64},
        }
        value.transforms = [
          x for x in value.get('transforms', ()) if 'vtab' not in x['target']
        ]
      if size:
        resize = 'vit_jax.data.transforms.Resize'
        value.transforms = [{'target': resize, 'size': size}]
        value.image_size = None
    elif key == 'class_weights':
      value.class_weights = (1.0,) * 10
    else:
      _embed(inner, size)


def mutations() -> list[Mutation]:
  """Return all mutations, each argument once, in a fixed random order."""
  found: dict[Any, Mutation] = {}
  for name in BASES:
    for each in _of_base(name):
      found.setdefault((each.argument, each.kind, each.value), each)
  every = list(found.values())
  random.Random(0).shuffle(every)
  return every


def _of_base(name):
  config = base(name)
  runs = {f'runs.{k}.': v for k, v in list(config.get('runs', {}).items())[:2]}
  for prefix, part in {'': config, **runs}.items():
    part = part.copy_and_resolve_references()
    if 'best_of' in part:
      del part.best_of
    call, _ = configs.plan_run(part)
    for path, argument, annotation, value, given in _leaves(call, ''):
      yield from _of_leaf(
        *(name, f'{prefix}{path}', argument, annotation, value, given)
      )


def _leaves(call, where):
  """Yield (path, full argument, annotation, value, whether it is given)."""
  fn = call.fn if isinstance(call, configs.Call) else type(call)
  hints = _hints(fn)
  rest = ''
  if dataclasses.is_dataclass(fn):
    fields = [f.name for f in dataclasses.fields(fn) if f.metadata.get('rest')]
    rest = fields[0] if fields else ''
  full = f'{fn.__module__}.{fn.__qualname__}'
  if isinstance(call, configs.Call) and where and not rest:
    yield f'{where}.target', f'{_slot(where)}.target', 'target', full, True
  for name, parameter in inspect.signature(fn).parameters.items():
    if parameter.kind not in (
      parameter.POSITIONAL_OR_KEYWORD,
      parameter.KEYWORD_ONLY,
    ) or name in (*_OF_FLAGS, *getattr(call, 'hidden', ())):
      continue
    if isinstance(call, configs.Call):
      given, value = name in call.kwargs, call.kwargs.get(name, _MISSING)
    else:
      given, value = False, getattr(call, name)
    if value is _MISSING:
      value = parameter.default
    if value is parameter.empty:
      continue  # supplied by the code
    path = where if name == rest else f'{where}.{name}' if where else name
    annotation = hints.get(name, Any)
    if isinstance(value, Duration):
      yield f'{path}_{value.unit}', f'{full}.{name}', Duration, value, given
    elif _has_leaves(value):
      yield from _leaves(value, path)
    elif isinstance(value, dict | list | tuple) and _holds_calls(value):
      yield path, f'{full}.{name}', annotation, value, given
      items = value.items() if isinstance(value, dict) else enumerate(value)
      for key, inner in items:
        if _has_leaves(inner):
          yield from _leaves(inner, f'{path}.{key}')
        elif isinstance(inner, dict):
          for below, innermost in inner.items():
            if _has_leaves(innermost):
              yield from _leaves(innermost, f'{path}.{key}.{below}')
    else:
      unit = '_steps' if 'Duration' in str(annotation) else ''
      yield f'{path}{unit}', f'{full}.{name}', annotation, value, given


_MISSING = object()
# Set by Flax, or by flags of the command line.
_OF_FLAGS = ('parent', 'name', 'dry_run', 'member', 'report_only')


def _slot(where):
  """Return a path without names that differ between configs."""
  return re.sub(r'\b(runs|evals|data|readouts)\.\w+', r'\1.*', where)


def _has_leaves(value):
  is_object = dataclasses.is_dataclass(value) and not inspect.isclass(value)
  return isinstance(value, configs.Call) or is_object


def _holds_calls(value):
  if isinstance(value, dict):
    value = value.values()
  return any(
    _has_leaves(x) or (isinstance(x, dict) and _holds_calls(x)) for x in value
  )


def _hints(fn):
  try:
    return typing.get_type_hints(fn.__init__ if inspect.isclass(fn) else fn)
  except (NameError, TypeError, AttributeError):
    return {}


def _of_leaf(name, path, argument, annotation, value, given):
  *parents, key = path.split('.')
  text = annotation if isinstance(annotation, str) else _text(annotation)

  def mutation(kind, new, value):
    return Mutation(name, path, kind, new, value, text, argument)

  for kind, values in _values(annotation, value).items():
    for each in values:
      yield mutation(kind, key, each)
  shown = repr(getattr(value, 'value', value))
  if _is_plain(value):
    yield mutation('misspelt', key[:1] + key[2:] + 'x', shown)
    if parents and not parents[-1].isdecimal():
      # The value under a misspelt parent, as a flag would set it.
      above = '.'.join([*parents[:-1], parents[-1] + 'x', key])
      yield Mutation(
        *(name, above, 'misspelt above', key, shown, text, f'{argument} above')
      )
  if given and not isinstance(value, list | dict | tuple):
    yield mutation('missing', None, '')
  if annotation is Duration:
    stem = key.rpartition('_')[0]
    other = next(u for u in UNITS if not key.endswith(u))
    yield mutation('two units', f'{stem}_{other}', '1')
    yield mutation('no unit', stem, '1')


def _text(annotation):
  return str(annotation).removeprefix("<class '").removesuffix("'>")


def _is_plain(value):
  return value is None or isinstance(value, bool | int | float | str | Duration)


def _values(annotation, value):
  """Return {kind: values} that a leaf is changed to."""
  value = getattr(value, 'value', value)
  text = str(annotation)
  if annotation == 'target':
    return TARGETS
  if isinstance(value, bool) or (value is None and 'bool' in text):
    return BOOLS
  if isinstance(value, int | float) or (value is None and _is_number(text)):
    return NUMBERS
  if isinstance(value, str) or (value is None and 'str' in text):
    return TEXTS
  if isinstance(value, list | tuple) and not _holds_calls(value):
    return LISTS
  return OTHERS


def _is_number(annotation):
  return bool(re.search(r'\b(int|float|Duration)\b', annotation))


def mutate(mutation: Mutation) -> ml_collections.ConfigDict:
  """Return the base with the mutation, as a config file could have it."""
  values = copy.deepcopy(base(mutation.base).to_dict())
  *parents, key = mutation.path.split('.')
  node = values
  for parent in parents:
    if isinstance(node, list | tuple):
      node = node[int(parent)]
    else:
      if isinstance(node.get(parent), tuple):
        node[parent] = list(node[parent])
      node = node.setdefault(parent, {})
  if mutation.kind != 'two units':
    node.pop(key, None)
  if mutation.new is not None:
    node[mutation.new] = _read(mutation.value)
  return ml_collections.ConfigDict(values)


def _read(value):
  return eval(value, {'math': math})


# Which values of an argument have a meaning, by its name; independent of the
# domains that the signatures declare.
_ANY = (-1e6, 1e6)
_UNIT = r'.*_(steps|epochs|examples|fraction)'
MEANINGS: dict[str, tuple[float, float]] = {
  r'seed|seeds': (0, 2**64 - 1),
  r'b1|b2|momentum|ema_decay|dropout|stochastic_depth|attention_dropout': (
    *(0, 1 - 1e-9),
  ),
  r'label_smoothing|held_out': (0, 1 - 1e-9),
  r'(train|schedule)\.lr|lr|end_lr': (0, 1e4),
  r'weight_decay|weight_decay_mask': (0, 1e4),
  r'eps|eps_root|norm_eps': (0, 1),
  r'clip_norm|clip': (1e-30, 1e12),
  r'num_workers': (0, 512),
  r'num_registers': (0, 4096),
  r'num_classes|representation_size': (1, 2**31),
  r'calibration_bins': (0, 1e6),
  r'(data|fsdp|model)': (-1, 1),  # -1: all devices that are left
  r'keep_last|keep_best|batch_size|accum_steps|depth|width|num_heads': (
    *(1, 2**31 - 1),
  ),
  r'mlp_dim|tokens_mlp_dim|channels_mlp_dim|width_factor': (1, 2**31 - 1),
  r'patch_size|stride|size|image_size|stages|k': (1, 2**15),
  r'num_examples|images_per_class|examples_per_class|shots': (1, 2**32),
  r'timescale': (1, 2**31),
  r'probability|low_resolution|step_factor|rate': (0, 1),
  r'area': (1e-30, 1),
  r'ratio|mask_share|swap_share|threshold': (0, 1e6),
  r'std': (1e-30, 1e6),
  r'log_every_steps|every_steps|total_steps|.*_every_steps': (1, 2**31 - 1),
  r'every_fraction|total_epochs': (1e-30, 1e9),
  _UNIT: (0, 2**31 - 1),
  r'digits': (0, 100),
  r'max_iter|epochs': (1, 2**31),
}
# Arguments that take any text.
FREE_TEXT = r'.*(name|title|project|entity|group|experiment|tracking_uri|mode)'
FREE_TEXT += r'|discard|.*_rule|head|block|stacked|cache_dir|path|data_dir'


def has_meaning(mutation: Mutation) -> bool:
  """Return whether a run with the mutated value is what someone may want."""
  if mutation.kind == 'missing':
    return True  # an accepted one is an argument with a default
  if mutation.kind not in ('out of range', 'wrong type'):
    return mutation.kind == 'wrong target' and mutation.value == 'None'
  value, text = _read(mutation.value), mutation.annotation
  key = re.sub(r'.*\.', '', mutation.path)
  if value is None:
    return 'None' in text or 'Any' in text or bool(re.fullmatch(_UNIT, key))
  if isinstance(value, bool):
    return 'bool' in text or text.endswith('Any')
  if isinstance(value, str):
    return bool(re.fullmatch(FREE_TEXT, key)) and 'str' in text
  if isinstance(value, dict):
    return 'Mapping' in text and not mutation.argument.endswith('evals')
  if isinstance(value, list | tuple):
    listed = re.search('Sequence|tuple|list|Any', text)
    if not listed or (value and not all(_is_number_in(x, key) for x in value)):
      return False
    return bool(value) or not re.search(r'seeds|shots|lr|\bk\b', key)
  if not _is_number(text) and text != 'typing.Any':
    return False
  if isinstance(value, float) and not re.search('float|Duration|Any', text):
    return False
  return _is_number_in(value, key)


def _is_number_in(value, key):
  if not isinstance(value, int | float):
    return False
  low, high = next(
    (x for name, x in MEANINGS.items() if re.fullmatch(name, key)), _ANY
  )
  if key.endswith('_steps') and value != int(value if value < 1e300 else 0):
    return False
  tiny = 0 < abs(value) < float(np.finfo(np.float32).tiny)
  return low <= value <= high and not tiny


# Running them.


def outcome(mutation: Mutation, compiles: bool = True) -> tuple[str, str]:
  """Return (one of OUTCOMES, message) of a dry run; False: trace it only."""
  from vit_jax import reuse

  reuse.clear()
  output = io.StringIO()
  with (
    tempfile.TemporaryDirectory() as workdir,
    contextlib.redirect_stdout(output),
    contextlib.nullcontext() if compiles else _without_compiling(),
  ):
    try:
      configs.run(mutate(mutation), f'{workdir}/run', dry_run=True)
    except MemoryError as error:
      return HANG, f'{type(error).__name__}: {error}'
    except BaseException as error:
      if isinstance(error, KeyboardInterrupt):
        raise
      return _refusal(mutation, error)
  return (ACCEPTED if has_meaning(mutation) else MEANINGLESS), ''


@contextlib.contextmanager
def _without_compiling():
  import jax

  compile_it, jax.stages.Lowered.compile = jax.stages.Lowered.compile, _Compiled
  try:
    yield
  finally:
    jax.stages.Lowered.compile = compile_it


class _Compiled:
  def __init__(self, *args):
    pass

  def memory_analysis(self):
    return None


def _refusal(mutation, error):
  from vit_jax import terminal

  text = f'{type(error).__name__}: {error}'
  ours = isinstance(error, ValueError | FloatingPointError)
  if not ours or not terminal._raised_by_vit_jax(error):
    last = traceback.extract_tb(error.__traceback__)[-1]
    return TRACEBACK, f'{text[:300]} ({last.filename}:{last.lineno})'
  named = _names(mutation, str(error)) and len(text) < 1200
  return (REFUSED if named else UNCLEAR), text


def _names(mutation, text):
  """Return whether a message names the key, and the value if it is one."""
  *parents, key = mutation.path.split('.')
  if mutation.kind == 'misspelt above':
    return parents[-1] in text
  if mutation.kind == 'missing':
    return key in text or key.rpartition('_')[0] in text or 'target' in text
  stem = key.rpartition('_')[0] if key.endswith(UNITS) else key
  if mutation.kind == 'misspelt':
    return mutation.new in text
  if mutation.kind in ('two units', 'no unit'):
    return stem in text
  value = _read(mutation.value)
  if value is None and f'{mutation.path}=...' in text:
    return True  # has to be set
  shown = (
    [repr(value), str(value), f'{value:g}']
    if isinstance(value, float | int) and abs(value) < 1e308
    else [repr(value), str(value)]
  )
  if mutation.kind == 'wrong target' and isinstance(value, str):
    shown.append(value.rpartition('.')[2])
  if isinstance(value, list | tuple):
    shown += [str(tuple(value)), str(list(value)), *map(repr, value)]
  if isinstance(value, dict):
    shown += ["'a'"]
  names = key in text or stem in text or (parents and parents[-1] in text)
  return bool(names) and any(x in text for x in shown)


class Worker:
  """A process that runs mutations; one that hangs or dies is replaced."""

  def __init__(self, gigabytes: int = 12) -> None:
    self._gigabytes, self._process = gigabytes, None

  def __call__(self, mutation: Mutation) -> tuple[str, str]:
    if self._process is None:
      self._process = subprocess.Popen(
        [sys.executable, '-m', 'tests.faults.configs', str(self._gigabytes)],
        cwd=ROOT,
        env=os.environ | {'JAX_NUM_CPU_DEVICES': '1'},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
      )
    process: Any = self._process
    process.stdin.write(json.dumps(mutation) + '\n')
    process.stdin.flush()
    begin = time.monotonic()
    ready, _, _ = select.select([process.stdout], [], [], SECONDS)
    line = process.stdout.readline() if ready else ''
    if line:
      return tuple(json.loads(line))
    seconds = time.monotonic() - begin
    status = process.poll() if ready else None
    self.close()
    if not ready:
      return HANG, f'no end within {SECONDS} s'
    return HANG, f'the process ended after {seconds:.0f} s ({status})'

  def close(self) -> None:
    if self._process is not None:
      self._process.kill()
      with self._process:  # closes the pipes, and waits
        self._process = None


def count(every: list[Mutation], run: Any) -> Iterator[tuple[Mutation, Any]]:
  """Yield (mutation, (outcome, message))."""
  for mutation in every:
    yield mutation, run(mutation)


@fault(times=10_000, in_ci=100)
def mutated_configs(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """Mutated configs (wrong types, numbers, keys, targets), each a dry run."""
  del folder
  worker = Worker()
  try:
    for mutation in mutations()[:times]:
      found, message = worker(mutation)
      lost = '' if found in (REFUSED, ACCEPTED) else f'{found} {message}'
      yield Case(str(mutation), lost, message if found == REFUSED else '')
  finally:
    worker.close()


def main() -> None:
  """Run the mutations on stdin; the argument is a memory limit in GB."""
  import resource

  limit = int(sys.argv[1]) * 10**9
  resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
  out, sys.stdout = sys.stdout, io.StringIO()
  for line in sys.stdin:
    found = outcome(Mutation(*json.loads(line)), compiles=False)
    print(json.dumps(found), file=out, flush=True)


if __name__ == '__main__':
  main()

"""Damaged and hostile weights, loaded as a user loads them.

python -m tests.faults.weights [NUMBER [SEED]]

prints the outcomes of NUMBER mutations: 'refused' (one ValueError that names
the file), 'harmless' (the parameters are unchanged), 'other values', or a
failure: a crash, a hang, too much memory, code that ran, or another exception.
A worker process loads the files and watches itself.
"""

import collections
import contextlib
import gc
import hashlib
import json
import os
import pathlib
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from . import weight_mutations
from .harness import Case, fault

ROOT = pathlib.Path(__file__).parents[2]
CPU_SECONDS = 20  # for one load, which usually takes 0.02
WALL_SECONDS = 300
ADDRESS_SPACE = 4 << 30  # bytes in addition to those at the worker's start
SLACK = 100 << 20  # bytes of memory in addition to twice the file and the model
LOADS = ('load', 'init_from', 'params')


class Outcome(NamedTuple):
  """Outcome of one mutation.

  Attributes:
    original: name of the original weights, and the file in them.
    mutation: description of the change.
    what: 'refused', 'harmless', 'other values', or a failure.
    message: the exception, or details of the failure.
  """

  original: str
  mutation: str
  what: str
  message: str


@fault(times=10_000, in_ci=150)
def mutated_weights(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """Mutated .npz, safetensors, torch files, JSON, checkpoints."""
  shown = set()
  for outcome in inject(folder, times):
    kind = outcome.original, outcome.mutation
    message = '' if kind in shown else outcome.message
    shown.add(kind)
    name = f'{outcome.original}: {outcome.mutation}'
    fine = outcome.what in ('refused', 'harmless') or _is_another_file(outcome)
    lost = '' if fine else f'{outcome.what}: {outcome.message}'
    yield Case(name, lost, message)


def _is_another_file(outcome):
  """Return whether other values are valid or cannot be detected.

  Zips and checkpoints have checksums; safetensors and JSON have none.
  """
  name = outcome.original
  has_sums = name.endswith('.npz') or name.startswith(CHECKPOINTS)
  return outcome.what == 'other values' and (
    'resealed' in outcome.mutation or not has_sums
  )


def inject(
  folder: pathlib.Path, times: int, seed: int = 0
) -> Iterator[Outcome]:
  """Make mutations, load them in a worker, and yield the outcomes."""
  originals = make_originals(folder / 'originals')
  worker = Worker(folder)
  turns = _turns(originals)
  for number in range(times):
    rng = random.Random(f'{seed}/{number}')
    name, alike = turns[number % len(turns)]
    root, _, path = originals[name]
    file = rng.choice(alike)
    target = folder / 'mutated'
    shutil.copytree(root, target, copy_function=os.link)
    mutate = rng.choice(weight_mutations.of_file(file.name))
    kind, data = mutate(rng, (root / file).read_bytes())
    (target / file).unlink()
    (target / file).write_bytes(data)
    how = rng.choice(LOADS if name in CHECKPOINTS else LOADS[:2])
    size = sum(x.stat().st_size for x in target.rglob('*') if x.is_file())
    answer = worker.load(name, target / path, how, size)
    where = f'{name}/{file.name}'
    shutil.rmtree(target)
    yield Outcome(where, f'{kind} ({how}, {number})', *answer)
  worker.close()


def _turns(originals):
  """Return [(name of the original, files of one kind in it)], weights first."""
  turns = {}
  for name, (_, found, _) in originals.items():
    for file in found:
      is_text = file.suffix in ('.json', '.npz', '.safetensors')
      kind = file.name if is_text or not file.suffix else file.suffix
      if name in CHECKPOINTS and file.parent.name not in (name, '', '7'):
        kind = kind if file.name.startswith(('.', '_', 'm')) else 'values'
      turns.setdefault((name, kind), []).append(file)
  weights = [x for x in turns if x[1].endswith(('.npz', '.safetensors'))]
  return [(x[0], turns[x]) for x in (*turns, *weights, *weights, *weights)]


CHECKPOINTS = 'checkpoint', 'checkpoint without OCDBT'
OPTIONS: dict[str, dict[str, Any]] = {'npz': {'num_heads': 4}}


def make_originals(
  folder: pathlib.Path,
) -> dict[str, tuple[pathlib.Path, list[pathlib.Path], str]]:
  """Write small weights of all formats.

  Returns:
    {name: (folder, files to mutate, path to load)}, paths relative to it.
  """
  from vit_jax.models.vit import VisionTransformer
  from vit_jax.weights import bundle, formats

  model = bundle.from_fields(
    VisionTransformer,
    **{'width': 16, 'depth': 2, 'mlp_dim': 24, 'num_heads': 4},
    **{'patch_size': (4, 4), 'num_classes': 5},
  )
  rng = np.random.default_rng(0)
  params = {
    path: rng.standard_normal(leaf.shape, np.float32)
    for path, leaf in bundle.shapes(model, (8, 8, 3)).items()
  }
  names = [f'class {i}' for i in range(5)]
  paths = {
    **{'npz': 'B.npz', 'vit_jax': 'own.npz', 'big_vision': 'scan.npz'},
    **{'timm': '.', 'hf': '.'},
  }
  for name, path in paths.items():
    made = bundle.Weights(model, params, (8, 8, 3), class_names=names)
    (folder / name).mkdir(parents=True)
    formats.write(made, folder / name / path, name)
  compressed = dict(np.load(folder / 'npz' / 'B.npz'))
  np.savez_compressed(folder / 'npz' / 'B.npz', **compressed)
  stacked = folder / 'big_vision' / 'scan.npz'
  state = {f'opt/{k}': v for k, v in dict(np.load(stacked)).items()}
  np.savez(stacked, **dict(np.load(stacked)), **state)
  shutil.copytree(folder / 'timm', folder / 'sharded')
  _shard(folder / 'sharded')
  (folder / 'torch').mkdir()
  (folder / 'torch' / 'x.pth').write_bytes(
    weight_mutations.zipped(
      [('x/data.pkl', weight_mutations.PICKLE), ('x/data/0', bytes(64))]
    )
  )
  (folder / 'pickle').mkdir()
  (folder / 'pickle' / 'x.bin').write_bytes(weight_mutations.PICKLE + bytes(64))
  for name in CHECKPOINTS:
    _write_checkpoint(folder / name, model, params, name == CHECKPOINTS[0])
  paths |= {'sharded': '.', 'torch': 'x.pth', 'pickle': 'x.bin'}
  paths |= dict.fromkeys(CHECKPOINTS, '.')
  return {
    name: (folder / name, _files(folder / name), path)
    for name, path in paths.items()
  }


def _files(folder):
  found = [x for x in sorted(folder.rglob('*')) if x.is_file()]
  return [x.relative_to(folder) for x in found if x.stat().st_size]


def _shard(folder):
  """Replace model.safetensors with an index and two shards."""
  from vit_jax.weights import files

  arrays = files.read_safetensors(folder / 'model.safetensors')
  (folder / 'model.safetensors').unlink()
  index = {}
  for number in range(2):
    name = f'model-{number}.safetensors'
    part = dict(list(arrays.items())[number::2])
    files.write_safetensors(folder / name, part)
    index |= dict.fromkeys(part, name)
  index = {'metadata': {}, 'weight_map': index}
  path = folder / 'model.safetensors.index.json'
  path.write_text(json.dumps(index))


def _write_checkpoint(workdir, model, params, ocdbt):
  import jax
  import orbax.checkpoint as ocp

  from vit_jax import tree
  from vit_jax.preprocess import Normalize
  from vit_jax.runs import workdirs
  from vit_jax.runs.checkpoint import Checkpointer
  from vit_jax.step import TrainState

  state = TrainState(
    step=np.int32(7),
    params=jax.device_put(tree.unflatten(params)),
    opt_state={},
    rng=jax.random.key(0),
    ema=None,
  )
  checkpointer = Checkpointer(workdir)
  checkpointer.save(7, state, {'position': 7})
  checkpointer.close()
  if not ocdbt:
    folder = workdir.absolute() / 'checkpoints' / '7' / 'params'
    shutil.rmtree(folder)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    checkpointer = ocp.Checkpointer(handler)
    checkpointer.save(folder, ocp.args.PyTreeSave(state.params))
    checkpointer.close()
  for item in ('train', 'data'):  # not read when parameters are loaded
    shutil.rmtree(workdir / 'checkpoints' / '7' / item)
  workdirs.record_model(
    workdir,
    model=model,
    preprocess=Normalize(),
    transforms=None,
    image_shape=(8, 8, 3),
    class_names=[f'class {i}' for i in range(5)],
    activation='softmax',
  )


class Worker:
  """Process that loads weights and is started again when it ends."""

  def __init__(self, folder: pathlib.Path) -> None:
    self._folder = folder
    self._process: subprocess.Popen[str] | None = None

  def load(
    self, name: str, path: pathlib.Path, how: str, size: int
  ) -> tuple[str, str]:
    """Load one file and return (outcome, message)."""
    process = self._process or self._start()
    assert process.stdin and process.stdout
    task = {'name': name, 'path': str(path), 'how': how, 'size': size}
    process.stdin.write(json.dumps(task) + '\n')
    process.stdin.flush()
    ready, _, _ = select.select([process.stdout], [], [], WALL_SECONDS)
    line = process.stdout.readline() if ready else ''
    if line:
      what, message = json.loads(line)
      return what, message
    status = self.close()
    errors = (self._folder / 'stderr').read_text()[-500:]
    if not ready or status == -signal.SIGPROF:
      return 'hang', f'{CPU_SECONDS} s'
    return 'crash', f'status {status}: {errors}'

  def _start(self):
    canary = self._folder / f'{weight_mutations.CANARY}.py'
    ran = self._folder / 'canary_ran'
    text = f'open({str(ran)!r}, "w").close()\ndef run(*args, **more): pass\n'
    canary.write_text(text)
    with (self._folder / 'stderr').open('w') as errors:
      self._process = subprocess.Popen(
        [sys.executable, '-m', 'tests.faults.weights', '--worker'],
        cwd=ROOT,
        env=os.environ
        | {'CANARY_RAN': str(ran), 'CANARY_FOLDER': str(self._folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
      )
    assert self._process.stdin
    originals = str(self._folder / 'originals')
    self._process.stdin.write(json.dumps(originals) + '\n')
    return self._process

  def close(self) -> int:
    """End the process and return its status."""
    process, self._process = self._process, None
    if process is None:
      return 0
    with process:  # closes its pipes
      process.kill()
    return process.returncode


# Code of the worker.

# Events of sys.addaudithook that no weights file may cause.
_FORBIDDEN = (
  *('os.system', 'os.exec', 'os.fork', 'os.posix_spawn', 'os.spawn'),
  *('subprocess.Popen', 'pickle.find_class', 'pty.spawn', 'socket.connect'),
  *('os.remove', 'os.rename', 'os.chmod', 'shutil.rmtree', 'ctypes.dlopen'),
)


# Modules of the standard library that mutations name.
_LOUD = 'this', 'antigravity'


class Watch:
  """Record of forbidden actions of code while a file is loaded."""

  def __init__(self) -> None:
    self.armed, self.seen = False, []
    self._packages: set[str] = set()
    sys.addaudithook(self._hook)

  def __enter__(self):
    self._packages = {name.partition('.')[0] for name in sys.modules}
    self._packages |= sys.stdlib_module_names
    self.armed, self.seen = True, []
    return self

  def __exit__(self, *error):
    self.armed = False

  def _hook(self, event, args):
    if not self.armed:
      return
    if event in _FORBIDDEN:
      self.seen.append(f'{event}{args!r:.200}')
    elif event == 'import' and args[0]:
      package = args[0].partition('.')[0]
      if package in _LOUD or package not in self._packages:
        self.seen.append(f'import {args[0]}')
    elif event == 'open':
      path, mode, flags = args
      writes = (mode and set(mode) & set('wax+')) or (
        flags and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
      )
      if writes and 'jaxcache' not in str(path):
        self.seen.append(f'open {path} {mode}')


def work() -> None:
  """Load the files that standard input names, one after the other."""
  answers = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)  # keep printed text out of the answers
  sys.path.append(os.environ['CANARY_FOLDER'])
  ran = pathlib.Path(os.environ['CANARY_RAN'])
  originals = pathlib.Path(json.loads(sys.stdin.readline()))
  watch, expected, model = Watch(), {}, 0
  for name, path in _paths(originals).items():
    params = None
    for how in LOADS if name in CHECKPOINTS else LOADS[:2]:
      params = _load(name, path, how)
    expected[name] = _digest(params)
    model = sum(x.nbytes for x in params.values())
  with open('/proc/self/statm') as file:
    space = int(file.read().split()[0]) * resource.getpagesize()
  limit = space + ADDRESS_SPACE
  resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
  for number, line in enumerate(sys.stdin):
    task = json.loads(line)
    if number % 100 == 0:
      gc.collect()
    before = _memory('VmRSS', reset=True)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    with watch:
      answer = _outcome(task, expected.get(task['name']))
    signal.setitimer(signal.ITIMER_PROF, 0)
    grown = _memory('VmHWM') - before
    if watch.seen or ran.exists():
      answer = 'code run', ', '.join(watch.seen)[:500] or 'the canary'
      ran.unlink(missing_ok=True)
    elif grown > 2 * task['size'] + model + SLACK:
      answer = 'memory', f'{grown / 1e6:.0f} MB, then {answer}'
    print(json.dumps(answer), file=answers, flush=True)


def _paths(folder):
  paths = {'npz': 'B.npz', 'vit_jax': 'own.npz', 'big_vision': 'scan.npz'}
  others = 'timm', 'hf', 'sharded', *CHECKPOINTS
  return {k: folder / k / paths.get(k, '.') for k in (*paths, *others)}


def _load(name, path, how):
  """Return {path: array}, loaded as a user loads the file."""
  from vit_jax import pretrained, tree
  from vit_jax.runs import stored
  from vit_jax.weights import surgery

  if how == 'params':
    return stored.load_params(path)[0]
  options = OPTIONS.get(name, {})
  options = {'num_heads': 4} if name == 'big_vision' else options
  if how == 'load':
    _, params = pretrained.load(path, report=None, **options)
    return {k: np.asarray(v) for k, v in tree.flatten(params).items()}
  init_from = surgery.InitFrom(str(path), options=options)
  surgery.describe(init_from)
  return surgery.read(init_from).params


def _digest(params):
  digest = hashlib.sha256()
  for name, array in sorted(params.items()):
    digest.update(f'{name} {array.dtype} {array.shape}'.encode())
    digest.update(np.ascontiguousarray(array))
  return digest.hexdigest()


def _outcome(task, expected):
  path = task['path']
  try:
    params = _load(task['name'], pathlib.Path(path), task['how'])
  except ValueError as error:
    message = str(error)
    text = message[:600]
    if os.path.basename(path) not in message and 'mutated' not in message:
      return 'refused without a name', text
    if len(message) > 8000 or message.count('\n') > 70:
      return 'refused at length', f'{len(message)} characters: {text}'
    return 'refused', text
  except BaseException as error:
    place = ''.join(traceback.format_exception(error)[-3:])
    return 'traceback', f'{type(error).__name__}: {place[-700:]}'
  same = _digest(params) == expected
  return ('harmless', '') if same else ('other values', '')


def _memory(key, reset=False):
  """Return bytes of VmRSS or VmHWM of this process."""
  if reset:
    pathlib.Path('/proc/self/clear_refs').write_text('5')
  with open('/proc/self/status') as file:
    found = next(line for line in file if line.startswith(key))
  return int(found.split()[1]) * 1024


def main() -> None:
  times, seed = (int(x) for x in (*sys.argv[1:], '1000', '0')[:2])
  counts: dict[str, collections.Counter[str]] = {}
  with (
    tempfile.TemporaryDirectory(prefix='weights_') as folder,
    contextlib.suppress(KeyboardInterrupt),
  ):
    for outcome in inject(pathlib.Path(folder), times, seed):
      name = outcome.original.replace('/', ' ', 1)
      counts.setdefault(name, collections.Counter())[outcome.what] += 1
      fine = outcome.what in ('refused', 'harmless')
      if not fine:
        print(*outcome, sep=' | ', flush=True)
  total = sum(counts.values(), collections.Counter())
  for name, count in {**counts, 'all': total}.items():
    print(f'{name}: {", ".join(f"{k} {v:,}" for k, v in count.items())}')
  used = resource.getrusage(resource.RUSAGE_SELF)
  child = resource.getrusage(resource.RUSAGE_CHILDREN)
  seconds = sum(x.ru_utime + x.ru_stime for x in (used, child))
  print(f'{seconds:.0f} CPU s')


if __name__ == '__main__':
  work() if '--worker' in sys.argv else main()

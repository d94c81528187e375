"""Damaged or late checkpoints, foreign files, full disks, lost workdirs."""

import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator

import numpy as np

from .harness import Case, fault
from .runs import PLAIN, Run, steps

EVERY = 5  # steps between checkpoints
LONG = '--config.total_steps=100000'


@fault(times=300, in_ci=20)
def flipped_bits(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """A flipped bit in a file of the newest checkpoint."""
  good, expected, restore = _two_checkpoints(folder / 'good')
  files = [x for x in sorted((good / '2').rglob('*')) if x.is_file()]
  files = [x for x in files if x.stat().st_size]
  for number in range(times):
    rng = random.Random(number)
    file = files[number % len(files)].relative_to(good)
    bit = rng.randrange(8 * (good / file).stat().st_size)
    workdir = folder / str(number)
    shutil.copytree(good, workdir / 'checkpoints')
    _flip(workdir / 'checkpoints' / file, bit)
    yield Case(f'{file}, bit {bit}', _lost(restore, workdir, expected))
    shutil.rmtree(workdir)


def _two_checkpoints(workdir):
  """Return checkpoints 1 and 2, their contents, and a function to restore."""
  import jax
  import jax.numpy as jnp
  import optax

  from vit_jax.parallel import sharding
  from vit_jax.runs.checkpoint import Checkpointer
  from vit_jax.step import TrainState

  def state(step):
    rng = np.random.default_rng(step)
    params = {
      'kernel': jnp.asarray(rng.normal(size=(40, 30)), jnp.float32),
      'bias': jnp.asarray(rng.normal(size=7), jnp.bfloat16),
    }
    return TrainState(
      step=jnp.asarray(step, jnp.int32),
      params=params,
      opt_state=optax.adam(0.1).init(params),
      rng=jax.random.key(step),
      ema=jax.tree.map(lambda x: 2 * x, params),
    )

  def numpy(state):
    state = state.__class__(
      **{**state.__dict__, 'rng': jax.random.key_data(state.rng)}
    )
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]

  def restore(workdir):
    checkpointer = Checkpointer(workdir, best_metric='x', keep_last=2)
    state, data = checkpointer.restore(abstract)
    checkpointer.close()
    return numpy(state), data['position']

  checkpointer = Checkpointer(workdir, best_metric='x', keep_last=2)
  for step in (1, 2):
    position = {'position': 8 * step}
    checkpointer.save(step, state(step), position, metrics={'x': 0.5})
  checkpointer.close()
  shapes = jax.eval_shape(lambda: state(1))
  mesh = sharding.make_mesh()
  abstract = sharding.annotate(shapes, sharding.infer(shapes, (), mesh))
  expected = [(numpy(state(step)), 8 * step) for step in (1, 2)]
  return workdir / 'checkpoints', expected, restore


def _flip(file, bit):
  data = bytearray(file.read_bytes())
  data[bit // 8] ^= 1 << bit % 8
  file.write_bytes(bytes(data))


def _lost(restore, workdir, expected):
  """Return '' if one of the expected checkpoints is restored bit by bit."""
  try:
    found = restore(workdir)
  except Exception as error:
    return f'{type(error).__name__}: {" ".join(str(error).split()):.100}'
  if found not in expected:
    return 'wrong values without a message'
  names = {path.name for path in (workdir / 'checkpoints').iterdir()}
  return '' if names & {'2', 'damaged-2'} else f'deleted: {names}'


KINDS = {
  'values': 'params/ocdbt.process_0/d/*',
  'index': 'train/manifest.ocdbt',
  'tree': 'params/_METADATA',
  'position': 'data/metadata',
  'metrics': 'metrics/metrics',
  'checksums': 'checksums/metadata',
  'root': '_CHECKPOINT_METADATA',
}


def _empty(file):
  file.write_bytes(b'')


def _truncate(file):
  os.truncate(file, file.stat().st_size // 2)


def _flip_one(file):
  _flip(file, 8 * (file.stat().st_size // 3) + 2)


def _delete(file):
  file.unlink()


def _forbid(file):
  file.chmod(0)


@fault(times=35, in_ci=3)
def damaged_files(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """A file of the newest checkpoint emptied, cut, changed, deleted, locked."""
  good, expected, restore = _two_checkpoints(folder / 'good')
  ways = (_truncate, _flip_one, _delete, _empty, _forbid)
  cases = [(kind, way) for way in ways for kind in KINDS][:times]
  for kind, way in cases:
    workdir = folder / f'{kind}{way.__name__}'
    shutil.copytree(good, workdir / 'checkpoints')
    found = (workdir / 'checkpoints' / '2').glob(KINDS[kind])
    files = sorted(found, key=lambda file: file.stat().st_size)
    if files:  # Older versions have no checksums.
      way(files[-1])
    name = f'{kind}, {way.__name__.strip("_")}'
    if way is _forbid and files and os.access(files[-1], os.R_OK):
      yield Case(name, skipped='root reads files without permission')
      continue
    lost = _lost(restore, workdir, expected)
    if way is _forbid and 'permission' in lost:
      lost = ''  # Nothing is lost: the user can give the permission back.
    yield Case(name, lost)


FOREIGN: dict[str, Callable[[pathlib.Path], object]] = {
  'an empty folder 7': lambda x: (x / '7').mkdir(),
  'a file 7': lambda x: (x / '7').write_text('notes'),
  'a folder backup': lambda x: (x / 'backup').mkdir(),
  'a folder 12 (copy)': lambda x: shutil.copytree(x / '1', x / '12 (copy)'),
  'a folder 100.bak': lambda x: shutil.copytree(x / '2', x / '100.bak'),
  'a copy of 1 named 9': lambda x: shutil.copytree(x / '1', x / '9'),
  **{
    f'a position {position}': lambda x, position=position: (
      x / '2' / 'data' / 'metadata'
    ).write_text(json.dumps(position))
    for position in (
      *({'position': p} for p in (-16, 'x', None, 7, 2**70, 1.5, [16])),
      *({}, [], 'x'),
    )
  },
}


@fault(times=len(FOREIGN), in_ci=4)
def foreign_files(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """Foreign files among the steps, and impossible data positions."""
  good, expected, restore = _two_checkpoints(folder / 'good')
  for number, (name, put) in enumerate([*FOREIGN.items()][:times]):
    workdir = folder / str(number)
    shutil.copytree(good, workdir / 'checkpoints')
    put(workdir / 'checkpoints')
    yield Case(name, _lost(restore, workdir, expected))


@fault(times=15, in_ci=2)
def lag_of_checkpoints(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """Kill -9 right after the line of a step: the number of lost steps."""
  for number in range(times):
    rng, lag = random.Random(number), (2, 0, None)[number % 3]
    workdir = folder / str(number)
    flags = [LONG, f'--config.checkpoint.every_steps={EVERY}']
    if lag is not None:
      flags.append(f'--config.checkpoint.max_lag_steps={lag}')
    wanted = rng.randint(12, 60)
    run = Run(folder, workdir, *flags, config=PLAIN)
    _wait_for_step(run, wanted)
    run.kill()
    reached, newest = _last_step(run), max(steps(workdir), default=0)
    bound = 2 * EVERY if lag is None else EVERY + lag
    lost = f'{reached - newest} steps, the bound is {bound}'
    is_kept = reached >= wanted and reached - newest <= bound
    yield Case(
      f'max_lag_steps={lag}, killed after {reached}, resumes at {newest}',
      '' if is_kept else lost,
    )
    shutil.rmtree(workdir)


def _last_step(run):
  """Return the step of the last line of progress."""
  found = re.findall(r'^ *(\d+)/100000 loss', run.output, re.MULTILINE)
  return int(found[-1]) if found else 0


@fault(times=8, in_ci=2)
def vanished_workdirs(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """A workdir that is moved or deleted while the run writes to it."""
  for number in range(times):
    workdir, moved = folder / f'run{number}', folder / f'moved{number}'
    run, wanted = Run(folder, workdir, LONG, config=PLAIN), 11 + number
    _wait_for_step(run, wanted)
    workdir.rename(moved)
    if number % 2:
      shutil.rmtree(moved)
    lost, message = _one_message(run, 'is gone')
    if workdir.exists():
      found = [x.relative_to(workdir) for x in workdir.rglob('*')]
      lost = lost or f'created again: {sorted(map(str, found))}'
    if not lost and moved.exists():
      lost = _not_resumed(Run(folder, moved, LONG, config=PLAIN))
    yield Case(f'after step {wanted}', lost, message)


def _wait_for_step(run, step):
  run.wait_for(lambda: _last_step(run) >= step)


def _not_resumed(run):
  """Kill a run when it has resumed; return an error if it does not resume."""
  resumes = run.wait_for(lambda: 'resumed at step' in run.output)
  run.kill()
  return '' if resumes else f'it does not resume: {run.output[-200:]}'


def _one_message(run, expected):
  """Return (error in the end of a run or '', its message)."""
  try:
    status = run.finish(120)
  except subprocess.TimeoutExpired:
    return 'it hangs', ''
  lines = run.output.splitlines()
  kept = [line for line in lines if not re.match(r' *\d+/100000 ', line)]
  message = kept[-1] if kept else ''
  if 'Traceback' in run.output:
    return f'{len(kept)} lines with tracebacks', message
  if status != 1 or expected not in message:
    return f'status {status}: {message:.300}', message
  return '', message


@contextlib.contextmanager
def _small_disk(folder, size):
  """Mount a disk in memory; yield whether mounting is permitted."""
  folder.mkdir()
  options = ['-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', str(folder)]
  try:
    done = subprocess.run(['mount', *options], capture_output=True)
    is_mounted = done.returncode == 0
  except OSError:
    is_mounted = False
  try:
    yield is_mounted
  finally:
    if is_mounted:
      subprocess.run(['umount', '-l', str(folder)], check=True)


@fault(times=6, in_ci=2)
def full_disks(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """A disk that is full, or becomes read-only, while the run writes to it."""
  for number in range(times):
    disk, flags = folder / f'disk{number}', ['--config.checkpoint.keep_last=99']
    is_full = number % 2 == 0
    # The first disk is too small for a checkpoint, the last holds several.
    size = f'{300 + 450 * number}k' if is_full else '50m'
    name = f'{size} disk' if is_full else 'read-only'
    with _small_disk(disk, size) as is_mounted:
      if not is_mounted:
        yield Case(name, skipped='mounting a disk is not permitted')
        continue
      run = Run(folder, disk / 'run', LONG, *flags, config=PLAIN)
      if is_full:
        expected = 'is full'
      else:
        _wait_for_step(run, 12)
        expected = 'cannot be written to any more'
        while not _remount(disk, 'ro') and run.process.poll() is None:
          pass
      lost, message = _one_message(run, expected)
      if not lost:
        _remount(disk, 'rw,size=50m')
        if steps(disk / 'run'):
          again = Run(folder, disk / 'run', LONG, *flags, config=PLAIN)
          lost = _not_resumed(again)
      yield Case(name, lost, message)


def _remount(disk, options):
  """Return whether the disk got the new options; open files prevent it."""
  command = ['mount', '-o', f'remount,{options}', str(disk)]
  return subprocess.run(command, capture_output=True).returncode == 0

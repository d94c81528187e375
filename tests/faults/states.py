"""States with NaN or Inf, rollbacks, and signals."""

import os
import pathlib
import random
import time
from collections.abc import Iterator

import numpy as np

from .harness import Case, fault
from .kills import wait_for_random_moment
from .runs import (
  CONFIG,
  Run,
  difference,
  everything,
  hosts,
  steps,
  undisturbed,
)

# An objective whose loss is NaN for micro-batches of 4 images whose labels have
# a given sum. These are 1 in 30.
_NAN_IF = """
import jax.numpy as jnp

def nan_if(model, *, preprocess, objective, label_sum):
  inner = objective(model, preprocess=preprocess)

  def loss_fn(params, batch, rng):
    loss, metrics = inner(params, batch, rng)
    factor = jnp.where(batch['label'].sum() == label_sum, jnp.nan, 1.0)
    return loss * factor, metrics

  return loss_fn
"""
_XENT = "target='vit_jax.objectives.classification.softmax_xent'"
_NAN_CONFIG = CONFIG.replace(
  _XENT, f"target='bad.nan_if', label_sum=11, objective=dict({_XENT})"
)


_ROLLBACK = ('--config.on_nan=rollback', '--config.max_rollbacks=9')


def _with_nan(folder):
  """Return options of a Run whose loss is NaN for some batches."""
  (folder / 'bad.py').write_text(_NAN_IF)
  return {'config': _NAN_CONFIG, 'env': _path(folder)}


def _path(folder):
  """Return the environment in which modules of the folder can be imported."""
  paths = [str(folder), *filter(None, [os.environ.get('PYTHONPATH')])]
  return {'PYTHONPATH': os.pathsep.join(paths)}


def _not_finite(workdir):
  """Return the paths of all arrays in checkpoints that have NaN or Inf."""
  return [
    f'{step}/{path}'
    for step in steps(workdir)
    for path, value in everything(workdir, step).items()
    if getattr(value, 'dtype', np.dtype(int)).kind == 'f'
    and not np.isfinite(value).all()
  ]


# A learning rate that overflows from some step on.
_OVERFLOWING = """
import dataclasses
import jax.numpy as jnp

@dataclasses.dataclass(frozen=True)
class Overflowing:
  start: int
  overflows: bool = True

  def __call__(self, timeline):
    last = self.start if self.overflows else timeline.total_steps
    return lambda step: jnp.where(step < last, 1e-3, jnp.inf)
"""


@fault(times=3, in_ci=1)
def rates_that_overflow(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """Learning rate that overflows, with a checkpoint after each step."""
  config = CONFIG.replace(
    'lr=1e-2, warmup_steps=2', "target='rates.Overflowing', start=0"
  )
  (folder / 'rates.py').write_text(_OVERFLOWING)
  options = {'config': config, 'env': _path(folder)}
  often = [f'--config.{x}.every_steps=1' for x in ('checkpoint', 'evals.val')]
  for start in (0, 3, 6)[:times]:
    workdir, lost = folder / f'overflow{start}', ''
    flags = [*often, f'--config.schedule.start={start}']
    flags.append(f'--config.total_steps={start + 3}')
    run = Run(folder, workdir, *flags, **options)
    status = run.finish()
    message = run.output.partition('NonFiniteError: ')[2]
    if status != 1 or not message or 'Traceback' in run.output:
      lost = run.output[-300:]
    elif bad := _not_finite(workdir):
      lost = f'NaN or Inf is saved in {len(bad)} arrays'
    else:
      lower = ['--config.schedule.overflows=false']
      if steps(workdir):  # it resumes and is compared with the last start
        lower.append('--allow_changes=schedule.overflows')
      again = Run(folder, workdir, *flags, *lower, **options)
      if again.finish():
        lost = f'a lower rate does not help: {again.output[-300:]}'
    yield Case(f'in step {start + 1}', lost, message)


@fault(times=20, in_ci=2)
def killed_with_rollbacks(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """Kill -9 of a run with rollbacks, then the same command again."""
  options = _with_nan(folder)
  straight = folder / 'straight'
  begin = time.monotonic()
  run = Run(folder, straight, *_ROLLBACK, **options)
  if run.finish():
    yield Case('never killed', run.output[-500:])
    return
  length = time.monotonic() - begin
  lines = run.output.splitlines()
  message = '\n'.join(x for x in lines if x.startswith('rollback'))
  yield Case('never killed', '' if message else 'no rollback', message)
  for number in range(times - 1):
    moment = random.Random(number).uniform(0.3, 1) * length
    workdir = folder / f'killed{number}'
    run = Run(folder, workdir, *_ROLLBACK, **options)
    run.wait_for(lambda: False, moment)
    run.kill()
    run = Run(folder, workdir, *_ROLLBACK, **options)
    status = run.finish()
    lost = run.output[-500:] if status else difference(straight, workdir)
    yield Case(f'killed after {moment:.1f} s', lost)


@fault(times=2)
def rollbacks_of_hosts(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """NaN on two hosts: both return to the same checkpoint."""
  options = _with_nan(folder)
  for number in range(times):
    workdir = folder / f'hosts{number}'
    with hosts(folder, workdir, 2, *_ROLLBACK, **options) as processes:
      statuses = [process.finish() for process in processes]
    lost = ''
    if any(statuses):
      lost = f'{statuses}: {processes[0].output[-500:]}'
    elif not everything(workdir, steps(workdir)[-1]).get('data/rollbacks'):
      lost = 'the checkpoint has no rollbacks'
    elif bad := _not_finite(workdir):
      lost = f'NaN or Inf is saved in {len(bad)} arrays'
    yield Case('2 hosts', lost)


@fault(times=40, in_ci=2)
def interrupted_twice(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """Ctrl-C twice at random moments, then the same command again."""
  for number in range(times):
    rng = random.Random(number)
    flag = f'--config.data.num_workers={number % 2 * 2}'
    workdir = folder / f'interrupted{number}'
    run = Run(folder, workdir, flag)
    moment = wait_for_random_moment(run, rng)
    run.press_ctrl_c()
    run.wait_for(lambda: False, rng.choice([0.01, 0.1, 1]))
    run.press_ctrl_c()
    status, output = run.finish(30), run.output
    lost = ''
    if 'Traceback' in output or status not in (0, 130):
      lost = f'status {status}: {output[-700:]}'
    elif status and 'SIGINT: ' not in output:
      lost = f'silent: {output[-300:]}'
    else:
      again = Run(folder, workdir, flag)
      status = again.finish()
      end = undisturbed()
      lost = again.output[-500:] if status else difference(end, workdir)
    yield Case(f'at {moment}', lost, output[-300:] if lost else '')


@fault()
def too_little_memory(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """Training step that needs more memory than the device has."""
  del times
  resize = "transforms=[dict(target=t + 'Resize', size=512)]"
  config = (
    CONFIG.replace('size=8', 'size=512')
    .replace('batch_size=200', f'batch_size=200, {resize}')
    .replace('patch_size=4', 'patch_size=1')
  )
  run = Run(folder, folder / 'large', config=config)
  status, lost = run.finish(), ''
  _, _, message = run.output.partition('OutOfMemoryError: ')
  if status != 1 or 'Traceback' in run.output:
    lost = run.output[-500:]
  for part in ('per device', 'temporaries', 'batch_size=', 'accum', 'remat='):
    if part not in message:
      lost = lost or f'the message lacks {part}'
  yield Case('step', lost, message)

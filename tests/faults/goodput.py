"""Fraction of the wall time spent in steps when a run is killed often."""

import pathlib
import re
import time
from collections.abc import Iterator

from vit_jax.runs.metrics import read_records

from .harness import Case, fault
from .runs import CONFIG, Run

# Steps of about 30 ms on two cores, longer than it takes to load a batch, and a
# checkpoint about every six seconds.
_CONFIG = (
  CONFIG.replace("Classification', every_steps=5,", "Classification',")
  .replace('every_steps=5, keep_last=2', 'every_steps=200, keep_last=2')
  .replace("best_metric='val/accuracy'", 'best_metric=None')
  .replace('total_steps=40', 'total_steps=1_000_000')
  .replace('log_every_steps=3', 'log_every_steps=20')
  .replace('accum_steps=2', 'accum_steps=1')
  .replace('ema_decay=0.9', 'ema_decay=None')
  .replace('width=32', 'width=128')
  .replace('mlp_dim=64', 'mlp_dim=512')
  .replace('batch_size=8,', 'batch_size=64,')
)
_TRANSFORMS = '--config.data.transforms=()'


@fault(times=5, in_ci=1)
def killed_every_minute(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """Kill -9 every minute: goodput of all processes.

  Goodput is the time in steps whose results were kept, divided by the wall time
  from the start of the first process to the end of the last. If a restart takes
  R and a process lives T seconds, at least 1 - 2 R / T is expected: 90% for a
  restart of 3 s each minute. As much time as for restarts is left for lost
  work, saving, waiting for data and everything else.

  A single kill comes after 30 steps, and goodput is not compared, because it
  depends on the machine. The steps that a kill loses and the phases of the wall
  time are always checked.
  """
  is_long, flags, every = times > 1, [_TRANSFORMS], 200
  if is_long:  # Compile first, so that all measured starts use the cache.
    _start(Run(folder, folder / 'compiled', *flags, config=_CONFIG)).kill()
  else:
    every = 10
    flags += [f'--config.checkpoint.every_steps={every}']
    flags += ['--config.log_every_steps=5']
  workdir, lost, restarts, reached = folder / 'run', [], [], 0
  begin = time.monotonic()
  for number in range(times + 1):
    started = time.monotonic()
    run = _start(Run(folder, workdir, *flags, config=_CONFIG))
    restarts.append(time.monotonic() - started)
    if number:
      lost += _lost_steps(run, reached, 2 * every)
    if is_long:
      run.wait_for(lambda: False, started + 60 - time.monotonic())
    else:
      wanted = reached + 3 * every
      run.wait_for(lambda wanted=wanted: _last_step(workdir) >= wanted)
    if number < times:
      run.kill()
      reached = _last_step(workdir)
  run.process.terminate()
  run.finish()
  wall, restart = time.monotonic() - begin, sum(restarts) / len(restarts)
  record = read_records(workdir)[-1]
  goodput, least = record['seconds/steps'] / wall, 1 - 2 * restart / 60
  if is_long and goodput < least:
    lost.append(f'goodput {goodput:.1%}, expected at least {least:.1%}')
  # The records lack imports, and up to a second before each kill.
  missing = wall - sum(v for k, v in record.items() if k.startswith('seconds/'))
  if not 0 <= missing <= len(restarts) * (restart + 2):
    lost.append(f'{missing:.1f} of {wall:.1f} s are missing in the phases')
  lines = [x for x in run.output.splitlines() if 'goodput' in x]
  fractions = re.findall(r'([\d.]+)%', ''.join(lines))
  # Each fraction is rounded to 0.1%.
  if abs(sum(map(float, fractions)) - 100) > 0.05 * len(fractions):
    lost.append(f'the phases do not add up to 100%: {lines}')
  done = f'{times} kills in {wall:.0f} s, restarts of {restart:.1f} s'
  message = '\n'.join(
    [f'goodput {goodput:.1%}; last lines of the run:', *lines]
  )
  yield Case(done, '; '.join(lost), message)


def _start(run):
  """Wait for the first step of a run and return the run."""
  assert run.wait_for(lambda: 'first step' in run.output), run.output
  return run


def _last_step(workdir):
  """Return the step of the last record of a run; 0 if there is none."""
  records = read_records(workdir)
  return records[-1]['step'] if records else 0


def _lost_steps(run, reached, bound):
  """Return errors in the step at which a killed run resumes."""
  found = re.search(r'resumed at step (\d+)', run.output)
  if not found:
    return [f'not resumed: {run.output[-300:]}']
  steps = reached - int(found[1])
  return [f'{steps} steps, the bound is {bound}'] if steps > bound else []

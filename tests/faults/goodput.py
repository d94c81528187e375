"""The part of the wall time that goes into steps when a run is killed often."""

import pathlib
import time
from collections.abc import Iterator

from vit_jax.metrics import read_records

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

  It is the time in steps whose results were kept, divided by the wall time from
  the start of the first process to the end of the last. If a restart takes R
  and a process lives T seconds, at least 1 - 2 R / T is expected: 90% for a
  restart of 3 s each minute. As much time as for restarts is left for lost
  work, saving, waiting for data and everything else.
  """
  every_s = 60 if times > 1 else 15

  def first_step(run):
    assert run.wait_for(lambda: 'first step' in run.output), run.output

  run = Run(folder, folder / 'compiled', _TRANSFORMS, config=_CONFIG)
  first_step(run)
  run.kill()
  workdir, restarts, begin = folder / 'run', [], time.monotonic()
  for number in range(times + 1):
    started = time.monotonic()
    run = Run(folder, workdir, _TRANSFORMS, config=_CONFIG)
    first_step(run)
    restarts.append(time.monotonic() - started)
    run.wait_for(lambda: False, started + every_s - time.monotonic())
    if number < times:
      run.kill()
  run.process.terminate()
  run.finish()
  wall, restart = time.monotonic() - begin, sum(restarts) / len(restarts)
  record = read_records(workdir)[-1]
  counted = sum(v for k, v in record.items() if k.startswith('seconds/'))
  goodput = record['seconds/steps'] / wall
  least = 1 - 2 * restart / every_s
  said = [x for x in run.output.splitlines() if 'goodput' in x]
  lost = '' if goodput >= least and said else f'expected at least {least:.1%}'
  # Importing packages, up to a second before each kill: not in the records.
  if not lost and wall - counted > len(restarts) * (restart + 2):
    lost = f'{wall - counted:.1f} s are missing in the account'
  yield Case(
    f'{times} kills, one each {every_s} s, restarts of {restart:.1f} s',
    lost and f'goodput {goodput:.1%}; {lost}',
    f'goodput {goodput:.1%} of {wall:.0f} s ({times} kills, one each {every_s} '
    f's, restarts of {restart:.1f} s). Last lines of the run:\n'
    + '\n'.join(said),
  )

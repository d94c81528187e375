"""Runs that are killed or stopped at any moment, up to three times in a row."""

import pathlib
import random
import signal
import time
from collections.abc import Callable, Iterator

from .harness import Case, fault
from .runs import Run, difference, undisturbed

# Moments of a run: a function (run, random step) -> whether the moment has
# come, and the largest delay of the kill after it in seconds.
_MOMENTS: dict[str, tuple[Callable[[Run, int], bool], float]] = {
  'the start': (lambda run, step: True, 5),
  'compilation': (lambda run, step: 'compiling' in run.output, 3),
  'a record': (lambda run, step: _records(run) >= step // 2, 0.1),
  # The record of a step is written before the evaluation of that step begins.
  'an evaluation': (
    lambda run, step: f'{15 * max(1, step // 15)}/40 loss' in run.output,
    0.05,
  ),
  'a save': (lambda run, step: _saves(run, step - step % 5), 0.1),
  'the end': (lambda run, step: '40/40' in run.output, 1.5),
}


@fault(times=50, in_ci=2)
def killed_at_random(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """Kill -9 or SIGTERM at random moments, then the same command again."""
  number = 0
  while number < times:
    rng = random.Random(number)
    workers = rng.choice((0, 2))
    flag, workdir = f'--config.data.num_workers={workers}', folder / f'{number}'
    done = []
    for _ in range(min(rng.choice((1, 2, 3)), times - number)):
      run = Run(folder, workdir, flag)
      done.append(f'{workers} workers, {_end(run, rng)}')
    run = Run(folder, workdir, flag)
    lost = (
      run.output[-500:] if run.finish() else difference(undisturbed(), workdir)
    )
    for name in done:
      yield Case(name, lost)
    number += len(done)


def wait_for_random_moment(run: Run, rng: random.Random) -> str:
  """Wait for a random moment of a run and return its description."""
  moment, step = rng.choice(list(_MOMENTS)), rng.randint(5, 40)
  is_there, late = _MOMENTS[moment]
  run.wait_for(lambda: is_there(run, step), poll_s=0.002)
  time.sleep(rng.uniform(0, late))
  return f'{moment}, {_records(run)} records written'


def _end(run, rng):
  """End a run at a random moment; return a description of the end."""
  at = wait_for_random_moment(run, rng)
  if rng.random() < 0.25:
    run.process.send_signal(signal.SIGTERM)
    return f'SIGTERM at {at}, status {run.finish()}'
  run.kill()
  return f'kill -9 at {at}'


def _records(run):
  """Return the number of records, damaged ones too."""
  file = run.workdir / 'metrics.jsonl'
  return file.read_bytes().count(b'\n') if file.exists() else 0


def _saves(run, step):
  """Return whether the checkpoint of a step was begun."""
  return any((run.workdir / 'checkpoints').glob(f'{step}*'))

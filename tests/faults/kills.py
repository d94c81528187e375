"""Kills by SIGKILL at random moments."""

import pathlib
import random
import time
from collections.abc import Iterator

from .harness import Case, fault
from .runs import Run, difference

STEPS = 40


@fault(times=50, in_ci=3)
def killed_at_random(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """Kill -9 of a run at a random moment, then the same command again."""
  straight = folder / 'straight'
  begin = time.monotonic()
  Run(folder, straight).finish()
  length = time.monotonic() - begin
  for number in range(times):
    rng = random.Random(number)
    workers = number % 2 * 2
    flags = [f'--config.data.num_workers={workers}']
    workdir, moments = folder / f'killed{number}', []
    run = Run(folder, workdir, *flags)
    moments.append(rng.uniform(0.2, 1) * length)
    run.wait_for(lambda: False, moments[-1])
    run.kill()
    run = Run(folder, workdir, *flags)
    status = run.finish()
    lost = difference(straight, workdir) if status == 0 else run.output[-500:]
    yield Case(f'{workers} workers, after {moments[0]:.1f} s', lost)

"""Runs of many steps: the resources of a process may not grow."""

import contextlib
import os
import pathlib
import re
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .harness import Case, fault
from .runs import CONFIG, Run

# Largest growth from the first to the last third of a run: of the median for
# memory, of the minimum for the others, because a save opens files and about 20
# threads for a while. In 100,000 steps, a leak of 1 kB per step is 67 MB, and a
# leak of one thread per save is 133 threads.
_LIMITS = {
  'MB of the host': 40,
  'MB of a worker': 20,
  'file descriptors': 10,
  'threads': 25,
  'segments of shared memory': 10,
}
_SLOWER = 1.3  # largest ratio of the CPU time per step of these thirds

_EVERY = 500  # steps between checkpoints, and between evaluations

# The smallest model with a step of about a millisecond.
_CONFIG = (
  CONFIG.replace('width=32', 'width=8')
  .replace('depth=2', 'depth=1')
  .replace('mlp_dim=64', 'mlp_dim=8')
  .replace('accum_steps=2', 'accum_steps=1')
  .replace('every_steps=5', f'every_steps={_EVERY}')
  .replace('log_every_steps=3', 'log_every_steps=50')
)


class Sample(NamedTuple):
  """State of the processes of a run at one moment."""

  step: int
  cpu_s: float
  host_mb: float
  workers_mb: tuple[float, ...]
  descriptors: int
  threads: int
  shared: int


@fault(times=100_000, in_ci=2_000)
def long_run(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """Tiny steps with records, checkpoints and evaluations; 0 and 2 workers."""
  is_long = times >= 10_000
  for workers in (0, 2) if is_long else (2,):
    workdir = folder / f'long{workers}'
    run = Run(
      folder,
      workdir,
      f'--config.total_steps={times}',
      f'--config.data.num_workers={workers}',
      config=_CONFIG,
    )
    # Skip compilation, the first save and the first evaluation.
    warm = min(times // 5, 2 * _EVERY)
    samples = _watch(run, warm, every_s=2 if is_long else 0.2)
    if run.process.returncode:
      yield Case(f'{workers} workers', run.output[-500:])
      continue
    growth = _growth(samples)
    per_step, slower = _slower(samples)
    lost = [
      f'{name} grew by {growth[name]:.3g}'
      for name, limit in _LIMITS.items()
      if growth.get(name, 0) > limit
    ]
    if is_long and slower > _SLOWER:  # short runs are too noisy
      lost.append(f'a step takes {slower:.2f} times as long at the end')
    found = ', '.join(f'{x:+.3g} {name}' for name, x in growth.items())
    yield Case(
      f'{times:,} steps, {workers} workers',
      '; '.join(lost),
      f'{workers} workers: {found}; {1000 * per_step:.2f} ms of CPU per step, '
      f'{slower:.2f} times as long at the end as at the beginning',
    )


def _steps_done(workdir):
  """Return the last step in metrics.jsonl; read only the end of the file."""
  path = workdir / 'metrics.jsonl'
  if not path.exists():
    return 0
  with path.open('rb') as file:
    file.seek(max(0, path.stat().st_size - 4096))
    found = re.findall(rb'"step": (\d+)', file.read())
  return int(found[-1]) if found else 0


def _watch(run, warm, every_s):
  """Return the samples of a run from this step to its end."""
  run.wait_for(lambda: _steps_done(run.workdir) >= warm, 3600)
  samples = []
  while run.process.poll() is None:
    with contextlib.suppress(OSError):  # a process has just ended
      samples.append(_sample(run.process.pid, run.workdir))
    time.sleep(every_s)
  return samples[:-1]  # during the last one the processes may end


def _sample(pid, workdir):
  proc = pathlib.Path('/proc') / str(pid)
  workers = children(pid)
  stat = (proc / 'stat').read_text().rpartition(')')[2].split()
  return Sample(
    step=_steps_done(workdir),
    cpu_s=(int(stat[11]) + int(stat[12])) / os.sysconf('SC_CLK_TCK'),
    host_mb=_resident_mb(pid),
    workers_mb=tuple(map(_resident_mb, workers)),
    descriptors=len(list((proc / 'fd').iterdir())),
    threads=len(list((proc / 'task').iterdir())),
    shared=len(set().union(*map(_shared, (pid, *workers)))),
  )


def _shared(pid):
  """Return the segments of shared memory that a process maps."""
  maps = pathlib.Path(f'/proc/{pid}/maps').read_text()
  return set(re.findall(r'/dev/shm/\S+', maps))


def children(pid: int) -> list[int]:
  """Return the processes that a process and its children have started."""
  parents = {}
  for folder in pathlib.Path('/proc').glob('[0-9]*'):
    with contextlib.suppress(OSError):  # it has just ended
      # pid (name) state parent ...
      stat = (folder / 'stat').read_text().rpartition(')')[2].split()
      parents.setdefault(int(stat[1]), []).append(int(folder.name))
  found = parents.get(pid, [])
  for child in found:  # the list grows in the loop
    found += parents.get(child, [])
  return found


def _resident_mb(pid):
  pages = pathlib.Path(f'/proc/{pid}/statm').read_text().split()[1]
  return int(pages) * os.sysconf('SC_PAGE_SIZE') / 1e6


def _growth(samples):
  """Return {name: growth from the first third to the last one}."""
  if len(samples) < 6:
    raise ValueError(f'There are only {len(samples)} samples of the run.')

  def of(values, typical=np.min):
    third = len(values) // 3
    return float(typical(values[-third:]) - typical(values[:third]))

  found = {
    'MB of the host': of([s.host_mb for s in samples], np.median),
    'file descriptors': of([s.descriptors for s in samples]),
    'threads': of([s.threads for s in samples]),
    'segments of shared memory': of([s.shared for s in samples]),
  }
  largest = [max(s.workers_mb) for s in samples if s.workers_mb]
  if len(largest) >= 6:
    found['MB of a worker'] = of(largest, np.median)
  return found


def _slower(samples):
  """Return (CPU time per step, its ratio of the last third to the first).

  Wall time would depend on the load of the machine.
  """
  third = len(samples) // 3

  def per_step(first, last):
    return (last.cpu_s - first.cpu_s) / max(1, last.step - first.step)

  begin = per_step(samples[0], samples[third])
  return per_step(samples[0], samples[-1]), (
    per_step(samples[-1 - third], samples[-1]) / begin
  )

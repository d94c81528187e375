"""Processes of a run that are killed, stopped, late, or unlike the others.

Each host is a process of this machine; they communicate over loopback.
"""

import contextlib
import os
import pathlib
import re
import signal
import time
from collections.abc import Iterator

from vit_jax.evals.classification import Classification

from .harness import Case, fault
from .runs import CONFIG, Run, difference, hosts, join, steps, undisturbed

LIMIT_S = 60  # largest time from the fault to the end of every host
STOP_S = 65  # longer than the silence after which the other hosts end
# Stack traces of Python, C++ and faulthandler.
_TRACE = re.compile(r'Traceback|^ +@ +0x|Fatal Python error|\*\*\* ', re.M)
_LOST = r'has been silent for 30 s|is gone'
_LOG = '--config.log_every_steps=5'  # as often as checkpoints


class Observed(Classification):
  """Classification that touches a file first and takes a second longer."""

  def run(self, params):
    if path := os.environ.get('VIT_JAX_EVALUATING'):
      pathlib.Path(path).touch()
      time.sleep(1)
    return super().run(params)


_CONFIG = CONFIG.replace(
  'vit_jax.evals.classification.Classification', 'tests.faults.hosts.Observed'
)

# Moments of a fault: a function (runs, workdir) -> whether it has come.
_MOMENTS = {
  'setup': lambda runs, _: all('[Gloo]' in run.output for run in runs),
  'compiling': lambda runs, _: 'compiling ...' in runs[0].output,
  'training': lambda _, workdir: steps(workdir),
  'evaluating': lambda _, workdir: (workdir.parent / 'evaluating').exists(),
  'saving': lambda _, workdir: any(
    '-tmp' in path.name for path in workdir.glob('checkpoints/*')
  ),
}

_KILLS = (
  (2, 0, 'training'),
  (4, 2, 'saving'),
  (2, 1, 'evaluating'),
  (4, 0, 'compiling'),
  (4, 1, 'training'),
  (4, 3, 'setup'),
  (2, 0, 'saving'),
  (2, 1, 'compiling'),
  (4, 0, 'evaluating'),
  (2, 1, 'training'),
  (4, 3, 'evaluating'),
  (2, 0, 'setup'),
)
_STOPS = (
  (2, 1, 'training'),
  (2, 0, 'saving'),
  (4, 0, 'training'),
  (4, 3, 'evaluating'),
)


@fault(times=len(_KILLS), in_ci=0)
def host_killed(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """Kill -9 of one of 2 or 4 hosts, including the first."""
  for number, (count, victim, moment) in enumerate(_KILLS[:times]):
    workdir = folder / f'killed{number}' / 'run'
    with _at(folder, workdir, count, moment) as runs:
      begin = time.monotonic()
      runs[victim].kill()
      others = runs[:victim] + runs[victim + 1 :]
      lost = _not_ended(others, rf'Host {victim}\b.*({_LOST})', begin)
      message = others[0].output.strip().rpartition('\n')[-1]
    yield Case(
      f'host {victim} of {count}, {moment}',
      lost or _not_resumed(folder, workdir, count),
      message,
    )


@fault(times=2, in_ci=0)
def host_killed_while_joining(
  folder: pathlib.Path, times: int
) -> Iterator[Case]:
  """Kill -9 of a host while others wait for the last one; it starts again."""
  for victim in (1, 0)[:times]:
    workdir = folder / f'joining{victim}'
    flags = join(4)
    with contextlib.ExitStack() as stack:

      def start(i, workdir=workdir, flags=flags, stack=stack):
        run = Run(folder, workdir, *flags[i], _LOG, config=_CONFIG)
        stack.callback(run.kill)
        return run

      runs = [start(i) for i in range(3)]
      for run in runs:
        run.wait_for(lambda run=run: 'is waiting for the others' in run.output)
      runs[victim].kill()
      runs[victim] = again = start(victim)
      # Else the last host could join first, and count it as there.
      again.wait_for(
        lambda run=again: 'is waiting for the others' in run.output
      )
      lost = _unfinished([*runs, start(3)])
    yield Case(
      f'host {victim} of 4', lost or difference(_straight(folder, 4), workdir)
    )


@fault(times=len(_STOPS), in_ci=0)
def host_stopped(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """SIGSTOP of a host for 65 s or until the others were restarted."""
  for number, (count, victim, moment) in enumerate(_STOPS[:times]):
    workdir = folder / f'stopped{number}' / 'run'
    with _at(folder, workdir, count, moment) as runs:
      begin = time.monotonic()
      runs[victim].process.send_signal(signal.SIGSTOP)
      others = runs[:victim] + runs[victim + 1 :]
      lost = _not_ended(others, rf'Host {victim}\b.*({_LOST})', begin)
      lost = lost or _not_resumed(folder, workdir, count)
      time.sleep(max(0, begin + STOP_S - time.monotonic()))
      before = _files(workdir)
      runs[victim].process.send_signal(signal.SIGCONT)
      lost = lost or _not_ended(
        [runs[victim]], f'Host {victim} was stopped for', time.monotonic()
      )
      if not lost and _files(workdir) != before:
        lost = 'the stopped host has written into the resumed run'
      message = runs[victim].output.strip().rpartition('\n')[-1]
    yield Case(f'host {victim} of {count}, {moment}', lost, message)


@fault(times=2, in_ci=0)
def started_again(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """SIGSTOP of a run, which is started again to its end, then SIGCONT."""
  for number in range(times):
    workdir = folder / f'again{number}'
    first = Run(folder, workdir)
    moment = ('saving', 'training')[number % 2]
    first.wait_for(lambda w=workdir, m=moment: _MOMENTS[m]((), w))
    first.process.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    try:
      lost = _unfinished([Run(folder, workdir)])
      time.sleep(max(0, begin + 12 - time.monotonic()))
      first.process.send_signal(signal.SIGCONT)
      cause = 'was started again by process'
      lost = lost or _not_ended([first], cause, time.monotonic())
    finally:
      first.kill()
    yield Case(
      moment,
      lost or difference(undisturbed(), workdir),
      first.output.strip().rpartition('\n')[-1],
    )


@fault(times=2, in_ci=0)
def host_late(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """Start of one host 30 s after the others."""
  for count in (2, 4)[:times]:
    workdir = folder / f'late{count}' / 'run'
    late = {count - 1: {'late_s': 30}}
    with hosts(folder, workdir, count, _LOG, config=_CONFIG, of_host=late) as r:
      lost = _unfinished(r)
      if not lost and 'Host 0 of' not in r[0].output:
        lost = 'host 0 did not report that it waits'
    yield Case(
      f'{count} hosts', lost or difference(_straight(folder, count), workdir)
    )


@fault(times=4, in_ci=1)
def host_differs(folder: pathlib.Path, times: int) -> Iterator[Case]:
  """Another batch size or package version on one host."""
  packages = folder / 'packages'
  (packages / 'optax-0.0.1.dist-info').mkdir(parents=True)
  (packages / 'optax-0.0.1.dist-info' / 'METADATA').write_text(
    'Metadata-Version: 2.1\nName: optax\nVersion: 0.0.1\n'
  )
  path = os.pathsep.join([str(packages), os.environ.get('PYTHONPATH', '')])
  differences = (
    (2, 'batch_size', {'flags': ['--config.data.batch_size=16']}),
    (4, 'optax', {'env': {'PYTHONPATH': path}}),
    (4, 'batch_size', {'flags': ['--config.data.batch_size=16']}),
    (2, 'optax', {'env': {'PYTHONPATH': path}}),
  )
  for number, (count, cause, own) in enumerate(differences[:times]):
    workdir = folder / f'differs{number}' / 'run'
    other = {count - 1: own}
    with hosts(
      folder, workdir, count, _LOG, config=_CONFIG, of_host=other
    ) as runs:
      for run in runs:
        run.wait_for(lambda run=run: '[Gloo]' in run.output)
      lost = _not_ended(runs, cause, time.monotonic())
      message = runs[0].output.strip()
    yield Case(f'{cause} of host {count - 1} of {count}', lost, message)


@contextlib.contextmanager
def _at(folder, workdir, count, moment):
  """Start a run on hosts and yield its processes at a moment."""
  workdir.parent.mkdir()
  env = {'VIT_JAX_EVALUATING': str(workdir.parent / 'evaluating')}
  env = env if moment == 'evaluating' else {}
  with hosts(folder, workdir, count, _LOG, config=_CONFIG, env=env) as runs:
    if not runs[0].wait_for(lambda: _MOMENTS[moment](runs, workdir)):
      raise ValueError(f'{moment} did not come: {runs[0].output[-1000:]}')
    yield runs


def _not_ended(runs, cause, begin):
  """Return an error if a host does not end in time and name the cause."""
  for run in runs:
    run.wait_for(lambda: False, begin + LIMIT_S - time.monotonic())
    if run.process.poll() is None:
      return f'it still runs after {LIMIT_S} s'
    output = run.output
    if run.process.returncode != 1:
      return f'exit status {run.process.returncode}'
    if not re.search(cause, output):
      return f'no cause: {output[-300:]}'
    if _TRACE.search(output):
      return f'a trace of the stack: {_TRACE.search(output)[0]}'
  return ''


def _unfinished(runs):
  for run in runs:
    if status := run.finish():
      return f'exit status {status}: {run.output[-500:]}'
  return ''


def _not_resumed(folder, workdir, count):
  """Run the same command again; return its difference from a straight run."""
  lost = _not_finished(folder, workdir, count)
  return lost or difference(_straight(folder, count), workdir)


def _straight(folder, count):
  """Return the workdir of an undisturbed run on so many hosts."""
  workdir = folder / f'straight{count}'
  if not workdir.exists() and (lost := _not_finished(folder, workdir, count)):
    raise ValueError(lost)
  return workdir


def _not_finished(folder, workdir, count):
  """Run to the end on hosts; return an error or ''."""
  with hosts(folder, workdir, count, _LOG, config=_CONFIG) as runs:
    return _unfinished(runs)


def _files(workdir):
  """Return {path: (size, time of the last change)}."""
  found = (path for path in workdir.rglob('*') if path.is_file())
  return {p: (p.stat().st_size, p.stat().st_mtime_ns) for p in found}

"""Mutated configs, each of which is refused or has a meaning.

`python -m tests.faults.mutated_configs` runs the mutations on stdin. The fault
starts it, because some mutations must be stopped.
"""

import contextlib
import io
import json
import os
import pathlib
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from typing import Any

from vit_jax import config as configs
from vit_jax.optim.durations import UNITS

from .config_meanings import has_meaning
from .config_mutations import Mutation, mutate, mutations, read
from .harness import Case, fault
from .runs import ROOT

SECONDS = 40  # for one mutation, which is traced without a cache

# Outcomes. The first two are correct.
REFUSED = 'refused'
ACCEPTED = 'accepted, has a meaning'
UNCLEAR = 'refused, but the message does not name the key and the value'
MEANINGLESS = 'accepted, has no meaning'
TRACEBACK = 'traceback'
HANG = 'hang or crash'


def outcome(mutation: Mutation) -> tuple[str, str]:
  """Trace a mutated config in a dry run and return (outcome, message)."""
  from vit_jax.runs import reuse

  reuse.clear()
  output = io.StringIO()
  with (
    tempfile.TemporaryDirectory() as workdir,
    contextlib.redirect_stdout(output),
    _without_compiling(),
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
  from vit_jax.runs import terminal

  text = f'{type(error).__name__}: {error}'
  is_expected = isinstance(error, ValueError | FloatingPointError)
  if not is_expected or not terminal._raised_by_vit_jax(error):
    last = traceback.extract_tb(error.__traceback__)[-1]
    return TRACEBACK, f'{text[:300]} ({last.filename}:{last.lineno})'
  named = _names(mutation, str(error)) and len(text) < 1200
  return (REFUSED if named else UNCLEAR), text


def _names(mutation, text):
  """Return whether a message names the key and, if one is set, the value."""
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
  value = read(mutation.value)
  if value is None and f'{mutation.path}=...' in text:
    return True  # the message asks to set the value
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
        [
          sys.executable,
          '-m',
          'tests.faults.mutated_configs',
          str(self._gigabytes),
        ],
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
      with self._process:  # closes the pipes and waits
        self._process = None


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
    found = outcome(Mutation(*json.loads(line)))
    print(json.dumps(found), file=out, flush=True)


if __name__ == '__main__':
  main()

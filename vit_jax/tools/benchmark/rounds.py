"""Measurement of one case: worker processes that take turns on the device."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vit_jax.runs import environment
from vit_jax.tools.benchmark.workers import Worker, WorkerError


def split(steps: int, rounds: int) -> list[int]:
  """Return the steps of each round: equal, at most `rounds` of them.

  Steps that would make the rounds unequal are left out.
  """
  rounds = min(rounds, steps)
  return [steps // rounds] * rounds


def in_turn(
  runs: Sequence[Callable[[int], Any]], shares: Sequence[int]
) -> list[list[Any]]:
  """Return [[result of each round] for each run]; the runs take turns.

  Args:
    runs: functions of the number of steps.
    shares: number of steps of each round.
  """
  results: list[list[Any]] = [[] for _ in runs]
  for steps in shares:
    for of_run, run in zip(results, runs):
      of_run.append(run(steps))
  return results


def measure(
  case: Mapping[str, Any],
  shares: Sequence[int],
  *,
  ours: list[str],
  peer: list[str] | None = None,
  peer_name: str = '',
  peer_settings: str = 'own',
  **settings: Any,
) -> dict[str, Any]:
  """Measure a case, and return what `report.row` needs.

  Args:
    case: of `cases.cases`.
    shares: number of steps of each round.
    ours, peer: commands of the workers.
    peer_name: shown in the report.
    peer_settings: 'own', or 'ours' to start the peer with our environment.
    **settings: more settings of both workers.

  Returns:
    {'started': first answer of our worker, 'times' and 'cpu_times': seconds per
    step of each round, 'ceiling': FLOP/s of a matrix product}; the same with
    'peer_', and 'peer' and 'peer_settings'; 'error', if one occurred.
  """
  found: dict[str, Any] = {}
  has_model = case['mode'] != 'input'
  # Two processes share the memory: neither may preallocate most of it.
  env = {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'} if peer else {}
  our_env = env | environment.faster()
  try:
    with contextlib.ExitStack() as stack:
      mine = stack.enter_context(Worker(ours, our_env))
      found['started'] = mine.ask('start', **case, **settings)
      runs: dict[str, Callable[[int], Any]] = {
        '': functools.partial(_round, mine)
      }
      if peer:
        found |= {'peer': peer_name, 'peer_settings': peer_settings}
        their_env = our_env
        if peer_settings == 'own':
          their_env = env | environment.users_own()
        theirs = stack.enter_context(Worker(peer, their_env))
        if _start_peer(theirs, found, {**case, **settings}):
          runs['peer_'] = functools.partial(_round, theirs)
      if has_model:
        runs['ceiling'] = lambda _: _ceiling(mine)
      else:
        runs['profile'] = lambda steps: mine.ask('profile', steps=steps)
      results = dict(zip(runs, in_turn([*runs.values()], shares)))
      if has_model:
        found['ceiling'] = max(results.pop('ceiling')) or None
      else:
        found['profile'] = results.pop('profile')
      for prefix, of_rounds in results.items():
        times, cpu_times = zip(*of_rounds)
        found |= {f'{prefix}times': times, f'{prefix}cpu_times': cpu_times}
  except WorkerError as error:
    found['error'] = str(error)
  return found


def _round(worker, steps):
  """Return (seconds, CPU seconds) per step."""
  answer = worker.ask('round', steps=steps)
  return answer['seconds'] / steps, answer['cpu_seconds'] / steps


def _ceiling(worker):
  """Return the FLOP/s of a matrix product, 0 without memory for it."""
  try:
    return worker.ask('ceiling')['flops']
  except WorkerError:
    return 0


def _start_peer(worker, found, settings):
  """Start the peer; return False, with an error in `found`, if it fails."""
  try:
    found['peer_started'] = worker.ask('start', **settings)
  except WorkerError as error:
    found['error'] = f'peer {error}'
    return False
  if notes := found['peer_started'].get('notes'):
    found['peer'] += f' ({notes})'
  return True

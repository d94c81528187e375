"""Rounds in turn, and what is said of the times they took."""

import dataclasses
import statistics


@dataclasses.dataclass(frozen=True)
class Spread:
  """Median, least and greatest of some values."""

  median: float
  min: float
  max: float

  @classmethod
  def of(cls, values):
    values = list(values)
    return cls(statistics.median(values), min(values), max(values))


def split(steps, rounds):
  """Steps of each round: `steps` in all, in at most `rounds` equal shares.

  The last steps are left out where the shares would not be equal, so that
  every round says the same.
  """
  rounds = min(rounds, steps)
  return [steps // rounds] * rounds


def in_turn(workers, shares):
  """Seconds a step took, by worker and round: the workers take turns.

  Args:
    workers: functions, steps -> seconds.
    shares: steps of each round.

  Returns:
    a list for each worker, of seconds a step, round by round. Those of one
    round were measured one right after the other: ratios are of them.
  """
  times = [[] for _ in workers]
  for steps in shares:
    for measured, run in zip(times, workers):
      measured.append(run(steps) / steps)
  return times


def ratio(ours, theirs):
  """Spread of how many times faster ours was, over the pairs of a round."""
  return Spread.of(b / a for a, b in zip(ours, theirs))


def ratio_of_best(ours, theirs):
  """How many times faster ours was, of each one's fastest round.

  Others' work can only slow a round down: of many short rounds on a machine
  that is shared, the fastest say the most.
  """
  return min(theirs) / min(ours)

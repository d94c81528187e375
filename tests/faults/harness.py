"""Registry of faults, and the table of their results.

A fault is a generator, decorated with `fault`, that injects something into a
run or a file and yields a Case for each injection.
"""

import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Case(NamedTuple):
  """One injection.

  Attributes:
    name: description of the injection.
    lost: description of what was lost or went wrong; '' if nothing was.
    message: message to the user, if it is worth showing.
    skipped: reason why nothing could be injected; '' if the fault was injected.
  """

  name: str
  lost: str = ''
  message: str = ''
  skipped: str = ''


Inject = Callable[[pathlib.Path, int], Iterator[Case]]


@dataclasses.dataclass(frozen=True)
class Fault:
  """A kind of fault.

  Attributes:
    inject: generator function (empty folder, number of injections) -> cases.
    times: number of injections of `python -m tests.faults`.
    in_ci: number of injections in the tests; 0 if the fault takes minutes.
  """

  inject: Inject
  times: int
  in_ci: int

  @property
  def name(self) -> str:
    return self.inject.__name__

  @property
  def title(self) -> str:
    return (self.inject.__doc__ or self.name).splitlines()[0].rstrip('.')


FAULTS: dict[str, Fault] = {}


def fault(*, times: int = 1, in_ci: int = 1) -> Callable[[Inject], Inject]:
  """Register a fault; `times` and `in_ci` as in Fault."""

  def register(inject):
    FAULTS[inject.__name__] = Fault(inject, times, in_ci)
    return inject

  return register


@dataclasses.dataclass
class Row:
  """Line of the table: the cases of a fault and their duration."""

  fault: Fault
  cases: list[Case]
  seconds: float

  @property
  def injected(self) -> list[Case]:
    return [case for case in self.cases if not case.skipped]

  @property
  def lost(self) -> list[Case]:
    return [case for case in self.injected if case.lost]

  @property
  def survived(self) -> int:
    return len(self.injected) - len(self.lost)

  @property
  def skipped(self) -> str:
    """Number and reasons of the skipped cases; '' if there are none."""
    reasons = [case.skipped for case in self.cases if case.skipped]
    shown = '; '.join(dict.fromkeys(reasons))
    return f'{len(reasons):,} skipped: {shown}' if reasons else ''

  def cells(self) -> tuple[str, str, str, str]:
    count, survived = f'{len(self.injected):,}', f'{self.survived:,}'
    if self.skipped:
      count += f' of {len(self.cases):,}, {self.skipped}'
    lost = [f'{case.name}: {case.lost}' for case in self.lost]
    shown = '; '.join(lost[:3]) + f'; {len(lost) - 3} more' * (len(lost) > 3)
    return self.fault.title, count, survived, shown or 'nothing'


HEADER = ('fault', 'injected', 'survived', 'lost')


def run(fault: Fault, times: int) -> Row:
  """Inject a fault `times` times, in a temporary folder.

  An exception of the fault itself counts as a case with a loss.
  """
  begin, cases = time.monotonic(), []
  with tempfile.TemporaryDirectory(prefix='vit_jax_fault_') as folder:
    try:
      cases.extend(fault.inject(pathlib.Path(folder), times))
    except Exception as error:
      cases.append(Case('harness', f'{type(error).__name__}: {error}'))
  return Row(fault, cases, time.monotonic() - begin)


def markdown(rows: list[Row]) -> str:
  """Return the rows as a Markdown table."""
  lines = [HEADER, ('---', '---:', '---:', '---')]
  lines += [row.cells() for row in rows]
  return '\n'.join(f'| {" | ".join(cells)} |' for cells in lines)

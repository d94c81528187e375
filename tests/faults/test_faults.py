"""Every fault of the catalogue, injected a few times: nothing may be lost."""

import pytest

from . import harness
from .catalogue import FAULTS


@pytest.mark.slow
@pytest.mark.parametrize('name', [n for n, f in FAULTS.items() if f.in_ci])
def test_nothing_is_lost(name):
  row = harness.run(FAULTS[name], FAULTS[name].in_ci)
  assert row.cases
  assert not row.lost
  if not row.injected:
    pytest.skip(row.skipped)


def test_skipped_cases_are_not_counted():
  def unplugged(folder, times):
    """A cable that is pulled."""
    yield harness.Case('first')
    yield harness.Case('second', lost='5 steps')
    yield harness.Case('third', skipped='no cable')

  row = harness.run(harness.Fault(unplugged, times=3, in_ci=3), 3)
  assert len(row.injected) == 2 and row.survived == 1
  assert row.cells() == (
    *('A cable that is pulled', '2 of 3, 1 skipped: no cable'),
    *('1', 'second: 5 steps'),
  )

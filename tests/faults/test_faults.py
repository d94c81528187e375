"""Every fault of the catalogue, injected a few times: nothing may be lost."""

import pytest

from . import harness
from .catalogue import FAULTS


@pytest.mark.slow
@pytest.mark.parametrize('name', [n for n, f in FAULTS.items() if f.in_ci])
def test_nothing_is_lost(name):
  row = harness.run(FAULTS[name], FAULTS[name].in_ci)
  assert row.cases
  assert not [case for case in row.cases if case.lost]

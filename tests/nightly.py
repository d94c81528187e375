"""Cases of tests that run at night only."""

import pytest


def nightly(cases, *, but=()):
  """Mark the cases as slow, except those in `but`, which run by default."""
  cases, slow = list(cases), pytest.mark.slow
  assert all(case in cases for case in but)
  rows = [x if isinstance(x, tuple) else (x,) for x in cases]
  marks = [() if x in but else slow for x in cases]
  return [pytest.param(*row, marks=x) for row, x in zip(rows, marks)]

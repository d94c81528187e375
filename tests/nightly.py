"""Cases of tests that run at night only."""

import pytest


def nightly(cases, *, but=()):
  """Mark the cases as slow, except those in `but`, which run by default."""
  cases = list(cases)
  assert all(case in cases for case in but)
  return [x if x in but else _slow(x) for x in cases]


def _slow(case):
  values = case if isinstance(case, tuple) else (case,)
  return pytest.param(*values, marks=pytest.mark.slow)

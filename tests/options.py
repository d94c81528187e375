"""Objects all of whose options differ from their defaults."""

import inspect


def all_set(make, **options):
  """Call a class or function with each of its options, none at its default."""
  known = inspect.signature(make).parameters
  assert options.keys() == known.keys()
  for name, value in options.items():
    assert value != known[name].default, f'{name} is at its default'
  return make(**options)

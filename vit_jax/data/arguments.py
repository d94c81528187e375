"""Checks that the embedded sources share."""

import numpy as np


def check_int(name, value, least):
  """Raises ValueError unless `value` is an integer of at least `least`."""
  if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
    raise ValueError(f'{name} is {value!r}; give an integer.')
  if value < least:
    raise ValueError(f'{name} is {value}; give {least} or more.')


def check_index(index, length):
  """`index` as int; IndexError outside of 0 to length - 1."""
  index = int(index)
  if not 0 <= index < length:
    raise IndexError(f'index {index} of a source of {length} examples.')
  return index

"""Checks of arguments that many modules share."""

import numbers


def one_of(name, value, allowed):
  """Raise ValueError unless `value` is one of the `allowed` values.

  Args:
    name: of the argument, for the message.
    value: what was given.
    allowed: the values that are allowed.
  """
  if value not in allowed:
    choices = ', '.join(map(repr, allowed))
    raise ValueError(f'{name}={value!r} must be one of {choices}.')


def integer(name, value, least):
  """Raise ValueError unless `value` is an integer of at least `least`."""
  is_integer = isinstance(value, numbers.Integral)
  if not is_integer or isinstance(value, bool) or value < least:
    raise ValueError(
      f'{name}={value!r} must be an integer of at least {least}.'
    )


def index(value, length):
  """Return `value` as an int; raise IndexError outside 0 to `length` - 1."""
  value = int(value)
  if not 0 <= value < length:
    raise IndexError(f'index {value} is not in [0, {length}).')
  return value

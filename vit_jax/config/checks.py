"""Checks of arguments that many modules share."""

import numbers
from collections.abc import Iterable
from typing import Any


def one_of(name: str, value: Any, allowed: Iterable[Any]) -> None:
  """Raise ValueError unless `value` is one of the `allowed` values.

  Args:
    name: of the argument, for the message.
    value: what was given.
    allowed: the values that are allowed.
  """
  if value not in allowed:
    choices = ', '.join(map(repr, allowed))
    raise ValueError(f'{name}={value!r} must be one of {choices}.')


def integer(name: str, value: Any, least: int) -> None:
  """Raise ValueError unless `value` is an integer of at least `least`."""
  is_integer = isinstance(value, numbers.Integral)
  if not is_integer or isinstance(value, bool) or value < least:
    raise ValueError(
      f'{name}={value!r} must be an integer of at least {least}.'
    )


def index(value: Any, length: int) -> int:
  """Return `value` as an int; raise IndexError outside 0 to `length` - 1."""
  value = int(value)
  if not 0 <= value < length:
    raise IndexError(f'index {value} is not in [0, {length}).')
  return value

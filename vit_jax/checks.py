"""Checks of arguments that many modules share."""


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

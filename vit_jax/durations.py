"""One converter for every duration of a config."""

_UNITS = ('steps', 'epochs', 'examples', 'fraction')


def to_steps(
  config, name, *, batch_size, num_examples, total_steps=None, default=None
):
  """Training steps of a duration given in any unit.

  `{name}_steps`, `{name}_epochs` (passes over the training set),
  `{name}_examples` or `{name}_fraction` (of the total number of steps), of
  which at most one may be set. Fractional results are rounded down, but what
  is longer than nothing lasts at least one step.

  Args:
    config: anything with get(key).
    name: e.g. 'total', 'warmup'.
    batch_size: examples per step, over all devices and hosts.
    num_examples: size of the training set, or None if it has no end.
    total_steps: what a fraction refers to.
    default: returned when no unit is set; an error is raised if it is ...
      (Ellipsis), which says that the duration is required.
  """
  keys = [f'{name}_{unit}' for unit in _UNITS]
  given = {k: config.get(k) for k in keys if config.get(k) is not None}
  if len(given) > 1:
    raise ValueError(f'One duration, {len(given)} times: {given}. Keep one.')
  if not given:
    if default is ...:
      raise ValueError(f'A duration is missing: set one of {keys}.')
    return default
  ((key, value),) = given.items()
  if not isinstance(value, int | float) or value < 0:
    raise ValueError(f'{key}={value!r} must be a number of 0 or more.')
  if key.endswith('_steps'):
    if value != int(value):
      raise ValueError(f'{key}={value} must be a whole number.')
    return int(value)
  if key.endswith('_epochs'):
    if num_examples is None:
      raise ValueError(
        f'{key}={value}: the size of the training set is not known; give '
        f'{name}_steps or {name}_examples instead.'
      )
    steps = value * num_examples / batch_size
  elif key.endswith('_examples'):
    steps = value / batch_size
  else:
    if total_steps is None:
      raise ValueError(f'{key}={value}: {name} cannot be a fraction.')
    if value > 1:
      raise ValueError(f'{key}={value} must be between 0 and 1.')
    steps = value * total_steps
  # Rounded first: 0.29 * 100 is 28.999999999999996.
  return max(1, int(round(steps, 6))) if steps > 0 else 0

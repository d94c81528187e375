"""Durations of a training run: steps, epochs, examples or a fraction of it."""

import dataclasses
import math
import typing
from typing import Annotated, Literal

from vit_jax.types import Expect, UserError

UNITS = ('steps', 'epochs', 'examples', 'fraction')


@dataclasses.dataclass(frozen=True)
class Duration:
  """A length of training.

  Attributes:
    value: 0 or more; whole for 'steps', at most 1 for 'fraction'.
    unit: 'steps', 'epochs' (passes over the training set), 'examples', or
      'fraction' (of all steps of the run).

  Raises:
    ValueError: a value that the unit cannot have.
  """

  value: float
  unit: Literal['steps', 'epochs', 'examples', 'fraction']

  def __post_init__(self) -> None:
    value, unit = self.value, self.unit
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:
      raise UserError(f'{unit}={value!r} must be a number of 0 or more.')
    if unit == 'steps' and value != int(value):
      raise UserError(f'{unit}={value} must be a whole number.')
    if unit == 'fraction' and value > 1:
      raise UserError(f'{unit}={value} must be between 0 and 1.')


# Time between two events, or the length of a run.
Interval = Annotated[Duration, Expect(lambda d: d.value > 0, 'above 0')]


def steps(value: int) -> Duration:
  """Return a Duration of optimizer steps."""
  return Duration(value, 'steps')


def epochs(value: float) -> Duration:
  """Return a Duration of passes over the training set."""
  return Duration(value, 'epochs')


def examples(value: int) -> Duration:
  """Return a Duration of training examples."""
  return Duration(value, 'examples')


def fraction(value: float) -> Duration:
  """Return a Duration that is a fraction of the whole run."""
  return Duration(value, 'fraction')


@dataclasses.dataclass(frozen=True)
class Timeline:
  """Conversion of durations to steps of one run.

  Attributes:
    batch_size: global number of examples in a step.
    num_examples: size of the training set, the visits of an epoch whatever
      `data.order` is.
    total_steps: length of the run; needed for durations in 'fraction'.
  """

  batch_size: int
  num_examples: int
  total_steps: int | None = None

  @typing.overload
  def steps(self, duration: Duration) -> int: ...

  @typing.overload
  def steps(self, duration: Duration | None) -> int | None: ...

  def steps(self, duration: Duration | None) -> int | None:
    """Return the duration in whole steps; None for None.

    Fractional results are rounded down, but a duration above 0 lasts at least
    one step.

    Raises:
      ValueError: a fraction of a run whose length is not known.
    """
    if duration is None:
      return None
    value = duration.value
    if duration.unit == 'fraction':
      if self.total_steps is None:
        raise UserError(
          f'The length of the run cannot be a fraction of itself ({value}). '
          'Use steps, epochs or examples.'
        )
      value = value * self.total_steps
    elif duration.unit == 'epochs':
      value = value * self.num_examples / self.batch_size
    elif duration.unit == 'examples':
      value = value / self.batch_size
    # Rounded first: 0.29 * 100 is 28.999999999999996.
    return max(1, int(round(value, 6))) if value > 0 else 0

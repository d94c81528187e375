"""Lengths of training, with their units."""

import dataclasses
import functools
import sys
from typing import Annotated, Literal, get_args

from vit_jax.types import Expect, UserError

Unit = Literal['steps', 'epochs', 'examples', 'fraction']
UNITS = get_args(Unit)


@dataclasses.dataclass(frozen=True)
class Duration:
  """A length of training.

  Attributes:
    value: 0 or more; whole for 'steps', at most 1 for 'fraction'.
    unit: 'steps', 'epochs' (passes over the training set), 'examples', or
      'fraction' (of all steps of the run).
  """

  value: float
  unit: Unit

  def __post_init__(self) -> None:
    value, unit = self.value, self.unit
    limit = 1 if unit == 'fraction' else sys.float_info.max
    if (
      not isinstance(value, int | float)
      or isinstance(value, bool)
      or not 0 <= value <= limit
      or (unit == 'steps' and value % 1)
    ):
      raise UserError(
        f'{unit}={value!r} must be a number of 0 or more, whole for steps, and '
        'at most 1 for a fraction.'
      )


# Time between two events, or the length of a run.
Interval = Annotated[Duration, Expect(lambda d: d.value > 0, 'above 0')]

steps = functools.partial(Duration, unit='steps')
epochs = functools.partial(Duration, unit='epochs')
examples = functools.partial(Duration, unit='examples')
fraction = functools.partial(Duration, unit='fraction')


@dataclasses.dataclass(frozen=True)
class Timeline:
  """Conversion of durations to steps of one run."""

  batch_size: int  # global number of examples in a step
  num_examples: int  # size of the training set: visits in an epoch
  total_steps: int | None = None  # needed for durations in 'fraction'

  def steps(self, duration: Duration | None) -> int:
    """Return steps, rounded down, but at least 1 if above 0; 0 for None."""
    if duration is None:
      return 0
    value = duration.value
    if duration.unit == 'fraction':
      assert self.total_steps is not None, 'the length of the run itself'
      value = value * self.total_steps
    elif duration.unit == 'epochs':
      value = value * self.num_examples / self.batch_size
    elif duration.unit == 'examples':
      value = value / self.batch_size
    if value >= 2**31:  # steps are counted by int32
      raise UserError(
        f'{duration.unit}={duration.value!r} are {value:.3g} steps. Use less: '
        'a run has at most 2**31 - 1.'
      )
    # Rounded first: 0.29 * 100 is 28.999999999999996.
    return max(1, int(round(value, 6))) if value > 0 else 0

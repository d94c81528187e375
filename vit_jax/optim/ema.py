"""Exponential moving average (EMA) of the parameters."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from vit_jax.optim.durations import Duration, Timeline
from vit_jax.types import Rate


@dataclasses.dataclass(frozen=True)
class Ema:
  """EMA of the parameters, which evaluators use and checkpoints contain.

  Attributes:
    decay: d in ema = d * ema + (1 - d) * params; 0.9999 in the paper's Table 2.
    start: time before the average starts. Until then it equals the parameters.
    debias: leave out the parameters at the start, which otherwise keep the
      weight d**n after n updates, and divide by the sum of the other weights.
  """

  decay: Rate
  start: Duration | None = None
  debias: bool = False

  def __call__(
    self, timeline: Timeline
  ) -> Callable[[jax.Array], float | jax.Array]:
    """Return the traceable function step -> weight of the new parameters.

    This is w in ema = w * params + (1 - w) * ema after the update of a step;
    `step` is the number of updates before it.

    Raises:
      ValueError: the run of the Timeline ends before the average starts.
    """
    start = timeline.steps(self.start) or 0
    if timeline.total_steps is not None and start >= timeline.total_steps:
      raise ValueError(
        f'The EMA starts after {start} steps, but the run has only '
        f'{timeline.total_steps}. Start it earlier, or train without an EMA.'
      )

    def weight(step):
      w = 1 - self.decay
      if not start and not self.debias:
        return w
      n = jnp.asarray(step + 1 - start, jnp.float32)
      if self.debias and self.decay:
        # 1 - decay**n, without cancellation.
        w /= -jnp.expm1(jnp.maximum(n, 1) * math.log(self.decay))
      # Exactly 1 in the first update of a debiased average, without rounding.
      return jnp.where(n <= int(self.debias), 1.0, w)

    return weight

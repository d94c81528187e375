"""Schedules: the learning rate and the weight of the EMA over steps."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.optim.durations import Duration, Timeline, fraction
from vit_jax.types import Between, Count, LearningRate, Rate, UserError


@dataclasses.dataclass(frozen=True)
class Schedule:
  """Learning rate over steps: a decay times linear warm-up and cooldown ramps.

  The decay runs from the end of warm-up to the end of training; warm-up
  multiplies it by min(1, step / warm-up steps), as in the paper's released code
  and big_vision.

  Attributes:
    lr: peak learning rate.
    decay: 'linear' or 'cosine' (to end_lr), 'constant', 'rsqrt':
      lr / sqrt(1 + (step - warm-up steps) / timescale) ("Scaling ViT"), or
      'step': times step_factor at each milestone, as in BiT.
    warmup: 10,000 steps in every pre-training of the paper (Table 3).
    cooldown: linear ramp to zero at the end; 50,000 steps in "Scaling ViT".
    end_lr: final rate of 'linear' and 'cosine'. The paper's released code ends
      'linear' at 1e-5, big_vision at 0.
    timescale: of 'rsqrt', in steps.
    milestones: of 'step': increasing fractions of the whole training, warm-up
      included; (1/3, 2/3, 8/9) is epochs 30, 60 and 80 of 90.
    step_factor: of 'step'.

  Raises:
    ValueError: values that are incompatible with the decay.
  """

  lr: LearningRate
  decay: Literal['constant', 'cosine', 'linear', 'rsqrt', 'step'] = 'cosine'
  warmup: Duration | None = None
  cooldown: Duration | None = None
  end_lr: LearningRate = 0.0
  timescale: Count = 10_000
  milestones: Sequence[float] = ()
  step_factor: Between = 0.1

  def __post_init__(self) -> None:
    if self.end_lr and self.decay not in ('linear', 'cosine'):
      raise UserError(
        f'end_lr={self.end_lr} has no effect on decay={self.decay!r}. Leave it '
        'out, or use linear or cosine decay.'
      )
    milestones = tuple(self.milestones)
    if bool(milestones) != (self.decay == 'step') or any(
      low >= high for low, high in itertools.pairwise((0, *milestones, 1))
    ):
      raise UserError(
        f'milestones={milestones} for decay={self.decay!r}. Expected, for '
        "'step' only, increasing fractions of the whole training between 0 and "
        '1, e.g. (0.3, 0.6, 0.9).'
      )

  def __call__(self, timeline: Timeline) -> Callable[[Any], jax.Array]:
    """Return the traceable function step -> float32 learning rate.

    Raises:
      ValueError: warm-up and cooldown are longer than the Timeline of the run.
    """
    total_steps = timeline.steps(fraction(1))
    warmup_steps = timeline.steps(self.warmup) or 0
    cooldown_steps = timeline.steps(self.cooldown) or 0
    if warmup_steps + cooldown_steps > total_steps:
      raise UserError(
        f'Warm-up ({warmup_steps} steps) and cooldown ({cooldown_steps}) are '
        f'longer than the run ({total_steps} steps). Shorten them, or train '
        'longer.'
      )
    # Rounded first: 0.29 * 100 is 28.999999999999996.
    milestones = [round(x * total_steps, 6) for x in self.milestones]
    milestones = np.ceil(milestones).astype(np.float32)
    lr, end_lr = self.lr, self.end_lr

    def at(step):
      step = jnp.asarray(step, jnp.float32)
      since = jnp.maximum(0.0, step - warmup_steps)
      done = jnp.minimum(1.0, since / max(1, total_steps - warmup_steps))
      if self.decay == 'constant':
        rate = jnp.float32(lr)
      elif self.decay == 'linear':
        rate = end_lr + (lr - end_lr) * (1 - done)
      elif self.decay == 'cosine':
        rate = end_lr + (lr - end_lr) * 0.5 * (1 + jnp.cos(math.pi * done))
      elif self.decay == 'rsqrt':
        rate = lr / jnp.sqrt(1 + since / self.timescale)
      else:
        rate = lr * self.step_factor ** (step >= milestones).sum()
      if warmup_steps:
        rate *= jnp.minimum(1.0, step / warmup_steps)
      if cooldown_steps:
        rate *= jnp.clip((total_steps - step) / cooldown_steps, 0.0, 1.0)
      return rate

    return at


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
      raise UserError(
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

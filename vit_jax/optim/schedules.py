"""Durations of training; the learning rate and the EMA over its steps."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.durations import Duration, Timeline, fraction
from vit_jax.types import Between, Count, LearningRate, Rate, UserError


@dataclasses.dataclass(frozen=True)
class Schedule:
  """Learning rate over steps: a decay times linear warm-up and cooldown ramps.

  The decay runs from the end of warm-up to the end of training; warm-up
  multiplies it by min(1, step / warm-up steps), as in the paper's released code
  and big_vision. timm's cosine runs from step 0, and warm-up replaces its
  beginning: after warm-up, the rate drops from lr to the cosine at once.

  Attributes:
    lr: peak learning rate.
    decay: 'linear', 'cosine' or 'timm_cosine' (to end_lr), 'constant', 'rsqrt':
      lr / sqrt(1 + (step - warm-up steps) / timescale) ("Scaling ViT"), or
      'step': times step_factor at each milestone, as in BiT.
    warmup: 10,000 steps in every pre-training of the paper (Table 3).
    cooldown: linear ramp to zero at the end; 50,000 steps in "Scaling ViT".
    end_lr: final rate of 'linear' and cosines. The paper's released code ends
      'linear' at 1e-5, big_vision at 0.
    milestones: where decay='step' lowers the rate, as fractions of the whole
      training with warm-up; (1/3, 2/3, 8/9) is epochs 30, 60 and 80 of 90.
  """

  lr: LearningRate
  decay: Literal[
    'constant', 'cosine', 'timm_cosine', 'linear', 'rsqrt', 'step'
  ] = 'cosine'
  warmup: Duration | None = None
  cooldown: Duration | None = None
  end_lr: LearningRate = 0.0
  timescale: Count = 10_000
  milestones: Sequence[Between] = ()
  step_factor: Between = 0.1

  def __post_init__(self) -> None:
    has_end = self.decay in ('linear', 'cosine', 'timm_cosine')
    is_step = self.decay == 'step'
    if (self.end_lr and not has_end) or bool(self.milestones) != is_step:
      raise UserError(
        f'decay={self.decay!r} with end_lr={self.end_lr} and milestones='
        f"{tuple(self.milestones)}: end_lr is for 'linear' and cosines, "
        "milestones are for 'step'."
      )

  def __call__(self, timeline: Timeline) -> Callable[[Any], jax.Array]:
    """Return the traceable function step -> float32 learning rate."""
    total_steps = timeline.steps(fraction(1))
    warmup_steps = timeline.steps(self.warmup)
    cooldown_steps = timeline.steps(self.cooldown)
    if warmup_steps + cooldown_steps > total_steps:
      raise UserError(
        f'Warm-up ({warmup_steps} steps) and cooldown ({cooldown_steps}) are '
        f'longer than the run ({total_steps} steps). Shorten them, or train '
        'longer.'
      )
    if warmup_steps == total_steps == 1:
      raise UserError(
        f'The run has 1 step of {timeline.batch_size} images, and warm-up '
        f'begins with a rate of 0: nothing would be learned from the '
        f'{timeline.num_examples} images. Train for longer, or use a smaller '
        'data.batch_size.'
      )
    # Rounded first: 0.29 * 100 is 28.999999999999996.
    milestones = [round(x * total_steps, 6) for x in self.milestones]
    milestones = np.ceil(milestones).astype(np.float32)
    lr, end_lr = self.lr, self.end_lr

    def at(step):
      step = jnp.asarray(step, jnp.float32)
      since = jnp.maximum(0.0, step - warmup_steps)
      done = jnp.minimum(1.0, since / max(1, total_steps - warmup_steps))
      if self.decay == 'timm_cosine':
        done = jnp.where(step < warmup_steps, 0.0, step / total_steps)
      if self.decay == 'constant':
        rate = jnp.float32(lr)
      elif self.decay == 'linear':
        rate = end_lr + (lr - end_lr) * (1 - done)
      elif self.decay in ('cosine', 'timm_cosine'):
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
    debias: leave out the parameters at the start, which otherwise keep the
      weight d**n after n updates, and divide by the sum of the other weights.
  """

  decay: Rate
  debias: bool = False

  def __call__(self, step: jax.Array) -> float | jax.Array:
    """Return w in ema = w * params + (1 - w) * ema after `step` + 1 updates."""
    w = 1 - self.decay
    if not self.debias or not self.decay:
      return w
    n = jnp.asarray(step + 1, jnp.float32)
    # 1 - decay**n, without cancellation.
    w /= -jnp.expm1(n * math.log(self.decay))
    # Exactly 1 in the first update, without rounding.
    return jnp.where(n == 1, 1.0, w)

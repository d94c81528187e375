"""Learning rates over steps."""

import itertools
import math

import jax.numpy as jnp
import numpy as np


def schedule(
  *,
  lr,
  total_steps,
  decay='cosine',
  warmup_steps=0,
  cooldown_steps=0,
  end_lr=0.0,
  timescale=10_000,
  milestones=(),
  stair_factor=0.1,
):
  """Learning rate over steps: a decay times linear warm-up and cooldown ramps.

  Decay runs from the end of warm-up to total_steps; warm-up multiplies it by
  min(1, step / warmup_steps), cooldown by min(1, steps left / cooldown_steps).
  This is how both the paper's released code and big_vision combine them.

  Args:
    lr: peak learning rate.
    total_steps: length of the training.
    decay: 'linear' or 'cosine' (to end_lr), 'constant', 'rsqrt':
      lr / sqrt(1 + (step - warmup_steps) / timescale), "Scaling ViT"; or
      'stair', down by stair_factor at each of milestones, as BiT does.
    warmup_steps: 10,000 in every pre-training of the paper (Table 3).
    cooldown_steps: linear ramp to zero at the end; 50,000 in "Scaling ViT".
    end_lr: where 'linear' and 'cosine' end. The paper's released code ends
      'linear' at 1e-5; big_vision at 0.
    timescale: in steps, of 'rsqrt'.
    milestones: of 'stair': fractions of total_steps, counted from step 0 and
      not from the end of warm-up; (1/3, 2/3, 8/9) is 30, 60 and 80 of 90
      epochs.
    stair_factor: of 'stair'.

  Returns:
    step -> float32 learning rate, traceable.
  """
  decays = ('constant', 'cosine', 'linear', 'rsqrt', 'stair')
  if decay not in decays:
    raise ValueError(f'decay={decay!r} must be one of {decays}.')
  if warmup_steps + cooldown_steps > total_steps:
    raise ValueError(
      f'warm-up ({warmup_steps}) and cooldown ({cooldown_steps}) are longer '
      f'than the {total_steps} steps of training. Shorten them, or train on.'
    )
  if end_lr and decay in ('constant', 'rsqrt', 'stair'):
    raise ValueError(f'end_lr={end_lr} means nothing to decay={decay!r}.')
  stairs = _stair_steps(decay, milestones, stair_factor, total_steps)

  def at(step):
    step = jnp.asarray(step, jnp.float32)
    since = jnp.maximum(0.0, step - warmup_steps)
    done = jnp.minimum(1.0, since / max(1, total_steps - warmup_steps))
    rate = {
      'constant': lambda: jnp.float32(lr),
      'linear': lambda: end_lr + (lr - end_lr) * (1 - done),
      'cosine': lambda: (
        end_lr + (lr - end_lr) * 0.5 * (1 + jnp.cos(math.pi * done))
      ),
      'rsqrt': lambda: lr / jnp.sqrt(1 + since / timescale),
      'stair': lambda: lr * stair_factor ** (step >= stairs).sum(),
    }[decay]()
    if warmup_steps:
      rate *= jnp.minimum(1.0, step / warmup_steps)
    if cooldown_steps:
      rate *= jnp.clip((total_steps - step) / cooldown_steps, 0.0, 1.0)
    return rate

  return at


def _stair_steps(decay, milestones, factor, total_steps):
  """The steps that milestones are, after a check of decay's arguments."""
  milestones = tuple(milestones)
  if decay != 'stair':
    if milestones or factor != 0.1:
      raise ValueError(
        f'milestones={milestones} and stair_factor={factor} mean nothing to '
        f"decay={decay!r}. Leave them out, or set decay='stair'."
      )
  elif not milestones or any(
    low >= high for low, high in itertools.pairwise((0, *milestones, 1))
  ):
    raise ValueError(
      f"milestones={milestones} for decay='stair'; expected one or more "
      'fractions of the whole training, increasing, above 0 and below 1, such '
      'as (0.3, 0.6, 0.9).'
    )
  elif not 0 < factor < 1:
    raise ValueError(f'stair_factor={factor} must lie between 0 and 1.')
  # Rounded first: 0.29 * 100 is 28.999999999999996.
  steps = [round(x * total_steps, 6) for x in milestones]
  return np.ceil(steps).astype(np.float32)

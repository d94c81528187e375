"""Optimizer rules besides those of optax and `optim.sgd`.

They treat scanned layers, whose parameters have a leading layer dimension, like
unrolled ones. Muon is in muon.py.
"""

from typing import Annotated, Any

import jax.numpy as jnp
import optax

from vit_jax.config import domains
from vit_jax.optim.transformations import (
  LearningRate,
  Small,
  Strength,
  each_layer,
  scale_by,
  stored_as,
)
from vit_jax.types import PyTree


@domains.checked
def adafactor(
  learning_rate: LearningRate,
  *,
  b1: domains.Rate | None = 0.9,
  b2: domains.Rate = 0.999,
  decay_rate: Annotated[float, domains.Range(0, 10, above=True)] = 0.8,
  eps: Small = 1e-30,
  min_dim_size_to_factor: domains.Count = 32,
  mu_dtype: domains.Dtype | None = 'bfloat16',
  weight_decay: Strength = 0.0,
  mask: PyTree = None,
) -> optax.GradientTransformation:
  """Adafactor as "Scaling ViT" runs it: without scaling by parameter norms.

  Unlike `optax.adafactor`, the momentum accumulates updates before they are
  multiplied by the learning rate, and no update is clipped to an RMS of 1.

  Args:
    learning_rate: float or schedule.
    b1: decay of the momentum, an EMA of the updates that is not debiased; None:
      no momentum, and no memory for it.
    b2: upper bound of the decay of the second moment. In step t, counted from
      0, the decay is min(b2, 1 - (t + 1) ** -decay_rate).
    decay_rate: see b2.
    eps: added to squared gradients.
    min_dim_size_to_factor: a second moment is stored as row and column means
      over the two largest dimensions of one layer, if both have at least this
      size.
    mu_dtype: of the momentum between steps; None: that of the parameters.
    weight_decay: decoupled, multiplied by the learning rate; 0.03 in "Scaling
      ViT", and 3.0 for the head (`Optimizer.decay_multipliers`).
    mask: tree of bools, True where weight decay applies.
  """
  second_moment = optax.scale_by_factored_rms(
    decay_rate=decay_rate,
    min_dim_size_to_factor=min_dim_size_to_factor,
    epsilon=eps,
    decay_rate_fn=lambda t, power: jnp.minimum(b2, 1 - (t + 1.0) ** -power),
  )
  parts = [each_layer(second_moment, optax.FactoredState)]
  if b1 is not None:
    parts.append(stored_as(mu_dtype, optax.ema(b1, debias=False)))
  return optax.chain(
    *parts,
    optax.add_decayed_weights(weight_decay, mask=mask),
    optax.scale_by_learning_rate(learning_rate),
  )


@domains.checked
def lamb(
  learning_rate: LearningRate,
  *,
  b1: domains.Rate = 0.9,
  b2: domains.Rate = 0.999,
  eps: Small = 1e-6,
  mu_dtype: domains.Dtype | None = None,
  weight_decay: Strength = 0.0,
  mask: PyTree = None,
) -> optax.GradientTransformation:
  """LAMB, the optimizer of DeiT III: Adam with a trust ratio per parameter.

  The update of a parameter, weight decay included, is multiplied by the norm of
  the parameter over the norm of the update. As in the implementation that DeiT
  III used (from memory), this holds only for parameters with weight decay;
  `optax.lamb` does it for all, and so biases, which start at 0, hardly move.
  That implementation also clips gradients at a global norm of 1 (from memory):
  `Optimizer.clip_norm`. Its query, key and value are one parameter with one
  ratio; here each has its own.

  Args:
    learning_rate: float or schedule.
    b1, b2, eps: of Adam.
    mu_dtype: of the first moment between steps; None: that of the parameters.
    weight_decay: decoupled; DeiT III has 0.05 on ImageNet and 0.02 on
      ImageNet-21k.
    mask: tree of bools, True where weight decay and the trust ratio apply;
      None: everywhere.
  """
  trust = each_layer(optax.scale_by_trust_ratio(), optax.EmptyState)
  return optax.chain(
    optax.scale_by_adam(b1, b2, eps, mu_dtype=mu_dtype),
    optax.add_decayed_weights(weight_decay, mask=mask),
    trust if mask is None else optax.masked(trust, mask),
    optax.scale_by_learning_rate(learning_rate),
  )


@domains.checked
def schedule_free_adamw(
  learning_rate: LearningRate,
  *,
  b1: domains.Between = 0.9,
  b2: domains.Rate = 0.999,
  eps: Small = 1e-8,
  weight_decay: Strength = 0.0,
  weight_lr_power: domains.NonNegative = 2.0,
  mask: PyTree = None,
  factors: PyTree = None,
) -> optax.GradientTransformation:
  """Schedule-free AdamW (Defazio et al., 2024; from memory).

  AdamW without momentum moves a sequence z. Its weighted average x is the
  result. Gradients are computed at y = b1 * x + (1 - b1) * z. `TrainState` has
  y as `params`, and x as `ema`, which evaluators see and weights files have.
  Use a `Schedule` with warm-up, decay 'constant', and no cooldown.

  Args:
    learning_rate: float or schedule.
    b1: interpolation between z and x. The average takes the place of momentum.
    b2, eps: of Adam.
    weight_decay: of y, decoupled, multiplied by the learning rate.
    weight_lr_power: the weight of each z in x is the largest learning rate so
      far to this power.
    mask: tree of bools, True where weight decay applies.
    factors: tree of factors on the updates of z, see `Optimizer`.
  """
  moves = [
    optax.scale_by_rms(b2, eps, eps_in_sqrt=False, bias_correction=True),
    optax.add_decayed_weights(weight_decay, mask=mask),
    optax.scale_by_learning_rate(learning_rate),
  ]
  if factors is not None:
    moves.append(scale_by(factors))
  rate: Any = learning_rate
  if callable(learning_rate):
    # optax counts from 1 here, and from 0 in the other transformations.
    rate = lambda count: learning_rate(count - 1)  # noqa: E731
  return optax.contrib.schedule_free(
    optax.chain(*moves), rate, b1, weight_lr_power
  )

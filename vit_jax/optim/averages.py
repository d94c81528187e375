"""Averages of the parameters that evaluators see and checkpoints have as `ema`.

An EMA over the steps (Polyak averaging), or the average that a schedule-free
optimizer defines.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import ScheduleFreeState

from vit_jax import tree
from vit_jax.types import Params


def ema_weight(
  step: jax.Array, decay: float, start: int = 0, debias: bool = False
) -> float | jax.Array:
  """Return w in ema = w * params + (1 - w) * ema after an update.

  Args:
    step: number of updates done before, int32 scalar.
    decay: w is 1 - decay, once the average has started.
    start: number of updates before the average starts; until then it equals the
      parameters.
    debias: leave out the parameters from which the average starts, and divide
      by the sum of the weights of the others: w is (1 - decay) / (1 - decay**n)
      in the n-th update after the start. Without it, the parameters at the
      start keep the weight decay**n.
  """
  weight = 1 - decay
  if not start and not debias:
    return weight
  n = jnp.asarray(step + 1 - start, jnp.float32)
  if debias and decay:
    # 1 - decay**n, without cancellation.
    weight /= -jnp.expm1(jnp.maximum(n, 1) * math.log(decay))
  # Exactly 1 in the first update of a debiased average, whatever rounding does.
  return jnp.where(n <= int(debias), 1.0, weight)


def _schedule_free(opt_state):
  """Return the states of schedule-free optimizers in an optimizer state."""
  is_one = lambda x: isinstance(x, ScheduleFreeState)  # noqa: E731
  return [x for x in jax.tree.leaves(opt_state, is_leaf=is_one) if is_one(x)]


def averages_itself(opt_state: Any) -> bool:
  """Return whether the optimizer defines an average of its parameters."""
  return bool(_schedule_free(opt_state))


def of_optimizer(opt_state: Any, params: Params) -> Params:
  """Return the average that the optimizer defines; see `averages_itself`.

  Parameters that the optimizer does not train are returned as they are.
  """
  flat = tree.flatten(params)
  for state in _schedule_free(opt_state):
    trained = {path: flat[path] for path in tree.flatten(state.z)}
    state = state._replace(z=tree.flatten(state.z))
    flat |= optax.contrib.schedule_free_eval_params(state, trained)
  return tree.map_with_path(lambda path, _: flat[path], params)


def restart(opt_state: Any, params: Params) -> Any:
  """Return an initial optimizer state in which averages start at `params`."""
  flat = tree.flatten(params)

  def restarted(state):
    if not isinstance(state, ScheduleFreeState):
      return state
    z = tree.map_with_path(
      lambda path, z: jnp.copy(flat[path]).astype(z.dtype), state.z
    )
    return state._replace(z=z)

  return jax.tree.map(
    restarted, opt_state, is_leaf=lambda x: isinstance(x, ScheduleFreeState)
  )

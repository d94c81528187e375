"""One training step; train.py has the rest of a run."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax.types import Batch, LossFn, Metrics, Model, Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
  """Everything that changes in training."""

  step: jax.Array  # int32 scalar: number of updates done
  params: Params
  opt_state: Any
  rng: jax.Array  # typed key; each step folds its number into it
  ema: Params | None = None  # EMA of the parameters, see optim/schedules.py
  carried: Any = None  # what the objective keeps, see types.py

  @property
  def eval_params(self) -> Params:
    """Parameters that evaluators see: the EMA if there is one."""
    return self.params if self.ema is None else self.ema


def train_step(
  state: TrainState,
  batch: Batch,
  *teacher: Params,
  loss_fn: LossFn,
  tx: optax.GradientTransformation,
  accum_steps: int = 1,
  ema_weight: Callable[[jax.Array], Any] | None = None,
) -> tuple[TrainState, Metrics]:
  """Make one update.

  Args:
    state: TrainState.
    batch: tree of arrays [B, ...].
    *teacher: parameters of the teacher, if `loss_fn` has one.
    loss_fn: (params, batch, rng) -> (mean loss, metrics); see types.LossFn.
    tx: optax transformation.
    accum_steps: number of micro-batches that a batch is cut into, to save
      memory; the result is the gradient of the whole batch.
    ema_weight: see `optim.schedules.Ema`; None: the state has no EMA.

  Returns:
    (TrainState, {name: scalar}); 'grad_norm' is the global norm of all
    gradients before clipping, frozen parameters included.
  """
  rng = jax.random.fold_in(state.rng, state.step)
  if prepare := getattr(loss_fn, 'prepare', None):
    batch = prepare(batch, jax.random.fold_in(rng, 2**32 - 1))  # its own key
  grad_fn = accumulate(jax.grad(loss_fn, has_aux=True), accum_steps)
  if getattr(loss_fn, 'takes_state', False):
    teacher = (state,)
  grads, metrics = grad_fn(state.params, batch, rng, *teacher)
  updates, opt_state = tx.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  ema = state.ema
  if ema_weight is not None:
    ema = optax.incremental_update(params, ema, ema_weight(state.step))
  metrics |= {'grad_norm': optax.tree.norm(grads)}
  carried = metrics.pop('carried', None)
  state = TrainState(state.step + 1, params, opt_state, state.rng, ema, carried)
  return state, metrics


def accumulate(
  grad_fn: Callable[..., Any], accum_steps: int
) -> Callable[..., Any]:
  """Return grad_fn averaged over micro-batches, each with its own rng."""
  if accum_steps == 1:
    return grad_fn

  def accumulated(params, batch, rng, *teacher):
    # Micro-batch m takes every accum_steps-th example, so that each device
    # keeps working on the examples that it has.
    micro = jax.tree.map(
      lambda x: x.reshape(-1, accum_steps, *x.shape[1:]).swapaxes(0, 1), batch
    )
    rngs = jax.random.split(rng, accum_steps)

    def add(sums, micro_batch_and_rng):
      out = grad_fn(params, *micro_batch_and_rng, *teacher)
      return jax.tree.map(jnp.add, sums, out), None

    first = jax.tree.map(lambda x: x[0], (micro, rngs))
    shapes = jax.eval_shape(grad_fn, params, *first, *teacher)
    zeros = jax.tree.map(jnp.zeros_like, shapes)
    sums, _ = jax.lax.scan(add, zeros, (micro, rngs))
    return jax.tree.map(lambda x: x / accum_steps, sums)

  return accumulated


def init_state(
  rng: jax.Array,
  *,
  model: Model,
  images: jax.ShapeDtypeStruct,
  tx: Callable[[Params], optax.GradientTransformation],
  ema: bool = False,
  loss_fn: LossFn | None = None,
) -> TrainState:
  """Return the TrainState of a freshly initialised model.

  `images` describes a batch of float images. An EMA starts at the parameters.
  `loss_fn` may add parameters and what it carries, see types.py.
  """
  init_rng, train_rng = jax.random.split(rng)
  example = jnp.zeros(images.shape, images.dtype)
  params = model.init(init_rng, example)['params']
  if init := getattr(loss_fn, 'init', None):
    more = init(jax.random.fold_in(init_rng, 1), images)
    params = {**params, 'objective': more}
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=tx(params).init(params),
    rng=train_rng,
    ema=jax.tree.map(jnp.copy, params) if ema else None,
    carried=getattr(loss_fn, 'carried', lambda: None)(),
  )

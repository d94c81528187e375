"""One training step, and what it asks of an objective; train.py has a run."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from vit_jax.durations import Timeline
from vit_jax.types import (
  LOSS,
  RATE,
  Array,
  Batch,
  Kinds,
  LossFn,
  Metrics,
  Model,
  NonNegative,
  Outputs,
  Params,
  PyTree,
  UserError,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
  """Everything that changes in training."""

  step: jax.Array  # int32 scalar: number of updates done
  params: Params
  opt_state: Any
  rng: jax.Array  # typed key; each step folds its number into it
  ema: Params | None = None  # EMA of the parameters, see optim/schedules.py
  carried: Any = None  # what the objective keeps, see Objective

  @property
  def eval_params(self) -> Params:
    """Parameters that evaluators see: the EMA if there is one."""
    return self.params if self.ema is None else self.ema


class Context(NamedTuple):
  """State of a run that an objective may use.

  Attributes:
    step: number of updates done.
    ema: EMA of the parameters; None: the run has none.
    carried: what the objective returned in the last step.
    teachers: parameters of the objective's teachers, by name.
  """

  step: Any = 0
  ema: Any = None
  carried: Any = None
  teachers: Any = None


class Seen(NamedTuple):
  """The arguments of a call, and the student's features by view and name."""

  params: Params
  batch: Batch
  rng: Array
  context: Context
  features: Mapping[str, Mapping[str, jax.Array]] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Term:
  """An addition to a loss, and a metric.

  Attributes:
    fn: function Seen -> array, whose mean counts; `fn.whole_batch` says that it
      is not a mean over micro-batches. In a config, the `target`.
    weight: its factor in the loss; 0: a metric only.
  """

  fn: Callable[..., Any] = dataclasses.field(metadata={'rest': True})
  weight: NonNegative = 1.0

  def __post_init__(self) -> None:
    if isinstance(self.fn, Guide) and not self.weight:
      raise UserError(
        f'{self.fn} has weight=0, so it would learn nothing. Leave it out.'
      )

  @property
  def whole_batch(self) -> bool:
    fn = getattr(self.fn, 'func', self.fn)  # that of a partial
    return getattr(fn, 'whole_batch', False)


Terms = Mapping[str, Term]


class Pull(NamedTuple):
  """What a Guide returns: a loss, and a gradient for the model.

  Attributes:
    loss: a scalar that depends on the guide's parameters only.
    features, gradient: features of the model, and the gradient of this loss
      with respect to them.
    state: what the next call gets.
  """

  loss: jax.Array
  features: jax.Array
  gradient: jax.Array
  state: Any = None


class Guide:
  """Base of functions of a Term that have parameters, and perhaps a state.

  Their losses train their own parameters. The model gets their gradients at
  the features, scaled to one length, which is their mean, and times `factor`.
  """

  whole_batch = True  # these lengths are of the batch

  def of_run(
    self, timeline: Timeline, example: Mapping[str, Any], where: str
  ) -> 'Guide':
    """Return the guide for a run and such examples, or raise UserError."""
    raise NotImplementedError

  def init(self, rng: jax.Array, width: int) -> Params:
    """Return parameters for features [B, ..., width]."""
    return {}

  def carried(self, width: int) -> Any:
    """Return the first state: arrays."""
    return None

  def factor(self, step: Array) -> Array:
    """Return the factor of the gradient that the model gets."""
    raise NotImplementedError

  def __call__(self, seen: 'Seen', params: Params, state: Any) -> Pull:
    raise NotImplementedError


class Objective:
  """A loss of a model, made by a factory (model, *, preprocess) -> Objective.

  To redeclare one of these as a required field, write
  `name: T = dataclasses.field()`.

  Attributes:
    activation: from logits to predictions: 'softmax', 'sigmoid' or 'identity'.
    whole_batch: whether the loss is not a mean over micro-batches.
    teachers: FrozenModels by name, whose parameters are passed to the step.
    ema_weight: function step -> weight of the EMA, see optim.schedules.Ema;
      None: the run decides whether there is an EMA.
    terms: what a config adds to its loss, see OfFeatures.
    for_grids: whether batches may be of `data.transforms.KeepAspect`.
    kinds: what its metrics are.
  """

  activation: str = 'softmax'
  whole_batch: bool = False
  teachers: Mapping[str, Any] = MappingProxyType({})
  ema_weight: Callable[[jax.Array], Any] | None = None
  terms: Terms = MappingProxyType({})
  for_grids = False
  kinds: ClassVar[Kinds] = {'loss': LOSS, 'accuracy': RATE}

  def __call__(
    self,
    params: Params,
    batch: Batch,
    rng: jax.Array,
    context: Context = Context(),
  ) -> Outputs:
    """Return (mean loss, metrics), and what the next context carries."""
    raise NotImplementedError

  def of_run(
    self, timeline: Timeline, images: jax.ShapeDtypeStruct, choose: Any = None
  ) -> 'Objective':
    """Return the objective for a run of this length, and for these images.

    `images` describes a batch of one float image. `choose` is a function
    (model, images, backward=...) -> model with its attention, for teachers.
    """
    return self

  def check(self, example: Mapping[str, Any]) -> None:
    """Raise UserError if the loss is not for such examples."""
    if 'grid' in example and not self.for_grids:
      raise UserError(
        f'{type(self).__name__} cannot learn from images of any aspect ratio '
        '(KeepAspect). Use a loss of labels, without mixing, or distill.'
      )

  def init(self, rng: jax.Array, images: jax.ShapeDtypeStruct) -> Params:
    """Return params['objective'], which no reader of the weights sees."""
    return {}

  def carried(self) -> Any:
    """Return what the first context carries: arrays, means over the batch."""
    return None

  def with_terms(self, terms: Terms) -> 'Objective':
    """Return the objective with other terms, which may be Guides."""
    raise UserError(
      f'{type(self).__name__} has no place for the guides {[*terms]}. Use '
      'LeJepa, Dino, SimDino or DinoV2.'
    )

  def prepare(self, batch: Batch, rng: jax.Array) -> Batch:
    """Return a changed whole batch, before it is cut into micro-batches."""
    return batch

  def shown(self, batch: Batch, rng: jax.Array) -> Batch:
    """Return a batch as the model gets it: 'image', uint8 or float, 'label'."""
    return self.prepare(batch, rng)

  def pictures(
    self, params: Params, batch: Batch, rng: jax.Array
  ) -> dict[str, jax.Array]:
    """Return {title: uint8 [n, k, H, W, C]}: n rows of k images of a batch."""
    return {}


class OfFeatures(Objective):
  """An objective that computes features once, for its loss and its terms."""

  def encode(self, seen: Seen) -> Seen:
    """Return it with the features that the loss and its terms need."""
    raise NotImplementedError

  def loss(self, seen: Seen) -> Outputs:
    """Return what a call returns, without terms."""
    raise NotImplementedError

  def __call__(
    self, params: Params, batch: Batch, rng: Array, context: Context = Context()
  ) -> Outputs:
    guides, states = guides_of(self), {}
    if guides:
      states = context.carried['terms']
      context = context._replace(carried=context.carried['loss'])
    seen = self.encode(Seen(params, batch, rng, context))
    loss, metrics, *carried = self.loss(seen)
    if not self.terms:
      return loss, metrics, *carried
    pulls = {
      k: fn(seen, params['objective']['terms'][k], states[k])
      for k, fn in guides.items()
    }
    values = {k: x.loss for k, x in pulls.items()}
    values |= {k: x.fn(seen) for k, x in self.terms.items() if k not in pulls}
    for name, term in self.terms.items():
      if name in {*metrics, 'grad_norm', 'lr'}:
        raise UserError(
          f'The term {name!r} has the name of a metric. Rename it.'
        )
      metrics = {**metrics, name: (value := jnp.mean(values[name]))}
      loss += term.weight * value if term.weight else 0.0
    for name, more in _along(guides, pulls, context.step).items():
      loss += self.terms[name].weight * more
    if guides:
      last = {'loss': carried[0] if carried else None}
      carried = [last | {'terms': {k: x.state for k, x in pulls.items()}}]
    return loss, {**metrics, 'loss': loss}, *carried


def guides_of(objective: Objective) -> dict[str, Guide]:
  """Return the terms that are Guides."""
  terms = objective.terms.items()
  return {k: x.fn for k, x in terms if isinstance(x.fn, Guide)}


def first_carried(objective: Objective, width: int) -> Any:
  """Return what the first context carries, for features [B, ..., width]."""
  carried, guides = objective.carried(), guides_of(objective)
  if not guides:
    return carried
  states = {k: fn.carried(width) for k, fn in guides.items()}
  return {'loss': carried, 'terms': states}


def of_examples(
  objective: Objective, example: Mapping[str, Any], timeline: Timeline
) -> Objective:
  """Return the objective with guides for such examples."""
  if not (guides := guides_of(objective)):
    return objective
  made = {
    k: dataclasses.replace(
      objective.terms[k], fn=fn.of_run(timeline, example, f'The guide {k!r}')
    )
    for k, fn in guides.items()
  }
  return objective.with_terms({**objective.terms, **made})


def _along(guides, pulls, step):
  """Return numbers that are 0, whose gradients are the pulls of the guides."""
  lengths = {k: optax.tree.norm(x.gradient) for k, x in pulls.items()}
  pulling = sum(x > 0 for x in lengths.values())
  mean, found = sum(lengths.values()) / jnp.maximum(pulling, 1), {}
  for k, (_, x, gradient, _) in pulls.items():
    scale = mean / jnp.where(lengths[k] > 0, lengths[k], 1.0)
    pull = jax.lax.stop_gradient(guides[k].factor(step) * scale * gradient)
    found[k] = jnp.sum(pull * (x - jax.lax.stop_gradient(x)))
  return found


class Labelled(Objective):
  """An objective that compares logits with labels, and has no parameters."""


@dataclasses.dataclass(frozen=True, eq=False)
class Function(Labelled):
  """The objective of a function (params, batch, rng) -> (loss, metrics)."""

  fn: LossFn

  def __call__(
    self, params: Params, batch: Batch, rng: Array, context: Context = Context()
  ) -> Outputs:
    return self.fn(params, batch, rng)


def as_objective(loss_fn: LossFn) -> Objective:
  """Return an Objective as it is, and a function as an Objective."""
  if isinstance(loss_fn, Objective):
    return loss_fn
  if own := sorted(_NAMES & {*dir(loss_fn)}):
    raise UserError(
      f'{type(loss_fn).__name__} has {", ".join(own)}, but is no Objective. '
      'Inherit from vit_jax.step.Objective.'
    )
  return Function(loss_fn)


_NAMES = {name for name in vars(Objective) if not name.startswith('_')}


def train_step(
  state: TrainState,
  batch: Batch,
  *,
  loss_fn: LossFn,
  tx: optax.GradientTransformation,
  teachers: Mapping[str, Params] | None = None,
  accum_steps: int = 1,
  ema_weight: Callable[[jax.Array], Any] | None = None,
  frozen: PyTree | None = None,
  probes: Mapping[str, Callable[..., Any]] | None = None,
) -> tuple[TrainState, Metrics]:
  """Make one update.

  Args:
    batch: tree of arrays [B, ...].
    loss_fn: (params, batch, rng) -> (mean loss, metrics); see Objective.
    teachers: parameters of the teachers of `loss_fn`, by name.
    accum_steps: number of micro-batches that a batch is cut into, to save
      memory; the result is the gradient of the whole batch.
    ema_weight: see `optim.schedules.Ema`; None: the state has no EMA.
    frozen: tree of bools: the parameters that `tx` does not train. Their
      gradients are 0, and no time is spent on them.
    probes: see probes.py; what they return is metrics['probes'].

  Returns:
    (TrainState, {name: scalar}); 'grad_norm' is the norm before clipping.
  """
  objective = as_objective(loss_fn)
  rng = jax.random.fold_in(state.rng, state.step)
  batch = objective.prepare(batch, jax.random.fold_in(rng, 2**32 - 1))
  context = Context(state.step, state.ema, state.carried, teachers)

  def loss(params, batch, rng):
    if frozen is not None:
      stop = jax.lax.stop_gradient
      params = jax.tree.map(lambda x, y: stop(x) if y else x, params, frozen)
    value, *aux = objective(params, batch, rng, context)
    return value, aux

  grad_fn = accumulate(jax.grad(loss, has_aux=True), accum_steps)
  grads, (metrics, *carried) = grad_fn(state.params, batch, rng)
  updates, opt_state = tx.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  ema = state.ema
  if ema_weight is not None:
    ema = optax.incremental_update(params, ema, ema_weight(state.step))
  metrics |= {'grad_norm': optax.tree.norm(grads)}
  if probes:
    seen = {'params': state.params, 'grads': grads, 'updates': updates}
    found = {k: fn(step=state.step + 1, **seen) for k, fn in probes.items()}
    metrics |= {'probes': found}
  fixed = params, opt_state, state.rng, ema
  state = TrainState(state.step + 1, *fixed, *carried)
  return state, metrics


def accumulate(
  grad_fn: Callable[..., Any], accum_steps: int
) -> Callable[..., Any]:
  """Return grad_fn averaged over micro-batches, each with its own rng."""
  if accum_steps == 1:
    return grad_fn

  def accumulated(params, batch, rng):
    # Micro-batch m takes every accum_steps-th example, so that each device
    # keeps working on the examples that it has.
    micro = jax.tree.map(
      lambda x: x.reshape(-1, accum_steps, *x.shape[1:]).swapaxes(0, 1), batch
    )
    rngs = jax.random.split(rng, accum_steps)

    def add(sums, micro_batch_and_rng):
      out = grad_fn(params, *micro_batch_and_rng)
      return jax.tree.map(jnp.add, sums, out), None

    first = jax.tree.map(lambda x: x[0], (micro, rngs))
    shapes = jax.eval_shape(grad_fn, params, *first)
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
  `loss_fn` may add parameters and what it carries, see Objective.
  """
  init_rng, train_rng = jax.random.split(rng)
  example = jnp.zeros(images.shape, images.dtype)
  params = model.init(init_rng, example)['params']
  objective = as_objective(loss_fn) if loss_fn else Objective()
  more = objective.init(jax.random.fold_in(init_rng, 1), images)
  width = 0
  if guides := guides_of(objective):
    features = functools.partial(model.init_with_output, method='features')
    found, _ = jax.eval_shape(features, init_rng, example)
    width = found['pre_logits'].shape[-1]
    rngs = jax.random.split(jax.random.fold_in(init_rng, 2), len(guides))
    made = {k: x.init(rng, width) for rng, (k, x) in zip(rngs, guides.items())}
    more = {**more, 'terms': made}
  if more:
    params = {**params, 'objective': more}
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=tx(params).init(params),
    rng=train_rng,
    ema=jax.tree.map(jnp.copy, params) if ema else None,
    carried=first_carried(objective, width),
  )

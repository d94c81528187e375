"""The set-up of a training run, from shapes; tools/compile shares it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import tree
from vit_jax.analysis import flops
from vit_jax.config import Partial
from vit_jax.data.pipeline import Data
from vit_jax.durations import Timeline
from vit_jax.evals.evaluators import check_class_names
from vit_jax.io import terminal
from vit_jax.parallel import sharding
from vit_jax.parallel.sharding import Rules
from vit_jax.runs import compiled
from vit_jax.step import (
  Objective,
  TrainState,
  as_objective,
  init_state,
  of_examples,
  train_step,
)
from vit_jax.training import Change, Training
from vit_jax.types import LossFn, Model, Params, PathRule, UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examples:
  """Facts of the training data that decide shapes and the length of a run."""

  batch_size: int
  count: int
  first: Mapping[str, Any]
  num_classes: int | None
  class_names: Sequence[str] | None = None

  @classmethod
  def of(cls, data: Data) -> 'Examples':
    return cls(
      batch_size=data.batch_size,
      count=len(data.source),
      first=data.first_example(),
      num_classes=getattr(data.source, 'num_classes', None),
      class_names=getattr(data.source, 'class_names', None),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
  """Shapes, shardings and functions of a run; no array yet.

  Attributes:
    described: the model as written to model.json.
    model: the same, with the attention that was chosen.
    images: shape and dtype of a batch of one float image.
    init: function rng -> TrainState.
    step: the jitted step, which donates the state that it is given.
    shapes: of the arguments of `step` (state, batch, teachers), and shardings.
  """

  described: Model
  model: Model
  images: jax.ShapeDtypeStruct
  timeline: Timeline
  total_steps: int
  objective: Objective
  learning_rate: Callable[[Any], Any]
  init: Callable[[jax.Array], TrainState]
  step: Any
  shapes: dict[str, Any]

  @property
  def state(self) -> TrainState:
    """Shapes of the state."""
    return self.shapes['state']

  @property
  def num_params(self) -> int:
    return sum(x.size for x in jax.tree.leaves(self.state.params))

  def load_teachers(self, mesh: Any, rules: Rules | None) -> dict[str, Any]:
    """Return the parameters of the teachers of the objective."""
    found = self.objective.teachers.items()
    return {name: x.load(mesh, rules) for name, x in found}

  def flops_per_step(self) -> float:
    """Return the operations of a step, on all devices."""
    if 'objective' in self.state.params:  # more than one pass over each image
      return compiled.reuse(flops.count, self.step, **self.shapes)
    forward = compiled.reuse(flops.forward, self.model, self.images)
    return 3 * self.timeline.batch_size * forward


def make(
  training: Training,
  examples: Examples,
  mesh: Any,
  choose: Callable[..., Model],
  *,
  change: Change | None = None,
) -> Setup:
  """Return the Setup of a run, or of its steps with a changed model.

  Devices of the mesh may be described only, to compile for them. `choose` is a
  function (model, images, backward=...) -> the model with its attention.

  Raises:
    UserError: if the parts do not fit each other, the data or the mesh.
  """
  batch_size, accum_steps = examples.batch_size, training.accum_steps
  sharding.check_batch_size(batch_size, mesh, parts=accum_steps)
  if examples.num_classes == 1 and not jnp.ndim(examples.first['label']):
    raise UserError(
      f'The training data has one class: {examples.class_names}. Expected two '
      'or more. Without labels, set data.labels=False.'
    )
  is_of_levels = getattr(training.preprocess, 'of_levels', False)
  if is_of_levels and examples.first['image'].dtype != np.uint8:
    raise UserError(
      f'preprocess={training.preprocess} is for levels 0 to 255, and the '
      f'images are {examples.first["image"].dtype}. Set it to a '
      'models.dense.Standardize, as the word channels=N of configs does.'
    )
  shape = examples.first['image'].shape[-3:]  # of one of several views
  images = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
  timeline = Timeline(batch_size, examples.count)
  total_steps = timeline.steps(training.total)
  timeline = dataclasses.replace(timeline, total_steps=total_steps)

  described = with_num_classes(training.model, examples.num_classes)
  described = change(described) if change else described
  model = choose(described, images)
  fn = compiled.reuse(training.objective, model, preprocess=training.preprocess)
  objective = compiled.reuse(as_objective, fn)
  if objective.teachers:  # runs never share what an old file said
    objective = objective.of_run(timeline, images, choose)
  else:
    objective = compiled.reuse(objective.of_run, timeline, images)
  _check(objective, training)
  objective.check(examples.first)
  objective = of_examples(objective, examples.first, timeline)
  teachers = {}
  for name, teacher in objective.teachers.items():
    weights = getattr(teacher, 'weights', None)
    if weights and weights.decode.dtype != examples.first['image'].dtype:
      raise UserError(
        f'The {name} is for images of {weights.decode.dtype}, and the data '
        f'have {examples.first["image"].dtype}. Use another.'
      )
    remedy = f'--config.objective.{name}.same_classes=True'
    names = teacher.class_names, examples.class_names
    check_class_names(name, *names, remedy)
    teachers[name] = teacher.abstract_params(mesh, training.sharding)

  learning_rate = compiled.reuse(training.schedule, timeline)
  make_tx = Partial(
    training.optimizer, learning_rate=learning_rate, timeline=timeline
  )
  probes = training.probes or {}
  init, state, step = compiled.reuse(
    make_step,
    model,
    images=images,
    loss_fn=objective,
    make_tx=make_tx,
    mesh=mesh,
    rules=training.sharding,
    accum_steps=accum_steps,
    ema_weight=training.ema,
    freeze=() if training.optimizer.thaw else training.optimizer.freeze,
    probes={k: Partial(x, timeline) for k, x in probes.items()},
  )
  batch = compiled.batch_shapes(examples.first, batch_size, mesh)
  return Setup(
    described=described,
    model=model,
    images=images,
    timeline=timeline,
    total_steps=total_steps,
    objective=objective,
    learning_rate=learning_rate,
    init=init,
    step=step,
    shapes={'state': state, 'batch': batch, 'teachers': teachers},
  )


@dataclasses.dataclass(frozen=True)
class Plan:
  """The Setups of a run, whose steps may have variants of the model.

  Attributes:
    ready: the Setup of the run.
    setups: all that occur, by what they are named in metrics.
    of_step: index of the Setup of each step, uint8 [total_steps].
  """

  ready: Setup
  setups: Mapping[str, Setup]
  of_step: Any

  def parts(self) -> dict[str, Any]:
    """Return what a Monitor needs."""
    flops = [x.flops_per_step() for x in self.setups.values()]
    names = [*self.setups]
    return {'flops_per_step': flops, 'parts': names, 'of_step': self.of_step}

  def step(self, number: int) -> Any:
    """Return the jitted step of a number, from 1."""
    return [*self.setups.values()][self.of_step[number - 1]].step

  @classmethod
  def of(
    cls,
    training: Training,
    examples: Examples,
    mesh: Any,
    choose: Callable[..., Model],
  ) -> 'Plan':
    """Return the plan of a run, see `make`.

    Raises:
      UserError: if a size does not fit, or needs other parameters.
    """
    ready = make(training, examples, mesh, choose)
    _caution(training, ready.timeline)
    steps, variants = ready.total_steps, training.variants
    if variants is None:
      return cls(ready, {'': ready}, np.zeros(steps, np.uint8))
    drawn = variants.of_steps(steps, training.seed)
    used, of_step = np.unique(drawn, return_inverse=True)
    setups, expected = {}, jax.tree.map(jnp.shape, ready.state)
    names = [*variants.changes]
    for name in (names[i] for i in used):
      change = variants.changes[name]
      try:
        made = make(training, examples, mesh, choose, change=change)
        jax.eval_shape(made.step, **made.shapes)
      except UserError as error:
        raise type(error)(f'variants, {name}: {error}') from error
      if jax.tree.map(jnp.shape, made.state) != expected:
        raise UserError(
          f'variants, {name}: this model or objective has other parameters for '
          'each variant. Use objectives of logits, and models whose parameters '
          'do not depend on it.'
        )
      setups[name] = made
    return cls(ready, setups, of_step.astype(np.uint8))


def _caution(training, timeline):
  """Print what is legal, but rarely meant."""
  count, batch_size = timeline.num_examples, timeline.batch_size
  if count < batch_size:
    terminal.say(
      f'look: {count} training images are fewer than a batch, data.batch_size='
      f'{batch_size}: each occurs several times in a step.'
    )
  steps = timeline.total_steps
  if training.ema:
    weights = np.broadcast_to(training.ema(np.arange(steps)), steps)
    if (initial := np.prod(1 - weights)) > 0.1:
      terminal.say(
        f'look: after {steps} steps, {initial:.0%} of the EMA, which is '
        'evaluated, are the initial parameters. Set ema.debias=True or a lower '
        'ema.decay, or train for longer.'
      )


def _check(objective, training):
  if training.ema and objective.ema_weight:
    raise UserError(
      f'ema={training.ema}, but the teacher of this objective is an EMA with a '
      'momentum of its own. Leave ema out, and set --config.objective.momentum.'
    )
  compare = [k for k, x in objective.terms.items() if x.whole_batch]
  if training.accum_steps > 1 and (compare or objective.whole_batch):
    what = f'the term {compare[0]!r}' if compare else 'the loss'
    raise UserError(
      f'accum_steps={training.accum_steps}, but {what} of this objective '
      'compares all images of a batch. Leave accum_steps out, and use a '
      'smaller batch.'
    )


def make_step(
  model: Model,
  *,
  images: jax.ShapeDtypeStruct,
  loss_fn: LossFn,
  make_tx: Callable[[Params], Any],
  mesh: Any,
  rules: Rules | None = None,
  ema_weight: Callable[[jax.Array], Any] | None = None,
  freeze: Sequence[PathRule] = (),
  **options: Any,
) -> tuple[Callable[..., TrainState], TrainState, Any]:
  """Return (init, abstract_state, step_fn) of `train_step`.

  They are rng -> TrainState; ShapeDtypeStructs with shardings; and the jitted
  step. `make_tx` makes the optax transformation for parameters, which does not
  train those of the path rules `freeze`; rules are those of `sharding.infer`;
  other options are those of `train_step`.
  """
  ema_weight = as_objective(loss_fn).ema_weight or ema_weight
  init = functools.partial(
    init_state,
    model=model,
    images=images,
    tx=make_tx,
    ema=ema_weight is not None,
    loss_fn=loss_fn,
  )
  abstract_state = jax.eval_shape(init, jax.random.key(0))
  shardings = sharding.infer(abstract_state, rules, mesh)
  step_fn = functools.partial(
    train_step,
    loss_fn=loss_fn,
    tx=make_tx(abstract_state.params),
    ema_weight=ema_weight,
    frozen=tree.mask(freeze, abstract_state.params) if freeze else None,
    **options,
  )
  outputs = (shardings, sharding.replicated(mesh))
  # Costly passes take longer than they save in a program that runs once.
  on_cpu = mesh.devices.flat[0].platform == 'cpu'
  options = {'xla_backend_optimization_level': 1} if on_cpu else None
  return (
    jax.jit(init, out_shardings=shardings, compiler_options=options),
    sharding.annotate(abstract_state, shardings),
    jax.jit(step_fn, donate_argnums=0, out_shardings=outputs),
  )


def with_num_classes(model: Any, found: int | None) -> Any:
  """Return the model with the number of classes of the data if it has none."""
  given = getattr(model, 'num_classes', None)  # a partial has none
  if given is None:
    if found is None:
      raise UserError(
        'The training data does not say how many classes it has. Add '
        '--config.model.num_classes=N, or, for data with names, a file with '
        'one name per line: --config.data.source.class_names=FILE'
      )
    return getattr(model, 'clone', model)(num_classes=found)
  if found is not None and given < found:
    raise UserError(
      f'model.num_classes={given}, but the training data has {found} classes. '
      f'Add --config.model.num_classes={found}'
    )
  return model

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
from vit_jax.durations import Interval, Timeline
from vit_jax.evals.evaluators import check_class_names
from vit_jax.models.flexi import Sizes, with_patches
from vit_jax.optim.optimizers import Optimizer
from vit_jax.optim.schedules import Ema, Schedule
from vit_jax.parallel import sharding
from vit_jax.parallel.sharding import Rules
from vit_jax.probes import Probe
from vit_jax.runs import compiled
from vit_jax.step import (
  Objective,
  TrainState,
  as_objective,
  init_state,
  train_step,
)
from vit_jax.types import (
  Count,
  LossFn,
  MakeObjective,
  Model,
  Params,
  PathRule,
  Preprocess,
  Size,
  UserError,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """The arguments of `train` that decide what is trained."""

  model: Model | functools.partial[Model]
  objective: MakeObjective
  optimizer: Optimizer
  schedule: Schedule
  total: Interval
  preprocess: Preprocess
  accum_steps: Count
  ema: Ema | None

  @classmethod
  def of(cls, arguments: Mapping[str, Any]) -> 'Settings':
    return cls(**{x.name: arguments[x.name] for x in dataclasses.fields(cls)})


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
    shapes: shapes and shardings of the arguments of `step`: state, batch and
      teachers.
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

  def flops_per_step(self) -> float:
    """Return the operations of a step, on all devices."""
    if 'objective' in self.state.params:  # more than one pass over each image
      return compiled.reuse(flops.count, self.step, **self.shapes)
    forward = compiled.reuse(flops.forward, self.model, self.images)
    return 3 * self.timeline.batch_size * forward


def make(
  settings: Settings,
  examples: Examples,
  mesh: Any,
  rules: Rules | None,
  choose: Callable[..., Model],
  probes: Mapping[str, Probe] | None = None,
  *,
  patch_size: Size | None = None,
) -> Setup:
  """Return the Setup of a run, or of its steps with this size of patches.

  Devices of the mesh may be described only, to compile for them. `choose` is a
  function (model, images, backward=...) -> the model with its attention.

  Raises:
    UserError: if the settings do not fit each other, the data or the mesh.
  """
  batch_size, accum_steps = examples.batch_size, settings.accum_steps
  sharding.check_batch_size(batch_size, mesh, parts=accum_steps)
  if examples.num_classes == 1 and not jnp.ndim(examples.first['label']):
    raise UserError(
      f'The training data has one class: {examples.class_names}. Expected two '
      'or more. Without labels, set data.labels=False.'
    )
  shape = examples.first['image'].shape[-3:]  # of one of several views
  images = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
  timeline = Timeline(batch_size, examples.count)
  total_steps = timeline.steps(settings.total)
  timeline = dataclasses.replace(timeline, total_steps=total_steps)

  described = with_num_classes(settings.model, examples.num_classes)
  described = with_patches(described, patch_size)
  model = choose(described, images)
  fn = compiled.reuse(settings.objective, model, preprocess=settings.preprocess)
  objective = compiled.reuse(as_objective, fn)
  if objective.teachers:  # runs never share what an old file said
    objective = objective.of_run(timeline, images, choose)
  else:
    objective = compiled.reuse(objective.of_run, timeline, images)
  _check(objective, settings)
  if 'grid' in examples.first and not objective.for_grids:
    raise UserError(
      f'{type(objective).__name__} cannot learn from images of any aspect '
      'ratio (KeepAspect). Use a loss of labels, without mixing, or distill.'
    )
  teachers = {}
  for name, teacher in objective.teachers.items():
    remedy = f'--config.objective.{name}.same_classes=True'
    names = teacher.class_names, examples.class_names
    check_class_names(name, *names, remedy)
    teachers[name] = teacher.abstract_params(mesh, rules)

  learning_rate = compiled.reuse(settings.schedule, timeline)
  make_tx = Partial(
    settings.optimizer, learning_rate=learning_rate, timeline=timeline
  )
  init, state, step = compiled.reuse(
    make_step,
    model,
    images=images,
    loss_fn=objective,
    make_tx=make_tx,
    mesh=mesh,
    rules=rules,
    accum_steps=accum_steps,
    ema_weight=settings.ema,
    freeze=() if settings.optimizer.thaw else settings.optimizer.freeze,
    probes={k: Partial(x, timeline) for k, x in (probes or {}).items()},
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
  """The Setups of a run, whose steps may differ in the size of the patches.

  Attributes:
    setups: all that occur, by what they are named in metrics.
    of_step: index of the Setup of each step, uint8 [total_steps].
  """

  setups: Mapping[str, Setup]
  of_step: Any

  @classmethod
  def of(
    cls,
    ready: Setup,
    sizes: Sizes | None,
    seed: int,
    make_one: Callable[..., Setup],
  ) -> 'Plan':
    """Return the plan of a run whose own Setup is `ready`.

    `make_one` is a function (patch_size=...) -> Setup.

    Raises:
      UserError: if a size does not fit, or needs other parameters.
    """
    steps = ready.total_steps
    if sizes is None:
      return cls({'': ready}, np.zeros(steps, np.uint8))
    used, of_step = np.unique(sizes.of_steps(steps, seed), return_inverse=True)
    setups, expected = {}, jax.tree.map(jnp.shape, ready.state)
    for size in (sizes.patch_sizes[i] for i in used):
      try:
        made = make_one(patch_size=size)
        jax.eval_shape(made.step, **made.shapes)
      except UserError as error:
        raise type(error)(f'sizes, patch_size={size}: {error}') from error
      if jax.tree.map(jnp.shape, made.state) != expected:
        raise UserError(
          f'sizes, patch_size={size}: this model or objective has other '
          'parameters for each size. Use objectives of logits, and '
          'embeddings of vit_jax/models/flexi.py.'
        )
      sides = dict.fromkeys(made.model.embedding.patch_size)
      setups[f'patch_{"x".join(map(str, sides))}'] = made
    return cls(setups, of_step.astype(np.uint8))


def _check(objective, settings):
  if settings.ema and objective.ema_weight:
    raise UserError(
      f'ema={settings.ema}, but the teacher of this objective is an EMA with a '
      'momentum of its own. Leave ema out, and set --config.objective.momentum.'
    )
  compare = [k for k, x in objective.terms.items() if x.whole_batch]
  if settings.accum_steps > 1 and (compare or objective.whole_batch):
    what = f'the term {compare[0]!r}' if compare else 'the loss'
    raise UserError(
      f'accum_steps={settings.accum_steps}, but {what} of this objective '
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

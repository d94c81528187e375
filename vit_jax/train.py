"""Training: the story of a run around the pure step of step.py."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from etils import epath

from vit_jax import config
from vit_jax.analysis import flops
from vit_jax.config import Partial, Provenance
from vit_jax.data.pipeline import Data
from vit_jax.durations import Interval, Timeline
from vit_jax.evals import evaluators as evaluators_lib
from vit_jax.evals.evaluators import Factory
from vit_jax.io import terminal
from vit_jax.models import attention_choice
from vit_jax.models.layers import Normalize
from vit_jax.optim.optimizers import Optimizer
from vit_jax.optim.schedules import Ema, Schedule
from vit_jax.parallel import sharding as layout
from vit_jax.parallel.hosts import Stopped, StopSignal
from vit_jax.parallel.sharding import MeshSizes, Rules, put_batch
from vit_jax.reports import confusion, page, sheets
from vit_jax.runs import compiled, workdirs
from vit_jax.runs.checkpoint import Checkpoints
from vit_jax.runs.metrics import Logging, Monitor, Stopwatch, check_finite
from vit_jax.step import Objective, as_objective, init_state, train_step
from vit_jax.step import TrainState as TrainState
from vit_jax.types import (
  HARMLESS,
  Count,
  KeySeed,
  LossFn,
  MakeObjective,
  Model,
  Params,
  PathLike,
  Preprocess,
  UserError,
)
from vit_jax.weights import formats, surgery
from vit_jax.weights.surgery import InitFrom

_MEMORY = (
  'To need less: --config.accum_steps=2 (or more, same result), '
  '--config.mesh.fsdp=-1 --config.mesh.data=1 (state split over devices), '
  '--config.model.remat=full, or a smaller --config.data.batch_size. '
  '--dry_run shows the memory.'
)


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """An evaluator of a training run, and when it runs.

  Attributes:
    evaluator: makes it, see evaluators.py. In a config, the `target`.
    every: time between its runs; None for one at the end.
  """

  evaluator: Factory = dataclasses.field(metadata={'rest': True})
  every: Annotated[Interval | None, HARMLESS] = None


def train(
  workdir: PathLike,
  *,
  model: Model | functools.partial[Model],
  data: Data,
  objective: MakeObjective,
  optimizer: Optimizer,
  schedule: Schedule,
  total: Interval,
  evals: Mapping[str, Evaluation] | None = None,
  checkpoints: Annotated[Checkpoints, HARMLESS] = Checkpoints(),
  init_from: InitFrom | None = None,
  preprocess: Preprocess = Normalize(),
  mesh: Annotated[MeshSizes, HARMLESS] = MeshSizes(),
  sharding: Annotated[Rules | None, HARMLESS] = None,
  accum_steps: Count = 1,
  ema: Ema | None = None,
  seed: KeySeed = 0,
  logging: Annotated[Logging, HARMLESS] = Logging(),
  provenance: Provenance | None = None,
  dry_run: Annotated[bool, HARMLESS] = False,
) -> TrainState | Any:
  """Train a model, resuming from the newest checkpoint in workdir.

  No state is saved or evaluated that has NaN or Inf; the run ends instead.

  Args:
    workdir: directory of the run; local, or gs://...
    model: Flax module whose call maps images [B, H, W, C] to logits [B, K]. A
      num_classes of None is set to the number of classes of the data.
    data, total: training images and batches; length of training.
    objective: function (model, preprocess=...) -> LossFn.
    optimizer: optimizer rule with clipping, decay mask, freezing.
    schedule: learning rate: function of the Timeline -> (step -> rate).
    evals: evaluators by name, and when they run. All run at the end.
    checkpoints: when checkpoints are written and which are kept.
    init_from: weights to start from if workdir has no checkpoint; None: random.
    preprocess: uint8 images -> float images, on the device.
    mesh: sizes of the mesh axes 'data', 'fsdp' and 'model'.
    sharding: rules, see sharding.infer; None: rules that follow from the mesh.
    accum_steps: micro-batches per step, to save memory; same result.
    ema: EMA of the parameters, used by evaluators and saved; None: no EMA.
    seed: of initialisation, data order, augmentation and dropout.
    logging: records of metrics, their writers, and traces.
    provenance: the config that the arguments are from; None: there is none.
    dry_run: stop before the first step, after all checks; print a summary.

  Returns:
    The final TrainState; None after a dry run.

  Raises:
    UserError: before the first step, if anything does not fit; later a
      NonFiniteError or an OutOfMemoryError.
    Stopped: a signal asked to stop, and a checkpoint was saved.
  """
  stopwatch = Stopwatch()
  epath.Path(workdir).mkdir(parents=True, exist_ok=True)

  # 1. Is this the same run as before, if there was one?
  provenance = provenance or Provenance()
  parts = {
    'model': model,
    'data': data,
    'objective': objective,
    'optimizer': optimizer,
    'schedule': schedule,
    'total': total,
    'evals': evals,
    'init_from': init_from,
    'preprocess': preprocess,
    'accum_steps': accum_steps,
    'ema': ema,
    'seed': seed,
  }
  entries = provenance.entries or config.entries(parts)
  basis = workdirs.basis_of(entries, parts)
  changed = workdirs.check_changes(workdir, basis, provenance.allow_changes)

  # 2. Data: its size gives the number of steps and classes.
  mesh = mesh.make()
  layout.check_batch_size(data.batch_size, mesh, parts=accum_steps)
  example = data.first_example()
  image_shape = example['image'].shape[-3:]  # of one of several views
  images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
  class_names = getattr(data.source, 'class_names', None)
  timeline = Timeline(data.batch_size, len(data.source))
  total_steps = timeline.steps(total)
  timeline = dataclasses.replace(timeline, total_steps=total_steps)

  # 3. The model and its loss.
  described = with_num_classes(model, data.source)
  choices = workdirs.read(workdir, 'attention.json')
  choose = attention_choice.Chooser(
    data.batch_size // accum_steps, mesh, choices, terminal.say
  )
  model = choose(described, images)
  loss_fn = make_loss(objective, model, preprocess, timeline)
  if ema and loss_fn.ema_weight:
    raise UserError(
      f'ema={ema}, but the teacher of this objective is an EMA with a momentum '
      'of its own. Leave ema out, and set --config.objective.momentum.'
    )
  if accum_steps > 1 and loss_fn.whole_batch:
    raise UserError(
      f'accum_steps={accum_steps}, but the loss of this objective compares all '
      'images of a batch. Leave accum_steps out, and use a smaller batch.'
    )
  teacher = loss_fn.teacher
  teacher_shapes = []
  if teacher is not None:
    evaluators_lib.check_class_names(
      'teacher',
      teacher.class_names,
      class_names,
      '--config.objective.teacher.same_classes=True',
    )
    teacher.model = choose(teacher.model, teacher.images, backward=False)
    teacher_shapes.append(teacher.abstract_params(mesh, sharding))
  learning_rate = compiled.reuse(schedule, timeline)

  # 4. Shapes, then shardings, then the step.
  init, abstract_state, step_fn = compiled.reuse(
    make_step,
    model,
    images=images,
    loss_fn=loss_fn,
    make_tx=Partial(optimizer, learning_rate=learning_rate, timeline=timeline),
    mesh=mesh,
    rules=sharding,
    accum_steps=accum_steps,
    ema_weight=ema,
  )
  abstract_batch = compiled.batch_shapes(example, data.batch_size, mesh)
  shapes = (abstract_state, abstract_batch, *teacher_shapes)

  # 5. Evaluators open their data now, not after a day of training.
  evals = evals or {}
  evaluators = evaluators_lib.make(
    {name: each.evaluator for name, each in evals.items()},
    model,
    preprocess=preprocess,
    mesh=mesh,
    class_names=class_names,
    abstract_params=abstract_state.params,
  )
  eval_every = {name: timeline.steps(x.every) for name, x in evals.items()}
  checkpointer, save_every = checkpoints.open(workdir, timeline, eval_every)
  evaluators_lib.check_metric(
    'checkpoints.best_metric', checkpoints.best_metric, evaluators
  )
  newest = checkpointer.latest_step()
  if init_from and newest is None:
    formats.find(init_from.path, init_from.step)
  if dry_run:
    compiled.report(model, step_fn, shapes, mesh, total_steps)
    return None

  with (
    contextlib.closing(workdirs.Claim(workdir)) as claim,
    contextlib.closing(checkpointer),
    compiled.explaining(_MEMORY),
  ):
    # 6. The state to start from: a checkpoint, weights, or scratch.
    saved: Mapping[str, Any] = {'position': 0}
    if newest is not None:
      state, saved = checkpointer.restore(abstract_state)
      origin = f'resumed at step {state.step} of {workdir}'
    else:
      state, origin = init(jax.random.key(seed)), 'initialised from scratch'
      if init_from:
        state, origin = surgery.load_into(state, described, init_from)
    start = int(state.step)
    check_finite(state, start, mesh)
    teacher_params = [teacher.load(x) for x in teacher_shapes]
    workdirs.record_start(workdir, basis, changed, newest)
    if choices:
      workdirs.write(workdir, 'attention.json', choices)
    workdirs.record_config(workdir, provenance)
    transforms = [getattr(x, 'transforms', ()) for x in evaluators.values()]
    workdirs.record_model(
      workdir,
      model=described,
      preprocess=preprocess,
      transforms=next(filter(None, transforms), None),
      image_shape=image_shape,
      class_names=class_names,
      activation=loss_fn.activation,
    )

    if 'objective' in state.params:  # more than one pass over each image
      flops_per_step = compiled.reuse(flops.count, step_fn, *shapes)
    else:
      flops_per_image = compiled.reuse(flops.forward, model, images)
      flops_per_step = 3 * data.batch_size * flops_per_image

    # 7. The loop. Metrics lag one step: the host never waits for the device.
    monitor = Monitor(
      workdir,
      timeline,
      logging,
      start_step=start,
      carried=saved.get('metrics'),
      learning_rate=learning_rate,
      flops_per_step=flops_per_step,
      stopwatch=stopwatch,
      config=provenance.config,
      before_write=claim.check,
    )
    num_params = sum(x.size for x in jax.tree.leaves(state.params))
    terminal.say(
      f'{type(model).__name__}, {num_params:,} parameters; batches of '
      f'{data.batch_size} images {"x".join(map(str, image_shape))}; '
      f'{total_steps} steps on {mesh.size} x {jax.devices()[0].device_kind}\n'
      f'{origin}; compiling ...'
    )
    batches = data.train_batches(
      seed=seed,
      start=saved['position'],
      skipped=saved.get('unreadable', ()),
      num_classes=model.num_classes,
      **layout.this_process(),
    )
    with (
      contextlib.closing(monitor),
      contextlib.closing(batches),
      StopSignal() as stop,
      jax.set_mesh(mesh),
      jax.transfer_guard('disallow'),
    ):
      for step in range(start + 1, total_steps + 1):
        with monitor.traced(step):
          with monitor.waiting(batches.spent):
            batch = next(batches)
          batch = put_batch(batch, mesh)
          state, metrics = step_fn(state, batch, *teacher_params)
          monitor.step(step, metrics, skipped=len(batches.skipped))

        last, stopping = step == total_steps, stop.requested(step)
        saving = last or stopping or step % save_every == 0
        due = {
          name: evaluator
          for name, evaluator in evaluators.items()
          if last or ((every := eval_every[name]) and step % every == 0)
        }
        if due or saving:
          monitor.flush()
          check_finite(state, step, mesh)
        results = _evaluate(due, step, state, monitor) if due else {}
        if saving:
          claim.check()
          with monitor.pause('saving'):
            saved = {
              'position': batches.position,
              'unreadable': sorted(batches.skipped),
              'metrics': monitor.carry(),
            }
            finite = {k: v for k, v in results.items() if math.isfinite(v)}
            checkpointer.save(step, state, saved, metrics=finite)
            if last or stopping:
              checkpointer.wait()
        if stopping:
          terminal.say(
            f'{stopping.name}: saved step {step} of {total_steps} in '
            f'{workdir}. Run the same command to resume.'
          )
          raise Stopped(128 + stopping)
      drawn = {}
      if start < total_steps:
        with jax.transfer_guard('allow'):
          drawn = _draw(loss_fn, evaluators, state, batch, mesh)
      monitor.finish(total_steps)
  if batches.skipped:
    terminal.say(data.name_skipped(batches.skipped))
  confusion.write_all(workdir, evaluators, class_names=class_names)
  sheets.write_all(workdir, drawn)
  page.write_at_end(workdir)
  return state


def _evaluate(evaluators, step, state, monitor):
  """Run the evaluators, log and return {'NAME/METRIC': value}."""
  results: dict[str, float] = {}
  for name, evaluator in evaluators.items():
    with monitor.pause('evals'):
      found = evaluators_lib.run(name, evaluator, state.eval_params)
    results |= {f'{name}/{key}': value for key, value in found.items()}
  monitor.write(step, results)
  if warning := evaluators_lib.non_finite(step, results):
    terminal.say(warning)
  return results


def _draw(loss_fn, evaluators, state, batch, mesh):
  """Return {title: rows of images} of the objective and the evaluators."""
  pictures = jax.jit(loss_fn.pictures, out_shardings=layout.replicated(mesh))
  drawn = jax.device_get(pictures(state.params, batch, state.rng))
  for evaluator in evaluators.values():
    if pictures := getattr(evaluator, 'pictures', None):
      drawn |= pictures(state.eval_params)
  return drawn


def make_loss(
  objective: MakeObjective,
  model: Model,
  preprocess: Preprocess,
  timeline: Timeline,
) -> Objective:
  """Return the objective of a run, which may follow its timeline."""
  made = compiled.reuse(objective, model, preprocess=preprocess)
  return as_objective(made).of_run(timeline)


def make_step(
  model: Model,
  *,
  images: jax.ShapeDtypeStruct,
  loss_fn: LossFn,
  make_tx: Callable[[Params], Any],
  mesh: Any,
  rules: Rules | None = None,
  accum_steps: int = 1,
  ema_weight: Callable[[jax.Array], Any] | None = None,
) -> tuple[Callable[..., TrainState], TrainState, Any]:
  """Return (init, abstract_state, step_fn) of `train_step`.

  They are rng -> TrainState; ShapeDtypeStructs with shardings; and the jitted
  step, which donates the state that it is given. Devices of the mesh may be
  described only, to compile for them. `make_tx` makes the optax transformation
  for parameters; rules of None are `sharding.rules_for(mesh)`.
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
  rules = layout.rules_for(mesh) if rules is None else rules
  shardings = layout.infer(abstract_state, rules, mesh)
  step_fn = functools.partial(
    train_step,
    loss_fn=loss_fn,
    tx=make_tx(abstract_state.params),
    accum_steps=accum_steps,
    ema_weight=ema_weight,
  )
  outputs = (shardings, layout.replicated(mesh))
  # Costly passes take longer than they save in a program that runs once.
  on_cpu = mesh.devices.flat[0].platform == 'cpu'
  options = {'xla_backend_optimization_level': 1} if on_cpu else None
  return (
    jax.jit(init, out_shardings=shardings, compiler_options=options),
    layout.annotate(abstract_state, shardings),
    jax.jit(step_fn, donate_argnums=0, out_shardings=outputs),
  )


def with_num_classes(model: Any, source: Any) -> Any:
  """Return the model with the number of classes of the data if it has none."""
  found = getattr(source, 'num_classes', None)
  is_partial = isinstance(model, functools.partial)
  given = None if is_partial else getattr(model, 'num_classes', None)
  if given is None and found is None:
    raise UserError(
      'The training data does not say how many classes it has. Add '
      '--config.model.num_classes=N, or, for data with names, a file with one '
      'name per line: --config.data.source.class_names=FILE'
    )
  if given is not None and found is not None and given < found:
    raise UserError(
      f'model.num_classes={given}, but the training data has {found} classes. '
      f'Add --config.model.num_classes={found}'
    )
  if given is not None:
    return model
  make = model if is_partial else model.clone
  return make(num_classes=found)

"""Training: the story of a run around the pure step of step.py.

Setup comes first, once, in the order in which it happens: workdir, data, model,
optimizer, shapes, shardings, memory, evaluators. Then an attempt: a state to
start from (checkpoint, weights or scratch), and the loop.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from vit_jax.analysis import flops
from vit_jax.config import Entry, Partial
from vit_jax.config.domains import Count, KeySeed, OneOf, Rate, checked
from vit_jax.data import pipeline
from vit_jax.data.pipeline import Data
from vit_jax.evals import evaluators as evaluators_lib
from vit_jax.evals.evaluators import Evaluator, Factory
from vit_jax.models import attention_choice
from vit_jax.optim.durations import Duration, Interval, Timeline, steps
from vit_jax.optim.ema import Ema
from vit_jax.optim.optimizers import Optimizer
from vit_jax.optim.schedules import Schedule
from vit_jax.parallel.hosts import Stopped, StopSignal
from vit_jax.parallel.sharding import (
  MeshSizes,
  Rules,
  annotate,
  check_batch_size,
  infer,
  put_batch,
  replicated,
  rules_for,
  this_process,
)
from vit_jax.preprocess import Normalize
from vit_jax.reports import confusion, page
from vit_jax.runs import (
  ahead,
  changes,
  device_memory,
  divergence,
  dry_runs,
  reuse,
  storage,
  terminal,
  workdirs,
)
from vit_jax.runs.checkpoint import Checkpointer, Checkpoints
from vit_jax.runs.divergence import NonFiniteError
from vit_jax.runs.files import PathLike
from vit_jax.runs.metrics import Monitor, Stopwatch
from vit_jax.runs.profiling import Profiler
from vit_jax.runs.writers import MetricsWriter
from vit_jax.step import TrainState as TrainState
from vit_jax.step import init_state, train_step
from vit_jax.types import LossFn, Model, Objective, Params, Preprocess, Shape
from vit_jax.weights import formats, surgery
from vit_jax.weights.surgery import InitFrom

# Counts of rollbacks, in the item 'data' of checkpoints and in the metrics.
_COUNTS = ('rollbacks', 'batches_skipped')


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """An evaluator of a training run, and when it runs.

  Attributes:
    evaluator: factory of it, see evaluators.py. In a config, the `target`.
    every: time between its runs; None for one at the end.
  """

  evaluator: Factory = dataclasses.field(metadata={'rest': True})
  every: Interval | None = None


@checked
def train(
  workdir: PathLike,
  *,
  model: Model | functools.partial[Model],
  data: Data,
  objective: Objective,
  optimizer: Optimizer,
  schedule: Schedule,
  total: Interval,
  evals: Mapping[str, Evaluation] | None = None,
  checkpoint: Checkpoints = Checkpoints(),
  init_from: InitFrom | None = None,
  mesh: MeshSizes = MeshSizes(),
  sharding: Rules | None = None,
  preprocess: Preprocess = Normalize(),
  accum_steps: Count = 1,
  ema_decay: Rate | None = None,
  ema_start: Duration | None = None,
  ema_debias: bool = False,
  seed: KeySeed = 0,
  log_every: Interval = steps(50),
  writers: Mapping[str, MetricsWriter] | None = None,
  profile: str | None = None,
  on_nan: Annotated[str, OneOf('stop', 'rollback')] = 'stop',
  max_rollbacks: Count = 3,
  record: Mapping[str, Any] | None = None,
  preset: Mapping[str, Any] | None = None,
  entries: Sequence[Entry] | None = None,
  allow_changes: Sequence[str] = (),
  dry_run: bool = False,
) -> TrainState | Any:
  """Train a model, resuming from the newest checkpoint in workdir.

  The setup happens once: data, model, shapes, evaluators. Then comes an
  attempt: the state of the newest checkpoint, or an initial one, is trained to
  the end. No state is saved or evaluated that has NaN or Inf. If one is found,
  the run ends, or a rollback starts another attempt.

  Args:
    workdir: directory of the run; local, or gs://...
    model: Flax module whose call maps images [B, H, W, C] to logits [B, K]. A
      num_classes of None is set to the number of classes of the data.
    data: training images and batches.
    objective: function (model, preprocess=...) -> LossFn.
    optimizer: optimizer rule with clipping, decay mask, freezing.
    schedule: learning rate: function of the Timeline -> (step -> rate).
    total: length of training.
    evals: evaluators by name, and when they run. All run at the end.
    checkpoint: when checkpoints are written and which are kept.
    init_from: weights to start from if workdir has no checkpoint; None: random.
    mesh: sizes of the mesh axes 'data', 'fsdp' and 'model'.
    sharding: rules, see sharding.infer; None: rules that follow from the mesh.
    preprocess: uint8 images -> float images, on the device.
    accum_steps: micro-batches per step, to save memory; same result.
    ema_decay: decay of an EMA of the parameters, used by evaluators and saved;
      the paper's Table 2 has 0.9999 for ImageNet. None: no EMA.
    ema_start: time before the EMA starts. Until then it equals the parameters.
    ema_debias: whether the EMA leaves out the parameters at its start, which
      otherwise have the weight ema_decay**n after n more steps.
    seed: of initialisation, data order, augmentation and dropout.
    log_every: time between records in metrics.jsonl and on the terminal.
    writers: more writers of metrics by name, see writers.py.
    profile: steps to trace, such as '10:15', see profiling.py.
    on_nan: what to do when the loss, the gradient or the state is NaN or Inf.
      'stop': raise NonFiniteError. 'rollback': go back to the newest checkpoint
      or the initial state, and skip the batches that were used since.
    max_rollbacks: give up after this many rollbacks without a new checkpoint.
    record: JSON values saved as config.json, such as the resolved config.
    preset: origin of `record`, saved as preset.json, see config.run.
    entries: the config by key, see config.entries; None: that of the arguments.
      A run that resumes is compared with them, see changes.py.
    allow_changes: keys that may differ from those that the run started with.
    dry_run: stop before the first step, after all checks; print a summary.

  Returns:
    The final TrainState; None after a dry run.

  Raises:
    ValueError: anything that does not fit, before the first step.
    changes.ChangedRunError: results depend on something that has changed.
    metrics.NonFiniteError: the loss, the gradient or the state is NaN or Inf,
      and `on_nan` is 'stop' or rollbacks did not help.
    device_memory.OutOfMemoryError: the model or the batch does not fit.
    distributed.Stopped: a signal asked to stop, and a checkpoint was saved.
  """
  arguments = dict(locals())
  stopwatch = Stopwatch()
  workdirs.prepare(workdir)
  basis = changes.basis_of_call(workdir, train, arguments, entries)
  changed = changes.check(workdir, basis, allow_changes)

  # 1. Data: its size gives the number of steps and classes.
  mesh = mesh.make()
  check_batch_size(data.batch_size, mesh, parts=accum_steps)
  example = data.first_example()
  image_shape = example['image'].shape
  images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
  timeline = Timeline(data.batch_size, len(data.source))
  total_steps = timeline.steps(total)
  timeline = dataclasses.replace(timeline, total_steps=total_steps)

  # 2. What is trained, and how.
  described = with_num_classes(model, data.source)
  choices = workdirs.read_choices(workdir)
  choose = attention_choice.Chooser(
    data.batch_size // accum_steps, mesh, choices, terminal.say
  )
  model = choose(described, images)
  loss_fn = reuse.call(objective, model, preprocess=preprocess)
  teacher = getattr(loss_fn, 'teacher', None)
  teacher_shapes = ()
  if teacher is not None:
    teacher.model = choose(teacher.model, teacher.images, backward=False)
    teacher_shapes = (teacher.abstract_params(mesh, sharding),)
  learning_rate = reuse.call(schedule, timeline)

  # 3. Shapes, then shardings, then memory.
  ema = None
  if ema_decay:
    ema = Ema(ema_decay, ema_start, ema_debias)
  init, abstract_state, step_fn = reuse.call(
    make_step,
    model,
    images=images,
    loss_fn=loss_fn,
    make_tx=Partial(optimizer, learning_rate=learning_rate),
    mesh=mesh,
    rules=sharding,
    accum_steps=accum_steps,
    ema_weight=ema and reuse.call(ema, timeline),
  )

  # 4. Evaluators open their data now, not after a day of training.
  class_names = getattr(data.source, 'class_names', None)
  _check_class_names(class_names, teacher and teacher.class_names)
  evaluators = evaluators_lib.make(
    {name: each.evaluator for name, each in (evals or {}).items()},
    model,
    preprocess=preprocess,
    mesh=mesh,
    class_names=class_names,
    abstract_params=abstract_state.params,
  )
  eval_every = {
    name: timeline.steps(each.every) for name, each in (evals or {}).items()
  }
  checkpointer, save_every = checkpoint.open(workdir, timeline, eval_every)
  evaluators_lib.check_metric(
    'checkpoint.best_metric', checkpoint.best_metric, evaluators
  )
  newest = checkpointer.latest_step()
  profiler = Profiler(workdir, profile, start=newest or 0, total=total_steps)
  if init_from and newest is None:
    formats.find(init_from.path, init_from.step)
  if dry_run:
    dry_runs.report_training(
      *(model, abstract_state, step_fn, data, image_shape, mesh, timeline),
      *teacher_shapes,
    )
    return None
  claim = workdirs.Claim(workdir)

  transforms = [getattr(x, 'transforms', ()) for x in evaluators.values()]

  def describe():
    changes.record(workdir, basis, changed, newest)
    workdirs.record_choices(workdir, choices)
    workdirs.record_config(workdir, record, preset)
    workdirs.record_model(
      workdir,
      model=described,
      preprocess=preprocess,
      transforms=next(filter(None, transforms), None),
      image_shape=image_shape,
      class_names=class_names,
      activation=getattr(loss_fn, 'activation', 'softmax'),
    )

  run = _Run(
    workdir=workdir,
    claim=claim,
    model=described,
    image_shape=image_shape,
    batch_size=data.batch_size,
    mesh=mesh,
    total_steps=total_steps,
    abstract_state=abstract_state,
    init=functools.partial(init, jax.random.key(seed)),
    init_from=init_from,
    step_fn=step_fn,
    compile_step=functools.partial(
      ahead.compile_step,
      abstract_state,
      step_fn,
      ahead.batch_shapes(image_shape, example['label'], data.batch_size, mesh),
      mesh,
      *teacher_shapes,
    ),
    teacher=teacher,
    teacher_shapes=teacher_shapes,
    batches=functools.partial(
      data.train_batches,
      seed=seed,
      num_classes=model.num_classes,
      **this_process(),
    ),
    reading=data.describe_reading(),
    monitor=functools.partial(
      Monitor,
      workdir,
      total_steps=total_steps,
      batch_size=data.batch_size,
      log_every_steps=timeline.steps(log_every),
      flops_per_step=lambda: (
        3 * data.batch_size * reuse.call(flops.forward, model, images)
      ),
      learning_rate=learning_rate,
      writers=writers,
      record=record,
      before_write=claim.check,
    ),
    profiler=profiler,
    evaluators=evaluators,
    eval_every=eval_every,
    class_names=class_names,
    checkpointer=checkpointer,
    save_every=save_every,
    changed=bool(changed),
    describe=describe,
  )

  # 5. Attempts. Each restores or initialises a state and trains it to the end,
  # unless that meets NaN.
  failed: list[int] = []  # steps that met NaN since the newest checkpoint
  explain_memory = functools.partial(
    dry_runs.explain_memory,
    *(model, abstract_state, step_fn, data, image_shape, mesh, accum_steps),
    *teacher_shapes,
  )
  with (
    claim,
    storage.explained(workdir, checkpointer.complete_step),
    contextlib.closing(checkpointer),
    contextlib.closing(profiler),
    device_memory.explaining(explain_memory),
  ):
    while True:
      try:
        state = _attempt(run, newest, failed, stopwatch)
        break
      except NonFiniteError as error:
        cause, step = error.cause, error.step
      stopwatch = Stopwatch()
      checkpointer.wait()
      before, newest = newest, checkpointer.latest_step()
      failed = [*(failed if newest == before else ()), step]
      rollbacks = len(failed) - 1
      if on_nan == 'stop' or rollbacks == max_rollbacks:
        advice = divergence.advice(workdir, newest, step, record, rollbacks)
        raise NonFiniteError(cause, advice, step=step)
      terminal.say(cause)
  with storage.explained(workdir, checkpointer.complete_step):
    page.write_at_end(workdir, evaluators)
  return state


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
  """Objects that the setup of a run has made, for its attempts.

  `init`, `compile_step`, `batches` and `monitor` are functions that make the
  state at step 0, the compiled step, the batches from a position, and the
  Monitor from a step. `describe` writes the files that describe the run;
  `changed`: its config or data has changed; `reading` says what reads the
  batches.
  """

  workdir: PathLike
  claim: workdirs.Claim
  model: Model
  image_shape: Shape
  batch_size: int
  mesh: jax.sharding.Mesh
  total_steps: int
  abstract_state: TrainState
  init: Callable[[], TrainState]
  init_from: InitFrom | None
  step_fn: Callable[..., Any]
  compile_step: Callable[[], Any]
  teacher: Any
  teacher_shapes: tuple[Params, ...]
  batches: Callable[..., pipeline.TrainBatches]
  reading: str
  monitor: Callable[..., Monitor]
  profiler: Profiler
  evaluators: Mapping[str, Evaluator]
  eval_every: Mapping[str, int | None]
  class_names: Sequence[str] | None
  checkpointer: Checkpointer
  save_every: int
  changed: bool
  describe: Callable[[], None]


def _attempt(
  run: _Run, newest: int | None, failed: Sequence[int], stopwatch: Stopwatch
) -> TrainState:
  """Train from the newest checkpoint, or from step 0, to the last step.

  Args:
    run: see `_Run`.
    newest: step of the newest checkpoint, or None.
    failed: steps in which earlier attempts from there met NaN. All batches that
      they have used are skipped.
    stopwatch: Stopwatch that started with the attempt.

  Raises:
    NonFiniteError: NaN or Inf. What was saved before is finite.
  """
  stopwatch.lap('setup')
  compiling = ahead.start(run.compile_step, run.mesh)
  state, saved, origin = _first_state(run, newest)
  stopwatch.lap('setup' if newest is None else 'restoring')
  start, position = int(state.step), saved['position']
  if bad := divergence.non_finite(state, run.mesh):
    folder = run.checkpointer.directory / str(start)
    raise ValueError(
      f'There is {bad} before the first step ({origin}). '
      + (
        'Check the weights of init_from and the initialisation of the model.'
        if newest is None
        else f'An earlier version of this code saved it. Move {folder} away; '
        'the same command then resumes from an older checkpoint, if there is '
        'one, or starts again.'
      )
    )
  if not failed:
    run.describe()  # not before: a config that cannot resume is not recorded
  counts = {key: saved[key] for key in _COUNTS if key in saved}
  if failed:
    skipped = sum(step - start for step in failed)
    position += skipped * run.batch_size
    rollbacks, batches_skipped = (saved.get(key, 0) for key in _COUNTS)
    counts = dict(
      zip(_COUNTS, (rollbacks + len(failed), batches_skipped + skipped))
    )
    origin = (
      f'rollback {counts["rollbacks"]}: {origin}; the next {skipped} batches '
      f'are skipped, {counts["batches_skipped"]} in total'
    )
  monitor = run.monitor(
    start_step=start,
    stopwatch=stopwatch,
    carried=saved.get('metrics'),
    counts=counts,
  )
  if failed:
    monitor.say(origin)
  else:
    monitor.introduce(
      run.model, state.params, run.image_shape, run.mesh, origin
    )
    monitor.say(run.reading)
  teacher = ()
  if run.teacher is not None:
    with terminal.waiting('loading the teacher ...'):
      teacher = (run.teacher.load(*run.teacher_shapes),)
  batches = run.batches(start=position, skipped=saved.get('skipped', 0))

  # The loop. Metrics lag one step, so the host never waits for the device.
  with (
    contextlib.closing(monitor),
    contextlib.closing(batches),
    StopSignal() as stop,
    jax.set_mesh(run.mesh),
    jax.transfer_guard('disallow'),
  ):
    monitor.compiling()
    compiling.join()
    for step in range(start + 1, run.total_steps + 1):
      with run.profiler.step(step, monitor):
        with monitor.waiting(batches.spent):
          batch = next(batches)
        with monitor.waiting('transfer'):
          batch = put_batch(batch, run.mesh)
        state, metrics = run.step_fn(state, batch, *teacher)
        monitor.step(step, metrics, skipped=batches.skipped)
      if step == start + 1:
        monitor.compiled(step)

      last = step == run.total_steps
      due = {
        name: evaluator
        for name, evaluator in run.evaluators.items()
        if last or ((every := run.eval_every[name]) and step % every == 0)
      }
      if due:
        _check_finite(run, step, state, monitor)
      results = run_evaluators(due, step, state.eval_params, monitor)
      if last:
        confusion.write_all(
          run.workdir,
          run.evaluators,
          class_names=run.class_names,
        )
      stopping = stop.requested()
      if last or stopping or step % run.save_every == 0:
        if not due:  # else it was checked before the evaluators
          _check_finite(run, step, state, monitor)
        run.claim.check()
        with monitor.pause('saving'):
          saved = {
            'position': batches.position,
            'skipped': batches.skipped,
            'metrics': monitor.carry(step),
            **counts,
          }
          finite = {k: v for k, v in results.items() if math.isfinite(v)}
          run.checkpointer.save(step, state, saved, metrics=finite)
          if last or stopping:
            run.checkpointer.wait()
      if run.checkpointer.must_wait(step):
        with monitor.pause('saving'):
          run.checkpointer.wait()
      if last or stopping:
        monitor.finish(step)
      if stopping and not last:
        monitor.say(stop.message(step, run.total_steps, run.workdir))
        raise Stopped(stop)
  return state


def _first_state(
  run: _Run, newest: int | None
) -> tuple[TrainState, Mapping[str, Any], str]:
  """Return the state to start from, its saved data, and its origin in words.

  It comes from the newest checkpoint of the workdir, else from `init_from`,
  else from scratch.
  """
  if newest is not None:
    # Positions count examples: after a change, batches had another size.
    size = None if run.changed else run.batch_size
    state, saved = run.checkpointer.restore(run.abstract_state, batch_size=size)
    return state, saved, f'resumed at step {state.step} of {run.workdir}'
  with terminal.waiting('initialising ...'):
    state = run.init()
  origin = 'initialised from scratch'
  if run.init_from:
    state, origin = surgery.load_into(state, run.model, run.init_from)
  return state, {'position': 0}, origin


def _check_finite(run, step, state, monitor):
  """Raise NonFiniteError if a metric up to this step, or the state, is."""
  monitor.flush()
  if bad := divergence.non_finite(state, run.mesh):
    raise NonFiniteError(
      f'{bad} of the state after step {step} (of {run.total_steps}), which was '
      'not saved. Earlier checkpoints are kept.',
      step=step,
    )


def run_evaluators(
  evaluators: Mapping[str, Evaluator],
  step: int,
  params: Params,
  monitor: Monitor,
) -> dict[str, float]:
  """Run the evaluators, log and return {'NAME/METRIC': value}.

  The metrics of this step must have been flushed.
  """
  results: dict[str, float] = {}
  for name, evaluator in evaluators.items():
    with monitor.pause('evals'):
      found = evaluators_lib.run(name, evaluator, params)
    results |= {f'{name}/{key}': value for key, value in found.items()}
  if results:
    monitor.write(step, results)
  if warning := evaluators_lib.non_finite(step, results):
    monitor.say(warning)
  return results


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
  """Return the jitted initialisation and train step, and the state's shapes.

  Args:
    model: Flax module.
    images: ShapeDtypeStruct of a batch of float images.
    loss_fn: see `train_step`.
    make_tx: function params -> optax transformation.
    mesh: its devices may be described only, to compile for them.
    rules: sharding rules; None for `sharding.rules_for(mesh)`.
    accum_steps, ema_weight: see `train_step`.

  Returns:
    (init, abstract_state, step_fn): rng -> TrainState; ShapeDtypeStructs with
    shardings; and `train_step`, which donates the state that it is given.
  """
  init = functools.partial(
    init_state,
    model=model,
    images=images,
    tx=make_tx,
    ema=ema_weight is not None,
  )
  abstract_state = jax.eval_shape(init, jax.random.key(0))
  rules = rules_for(mesh) if rules is None else rules
  shardings = infer(abstract_state, rules, mesh)
  step_fn = functools.partial(
    train_step,
    loss_fn=loss_fn,
    tx=make_tx(abstract_state.params),
    accum_steps=accum_steps,
    ema_weight=ema_weight,
  )
  outputs = (shardings, replicated(mesh))
  # It runs once: LLVM's costly passes take longer than they save on a CPU. The
  # initial state has the same bits without them.
  on_cpu = mesh.devices.flat[0].platform == 'cpu'
  options = {'xla_backend_optimization_level': 1} if on_cpu else None
  return (
    jax.jit(init, out_shardings=shardings, compiler_options=options),
    annotate(abstract_state, shardings),
    jax.jit(step_fn, donate_argnums=0, out_shardings=outputs),
  )


def _check_class_names(of_data, of_teacher):
  """Raise ValueError if a teacher was trained on other classes."""
  if not of_data or not of_teacher or list(of_data) == list(of_teacher):
    return
  i = next(
    (i for i, (a, b) in enumerate(zip(of_data, of_teacher)) if a != b),
    min(len(of_data), len(of_teacher)),
  )
  here, there = (list(x[i : i + 1]) for x in (of_data, of_teacher))
  raise ValueError(
    f'The classes of the teacher are not those of the data: class {i} is '
    f'{there} there and {here} here. Use a teacher that was trained on the '
    'same classes. If they are the same classes in the same order under other '
    'names, set config.objective.teacher.same_classes=True.'
  )


def with_num_classes(model: Any, source: Any) -> Any:
  """Return the model with the number of classes of the data where it has none.

  Raises:
    ValueError: neither of them has one, or the data has more classes.
  """
  found = getattr(source, 'num_classes', None)
  is_partial = isinstance(model, functools.partial)
  given = None if is_partial else getattr(model, 'num_classes', None)
  if given is not None and found is not None and given < found:
    raise ValueError(
      f'model.num_classes={given}, but the training data has {found} classes. '
      f'Set it to {found}, or to None.'
    )
  if given is not None:
    return model
  if found is None:
    raise ValueError(
      'model.num_classes is not set, and the training data does not say how '
      'many classes it has. Set model.num_classes.'
    )
  if is_partial:
    return model(num_classes=found)
  return model.clone(num_classes=found)

"""Training: the story of a run around the pure step of step.py."""

import contextlib
import math
from typing import Annotated, Any

import jax

from vit_jax import config, setup
from vit_jax.config import Provenance
from vit_jax.evals import evaluators as evaluators_lib
from vit_jax.io import terminal
from vit_jax.models.pallas.choice import Chooser
from vit_jax.parallel import hosts
from vit_jax.parallel import sharding as sharding_lib
from vit_jax.parallel.hosts import Stopped, StopSignal
from vit_jax.reports import attention_figures, page, worst
from vit_jax.reports.data import Shown
from vit_jax.runs import compiled, workdirs
from vit_jax.runs.monitor import Monitor, Stopwatch, check_finite
from vit_jax.setup import Examples
from vit_jax.step import TrainState as TrainState
from vit_jax.training import Evaluation as Evaluation
from vit_jax.training import Training as Training
from vit_jax.types import HARMLESS, PathLike, UserError
from vit_jax.weights import bundle, formats, surgery

_MEMORY = (
  'To need less: --config.accum_steps=2 (or more, same result), '
  '--config.mesh.fsdp=-1 (state split over devices), '
  '--config.model.remat=full, or a smaller --config.data.batch_size. '
  '--dry_run shows the memory.'
)


def train(
  workdir: PathLike,
  training: Training,
  *,
  provenance: Provenance = Provenance(),
  dry_run: Annotated[bool, HARMLESS] = False,
) -> TrainState | Any:
  """Train a model, resuming from the newest checkpoint in workdir.

  Args:
    workdir: directory of the run; local, or gs://...
    training: the model, the data, and how it learns.
    provenance: the config that `training` is from, if there is one.
    dry_run: stop before the first step, after all checks; print a summary.

  Returns:
    The final TrainState; None after a dry run.

  Raises:
    UserError: before the first step, if anything does not fit; later a
      NonFiniteError, before such a state is saved, or an OutOfMemoryError.
    Stopped: a signal asked to stop, and a checkpoint was saved.
  """
  stopwatch, data, batch = Stopwatch(), training.data, None

  # 1. Is this the same run as before, if there was one?
  workdirs.make(workdir, 'train', vars(training))
  entries = provenance.entries or config.entries(training)
  basis = workdirs.basis_of(entries, vars(training))
  changed = workdirs.check_changes(workdir, basis, provenance.allow_changes)

  # 2. The model, its loss and the step, from shapes.
  mesh, examples = training.mesh.make(), Examples.of(data)
  choices = workdirs.read(workdir, 'attention.json')
  training = training.supplied(computed := workdirs.statistics(workdir))
  at_a_time = data.batch_size // training.accum_steps
  choose = Chooser(at_a_time, mesh, choices, terminal.say)
  plan = setup.Plan.of(training, examples, mesh, choose)
  ready, timeline = plan.ready, plan.ready.timeline
  bundle.check_names(examples.class_names, ready.model.num_classes)

  # 3. Evaluators open their data now, not after a day of training.
  evals, checkpoints = training.evals or {}, training.checkpoints
  evaluators = evaluators_lib.make(
    {name: each.make for name, each in evals.items()},
    ready.model,
    preprocess=training.preprocess,
    mesh=mesh,
    class_names=examples.class_names,
    abstract_params=ready.state.params,
  )
  eval_every = {name: timeline.steps(x.every) for name, x in evals.items()}
  kinds = {f'train/{k}': x for k, x in ready.objective.kinds.items()}
  kinds |= evaluators_lib.kinds(evaluators)
  evaluators_lib.check_best_metric(checkpoints.best_metric, evaluators)
  saver, save_every = checkpoints.open(workdir, timeline, eval_every, kinds)
  if (weights := training.init_from) and saver.latest_step() is None:
    formats.find(weights.path, weights.step)
  shown = Shown.of(data, evaluators)
  if dry_run:
    compiled.report(ready, plan, mesh)
    return None

  with (
    contextlib.closing(workdirs.Claim(workdir)) as claim,
    contextlib.closing(saver),
    compiled.explaining(_MEMORY),
  ):
    # 4. The state to start from: a checkpoint, weights, or scratch.
    state, saved, origin = _first_state(workdir, training, ready, saver)
    check_finite(state, start := int(state.step))
    teachers = ready.load_teachers(mesh, training.sharding)
    workdirs.record_start(workdir, basis, changed, start)
    workdirs.record_config(workdir, provenance)
    more = {'attention.json': choices, workdirs.STATISTICS: computed}
    _record(workdir, training, ready, evaluators, more)

    # 5. The loop. Metrics lag one step: the host never waits for the device.
    monitor = Monitor(
      workdir,
      timeline,
      training.logging,
      start_step=start,
      carried=saved.get('metrics'),
      learning_rate=ready.learning_rate,
      **plan.parts(),
      stopwatch=stopwatch,
      config=provenance.config,
      kinds=kinds,
      before_write=claim.check,
    )
    terminal.say(f'{_headline(ready, mesh)}\n{origin}; compiling ...')
    batches = data.train_batches(
      seed=training.seed,
      start=saved['position'],
      skipped=saved.get('unreadable', ()),
      num_classes=ready.model.num_classes,
      **sharding_lib.this_process(),
    )
    with (
      contextlib.closing(monitor),
      contextlib.closing(batches),
      StopSignal() as stop,
      jax.set_mesh(mesh),
      jax.transfer_guard('disallow'),
    ):
      for step in range(start + 1, ready.total_steps + 1):
        with monitor.traced(step):
          with monitor.waiting(batches.spent):
            batch = next(batches)
          batch = sharding_lib.put_batch(batch, mesh)
          shown.write(step, workdir, ready.objective, batch, state.rng, mesh)
          state, metrics = plan.step(step)(state, batch, teachers=teachers)
          monitor.step(step, metrics, skipped=len(batches.skipped))

        last, stopping = step == ready.total_steps, stop.requested(step)
        saving = last or stopping or step % save_every == 0
        due = {
          name: evaluators[name]
          for name, every in eval_every.items()
          if last or (every and step % every == 0)
        }
        if due or saving:
          monitor.flush()
          check_finite(state, step)
        results = {}
        if due:
          with monitor.pause('evals'):
            results = evaluators_lib.run(due, state.eval_params, step)
          monitor.write(step, results)
        if saving:
          claim.check()
          with monitor.pause('saving'):
            _save(saver, step, state, batches, monitor, results)
            if last or stopping:
              saver.wait()
        if stopping:
          terminal.say(
            f'{stopping.name}: saved step {step} of {ready.total_steps} in '
            f'{workdir}. Run the same command to resume.'
          )
          raise Stopped(128 + stopping)
      if batch is not None or hosts.on_any(not page.is_complete(workdir)):
        _show(workdir, ready, data, evaluators, state, batch, batches, mesh)
      monitor.finish(ready.total_steps)
  if batches.skipped:
    terminal.say(data.name_skipped(batches.skipped))
  page.write_at_end(workdir)
  return state


def _first_state(workdir, training, ready, saver):
  """Return the state, what was saved with it, and where it is from."""
  if saver.latest_step() is not None:
    state, saved = saver.restore(ready.state)
    origin, timeline = f'step {state.step} of {workdir}', ready.timeline
    if saved['position'] != int(state.step) * timeline.batch_size:
      raise UserError(
        f'{origin} was reached after {saved["position"]} images, and batches '
        f'have {timeline.batch_size} now: steps would count other images. Use '
        'the same data.batch_size (accum_steps needs less memory), or start '
        'another run with init_from.'
      )
    if int(state.step) > ready.total_steps:
      raise UserError(
        f'{origin} is the newest checkpoint, and this run ends at step '
        f'{ready.total_steps}. Train for longer, or in another workdir.'
      )
    return state, saved, f'resumed at {origin}'
  saved, origin = {'position': 0}, 'initialised from scratch'
  with compiled.waiting():
    state = ready.init(jax.random.key(training.seed))
  if weights := training.init_from:
    state, origin = surgery.load_into(state, ready.described, weights)
  return state, saved, origin


def _record(workdir, training, ready, evaluators, more):
  """Write what predictions need, and {file: content} of what is not empty."""
  for name, content in more.items():
    if content:
      workdirs.write(workdir, name, content)
  transforms = [getattr(x, 'transforms', ()) for x in evaluators.values()]
  workdirs.record_model(
    workdir,
    model=ready.described,
    preprocess=training.preprocess,
    image_shape=ready.images.shape[1:],
    activation=ready.objective.activation,
    **training.data.of_predictions(*transforms),
  )


def _headline(ready, mesh):
  """Return one line that says what is trained."""
  name, shape = type(ready.model).__name__, ready.images.shape[1:]
  return (
    f'{name}, {ready.num_params:,} parameters; batches of '
    f'{ready.timeline.batch_size} images {"x".join(map(str, shape))}; '
    f'{ready.total_steps} steps on {mesh.size} x '
    f'{jax.devices()[0].device_kind}'
  )


def _save(saver, step, state, batches, monitor, results):
  saved = {
    'position': batches.position,
    'unreadable': sorted(batches.skipped),
    'metrics': monitor.carry(),
  }
  finite = {k: v for k, v in results.items() if math.isfinite(v)}
  saver.save(step, state, saved, metrics=finite)


def _show(workdir, ready, data, evaluators, state, batch, batches, mesh):
  """Draw rows of images of objective and evaluators; write predictions.

  Without a last batch, the run ended before; what it evaluated is lost.
  """
  if batch is None:
    terminal.say('evaluating again: the run ended before all was written')
    batch = sharding_lib.put_batch(next(batches), mesh)
    evaluators_lib.run(evaluators, state.eval_params, int(state.step))
  everywhere = sharding_lib.replicated(mesh)
  pictures = jax.jit(ready.objective.pictures, out_shardings=everywhere)
  with jax.transfer_guard('allow'):
    drawn = jax.device_get(pictures(state.params, batch, state.rng))
    for evaluator in evaluators.values():
      if pictures := getattr(evaluator, 'pictures', None):
        drawn |= pictures(state.eval_params)
  for title, rows in drawn.items():
    drawn[title] = [[data.decode.show(x) for x in row] for row in rows]
  attention_figures.write_sheets(workdir, drawn)
  names = getattr(data.source, 'class_names', None)
  worst.write_all(workdir, evaluators, class_names=names)

"""Training: the story of a run around the pure step of step.py."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Annotated, Any

import jax

from vit_jax import config, setup
from vit_jax.config import Provenance
from vit_jax.data.pipeline import Data
from vit_jax.durations import Interval
from vit_jax.evals import evaluators as evaluators_lib
from vit_jax.evals.evaluators import Evaluator, Factory
from vit_jax.io import terminal
from vit_jax.models.attention_choice import Chooser
from vit_jax.models.dense import Normalize
from vit_jax.models.flexi import Sizes, with_patches
from vit_jax.optim.optimizers import Optimizer
from vit_jax.optim.schedules import Ema, Schedule
from vit_jax.parallel import sharding as sharding_lib
from vit_jax.parallel.hosts import Stopped, StopSignal
from vit_jax.probes import Probe
from vit_jax.reports import attention_figures, page, worst
from vit_jax.runs import compiled, workdirs
from vit_jax.runs.checkpoint import Checkpoints
from vit_jax.runs.monitor import Logging, Monitor, Stopwatch, check_finite
from vit_jax.setup import Examples, Settings
from vit_jax.step import TrainState as TrainState
from vit_jax.types import (
  HARMLESS,
  Count,
  KeySeed,
  MakeObjective,
  Model,
  PathLike,
  Preprocess,
  Size,
)
from vit_jax.weights import formats, surgery
from vit_jax.weights.surgery import InitFrom

_MEMORY = (
  'To need less: --config.accum_steps=2 (or more, same result), '
  '--config.mesh.fsdp=-1 (state split over devices), '
  '--config.model.remat=full, or a smaller --config.data.batch_size. '
  '--dry_run shows the memory.'
)


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """An evaluator of a training run, and when it runs.

  Attributes:
    evaluator: makes it, see evaluators.py. In a config, the `target`.
    every: time between its runs; None for one at the end.
    patch_size: of the model that it gets, see models/flexi.py; None: its own.
  """

  evaluator: Factory = dataclasses.field(metadata={'rest': True})
  every: Annotated[Interval | None, HARMLESS] = None
  patch_size: Size | None = None

  def make(self, model: Model, **options: Any) -> Evaluator:
    """Return the evaluator of the model with patches of `patch_size`."""
    return self.evaluator(with_patches(model, self.patch_size), **options)


def train(
  workdir: PathLike,
  *,
  model: Model | functools.partial[Model],
  data: Data,
  objective: MakeObjective,
  optimizer: Optimizer,
  schedule: Schedule,
  total: Interval,
  sizes: Sizes | None = None,
  evals: Mapping[str, Evaluation] | None = None,
  checkpoints: Annotated[Checkpoints, HARMLESS] = Checkpoints(),
  init_from: InitFrom | None = None,
  preprocess: Preprocess = Normalize(),
  mesh: Annotated[sharding_lib.MeshSizes, HARMLESS] = sharding_lib.MeshSizes(),
  sharding: Annotated[sharding_lib.Rules | None, HARMLESS] = None,
  accum_steps: Count = 1,
  ema: Ema | None = None,
  probes: Mapping[str, Probe] | None = None,
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
    sizes: of the patches in each step, see models/flexi.py; None: the same.
    evals: evaluators by name, and when they run. All run at the end.
    checkpoints: when checkpoints are written and which are kept.
    init_from: weights to start from if workdir has no checkpoint; None: random.
    preprocess: uint8 images -> float images, on the device.
    mesh: sizes of the mesh axes 'data', 'fsdp' and 'model'.
    sharding: rules, see sharding.infer; None: rules that follow from the mesh.
    accum_steps: micro-batches per step, to save memory; same result.
    ema: EMA of the parameters, used by evaluators and saved; None: no EMA.
    probes: what steps show of their gradients, see probes.py.
    seed: seed for initialisation, data order, augmentation and dropout.
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

  # 1. Is this the same run as before, if there was one?
  provenance = provenance or Provenance()
  settings = Settings.of(locals())
  parts = {'data': data, 'evals': evals, 'init_from': init_from, 'seed': seed}
  parts |= {'sizes': sizes} | vars(settings)
  workdirs.make(workdir, 'train', parts)
  basis = workdirs.basis_of(provenance.entries or config.entries(parts), parts)
  changed = workdirs.check_changes(workdir, basis, provenance.allow_changes)

  # 2. The model, its loss and the step, from shapes.
  mesh, examples = mesh.make(), Examples.of(data)
  choices = workdirs.read(workdir, 'attention.json')
  choose = Chooser(data.batch_size // accum_steps, mesh, choices, terminal.say)
  how = settings, examples, mesh, sharding, choose, probes
  ready = setup.make(*how)
  plan = setup.Plan.of(ready, sizes, seed, functools.partial(setup.make, *how))
  timeline, total_steps = ready.timeline, ready.total_steps

  # 3. Evaluators open their data now, not after a day of training.
  evals = evals or {}
  evaluators = evaluators_lib.make(
    {name: each.make for name, each in evals.items()},
    ready.model,
    preprocess=preprocess,
    mesh=mesh,
    class_names=examples.class_names,
    abstract_params=ready.state.params,
  )
  eval_every = {name: timeline.steps(x.every) for name, x in evals.items()}
  kinds = {f'train/{k}': x for k, x in ready.objective.kinds.items()}
  kinds |= evaluators_lib.kinds(evaluators)
  saver, save_every = checkpoints.open(workdir, timeline, eval_every, kinds)
  evaluators_lib.check_best_metric(checkpoints.best_metric, evaluators)
  newest = saver.latest_step()
  if init_from and newest is None:
    formats.find(init_from.path, init_from.step)
  if dry_run:
    if others := data.name_left_out():
      terminal.say(others)
    compiled.report(ready, plan, mesh)
    return None

  with (
    contextlib.closing(workdirs.Claim(workdir)) as claim,
    contextlib.closing(saver),
    compiled.explaining(_MEMORY),
  ):
    # 4. The state to start from: a checkpoint, weights, or scratch.
    saved: dict[str, Any] = {'position': 0}
    if newest is not None:
      state, saved = saver.restore(ready.state)
      origin = f'resumed at step {state.step} of {workdir}'
    else:
      with compiled.waiting():
        state = ready.init(jax.random.key(seed))
      origin = 'initialised from scratch'
      if init_from:
        state, origin = surgery.load_into(state, ready.described, init_from)
    start = int(state.step)
    check_finite(state, start)
    frozen = ready.objective.teachers
    teachers = {name: x.load(mesh, sharding) for name, x in frozen.items()}
    workdirs.record_start(workdir, basis, changed, start)
    if choices:
      workdirs.write(workdir, 'attention.json', choices)
    workdirs.record_config(workdir, provenance)
    keep: Any = None
    if 'grid' in examples.first:  # of KeepAspect
      *_, keep = data.transforms
      keep = (dataclasses.replace(keep, area=(1.0, 1.0)),)
    of_evaluators = (getattr(x, 'transforms', ()) for x in evaluators.values())
    workdirs.record_model(
      workdir,
      model=ready.described,
      preprocess=preprocess,
      transforms=next(filter(None, of_evaluators), keep),
      image_shape=ready.images.shape[1:],
      class_names=examples.class_names,
      activation=ready.objective.activation,
      targets=getattr(data.source, 'targets', None),
    )

    # 5. The loop. Metrics lag one step: the host never waits for the device.
    monitor = Monitor(
      workdir,
      timeline,
      logging,
      start_step=start,
      carried=saved.get('metrics'),
      learning_rate=ready.learning_rate,
      flops_per_step=[x.flops_per_step() for x in plan.setups.values()],
      parts=[*plan.setups],
      of_step=plan.of_step,
      stopwatch=stopwatch,
      config=provenance.config,
      kinds=kinds,
      before_write=claim.check,
    )
    terminal.say(f'{_headline(ready, mesh)}\n{origin}; compiling ...')
    setups = [*plan.setups.values()]
    batches = data.train_batches(
      seed=seed,
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
      for step in range(start + 1, total_steps + 1):
        with monitor.traced(step):
          with monitor.waiting(batches.spent):
            batch = next(batches)
          batch = sharding_lib.put_batch(batch, mesh)
          of_step = setups[plan.of_step[step - 1]].step
          state, metrics = of_step(state, batch, teachers=teachers)
          monitor.step(step, metrics, skipped=len(batches.skipped))

        last, stopping = step == total_steps, stop.requested(step)
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
            f'{stopping.name}: saved step {step} of {total_steps} in '
            f'{workdir}. Run the same command to resume.'
          )
          raise Stopped(128 + stopping)
      if start < total_steps:
        _draw(workdir, ready.objective, evaluators, state, batch, mesh)
      monitor.finish(total_steps)
  if batches.skipped:
    terminal.say(data.name_skipped(batches.skipped))
  worst.write_all(workdir, evaluators, class_names=examples.class_names)
  page.write_at_end(workdir)
  return state


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


def _draw(workdir, objective, evaluators, state, batch, mesh):
  """Draw rows of images of the objective and the evaluators."""
  everywhere = sharding_lib.replicated(mesh)
  pictures = jax.jit(objective.pictures, out_shardings=everywhere)
  with jax.transfer_guard('allow'):
    drawn = jax.device_get(pictures(state.params, batch, state.rng))
    for evaluator in evaluators.values():
      if pictures := getattr(evaluator, 'pictures', None):
        drawn |= pictures(state.eval_params)
  attention_figures.write_sheets(workdir, drawn)

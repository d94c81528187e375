"""Training: a pure step, and the story around it.

    train_step(state, batch) -> (state, metrics)

Everything else here is setup, in the order in which it happens: workdir, data,
model, optimizer, shapes, shardings, memory, initialisation; then the loop.
"""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax import assemble, sharding, workdirs
from vit_jax.analysis import flops
from vit_jax.config import Reader, call, instantiate, resolve
from vit_jax.data import pipeline
from vit_jax.durations import to_steps
from vit_jax.interrupt import Stopped, StopSignal
from vit_jax.metrics import Monitor
from vit_jax.weights import formats
from vit_jax.weights import surgery as transfer


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=['step', 'params', 'opt_state', 'rng', 'ema'],
  meta_fields=[],
)
@dataclasses.dataclass
class TrainState:
  """All that changes in training; `ema` is None unless asked for."""

  step: Any  # int32 scalar: updates done
  params: Any
  opt_state: Any
  rng: Any  # typed key; each step folds its number into it
  ema: Any = None

  @property
  def eval_params(self):
    """What evaluators see: the average where one is kept."""
    return self.params if self.ema is None else self.ema


def train_step(state, batch, *, loss_fn, tx, accum_steps=1, ema_decay=None):
  """One update: the whole of training, but for what surrounds it.

  Args:
    state: TrainState.
    batch: tree of arrays [B, ...].
    loss_fn: (params, batch, rng) -> (mean loss, metrics).
    tx: optax transformation.
    accum_steps: micro-batches the batch is worked off in, to save memory; the
      gradient is that of the whole batch.
    ema_decay: d of ema = d * ema + (1 - d) * params; 0.9999 in Table 2.

  Returns:
    (TrainState, {name: scalar}); 'grad_norm' is that of all gradients, before
    clipping, frozen parameters included.
  """
  rng = jax.random.fold_in(state.rng, state.step)
  grad_fn = jax.grad(loss_fn, has_aux=True)
  grads, metrics = accumulate(grad_fn, accum_steps)(state.params, batch, rng)
  updates, opt_state = tx.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  ema = state.ema
  if ema is not None:
    ema = optax.incremental_update(params, ema, 1 - ema_decay)
  metrics |= {'grad_norm': optax.tree.norm(grads)}
  state = TrainState(state.step + 1, params, opt_state, state.rng, ema)
  return state, metrics


def accumulate(grad_fn, accum_steps):
  """grad_fn averaged over micro-batches, each with an rng of its own."""
  if accum_steps == 1:
    return grad_fn

  def accumulated(params, batch, rng):
    # Micro-batch m takes every accum_steps-th example, so that each device
    # goes on working on the examples it has.
    micro = jax.tree.map(
      lambda x: x.reshape(-1, accum_steps, *x.shape[1:]).swapaxes(0, 1), batch
    )
    rngs = jax.random.split(rng, accum_steps)

    def add(sums, micro_batch_and_rng):
      out = grad_fn(params, *micro_batch_and_rng)
      return jax.tree.map(jnp.add, sums, out), None

    first = jax.tree.map(lambda x: x[0], (micro, rngs))
    zeros = jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype),
      jax.eval_shape(grad_fn, params, *first),
    )
    sums, _ = jax.lax.scan(add, zeros, (micro, rngs))
    return jax.tree.map(lambda x: x / accum_steps, sums)

  return accumulated


def init_state(rng, *, model, images, tx, ema=False):
  """TrainState of a freshly initialised model.

  Args:
    rng: typed key.
    model: Flax module.
    images: ShapeDtypeStruct of a batch of float images.
    tx: optimizer for given parameters: (params) -> optax transformation.
    ema: whether to keep an average, which starts at the parameters.
  """
  init_rng, train_rng = jax.random.split(rng)
  example = jnp.zeros(images.shape, images.dtype)
  params = model.init(init_rng, example)['params']
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=tx(params).init(params),
    rng=train_rng,
    ema=jax.tree.map(jnp.copy, params) if ema else None,
  )


def make_step(config, model, images, mesh, *, preprocess, lr_fn):
  """What the config does to the model in a step, ready to be compiled.

  Args:
    config: Reader of a training's config.
    model: Flax module.
    images: ShapeDtypeStruct of a batch of float images.
    mesh: of `sharding.make_mesh`; its devices need not be there.
    preprocess: uint8 -> float images.
    lr_fn: step -> learning rate.

  Returns:
    (init, abstract_state, step_fn): jitted, rng -> TrainState; its shapes, with
    their shardings; jitted `train_step`, which gives up the state it is given.
  """
  loss_fn = instantiate(config.objective, model, preprocess=preprocess)
  make_tx = assemble.optimizer(config.optimizer, lr_fn)
  ema_decay = config.get('ema_decay')
  init = functools.partial(
    init_state, model=model, images=images, tx=make_tx, ema=bool(ema_decay)
  )
  abstract_state = jax.eval_shape(init, jax.random.key(0))
  rules = resolve(config.get('sharding', ()))
  shardings = sharding.infer(abstract_state, rules, mesh)
  step_fn = functools.partial(
    train_step,
    loss_fn=loss_fn,
    tx=make_tx(abstract_state.params),
    accum_steps=config.get('accum_steps', 1),
    ema_decay=ema_decay,
  )
  outputs = (shardings, sharding.replicated(mesh))
  return (
    jax.jit(init, out_shardings=shardings),
    sharding.annotate(abstract_state, shardings),
    jax.jit(step_fn, donate_argnums=0, out_shardings=outputs),
  )


def train(config, workdir):
  """Trains as the config says, resuming what is in workdir. Returns the state.

  Initialisation: 1. the newest checkpoint in workdir; 2. config.init_from;
  3. scratch. README, "A training config", lists the keys.
  """
  config, given = Reader(config), config
  workdirs.prepare(workdir)

  # 1. Data first: nothing may start if it is not there.
  data = assemble.data(config.data)
  mesh = sharding.make_mesh(**resolve(config.get('mesh', {})))
  batch_size, accum_steps = data['batch_size'], config.get('accum_steps', 1)
  sharding.check_batch_size(batch_size, mesh, parts=accum_steps)
  image_spec = pipeline.image_spec(data['source'], data.get('transforms', ()))
  images = jax.ShapeDtypeStruct((1, *image_spec), jnp.float32)
  steps_of = functools.partial(
    to_steps, batch_size=batch_size, num_examples=len(data['source'])
  )
  total_steps = steps_of(config, 'total', default=...)
  steps_of = functools.partial(steps_of, total_steps=total_steps)

  # 2. What is trained, and how.
  model = assemble.model(config.model, data['source'])
  preprocess = assemble.preprocess(config)
  lr_fn = assemble.schedule(config.schedule, steps_of)

  # 3. Shapes, then shardings, then memory.
  init, abstract_state, step_fn = make_step(
    config, model, images, mesh, preprocess=preprocess, lr_fn=lr_fn
  )

  # 4. Evaluators open their data now, not after a day of training.
  class_names = getattr(data['source'], 'class_names', None)
  evaluators = assemble.evaluators(
    config, model, preprocess, mesh, steps_of, class_names
  )
  for _, evaluator in evaluators.values():
    evaluator.check(abstract_state.params)
  checkpointer, save_every = assemble.checkpointer(
    config, workdir, steps_of, evaluators
  )
  log_every = steps_of(config, 'log_every', default=50)
  seed = config.get('seed', 0)
  init_from = resolve(config.get('init_from'))
  if init_from and checkpointer.latest_step() is None:
    formats.find(init_from.get('path'), init_from.get('step'))
  config.check_all_read('train')
  workdirs.record(workdir, given)
  workdirs.describe(workdir, given, model, image_spec, class_names)

  # 5. Initialisation: workdir, then init_from, then scratch.
  start, position, origin = 0, 0, 'initialised from scratch'
  if checkpointer.latest_step() is not None:
    state, saved = checkpointer.restore(abstract_state)
    start, position = int(state.step), saved['position']
    origin = f'resumed at step {start} of {workdir}'
  else:
    state = init(jax.random.key(seed))
    if init_from is not None:
      state, origin = call(transfer.load_into, init_from, state, model)
  monitor = Monitor(
    workdir,
    total_steps=total_steps,
    batch_size=batch_size,
    log_every_steps=log_every,
    flops_per_step=3 * batch_size * flops.forward(model, images),
    start_step=start,
    learning_rate=lr_fn,
  )
  monitor.introduce(model, state.params, image_spec, mesh, origin)

  # 6. The loop. Metrics lag one step, so the host never waits for the device.
  batches = call(
    pipeline.train_batches,
    data,
    seed=seed,
    start=position,
    num_classes=model.num_classes,
    **sharding.this_process(),
  )
  with (
    contextlib.closing(monitor),
    contextlib.closing(checkpointer),
    contextlib.closing(batches),
    StopSignal() as stop,
    jax.set_mesh(mesh),
    jax.transfer_guard('disallow'),
  ):
    for step in range(start + 1, total_steps + 1):
      with monitor.waiting():
        batch = sharding.put_batch(next(batches), mesh)
      state, metrics = step_fn(state, batch)
      monitor.step(step, metrics, skipped=batches.skipped)
      if step == start + 1:
        monitor.compiled(step)

      last, stopping = step == total_steps, stop.requested(step)
      record = run_due(evaluators, step, last, state.eval_params, monitor)
      if last or stopping or step % save_every == 0:
        monitor.flush()  # raises where the state has met NaN: it is not saved
        with monitor.pause():
          position = {'position': batches.position}
          checkpointer.save(step, state, position, metrics=record)
      if stopping and not last:
        checkpointer.wait()
        monitor.say(stop.message(step, total_steps, workdir))
        raise Stopped(stop)
  return state


def run_due(evaluators, step, last, params, monitor):
  """Runs the evaluators whose turn it is; {'name/metric': value} of them."""
  record = {}
  for name, (every, evaluator) in evaluators.items():
    if last or (every and step % every == 0):
      monitor.flush()
      with monitor.pause():
        result = evaluator.run(params)
      record |= {f'{name}/{key}': value for key, value in result.items()}
  if record:
    monitor.write(step, record)
  return record

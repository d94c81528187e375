"""The worker that runs this project's own step: training, inference, input.

Training is train.train_step as a run compiles it: Adam with clipping by global
norm, softmax loss, no dropout; inference is the logits. Both are fed the same
batch of random uint8 images, already on the device, each time; params, and
Adam's state, are replicated over all devices and the batch is split.
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax import metrics, optim, sharding, step
from vit_jax.analysis import flops
from vit_jax.config import instantiate
from vit_jax.objectives import classification
from vit_jax.preprocess import Normalize
from vit_jax.tools.benchmark import workers

CLIP_NORM, WEIGHT_DECAY, LEARNING_RATE = 1.0, 0.1, 1e-4


class Model:
  """A compiled step of a model, with its batch.

  Args:
    settings: 'mode' ('train' or 'infer'), 'fields' of the model with their
      'target', 'batch_size' (of all devices together), 'image_size',
      'warmup' (steps).
  """

  def __init__(self, settings):
    fields = dict(settings['fields'])
    self._dtype = fields['dtype']
    model = instantiate(fields)
    mesh = sharding.make_mesh()
    batch_size, size = settings['batch_size'], settings['image_size']
    sharding.check_batch_size(batch_size, mesh)
    batch = sharding.put_batch(
      random_batch(batch_size, size, model.num_classes), mesh
    )
    images = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
    build = {'train': training, 'infer': inference}[settings['mode']]
    self._carry, step = build(model, images, mesh)
    start = time.perf_counter()
    with jax.set_mesh(mesh):
      self._step = step.lower(self._carry, batch).compile()
    compile_s = time.perf_counter() - start
    self._batch = batch
    self._updates = settings['mode'] == 'train'
    self._wait = jax.default_backend() == 'cpu'
    if settings.get('warmup'):
      self.round(settings['warmup'])
    self.started = {
      'compile_s': compile_s,
      'param_count': count(model, images),
      'forward_flops': flops.forward(model, images),
      'hbm_peak': metrics.memory_gb(),
      'device_kind': jax.devices()[0].device_kind,
      'n_devices': jax.device_count(),
      'peak_flops': metrics.peak_flops(jax.devices()[0].device_kind),
      'versions': {'jax': jax.__version__},
    }

  def round(self, steps):
    """Seconds that so many steps take."""
    outputs = []
    start = time.perf_counter()
    for _ in range(steps):
      output = self._step(self._carry, self._batch)
      if self._updates:
        self._carry, output = output
      elif self._wait:  # else a CPU would work on several at once
        jax.block_until_ready(output)
      outputs.append(output)
    jax.block_until_ready((self._carry, outputs))
    return time.perf_counter() - start

  def ceiling(self):
    """{'flops': FLOP/s that one device reaches in a large matrix product}."""
    return {'flops': matrix_flops(self._dtype)}


def training(model, images, mesh):
  """(state, jitted (state, batch) -> (state, metrics))."""

  rule = functools.partial(optax.adamw, weight_decay=WEIGHT_DECAY)
  make_tx = functools.partial(
    optim.Optimizer(rule, clip_norm=CLIP_NORM), learning_rate=LEARNING_RATE
  )
  init = functools.partial(
    step.init_state, model=model, images=images, tx=make_tx
  )
  replicated = sharding.replicated(mesh)
  state = jax.jit(init, out_shardings=replicated)(jax.random.key(0))
  step_fn = functools.partial(
    step.train_step,
    loss_fn=classification.softmax_xent(model, preprocess=Normalize()),
    tx=make_tx(state.params),
  )
  return state, jax.jit(step_fn, donate_argnums=0, out_shardings=replicated)


def inference(model, images, mesh):
  """(params, jitted (params, batch) -> logits)."""

  def init(rng):
    return model.init(rng, jnp.zeros(images.shape, images.dtype))['params']

  def logits(params, batch):
    return model.apply({'params': params}, Normalize()(batch['image']))

  params = jax.jit(init, out_shardings=sharding.replicated(mesh))
  return params(jax.random.key(0)), jax.jit(logits)


def random_batch(batch_size, size, num_classes):
  """{'image': uint8 [B, size, size, 3], 'label': int32 [B]}, random."""
  rng = np.random.default_rng(0)
  shape = (batch_size, size, size, 3)
  return {
    'image': rng.integers(0, 256, shape, np.uint8),
    'label': rng.integers(0, num_classes, batch_size, np.int32),
  }


def count(model, images):
  """Number of parameters."""
  shapes = jax.eval_shape(model.init, jax.random.key(0), images)
  return sum(x.size for x in jax.tree.leaves(shapes))


def matrix_flops(dtype, side=None, repeats=None):
  """FLOP/s of a square matrix product on the first device.

  On a CPU it is of 2,048 x 2,048 float32 whatever the dtype; elsewhere of
  8,192 x 8,192 in dtype. `repeats` products follow one another in one program,
  so that its start does not count.
  """
  cpu = jax.default_backend() == 'cpu'
  repeats = repeats or (2 if cpu else 16)
  dtype = 'float32' if cpu else dtype
  side = side or (2048 if cpu else 8192)
  product = _product(side, dtype, repeats)
  # Random: a GPU that multiplies constants draws less power and is faster. By
  # this scale the result's entries are as large as the factors'.
  x = jax.random.normal(jax.random.key(0), (side, side)) / side**0.5
  x = jax.block_until_ready(x.astype(dtype))
  start = time.perf_counter()
  jax.block_until_ready(product(x))
  return repeats * 2 * side**3 / (time.perf_counter() - start)


@functools.cache
def _product(side, dtype, repeats):
  """The compiled program, once each for all calls, run once."""

  def chain(x):
    return jax.lax.fori_loop(0, repeats, lambda _, y: y @ x, x)

  x = jax.ShapeDtypeStruct((side, side), dtype)
  product = jax.jit(chain).lower(x).compile()
  jax.block_until_ready(product(jnp.zeros((side, side), dtype)))
  return product


def make(settings):
  """The worker that the settings' mode asks for."""
  if settings['mode'] != 'input':
    return Model(settings)
  from vit_jax.tools.benchmark import input

  return input.Input(settings)


if __name__ == '__main__':
  workers.serve(make)

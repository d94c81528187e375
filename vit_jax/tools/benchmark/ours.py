"""Worker that runs this project's own step: training, inference or input.

Training is train.train_step as a run compiles it: Adam with clipping by global
norm, softmax loss, no dropout. Inference computes the logits. Each step gets
the same batch of random uint8 images, which is on the device already.
Parameters and Adam's state are replicated over all devices; the batch is
sharded. As in a run, accelerators measure what attention='auto' is.
"""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from vit_jax import train
from vit_jax.analysis import flops
from vit_jax.models import autotune, names
from vit_jax.objectives import classification
from vit_jax.optim import optimizers as optim
from vit_jax.parallel import sharding
from vit_jax.preprocess import Normalize
from vit_jax.runs import metrics
from vit_jax.tools.benchmark import workers

CLIP_NORM, WEIGHT_DECAY, LEARNING_RATE = 1.0, 0.1, 1e-4


class Model:
  """A compiled step of a model, with its batch.

  Args:
    settings: 'mode' ('train' or 'infer'), 'model' (name), 'fields' of the
      model, 'batch_size' (of all devices), 'image_size', 'warmup' (steps).
  """

  def __init__(self, settings: Any) -> None:
    model = names.create(settings['model'], **settings['fields'])
    self._dtype = model.dtype
    self._trains = settings['mode'] == 'train'
    mesh = sharding.make_mesh()
    batch_size, size = settings['batch_size'], settings['image_size']
    sharding.check_batch_size(batch_size, mesh)
    images = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
    choice = autotune.Autotuner().choose(
      model,
      images,
      batch_size=batch_size,
      mesh=mesh,
      backward=self._trains,
    )
    model = choice.apply(model)
    make = training if self._trains else inference
    self._carry, step = make(model, images, mesh)
    rng = np.random.default_rng(0)
    batch = {
      'image': rng.integers(0, 256, (batch_size, size, size, 3), np.uint8),
      'label': rng.integers(0, model.num_classes, batch_size, np.int32),
    }
    self._batch = sharding.put_batch(batch, mesh)
    start = time.perf_counter()
    with jax.set_mesh(mesh):
      self._step = step.lower(self._carry, self._batch).compile()
    compile_s = time.perf_counter() - start
    self.round(settings.get('warmup', 0))
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)
    kind = jax.devices()[0].device_kind
    self.started = {
      'compile_s': compile_s,
      'param_count': sum(x.size for x in jax.tree.leaves(shapes)),
      'forward_flops': flops.forward(model, images),
      'hbm_peak': metrics.memory_gb(),
      'device_kind': kind,
      'n_devices': jax.device_count(),
      'peak_flops': metrics.peak_flops(kind),
      'versions': {'jax': jax.__version__},
    }

  def round(self, steps: int) -> float:
    """Return the seconds that some steps take."""
    outputs, one_by_one = [], jax.default_backend() == 'cpu'
    start = time.perf_counter()
    for _ in range(steps):
      output = self._step(self._carry, self._batch)
      if self._trains:
        self._carry, output = output
      elif one_by_one:  # a CPU would compute several at once
        jax.block_until_ready(output)
      outputs.append(output)
    jax.block_until_ready((self._carry, outputs))
    return time.perf_counter() - start

  def ceiling(self) -> dict[str, float]:
    """Return {'flops': FLOP/s of a large matrix product on one device}."""
    return {'flops': matrix_flops(self._dtype)}


def training(model: Any, images: Any, mesh: Mesh) -> tuple[Any, Any]:
  """Return (state, jitted (state, batch) -> (state, metrics))."""
  rule = functools.partial(optax.adamw, weight_decay=WEIGHT_DECAY)
  optimizer = optim.Optimizer(rule, clip_norm=CLIP_NORM)
  init, _, step_fn = train.make_step(
    model,
    images=images,
    loss_fn=classification.softmax_xent(model, preprocess=Normalize()),
    make_tx=functools.partial(optimizer, learning_rate=LEARNING_RATE),
    mesh=mesh,
  )
  return init(jax.random.key(0)), step_fn


def inference(model: Any, images: Any, mesh: Mesh) -> tuple[Any, Any]:
  """Return (params, jitted (params, batch) -> logits)."""

  def init(rng):
    return model.init(rng, jnp.zeros(images.shape, images.dtype))['params']

  def logits(params, batch):
    return model.apply({'params': params}, Normalize()(batch['image']))

  init = jax.jit(init, out_shardings=sharding.replicated(mesh))
  return init(jax.random.key(0)), jax.jit(logits)


def matrix_flops(
  dtype: Any, side: int | None = None, repeats: int | None = None
) -> float:
  """Return the FLOP/s of a square matrix product on the first device.

  Args:
    dtype: of the matrices; on a CPU always float32.
    side: of the matrices; by default 8,192, on a CPU 2,048.
    repeats: number of products in one program.
  """
  cpu = jax.default_backend() == 'cpu'
  dtype = 'float32' if cpu else dtype
  side = side or (2048 if cpu else 8192)
  repeats = repeats or (2 if cpu else 16)
  # Random: a GPU that multiplies constants draws less power and is faster.
  # With this scale the products are as large as the factors.
  x = jax.random.normal(jax.random.key(0), (side, side)) / side**0.5
  x = x.astype(dtype)
  jax.block_until_ready(_products(x, repeats))  # compiles
  start = time.perf_counter()
  jax.block_until_ready(_products(x, repeats))
  return repeats * 2 * side**3 / (time.perf_counter() - start)


@functools.partial(jax.jit, static_argnums=1)
def _products(x, repeats):
  return jax.lax.fori_loop(0, repeats, lambda _, y: y @ x, x)


def make(settings: Any) -> Any:
  """Return the worker of the mode."""
  if settings['mode'] != 'input':
    return Model(settings)
  from vit_jax.tools.benchmark.input import Input

  return Input(settings)


if __name__ == '__main__':
  workers.serve(make)

"""The train step, compiled before its first call."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from vit_jax import sharding
from vit_jax.data.pipeline import Data
from vit_jax.types import Shape


def compile_step(
  state: Any, step_fn: Any, data: Data, image_shape: Shape, mesh: Mesh
) -> Any:
  """Return the compiled train step.

  Args:
    state: TrainState of ShapeDtypeStructs with shardings.
    step_fn: jitted train step.
    data: Data of the training.
    image_shape: (H, W, C) of its images.
    mesh: as returned by `sharding.make_mesh`.
  """
  split = sharding.batch_sharding(mesh)
  label = jnp.asarray(data.first_example()['label'])
  kind = jnp.float32 if label.ndim else jnp.int32
  shape = (data.batch_size,)
  batch = {
    'image': jax.ShapeDtypeStruct((*shape, *image_shape), jnp.uint8),
    'label': jax.ShapeDtypeStruct((*shape, *label.shape), kind),
  }
  batch = sharding.annotate(batch, jax.tree.map(lambda _: split, batch))
  with jax.set_mesh(mesh):
    return step_fn.lower(state, batch).compile()


def start(compile_it: Callable[[], Any], mesh: Mesh) -> threading.Thread:
  """Compile in a thread, while this one restores or initialises the state.

  JAX keeps the program for the first call. That call also meets the errors, so
  the thread has none. Not on GPUs: their compiler times kernels, which other
  work would disturb.

  Returns:
    The thread. `join` it before the first call, which would compile again.
  """
  on_gpu = mesh.devices.flat[0].platform == 'gpu'

  def run():
    with contextlib.suppress(Exception):
      if not on_gpu:
        compile_it()

  thread = threading.Thread(target=run, name='compile')
  thread.start()
  return thread

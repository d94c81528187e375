"""The train step, compiled before its first call."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from vit_jax.parallel import sharding
from vit_jax.types import Shape


def batch_shapes(
  image_shape: Shape, label: Any, batch_size: int, mesh: Mesh
) -> dict[str, jax.ShapeDtypeStruct]:
  """Return the shapes, dtypes and shardings of a training batch.

  Args:
    image_shape: (H, W, C).
    label: of any example: a class, or [K].
    batch_size: of all hosts together.
    mesh: as returned by `sharding.make_mesh`.
  """
  of_label = jnp.shape(label)
  kind = jnp.float32 if of_label else jnp.int32
  batch = {
    'image': jax.ShapeDtypeStruct((batch_size, *image_shape), jnp.uint8),
    'label': jax.ShapeDtypeStruct((batch_size, *of_label), kind),
  }
  split = sharding.batch_sharding(mesh)
  return sharding.annotate(batch, jax.tree.map(lambda _: split, batch))


def compile_step(
  state: Any, step_fn: Any, batch: Any, mesh: Mesh, *teacher: Any
) -> Any:
  """Return the compiled train step.

  Args:
    state: TrainState of ShapeDtypeStructs with shardings.
    step_fn: jitted train step.
    batch: see `batch_shapes`.
    mesh: as returned by `sharding.make_mesh`.
    *teacher: parameters of the teacher, if there is one, as for `state`.
  """
  with jax.set_mesh(mesh):
    return step_fn.lower(state, batch, *teacher).compile()


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

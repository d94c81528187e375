"""Training steps of an objective on some of the devices."""

import math

import jax
import jax.numpy as jnp

from vit_jax.parallel import sharding
from vit_jax.setup import make_step


def start(model, loss_fn, images, make_tx, axes, *, rules=None, **options):
  """Return the first state, and a function (state, batch) -> (state, metrics).

  Args:
    model, loss_fn: model and objective.
    images: shape [H, W, C] of the images.
    make_tx: function of the parameters that returns a transformation of optax.
    axes: {name: devices} of the mesh.
    rules, **options: of `make_step`.
  """
  mesh = sharding.make_mesh(jax.devices()[: math.prod(axes.values())], **axes)
  init, _, step_fn = make_step(
    model,
    images=jax.ShapeDtypeStruct((1, *images), jnp.float32),
    loss_fn=loss_fn,
    make_tx=make_tx,
    mesh=mesh,
    rules=rules,
    **options,
  )
  teacher, frozen = loss_fn.teacher, ()
  if teacher:
    frozen = (teacher.load(teacher.abstract_params(mesh, rules)),)

  def step(state, batch):
    with jax.set_mesh(mesh):
      return step_fn(state, sharding.put_batch(batch, mesh), *frozen)

  return init(jax.random.key(0)), step


def losses_of(state, step, batches):
  """Return (the state after a step for each batch, losses)."""
  losses = []
  for batch in batches:
    state, metrics = step(state, batch)
    losses.append(float(metrics['loss']))
  return state, losses

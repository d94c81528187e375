"""Transformations of updates that optimizer rules are composed of."""

from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from vit_jax import tree
from vit_jax.config import domains
from vit_jax.types import PyTree

LearningRate = float | Callable[[Any], Any]  # a number, or step -> number

# Weight decay, or anything else that a learning rate multiplies.
Strength = Annotated[float, domains.Range(0, 1e4)]
Small = Annotated[float, domains.Range(0, 1)]  # epsilon of a division


def stored_as(
  dtype: Any, tx: optax.GradientTransformation
) -> optax.GradientTransformation:
  """Keep the floats of the state in a dtype between steps; None: as they are.

  The transformation computes in float32.
  """
  if dtype is None:
    return tx

  def cast(state, dtype):
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda x: x.astype(dtype) if is_float(x) else x, state)

  def init(params):
    return cast(tx.init(params), dtype)

  def update(updates, state, params=None):
    updates, state = tx.update(updates, cast(state, jnp.float32), params)
    return updates, cast(state, dtype)

  return optax.GradientTransformation(init, update)


def each_layer(
  tx: optax.GradientTransformation, state_type: Any
) -> optax.GradientTransformation:
  """Apply tx, which treats leaves separately, to each scanned layer by itself.

  Args:
    tx: transformation that would take the layer dimension of a scanned leaf for
      one of the parameter.
    state_type: NamedTuple of its state; all fields but `count` are trees like
      the parameters.
  """

  def axes_of(params):
    axes = tree.map_with_path(
      lambda path, _: 0 if tree.is_stacked([path]) else None, params
    )
    fields = state_type._fields
    state = state_type(*(None if f == 'count' else axes for f in fields))
    return axes, state

  def init(params):
    if not tree.is_stacked(tree.flatten(params)):
      return tx.init(params)
    axes, state_axes = axes_of(params)
    return jax.vmap(tx.init, in_axes=(axes,), out_axes=state_axes)(params)

  def update(updates, state, params):
    if not tree.is_stacked(tree.flatten(params)):
      return tx.update(updates, state, params)
    axes, state_axes = axes_of(params)
    return jax.vmap(
      tx.update,
      in_axes=(axes, state_axes, axes),
      out_axes=(axes, state_axes),
    )(updates, state, params)

  return optax.GradientTransformation(init, update)


def scale_by(factors: PyTree) -> optax.GradientTransformation:
  """Multiply updates by a tree of constants; masked leaves pass unchanged."""
  flat = tree.flatten(factors)

  def scale(path, update):
    return update * jnp.asarray(flat[path], update.dtype)

  return optax.stateless(lambda updates, _: tree.map_with_path(scale, updates))

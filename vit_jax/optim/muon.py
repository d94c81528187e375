"""Muon: the momentum of each matrix is made orthogonal before it is applied.

From memory (Jordan et al., 2024; Liu et al., 2025, for the scale). A kernel is
a matrix [inputs, outputs] however many dimensions it has, and a kernel of
scanned layers is one matrix per layer. `optax.contrib.muon` takes only arrays
with two dimensions for matrices, so it leaves attention to Adam, and takes the
biases of scanned layers, [L, D], for matrices.

Legend: b matrices of one shape, m rows, n >= m columns.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from vit_jax import tree
from vit_jax.config import domains
from vit_jax.optim.transformations import (
  LearningRate,
  Small,
  Strength,
  stored_as,
)
from vit_jax.types import PyTree

Matrices = Sequence[tuple[domains.PathRule, domains.Count]]

# (path rule, number of trailing dimensions that are outputs). The dimensions
# before them are inputs.
MATRICES = (
  (r'(.*/)?(query|key|value)/kernel', 2),  # [D, h, dh]
  # [h, dh, D] of attention, [D, M] of MLPs, [p, p, C, D] of patches and other
  # convolutions; not the head.
  (r'(?!head[^/]*/).*/kernel', 1),
)


@domains.checked
def muon(
  learning_rate: LearningRate,
  *,
  momentum: domains.Rate = 0.95,
  nesterov: bool = True,
  ns_steps: domains.Count = 5,
  consistent_rms: domains.Positive | None = 0.2,
  matrices: Matrices = MATRICES,
  b1: domains.Rate = 0.9,
  b2: domains.Rate = 0.999,
  eps: Small = 1e-8,
  mu_dtype: domains.Dtype | None = None,
  weight_decay: Strength = 0.0,
  mask: PyTree = None,
) -> optax.GradientTransformation:
  """Muon for matrices, AdamW for all other parameters and the head.

  On a mesh, the matrices are spread over all devices, a few whole matrices for
  each: they are moved there once and back once per step, and Newton-Schulz
  iterations need no communication.

  Args:
    learning_rate: float or schedule, of both.
    momentum: decay of the sum of gradients, of the matrices.
    nesterov: whether the momentum is Nesterov's.
    ns_steps: Newton-Schulz iterations. Five bring singular values between
      about 0.7 and 1.2.
    consistent_rms: each update of a matrix has about this RMS, so that learning
      rates and weight decays of AdamW fit. None: as first published, it has
      singular values of about sqrt(max(1, outputs / inputs)).
    matrices: ((path rule, number of trailing dimensions that are outputs),
      ...); the first match counts. AdamW updates what no rule matches.
      `Optimizer` raises ValueError for a rule that matches nothing, unless it
      is one of the defaults, which not every model needs.
    b1, b2: of AdamW.
    eps: of AdamW, and added to the norm that a matrix is divided by.
    mu_dtype: of the momentum of both between steps; None: that of the
      parameters.
    weight_decay: decoupled, of both.
    mask: tree of bools, True where weight decay applies.

  Raises:
    ValueError: by its `init`, for a matrix with too few dimensions.
  """

  def labels(params):
    return tree.map_with_path(
      lambda path, x: 'adamw' if _find(path, x, matrices) is None else 'muon',
      params,
    )

  def orthogonal(updates, _):
    flat = tree.flatten(updates)
    views = {path: _find(path, x, matrices) for path, x in flat.items()}
    done = _orthogonalize(flat, views, ns_steps, eps, consistent_rms)
    return tree.map_with_path(lambda path, _: done[path], updates)

  return optax.partition(
    {
      'muon': optax.chain(
        stored_as(mu_dtype, optax.trace(momentum, nesterov)),
        optax.stateless(orthogonal),
        optax.add_decayed_weights(weight_decay, mask=mask),
        optax.scale_by_learning_rate(learning_rate),
      ),
      'adamw': optax.adamw(
        learning_rate,
        b1=b1,
        b2=b2,
        eps=eps,
        weight_decay=weight_decay,
        mu_dtype=mu_dtype,
        mask=mask,
      ),
    },
    labels,
  )


@dataclasses.dataclass(frozen=True)
class _View:
  """A kernel as `count` matrices [inputs, outputs]."""

  count: int
  inputs: int
  outputs: int

  @property
  def is_tall(self):
    return self.inputs > self.outputs

  @property
  def sides(self):
    return tuple(sorted((self.inputs, self.outputs)))


def _find(path, x, matrices):
  """Return the _View of a parameter, or None if it is not a matrix."""
  i = tree.first_match([rule for rule, _ in matrices], path)
  if i is None:
    return None
  rule, num_outputs = matrices[i]
  first = int(tree.is_stacked([path]))
  inputs = x.shape[first : x.ndim - num_outputs]
  if not inputs:
    raise ValueError(
      f'muon: matrices=({rule!r}, {num_outputs}) matches {path} of shape '
      f'{x.shape}, which has no input dimensions'
      + (' next to that of the layers. ' if first else '. ')
      + 'Use fewer output dimensions, or a rule that does not match this path.'
    )
  outputs = x.shape[x.ndim - num_outputs :]
  count = math.prod(x.shape[:first])
  return _View(count, math.prod(inputs), math.prod(outputs))


def _orthogonalize(flat, views, ns_steps, eps, consistent_rms):
  """Return {path: array} of orthogonal matrices, scaled.

  Matrices of one shape, of all layers, are one batch.
  """
  groups: dict[Any, list[str]] = {}
  for path, view in views.items():
    groups.setdefault((view.sides, flat[path].dtype), []).append(path)
  done = {}
  for paths in groups.values():
    parts = []
    for path in paths:
      view = views[path]
      x = flat[path].reshape(view.count, view.inputs, view.outputs)
      parts.append(x.mT if view.is_tall else x)
    x = _spread(jnp.concatenate(parts))
    x = _collect(newton_schulz(x, ns_steps, eps))
    start = 0
    for path in paths:
      view = views[path]
      part = x[start : start + view.count]  # without the padding of `_spread`
      start += view.count
      if consistent_rms is None:
        scale = math.sqrt(max(1, view.outputs / view.inputs))
      else:
        scale = consistent_rms * math.sqrt(max(view.sides))
      part = scale * (part.mT if view.is_tall else part)
      done[path] = part.reshape(flat[path].shape)
  return done


def newton_schulz(x: jax.Array, steps: int = 5, eps: float = 1e-8) -> jax.Array:
  """Return matrices [b, m, n] with singular values of about 1 (0.7 to 1.2).

  Each iteration maps the singular values s of x / |x| to 3.4445 s - 4.7750 s^3
  + 2.0315 s^5, which is steepest at 0. Singular vectors stay.

  Args:
    x: [b, m, n], m <= n.
    steps: number of iterations.
    eps: added to the Frobenius norm.
  """
  x /= jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + eps
  for _ in range(steps):
    gram = x @ x.mT  # [b, m, m]
    x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
  return x


def _mesh_axes():
  """Return the axes of the mesh that split arrays, 'fsdp*' first, and its size.

  Parameters are sharded along the first ones, so that matrices stay sharded
  along them when they are collected.
  """
  mesh = jax.sharding.get_abstract_mesh()
  axes = [name for name in mesh.axis_names if mesh.shape[name] > 1]
  return sorted(axes, key=lambda name: not name.startswith('fsdp')), mesh.size


# Arrays are moved along one mesh axis after the other: the compiler would
# gather all of them, if it had to move them along several at once. How the
# sides of matrices are split in between is left to it, because that depends on
# the parameters that they come from and go to.


def _spread(x):
  """Return x, [b, m, n], with whole matrices on each device of the mesh.

  Zeros are appended up to a multiple of the number of devices.
  """
  axes, num_devices = _mesh_axes()
  if not axes:
    return x
  free = PartitionSpec.UNCONSTRAINED
  x = jnp.pad(x, ((0, -len(x) % num_devices), (0, 0), (0, 0)))
  for i in range(1, len(axes)):
    spec = PartitionSpec(tuple(axes[:i]), free, free)
    x = jax.lax.with_sharding_constraint(x, spec)
  return jax.lax.with_sharding_constraint(x, PartitionSpec(tuple(axes)))


def _collect(x):
  """Return x, as `_spread` placed it, with matrices split over 'fsdp*' only."""
  axes, _ = _mesh_axes()
  free = PartitionSpec.UNCONSTRAINED
  num_fsdp = sum(name.startswith('fsdp') for name in axes)
  for i in reversed(range(num_fsdp, len(axes))):
    spec = PartitionSpec(tuple(axes[:i]), free, free)
    x = jax.lax.with_sharding_constraint(x, spec)
  return x

"""Probes: what train steps show of gradients, updates and parameters."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import tree
from vit_jax.durations import Interval, Timeline, steps
from vit_jax.types import PathRule

_SIZES = 2.0 ** np.arange(-30, 11)
EDGES = np.concatenate([-_SIZES[::-1], _SIZES]).astype(np.float32)  # of bins


@dataclasses.dataclass(frozen=True)
class Probe:
  """A function (*, step, params, grads, updates), and the steps that call it.

  It returns {name: scalar, or counts in the bins between EDGES}, and is the
  `target` in a config. The last step of a run calls it, too.
  """

  fn: Callable[..., Any] = dataclasses.field(metadata={'rest': True})
  every: Interval = steps(50)

  def __call__(self, timeline: Timeline, **seen: Any) -> tuple[jax.Array, Any]:
    """Return (whether this is such a step, values; zeros in other steps)."""
    n, fn = seen['step'], functools.partial(self.fn, **seen)
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(fn))
    due = (n % timeline.steps(self.every) == 0) | (n == timeline.total_steps)
    return due, jax.lax.cond(due, fn, lambda: zeros)


@dataclasses.dataclass(frozen=True)
class Norms:
  """Norm of each array whose path matches a rule, scanned layers one by one."""

  of: Literal['grads', 'updates', 'params'] = 'grads'
  paths: Sequence[PathRule] = ('.*/kernel',)

  def __call__(self, **seen: Any) -> dict[str, jax.Array]:
    found = tree.unstack_blocks(tree.flatten(seen[self.of]))
    tree.check_rules_match(self.paths, found, what='probes: paths')
    kept = {k: x for k, x in found.items() if tree.mask(self.paths, {k: x})[k]}
    return {f'{self.of}/{k}': self.measure(x) for k, x in kept.items()}

  def measure(self, x: jax.Array) -> jax.Array:
    return jnp.linalg.norm(x)


class Histograms(Norms):
  """Counts of the values of each array; NaN is in the last bin."""

  def measure(self, x: jax.Array) -> jax.Array:
    below = jax.lax.map(lambda edge: jnp.sum(x < edge), EDGES[1:-1])
    return jnp.diff(below, prepend=0, append=x.size)

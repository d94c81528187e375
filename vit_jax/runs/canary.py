"""Checks that the compiler computes the right values on the devices at hand.

`main` runs QUICK before each run, in less than a second; `python -m
vit_jax.tools.doctor` has more checks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.io import environment
from vit_jax.types import Shape, UserError

# Largest error (see `run`) that rounding explains, by the least accurate dtype
# in a computation. At most a third of it was measured on CPUs. Errors
# that are not rounding, such as values of another row, are about 1.
_BOUNDS = {'float32': 4e-5, 'tf32': 0.06, 'bfloat16': 0.25}
# Dtype of the factors of a float32 product on devices, by default.
_PRODUCTS = {'cpu': 'float32', 'gpu': 'tf32', 'tpu': 'bfloat16'}
REMEDY = (
  'Install another version of jax and jaxlib (docs/versions.md), or, on CPUs '
  f'with jaxlib {" or ".join(environment.WRONG_JAXLIB)} (jax issue 39103), add '
  f'{environment.OPTION}= to XLA_FLAGS.'
)


class Check(NamedTuple):
  """A computation that numpy can repeat; its inputs are drawn from N(0, 1)."""

  name: str
  shapes: tuple[Shape, ...]
  compute: Callable[..., Any]  # (array module, *inputs) -> array


QUICK = (
  Check(  # jax issue 39103
    'norms of products, 32,769 rows x 3',
    ((3, 3), (32_769, 3)),
    lambda np, a, x: np.sum((a @ x.T) ** 2, axis=0),
  ),
  Check(
    'sums of products, 40,000 rows x 3',
    ((3, 3), (40_000, 3)),
    lambda np, a, x: np.sum(a @ x.T, axis=0),
  ),
)


def bound(dtype: str = 'float32') -> float:
  """Return the largest error of matrix products on the local devices."""
  if dtype == 'float32':
    dtype = _PRODUCTS.get(jax.local_devices()[0].platform, 'bfloat16')
  return _BOUNDS[dtype]


def run(check: Check, dtype: str = 'float32') -> float:
  """Return the error of a check in this dtype, the largest of local devices.

  The computation is compiled with jax.numpy and compared with numpy in float64.
  """
  rng = np.random.default_rng(0)
  inputs = [rng.standard_normal(shape, np.float32) for shape in check.shapes]
  mesh = Mesh(np.array(jax.local_devices()), ('device',))
  everywhere = NamedSharding(mesh, PartitionSpec())

  def compute(*arrays):
    return check.compute(jnp, *(x.astype(dtype) for x in arrays))

  found = jax.jit(compute, out_shardings=everywhere)(
    *jax.device_put(inputs, everywhere)
  )
  expected = check.compute(np, *(x.astype(np.float64) for x in inputs))
  return max(error(x.data, expected) for x in found.addressable_shards)


def error(found: Any, expected: Any) -> float:
  """Return the largest difference of an element, infinity if it is not finite.

  It is relative to the root mean square of the expected array.
  """
  found, expected = (np.asarray(x, np.float64) for x in (found, expected))
  largest = np.abs(found - expected).max() / np.sqrt(np.mean(expected**2))
  return float(largest) if np.isfinite(largest) else np.inf


def refuse_wrong_results() -> None:
  """Run the quick checks on the local devices; raise UserError if one fails."""
  for check in QUICK:
    if (found := run(check)) > bound():
      raise UserError(
        f'This installation computes wrong values: {check.name} has the error '
        f'{found:.2g}. {REMEDY}'
      )

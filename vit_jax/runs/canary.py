"""Checks that the compiler computes the right values on the devices at hand.

A Check is a function of an array module: it is compiled with jax.numpy and
compared with numpy in float64. `main` runs QUICK before each run, in less than
a second; `python -m vit_jax.tools.doctor` has more checks.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.runs import environment
from vit_jax.types import Shape, UserError

# Largest error (see `run`) that rounding explains, by the least accurate dtype
# in a computation. At most a third of it was measured on CPUs. Errors
# that are not rounding, such as values of another row, are about 1.
BOUNDS = {'float32': 4e-5, 'tf32': 0.06, 'bfloat16': 0.25}
# Dtype to which devices round the factors of a float32 product, by default.
_PRODUCTS = {'cpu': 'float32', 'gpu': 'tf32', 'tpu': 'bfloat16'}


@dataclasses.dataclass(frozen=True)
class Check:
  """A computation that numpy can repeat.

  Attributes:
    name: what is computed, and the sizes.
    shapes: of the float32 inputs, which are drawn from N(0, 1).
    compute: (array module, *inputs) -> array.
    dtype: that the inputs are cast to on the devices.
  """

  name: str
  shapes: tuple[Shape, ...]
  compute: Callable[..., Any]
  dtype: str = 'float32'


def bound(dtype: str, slack: float = 1.0) -> float:
  """Return the largest error of matrix products on the local devices."""
  if dtype == 'float32':
    dtype = _PRODUCTS.get(jax.local_devices()[0].platform, 'bfloat16')
  return slack * BOUNDS[dtype]


def run(check: Check) -> float:
  """Return the error of a check, the largest of the local devices.

  It is the largest difference of an element, relative to the root mean square
  of the reference; infinity if the result is not finite.
  """
  rng = np.random.default_rng(0)
  inputs = [rng.standard_normal(shape, np.float32) for shape in check.shapes]
  mesh = Mesh(np.array(jax.local_devices()), ('device',))
  everywhere = NamedSharding(mesh, PartitionSpec())

  def compute(*arrays):
    return check.compute(jnp, *(x.astype(check.dtype) for x in arrays))

  found = jax.jit(compute, out_shardings=everywhere)(
    *jax.device_put(inputs, everywhere)
  )
  expected = check.compute(np, *(x.astype(np.float64) for x in inputs))
  return max(error(x.data, expected) for x in found.addressable_shards)


def error(found: Any, expected: Any) -> float:
  """Return the error of an array, see `run`."""
  found, expected = (np.asarray(x, np.float64) for x in (found, expected))
  largest = np.abs(found - expected).max() / np.sqrt(np.mean(expected**2))
  return float(largest) if np.isfinite(largest) else np.inf


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


def refuse_wrong_results() -> None:
  """Run the quick checks on the local devices; raise ValueError if one fails.

  Without this, a run on a wrong compiler would train and report its numbers.
  """
  for check in QUICK:
    found = run(check)
    if found > bound(check.dtype):
      raise UserError(
        f'This installation computes wrong values: {check.name} has the error '
        f'{found:.2g}. {remedy()} `python -m vit_jax.tools.doctor` shows all '
        'checks.'
      )


def remedy() -> str:
  """Return what to do about wrong results of the installed jaxlib, as text."""
  version = environment.jaxlib_version()
  if version in environment.WRONG_JAXLIB and jax.default_backend() == 'cpu':
    return (
      f'jaxlib {version} has this bug (jax issue 39103). Add '
      f'{environment.OPTION}= to XLA_FLAGS, or install jax 0.11 or newer, '
      'which needs Python 3.12.'
    )
  return (
    'Install other versions of jax and jaxlib (docs/versions.md lists those '
    f'that were tested), and report the versions (jaxlib {version}) and the '
    'check at https://github.com/jax-ml/jax/issues.'
  )

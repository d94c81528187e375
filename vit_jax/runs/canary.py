"""Checks that the compiler computes the right thing on the devices at hand.

A Check compares one computation with the same in numpy and float64. `main` runs
the checks of this file before each run, in less than a second;
`python -m vit_jax.tools.doctor` runs these and many more.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.runs import environment
from vit_jax.types import Shape

# Largest error (see `run`) that rounding explains, by the least accurate dtype
# in a computation. At most a third of it was measured on CPUs. Errors
# that are not rounding, such as values of another row, are about 1.
BOUNDS = {'float32': 4e-5, 'tf32': 0.06, 'bfloat16': 0.25}
# Dtype to which devices round the factors of a float32 product, by default.
_PRODUCTS = {'cpu': 'float32', 'gpu': 'tf32', 'tpu': 'bfloat16'}


class WrongResult(ValueError):
  """The compiled program computes something else than was written."""


@dataclasses.dataclass(frozen=True)
class Check:
  """A computation, its float64 reference, and the error that is allowed.

  Attributes:
    name: what is computed, and the sizes.
    inputs: function Generator -> tuple of numpy arrays or trees of them.
    compute: function of the inputs -> tree of arrays; compiled with jax.jit.
    reference: function of the inputs, with floats in float64 -> the same tree,
      computed by numpy.
    products: whether matrix products are part of it.
    dtype: of the computation, 'float32' or 'bfloat16'.
    slack: multiple of the bound that is allowed.
  """

  name: str
  inputs: Callable[..., Any]
  compute: Callable[..., Any]
  reference: Callable[..., Any]
  products: bool = False
  dtype: str = 'float32'
  slack: float = 1.0

  @property
  def bound(self) -> float:
    """Largest error that rounding explains on the local devices."""
    dtype = self.dtype
    if self.products and dtype == 'float32':
      dtype = _PRODUCTS.get(jax.local_devices()[0].platform, 'bfloat16')
    return self.slack * BOUNDS[dtype]


def run(check: Check) -> float:
  """Return the error of a check.

  The computation runs on each local device. The error of an array is the
  largest difference of an element, relative to the root mean square of the
  reference; the largest one of all arrays and devices counts.

  Returns:
    A float, at most check.bound if the result is right; infinity if it is not
    finite or has another shape.
  """
  inputs = check.inputs(np.random.default_rng(0))
  mesh = Mesh(np.array(jax.local_devices()), ('device',))
  everywhere = NamedSharding(mesh, PartitionSpec())
  compute = jax.jit(check.compute, out_shardings=everywhere)
  found = compute(*jax.device_put(inputs, everywhere))
  expected = check.reference(*jax.tree.map(_float64, inputs))
  errors = jax.tree.map(_error, found, expected)
  return max(jax.tree.leaves(errors))


def _float64(x):
  is_float = jnp.issubdtype(x.dtype, jnp.floating)
  return x.astype(np.float64) if is_float else x


def _error(found, expected):
  expected = np.asarray(expected, np.float64)
  scale = np.sqrt(np.mean(expected**2))
  errors = []
  for shard in found.addressable_shards:
    actual = np.asarray(shard.data, np.float64)
    if actual.shape != expected.shape:
      return np.inf
    error = np.abs(actual - expected).max() / scale
    errors.append(error if np.isfinite(error) else np.inf)
  return max(errors)


def normal(
  *shapes: Shape,
) -> Callable[[np.random.Generator], tuple[np.ndarray, ...]]:
  """Return a function Generator -> float32 arrays of N(0, 1)."""
  return lambda rng: tuple(rng.standard_normal(s, np.float32) for s in shapes)


QUICK = (
  Check(
    'norms of products, 32,769 rows x 3',  # jax issue 39103
    inputs=normal((3, 3), (32_769, 3)),
    compute=jax.vmap(lambda a, x: jnp.sum((a @ x) ** 2), (None, 0)),
    reference=lambda a, x: np.sum((x @ a.T) ** 2, axis=1),
    products=True,
  ),
  Check(
    'sums of products, 40,000 rows x 3',
    inputs=normal((3, 3), (40_000, 3)),
    compute=lambda a, x: jnp.sum(a @ x.T, axis=0),
    reference=lambda a, x: np.sum(a @ x.T, axis=0),
    products=True,
  ),
)


def refuse_wrong_results() -> None:
  """Run the quick checks on the local devices; raise WrongResult if one fails.

  Without this, a run on a wrong compiler would train and report its numbers.
  """
  for check in QUICK:
    error = run(check)
    if not error <= check.bound:
      raise WrongResult(
        f'This installation computes wrong values on {device_name()}: '
        f'{check.name}: error {error:.2g}, at most {check.bound:.2g} is '
        f'rounding. '
        f'{remedy()} `python -m vit_jax.tools.doctor` shows all checks.'
      )


def device_name() -> str:
  """Return the kind of the local devices, as text."""
  device = jax.local_devices()[0]
  kind = device.device_kind
  if kind == device.platform:
    return f'this {kind}'
  return f'{kind} ({device.platform})'


def remedy() -> str:
  """Return what to do about wrong results of the installed jaxlib, as text."""
  version = environment.jaxlib_version()
  on_cpu = jax.local_devices()[0].platform == 'cpu'
  if version not in environment.WRONG_JAXLIB or not on_cpu:
    return (
      'Install other versions of jax and jaxlib (docs/versions.md lists those '
      f'that were tested), and report the versions (jaxlib {version}) and the '
      'check at https://github.com/jax-ml/jax/issues.'
    )
  flags, option = os.environ.get('XLA_FLAGS', ''), environment.OPTION
  if flags and not flags.lstrip().startswith('-'):
    how = f'Add {option}= to the file {flags} that XLA_FLAGS names'
  elif option in flags:
    how = f'Remove {option} from XLA_FLAGS={flags!r}, or set it to {option}='
  else:
    how = f'Set XLA_FLAGS={f"{flags} {option}=".strip()!r}'
  return (
    f'jaxlib {version} has this bug (jax issue 39103). {how}, or install '
    'jax 0.11 or newer, which needs Python 3.12.'
  )

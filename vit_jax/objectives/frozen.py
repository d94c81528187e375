"""Models that a loss uses but nobody trains, such as the teacher's.

A loss that closes over their parameters has them compiled into the program, and
JAX refuses arrays that are sharded over several hosts. So an objective makes a
Frozen, calls its `apply`, and lists it in `loss_fn.frozen`. `make_step` then
passes the parameters as an argument of the compiled step, sharded by the rules
of the model. They are not part of the TrainState: no checkpoint contains them,
and no optimizer sees them. Objectives that wrap others keep the list, because
functools.wraps copies it.
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from vit_jax import tree
from vit_jax.parallel.sharding import Rules, annotate, infer
from vit_jax.types import Array, LossFn, PyTree

_given: dict['Frozen', PyTree] = {}  # while a step is traced


class Frozen:
  """A model of a loss that is not trained.

  Attributes:
    model: Flax module.
    adapt: function of the model, which returns one that computes the same in
      another way. Set it before a step is traced.
    images: ShapeDtypeStruct of a batch of images.
    shapes: of its parameters, tree of ShapeDtypeStructs.
    load: function that returns the parameters, a tree of numpy arrays.
  """

  def __init__(
    self,
    model: Any,
    images: jax.ShapeDtypeStruct,
    shapes: PyTree,
    load: Callable[[], PyTree],
  ) -> None:
    self.model, self.images = model, images
    self.adapt: Callable[[Any], Any] = lambda model: model
    self.shapes, self.load = shapes, load

  def apply(self, images: Array) -> Any:
    """Return the outputs of the model for a batch of images.

    The parameters are those that the step was given, else as they are loaded.
    """
    params = _given[self] if self in _given else self._loaded  # noqa: SIM401
    return self.adapt(self.model).apply({'params': params}, images)

  @functools.cached_property
  def _loaded(self) -> PyTree:
    return self.load()


def of(loss_fn: LossFn) -> Sequence[Frozen]:
  """Return what a LossFn uses that is not trained; () for most of them."""
  return getattr(loss_fn, 'frozen', ())


@contextlib.contextmanager
def given(parts: Sequence[Frozen], values: Sequence[PyTree]) -> Iterator[None]:
  """Context manager in which each Frozen has the given value."""
  before = dict(_given)
  _given.update(zip(parts, values))
  try:
    yield
  finally:
    _given.clear()
    _given.update(before)


class Step:
  """A compiled train step, (state, batch) -> (state, metrics), with Frozen.

  Attributes:
    arguments: ShapeDtypeStructs with shardings, one tree for each Frozen.
  """

  def __init__(
    self,
    step: Callable[..., Any],
    parts: Sequence[Frozen],
    *,
    mesh: Mesh,
    rules: Rules,
    out_shardings: Any,
  ) -> None:
    """Prepare a step.

    Args:
      step: (state, batch) -> (state, metrics).
      parts: what its loss uses.
      mesh: as returned by `sharding.make_mesh`.
      rules: sharding rules of the model. Paths begin with 'frozen/0/'.
      out_shardings: shardings of state and metrics.
    """
    shapes = {'frozen': {str(i): x.shapes for i, x in enumerate(parts)}}
    found = annotate(shapes, infer(shapes, rules, mesh))['frozen']
    self.arguments = [found[str(i)] for i in range(len(parts))]
    self._parts = parts
    self._values: list[PyTree] | None = None

    def call(state, batch, values):
      with given(parts, values):
        return step(state, batch)

    self._jitted = jax.jit(call, donate_argnums=0, out_shardings=out_shardings)

  def load(self) -> None:
    """Load the arrays and put them on the mesh; the first call does so, too."""
    if self._values is None:
      with jax.transfer_guard('allow'), jax.ensure_compile_time_eval():
        self._values = [
          _place(part.load(), argument)
          for part, argument in zip(self._parts, self.arguments)
        ]

  def __call__(self, state: Any, batch: Any) -> Any:
    self.load()
    return self._jitted(state, batch, self._values)

  def lower(self, state: Any, batch: Any) -> Any:
    """Return the lowered step, as of a jitted function."""
    return self._jitted.lower(state, batch, self.arguments)


def digest(arrays: PyTree) -> str:
  """Return a hash of names, types, shapes and values: 16 hexadecimal digits."""
  found = hashlib.sha256()
  for path, array in sorted(tree.flatten(arrays).items()):
    found.update(f'{path} {array.dtype} {array.shape}\n'.encode())
    found.update(np.ascontiguousarray(array).tobytes())
  return found.hexdigest()[:16]


def _place(arrays, argument):
  """Return arrays on the mesh; ValueError if hosts have other values."""
  if jax.process_count() > 1:
    mine = np.frombuffer(bytes.fromhex(digest(arrays)), np.uint32)
    hosts = multihost_utils.process_allgather(mine)
    other = np.flatnonzero((hosts != hosts[0]).any(axis=1))
    if other.size:
      raise ValueError(
        'The parameters of the teacher that host 0 has read are not those of '
        f'host {", ".join(map(str, other[:8]))}. Give all hosts the same file.'
      )

  def place(array, shape):
    return jax.make_array_from_callback(
      shape.shape, shape.sharding, lambda index: np.asarray(array)[index]
    )

  return jax.tree.map(place, arrays, argument)

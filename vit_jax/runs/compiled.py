"""The compiled train step: shared by runs, and its memory."""

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.config import Partial
from vit_jax.io import terminal
from vit_jax.parallel import sharding
from vit_jax.types import PyTree, UserError

GIB = 2**30
_EVERY_S = 30.0


def reuse(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
  """Return fn(*args, **kwargs), or the same object as an equal call did.

  So runs of a study that train the same model share their compiled programs.
  """
  return _call(Partial(fn, *args, **kwargs))


@functools.lru_cache(maxsize=64)
def _call(call):
  return call.func(*call.args, **call.keywords)


def forget() -> None:
  """Release what `reuse` keeps, and everything that JAX has compiled."""
  _call.cache_clear()
  jax.clear_caches()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
  """Context manager of a compilation that says how long it has taken so far.

  From then on XLA does not log that slow compilations are bugs of its own.
  """
  done, began = threading.Event(), time.monotonic()
  level = jax.config.jax_logging_level  # type: ignore[attr-defined]

  def report():
    while not done.wait(_EVERY_S):
      jax.config.update('jax_logging_level', 'CRITICAL')
      seconds = time.monotonic() - began
      terminal.say(f'still compiling after {terminal.duration(seconds)} ...')

  thread = threading.Thread(target=report, daemon=True)
  thread.start()
  try:
    yield
  finally:
    done.set()
    thread.join()
    for each in ('WARNING', level):  # the first sets XLA's level, too
      jax.config.update('jax_logging_level', each)


def batch_shapes(
  example: Mapping[str, Any], batch_size: int, mesh: Mesh
) -> dict[str, jax.ShapeDtypeStruct]:
  """Return a global training batch of ShapeDtypeStructs, for any example."""
  split = sharding.batch_sharding(mesh)
  make = functools.partial(jax.ShapeDtypeStruct, sharding=split)
  return {k: make((batch_size, *x.shape), x.dtype) for k, x in example.items()}


def report(ready: Any, plan: Any, mesh: Mesh) -> None:
  """Compile the train steps of a plan, and print what would be trained."""
  state, batch, teachers = ready.shapes.values()
  parameters = f'{ready.num_params:,} parameters'
  terminal.say(f'{parameters}; compiling the train step ...')
  axes = ', '.join(f'{name} {size}' for name, size in mesh.shape.items())
  rows = [
    ('model', f'{type(ready.model).__name__}, {parameters}'),
    ('classes', str(ready.model.num_classes)),
    ('batch of images', 'x'.join(map(str, batch['image'].shape))),
    ('steps', f'{ready.total_steps:,}'),
    ('mesh', f'{axes} ({mesh.devices.flat[0].device_kind})'),
  ]
  sizes = [('state', gib_on_a_device(state))]
  sizes += [(name, gib_on_a_device(x)) for name, x in teachers.items()]
  flops = 0.0
  for i, (name, each) in enumerate(plan.setups.items()):
    with jax.set_mesh(mesh), waiting():
      memory = each.step.lower(**each.shapes).compile().memory_analysis()
    count = np.count_nonzero(plan.of_step == i)
    flops += count * each.flops_per_step()
    if memory is not None:
      which = f' of {name} ({count:,} steps)' if name else ''
      sizes.append((f'temporaries{which}', memory.temp_size_in_bytes / GIB))
  rows += [(f'{name} on a device', f'{gib:.3f} GiB') for name, gib in sizes]
  rows.append(('all steps', f'{flops / 1e18:.3g} exaFLOPs'))
  terminal.table('dry run: nothing was trained', ['what', 'is'], rows)


class OutOfMemoryError(MemoryError, UserError):
  """The memory of a device is exhausted."""


@contextlib.contextmanager
def explaining(advice: str) -> Iterator[None]:
  """Context manager that says what to do when a device is out of memory."""
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if 'EXHAUSTED' not in (text := str(error).partition('\n')[0]):
      raise
    kind = jax.local_devices()[0].device_kind
    raise OutOfMemoryError(
      f'Out of memory on a device ({kind}). {advice}\n  ({text:.300})'
    ) from error


def gib_on_a_device(arrays: PyTree) -> float:
  """Return the size in GiB of the part of a tree that a device holds."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize / GIB
    for x in jax.tree.leaves(arrays)
  )

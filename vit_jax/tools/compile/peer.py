"""Train steps of other code, compiled for comparison with a config's.

A peer script is a Python file with a function

    def make_step(*, batch_size, image_shape, num_classes, mesh):
      ...
      return step, arguments

that returns a train step and the shapes of its arguments, a tuple of trees of
jax.ShapeDtypeStruct. Nothing is executed, so jax.eval_shape can make them. The
last argument is the batch. Arrays without a sharding of their own are sharded
over the examples in the batch, and replicated elsewhere. A step that is not
jitted yet is jitted, and donates all its arguments except the batch.

Text after a colon, --peer_script=FILE.py:TEXT, is the first, positional
argument of make_step. benchmarks/plain_linen_vit.py is an example;
peer_big_vision.py and peer_vision_transformer.py there take the models from a
checkout of these repositories, with `load` and `supervised` of this module.
"""

import contextlib
import importlib.util
import inspect
import pathlib
import runpy
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import optax

from vit_jax.analysis import flops
from vit_jax.parallel import sharding
from vit_jax.runs.device_memory import GIB
from vit_jax.tools.compile import step


def measure(
  spec: str, row: dict[str, Any], mesh: jax.sharding.Mesh
) -> dict[str, Any]:
  """Compile what `lower` makes, and return its row."""
  return step.compile_row(*lower(spec, row, mesh))


def lower(
  spec: str, row: dict[str, Any], mesh: jax.sharding.Mesh
) -> tuple[Any, dict[str, Any]]:
  """Lower a peer's step for the batch of our own.

  Its model TFLOP are those of all products in the step, and not 3 x the forward
  pass.

  Args:
    spec: 'FILE.py' or 'FILE.py:ARGUMENT'.
    row: of `step.lower`.
    mesh: of the devices to compile for.

  Returns:
    (jax.stages.Lowered, columns of its row that need no compilation).

  Raises:
    ValueError: the file has no such function, or it does not return a step and
      its arguments.
  """
  fn: Any
  fn, arguments = _read(spec, row, mesh)
  *state, batch = arguments
  arguments = (
    *_annotate(state, sharding.replicated(mesh)),
    _annotate(batch, sharding.batch_sharding(mesh)),
  )
  if not hasattr(fn, 'lower'):
    fn = jax.jit(fn, donate_argnums=range(len(state)))
  with jax.set_mesh(mesh):
    lowered = fn.lower(*arguments)
    flop = flops.count(fn, *arguments)
  shared = 'topology', 'jax', 'libtpu', 'device_kind', 'devices', 'mesh'
  shared = *shared, 'batch_size', 'image_shape', 'num_classes', 'hbm_gib'
  return lowered, {k: row[k] for k in shared if k in row} | {
    'config': f'peer {spec}',
    'arguments_gib': step.argument_bytes(arguments) / GIB,
    'model_tflop': flop / mesh.size / 1e12,
  }


def ratio(row: dict[str, Any], peer: dict[str, Any]) -> float | None:
  """Return the cycles of the peer over ours; None if either is not known."""
  ours, theirs = row.get('megacycles'), peer.get('megacycles')
  return theirs / ours if ours and theirs else None


def load(file: str, url: str, *, unused: Sequence[str] = ()) -> Any:
  """Return a module, made from one file of a checkout on PYTHONPATH.

  It is loaded by its path, so its package may have the name of another one.

  Args:
    file: path in the checkout, such as 'big_vision/models/vit.py'.
    url: of the repository, for the error message.
    unused: names of modules that the file imports and the step does not use;
      they are replaced by empty ones, so that they need not be importable.

  Raises:
    ValueError: no folder on PYTHONPATH has the file.
  """
  paths = (pathlib.Path(folder, file) for folder in sys.path)
  path = next((path for path in paths if path.is_file()), None)
  if path is None:
    raise ValueError(
      f'--peer_script: {file} is in no folder of PYTHONPATH. Clone {url}, and '
      'add the folder of the clone to PYTHONPATH.'
    )
  name = f'peer_{"_".join(pathlib.Path(file).with_suffix("").parts)}'
  spec = importlib.util.spec_from_file_location(name, path)
  assert spec and spec.loader
  module = sys.modules[name] = importlib.util.module_from_spec(spec)
  with _empty_modules(unused):
    spec.loader.exec_module(module)
  return module


@contextlib.contextmanager
def _empty_modules(names: Sequence[str]) -> Iterator[None]:
  """Context manager in which these modules are empty, if not yet imported."""
  added = [name for name in names if name not in sys.modules]
  sys.modules.update({name: types.ModuleType(name) for name in added})
  try:
    yield
  finally:
    for name in added:
      del sys.modules[name]


def supervised(
  init: Callable[[], Any],
  loss: Callable[..., jax.Array],
  tx: optax.GradientTransformation,
  batch: tuple[jax.ShapeDtypeStruct, ...],
) -> tuple[Callable[..., Any], tuple[Any, Any]]:
  """Return the step of a model that optax trains, and its arguments' shapes.

  Args:
    init: function that returns the parameters.
    loss: function (params, *batch) -> scalar.
    tx: optimizer.
    batch: shapes of the arrays of a batch.
  """

  def start():
    params = init()
    return params, tx.init(params)

  def step(state, batch):
    params, opt_state = state
    value, grads = jax.value_and_grad(loss)(params, *batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  return step, (jax.eval_shape(start), batch)


def _read(spec, row, mesh):
  """Return (step, arguments) of a script."""
  name, colon, argument = spec.partition(':')
  path = pathlib.Path(name).expanduser()
  if not path.is_file():
    raise ValueError(f'--peer_script={spec}: {path} is not a file.')
  make_step = runpy.run_path(str(path), run_name=path.stem).get('make_step')
  about = {
    'batch_size': row['batch_size'],
    'image_shape': tuple(map(int, row['image_shape'].split('x'))),
    'num_classes': row['num_classes'],
    'mesh': mesh,
  }
  extra = (argument,) if colon else ()
  if not callable(make_step):
    raise ValueError(
      f'--peer_script={spec}: {path} has no function make_step. Define '
      f'make_step(*, {", ".join(about)}), which returns (step, arguments).'
    )
  try:
    inspect.signature(make_step).bind(*extra, **about)
  except TypeError as error:
    raise ValueError(
      f'--peer_script={spec}: {error}. make_step must take the keywords '
      f'{", ".join(about)}, and the text after the colon if there is one.'
    ) from None
  made = make_step(*extra, **about)
  if not (
    isinstance(made, tuple)
    and len(made) == 2
    and callable(made[0])
    and isinstance(made[1], tuple | list)
    and made[1]
  ):
    raise ValueError(
      f'--peer_script={spec}: make_step returned {type(made).__name__}. '
      'Expected (step, arguments): a function and a tuple of trees of '
      'jax.ShapeDtypeStruct, of which the last is the batch.'
    )
  return made


def _annotate(tree, default):
  """Return ShapeDtypeStructs with a sharding each."""

  def one(x):
    placed = getattr(x, 'sharding', None) or default
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed)

  return jax.tree.map(one, tree)

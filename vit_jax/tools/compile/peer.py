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
argument of make_step. benchmarks/plain_linen_vit.py is an example.
"""

import inspect
import pathlib
import runpy
from typing import Any

import jax

from vit_jax import sharding
from vit_jax.analysis import flops
from vit_jax.device_memory import GIB
from vit_jax.tools.compile import step


def measure(
  spec: str, row: dict[str, Any], mesh: jax.sharding.Mesh
) -> dict[str, Any]:
  """Return the row of a peer's step, for the batch of our own row.

  Its model TFLOP are those of all products in the step, and not 3 x the forward
  pass.

  Args:
    spec: 'FILE.py' or 'FILE.py:ARGUMENT'.
    row: of `step.measure`.
    mesh: of the devices to compile for.

  Raises:
    ValueError: the file has no such function, or it does not return a step and
      its arguments.
  """
  fn: Any
  fn, arguments = _load(spec, row, mesh)
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
  return step.compile_row(
    lowered,
    {k: row[k] for k in shared if k in row}
    | {
      'config': f'peer {spec}',
      'arguments_gib': step.argument_bytes(arguments) / GIB,
      'model_tflop': flop / mesh.size / 1e12,
    },
  )


def ratio(row: dict[str, Any], peer: dict[str, Any]) -> float | None:
  """Return the cycles of the peer over ours; None if either is not known."""
  ours, theirs = row.get('megacycles'), peer.get('megacycles')
  return theirs / ours if ours and theirs else None


def _load(spec, row, mesh):
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

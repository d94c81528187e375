"""Checkpoints on a file system: found, verified, and read.

checkpoint.py describes the items of a checkpoint, and writes them. The files of
a checkpoint may be damaged, incomplete, or those of another run. `Damaged`
describes what is wrong.
"""

import contextlib
import dataclasses
import gc
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from vit_jax import tree
from vit_jax.runs import checksums, workdirs
from vit_jax.runs.files import (
  LARGEST_JSON,
  PathLike,
  check_remote,
  is_local,
  read_json,
)

_OTHER_RUN = (
  'Use the config that the run was started with, or another workdir. To start '
  'from its parameters only, set init_from in a new run.'
)


def find(path: PathLike, step: int | None = None) -> epath.Path:
  """Return the directory of one checkpoint.

  Args:
    path: a workdir, its checkpoints folder, or one checkpoint (.../500).
    step: which checkpoint; None for the newest.

  Raises:
    ValueError: there is none; with what was found instead.
  """
  if path is None:
    raise ValueError(
      'init_from.path is not set. Set it to a workdir, a checkpoint, or a '
      'weights file: --config.init_from.path=PATH'
    )
  check_remote(path)
  path = epath.Path(path)
  if workdirs.is_step(path.name) and (path / 'params').exists():
    return path
  folder = path / 'checkpoints' if (path / 'checkpoints').exists() else path
  steps = workdirs.steps(folder)
  if not steps:
    seen = 'does not exist' if not path.exists() else 'has none'
    raise ValueError(
      f'No checkpoint: {path} {seen}. Expected a workdir, a checkpoint in it '
      '(WORKDIR/checkpoints/STEP), a weights file (.npz or .safetensors), or a '
      'folder with one.'
    )
  if step is not None and step not in steps:
    raise ValueError(f'{folder} has no step {step}; it has {steps}.')
  return folder / str(steps[-1] if step is None else step)


def load_params(
  path: PathLike, *, step: int | None = None, ema: bool | str = 'auto'
) -> tuple[dict[str, np.ndarray], epath.Path]:
  """Return the parameters of a checkpoint as numpy arrays.

  Args:
    path, step: see `find`.
    ema: True for the EMA of the parameters, False for the parameters, 'auto'
      for the EMA if the run kept one.

  Returns:
    ({path: np.ndarray}, directory of the checkpoint).
  """
  directory = find(path, step)
  return saved_params(directory, ema=ema).read(), directory


@dataclasses.dataclass(frozen=True)
class SavedParams:
  """Parameters in a checkpoint, of which only shapes have been read.

  Attributes:
    shapes: {path: ShapeDtypeStruct}.
    size: bytes of their files.
    read: function () -> {path: np.ndarray}.
  """

  shapes: dict[str, jax.ShapeDtypeStruct]
  size: int
  read: Callable[[], dict[str, np.ndarray]]


def saved_params(
  directory: epath.Path, *, ema: bool | str = 'auto'
) -> SavedParams:
  """Return the parameters in the directory of one checkpoint.

  Raises:
    ValueError: it has no EMA, or cannot be read. So does `read`.
  """
  has_ema = (directory / 'ema').exists()
  if ema is True and not has_ema:
    raise ValueError(f'{directory} has no EMA. Leave out ema=True.')
  item = directory / ('ema' if ema and has_ema else 'params')
  with _refused(directory), _handler() as handler:
    size = _size(item)
    recorded = checksums.Checksums.read(directory)
    abstract = _abstract(handler.metadata(item))
    shapes = tree.flatten(abstract)

  def read():
    restore_args = jax.tree.map(
      lambda _: ocp.RestoreArgs(restore_type=np.ndarray), abstract
    )
    with _refused(directory), _handler() as handler:
      params = tree.flatten(
        handler.restore(
          item, args=ocp.args.PyTreeRestore(restore_args=restore_args)
        )
      )
      if recorded and (found := recorded.difference({item.name: params})):
        raise Damaged(found)
      return params

  return SavedParams(shapes, size, read)


def items_of(state: Any) -> dict[str, Any]:
  """Return {item: tree} of a TrainState, as checkpoints have it."""
  items = {
    'params': state.params,
    'train': {
      'step': state.step,
      'opt_state': state.opt_state,
      'rng': state.rng,
    },
  }
  if state.ema is not None:
    items['ema'] = state.ema
  return items


def flat_items_of(state: Any) -> dict[str, dict[str, Any]]:
  """Return {item: {path: leaf}} of a TrainState."""
  return {k: tree.flatten(v) for k, v in items_of(state).items()}


def read_state(
  path: epath.Path, abstract_state: Any, batch_size: int | None
) -> tuple[Any, dict[str, Any], checksums.Checksums | None]:
  """Return (state, saved data, Checksums or None) of a checkpoint.

  The arrays are not compared with the checksums yet.

  Args:
    path: directory of the checkpoint.
    abstract_state, batch_size: see `Checkpointer.restore`.

  Raises:
    ValueError: the checkpoint has other arrays; with a diff.
    Damaged: the files are not what was written.
  """
  items = items_of(abstract_state)
  handler = ocp.StandardCheckpointHandler()
  with contextlib.closing(handler):
    with _reading(path):
      recorded = checksums.Checksums.read(path)
      if recorded:
        shapes = recorded.shapes()
      else:
        names = [k for k in ('params', 'train', 'ema') if (path / k).exists()]
        shapes = {
          k: tree.flatten(_abstract(handler.metadata(path / k))) for k in names
        }
    _check_fits(path, shapes, items)
    with _reading(path):
      saved = read_json(path / 'data' / 'metadata')
      restored = {
        k: handler.restore(path / k, args=ocp.args.StandardRestore(item))
        for k, item in items.items()
      }
  state = dataclasses.replace(
    abstract_state,
    params=restored['params'],
    ema=restored.get('ema'),
    **restored['train'],
  )
  if int(state.step) != int(path.name):
    raise Damaged(f'it holds step {int(state.step)}')
  if recorded:
    if recorded.data != checksums.of_json(saved):
      raise Damaged('its data position differs from its checksum')
  elif problem := _impossible(saved, int(path.name), batch_size):
    raise Damaged(problem)
  return state, saved, recorded


def not_checkpoints(directory: epath.Path) -> dict[str, str]:
  """Return {name: reason} of what is named like a step but is no checkpoint.

  Orbax would list, read and delete it. Other names do not matter to Orbax.
  """
  reasons: dict[str, str] = {}
  if not directory.exists():
    return reasons
  for path in directory.iterdir():
    if not workdirs.is_step(path.name):
      continue
    if not is_local(path) and not (path / 'commit_success.txt').exists():
      continue  # On object stores, a killed run leaves it; Orbax knows.
    try:
      if not (path / 'params').exists():
        raise Damaged('it is not a checkpoint, because it has no params')
      if (path / 'metrics').exists():
        with _reading(path):
          metrics = read_json(path / 'metrics' / 'metrics')
          recorded = checksums.Checksums.read(path)
        if recorded and recorded.metrics != checksums.of_json(metrics):
          raise Damaged('its metrics differ from their checksum')
    except Damaged as error:
      reasons[path.name] = str(error)
  return reasons


def _check_fits(path, shapes, items):
  """Raise ValueError, with a diff, if a checkpoint has other arrays."""
  if ('ema' in shapes) != ('ema' in items):
    has, needs = ('an', 'none') if 'ema' in shapes else ('no', 'one')
    raise ValueError(
      f"{path} has {has} 'ema'; this run needs {needs} (ema_decay). "
      f'{_OTHER_RUN}'
    )
  for name, item in items.items():
    want = {k: checksums.as_stored(v) for k, v in tree.flatten(item).items()}
    if lines := tree.diff(shapes.get(name, {}), want):
      raise ValueError(
        f'{path} does not fit this run. In {name!r} of the checkpoint (-), in '
        f'this run (+):\n{lines}\n{_OTHER_RUN}'
      )


def _impossible(saved, step, batch_size):
  """Return what is wrong with the data position of a checkpoint, or ''."""
  position = saved.get('position')
  if type(position) is not int or position < 0:
    return f'its data position is {position!r}, not a number of examples'
  steps = step + saved.get('batches_skipped', 0)
  if batch_size and position != steps * batch_size:
    return (
      f'its data position is {position}, but {steps} steps with batches of '
      f'{batch_size} use {steps * batch_size} examples'
    )
  return ''


class Damaged(Exception):
  """Error of a damaged checkpoint; its text is the end of a sentence."""


@contextlib.contextmanager
def _reading(path: epath.Path) -> Iterator[None]:
  """Turn whatever is raised on broken files into Damaged.

  Raises:
    MemoryError, JaxRuntimeError: of the run, such as too little memory. They
      say nothing about the files.
    ValueError: a file may not be read.
  """
  try:
    yield
  except (Damaged, MemoryError, jax.errors.JaxRuntimeError):
    raise
  except Exception as error:
    if 'RESOURCE_EXHAUSTED' in str(error):
      raise
    _check_permissions(path)
    text = ' '.join(str(error).replace(f'{path}/', '').split())
    problem = f'{type(error).__name__}: {text.removesuffix("."):.200}'
  else:
    return
  raise Damaged(problem)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Silence the coroutines that Orbax leaves behind when a read fails.

  Each would print a traceback when it is collected as garbage.
  """
  hook, logger = sys.unraisablehook, logging.getLogger('asyncio')
  before, logger.disabled = logger.disabled, True
  sys.unraisablehook = lambda _: None
  try:
    yield
  except Damaged as error:
    error.__context__ = None  # It holds Orbax's frames.
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')
      gc.collect()
    raise
  finally:
    sys.unraisablehook, logger.disabled = hook, before


@contextlib.contextmanager
def _refused(directory):
  """Raise ValueError if the files of a checkpoint are not what was written."""
  try:
    with quiet(), _reading(directory):
      yield
  except Damaged as error:
    raise ValueError(
      f'{directory} is damaged: {error}. Use another step, or another copy of '
      'it.'
    ) from error


def _check_permissions(path):
  """Raise ValueError if the user may not read a file of the checkpoint."""
  try:
    if path.is_dir():
      for inner in path.iterdir():
        _check_permissions(inner)
    else:
      with path.open('rb') as file:
        file.read(1)
  except PermissionError as error:
    raise ValueError(
      f'{path} cannot be read: {error.strerror}. Nothing is wrong with the '
      'checkpoint itself: get permission to read it, or move the checkpoint '
      'away to resume from an older one.'
    ) from error
  except OSError:
    pass  # It is damaged.


def _abstract(metadata):
  """Return a tree of ShapeDtypeStructs from the metadata of an item."""
  return jax.tree.map(
    lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype), metadata.tree
  )


def _handler():
  return contextlib.closing(ocp.PyTreeCheckpointHandler())


def _size(path):
  """Return the bytes of a file, or of all files in a folder.

  Raises:
    ValueError: a file of JSON is so large that parsing it takes all memory.
  """
  if path.is_dir():
    return sum(_size(inner) for inner in path.iterdir())
  size = path.stat().length
  is_json = path.name.startswith(('.z', 'zarr', '_', 'process_'))
  if is_json and size > LARGEST_JSON:
    raise ValueError(f'{path.name} has {size} bytes of JSON')
  return size

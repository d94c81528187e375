"""Asynchronous Orbax checkpoints of a training run.

A checkpoint at step n is the state after n steps. It is stored in
WORKDIR/checkpoints/n as the items 'params', 'ema' (if kept), 'train' (step,
optimizer state and rng) and 'record' (position in the training data, partial
means of metrics, and the dtype, shape and checksum of each array). A run
resumes bit for bit from the newest checkpoint that is whole.

Orbax and TensorStore store no checksum of the values: zarr3's crc32c covers the
index of a shard, and OCDBT's covers its B-tree. Ours is a 32-bit number that
depends on the values and their places, not on the sharding. A change within one
element always changes it; other changes go unnoticed with probability 2^-32.
"""

import dataclasses
import json
import logging
import math
import sys
import zlib
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers

from vit_jax import tree
from vit_jax.durations import Interval, Timeline, fraction
from vit_jax.io import terminal
from vit_jax.io.files import read_json
from vit_jax.parallel import hosts, sharding
from vit_jax.runs import workdirs
from vit_jax.types import Count, Kind, Kinds, PathLike, UserError, kind_of

# A stop saves without an evaluation, and Orbax warns each time.
logging.getLogger('absl').addFilter(
  lambda x: 'tracked_metric' not in str(x.msg)
)

# Odd numbers: multiplication by one is a bijection of 32-bit words.
_GOLDEN, _MIX = np.uint32(0x9E3779B9), np.uint32(0x85EBCA6B)


@dataclasses.dataclass(frozen=True)
class Checkpoints:
  """Rules for writing and keeping checkpoints.

  Attributes:
    every: time between checkpoints; None for one at the end. A run that is
      stopped also writes one. Training waits for a checkpoint before it begins
      the next.
    keep_last: number of newest checkpoints to keep.
    best_metric: 'EVALUATOR/METRIC'; the checkpoint with its best value is kept,
      too: the largest, unless lower is better.
  """

  every: Interval | None = None
  keep_last: Count = 1
  best_metric: str | None = None

  def open(
    self,
    workdir: PathLike,
    timeline: Timeline,
    eval_every: Mapping[str, int | None],
    kinds: Kinds | None = None,
  ) -> tuple['Checkpointer', int]:
    """Return the Checkpointer of a run, and the steps between checkpoints.

    `eval_every` is {name of each evaluator: steps between its runs, or None},
    `kinds` are those of their metrics.
    """
    every = timeline.steps(self.every) or timeline.steps(fraction(1))
    name = (self.best_metric or '').split('/')[0]
    if name and every % (eval_every.get(name) or every + 1):
      raise UserError(
        f'checkpoints.best_metric={self.best_metric!r}: no evaluator {name!r} '
        f'runs at each checkpoint, every {every} steps. Evaluators run every '
        f'{dict(eval_every)} steps.'
      )
    kind = kind_of(self.best_metric or '', kinds or {})
    return Checkpointer(workdir, self, kind), every


class Checkpointer:
  """Checkpoints in WORKDIR/checkpoints, kept by the rules."""

  def __init__(
    self,
    workdir: PathLike,
    rules: Checkpoints = Checkpoints(),
    kind: Kind = Kind(),
  ) -> None:
    self._best_metric = rules.best_metric
    self._sign = sign = -1 if kind.better == 'lower' else 1
    policies = [checkpoint_managers.LatestN(rules.keep_last)]
    best = None
    if rules.best_metric:
      best = checkpoint_managers.BestN(
        get_metric_fn=lambda metrics: sign * metrics[rules.best_metric],
        n=1,
        keep_checkpoints_without_metrics=False,
      )
      policies.append(best)
    self.directory = epath.Path(workdir).absolute() / 'checkpoints'
    if odd := sorted({*'*?[]\\'} & {*str(self.directory)}):
      raise UserError(
        f'--workdir={workdir}: Orbax cannot read checkpoints back from a path '
        f'with {" ".join(odd)}. Use another name. docs/faults.md rescues a run '
        'that has such a path.'
      )
    self.directory.mkdir(parents=True, exist_ok=True)  # raises for a file
    self._manager = ocp.CheckpointManager(
      self.directory,
      options=ocp.CheckpointManagerOptions(
        # The policies say what is kept, but only with best_fn does Orbax write
        # the metrics that it needs to know the best after a restart.
        best_fn=best and best.get_metric_fn,
        preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
      ),
    )

  def latest_step(self) -> int | None:
    """Return the step of the newest complete checkpoint, or None."""
    return self._manager.latest_step()

  def save(
    self,
    step: int,
    state: Any,
    data: Mapping[str, Any],
    metrics: Mapping[str, float] | None = None,
  ) -> None:
    """Start to write the state after so many steps; training can continue.

    `data` is the position in the training data as JSON values, and `metrics`
    are evaluation results of this step. Where the best metric has no value,
    such as of labels that a test set lacks, the loss decides.
    """
    if step == self.latest_step():
      return
    items, metrics, best = _items(state), {**(metrics or {})}, self._best_metric
    loss = f'{(best or "").partition("/")[0]}/loss'
    if best and best not in metrics and loss in metrics:
      terminal.say(
        f'{best} has no value: {loss} decides on the best checkpoint.'
      )
      metrics[best] = -self._sign * metrics[loss]
    self._manager.save(
      step,
      args=ocp.args.Composite(
        record=ocp.args.JsonSave(_record(items, data)),
        **{name: ocp.args.StandardSave(x) for name, x in items.items()},
      ),
      metrics=metrics if best in metrics else None,
      force=True,
    )

  def restore(self, abstract_state: Any) -> tuple[Any, dict[str, Any]]:
    """Return (state, data) of the newest whole checkpoint.

    Newer checkpoints that are damaged are reported and renamed, because the run
    will write these steps. All hosts take the same decision. The state has
    ShapeDtypeStructs with any shardings.
    """
    damaged: dict[int, str] = {}
    found: Any = None
    for step in sorted(self._manager.all_steps(), reverse=True):
      reason = ''
      try:
        found = self._read(step, abstract_state)
      except Exception as error:
        reason = _damage(error)
      if hosts.on_any(bool(reason)):
        damaged[step] = reason or 'another host cannot read it'
        continue
      for other, reason in damaged.items():
        name, path = f'damaged-{other}', self.directory / str(other)
        while (self.directory / name).exists():
          name += '+'
        if jax.process_index() == 0:
          path.rename(self.directory / name)
        terminal.say(f'{path} is damaged and was renamed to {name}: {reason}')
      if damaged:
        multihost_utils.sync_global_devices('damaged checkpoints')
        self._manager.reload()
      return found
    reasons = '\n'.join(f'  {step}: {x}' for step, x in damaged.items())
    raise UserError(
      f'{self.directory} has no whole checkpoint:\n{reasons}\nPut a good copy '
      'of one there, or train in another workdir.'
    )

  def _read(self, step, abstract_state):
    path, items = self.directory / str(step), _items(abstract_state)
    recorded = _recorded(path)
    _check_fits(path, recorded['arrays'], items)
    restore = {k: ocp.args.StandardRestore(x) for k, x in items.items()}
    found = self._manager.restore(step, args=ocp.args.Composite(**restore))
    _verify(recorded['arrays'], {name: found[name] for name in items})
    state = dataclasses.replace(
      abstract_state,
      params=found['params'],
      ema=found.get('ema'),
      **found['train'],
    )
    return state, recorded['data']

  def wait(self) -> None:
    """Wait until everything is written; raise the error if it failed."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Wait until everything is written, and release the directory.

    While another error is raised, several hosts do not wait: a host that has
    failed cannot finish a checkpoint with the others.
    """
    if sys.exception() is None or jax.process_count() == 1:
      self._manager.close()


class DoesNotFitError(UserError):
  """Error of a checkpoint that has other arrays than this run."""


def _damage(error):
  """Return why a checkpoint cannot be read; raise what is not its fault."""
  kept = MemoryError, jax.errors.JaxRuntimeError, DoesNotFitError
  if isinstance(error, kept):
    raise error
  return ' '.join(str(error).split())[:300] or type(error).__name__


def _items(state):
  """Return {item: tree} of a TrainState, as checkpoints have it."""
  train = {'step': state.step, 'opt_state': state.opt_state, 'rng': state.rng}
  if state.carried is not None:
    train['carried'] = state.carried
  items = {'params': state.params, 'train': train}
  return items if state.ema is None else {**items, 'ema': state.ema}


def _record(items, data):
  """Return the content of the item 'record'."""
  arrays = {}
  for name, item in items.items():
    flat = {k: _without_keys(x) for k, x in tree.flatten(item).items()}
    sums = checksums(flat)
    arrays[name] = {
      path: (x.dtype.name, x.shape, sums[path]) for path, x in flat.items()
    }
  content = {'arrays': arrays, 'data': {**data}}
  return {**content, 'checksum': _checksum_of_json(content)}


def _recorded(path):
  """Return {'arrays': ..., 'data': ...} of the item 'record'."""
  found = read_json(path / 'record' / 'metadata')
  if found.pop('checksum') != _checksum_of_json(found):
    raise UserError('Its record differs from its checksum.')
  return found


def _verify(arrays, items):
  """Raise UserError if an array of {item: tree} differs from its checksum."""
  bad = [
    f'{name}/{key}'
    for name, item in items.items()
    for key, found in checksums(tree.flatten(item)).items()
    if arrays[name][key][2] != found
  ]
  if bad:
    raise UserError(f'{len(bad)} arrays ({bad[0]}) differ from their checksum.')


def _check_fits(path, arrays, items):
  """Raise DoesNotFitError, with a diff, if a checkpoint has other arrays."""
  for name in dict.fromkeys([*items, *arrays]):
    found = {
      path: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
      for path, (dtype, shape, _) in arrays.get(name, {}).items()
    }
    wanted = tree.flatten(items.get(name, {}))
    wanted = {k: jax.eval_shape(_without_keys, x) for k, x in wanted.items()}
    if lines := tree.diff(found, wanted):
      raise DoesNotFitError(
        f'{path} does not fit this run. In {name!r} of the checkpoint (-), in '
        f'this run (+):\n{lines}\nUse the config that the run was started '
        'with, or another workdir. To start from its parameters only, set '
        'init_from in a new run.'
      )


def checksums(arrays: Mapping[str, Any]) -> dict[str, int]:
  """Return {name: checksum}, computed where the arrays are."""
  plain = {k: _without_keys(x) for k, x in arrays.items()}
  return {k: int(x) for k, x in sharding.reduce(_checksum, plain).items()}


def _checksum(array, xp):
  """Return the checksum of an array, uint32; xp is jax.numpy or numpy."""
  if array.dtype != bool:
    array = array.view(f'uint{8 * array.dtype.itemsize}')
  words = xp.atleast_1d(array).astype(xp.uint32)
  places = xp.indices(words.shape, xp.uint32, sparse=True)
  for axis, place in enumerate(places):
    stride = math.prod(words.shape[axis + 1 :]) * int(_GOLDEN) % 2**32
    words = words + place * np.uint32(stride)
  # A term is a bijection of its word.
  terms = (words ^ (words >> 16)) * _MIX
  terms = (terms ^ (terms >> 13)) * _GOLDEN
  return xp.sum(terms ^ (terms >> 16), dtype=xp.uint32)


def _without_keys(array):
  """Return the integers of an array of keys; any other array as it is."""
  is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
  return jax.random.key_data(array) if is_key else array


def _checksum_of_json(value):
  return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def load_params(
  path: PathLike,
  *,
  step: int | None = None,
  ema: bool | Literal['auto'] = 'auto',
) -> tuple[dict[str, np.ndarray], epath.Path]:
  """Return ({path: parameter, or its EMA by `ema`}, directory of them).

  `path` and `step` as in `workdirs.find_checkpoint`.
  """
  directory = workdirs.find_checkpoint(path, step)
  has_ema = (directory / 'ema').exists()
  if ema is True and not has_ema:
    raise UserError(f'{directory} has no EMA. Leave out ema=True.')
  item = 'ema' if ema and has_ema else 'params'
  try:
    arrays = _recorded(directory)['arrays']
    as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    args = tree.unflatten(dict.fromkeys(arrays[item], as_numpy))
    with ocp.PyTreeCheckpointer() as reader:
      folder = (directory / item).absolute()
      params = tree.flatten(reader.restore(folder, restore_args=args))
    _verify(arrays, {item: params})
  except Exception as error:
    raise UserError(
      f'{directory} is damaged: {_damage(error).rstrip(".")}. Put a good copy '
      f'there, or use another step of {workdirs.steps(directory.parent)}.'
    ) from error
  return params, directory

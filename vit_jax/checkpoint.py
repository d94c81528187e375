"""Checkpoints of everything a run is made of, and how parameters come to be.

Order of initialisation of a run:

1. the newest checkpoint in its own workdir: the run goes on, bit for bit;
2. `init_from`: parameters of another run, adapted (see `transfer.py`);
3. scratch.

A checkpoint at step n is the state after n steps. It lies in
workdir/checkpoints/n and has the items 'params', 'ema' (if kept), 'train'
(step, optimizer state and rng) and 'data' (position in the training data), so
that parameters can be read without knowing what trained them.
"""

import dataclasses

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers

from vit_jax import tree


class Checkpointer:
  """Asynchronous Orbax checkpoints in workdir/checkpoints.

  Args:
    workdir: local or any path epath understands (gs://...).
    keep_last: number of newest checkpoints kept.
    keep_every_steps: keep those whose step divides by this for good, or None.
    best_metric: e.g. 'val/accuracy': keep the best checkpoint by it, or None.
    best_mode: 'max' or 'min'.
    keep_best: number of best checkpoints kept.
  """

  def __init__(
    self,
    workdir,
    *,
    keep_last=1,
    keep_every_steps=None,
    best_metric=None,
    best_mode='max',
    keep_best=1,
  ):
    if keep_last < 1:
      raise ValueError(f'keep_last={keep_last} must be at least 1.')
    if best_mode not in ('max', 'min'):
      raise ValueError(f"best_mode={best_mode!r} must be 'max' or 'min'.")
    self.best_metric = best_metric
    policies = [checkpoint_managers.LatestN(keep_last)]
    if keep_every_steps:
      policies.append(checkpoint_managers.EveryNSteps(keep_every_steps))
    best = None
    if best_metric:
      best = checkpoint_managers.BestN(
        get_metric_fn=lambda metrics: metrics[best_metric],
        n=keep_best,
        reverse=best_mode == 'min',
        keep_checkpoints_without_metrics=False,
      )
      policies.append(best)
    self.directory = epath.Path(workdir) / 'checkpoints'
    self._manager = ocp.CheckpointManager(
      self.directory.absolute(),
      options=ocp.CheckpointManagerOptions(
        # What is kept is for the policies to say; but only with best_fn are
        # metrics written beside the checkpoint, and known after a restart.
        best_fn=best and best.get_metric_fn,
        best_mode=best_mode,
        preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
      ),
      item_handlers={
        'params': ocp.StandardCheckpointHandler(),
        'ema': ocp.StandardCheckpointHandler(),
        'train': ocp.StandardCheckpointHandler(),
        'data': ocp.JsonCheckpointHandler(),
      },
    )

  def latest_step(self):
    """Step of the newest whole checkpoint, or None."""
    return self._manager.latest_step()

  def restore(self, abstract_state, step=None):
    """The state, laid out as abstract_state's shardings say, and data position.

    Raises ValueError with a diff where the checkpoint's leaves are others.
    """
    step = self.latest_step() if step is None else step
    items = _state_items(abstract_state)
    saved = self._manager.item_metadata(step)
    if (saved.get('ema') is None) != ('ema' not in items):
      has, keeps = ('an', 'none') if 'ema' not in items else ('no', 'one')
      raise ValueError(
        f"{self.directory / str(step)} has {has} 'ema'; this run keeps "
        f'{keeps}. {_OTHER_RUN}'
      )
    for name, item in items.items():
      want = tree.flatten(jax.tree.map(_as_stored, item))
      have = tree.flatten(_abstract(saved[name]))
      if lines := tree.diff(have, want):
        raise ValueError(
          f'{self.directory / str(step)} does not fit this config: {name!r} '
          f'has (-), the config wants (+):\n{lines}\n{_OTHER_RUN}'
        )
    restored = self._manager.restore(
      step,
      args=ocp.args.Composite(
        data=ocp.args.JsonRestore(),
        **{k: ocp.args.StandardRestore(v) for k, v in items.items()},
      ),
    )
    state = dataclasses.replace(
      abstract_state,
      params=restored['params'],
      ema=restored.get('ema'),
      **restored['train'],
    )
    return state, restored['data']

  def save(self, step, state, data, metrics=None):
    """Starts to write a checkpoint; training can go on at once.

    Args:
      step: steps done.
      state: TrainState.
      data: what JSON can hold: the position in the training data.
      metrics: of evaluations at this step; must have `best_metric` if set.
    """
    if step == self.latest_step():
      return
    if self.best_metric and self.best_metric not in (metrics or {}):
      metrics = None  # kept by the other rules; cannot be the best
    self._manager.save(
      step,
      args=ocp.args.Composite(
        data=ocp.args.JsonSave(data),
        **{k: ocp.args.StandardSave(v) for k, v in _state_items(state).items()},
      ),
      metrics=metrics if self.best_metric else None,
      force=True,
    )

  def wait(self):
    """Waits until everything is written."""
    self._manager.wait_until_finished()

  def close(self):
    """Waits until everything is written, and lets go of the directory."""
    self.wait()
    self._manager.close()


_OTHER_RUN = (
  'Use the config the run was started with, or another workdir; to start '
  'from its parameters, set init_from in a run of its own.'
)


def _state_items(state):
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


def _as_stored(leaf):
  """Keys are stored as the integers that they are made of."""
  if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    return jax.eval_shape(jax.random.key_data, leaf)
  return leaf


def _abstract(metadata):
  """Tree of ShapeDtypeStructs of an item's metadata."""
  return jax.tree.map(
    lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype), metadata.tree
  )


def find(path, step=None):
  """The directory of one checkpoint: of a workdir, or named itself.

  Args:
    path: a workdir, its checkpoints folder, or one checkpoint (.../500).
    step: which of them; the newest if None.

  Raises:
    ValueError: nothing there, with what was found instead.
  """
  if path is None:
    raise ValueError(
      'Which checkpoint? init_from.path is not set; give a workdir, or one '
      'checkpoint in it: --config.init_from.path=WORKDIR'
    )
  path = epath.Path(path)
  if path.name.isdigit() and (path / 'params').exists():
    return path
  folder = path / 'checkpoints' if (path / 'checkpoints').exists() else path
  steps = []
  if folder.exists():
    # A checkpoint gets its own name only when it is whole.
    steps = sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit())
  if not steps:
    seen = 'does not exist' if not path.exists() else 'holds none'
    raise ValueError(
      f'No checkpoint: {path} {seen}. Expected a workdir, or one checkpoint '
      'in it (WORKDIR/checkpoints/STEP); other weights are a file (.npz or '
      '.safetensors), or a folder with one.'
    )
  if step is not None and step not in steps:
    raise ValueError(f'{folder} has no step {step}; it has {steps}.')
  return folder / str(steps[-1] if step is None else step)


def load_params(path, *, step=None, ema='auto'):
  """Parameters of one of our checkpoints as numpy, and where they lie.

  Args:
    path: see `find`.
    step: see `find`.
    ema: True for the averaged parameters, False for the raw ones, 'auto' for
      the averaged ones where the run kept them.

  Returns:
    ({path: np.ndarray}, directory of the checkpoint).
  """
  directory = find(path, step)
  has_ema = (directory / 'ema').exists()
  if ema is True and not has_ema:
    raise ValueError(f'{directory} has no EMA of its parameters (ema=True).')
  item = directory / ('ema' if ema and has_ema else 'params')
  handler = ocp.PyTreeCheckpointHandler()
  restore_args = jax.tree.map(
    lambda _: ocp.RestoreArgs(restore_type=np.ndarray),
    _abstract(handler.metadata(item)),
  )
  params = handler.restore(
    item, args=ocp.args.PyTreeRestore(restore_args=restore_args)
  )
  handler.close()
  return tree.flatten(params), directory
